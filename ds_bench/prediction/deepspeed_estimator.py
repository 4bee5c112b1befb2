"""Computes what DeepSpeed's own memory estimators give, and says why they differ from the predictions here.

Their formulas, of DeepSpeed 0.19.8: ``estimate_zero2_model_states_mem_needs`` (runtime/zero/stage_1_and_2.py) and
``estimate_zero3_model_states_mem_needs`` (runtime/zero/stage3.py), with ``zero_init=True`` and their factor of 1.5.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.spec import Configuration, Precision

_FACTOR = 1.5
"""Their ``additional_buffer_factor``, for host memory alone."""

WHY_THEY_DIFFER = (
    "DeepSpeed's estimators count model states only, 18 bytes per parameter with fp32 gradients that stages 2 and 3 "
    "hold only inside the step; they leave out activations, logits, buckets, gathered parameters and the CUDA context, "
    "know no stage 0 or 1, no NVMe and no fp32, and see 1 element per tensor of a model on the meta device."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory of the model states by DeepSpeed's own estimator."""

    gpu_bytes: int
    """Per GPU."""
    host_bytes: int
    """Per node."""


def deepspeed_estimates(
    parameters: int,
    largest_layer: int,
    num_gpus: int,
    gpus_per_node: int,
    configuration: Configuration,
    precision: Precision = "bf16",
) -> Estimate | None:
    """Returns their figures; None for what they do not cover: stages 0 and 1, offload to NVMe, fp32, torch's engines.

    ``largest_layer``: elements of the largest module's own parameters; the largest tensor is close to it.
    """
    uncovered = precision == "fp32" or configuration.is_reference
    if uncovered or "nvme" in (configuration.offload_optimizer, configuration.offload_param):
        return None
    nodes = -(-num_gpus // gpus_per_node)
    if configuration.stage == 2:
        return _stage2(parameters, num_gpus, gpus_per_node, offload=configuration.offloads_optimizer)
    if configuration.stage == 3:
        return _stage3(parameters, 4 * largest_layer, num_gpus, gpus_per_node, nodes, configuration)
    return None


def _stage2(parameters: int, gpus: int, per_node: int, *, offload: bool) -> Estimate:
    if offload:
        return Estimate(gpu_bytes=2 * parameters, host_bytes=int(parameters * max(4 * gpus, 16) * _FACTOR))
    return Estimate(
        gpu_bytes=2 * parameters + 18 * parameters // gpus, host_bytes=int(parameters * 4 * per_node * _FACTOR)
    )


def _stage3(parameters: int, live: int, gpus: int, per_node: int, nodes: int, configuration: Configuration) -> Estimate:
    if configuration.offload_param != "none":
        return Estimate(gpu_bytes=live, host_bytes=int(18 * parameters / nodes * _FACTOR))
    if configuration.offloads_optimizer:
        return Estimate(gpu_bytes=live + 2 * parameters // gpus, host_bytes=int(16 * parameters / nodes * _FACTOR))
    return Estimate(gpu_bytes=live + 18 * parameters // gpus, host_bytes=int(live * per_node * _FACTOR))
