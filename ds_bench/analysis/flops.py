"""Floating-point operations (FLOPs) per token, and peak rates of devices, for model FLOPs utilization (MFU).

FLOPs are computed from the model's shape or, if it is unknown or only part of the model is trained, counted by
operation (``worker.flop_count``); a multiply-add counts as two. Conventions differ by up to 17 % on common models, so
each number is stored with its convention; do not compare numbers across conventions.

Peak rates come from a table of devices (``system/device_specifications.json``), found by name. A device missing from
the table has no peak rate: the rate of a similar device is never assumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..models.presets import ModelFacts
from ..system import device_specifications

if TYPE_CHECKING:
    from ..records.schema import TrialRecord

MODEL_CONVENTION = (
    "PaLM appendix B: 6*N_matmul + 12*L*H*Q*T per token, forward and backward, full attention, no recomputation"
)
FORWARD_CONVENTION = "a third of PaLM appendix B: the forward pass of one token, full attention"
COUNTED_CONVENTION = (
    "counted: 2 per multiply-add of the matrix products, convolutions and attention that ran forward and backward, "
    "full attention, no recomputation, none for gradients of frozen weights"
)


def model_flops_per_token(facts: ModelFacts, seq_length: int) -> int:
    """Return the FLOPs of the forward and backward pass of one token: 6*N_matmul + 12*L*H*Q*T.

    N_matmul: parameters used in matrix products; L layers, H heads, Q head dimension, T sequence length in tokens.
    Attention is counted in full, even where a causal mask or a sliding window skips work. Recomputation is not counted;
    see ``hardware_flops_per_token``. Source: Chowdhery et al., "PaLM" (2022), appendix B.
    """
    return 6 * facts.matmul_parameters + 2 * _half_attention_flops(facts, seq_length)


def causal_flops_per_token(facts: ModelFacts, seq_length: int) -> int:
    """Return ``model_flops_per_token`` with half the attention term: a token attends to half the sequence on average.

    Closer to what FlashAttention executes, and always the smaller of the two.
    """
    return 6 * facts.matmul_parameters + _half_attention_flops(facts, seq_length)


def hardware_flops_per_token(facts: ModelFacts, seq_length: int, activation_checkpointing: bool) -> int:
    """Return the FLOPs executed per token: 4/3 of the model FLOPs with full activation checkpointing (forward twice).

    With checkpointing, the result is too large by the LM head's forward pass, which is not recomputed: 8 % for gpt2,
    less for large models.
    """
    flops = model_flops_per_token(facts, seq_length)
    # Forward is a third of forward and backward; both terms are multiples of six, so the division is exact.
    return flops + flops // 3 if activation_checkpointing else flops


def _half_attention_flops(facts: ModelFacts, seq_length: int) -> int:
    """Return 6*L*H*Q*T: scores and weighted values, two FLOPs each, three times (forward, twice backward), for T/2."""
    return 6 * facts.layers * facts.attention_heads * facts.head_dim * seq_length


def peak_precision(record: TrialRecord) -> str:
    """Return the number format of a trial's matrix products: ``tf32`` for fp32 if torch allowed it."""
    precision = record.trial.workload.precision
    return "tf32" if precision == "fp32" and any(rank.tf32 for rank in record.ranks) else precision


def mean_peak_flops(device_names: tuple[str, ...], precision: str) -> float | None:
    """Return the mean dense peak rate of a job's devices in FLOP/s; None without devices, or if any rate is unknown.

    ``device_names``: as NVML or torch reports them. ``precision``: fp32 is true fp32, without tensor cores on NVIDIA.
    A rate is unknown if the device is not in the table or has no hardware for that format (bf16 on a V100). A slice of
    a device (MIG, vGPU) and a variant (Laptop, Ti, D) count as different devices.
    """
    rates = [device_specifications.peak_tflops(name, precision) for name in device_names]
    known = [rate * 1e12 for rate in rates if rate is not None]
    return sum(known) / len(known) if known and len(known) == len(rates) else None
