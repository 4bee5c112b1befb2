"""Computes model states: bytes of parameters, gradients and optimizer states per rank; the moments of each optimizer.

Based on DeepSpeed 0.19.8; paths are relative to its ``runtime/``. Assumes AdamW, and gradients accumulated in the
number format of the parameters (``engine.py``, get_data_types). Not included: DeepSpeed's own buffers, gathered
parameters, and anything else a step needs (``stages_0_to_2``, ``stage_3``).

====== ================================================================================================================
stage  source
====== ================================================================================================================
0      fp32: only torch's optimizer, which keeps no second copy (``engine.py``, _do_optimizer_sanity_check). 16-bit:
       an fp32 master of everything (``fp16/unfused_optimizer.py``, ``fp16/fused_optimizer.py``, __init__)
1, 2   the flat parameters are padded to a multiple of twice the ranks (``zero/stage_1_and_2.py``,
       nccl_start_alignment_factor); each rank clones its part as the fp32 master, even in fp32 training
       (single_partition_of_fp32_groups)
3      each tensor is padded to a multiple of the ranks (``zero/partition_parameters.py``, _padding_size); the master
       is a copy even in fp32 training, since ``tensor.device == self.device`` compares a device with a string
       (``zero/stage3.py``, _create_fp32_partitions)
====== ================================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable

from ..config.spec import Configuration, Precision
from .torch_allocators import largest_rounded_bytes

Ledger = dict[str, dict[str, int]]
"""tier (``gpu``, ``cpu``, ``nvme``) → category → bytes per rank."""

FP32_BYTES = 4
MOMENTS = {"adam": 2, "adamw": 2, "lion": 1, "adagrad": 1, "sgd": 0}
"""Optimizer, lower case → tensors per parameter that it keeps besides the weights."""


class LedgerBuilder:
    """Sums bytes by tier and category into a ledger."""

    def __init__(self, start: Ledger | None = None) -> None:
        self.ledger: Ledger = {tier: dict(row) for tier, row in (start or {}).items()}

    def add(self, tier: str, category: str, count_bytes: int) -> None:
        """Add bytes to a category; 0 bytes make no entry."""
        if count_bytes:
            row = self.ledger.setdefault(tier, {})
            row[category] = row.get(category, 0) + count_bytes

    def add_pinned(self, category: str, count_bytes: int, *, pinned: bool) -> None:
        """Add one piece of host memory, which torch's pinned allocator rounds up to a power of two, unless it is larger
        than ``pinned_max_round_threshold_mb`` (aten/src/ATen/core/CachingHostAllocator.h, allocate)."""
        self.add("cpu", category, count_bytes)
        # A category of its own: the ledger of a run counts tensors, which are not rounded
        # (``predicted_memory.UNCOUNTED``).
        if pinned and 1 < count_bytes <= largest_rounded_bytes():
            self.add("cpu", "pinned_rounding", (1 << (count_bytes - 1).bit_length()) - count_bytes)

    def plus(self, **gpu_bytes: int) -> Ledger:
        """Return a copy of the ledger with further bytes on the GPU, by category."""
        return plus(self.ledger, **gpu_bytes)


def plus(ledger: Ledger, **gpu_bytes: int) -> Ledger:
    """Return a copy of a ledger with further bytes on the GPU, by category."""
    builder = LedgerBuilder(ledger)
    for category, count_bytes in gpu_bytes.items():
        builder.add("gpu", category, count_bytes)
    return builder.ledger


def element_bytes(precision: Precision) -> int:
    """Return the bytes of one element of a parameter."""
    return 4 if precision == "fp32" else 2


def flat_elements(parameters: int, data_parallel_size: int) -> int:
    """Return the elements of the flat parameters at stages 1 and 2, padded to a multiple of twice the ranks."""
    unit = 2 * data_parallel_size
    return -(-parameters // unit) * unit


def partition_elements(tensors: Iterable[int], data_parallel_size: int) -> int:
    """Return the elements that one rank holds at stage 3, where each tensor is padded to a multiple of the ranks."""
    return sum(-(-elements // data_parallel_size) for elements in tensors)


def model_states(
    parameters: int, data_parallel_size: int, configuration: Configuration, precision: Precision
) -> Ledger:
    """Return the bytes per rank between steps, plus the gradients at the size that they have while they exist.

    ``parameters``: elements of the whole model, treated as one tensor. Stage 3 pads every tensor, which adds less than
    one element per tensor and rank. Tiers that hold nothing are left out. Optimizer offload permanently keeps an
    fp32 gradient of the rank's part (initialize_optimizer_states in stage_1_and_2.py and stage3.py), and at stage 3
    also the accumulated one (grad_partitions_flat_buffer); stage 1 keeps every gradient on the GPU until the last one
    exists.
    """
    if configuration.is_reference:
        # DDP has stage 0 and splits nothing, FSDP2 has stage 3. Both keep everything in fp32, whatever the precision.
        held = parameters if configuration.stage == 0 else -(-parameters // data_parallel_size)
        sizes = {"parameters": 1, "gradients": 1, "optimizer_states": MOMENTS["adamw"]}
        return {"gpu": {category: FP32_BYTES * copies * held for category, copies in sizes.items()}}
    whole = flat_elements(parameters, data_parallel_size) if configuration.stage in (1, 2) else parameters
    part = -(-whole // data_parallel_size) if configuration.stage else whole
    size, stage, offload_param = element_bytes(precision), configuration.stage, configuration.offload_param
    home = "gpu"
    if configuration.offload_optimizer != "none" and stage:
        # Stages 1 and 2 run NVMe as CPU offload (``zero/stage_1_and_2.py``, __init__).
        home = configuration.offload_optimizer if stage == 3 else "cpu"
    builder = LedgerBuilder()
    if stage < 3:
        builder.add("gpu", "parameters", size * whole)
    else:
        builder.add("gpu" if offload_param == "none" else offload_param, "parameters", size * part)
    if home == "gpu":
        # From stage 2 on a rank keeps only the reduced gradients of its own part.
        builder.add("gpu", "gradients", size * (part if stage >= 2 else parameters))
    else:
        builder.add(home, "gradients", FP32_BYTES * part)
        if stage == 1:
            builder.add("gpu", "gradients", size * parameters)
        if stage == 3:
            builder.add("cpu", "gradients", size * part)
    # fp32 master copy and two Adam moments; no copy at stage 0 in fp32.
    copies = MOMENTS["adamw"] + (stage > 0 or precision != "fp32")
    builder.add(home, "optimizer_states", FP32_BYTES * copies * part)
    return builder.ledger
