"""Estimates how long a trial will take before it runs: its order of magnitude, for the plan of a sweep.

Work on the devices is what the model's FLOPs take at an assumed share of their peak; an optimizer on the host or a disk
is what its traffic takes. Nothing is measured. The assumptions are constants of this module.
"""

from __future__ import annotations

from ..config.spec import Trial
from ..models.presets import ModelFacts
from . import flops

_UTILISATION = 0.3
"""Share of a GPU's peak rate that training reaches."""
_UNKNOWN_GPU_FLOPS = 1e14
"""Peak FLOP/s of a GPU that is not in the table."""
_CPU_CORE_FLOPS = 1e10
"""FLOP/s that training reaches on one CPU core."""
_START_SECONDS = {"warm": 4.0, "deepspeed": 25.0}
"""From launch to the first step without the model, and the end of all processes."""
_BUILD_SECONDS_PER_PARAMETER = 1e-8
"""Drawing the random weights."""
# Four values read, and all but the gradient written, of 4 bytes each.
_OPTIMIZER_BYTES_PER_PARAMETER = 28
"""Read and written by Adam in fp32 in one step: weight, two moments, gradient."""
_BYTES_PER_SECOND = {"none": 5e11, "cpu": 1e10, "nvme": 3e9}
"""Of the memory or the disk where the optimizer's states of one rank are."""


def estimate_trial_seconds(trial: Trial, facts: ModelFacts | None, gpu_name: str | None, cores: float) -> float:
    """Estimates the duration of a trial from launch to end, in seconds; 0 for one that is not launched.

    ``facts``: None for a model whose shape is not known, which is taken to cost nothing but the start. ``cores``: CPU
    cores of a node.
    """
    if trial.not_launched:
        return 0.0
    workload, ranks = trial.workload, trial.placement.num_gpus
    seconds = _START_SECONDS[trial.placement.launcher]
    if facts is None:
        return seconds
    if trial.placement.accelerator == "cuda":
        peak = flops.peak_flops(gpu_name, workload.precision) if gpu_name else None
        rate = ranks * _UTILISATION * (peak or _UNKNOWN_GPU_FLOPS)
    else:
        rate = cores * trial.placement.num_nodes * _CPU_CORE_FLOPS
    per_token = flops.hardware_flops_per_token(facts, workload.seq_length, workload.activation_checkpointing)
    tokens = workload.batch_size * workload.seq_length * workload.grad_accum * ranks
    device = trial.configuration.offload_optimizer
    optimizer = facts.parameters * _OPTIMIZER_BYTES_PER_PARAMETER / ranks / _BYTES_PER_SECOND[device]
    if workload.pass_type != "train":
        optimizer = 0.0
        per_token = per_token // 3 if workload.pass_type == "forward" else per_token
    steps = workload.num_steps + workload.warmup_steps
    return seconds + facts.parameters * _BUILD_SECONDS_PER_PARAMETER + steps * (tokens * per_token / rate + optimizer)
