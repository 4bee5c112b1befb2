"""Stage 3: how many parameters are gathered at once, by following DeepSpeed's fetch and release over one step.

A model of ``zero/partitioned_param_coordinator.py`` of DeepSpeed 0.19.8 (fetch_sub_module, release_sub_module,
__params_to_release) with a complete trace. Every tensor stands for a module of its own, used in the order in which the
model lists them, forward and then backward; a real module gathers its weight and bias together, which adds little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .inputs import MemoryCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Elements of whole tensors on the accelerator beside the rank's own parts, in training."""

    persistent: int
    """Of the tensors small enough to stay, between steps."""
    peak: int
    """At most, in forward or backward, persistent ones included."""


def gathered(case: MemoryCase) -> Gathered:
    """What is gathered; nothing where the whole tensor is the rank's own part and lies on the accelerator already."""
    tensors, settings = case.profile.tensors, case.settings
    if case.data_parallel_size == 1 and (settings.offload_param is None or case.accelerator == "cpu"):
        return Gathered(persistent=0, peak=0)
    ranks = case.data_parallel_size
    sizes = [-(-elements // ranks) * ranks for elements in tensors]
    small = [elements <= settings.persistence_elements for elements in tensors]
    persistent = sum(size for size, stays in zip(sizes, small, strict=True) if stays)
    moving = [number for number, stays in enumerate(small) if not stays]
    order = _order(moving, tied=case.profile.tied_embeddings)
    return Gathered(persistent=persistent, peak=persistent + _peak(order, sizes, case))


def _order(moving: Sequence[int], *, tied: bool) -> list[int]:
    """The tensors as one step uses them; a tied embedding again as LM head."""
    forward = list(moving)
    if tied and forward and forward[0] == 0:
        forward.append(0)
    return forward + forward[::-1]


def _peak(order: Sequence[int], sizes: Sequence[int], case: MemoryCase) -> int:
    walked = [0, *accumulate(sizes[number] for number in order)]
    uses: dict[int, list[int]] = {}
    for step, number in enumerate(order):
        uses.setdefault(number, []).append(step)
    live: set[int] = set()
    elements = most = queued = 0
    fetched_for: dict[int, int] = {}
    for step, number in enumerate(order):
        if number not in live:
            live.add(number)
            elements += sizes[number]
        queued = max(queued, step + 1)
        fetched_for[number] = max(fetched_for.get(number, -1), step)
        room, ahead = min(case.settings.max_live_elements - elements, case.settings.prefetch_elements), 0
        while queued < len(order) and ahead < room:  # the tensor that crosses the limit still comes
            coming = order[queued]
            fetched_for[coming] = queued
            if coming not in live:
                live.add(coming)
                elements += sizes[coming]
                ahead += sizes[coming]
            queued += 1
        most = max(most, elements)
        if fetched_for[number] <= step and not _used_soon(uses[number], step, walked, case.settings.max_reuse_elements):
            live.discard(number)
            elements -= sizes[number]
    return most


def _used_soon(uses: Sequence[int], step: int, walked: Sequence[int], distance: int) -> bool:
    """Whether the tensor comes up again before ``distance`` elements of others have."""
    position = bisect_right(uses, step)
    return position < len(uses) and walked[uses[position]] - walked[step + 1] < distance
