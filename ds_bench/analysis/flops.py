"""Floating-point work per token, the peak rate of a device, and the share of it that was used (MFU).

Work is arithmetic on the model's shape, never a measurement; one multiply-add is two operations. The conventions
differ by 3-16 % on common models, so each number is stored with its ``*_CONVENTION``, and never compared across.

Peaks come from a table of exact devices (``system/devices.json``). A device that is not in it has no peak; there is no
"probably like an A100".
"""

from __future__ import annotations

from ..models.presets import ModelFacts
from ..system import devices

MODEL_CONVENTION = (
    "PaLM appendix B: 6*N_matmul + 12*L*H*Q*T per token, forward and backward, full attention, no recomputation"
)
CAUSAL_CONVENTION = (
    "6*N_matmul + 6*L*H*Q*T per token: as PaLM appendix B, but only the half of attention that the causal mask keeps"
)
HARDWARE_CONVENTION = (
    "PaLM appendix B, and one more forward pass (x 4/3) where activation checkpointing recomputes the whole model"
)

PEAK_PRECISIONS = ("bf16", "fp16", "fp32", "tf32")
"""``fp32`` is true fp32 (no tensor cores on NVIDIA); ``tf32`` holds only where the user allowed it."""


def model_flops_per_token(facts: ModelFacts, seq_length: int) -> int:
    """FLOPs that one token's forward and backward pass need: 6*N_matmul + 12*L*H*Q*T (PaLM, appendix B).

    T is the sequence length in tokens. Attention is counted as full: neither the causal mask nor a sliding window
    makes it less. Recomputation is not model work; see ``hardware_flops_per_token``.
    """
    return 6 * facts.matmul_parameters + 2 * _half_attention_flops(facts, seq_length)


def causal_flops_per_token(facts: ModelFacts, seq_length: int) -> int:
    """As ``model_flops_per_token``, with the attention term halved: a token attends to half of the sequence on average.

    Nearer to what FlashAttention executes, and always the lower of the two.
    """
    return 6 * facts.matmul_parameters + _half_attention_flops(facts, seq_length)


def hardware_flops_per_token(facts: ModelFacts, seq_length: int, activation_checkpointing: bool) -> int:
    """FLOPs executed per token: model FLOPs, and with full activation checkpointing a second forward pass (x 4/3).

    Slightly too much then: the LM head lies outside the checkpointed blocks and is not recomputed.
    """
    flops = model_flops_per_token(facts, seq_length)
    # Forward is a third of forward and backward; both terms are multiples of six, so the division is exact.
    return flops + flops // 3 if activation_checkpointing else flops


def _half_attention_flops(facts: ModelFacts, seq_length: int) -> int:
    """6*L*H*Q*T: scores and weighted values, each two FLOPs, three times (forward, two backward), for half of T."""
    if seq_length < 1:
        raise ValueError(f"seq_length must be at least 1 token, not {seq_length}")
    return 6 * facts.layers * facts.attention_heads * facts.head_dim * seq_length


def mfu(flops_per_token: float, tokens_per_second_per_gpu: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation: the fraction of ``peak`` (FLOP/s of one device) that useful work took.

    None where the peak is unknown. Over 1.0 is an error of accounting (wrong peak, wrong count, wrong clock): it is
    returned as it is, for the caller to flag, because a clipped value would hide the error. With
    ``hardware_flops_per_token`` the result is HFU.
    """
    if peak is None:
        return None
    if peak <= 0:
        raise ValueError(f"peak must be above 0 FLOP/s, not {peak}")
    return flops_per_token * tokens_per_second_per_gpu / peak


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of one device in FLOP/s, for the name as NVML or torch reports it; None for one not in the table.

    None also where the device has no such units (bf16 on a V100). A part of a device (MIG, vGPU) and a relative of
    a device (Laptop, Ti, D) are other devices: unknown, not similar.
    """
    if precision not in PEAK_PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PEAK_PRECISIONS)}, not {precision!r}")
    tflops = devices.peak_tflops(device_name, precision)
    return None if tflops is None else tflops * 1e12
