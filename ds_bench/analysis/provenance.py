"""Where a result comes from, in words: what was trained on what, the machine, the versions, the exact command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from .. import units
from ..system.environment import Environment
from .summary import TrialSummary

SCRIPTS: Mapping[str, str] = {"zero": "zero_stage_comparison.py", "offload": "offload_comparison.py"}
"""Family of a run → the script that makes it."""


def command(family: str | None, arguments: Sequence[str]) -> str:
    """The line that was typed, ready to be pasted into a shell; empty where the result does not tell."""
    script = SCRIPTS.get(family or "")
    return shlex.join(["python", script, *arguments]) if script else ""


def machine(environment: Environment) -> dict[str, str]:
    """Label → text of what a reader needs to judge the figures, in reading order; unknown facts are left out."""
    facts = {
        "GPUs": ", ".join(f"{gpu.name or 'unnamed'}" for gpu in environment.gpus) or "none",
        "GPU memory": ", ".join(units.format_bytes(gpu.memory_total_bytes) for gpu in environment.gpus),
        "GPU driver": environment.gpu_driver_version,
        "CUDA": environment.torch_cuda_version,
        "CPU": environment.cpu_model,
        "cores": _cores(environment),
        "host memory": units.format_bytes(environment.host_memory_bytes),
        "memory limit": _limit(environment),
        "NUMA nodes": environment.numa_nodes,
        "operating system": environment.operating_system,
        "kernel": environment.kernel,
        "Python": environment.python_version,
        **environment.packages,
    }
    return {label: str(value) for label, value in facts.items() if value not in (None, "", units.MISSING)}


def _cores(environment: Environment) -> str:
    quota = environment.cpu_quota_cores
    threads = f"{environment.logical_cores} threads"
    physical = "" if environment.physical_cores is None else f" on {environment.physical_cores} cores"
    return threads + physical + ("" if quota is None else f", quota {quota:g}")


def _limit(environment: Environment) -> str | None:
    limit = environment.cgroup_memory_limit_bytes
    return None if limit is None else units.format_bytes(limit)


def one_line(environment: Environment) -> str:
    """The same in one line, for a block of Markdown."""
    return " · ".join(f"{label} {value}" for label, value in machine(environment).items())


def title(summaries: Sequence[TrialSummary]) -> str:
    """What was trained on what, in one line."""
    if not summaries:
        return "nothing was run"
    work, place = summaries[0].record.trial.workload, summaries[0].record.trial.placement
    device = next((rank.device_name for s in summaries for rank in s.record.ranks), place.accelerator)
    batch = "each row's largest micro-batch" if work.batch_policy == "largest" else f"micro-batch {work.batch_size}"
    accumulated = f" × {work.grad_accum} accumulated" if work.grad_accum > 1 else ""
    unit = "GPU" if place.accelerator == "cuda" else "CPU rank"
    return (
        f"{work.model} · {work.precision} · {batch} × {work.seq_length} tokens{accumulated} · "
        f"{place.num_gpus} {unit}{'s' if place.num_gpus > 1 else ''} ({device}) · {work.num_steps} steps"
    )
