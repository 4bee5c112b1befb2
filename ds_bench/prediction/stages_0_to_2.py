"""Stages 0 to 2 by formula: what each rank holds while every rank has all parameters.

Written from DeepSpeed 0.19.8; the paths are below its ``runtime/``. Ranks differ by a few tensors; the fullest counts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from .inputs import NORM_BYTES, LedgerBuilder, MemoryInputs, Phases
from .model_states import FP32_BYTES, Ledger, flat_elements

_ENGINE_BUCKET_ELEMENTS = 500_000_000
"""Stage 0 reduces gradients in flattened copies of this size (engine.py, buffered_allreduce_fallback)."""


def ledger_by_phase(case: MemoryInputs) -> Phases:
    """One rank's ledgers at stage 0, 1 or 2."""
    if case.settings.stage == 0:
        return _unpartitioned(case)
    if _in_bf16_optimizer(case):
        return _bf16_optimizer(case)
    return _offloaded(case) if case.settings.offload_optimizer else _partitioned(case)


def _unpartitioned(case: MemoryInputs) -> Phases:
    """Stage 0. In 16 bit the step makes fp32 gradients: one list of them (fp16/unfused_optimizer.py, step), or a list
    and a flat copy while the 16-bit ones are there (fp16/fused_optimizer.py, step)."""
    count = case.profile.parameters
    builder = (
        LedgerBuilder()
        .add("gpu", "parameters", case.element * count)
        .add("gpu", "optimizer_states", case.state * count)
    )
    gradients = ("gpu", "gradients", case.element * count)
    bucket = min(count, _ENGINE_BUCKET_ELEMENTS) * case.element if case.data_parallel_size > 1 else 0
    copies = 0 if case.precision == "fp32" else 1 if _unfused(case) else 2
    return {
        "forward": builder.plus(*([gradients] if case.grad_accum > 1 else [])),
        "backward": builder.plus(gradients),
        "reduced": builder.plus(gradients, ("gpu", "temporaries", bucket)),
        "flatten": builder.plus(gradients, ("gpu", "temporaries", FP32_BYTES * copies * count)),
        "update": builder.plus(
            gradients, ("gpu", "temporaries", (FP32_BYTES * min(copies, 1) + case.torch_step) * count)
        ),
    }


def _unfused(case: MemoryInputs) -> bool:
    return case.accelerator == "cpu" or case.settings.torch_optimizer


def _bucket(case: MemoryInputs, element: int) -> int:
    """Held while backward runs, at full size whatever the model's (zero/stage_1_and_2.py, setup_buckets)."""
    if not (case.settings.contiguous_gradients or case.settings.offload_optimizer):
        return 0
    return element * case.settings.reduce_bucket_elements * (2 if case.settings.overlap_comm else 1)


def owned_elements(tensors: Sequence[int], data_parallel_size: int) -> int:
    """Elements of the gradients that the fullest rank keeps: every tensor whole that its part of the flat parameters
    touches, and the padding behind the last (zero/stage_1_and_2.py, get_partition_info, get_flat_partition)."""
    ends = [0, *accumulate(tensors)]
    total = ends[-1]
    part, most = flat_elements(total, data_parallel_size) // data_parallel_size, 0
    # A rank within one tensor keeps no more than the rank where that tensor begins: only those, and the last, count.
    for rank in {*(min(end // part, data_parallel_size - 1) for end in ends), data_parallel_size - 1}:
        start, stop = rank * part, (rank + 1) * part
        begin = ends[max(0, bisect_right(ends, start) - 1)]
        end = ends[min(bisect_left(ends, stop), len(tensors))]
        most = max(most, max(0, end - min(begin, end)) + max(0, stop - max(total, start)))
    return most


def _norm_bytes(tensors: Sequence[int], part: int) -> int:
    """Of the fp64 copy of one gradient, or of what a rank's part has of it, that its norm is taken of."""
    return NORM_BYTES * min(part, max(tensors, default=0))


def _partitioned(case: MemoryInputs) -> Phases:
    """Stage 1 keeps all gradients until the last is there, stage 2 those of its part. The step takes the norm of each
    gradient in fp64 (get_grad_norm_direct), flattens its part, then casts it to fp32 (zero/stage_1_and_2.py, step)."""
    flat = flat_elements(case.profile.parameters, case.data_parallel_size)
    part = flat // case.data_parallel_size
    builder = (
        LedgerBuilder().add("gpu", "parameters", case.element * flat).add("gpu", "optimizer_states", case.state * part)
    )
    kept, every, extra = _gradients(case, part)
    bucket = _bucket(case, case.accumulated if case.settings.stage == 1 else case.element)
    cast = FP32_BYTES * part if case.accumulated != FP32_BYTES else 0
    flattened = 0 if case.settings.stage == 2 and case.settings.fp32_accumulation else case.accumulated * part
    norm = _norm_bytes(case.profile.tensors, part)
    return {
        "forward": builder.plus(("gpu", "gradients", 0 if case.grad_accum == 1 else every)),
        "backward": builder.plus(("gpu", "gradients", every), ("gpu", "deepspeed_buffers", bucket)),
        "reduced": builder.plus(
            ("gpu", "gradients", every), ("gpu", "deepspeed_buffers", bucket), ("gpu", "temporaries", extra)
        ),
        "flatten": builder.plus(("gpu", "gradients", kept), ("gpu", "temporaries", max(norm, flattened + cast))),
        "update": builder.plus(("gpu", "temporaries", (FP32_BYTES + case.torch_step) * part)),
    }


def _gradients(case: MemoryInputs, part: int) -> tuple[int, int, int]:
    """Bytes of gradients after the reduction, at their peak in backward, and of what lies beside them then."""
    owned = owned_elements(case.profile.tensors, case.data_parallel_size)
    largest = max(case.profile.tensors) * case.element
    if case.settings.stage == 1:
        kept = case.accumulated * owned
        return kept, case.accumulated * case.profile.parameters, kept
    if case.settings.fp32_accumulation:  # one fp32 buffer of the part's size (_build_compact_grad_partition_buffer)
        return FP32_BYTES * part, FP32_BYTES * part, largest
    kept = case.element * owned
    # The gradients of a second micro-batch get a buffer of their own before they are added.
    return kept, kept, largest + (kept if case.grad_accum > 1 else 0)


def _offloaded(case: MemoryInputs) -> Phases:
    """Stages 1 and 2 with the optimizer on the host: the fp32 master and its gradient, a 16-bit copy of the updated
    part, and one gradient of the largest tensor on either side (zero/stage_1_and_2.py, __init__). As each gradient is
    reduced, its norm is taken of an fp64 copy of what the rank's part has of it (set_norm_for_param_grad_in_gpu,
    copy_grads_in_partition): of a tied embedding when backward has ended, of any other tensor within backward."""
    settings = case.settings
    flat = flat_elements(case.profile.parameters, case.data_parallel_size)
    part = flat // case.data_parallel_size
    single, pins = case.element * max(case.profile.tensors), settings.pin_optimizer and case.accelerator == "cuda"
    builder = LedgerBuilder().add("gpu", "parameters", case.element * flat).add("gpu", "gradients", single)
    builder.add("cpu", "optimizer_states", FP32_BYTES * settings.moments * part)
    builder.pinned("optimizer_states", FP32_BYTES * part, pinned=pins)
    builder.pinned("gradients", FP32_BYTES * part, pinned=pins)
    builder.pinned("gradients", single, pinned=pins)
    builder.pinned("deepspeed_buffers", case.element * part, pinned=pins)
    if case.grad_accum > 1 and settings.stage == 2:  # accumulated_grads_in_cpu, tensor by tensor
        builder.add("cpu", "gradients", case.element * owned_elements(case.profile.tensors, case.data_parallel_size))
    if settings.fp32_accumulation and case.element != FP32_BYTES:  # _get_compact_grad_partition_buffer
        builder.add("gpu", "gradients", FP32_BYTES * part)
    every = case.accumulated * case.profile.parameters if settings.stage == 1 else 0
    bucket = ("gpu", "deepspeed_buffers", _bucket(case, case.accumulated if settings.stage == 1 else case.element))
    tensors = case.profile.tensors
    inner = _norm_bytes(tensors[1:] if case.profile.tied_embeddings else tensors, part)
    own_gradient = 0 if every else single
    backward = builder.plus(("gpu", "gradients", every), bucket, ("gpu", "temporaries", own_gradient + inner))
    reduced = builder.plus(
        ("gpu", "gradients", every), bucket, ("gpu", "temporaries", own_gradient + _norm_bytes(tensors, part))
    )
    forward = builder.plus(("gpu", "gradients", every if case.grad_accum > 1 else 0))
    return {
        "forward": forward,
        "backward": backward,
        "reduced": reduced,
        "flatten": builder.ledger,
        "update": builder.ledger,
    }


def _in_bf16_optimizer(case: MemoryInputs) -> bool:
    """bf16 with fp32 accumulation at stage 1, not offloaded to the CPU (engine.py, _do_optimizer_sanity_check)."""
    settings = case.settings
    wanted = case.precision == "bf16" and settings.fp32_accumulation and settings.stage == 1
    return wanted and settings.offload_optimizer is None


def _bf16_optimizer(case: MemoryInputs) -> Phases:
    """Every rank accumulates all gradients in fp32 for good (bf16_optimizer.py, _setup_for_real_optimizer)."""
    flat = flat_elements(case.profile.parameters, case.data_parallel_size)
    part = flat // case.data_parallel_size
    builder = (
        LedgerBuilder().add("gpu", "parameters", case.element * flat).add("gpu", "optimizer_states", case.state * part)
    )
    builder.add("gpu", "gradients", FP32_BYTES * flat)
    single: Ledger = builder.plus(("gpu", "gradients", case.element * case.profile.parameters))
    update = builder.plus(("gpu", "temporaries", case.torch_step * part))
    return {
        "forward": builder.ledger,
        "backward": single,
        "reduced": single,
        "flatten": builder.ledger,
        "update": update,
    }
