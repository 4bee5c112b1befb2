"""Replays every allocation of a training step on a simulated caching allocator, for ZeRO stages 0 to 3, FSDP2 and DDP.

The model's allocations are traced (``allocation_trace``); the engine's own are interleaved with them. DeepSpeed's
follow version 0.19.8, as do ``stages_0_to_2`` and ``stage_3``, which name the files; here their order and streams
matter too. The replay shows how much the first steps reserve and, given a capacity, whether they run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from . import stage_3, stages_0_to_2, torch_engines
from .allocation_trace import ALLOCATE, BACKWARD, ENTER, FREE, GRADIENT, Event
from .fit_verdict import DecidingPhase
from .inputs import NORM_BYTES, MemoryInputs
from .model_states import FP32_BYTES, flat_elements
from .torch_allocators import Block, CachingAllocator, OutOfMemoryError

_STEPS = 2
"""The first step creates the moments; from the second step on, allocations repeat."""
_ACCURACY = 0.005
"""Relative accuracy of the least capacity, which is searched for between the allocated and the reserved bytes."""
_COMPUTE, _GATHER, _REDUCE = 0, 1, 2
_REDUCTIONS_AHEAD = 2
"""Bucket reductions that may be under way before the next one waits for the oldest (zero/stage3.py,
max_param_reduce_events)."""


def unknown_to_replay(inputs: MemoryInputs) -> str | None:
    """Name a setting that the replay does not support; None if all are supported.

    Rows with such a setting are judged by the rule (``fit_verdict``).
    """
    settings, profile, on_deepspeed = inputs.settings, inputs.profile, inputs.engine == "deepspeed"
    reasons = {
        "frozen parameters in FSDP2": bool(profile.frozen) and inputs.engine == "fsdp2",
        "layers that are not all alike": profile.layers < 2 or not (profile.layer or profile.frozen),
        "accumulation in FSDP2": inputs.engine == "fsdp2" and inputs.grad_accum > 1,
        "passes without an optimizer": inputs.pass_type != "train",
        "gradients in a different number format": on_deepspeed
        and (inputs.accumulates_apart or inputs.sent != inputs.element),
        "contiguous_gradients off": settings.stage > 0
        and on_deepspeed
        and not (settings.contiguous_gradients or settings.offload_optimizer),
        "hpZ": settings.secondary_ranks > 1,
        "a partial offload": settings.stage == 3 and settings.offload_ratio != 1.0,
    }
    return next((name for name, is_there in reasons.items() if is_there), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Bytes that the allocator held in the first steps, not counting memory outside it."""

    allocated_bytes: int
    """At the peak."""
    reserved_bytes: int
    """At the peak."""
    phase: DecidingPhase
    """The phase with the largest allocated total, or the one in which memory ran out."""
    ran_out: bool = False


def replay(
    inputs: MemoryInputs,
    events: Sequence[Event],
    *,
    workspace_bytes: int,
    zero_init: bool = True,
    capacity_bytes: int | None = None,
    expandable_segments: bool = False,
    shorter: Sequence[Sequence[Event]] = (),
    rank_type: type[Rank] | None = None,
) -> ReplayResult:
    """Replay initialization and the first steps with the events of a whole model (``allocation_trace.full_events``).

    ``workspace_bytes``: size of a cuBLAS workspace; each of two threads keeps one. ``capacity_bytes``: how much the
    allocator may reserve; None for no limit. ``shorter``: events of earlier steps, with shorter sequences.
    ``rank_type``: an engine other than the one in ``inputs``.
    """
    allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments)
    of_deepspeed = _Stage3 if inputs.settings.stage == 3 else _Stage0To2
    kinds: dict[str, type[Rank]] = {"deepspeed": of_deepspeed, "fsdp2": Fsdp2, "ddp": _Ddp}
    rank = (rank_type or kinds[inputs.engine])(inputs, allocator)
    ran_out = False
    try:
        rank.initialize(zero_init=zero_init)
        for _ in range(2):
            rank.allocate(workspace_bytes)
        for of_step in (*shorter, *[events] * _STEPS):
            # Any further micro-batches would allocate as the second one does.
            for number in range(rank.micro_batches):
                rank.pass_micro_batch(of_step, number)
            rank.begin("step")
            rank.update()
            rank.has_moments = True
    except OutOfMemoryError:
        ran_out = True
    rank.begin(rank.phase)
    return ReplayResult(
        allocated_bytes=max(rank.peaks.values()),
        reserved_bytes=allocator.peak_reserved_bytes,
        phase=rank.phase if ran_out else max(rank.peaks, key=lambda phase: rank.peaks[phase]),
        ran_out=ran_out,
    )


def least_capacity(
    inputs: MemoryInputs,
    events: Sequence[Event],
    *,
    low_bytes: int,
    high_bytes: int,
    card_bytes: int | None = None,
    verdict_only: bool = False,
    **how: Any,
) -> tuple[int, DecidingPhase | None]:
    """Return the least capacity in which the steps run, and the phase that runs out of memory just below it.

    ``low_bytes``: a lower bound, such as the peak of allocated bytes. ``high_bytes``: the bytes reserved without a
    limit. ``how``: further arguments for ``replay``. The phase is None if memory never runs out above ``low_bytes``.

    Steps that run in one capacity may run out of memory in a slightly larger one, where cached segments are freed
    later. Therefore ``card_bytes`` itself is replayed: the result is larger if the steps run out of memory in it, and
    no larger if they run. ``verdict_only``: replay nothing else.
    """
    phase: DecidingPhase | None = None
    asked = card_bytes if card_bytes is not None and card_bytes < high_bytes else None
    if asked is not None and asked <= low_bytes:
        low_bytes = 0
    while asked is not None or (not verdict_only and high_bytes - low_bytes > _ACCURACY * high_bytes):
        tried, asked = (low_bytes + high_bytes) // 2 if asked is None else asked, None
        found = replay(inputs, events, capacity_bytes=tried, **how)
        if found.ran_out:
            low_bytes, phase = tried, found.phase
        else:
            high_bytes = tried
    return high_bytes, phase


class Rank:
    """One rank: the engine's allocations interleaved with the model's."""

    def __init__(self, inputs: MemoryInputs, allocator: CachingAllocator) -> None:
        self.inputs, self.settings, self.allocator = inputs, inputs.settings, allocator
        self.ranks, self.element = inputs.data_parallel_size, inputs.element
        self.tensors, self.trained = inputs.profile.all_tensors, inputs.profile.trained_numbers
        last = set(self.trained) if inputs.profile.has_adapters else set()
        self.in_order = sorted(range(len(self.tensors)), key=last.__contains__)
        """Tensors in the order in which they are built: adapters last."""
        self.phase: DecidingPhase = "initialize"
        self.micro_batches = min(2, inputs.grad_accum)
        self.peaks: dict[DecidingPhase, int] = {}
        """Peak allocated bytes of each phase."""
        self.storages: dict[int, Block] = {}
        self.has_moments = False

    @property
    def is_last_micro_batch(self) -> bool:
        return self.number == self.micro_batches - 1

    def begin(self, phase: DecidingPhase) -> None:
        """Enter a phase, and record the peak of the previous one."""
        allocator = self.allocator
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), allocator.peak_allocated_bytes)
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        self.phase = phase

    def allocate(self, size_bytes: int, stream: int = _COMPUTE) -> Block:
        return self.allocator.allocate(size_bytes, stream)

    def free(self, *blocks: Block | None) -> None:
        for block in blocks:
            if block is not None:
                self.allocator.free(block)

    def pulse(self, *sizes_bytes: int, stream: int = _COMPUTE) -> None:
        """Allocate blocks that exist together, and free them."""
        self.free(*[self.allocate(size, stream) for size in sizes_bytes if size])

    def make_moments(self, elements: int) -> None:
        for _ in range(0 if self.has_moments else self.settings.moments):
            self.allocate(self.settings.moment_bytes * elements)

    def pass_micro_batch(self, events: Sequence[Event], number: int) -> None:
        """Forward and backward pass. ``number``: position of the micro-batch in the step."""
        self.begin("forward")
        self.number = number
        self.begin_pass(events)
        storages, allocate, free = self.storages, self.allocator.allocate, self.allocator.free
        before: Event = ()
        for event in events:
            kind = event[0]
            if kind == ALLOCATE:
                storages[event[1]] = allocate(event[2])
            elif kind == FREE:
                block = storages.pop(event[1], None)
                if block is not None:
                    free(block)
            elif kind == GRADIENT:
                self.take_gradient(event[1], event[2])
            elif kind == BACKWARD:
                self.begin("backward")
            elif kind == ENTER:
                self.enter(event[1])
            elif before != (ENTER, event[1]) or self.phase == "forward":
                # Torch ends the backward pass of a module immediately if its inputs need no gradient. DeepSpeed ends
                # such modules after all others (zero/partitioned_param_coordinator.py, release_backward_leftovers).
                self.leave(event[1])
            before = event
        self.end_backward()
        self.free(*storages.values())
        storages.clear()

    def initialize(self, *, zero_init: bool) -> None:
        raise NotImplementedError

    def begin_pass(self, events: Sequence[Event]) -> None:
        """Before the forward pass."""

    def take_gradient(self, parameter: int, storage: int) -> None:
        """A gradient is complete in a storage, which the model frees next unless it is taken out of ``storages``."""
        raise NotImplementedError

    def enter(self, parameters: tuple[int, ...]) -> None:
        """A module begins, in either direction; ``parameters``: its own, or none."""

    def leave(self, parameters: tuple[int, ...]) -> None:
        """A module ends."""

    def end_backward(self) -> None:
        raise NotImplementedError

    def update(self) -> None:
        raise NotImplementedError


class _Stage0To2(Rank):
    """Stages 0 to 2: every rank has all parameters. The last rank is replayed: its own gradients come first in
    backward, while all activations are still there."""

    def __init__(self, inputs: MemoryInputs, allocator: CachingAllocator) -> None:
        super().__init__(inputs, allocator)
        self.stage, self.kept = inputs.settings.stage, dict[int, Block | None]()
        self.built = self.tensors
        self.tensors = inputs.profile.tensors
        """Only the trained ones; DeepSpeed leaves the others as they are."""
        self.numbers = {each: number for number, each in enumerate(self.trained)}
        self.flat = flat_elements(inputs.profile.parameters, self.ranks) if self.stage else inputs.profile.parameters
        self.part = self.flat // self.ranks if self.stage else self.flat
        self.offloads = self.settings.offload_optimizer is not None and self.stage > 0
        # Stage 2, and stage 1 if it reduces during backward, put each gradient into a bucket as soon as it exists.
        self.uses_bucket = self.stage == 2 or stages_0_to_2.reduces_meanwhile(inputs)
        self.is_wrapped = self.stage == 0 and self.element != FP32_BYTES
        """In 16-bit precision, stage 0's wrapper has fp32 weights, flattened for DeepSpeed's fused optimizer."""
        self.is_flat = self.stage > 0 or (self.is_wrapped and not self.settings.torch_optimizer)
        self.ends = [0, *accumulate(self.tensors)]
        start = self.part * (self.ranks - 1)
        owned = [end - max(begin, start) for begin, end in pairwise(self.ends)]
        self.owned = {number: elements for number, elements in enumerate(owned) if elements > 0}
        """Tensor that the rank owns a part of → elements of that part."""
        self.buckets: list[Block] = []
        self.bucket_elements = 0
        self.bucket_members: list[int] = []
        self.large: dict[int, Block | None] = {}
        """Gradients larger than the bucket, which are reduced in place."""
        self.own_gradients: list[Block] = []
        """The rank's part of this micro-batch's gradients; ``reduced_gradients`` has those of earlier ones."""
        self.reduced_gradients: list[Block] = []

    def initialize(self, *, zero_init: bool) -> None:  # noqa: ARG002
        built = {each: self.allocate(self.element * self.built[each]) for each in self.in_order}
        separate = [built[each] for each in self.trained]
        if self.is_wrapped:
            self._wrap(separate)
        if self.stage == 0:
            return
        self.allocator.empty_cache()
        limit, flat_bytes = self.allocator.capacity_bytes, self.element * self.flat
        # Without room for a copy, the parameters go through host memory (stage_1_and_2.py, flatten_on_accelerator).
        is_copied = limit is None or limit - self.allocator.reserved_bytes >= flat_bytes
        if not is_copied:
            self.free(*separate)
            self.allocator.empty_cache()
        self.allocate(flat_bytes)
        if is_copied:
            self.free(*separate)
        clone = self.allocate(self.element * self.part)
        if self.offloads:
            self.free(clone)
            self.allocate(self.element * max(self.tensors))
            return
        self.allocate(self.settings.master_bytes * self.part)
        self.free(clone)
        self.pulse(self.settings.master_bytes * self.part)

    def _wrap(self, separate: list[Block]) -> None:
        """Stage 0 in 16-bit precision: the wrapper takes a step with zero gradients (fp16/fused_optimizer.py and
        fp16/unfused_optimizer.py, __init__, initialize_optimizer_states)."""
        if self.is_flat:
            clones = [self.allocate(self.element * each) for each in self.tensors]
            self.allocate(self.element * self.flat)
            self.free(*clones, *separate)
        sizes = [self.flat] if self.is_flat else self.tensors
        for size in sizes:
            clone = self.allocate(self.element * size)
            self.allocate(self.settings.master_bytes * size)
            self.free(clone)
        gradients = [] if self.is_flat else [self.allocate(self.element * size) for size in sizes]
        gradients += [self.allocate(FP32_BYTES * size) for size in sizes]
        self._step()
        self.free(*gradients)

    def _step(self) -> None:
        """The optimizer's own step; the first one creates the moments, for the flat tensor or for each tensor."""
        for size in [self.part] if self.is_flat else self.tensors:
            self.make_moments(size)
        self.pulse(self.inputs.torch_step * self.part)
        self.has_moments = True

    def take_gradient(self, parameter: int, storage: int) -> None:
        parameter = self.numbers[parameter]
        if self.stage and not self.buckets:
            size = stages_0_to_2.bucket_bytes(self.inputs)
            count = 2 if self.settings.overlap_comm else 1
            self.buckets = [self.allocate(size // count) for _ in range(count)]
        if self.uses_bucket:
            self._put_into_bucket(parameter, self.storages.pop(storage, None))
        elif parameter not in self.kept:
            # The first micro-batch's gradient stays; a later one's is added to it and freed.
            self.kept[parameter] = self.storages.pop(storage, None)

    def _put_into_bucket(self, parameter: int, gradient: Block | None) -> None:
        elements, limit = self.tensors[parameter], self.settings.reduce_bucket_elements
        if self.bucket_elements + elements > limit:
            self._reduce()
        if elements > limit:  # reduced in place; with offload, in a copy
            self.large[parameter] = self.allocate(self.element * elements) if self.offloads else gradient
        if elements <= limit or self.offloads:
            self.free(gradient)
        self.bucket_elements += elements
        self.bucket_members.append(parameter)

    def _reduce(self) -> None:
        """Reduce the bucket, and store the part of it that the rank owns (zero/stage_1_and_2.py, reduce_ipg_grads)."""
        members, self.bucket_members, self.bucket_elements = self.bucket_members, [], 0
        stream = _REDUCE if self.settings.overlap_comm else _COMPUTE
        # If the bucket holds parts of several ranks, they are copied together to be reduced (allreduce_and_scatter).
        owners = {place // self.part for each in members for place in (self.ends[each], self.ends[each + 1] - 1)}
        if len(owners) > 1 and self.settings.sends_ranges:
            self.pulse(self.element * sum(self.tensors[each] for each in members), stream=stream)
        for each in members:
            if each in self.owned and self.offloads:
                if not self.is_last_micro_batch:  # added up in host memory, and kept until backward ends
                    continue
                self.pulse(NORM_BYTES * self.owned[each], stream=stream)
                self.pulse(self.settings.master_bytes * self.owned[each], stream=stream)
            elif each in self.owned and not self.own_gradients:
                size = self.element * sum(self.tensors[owned] for owned in self.owned)
                self.own_gradients = [self.allocate(size, stream)]
            if self.stage == 2 or each in self.owned:  # stage 1 keeps other ranks' until backward ends
                self.free(self.large.pop(each, None))

    def end_backward(self) -> None:
        is_last = self.is_last_micro_batch
        if self.stage == 0 and self.ranks > 1 and is_last:
            self.pulse(self.element * min(self.flat, stages_0_to_2.ENGINE_BUCKET_ELEMENTS))
        if self.stage and self.kept and is_last:
            # Stage 1 reduces once every gradient exists: each is freed as it moves into the bucket.
            for each in sorted(self.kept):
                self._put_into_bucket(each, self.kept.pop(each))
        self._reduce()
        self.free(*self.large.values())
        self.large.clear()
        if self.stage == 2 or is_last:
            self.free(*self.buckets)
            self.buckets = []
        # A later micro-batch's gradients are added to the first one's.
        if self.number == 0 or not self.uses_bucket:
            self.reduced_gradients += self.own_gradients
        else:
            self.free(*self.own_gradients)
        self.own_gradients = []

    def update(self) -> None:
        master = self.settings.master_bytes
        if self.stage == 0:
            # 16-bit gradients are cast one by one, and DeepSpeed's fused optimizer flattens them.
            casts = [self.allocate(FP32_BYTES * each) for each in self.tensors] if self.is_wrapped else []
            if self.is_flat:
                flat = self.allocate(FP32_BYTES * self.flat)
                self.free(*casts, *self.kept.values())
                self.kept.clear()
                casts = [flat]
            self._step()
            self.free(*casts, *self.kept.values())
            self.kept.clear()
        elif not self.offloads:
            for elements in self.owned.values():
                self.pulse(NORM_BYTES * elements)
            flat = self.allocate(self.element * self.part)
            gradient = self.allocate(master * self.part) if self.element != master else flat
            self.free(flat if gradient is not flat else None, *self.reduced_gradients)
            self.reduced_gradients = []
            self._step()
            self.free(gradient)


class _Stage3(Rank):
    """Stage 3: parameters are gathered when their module runs or prefetched ahead of it, and released after it."""

    def __init__(self, inputs: MemoryInputs, allocator: CachingAllocator) -> None:
        super().__init__(inputs, allocator)
        settings = self.settings
        self.parts = [-(-each // self.ranks) for each in self.tensors]
        self.offloads = settings.offload_optimizer is not None
        self.offloads_parameters = settings.offload_param is not None
        self.streams = (_GATHER, _REDUCE) if settings.overlap_comm else (_COMPUTE, _COMPUTE)
        self.gathers = self.ranks > 1 or self.offloads_parameters
        self.build_places = {each: place for place, each in enumerate(self.in_order)}
        self.trained_parts = [self.parts[each] for each in self.trained]
        self.groups = [sum(group) for group in stage_3.sub_groups(self.trained_parts, settings.sub_group_elements)]
        self.order: list[int] = []
        """Parameters that are gathered, in the order of their uses in a pass."""
        small = (number for number, each in enumerate(self.tensors) if each <= settings.persistence_elements)
        self.persistent = dict.fromkeys(small if self.gathers else ())
        """Parameters that stay gathered, once the order of uses is known (parameter_offload.py,
        mark_persistent_parameters). Every step gathers them anew (zero/stage3.py, _post_step)."""
        self.staying: dict[int, Block | None] = {}
        """The persistent ones that are still gathered between passes."""
        self.is_traced = False
        """Whether a pass has ended: from then on, DeepSpeed knows the order of uses and gathers ahead."""

    def initialize(self, *, zero_init: bool) -> None:
        settings, element = self.settings, self.element
        every = range(len(self.tensors))
        # zero.Init splits each tensor as it is built; adapters are added outside of it.
        later = every if not zero_init else self.trained if self.inputs.profile.has_adapters else ()
        parts = {each: self._split(each, None) for each in every if each not in later}
        whole = [self.allocate(element * self.tensors[each]) for each in later]
        parts |= {each: self._split(each, block) for each, block in zip(later, whole, strict=True)}
        if not self.offloads_parameters:  # zero/utils.py, defragment: through host memory
            self.free(*[parts[each] for each in self.trained])
            self.allocator.empty_cache()
            self.allocate(element * sum(self.trained_parts))
        if not self.offloads:
            # Each is converted, then cloned; a converted one stays until the next exists (_create_fp32_partitions).
            converted: Block | None = None
            for group in self.groups if element != settings.master_bytes else ():
                before, converted = converted, self.allocate(settings.master_bytes * group)
                self.free(before)
                self.allocate(settings.master_bytes * group)
            self.free(converted)
            self.pulse(settings.master_bytes * max(self.groups))
        self.allocate(self.inputs.bucket_bytes * settings.reduce_bucket_elements)
        if not self.offloads:
            self.allocate(self.inputs.accumulated * sum(self.trained_parts))
        for part in self.trained_parts:  # gathered one by one (create_reduce_and_remove_grad_hooks)
            self.pulse(element * part * self.ranks, element * part if self.offloads_parameters else 0)

    def _split(self, number: int, whole: Block | None) -> Block | None:
        """Split a tensor, building it first if ``whole`` is None; return the rank's part on the GPU."""
        whole = whole or self.allocate(self.element * self.tensors[number])
        part = None if self.offloads_parameters else self.allocate(self.element * self.parts[number])
        self.free(whole)
        return part

    # ------------------------------------------------------------------ gathering

    def begin_pass(self, events: Sequence[Event]) -> None:
        self.bucket_elements, self.members = 0, list[int]()
        self.large: list[Block] = []
        self.reductions: deque[int] = deque()
        if not self.gathers:
            return
        if not self.order:
            used = [max(each, ~each) for event in events if event[0] == ENTER for each in event[1]]
            self.order = [each for each in used if each not in self.staying]
            self.read = {~each for event in events if event[0] == ENTER for each in event[1] if each < 0}
            self.elements_before = [0, *accumulate(self.tensors[each] for each in self.order)]
            self.uses: dict[int, list[int]] = {}
            for place, each in enumerate(self.order):
                self.uses.setdefault(each, []).append(place)
        self.place = self.queued = self.live_elements = 0
        self.fetched_for = dict.fromkeys(self.uses, -1)
        self.active: dict[int, set[tuple[int, ...]]] = {each: set() for each in self.uses}
        """Parameter → modules that use it now."""
        self.gathered = dict(self.staying)
        """Parameter → its tensor; None while it is only in the buffer of its group."""
        self.group_of: dict[int, list[int]] = {}
        self.buffers: dict[int, Block] = {}
        self.copies: dict[int, Block | None] = {}
        """Parameter → GPU copy of its offloaded part, until its tensor, gathered on its own, has been waited for."""

    def enter(self, parameters: tuple[int, ...]) -> None:
        if not self.gathers:
            return
        own = self._used(parameters)
        missing = [each for each in own if each not in self.gathered]
        # Until it is known which modules read a parameter, reading it gathers it immediately, on the default stream.
        self._gather(
            missing, self.streams[0] if self._knows_readers or not self.read.intersection(missing) else _COMPUTE
        )
        self._wait(own)
        for each in own:
            self.active[each].add(parameters)
        self.place += len(own)
        self.queued = max(self.queued, self.place)
        for each in own:
            self.fetched_for[each] = max(self.fetched_for[each], self.place - 1)
        if not self.is_traced:
            return
        # Prefetch, as ``stage_3.gathered_elements`` describes it.
        room = min(self.settings.max_live_elements - self.live_elements, self.settings.prefetch_elements)
        ahead: list[int] = []
        count = 0
        while self.queued < len(self.order) and count < room:
            following = self.order[self.queued]
            self.fetched_for[following] = self.queued
            if following not in self.gathered and following not in ahead:
                ahead.append(following)
                count += self.tensors[following]
            self.queued += 1
        self._gather(ahead, self.streams[0])

    def _used(self, parameters: tuple[int, ...]) -> list[int]:
        """Parameters that a module gathers: its own and, once its first forward pass is over, those of other modules
        that it reads (zero/parameter_offload.py, ZeROOrderedDict)."""
        used = [max(each, ~each) for each in parameters if each >= 0 or self._knows_readers]
        return [each for each in used if each in self.uses]

    @property
    def _knows_readers(self) -> bool:
        """Whether every module's first forward pass is over, which shows which parameters of others it reads."""
        return self.is_traced or self.phase == "backward"

    def leave(self, parameters: tuple[int, ...]) -> None:
        if not self.gathers:
            return
        for each in self._used(parameters):
            self.active[each].discard(parameters)
            block = self.gathered.get(each)
            if block is None or self.active[each]:
                continue
            next_use = bisect_left(self.uses[each], self.place)
            used_soon = next_use < len(self.uses[each]) and (
                self.elements_before[self.uses[each][next_use]] - self.elements_before[self.place]
                < self.settings.max_reuse_elements
            )
            is_kept = each in self.persistent or self.fetched_for[each] >= self.place or used_soon
            if not (self.is_traced and is_kept):
                self._release(each, block)

    def _gather(self, parameters: Sequence[int], stream: int) -> None:
        """Gather tensors: a single one into its own buffer, several into a shared one, from which each is copied when
        it is waited for (zero/partition_parameters.py, _all_gather_sequential, _all_gather_dtype)."""
        if not parameters:
            return
        self.live_elements += sum(self.tensors[each] for each in parameters)
        if self.ranks == 1 or len(parameters) == 1:
            for each in parameters:
                self.gathered[each] = self.allocate(self.element * self.parts[each] * self.ranks, stream)
                self.copies[each] = self._copy_of_part(each, stream) if self.ranks > 1 else None
            return
        group = sorted(parameters, key=self.build_places.__getitem__)
        size = self.element * self.ranks * sum(self.parts[each] for each in group)
        self.buffers[id(group)] = self.allocate(size, stream)
        self.free(*[self._copy_of_part(each, stream) for each in group])
        for each in group:
            self.gathered[each], self.group_of[each] = None, group

    def _copy_of_part(self, parameter: int, stream: int) -> Block | None:
        """An offloaded part is copied to the GPU before it is gathered."""
        size = self.element * self.parts[parameter]
        return self.allocate(size, stream) if self.offloads_parameters else None

    def _wait(self, parameters: Iterable[int]) -> None:
        """Waiting for one tensor copies its whole group; the buffer is freed once all of them have been waited for."""
        for each in parameters:
            self.free(self.copies.pop(each, None))
            group = self.group_of.pop(each, None)
            if group is None:
                continue
            for member in group:
                if self.gathered.get(member, self) is None:
                    self.gathered[member] = self.allocate(self.element * self.tensors[member], self.streams[0])
            if not any(self.group_of.get(member) is group for member in group):
                self.free(self.buffers.pop(id(group)))

    def _release(self, parameter: int, block: Block) -> None:
        del self.gathered[parameter]
        self.live_elements -= self.tensors[parameter]
        self.free(block)

    # ------------------------------------------------------------------ gradients

    def take_gradient(self, parameter: int, storage: int) -> None:
        elements, limit = self.tensors[parameter], self.settings.reduce_bucket_elements
        if self.bucket_elements and self.bucket_elements + elements > limit:
            self._reduce()
        block = self.storages.pop(storage, None)
        if self.bucket_elements + elements <= limit:
            # Copied on the other stream, which the allocator waits for before the memory is used again.
            if block is not None:
                self.allocator.free(block, is_pending=self.settings.overlap_comm)
        elif block is not None:
            self.large.append(block)
        self.bucket_elements += elements
        self.members.append(parameter)

    def _reduce(self) -> None:
        """Reduce the bucket on its stream (zero/stage3.py, __reduce_and_partition_ipg_grads): a copy is scattered,
        unless the bucket holds a single tensor that needs no padding."""
        if not self.members:
            return
        if len(self.reductions) > _REDUCTIONS_AHEAD:
            self.allocator.finish_pending(self.reductions.popleft())
        settings, stream, parts = self.settings, self.streams[1], [self.parts[each] for each in sorted(self.members)]
        needs_copy = len(parts) > 1 or self.tensors[self.members[0]] % self.ranks
        copy = self.allocate(self.element * self.ranks * sum(parts), stream) if needs_copy else None
        if self.offloads:
            # Each part goes to the host and comes back; its norm is taken, and it is cast (partition_grads).
            for part in parts:
                again = self.allocate(self.inputs.accumulated * part, stream)
                if self.is_last_micro_batch:
                    self.pulse(NORM_BYTES * min(part, stage_3.NORM_PIECE_ELEMENTS), stream=stream)
                    self.pulse(settings.master_bytes * part, stream=stream)
                self.free(again)
        self.free(copy, *self.large)
        self.reductions.append(len(self.allocator.pending) - sum(self.reductions))
        self.large, self.members, self.bucket_elements = [], [], 0

    def end_backward(self) -> None:
        self._reduce()
        self.allocator.finish_pending()
        self.is_traced = True
        if self.gathers:
            self._wait([*self.group_of, *self.copies])
            self.staying = {each: block for each, block in self.gathered.items() if each in self.persistent}
            for each, block in list(self.gathered.items()):
                if block is not None and each not in self.staying:
                    self._release(each, block)

    def update(self) -> None:
        self.free(*self.staying.values())
        if not self.offloads:
            for part in self.trained_parts:
                self.pulse(NORM_BYTES * part)
            for group in self.groups:
                flat = self.allocate(self.inputs.accumulated * group)
                gradient = flat
                if self.inputs.accumulated != self.settings.master_bytes:
                    gradient = self.allocate(self.settings.master_bytes * group)
                    self.free(flat)
                self.make_moments(group)
                self.pulse(self.inputs.torch_step * group)
                self.free(gradient)
        self.staying = {each: self.allocate(self.element * self.parts[each] * self.ranks) for each in self.persistent}
        self.order = []


class _Ddp(Rank):
    """torch's DistributedDataParallel (2.13, nn/parallel/distributed.py, csrc/distributed/c10d/reducer.cpp): fp32
    weights, and permanent buckets, into which each gradient is copied. After the first step they are rebuilt in the
    order of the gradients."""

    def initialize(self, *, zero_init: bool) -> None:  # noqa: ARG002
        built = [self.allocate(self.element * self.tensors[each]) for each in self.in_order]
        if self.element != FP32_BYTES:
            for each, block in enumerate(built):
                built[each] = self.allocate(FP32_BYTES * self.tensors[each])
                self.free(block)
        sizes = [FP32_BYTES * self.tensors[each] for each in self.trained]
        every = [FP32_BYTES * each for each in self.tensors]
        for size in torch_engines.bucket_sizes(every, torch_engines.DDP_BROADCAST_BYTES):
            self.pulse(size)
        self.buckets = [self.allocate(sum(sizes))]  # one, while the order of the gradients is unknown
        self.is_rebuilt = False
        self.ready: list[int] = []
        """Bytes of the gradients in the order in which they become ready."""
        self.kept: dict[int, Block | None] = {}

    def begin_pass(self, events: Sequence[Event]) -> None:  # noqa: ARG002
        if self.ready and not self.is_rebuilt:
            self.free(*self.buckets)
            sizes = torch_engines.bucket_sizes(self.ready, torch_engines.DDP_BUCKET_BYTES)
            self.buckets = [self.allocate(size) for size in sizes]
            self.is_rebuilt = True

    def take_gradient(self, parameter: int, storage: int) -> None:
        if not self.is_last_micro_batch:  # stays a tensor of its own
            self.kept[parameter] = self.storages.pop(storage, None)
            return
        self.free(self.kept.pop(parameter, None))
        self.ready.append(FP32_BYTES * self.tensors[parameter])

    def end_backward(self) -> None:
        """Nothing is left to do."""

    def update(self) -> None:
        for each in self.trained:
            self.make_moments(self.tensors[each])


class Fsdp2(Rank):
    """torch's FSDP2 (2.13, distributed/fsdp/_fully_shard, _fsdp_param_group.py, _fsdp_collectives.py). Its groups are
    the blocks, and a root group of all other tensors that stays gathered from forward to the end of backward.

    A group is gathered into one buffer and copied out to its tensors; the buffer is freed at the next gather. In
    backward, the preceding group is prefetched. A group's gradients are copied into a buffer, which is freed once the
    next group's exists.
    """

    state_bytes = FP32_BYTES
    """Bytes of an element of the parts of parameters and gradients."""

    def initialize(self, *, zero_init: bool) -> None:  # noqa: ARG002
        self.parts = torch_engines.row_parts(self.inputs.profile, self.ranks)
        for part in self.parts:
            self.allocate(self.state_bytes * part)
        self.before, self.per_block = len(self.inputs.profile.before), len(self.inputs.profile.layer)

    def _group_of(self, parameter: int) -> int:
        """Number of a parameter's block; -1 for the root group."""
        number = (parameter - self.before) // self.per_block
        return number if 0 <= number < self.inputs.profile.layers and parameter >= self.before else -1

    def begin_pass(self, events: Sequence[Event]) -> None:  # noqa: ARG002
        self.members: dict[int, list[int]] = {}
        for parameter in range(len(self.tensors)):
            self.members.setdefault(self._group_of(parameter), []).append(parameter)
        self.gathered: dict[int, list[Block]] = {}
        self.gradients: dict[int, list[Block]] = {}
        self.gather_buffer: Block | None = None
        self.reduce_buffer: Block | None = None
        self.shards: list[Block] = []
        self.current = -1
        self._gather(-1)

    def _gather(self, group: int) -> None:
        if group in self.gathered or group not in self.members:
            return
        sizes = [self.element * self.parts[each] * self.ranks for each in self.members[group]]
        buffer = self.allocate(sum(sizes), _GATHER)
        self.gathered[group] = [self.allocate(size) for size in sizes]
        self.free(self.gather_buffer)
        self.gather_buffer = buffer

    def enter(self, parameters: tuple[int, ...]) -> None:
        group = self._group_of(parameters[0]) if parameters else -1
        if group < 0:
            return
        if group != self.current and self.current >= 0 and self.phase == "forward":
            self.free(*self.gathered.pop(self.current, []))
        self.current = group
        self._gather(group)
        if self.phase == "backward":
            self._gather(group - 1)

    def take_gradient(self, parameter: int, storage: int) -> None:
        group = self._group_of(parameter)
        for each in [each for each in self.gradients if each not in (group, -1)]:
            self._reduce(each)
        held = self.gradients.setdefault(group, [])
        if storage in self.storages:
            held.append(self.storages.pop(storage))

    def _reduce(self, group: int) -> None:
        self.free(*self.gathered.pop(group, []))
        size = sum(self.parts[each] for each in self.members[group])
        buffer = self.allocate(self.element * size * self.ranks, _REDUCE)
        self.free(*self.gradients.pop(group), self.reduce_buffer)
        self.reduce_buffer = buffer
        self.shards.append(self.allocate(self.state_bytes * size, _REDUCE))

    def end_backward(self) -> None:
        for group in sorted(self.gradients, reverse=True):
            self._reduce(group)
        for blocks in self.gathered.values():
            self.free(*blocks)
        self.free(self.gather_buffer, self.reduce_buffer)

    def update(self) -> None:
        for part in self.parts:
            self.make_moments(part)
        self.free(*self.shards)
