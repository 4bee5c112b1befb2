"""Computes the memory of one rank at ZeRO stage 3: partitions on three tiers, buffers, and gathered parameters.

Based on DeepSpeed 0.19.8; paths in docstrings are relative to its ``runtime/``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..config import deepspeed_keys
from .inputs import NORM_BYTES, MemoryInputs, Phases
from .model_states import LedgerBuilder, partition_elements

NORM_PIECE_ELEMENTS = 250_000_000
"""Elements whose norm is computed together if the optimizer is offloaded (zero/stage3.py, _constant_buffered_norm2)."""


def ledger_by_phase(inputs: MemoryInputs) -> Phases:
    """Compute one rank's ledgers at stage 3."""
    settings, tensors = inputs.settings, inputs.profile.tensors
    # Tensor by tensor, because sub-groups, swap files and norms depend on individual sizes.
    parts = [partition_elements([elements], inputs.data_parallel_size) for elements in tensors]
    groups = sub_groups(parts, settings.sub_group_elements)
    whole, builder = gathered_elements(inputs), LedgerBuilder()
    _parameters(inputs, parts, groups, builder)
    _states(inputs, groups, builder)
    if settings.contiguous_gradients:
        # The reduction bucket has its full size from the start (zero/stage3.py, _setup_for_real_optimizer).
        builder.add("gpu", "deepspeed_buffers", inputs.bucket_bytes * settings.reduce_bucket_elements)
    # The part's accumulated gradients exist from the start; optimizer offload keeps them in host memory
    # (grad_partitions_flat_buffer).
    accumulated = inputs.accumulated * sum(parts)
    if settings.offload_optimizer:
        builder.add_pinned("gradients", accumulated, pinned=_pins(inputs, wanted=settings.pin_optimizer))
    else:
        builder.add("gpu", "gradients", accumulated)
    # Persistent tensors stay between steps, so the ledger of a run counts them as parameters; those that come and go
    # are a category that it does not hold (``predicted_memory.UNCOUNTED``).
    resting = inputs.element * whole.persistent
    moving = inputs.element * (whole.peak - whole.persistent)
    # The largest gradient before it is split, and the copy of a bucket that reduce-scatter sends, which is at
    # most as large as all gradients (comm/coalesced_collectives.py).
    sent = min(settings.reduce_bucket_elements, inputs.profile.parameters) if inputs.data_parallel_size > 1 else 0
    temporaries = inputs.element * max(tensors) + inputs.sent * sent
    if settings.offload_optimizer:
        # The largest part's gradient on the accelerator and the fp64 copy, made piece by piece, from which its norm is
        # computed (zero/stage3.py, partition_grads, _constant_buffered_norm2).
        temporaries += inputs.accumulated * max(parts) + NORM_BYTES * min(max(parts), NORM_PIECE_ELEMENTS)
    return {
        "forward": builder.plus(parameters=resting, gathered_parameters=moving),
        "backward": builder.plus(parameters=resting, gathered_parameters=moving, temporaries=temporaries),
        "reduced": builder.plus(parameters=resting),
        **_step(inputs, groups, builder),
    }


def sub_groups(parts: Iterable[int], limit: int) -> list[list[int]]:
    """Group the tensors' parts that are updated together (zero/stage3.py, _create_fp16_sub_groups)."""
    groups: list[list[int]] = [[]]
    for part in parts:
        # A group ends after the tensor that reaches the limit, so it may exceed the limit.
        if limit and sum(groups[-1]) >= limit:
            groups.append([])
        groups[-1].append(part)
    return groups


def _aligned(elements: int, size: int, inputs: MemoryInputs) -> int:
    """Elements of a swapped tensor, padded to whole I/O blocks."""
    unit = inputs.settings.swap_alignment_bytes // size
    return -(-elements // unit) * unit


def _swapped(elements: int, size: int, inputs: MemoryInputs) -> bool:
    return elements * size >= inputs.settings.swap_threshold_bytes


def _swap_file_bytes(elements: int, size: int, inputs: MemoryInputs) -> int:
    """Bytes of a tensor's swap file; 0 for a tensor below the threshold, which stays in memory."""
    return size * _aligned(elements, size, inputs) if _swapped(elements, size, inputs) else 0


def _parameters(inputs: MemoryInputs, parts: list[int], groups: list[list[int]], builder: LedgerBuilder) -> None:
    """Add the rank's own parts of the parameters (zero/stage3.py, _create_fp16_partitions_with_defragmentation).

    Each untrained tensor stays separate, on the device where its parts were put: on disk if it is large enough
    (zero/partition_parameters.py, _partition_param).
    """
    place, size = inputs.settings.offload_param, inputs.element
    if inputs.settings.secondary_ranks > 1:  # from the first forward of a step to its end (_partition_param_sec)
        gathered = [each for each in inputs.profile.all_tensors if each > inputs.settings.persistence_elements]
        builder.add("gpu", "parameters", size * partition_elements(gathered, inputs.settings.secondary_ranks))
    frozen = [partition_elements([elements], inputs.data_parallel_size) for _, elements in inputs.profile.frozen]
    if place is None:
        builder.add("gpu", "parameters", size * (sum(parts) + sum(frozen)))
        return
    if place == "cpu":
        # DeepSpeed pins this flat buffer whatever ``pin_memory`` says (_create_param_groups_fp16_flat_cpu_memory).
        builder.add_pinned("parameters", size * sum(parts), pinned=_pins(inputs, wanted=True))
    else:
        _parameters_on_disk(inputs, groups, builder)
    for part in frozen:
        if place == "nvme" and (on_file := _swap_file_bytes(part, size, inputs)):
            builder.add("nvme", "parameters", on_file)
        else:
            builder.add_pinned("parameters", size * part, pinned=_pins(inputs, wanted=inputs.settings.pin_param))


def _pins(inputs: MemoryInputs, *, wanted: bool) -> bool:
    return wanted and inputs.accelerator == "cuda"  # the CPU accelerator does not pin


def _parameters_on_disk(inputs: MemoryInputs, groups: list[list[int]], builder: LedgerBuilder) -> None:
    """Add parameters that are offloaded to NVMe. Tensors below the threshold stay in memory. Updated ones are
    written back through a pool as large as the whole tensors of the largest group (zero/stage3.py,
    _create_fp16_partitions_with_defragmentation; swap_tensor/partitioned_param_swapper.py,
    reserve_partitioned_swap_space)."""
    settings, size = inputs.settings, inputs.element
    ends = list(accumulate(map(sum, groups)))
    # The flat buffer is as large as the limit, even if the groups that stay do not fill it, but no larger than all
    # groups together; with a limit of 0 it has one element.
    flat = min(settings.max_in_cpu_elements, ends[-1]) or 1
    # DeepSpeed also adds up the groups that do not fit: after the first of them, none stays in memory, however small.
    on_disk = [group for group, end in zip(groups, ends, strict=True) if end > flat]
    builder.add_pinned("parameters", size * flat, pinned=_pins(inputs, wanted=True))
    for part in (part for group in on_disk for part in group):
        on_file = _swap_file_bytes(part, size, inputs)
        builder.add("nvme" if on_file else "cpu", "parameters", on_file or size * part)
    if inputs.profile.tied_embeddings:
        # zero.Init swaps the LM head out before Transformers ties it to the embedding: it has a file of its own.
        head = partition_elements(inputs.profile.tensors[:1], inputs.data_parallel_size)
        builder.add("nvme", "parameters", _swap_file_bytes(head, size, inputs))
    # Not ``add_pinned``: DeepSpeed allocates swap buffers itself (new_cpu_locked_tensor), so torch does not round them.
    buffer = _aligned(settings.param_buffer_elements, size, inputs)
    builder.add("cpu", "deepspeed_buffers", size * buffer * settings.param_buffers)
    if on_disk:
        # Whole tensors, not the rank's parts: DeepSpeed sums ``ds_numel`` of the parameters. Among equally large
        # groups the first counts, as in DeepSpeed, whose comparison is strict.
        largest = max(range(len(groups)), key=lambda number: sum(groups[number]))
        start = sum(map(len, groups[:largest]))
        members = inputs.profile.tensors[start : start + len(groups[largest])]
        builder.add("cpu", "deepspeed_buffers", size * sum(_aligned(each, size, inputs) for each in members))


def _states(inputs: MemoryInputs, groups: list[list[int]], builder: LedgerBuilder) -> None:
    """Add the master copy, the moments and, if offloaded, the master's gradient (zero/stage3.py,
    _create_fp32_partitions, initialize_optimizer_states). Twin-Flow leaves the first sub-groups on the accelerator."""
    settings, master = inputs.settings, inputs.settings.master_bytes
    # Truncated as in DeepSpeed: with one sub-group every ratio above 0 moves all of it.
    kept_on_gpu = int((1 - settings.offload_ratio) * len(groups)) if settings.offload_optimizer else len(groups)
    swaps = settings.offload_optimizer == "nvme"
    for number, group in enumerate(groups):
        count = sum(group)
        # The swap files hold the master's gradient too. Smaller groups stay in host memory, as with CPU offload.
        if swaps and _swapped(count, master, inputs):
            builder.add("nvme", "optimizer_states", inputs.state * _aligned(count, master, inputs))
            # Each gradient that is large enough has a file. Smaller ones stay in memory, and so does one whose last
            # block is incomplete, as a view keeps the whole tensor (swap_tensor/optimizer_utils.py,
            # _swap_out_gradients, _adjust_for_misaligned_lengths).
            unit = settings.swap_alignment_bytes // master
            for part in group:
                written = part // unit * unit if _swapped(part, master, inputs) else 0
                builder.add("nvme", "optimizer_states", master * written)
                builder.add("cpu", "deepspeed_buffers", master * (part if part != written else 0))
            continue
        tier = "gpu" if number < kept_on_gpu else "cpu"
        builder.add(tier, "optimizer_states", inputs.state * count)
        if settings.offload_optimizer and tier == "gpu":
            builder.add("gpu", "gradients", master * count)
        elif settings.offload_optimizer:
            builder.add_pinned("gradients", master * count, pinned=_pins(inputs, wanted=settings.pin_optimizer))
    if swaps:
        largest = _aligned(max(map(sum, groups)), master, inputs)
        builder.add("cpu", "deepspeed_buffers", master * largest * settings.optimizer_buffers)


def _step(inputs: MemoryInputs, groups: list[list[int]], builder: LedgerBuilder) -> Phases:
    """Ledgers of the optimizer step. The norm is computed for one tensor's part at a time, in fp64 (zero/stage3.py,
    get_grad_norm_direct); then each sub-group is flattened and cast to fp32 (_prepare_fp32_grad_for_sub_group)."""
    # With offload, the norm was computed during backward, and fp32 gradients have a permanent place.
    if inputs.settings.offload_optimizer:
        return {"flatten": builder.ledger, "update": builder.ledger}
    largest, norm = max(map(sum, groups)), NORM_BYTES * max(part for group in groups for part in group)
    master = inputs.settings.master_bytes
    cast = master if inputs.accumulated != master else 0
    # The flat copy is freed once it is cast; without a cast it is the gradient that the optimizer uses.
    update = max(cast, inputs.accumulated)
    return {
        "flatten": builder.plus(temporaries=max(norm, (inputs.accumulated + cast) * largest)),
        "update": builder.plus(temporaries=update * largest, square_roots=inputs.torch_step * largest),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredElements:
    """Elements of whole parameter tensors that a rank holds on the accelerator besides its own partition."""

    persistent: int
    """Elements of the tensors below the persistence threshold, which stay gathered between steps."""
    peak: int
    """Largest number at any moment of forward and backward, persistent ones included."""


def gathered_elements(inputs: MemoryInputs) -> GatheredElements:
    """Elements gathered in one step, found by following DeepSpeed's fetches and releases.

    This models DeepSpeed 0.19.8, ``zero/partitioned_param_coordinator.py`` (fetch_sub_module, release_sub_module,
    __params_to_release), with a complete trace. Each tensor counts as a module of its own, used in the order of the
    model, forward and then backward. A real module gathers its weight and bias together, which adds little. The result
    is zero on a single rank that already has all parameters on the accelerator.
    """
    tensors, settings = inputs.profile.all_tensors, inputs.settings
    if inputs.data_parallel_size == 1 and (settings.offload_param is None or inputs.accelerator == "cpu"):
        return GatheredElements(persistent=0, peak=0)
    ranks = inputs.data_parallel_size
    # DeepSpeed gathers equal parts, so the padding of a tensor takes memory as well. Which tensors persist is decided
    # by their sizes without padding (zero/partition_parameters.py, ds_persist).
    sizes = [-(-elements // ranks) * ranks for elements in tensors]
    small = [elements <= settings.persistence_elements for elements in tensors]
    persistent = sum(size for size, stays in zip(sizes, small, strict=True) if stays)
    forward = [number for number, stays in enumerate(small) if not stays]
    if inputs.profile.tied_embeddings and forward[:1] == [0]:
        forward.append(0)  # a tied embedding is used again as LM head
    order = forward + forward[::-1]
    if deepspeed_keys.is_before("0.19.3"):
        # Nothing releases a module after its backward pass if its input needs no gradient (0.19.3 added
        # release_backward_leftovers). Measured with 0.16.9 to 0.18.9 on tied and untied embeddings.
        # Without known layers, the tensors before them are unknown too: only the first one, the embedding, counts.
        before = len(inputs.profile.before) if inputs.profile.layer else 1
        persistent += sum(size for size, stays in zip(sizes[:before], small, strict=False) if not stays)
    return GatheredElements(persistent=persistent, peak=persistent + _peak_elements(order, sizes, inputs))


def _peak_elements(order: Sequence[int], sizes: Sequence[int], inputs: MemoryInputs) -> int:
    """Largest sum of the sizes of the tensors that are gathered at any moment; ``order`` lists the uses of one step.

    At each use the tensor itself is fetched, then the tensors of the next uses while both limits (prefetch bucket, live
    parameters) leave room. After its use, the tensor is released, unless it was also fetched for a later use or its
    next use is within the reuse distance.
    """
    elements_before = [0, *accumulate(sizes[number] for number in order)]
    uses: dict[int, list[int]] = {}
    for step, number in enumerate(order):
        uses.setdefault(number, []).append(step)
    live: set[int] = set()
    # ``queued``: the next entry of DeepSpeed's parameter queue. ``fetched_for``: the last use that a tensor was
    # fetched for (__most_recent_step_id_param_fetched_for).
    elements = peak = queued = 0
    fetched_for: dict[int, int] = {}
    for step, number in enumerate(order):
        if number not in live:
            live.add(number)
            elements += sizes[number]
        queued = max(queued, step + 1)
        fetched_for[number] = max(fetched_for.get(number, -1), step)
        allowed = min(inputs.settings.max_live_elements - elements, inputs.settings.prefetch_elements)
        ahead = 0
        while queued < len(order) and ahead < allowed:  # the tensor that crosses the limit is still fetched
            following = order[queued]
            fetched_for[following] = queued
            # A tensor that is already gathered does not count toward the limit, but is kept for this use.
            if following not in live:
                live.add(following)
                elements += sizes[following]
                ahead += sizes[following]
            queued += 1
        peak = max(peak, elements)
        next_use = bisect_right(uses[number], step)
        used_soon = next_use < len(uses[number]) and (
            elements_before[uses[number][next_use]] - elements_before[step + 1] < inputs.settings.max_reuse_elements
        )
        if fetched_for[number] <= step and not used_soon:
            live.discard(number)
            elements -= sizes[number]
    return peak
