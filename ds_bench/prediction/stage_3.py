"""Memory of one rank at ZeRO stage 3, by formula: partitions on three tiers, buffers, and gathered parameters.

Written from DeepSpeed 0.19.8; the paths in docstrings are below its ``runtime/``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .inputs import NORM_BYTES, LedgerBuilder, MemoryInputs, Phases
from .model_states import FP32_BYTES, partition_elements

_NORM_PIECE_ELEMENTS = 250_000_000
"""Elements whose norm is taken at once with the optimizer offloaded (zero/stage3.py, _constant_buffered_norm2)."""


def ledger_by_phase(case: MemoryInputs) -> Phases:
    """One rank's ledgers at stage 3."""
    parts = [partition_elements([elements], case.data_parallel_size) for elements in case.profile.tensors]
    groups = _sub_groups(parts, case.settings.sub_group_elements)
    whole, builder = gathered_elements(case), LedgerBuilder()
    _parameters(case, parts, groups, builder)
    _states(case, groups, builder)
    builder.add("gpu", "deepspeed_buffers", _bucket(case))
    _flat_gradients(case, sum(parts), builder)
    resting = ("gpu", "parameters", case.element * whole.persistent)
    moving = ("gpu", "gathered_parameters", case.element * (whole.peak - whole.persistent))
    forward = builder.plus(resting, moving)
    return {
        "forward": forward,
        "backward": builder.plus(resting, moving, ("gpu", "temporaries", _in_flight(case) + _norm(case, parts))),
        "reduced": builder.plus(resting),
        **_step(case, groups, builder),
    }


def _sub_groups(parts: Iterable[int], limit: int) -> list[list[int]]:
    """Tensors' parts in the groups that are updated together (zero/stage3.py, _create_fp16_sub_groups)."""
    groups: list[list[int]] = [[]]
    for part in parts:
        if limit and sum(groups[-1]) >= limit:
            groups.append([])
        groups[-1].append(part)
    return groups


def _aligned(elements: int, size: int, case: MemoryInputs) -> int:
    """Elements padded to whole blocks of I/O."""
    unit = case.settings.swap_alignment_bytes // size
    return -(-elements // unit) * unit


def _swapped(elements: int, size: int, case: MemoryInputs) -> bool:
    return elements * size >= case.settings.swap_threshold_bytes


def _parameters(case: MemoryInputs, parts: list[int], groups: list[list[int]], builder: LedgerBuilder) -> None:
    """The rank's own parts (zero/stage3.py, _create_fp16_partitions_with_defragmentation)."""
    place, size = case.settings.offload_param, case.element
    if place is None:
        builder.add("gpu", "parameters", size * sum(parts))
    elif place == "cpu":
        builder.pinned("parameters", size * sum(parts), pinned=_pins(case, wanted=True))
    else:
        _parameters_on_disk(case, groups, builder)


def _pins(case: MemoryInputs, *, wanted: bool) -> bool:
    return wanted and case.accelerator == "cuda"  # a no-op on the CPU accelerator


def _parameters_on_disk(case: MemoryInputs, groups: list[list[int]], builder: LedgerBuilder) -> None:
    """Tensors below the threshold stay in memory; a pool of the largest group's *whole* size writes the updated ones
    back (zero/stage3.py; swap_tensor/partitioned_param_swapper.py, reserve_partitioned_swap_space)."""
    settings, size = case.settings, case.element
    room = settings.max_in_cpu_elements
    in_memory = 0
    on_disk: list[list[int]] = []
    for group in groups:
        if in_memory + sum(group) <= room:
            in_memory += sum(group)
        else:
            on_disk.append(group)
    flat = min(room, sum(map(sum, groups))) or 1
    builder.pinned("parameters", size * flat, pinned=_pins(case, wanted=True))
    for part in (part for group in on_disk for part in group):
        swapped = _swapped(part, size, case)
        builder.add(
            "nvme" if swapped else "cpu", "parameters", size * (_aligned(part, size, case) if swapped else part)
        )
    _swap_file_of_tied_head(case, builder)
    buffer = _aligned(settings.param_buffer_elements, size, case)
    builder.add("cpu", "deepspeed_buffers", size * buffer * settings.param_buffers)
    if on_disk:
        builder.add("cpu", "deepspeed_buffers", size * _write_back_elements(case, groups))


def _write_back_elements(case: MemoryInputs, groups: list[list[int]]) -> int:
    tensors, start, largest, whole = case.profile.tensors, 0, -1, 0
    for group in groups:
        members = tensors[start : start + len(group)]
        start += len(group)
        if sum(group) > largest:
            largest = sum(group)
            whole = sum(_aligned(elements, case.element, case) for elements in members)
    return whole


def _swap_file_of_tied_head(case: MemoryInputs, builder: LedgerBuilder) -> None:
    """``zero.Init`` swaps the LM head out before Transformers ties it to the embedding; its file stays."""
    if not case.profile.tied_embeddings:
        return
    part = partition_elements(case.profile.tensors[:1], case.data_parallel_size)
    if _swapped(part, case.element, case):
        builder.add("nvme", "parameters", case.element * _aligned(part, case.element, case))


def _states(case: MemoryInputs, groups: list[list[int]], builder: LedgerBuilder) -> None:
    """Master, moments and, offloaded, the fp32 gradient (zero/stage3.py, _create_fp32_partitions,
    initialize_optimizer_states); Twin-Flow leaves the first sub-groups on the accelerator."""
    settings = case.settings
    kept_on_gpu = int((1 - settings.offload_ratio) * len(groups)) if settings.offload_optimizer else len(groups)
    swaps = settings.offload_optimizer == "nvme"
    for number, group in enumerate(groups):
        count = sum(group)
        if swaps and _swapped(count, FP32_BYTES, case):
            _swapped_states(case, group, builder)
            continue
        tier = "gpu" if number < kept_on_gpu else "cpu"
        builder.add(tier, "optimizer_states", case.state * count)
        if settings.offload_optimizer and tier == "gpu":
            builder.add("gpu", "gradients", FP32_BYTES * count)
        elif settings.offload_optimizer:
            builder.pinned("gradients", FP32_BYTES * count, pinned=_pins(case, wanted=settings.pin_optimizer))
    if swaps:
        largest = _aligned(max(map(sum, groups)), FP32_BYTES, case)
        builder.add("cpu", "deepspeed_buffers", FP32_BYTES * largest * settings.optimizer_buffers)


def _swapped_states(case: MemoryInputs, group: list[int], builder: LedgerBuilder) -> None:
    """One file per state, and one per gradient that is large enough; the others wait in memory. A last incomplete block
    waits too, as a view that keeps its whole tensor (swap_tensor/optimizer_utils.py, _swap_out_gradients,
    _adjust_for_misaligned_lengths)."""
    unit = case.settings.swap_alignment_bytes // FP32_BYTES
    builder.add("nvme", "optimizer_states", case.state * _aligned(sum(group), FP32_BYTES, case))
    for part in group:
        written = part // unit * unit if _swapped(part, FP32_BYTES, case) else 0
        builder.add("nvme", "optimizer_states", FP32_BYTES * written)
        builder.add("cpu", "deepspeed_buffers", FP32_BYTES * (part if part != written else 0))


def _bucket(case: MemoryInputs) -> int:
    """Held for good, at full size whatever the model's (zero/stage3.py, _setup_for_real_optimizer)."""
    return case.element * case.settings.reduce_bucket_elements if case.settings.contiguous_gradients else 0


def _flat_gradients(case: MemoryInputs, part: int, builder: LedgerBuilder) -> None:
    """The part's accumulated gradients, held for good where the optimizer steps (grad_partitions_flat_buffer)."""
    if case.settings.offload_optimizer:
        pinned = _pins(case, wanted=case.settings.pin_optimizer)
        builder.pinned("gradients", case.accumulated * part, pinned=pinned)
    else:
        builder.add("gpu", "gradients", case.accumulated * part)


def _in_flight(case: MemoryInputs) -> int:
    """The largest gradient before it is split, and the interleaved copy of a bucket that reduce-scatter sends
    (comm/coalesced_collectives.py)."""
    copy = min(case.settings.reduce_bucket_elements, case.profile.parameters) if case.data_parallel_size > 1 else 0
    return case.element * (max(case.profile.tensors) + copy)


def _norm(case: MemoryInputs, parts: Sequence[int]) -> int:
    """With the optimizer offloaded, the largest part's gradient on the accelerator, and the fp64 copy of it, in pieces,
    that its norm is taken of (zero/stage3.py, partition_grads, _constant_buffered_norm2)."""
    if not case.settings.offload_optimizer:
        return 0
    return case.accumulated * max(parts) + NORM_BYTES * min(max(parts), _NORM_PIECE_ELEMENTS)


def _step(case: MemoryInputs, groups: list[list[int]], builder: LedgerBuilder) -> Phases:
    """The norm of one tensor's part at a time, in fp64 (zero/stage3.py, get_grad_norm_direct); then one sub-group at
    a time: flattened, then cast to fp32 (_prepare_fp32_grad_for_sub_group)."""
    if case.settings.offload_optimizer:
        return {"flatten": builder.ledger, "update": builder.ledger}
    largest, norm = max(map(sum, groups)), NORM_BYTES * max(part for group in groups for part in group)
    cast = FP32_BYTES if case.accumulated != FP32_BYTES else 0
    update = max(cast, case.accumulated) + case.torch_step
    return {
        "flatten": builder.plus(("gpu", "temporaries", max(norm, (case.accumulated + cast) * largest))),
        "update": builder.plus(("gpu", "temporaries", update * largest)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredElements:
    """Elements of whole parameter tensors that a rank holds on the accelerator besides its own partition."""

    persistent: int
    """Elements of the tensors below the persistence threshold, which stay gathered between steps."""
    peak: int
    """Largest number at any moment of forward and backward, persistent ones included."""


def gathered_elements(case: MemoryInputs) -> GatheredElements:
    """Elements gathered in one step, by following DeepSpeed's fetch and release.

    A model of DeepSpeed 0.19.8, ``zero/partitioned_param_coordinator.py`` (fetch_sub_module, release_sub_module,
    __params_to_release), with a complete trace. Each tensor counts as a module of its own, used in the order in which
    the model lists them, forward and then backward. A real module gathers its weight and bias together, which adds
    little. Zero on a single rank whose whole parameters are on the accelerator already.
    """
    tensors, settings = case.profile.tensors, case.settings
    if case.data_parallel_size == 1 and (settings.offload_param is None or case.accelerator == "cpu"):
        return GatheredElements(persistent=0, peak=0)
    ranks = case.data_parallel_size
    sizes = [-(-elements // ranks) * ranks for elements in tensors]
    small = [elements <= settings.persistence_elements for elements in tensors]
    persistent = sum(size for size, stays in zip(sizes, small, strict=True) if stays)
    forward = [number for number, stays in enumerate(small) if not stays]
    if case.profile.tied_embeddings and forward[:1] == [0]:
        forward.append(0)  # a tied embedding is used again as LM head
    order = forward + forward[::-1]
    return GatheredElements(persistent=persistent, peak=persistent + _peak_elements(order, sizes, case))


def _peak_elements(order: Sequence[int], sizes: Sequence[int], case: MemoryInputs) -> int:
    """Largest sum of the sizes of the tensors that are gathered at once; ``order`` lists the uses of one step.

    At each use the tensor itself is fetched, then those of the next uses while both limits (prefetch bucket, live
    parameters) leave something. After it the tensor is released, unless it was fetched for a later use too, or that
    comes within the reuse distance.
    """
    elements_before = [0, *accumulate(sizes[number] for number in order)]
    uses: dict[int, list[int]] = {}
    for step, number in enumerate(order):
        uses.setdefault(number, []).append(step)
    live: set[int] = set()
    elements = peak = queued = 0
    fetched_for: dict[int, int] = {}
    for step, number in enumerate(order):
        if number not in live:
            live.add(number)
            elements += sizes[number]
        queued = max(queued, step + 1)
        fetched_for[number] = max(fetched_for.get(number, -1), step)
        allowed = min(case.settings.max_live_elements - elements, case.settings.prefetch_elements)
        ahead = 0
        while queued < len(order) and ahead < allowed:  # the tensor that crosses the limit still comes
            following = order[queued]
            fetched_for[following] = queued
            if following not in live:
                live.add(following)
                elements += sizes[following]
                ahead += sizes[following]
            queued += 1
        peak = max(peak, elements)
        next_use = bisect_right(uses[number], step)
        used_soon = next_use < len(uses[number]) and (
            elements_before[uses[number][next_use]] - elements_before[step + 1] < case.settings.max_reuse_elements
        )
        if fetched_for[number] <= step and not used_soon:
            live.discard(number)
            elements -= sizes[number]
    return peak
