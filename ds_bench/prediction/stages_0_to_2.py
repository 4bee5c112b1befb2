"""Computes the memory of one rank at ZeRO stages 0 to 2, where every rank has all parameters.

Based on DeepSpeed 0.19.8; paths are relative to its ``runtime/``. Ranks differ by a few tensors; the results are for
the one with the most.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from .inputs import NORM_BYTES, MemoryInputs, Phases
from .model_states import FP32_BYTES, LedgerBuilder, flat_elements

ENGINE_BUCKET_ELEMENTS = 500_000_000
"""Stage 0 reduces gradients in flattened copies of this size (engine.py, buffered_allreduce_fallback)."""


def ledger_by_phase(inputs: MemoryInputs) -> Phases:
    """Compute one rank's ledgers at stage 0, 1 or 2."""
    if inputs.settings.stage == 0:
        return _unpartitioned(inputs)
    flat = flat_elements(inputs.profile.parameters, inputs.data_parallel_size)
    part = flat // inputs.data_parallel_size
    builder = LedgerBuilder()
    builder.add("gpu", "parameters", inputs.element * flat)
    # The rank's part is cloned on the accelerator before it becomes the master copy, wherever that is
    # (zero/stage_1_and_2.py, __init__: ``.detach().clone().to(device=…)``).
    start = builder.plus(temporaries=inputs.element * part)
    if inputs.settings.offload_optimizer:
        return {**_offloaded(inputs, part, builder), "initialize": start}
    builder.add("gpu", "optimizer_states", inputs.state * part)
    # engine.py, _do_optimizer_sanity_check
    settings = inputs.settings
    if not (inputs.precision == "bf16" and settings.fp32_accumulation and settings.stage == 1):
        return _partitioned(inputs, part, builder)
    # Every rank accumulates all gradients in fp32 from the start (bf16_optimizer.py, _setup_for_real_optimizer).
    builder.add("gpu", "gradients", FP32_BYTES * flat)
    single = builder.plus(gradients=inputs.element * inputs.profile.parameters)
    return {
        "forward": builder.ledger,
        "backward": single,
        "reduced": single,
        "flatten": builder.ledger,
        "update": builder.plus(square_roots=inputs.torch_step * part),
    }


def _unpartitioned(inputs: MemoryInputs) -> Phases:
    """Ledgers at stage 0. In 16-bit precision, the step makes fp32 gradients: one list of them
    (fp16/unfused_optimizer.py, step), or a list and a flat copy while the 16-bit ones still exist
    (fp16/fused_optimizer.py, step)."""
    count = inputs.profile.parameters
    builder = LedgerBuilder()
    builder.add("gpu", "parameters", inputs.element * count)
    builder.add("gpu", "optimizer_states", inputs.state * count)
    gradients = inputs.element * count
    bucket = min(count, ENGINE_BUCKET_ELEMENTS) * inputs.element if inputs.data_parallel_size > 1 else 0
    # Only DeepSpeed's FusedAdam gets the fused wrapper (engine.py, use_fused_optimizer).
    unfused = inputs.accelerator == "cpu" or inputs.settings.torch_optimizer
    copies = 0 if inputs.precision == "fp32" else 1 if unfused else 2
    update = FP32_BYTES * min(copies, 1) * count
    # From the second micro-batch on, the gradients of earlier ones exist during the forward pass.
    return {
        "forward": builder.plus(gradients=gradients if inputs.grad_accum > 1 else 0),
        "backward": builder.plus(gradients=gradients),
        "reduced": builder.plus(gradients=gradients, temporaries=bucket + _copy_to_send(inputs)),
        "flatten": builder.plus(gradients=gradients, temporaries=FP32_BYTES * copies * count),
        "update": builder.plus(gradients=gradients, temporaries=update, square_roots=inputs.torch_step * count),
    }


def bucket_bytes(inputs: MemoryInputs) -> int:
    """Bytes of the buckets during backward, at full size whatever the model (zero/stage_1_and_2.py, setup_buckets)."""
    settings = inputs.settings
    # Offload switches contiguous gradients on, whatever the configuration says (zero/stage_1_and_2.py, __init__).
    if not (settings.contiguous_gradients or settings.offload_optimizer):
        return 0
    # At stage 1 the bucket holds accumulated gradients, at stage 2 gradients as backward makes them
    # (_gradient_reduction_buffer_dtype). With overlap there are two, so that one is filled while the other is sent.
    element = inputs.accumulated if settings.stage == 1 else inputs.element
    # Under torch_autocast, gradients are sent in two number formats, each with its own buckets (torch_autocast.py).
    count = (2 if settings.autocast else 1) * (2 if settings.overlap_comm else 1)
    return element * settings.reduce_bucket_elements * count


def _copy_to_send(inputs: MemoryInputs) -> int:
    """Bytes of a bucket's copy in the number format of sent gradients, if that differs
    (zero/stage_1_and_2.py, gradient_reduction_w_predivide; engine.py, allreduce_bucket)."""
    if inputs.sent == inputs.element or inputs.data_parallel_size == 1:
        return 0
    stage = inputs.settings.stage
    most = inputs.settings.reduce_bucket_elements if stage else ENGINE_BUCKET_ELEMENTS
    return inputs.sent * min(inputs.profile.parameters, most)


def owned_elements(tensors: Sequence[int], data_parallel_size: int) -> int:
    """Return the largest number of gradient elements that a rank keeps (zero/stage_1_and_2.py, get_partition_info,
    get_flat_partition): every tensor that its part of the flat parameters touches, and the padding after the last."""
    ends = [0, *accumulate(tensors)]
    total = ends[-1]
    part, most = flat_elements(total, data_parallel_size) // data_parallel_size, 0
    # A rank whose part lies within one tensor keeps no more than the rank where that tensor begins: compute only the
    # ranks where tensors begin, and the last rank.
    for rank in {*(min(end // part, data_parallel_size - 1) for end in ends), data_parallel_size - 1}:
        start, stop = rank * part, (rank + 1) * part
        # Whole gradients are kept, including the parts of the first and the last one that belong to other ranks.
        begin = ends[max(0, bisect_right(ends, start) - 1)]
        end = ends[min(bisect_left(ends, stop), len(tensors))]
        most = max(most, max(0, end - min(begin, end)) + max(0, stop - max(total, start)))
    return most


def _in_flat_order(inputs: MemoryInputs) -> Sequence[int]:
    """Sizes of the tensors in the order of the flat parameters (zero/stage_1_and_2.py, _round_robin_reorder)."""
    tensors, ranks = inputs.profile.tensors, inputs.data_parallel_size
    if inputs.settings.round_robin:
        return tuple(each for rank in range(ranks) for each in tensors[rank::ranks])
    return tensors


def _owned_elements(inputs: MemoryInputs) -> int:
    return owned_elements(_in_flat_order(inputs), inputs.data_parallel_size)


def _large_gradients(inputs: MemoryInputs) -> tuple[int, int]:
    """Gradient elements that one rank keeps until backward ends if stage 1 reduces during backward: the maximum with
    the rank's own, and the maximum without them. Other ranks' gradients are not freed when they are reduced
    (zero/stage_1_and_2.py, reduce_ipg_grads): small ones are in the bucket, larger ones are not
    (reduce_independent_p_g_buckets_and_remove_grads)."""
    tensors, ranks = _in_flat_order(inputs), inputs.data_parallel_size
    ends = [0, *accumulate(tensors)]
    large = [0, *accumulate(size if size > inputs.settings.reduce_bucket_elements else 0 for size in tensors)]
    part = flat_elements(ends[-1], ranks) // ranks
    with_own = others = 0
    for rank in range(ranks):
        last = min(bisect_left(ends, (rank + 1) * part), len(tensors))
        first = min(bisect_right(ends, rank * part) - 1, last)
        padding = max(0, (rank + 1) * part - max(rank * part, ends[-1]))
        of_others = large[-1] - (large[last] - large[first])
        with_own = max(with_own, ends[last] - ends[first] + padding + of_others)
        others = max(others, of_others)
    return with_own, others


def _norm_bytes(tensors: Sequence[int], part: int) -> int:
    """Bytes of the fp64 copy of the largest gradient, or of its share in a rank's part, whose norm is computed."""
    return NORM_BYTES * min(part, max(tensors, default=0))


def _partitioned(inputs: MemoryInputs, part: int, builder: LedgerBuilder) -> Phases:
    """Ledgers at stages 1 and 2 without offload. Stage 1 keeps all gradients until the last exists, unless it
    reduces during backward; stage 2 keeps those of the rank's part. The step computes the norm of each gradient in fp64
    (get_grad_norm_direct), flattens the rank's part, then casts it to fp32 (zero/stage_1_and_2.py, step)."""
    # ``kept``: gradients after the reduction. ``every``: gradients at their peak, with ``extra`` as temporaries.
    kept = every = inputs.element * _owned_elements(inputs)
    extra = max(inputs.profile.tensors) * inputs.element
    if inputs.settings.stage == 1 and not reduces_meanwhile(inputs):
        extra = kept = inputs.accumulated * _owned_elements(inputs)
        every = inputs.accumulated * inputs.profile.parameters
    elif inputs.settings.stage == 1:  # reduced during backward
        every = inputs.element * _large_gradients(inputs)[0]
    elif inputs.accumulates_apart:  # one fp32 buffer of the part's size (_build_compact_grad_partition_buffer)
        kept = every = FP32_BYTES * part
    elif inputs.grad_accum > 1:  # gradients of a second micro-batch get a buffer of their own before they are added
        extra += kept
    bucket, sent, norm = bucket_bytes(inputs), _copy_to_send(inputs), _norm_bytes(inputs.profile.tensors, part)
    master = inputs.settings.master_bytes
    cast = master * part if inputs.accumulated != master else 0
    # Stage 2 accumulates in one flat fp32 buffer (_build_compact_grad_partition_buffer), so nothing is flattened.
    flattened = 0 if inputs.settings.stage == 2 and inputs.accumulates_apart else inputs.accumulated * part
    return {
        "forward": builder.plus(gradients=0 if inputs.grad_accum == 1 else every),
        "backward": builder.plus(gradients=every, deepspeed_buffers=bucket, temporaries=sent),
        "reduced": builder.plus(gradients=every, deepspeed_buffers=bucket, temporaries=extra + sent),
        "flatten": builder.plus(gradients=kept, temporaries=max(norm, flattened + cast)),
        # The step frees the gradients once their fp32 copy exists (free_grad_in_param_list).
        "update": builder.plus(temporaries=master * part, square_roots=inputs.torch_step * part),
    }


def reduces_meanwhile(inputs: MemoryInputs) -> bool:
    """Whether stage 1 moves each gradient into a bucket, which is reduced during backward. If not, all gradients stay
    until the last one exists (zero/stage_1_and_2.py, reduce_gradients, reduce_ipg_grads)."""
    settings = inputs.settings
    buckets = settings.overlap_comm and (settings.contiguous_gradients or settings.offload_optimizer is not None)
    return settings.stage == 1 and buckets and inputs.grad_accum == 1 and not inputs.accumulates_apart


def _offloaded(inputs: MemoryInputs, part: int, builder: LedgerBuilder) -> Phases:
    """Ledgers at stages 1 and 2 with the optimizer on the host: the fp32 master copy and its gradient, a 16-bit copy of
    the updated part, and one gradient of the largest tensor on either side (zero/stage_1_and_2.py, __init__). As each
    gradient is reduced, the norm of its share in the rank's part is computed from an fp64 copy
    (set_norm_for_param_grad_in_gpu, copy_grads_in_partition): after backward for a tied embedding, during backward for
    any other tensor."""
    settings, tensors = inputs.settings, inputs.profile.tensors
    single, pins = inputs.element * max(tensors), settings.pin_optimizer and inputs.accelerator == "cuda"
    builder.add("gpu", "gradients", single)
    # Moments are not pinned: DeepSpeedCPUAdam makes them with torch.zeros_like (ops/adam/cpu_adam.py).
    builder.add("cpu", "optimizer_states", settings.moment_bytes * settings.moments * part)
    builder.add_pinned("optimizer_states", settings.master_bytes * part, pinned=pins)
    builder.add_pinned("gradients", settings.master_bytes * part, pinned=pins)
    builder.add_pinned("gradients", single, pinned=pins)
    builder.add_pinned("deepspeed_buffers", inputs.element * part, pinned=pins)
    # accumulated_grads_in_cpu, tensor by tensor; with a 16-bit master they are views of the master's gradient
    if inputs.grad_accum > 1 and settings.stage == 2 and settings.master_bytes == FP32_BYTES:
        builder.add("cpu", "gradients", inputs.element * _owned_elements(inputs))
    if inputs.accumulates_apart:  # _get_compact_grad_partition_buffer
        builder.add("gpu", "gradients", FP32_BYTES * part)
    keeps_all = settings.stage == 1 and not reduces_meanwhile(inputs)
    every = inputs.accumulated * inputs.profile.parameters if keeps_all else 0
    if reduces_meanwhile(inputs):
        every = inputs.element * _large_gradients(inputs)[1]
    in_flight = (0 if keeps_all else single) + _copy_to_send(inputs)
    bucket = bucket_bytes(inputs)
    inner = _norm_bytes(tensors[1:] if inputs.profile.trains_tied_embeddings else tensors, part)
    return {
        "forward": builder.plus(gradients=every if inputs.grad_accum > 1 else 0),
        "backward": builder.plus(gradients=every, deepspeed_buffers=bucket, temporaries=in_flight + inner),
        "reduced": builder.plus(
            gradients=every, deepspeed_buffers=bucket, temporaries=in_flight + _norm_bytes(tensors, part)
        ),
        "flatten": builder.ledger,
        "update": builder.ledger,
    }
