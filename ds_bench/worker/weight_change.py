"""What training did to the weights, in a form small enough for a rank file, so that rows can be compared.

A count sketch (Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", 2002): every weight is
multiplied by a fixed sign and added to one of ``DIMENSIONS`` sums, both chosen by the name of its tensor and its place
in it. The sketch is linear: the sketch of the change is the difference of two sketches, and the sketch of the whole
model is the sum of those of the ranks. No rank gathers anything or waits for another: each reads its own fp32 master
weights where DeepSpeed keeps them.

Cost: one pass over the rank's own share of the weights, twice, in pieces of 0.5 MB; the heartbeat goes on. A pass is
given up with a note when it takes longer than ``MOST_SECONDS``. Weights on a disk are read through DeepSpeed's own
buffers, one sub-group after another.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed

from ..records.rank_files import HeartbeatWriter

DIMENSIONS = 256
"""Sums in a sketch: a norm taken from it is within some 10 % (√(2/256) is 0.09), the same error in every row."""
MOST_SECONDS = 60.0
"""Longest time that one pass over a rank's weights may take. One core was seen to read some 300 million a second: 23 s
for the 7 billion of one rank whose optimizer is on the CPU, 29 s for an eighth of 70 billion."""
_PERIOD = 256 * DIMENSIONS
_SIGN_SEED = 2002
_DIGITS = 9

Fragment = tuple[str, int, torch.Tensor]


class NotReadError(Exception):
    """The weights of this engine are not read, for the reason that the text says."""


class WeightChange:
    """The sketch of a rank's weights as training begins, for the difference at its end."""

    def __init__(self, engine: Any, beat: HeartbeatWriter) -> None:
        self._engine = engine
        self._beat = beat
        self.note: str | None = None
        """Why there is no sketch; None where there is one."""
        self._before = self._read()

    def since_start(self) -> list[float] | None:
        """The sketch of what changed in this rank's share since the start; None, with a note, where it was not had."""
        after = None if self._before is None else self._read()
        if self._before is None or after is None:
            return None
        return [float(f"{value:.{_DIGITS}g}") for value in (after - self._before).tolist()]

    def _read(self) -> torch.Tensor | None:
        try:
            return sketch(fragments(self._engine), self._beat)
        except NotReadError as reason:
            self.note = f"the weights' change was not measured: {reason}"
        except (AttributeError, AssertionError, KeyError, RuntimeError, TypeError) as error:  # DeepSpeed's internals
            self.note = f"the weights' change was not measured ({type(error).__name__}: {str(error)[:200]})"
        return None


def sketch(parts: Iterator[Fragment], beat: HeartbeatWriter | None = None) -> torch.Tensor:
    """The count sketch of these fragments, float64, on the CPU. Raises NotReadError when it takes too long."""
    deadline = time.monotonic() + MOST_SECONDS
    signs_on: dict[torch.device, torch.Tensor] = {}
    total = torch.zeros(DIMENSIONS, dtype=torch.float64)
    with torch.no_grad():
        for name, start, values in parts:
            if values.device not in signs_on:
                generator = torch.Generator().manual_seed(_SIGN_SEED)
                signs = torch.randint(0, 2, (_PERIOD,), generator=generator) * 2 - 1
                signs_on[values.device] = signs.to(device=values.device, dtype=torch.float64)
            signs = signs_on[values.device]
            sums = torch.zeros(DIMENSIONS, dtype=torch.float64, device=values.device)
            place, done = (start + zlib.crc32(name.encode())) % _PERIOD, 0
            while done < values.numel():
                taken = min(_PERIOD - place, values.numel() - done)
                signed = values[done : done + taken].double() * signs[place : place + taken]
                lead, rows = place % DIMENSIONS, -(-(place % DIMENSIONS + taken) // DIMENSIONS)
                padding = (lead, rows * DIMENSIONS - lead - taken)
                if padding != (0, 0):
                    signed = torch.nn.functional.pad(signed, padding)
                sums += signed.view(rows, DIMENSIONS).sum(0)
                place, done = (place + taken) % _PERIOD, done + taken
                if time.monotonic() > deadline:
                    raise NotReadError(f"reading them took longer than {MOST_SECONDS:.0f} s")
                if beat is not None:
                    beat.beat(beat.phase)
            total += sums.cpu()
    return total


def fragments(engine: Any) -> Iterator[Fragment]:
    """This rank's share of the trained weights: name of the tensor, place in it, and the values flat, fp32 where kept.

    Every weight is on one rank. Raises NotReadError where the shares do not make up the model.
    """
    if int(getattr(engine, "dp_world_size", 1)) != torch.distributed.get_world_size():
        raise NotReadError("tensors are split over ranks that are not data-parallel")
    names = {id(parameter): name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    wrapper = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        yield from _partitions(wrapper, names)
    elif engine.zero_optimization_stage() > 0:
        yield from _linked_fragments(engine, names)
    elif torch.distributed.get_rank() == 0:  # every rank holds all of them
        for trained, master in _replicated(wrapper):
            yield names[id(trained)], 0, master.detach().flatten()


def _replicated(wrapper: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Stage 0: each parameter with its fp32 master (fp16/fused_optimizer.py, fp16/unfused_optimizer.py), or itself."""
    if hasattr(wrapper, "fp32_groups_flat"):
        for group, flat in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
            yield from zip(group, flat.split([parameter.numel() for parameter in group]), strict=True)
    elif hasattr(wrapper, "fp32_groups"):
        for group, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            yield from zip(group, masters, strict=True)
    else:
        for group in wrapper.param_groups:
            yield from ((parameter, parameter) for parameter in group["params"] if parameter.requires_grad)


def _linked_fragments(engine: Any, names: dict[int, str]) -> Iterator[Fragment]:
    """Stages 1 and 2: the part of each parameter that lies in this rank's partition (utils/tensor_fragment.py)."""
    for parameter in engine.module.parameters():
        if id(parameter) not in names:
            continue
        linked = parameter._hp_mapping
        if linked is not None:
            yield names[id(parameter)], linked.lp_fragment_address.start, linked.get_hp_fragment().detach()


def _partitions(wrapper: Any, names: dict[int, str]) -> Iterator[Fragment]:
    """Stage 3: this rank's slice of each parameter, sub-group by sub-group."""
    for index, (group, flat) in enumerate(zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True)):
        with _in_memory(wrapper, index, flat):
            offset = 0
            for parameter in group:
                size = parameter.partition_numel()
                start = parameter.ds_zero_partition_rank * size
                own = max(0, min(size, parameter.ds_numel - start))  # the last slices are padded
                yield names[id(parameter)], start, flat.detach()[offset : offset + own]
                offset += size


@contextlib.contextmanager
def _in_memory(wrapper: Any, index: int, flat: torch.Tensor) -> Iterator[None]:
    """Stage 3: a sub-group whose optimizer state lies on a disk is in memory for as long as this lasts."""
    if not wrapper._swappable_optimizer_subgroup(index):
        yield
        return
    # No next sub-group is read ahead: where reading is given up before that one, training would find the wrong one.
    wrapper.optimizer_swapper.swap_in_optimizer_state(parameter=flat, async_parameter=None)
    try:
        yield
    finally:
        wrapper._release_swap_buffers(index)
