"""Sketches how training changed the weights, so that rows can be compared; a sketch fits in a rank file.

A count sketch (Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", 2002): every weight is
multiplied by a fixed sign and added to one of ``DIMENSIONS`` sums; its tensor's name and its index in that tensor
select both. The sketch is linear: the sketch of the change is the difference of two sketches, and the sketch of the
whole model is the sum of the ranks' sketches. No rank gathers anything or waits for another: each reads its own fp32
master weights where DeepSpeed keeps them. Only AutoTP, which may cut tensors along any dimension, gathers them layer by
layer.

Cost: up to four passes over the rank's own share of the weights, more if a checkpoint is checked, in pieces of 0.5 MB;
the heartbeat continues. A pass that takes longer than ``MAX_SECONDS`` ends with a note instead of a sketch. Weights on
disk are read through DeepSpeed's own buffers, one sub-group at a time.
"""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed

from ..config.spec import block_of
from ..records.rank_files import HeartbeatWriter
from .library_versions import is_partitioned_at_stage_0, partition_rank
from .reference_engines import ReferenceEngine

EARLY_STEPS = 5
"""Optimizer steps over which weight changes are compared, however long the trial is."""
DIMENSIONS = 256
"""Sums in a sketch: the standard error of a norm computed from it is about 4 % (half that of its square, √(2/256))."""
MAX_SECONDS = 60.0
"""Limit for one pass over a rank's weights. One core reads about 300 million per second: 23 s for 7 billion on one rank
with a CPU optimizer, 29 s for an eighth of 70 billion."""
# Number of signs, 0.5 MB in float64. A multiple of DIMENSIONS, so that wrapping around keeps each value in its sum.
_PERIOD = 256 * DIMENSIONS
_SIGN_SEED = 2002
_DIGITS = 9
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → integer type of that size."""
_PIECE_ELEMENTS = 2**22
"""Elements of a frozen tensor summed at a time; in int64 each takes 8 bytes."""

Fragment = tuple[str, int, torch.Tensor]
"""Name of a tensor, index of the first value in it, and the values, flat."""


class NotReadError(Exception):
    """The weights of this engine cannot be read; the text says why."""


class WeightChange:
    """Sketches a rank's weights when training begins, and their change at the end."""

    def __init__(self, engine: Any, heartbeat: HeartbeatWriter) -> None:
        self._engine = engine
        self._heartbeat = heartbeat
        self.note: str | None = None
        """Why there is no sketch; None if there is a sketch."""
        self._before = self._read()
        self._early_start, self.early_window = self._before, dict[str, Any]()

    def since_start(self) -> list[float] | None:
        """Return the sketch of this rank's changes since the start; None if not finite or not read (``note``)."""
        return self._since(self._before)

    def watch(self, window: range, skipped_steps: Callable[[], int]) -> list[tuple[int, Callable[[], None]]]:
        """Return pairs of a number of steps and the call to make after them; the calls fill ``early_window``."""

        def start() -> None:
            # The weights before the first step have been read already.
            self._early_start = self._read() if window.start else self._before
            self.early_window = {"first_step": window.start, "steps": len(window), "skipped_steps": -skipped_steps()}

        def stop() -> None:
            self.early_window["skipped_steps"] += skipped_steps()
            self.early_window["weight_change"] = self._since(self._early_start)

        return [(window.start, start), (window.stop, stop)] if window else []

    def _since(self, before: torch.Tensor | None) -> list[float] | None:
        after = None if before is None else self._read()
        if before is None or after is None or not torch.isfinite(change := after - before).all():
            return None
        return [float(f"{value:.{_DIGITS}g}") for value in change.tolist()]

    def _read(self) -> torch.Tensor | None:
        try:
            return sketch(read_fragments(self._engine), self._heartbeat)
        except NotReadError as reason:
            self.note = f"the change in weights was not measured: {reason}"
        except (AttributeError, AssertionError, KeyError, RuntimeError, TypeError) as error:  # DeepSpeed's internals
            self.note = f"the change in weights was not measured ({type(error).__name__}: {str(error)[:200]})"
        return None


class FrozenWeights:
    """Finds changes in a rank's share of the frozen parameters since training began.

    It compares sums of the values' bits, which an update hardly ever leaves unchanged.
    """

    def __init__(self, engine: Any, heartbeat: HeartbeatWriter) -> None:
        self._engine, self._heartbeat = engine, heartbeat
        self._before = self._read()

    def have_changed(self) -> bool | None:
        """None if no parameter is frozen, or none could be read."""
        if not self._before:
            return None
        # A tensor that could not be read at the start counts as unchanged.
        return any(self._before.get(name, sums) != sums for name, sums in self._read().items())

    def _read(self) -> dict[str, list[int]]:
        """Return the sums of the pieces of each tensor in memory, by name."""
        deadline = time.monotonic() + MAX_SECONDS
        sums: dict[str, list[int]] = {}
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad or time.monotonic() > deadline:
                continue
            split: Any = getattr(parameter, "ds_tensor", None)  # at stage 3, perhaps on a disk
            held = getattr(parameter, "_local_tensor", parameter) if split is None else split
            on_disk = split is not None and split.status.name != "AVAILABLE"
            if not on_disk and held.numel() and held.element_size() in _BITS:
                bits = held.detach().contiguous().flatten().view(_BITS[held.element_size()])
                pieces = (bits[start : start + _PIECE_ELEMENTS] for start in range(0, len(bits), _PIECE_ELEMENTS))
                sums[name] = [int(piece.sum(dtype=torch.int64)) for piece in pieces]
                self._heartbeat.beat(self._heartbeat.phase)
        return sums


def sketch(fragments: Iterator[Fragment], heartbeat: HeartbeatWriter | None = None) -> torch.Tensor:
    """Return the count sketch of the fragments, float64, on the CPU. Raises NotReadError if it takes too long."""
    deadline = time.monotonic() + MAX_SECONDS
    signs_on: dict[torch.device, torch.Tensor] = {}
    total = torch.zeros(DIMENSIONS, dtype=torch.float64)
    with torch.no_grad():
        for name, start, values in fragments:
            if values.device not in signs_on:
                # Drawn on the CPU: other devices' generators differ, and the ranks' sketches are added up.
                generator = torch.Generator().manual_seed(_SIGN_SEED)
                signs = torch.randint(0, 2, (_PERIOD,), generator=generator) * 2 - 1
                signs_on[values.device] = signs.to(device=values.device, dtype=torch.float64)
            signs = signs_on[values.device]
            sums = torch.zeros(DIMENSIONS, dtype=torch.float64, device=values.device)
            # Value i uses the sign at (i + hash of its tensor's name) % _PERIOD and the sum at that % DIMENSIONS.
            position, done = (start + zlib.crc32(name.encode())) % _PERIOD, 0
            while done < values.numel():
                taken = min(_PERIOD - position, values.numel() - done)
                # In float64: the sketch of a change is the small difference of two large sums.
                signed = values[done : done + taken].double() * signs[position : position + taken]
                # Zeros on both sides fill up the rows; each column belongs to one sum.
                before, rows = position % DIMENSIONS, -(-(position % DIMENSIONS + taken) // DIMENSIONS)
                after = rows * DIMENSIONS - before - taken
                if before or after:
                    signed = torch.nn.functional.pad(signed, (before, after))
                sums += signed.view(rows, DIMENSIONS).sum(0)
                position, done = (position + taken) % _PERIOD, done + taken
                if time.monotonic() > deadline:
                    raise NotReadError(f"reading them took longer than {MAX_SECONDS:.0f} s")
                if heartbeat is not None:
                    heartbeat.beat(heartbeat.phase)
            total += sums.cpu()
    return total


def early_window(config: Mapping[str, Any], warmup_steps: int) -> range:
    """Return the steps over which weight changes are compared: at most ``EARLY_STEPS``, all of them warm-up steps.

    They follow the scheduler's learning-rate warm-up or, if that lasts too long, are the last of the trial's warm-up:
    reading the weights must not take time in the measured window. Empty without warm-up steps.
    """
    scheduler = block_of(config, "scheduler")
    default = 1000 if str(scheduler.get("type", "")).startswith("Warmup") else 0  # runtime/lr_schedules.py
    configured = block_of(scheduler, "params").get("warmup_num_steps")
    rising = int(configured) if isinstance(configured, (int, float)) else default
    start = max(0, min(rising, warmup_steps - EARLY_STEPS))
    return range(start, min(start + EARLY_STEPS, warmup_steps))


def read_fragments(engine: Any) -> Iterator[Fragment]:
    """Yield this rank's share of the trained weights, in fp32 if DeepSpeed keeps them in fp32.

    Together the ranks' shares hold each weight exactly once. Raises NotReadError if they would not.
    """
    if isinstance(engine, ReferenceEngine):
        yield from engine.weight_fragments()
        return
    # ZeRO also shards over sequence-parallel ranks, which only seq_dp_world_size counts.
    tensor_size = torch.distributed.get_world_size() // int(engine.seq_dp_world_size)
    if tensor_size == 1:
        yield from _own_fragments(engine)
        return
    if tensor_size != engine.autotp_size():
        raise NotReadError("tensors are split over ranks that are not data-parallel")
    held = list(_own_fragments(engine))

    def masters(name: str, parameter: torch.Tensor) -> torch.Tensor:
        part = torch.zeros(parameter.numel(), device=parameter.device)  # other data-parallel ranks hold the rest
        for start, values in ((start, values) for own, start, values in held if own == name):
            part[start : start + values.numel()] = values
        return part.view(parameter.shape)

    for name, whole in gather_tensor_parallel(engine.module, masters):
        yield name, 0, whole.flatten()


def gather_tensor_parallel(
    model: torch.nn.Module, part_of: Callable[[str, torch.Tensor], torch.Tensor | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole value of each trained tensor, on the first rank of a tensor-parallel group.

    All ranks of a group must iterate. ``part_of`` returns values in the shape of this rank's part, or None for zeros.
    Raises RuntimeError for a layer that DeepSpeed cannot gather (module_inject/layers.py, gather_params).
    """
    from deepspeed.utils import groups

    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    first = groups.get_tensor_model_parallel_rank() == 0
    for module in model.modules():
        own = {name: each for name, each in module._parameters.items() if each is not None}
        trained = {name: names.pop(id(each)) for name, each in own.items() if id(each) in names}
        if not trained:
            continue
        # A copy that shares everything but the parameters: DeepSpeed's own keep their storage and hooks.
        whole: Any = copy.copy(module)
        whole._parameters = {}
        for name, each in own.items():
            part = part_of(trained.get(name, ""), each)
            whole._parameters[name] = torch.nn.Parameter(torch.zeros_like(each) if part is None else part)
        if hasattr(whole, "gather_params"):
            whole.gather_params([whole.weight, whole._parameters.get("bias")])
        if first:
            for name, full_name in trained.items():
                yield full_name, whole._parameters[name].detach()


def _own_fragments(engine: Any) -> Iterator[Fragment]:
    """Yield this rank's share of the weights, as divided among the ranks that hold the same tensors."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    wrapper = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        yield from _stage3_fragments(wrapper, names)
    elif engine.zero_optimization_stage() > 0 and getattr(wrapper, "round_robin_gradients", False):
        # The parameters are reordered, and DeepSpeed's own mapping to the partitions follows the old order
        # (zero/stage_1_and_2.py, link_hp_params).
        for index, flat in enumerate(wrapper.single_partition_of_fp32_groups):
            begin = torch.distributed.get_rank(wrapper.real_dp_process_group[index]) * flat.numel()
            offsets = wrapper.round_robin_bit16_offsets[index]
            for parameter, offset in zip(wrapper.round_robin_bit16_groups[index], offsets, strict=True):
                start, stop = max(0, begin - offset), min(parameter.numel(), begin + flat.numel() - offset)
                if start < stop:
                    yield names[id(parameter)], start, flat.detach()[offset + start - begin : offset + stop - begin]
    elif engine.zero_optimization_stage() > 0 or is_partitioned_at_stage_0(wrapper):
        # The part of each parameter in this rank's partition (utils/tensor_fragment.py).
        for parameter in engine.module.parameters():
            if id(parameter) in names and (mapping := parameter._hp_mapping) is not None:
                yield names[id(parameter)], mapping.lp_fragment_address.start, mapping.get_hp_fragment().detach()
    elif torch.distributed.get_rank(engine.seq_data_parallel_group) == 0:  # every rank holds all of them
        for parameter, master in _stage0_masters(wrapper):
            yield names[id(parameter)], 0, master.detach().flatten()


def _stage0_masters(wrapper: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each parameter with its fp32 master (fp16/fused_optimizer.py, fp16/unfused_optimizer.py), or itself."""
    if hasattr(wrapper, "fp32_groups_flat"):
        for group, flat in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
            yield from zip(group, flat.split([parameter.numel() for parameter in group]), strict=True)
    elif hasattr(wrapper, "fp32_groups"):
        for group, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            yield from zip(group, masters, strict=True)
    else:
        for group in wrapper.param_groups:
            yield from ((parameter, parameter) for parameter in group["params"] if parameter.requires_grad)


def _stage3_fragments(wrapper: Any, names: dict[int, str]) -> Iterator[Fragment]:
    """Yield this rank's slice of each parameter; a sub-group on disk is loaded only while it is read."""
    for index, (group, flat) in enumerate(zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True)):
        swapped = wrapper._swappable_optimizer_subgroup(index)
        if swapped:
            # Do not prefetch the next sub-group: if the pass ended before using it, training would find the wrong one.
            wrapper.optimizer_swapper.swap_in_optimizer_state(parameter=flat, async_parameter=None)
        try:
            offset = 0
            for parameter in group:
                size = parameter.partition_numel()
                start = partition_rank(parameter) * size
                used = max(0, min(size, parameter.ds_numel - start))  # the last slices are padded
                yield names[id(parameter)], start, flat.detach()[offset : offset + used]
                offset += size
        finally:
            if swapped:
                wrapper._release_swap_buffers(index)
