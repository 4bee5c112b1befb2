"""Computes the memory of one rank with torch's own engines, DDP and FSDP2, and in passes without an optimizer.

Based on torch 2.13 and ``worker/reference_engines.py``. Both engines keep parameters, gradients and moments in fp32,
and no additional master copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..config.strategies import DDP_BUCKET_MB
from .inputs import MemoryInputs, Phases
from .model_profile import ModelProfile
from .model_states import FP32_BYTES, LedgerBuilder

DDP_BUCKET_BYTES, DDP_BROADCAST_BYTES = DDP_BUCKET_MB * 2**20, 250 * 2**20
"""Size of a gradient bucket, and of the buckets in which torch first broadcasts the weights."""


def ledger_by_phase(inputs: MemoryInputs) -> Phases:
    """Compute one rank's ledgers for the engine of ``inputs``, or for a model's passes without an optimizer."""
    builder = LedgerBuilder()
    if inputs.pass_type != "train":  # parameters in the number format of training, gradients after a backward pass
        size = inputs.element * inputs.profile.parameters
        builder.add("gpu", "parameters", size)
        after = builder.plus(gradients=size if inputs.pass_type == "forward_backward" else 0)
        return {"forward": builder.ledger, "backward": after, "reduced": after, "flatten": after, "update": after}
    if inputs.engine == "fsdp2":
        return _fsdp2(inputs, builder)
    # DDP: every rank holds everything, and gradients are views into permanent buckets (nn/parallel/distributed.py,
    # gradient_as_bucket_view). While micro-batches are accumulated, gradients are tensors of their own.
    size = FP32_BYTES * inputs.profile.parameters
    builder.add("gpu", "parameters", size)
    builder.add("gpu", "optimizer_states", inputs.settings.moments * size)
    builder.add("gpu", "gradients", size * (1 if inputs.grad_accum == 1 else 2))
    return {
        "forward": builder.ledger,
        "backward": builder.plus(temporaries=FP32_BYTES * max(inputs.profile.tensors)),
        "reduced": builder.ledger,
        "flatten": builder.ledger,
        "update": builder.plus(square_roots=_square_roots(inputs, size)),
    }


def bucket_sizes(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the bytes of DDP's buckets: each ends with the tensor that reaches the limit
    (csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size)."""
    found = [0]
    for size in sizes:
        if found[-1] >= limit:
            found.append(0)
        found[-1] += size
    return found


def _square_roots(inputs: MemoryInputs, updated_bytes: int) -> int:
    """Bytes of the square roots in torch's multi-tensor Adam; the fused one has none."""
    return updated_bytes if inputs.accelerator == "cpu" else 0


def row_parts(profile: ModelProfile, ranks: int) -> list[int]:
    """Return the elements of each tensor on the rank with the most: FSDP2 splits tensors by rows, and all ranks but the
    last ones have the same number (distributed/tensor/placement_types.py, Shard).

    Without known rows, a tensor counts as split by elements, the finest possible split.
    """
    sizes = profile.all_tensors
    return [-(-rows // ranks) * (size // max(1, rows)) for size, rows in zip(sizes, profile.rows or sizes, strict=True)]


def _fsdp2(inputs: MemoryInputs, builder: LedgerBuilder) -> Phases:
    """Ledgers of FSDP2: fp32 parts of every tensor, split by rows, and gathered groups in the number format of training
    (distributed/fsdp/_fully_shard).

    The group of the tensors outside the blocks stays gathered from the forward pass to the end of backward. The current
    block is gathered, and the next is being gathered into a flat buffer. Backward adds the gradients of that group and
    of the block, and the flat copy of the block's gradients that is reduced. Whole gradients of all groups are held
    while micro-batches are accumulated.
    """
    profile, element, ranks = inputs.profile, inputs.element, inputs.data_parallel_size
    parts = row_parts(profile, ranks)
    part = sum(parts) - sum(parts[position] for position, _ in profile.frozen)
    if profile.layer:
        block, outside = sum(profile.layer), sum(profile.before) + sum(profile.after)
    else:  # the blocks' tensors are unknown: assume all but the largest are spread evenly over them
        outside = max(profile.all_tensors)
        block = (profile.all_parameters - outside) // profile.layers
    builder.add("gpu", "parameters", FP32_BYTES * sum(parts))
    builder.add("gpu", "optimizer_states", FP32_BYTES * inputs.settings.moments * part)
    gathered = element * (outside + 2 * block)
    reduced = FP32_BYTES * part
    waiting = element * profile.parameters if inputs.grad_accum > 1 else 0
    return {
        "forward": builder.plus(gathered_parameters=gathered, gradients=waiting),
        "backward": builder.plus(gathered_parameters=gathered, temporaries=gathered, gradients=waiting or reduced),
        "reduced": builder.plus(gradients=reduced),
        "flatten": builder.plus(gradients=reduced),
        "update": builder.plus(gradients=reduced, square_roots=_square_roots(inputs, reduced)),
    }
