"""Computes the memory of one rank without DeepSpeed: of torch's own engines, DistributedDataParallel and FSDP2, and of
a model's passes without an optimizer.

Written from torch 2.13, ``worker/reference_engines.py``. Both engines keep fp32
parameters, gradients and moments and no further master copy.
"""

from __future__ import annotations

from .inputs import MemoryInputs, Phases
from .model_states import FP32_BYTES, LedgerBuilder


def ledger_by_phase(inputs: MemoryInputs) -> Phases:
    """Compute one rank's ledgers for the engine of ``inputs``, or for a model's passes without an optimizer."""
    if inputs.pass_type == "train":
        return _ddp(inputs) if inputs.engine == "ddp" else _fsdp2(inputs)
    # Without an optimizer: parameters in the number format of training, and gradients if there is a backward pass.
    size = inputs.element * inputs.profile.parameters
    builder = LedgerBuilder()
    builder.add("gpu", "parameters", size)
    after = builder.plus(gradients=size if inputs.pass_type == "forward_backward" else 0)
    return {"forward": builder.ledger, "backward": after, "reduced": after, "flatten": after, "update": after}


def _ddp(inputs: MemoryInputs) -> Phases:
    """Ledgers of DDP: every rank holds all, gradients are views into buckets that stay (nn/parallel/distributed.py,
    gradient_as_bucket_view). While micro-batches are accumulated the gradients are tensors of their own."""
    count = inputs.profile.parameters
    builder = LedgerBuilder()
    builder.add("gpu", "parameters", FP32_BYTES * count)
    builder.add("gpu", "optimizer_states", FP32_BYTES * inputs.settings.moments * count)
    builder.add("gpu", "gradients", FP32_BYTES * count * (1 if inputs.grad_accum == 1 else 2))
    return {
        "forward": builder.ledger,
        "backward": builder.plus(temporaries=FP32_BYTES * max(inputs.profile.tensors)),
        "reduced": builder.ledger,
        "flatten": builder.ledger,
        "update": builder.plus(temporaries=_step_bytes(inputs) * count),
    }


def _fsdp2(inputs: MemoryInputs) -> Phases:
    """Ledgers of FSDP2: fp32 parts of every tensor, split by rows, and gathered groups in the number format of training
    (distributed/fsdp/_fully_shard).

    The group of the tensors outside the blocks stays gathered from the forward pass to the end of backward. Of the
    blocks the current one is gathered, and the next one into a flat buffer; in backward its gradients come to it, and
    the flat copy that is reduced. Whole gradients of all groups are held while micro-batches are accumulated.
    """
    profile, element = inputs.profile, inputs.element
    part, frozen_part = _part_elements(inputs)
    block, outside = _group_elements(inputs)
    builder = LedgerBuilder()
    builder.add("gpu", "parameters", FP32_BYTES * (part + frozen_part))
    builder.add("gpu", "optimizer_states", FP32_BYTES * inputs.settings.moments * part)
    gathered = element * (outside + 2 * block)
    reduced = FP32_BYTES * part
    waiting = element * profile.parameters if inputs.grad_accum > 1 else 0
    return {
        "forward": builder.plus(gathered_parameters=gathered, gradients=waiting),
        "backward": builder.plus(gathered_parameters=gathered, temporaries=gathered, gradients=waiting or reduced),
        "reduced": builder.plus(gradients=reduced),
        "flatten": builder.plus(gradients=reduced),
        "update": builder.plus(gradients=reduced, temporaries=_step_bytes(inputs) * part),
    }


def _part_elements(inputs: MemoryInputs) -> tuple[int, int]:
    """Elements of the rank with the most, of tensors that are trained and of the others. A tensor is split by rows, of
    which each rank but the last ones has the same number (distributed/tensor/placement_types.py, Shard)."""
    profile, ranks = inputs.profile, inputs.data_parallel_size
    frozen_positions = {position for position, _ in profile.frozen}
    trained = frozen = 0
    for position, elements in enumerate(profile.all_tensors):
        # Without known rows a tensor counts as split by elements, the finest split there is.
        rows = profile.rows[position] if profile.rows else elements
        part = -(-rows // ranks) * (elements // max(1, rows))
        if position in frozen_positions:
            frozen += part
        else:
            trained += part
    return trained, frozen


def _group_elements(inputs: MemoryInputs) -> tuple[int, int]:
    """Elements of one block, and of the tensors outside the blocks.

    Of a model whose blocks are not known by themselves, all but the largest tensor is taken to be in equal blocks.
    """
    profile = inputs.profile
    if profile.layer:
        return sum(profile.layer), sum(profile.before) + sum(profile.after)
    outside = max(profile.all_tensors)
    return (profile.parameters + profile.frozen_parameters - outside) // profile.layers, outside


def _step_bytes(inputs: MemoryInputs) -> int:
    """Bytes per updated element of the square roots that torch's multi-tensor Adam takes; its fused one takes none."""
    return FP32_BYTES if inputs.accelerator == "cpu" else 0
