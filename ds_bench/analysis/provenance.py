"""Describes the origin of a result: model and devices, machine, versions, and command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import units
from ..config.axes import workload_fields
from ..config.options import SEVERAL_NODES, Options
from ..config.spec import PassType, Trial, point_text
from ..models import presets
from ..system import invocation
from ..system.environment import Environment
from ..system.invocation import OpenCommand

if TYPE_CHECKING:
    from .row import Run

COMMANDS: Mapping[str, str] = {**invocation.SCRIPTS, "recipe": "-m ds_bench run"}
"""Family of runs → what Python runs."""
STEP_NAMES: Mapping[PassType, str] = {
    "forward": "forward passes",
    "forward_backward": "forward and backward passes",
    "train": "steps",
}


def command(family: str | None, arguments: Sequence[str]) -> str:
    """Return a run's command line, quoted for a shell; empty if its family is unknown."""
    words = COMMANDS.get(family or "")
    return shlex.join(["python", *words.split(), *arguments]) if words else ""


def flags_to_repeat(options: Options) -> dict[str, list[str]]:
    """Return the words of the flags that run code or reach other machines, by field name.

    ``--resume`` requires typing them again, because a run folder, which holds the other flags, may be somebody else's.
    """
    flags: dict[str, list[str]] = {}
    if options.trust_remote_code:
        flags["trust_remote_code"] = ["--trust-remote-code"]
    if options.model_factory is not None:
        flags["model_factory"] = ["--model-factory", options.model_factory]
    elif presets.find_preset(options.model) is None and Path(options.model).is_dir():
        flags["model"] = ["--model", options.model]
    for name in SEVERAL_NODES:
        flag, value = f"--{name.replace('_', '-')}", getattr(options, name)
        values = list(value) if isinstance(value, tuple) else [] if value is None else [str(value)]
        # argparse would take a word that begins with - for a flag.
        if words := [w for each in values for w in ([f"{flag}={each}"] if each.startswith("-") else [flag, each])]:
            flags[name] = words
    if options.python is not None:
        flags["python"] = ["--python", options.python]
    if options.script:  # last: the script gets everything after --
        flags["script"] = ["--", *options.script]
    return flags


def resume_command(options: Options, folder: Path) -> OpenCommand:
    """Return the command that resumes a run. ``options``: a script's, or a recipe's at its first point."""
    again = [word for name, words in flags_to_repeat(options).items() if name != "script" for word in words]
    return OpenCommand(invocation.comparison(options.family, ["--resume", str(folder), *again]), options.script)


def machine(environment: Environment) -> dict[str, str]:
    """Return the known facts that a reader needs to judge figures: label → text, in reading order.

    For several hosts, each value is listed once, with its hosts unless all share it.
    """
    if environment.hosts:
        of_hosts = [(each.hostname, machine(each)) for each in environment.hosts]
        shared = {"hosts": ", ".join(name for name, _ in of_hosts)}
        for label in dict.fromkeys(label for _, own in of_hosts for label in own):
            hosts_of: dict[str, list[str]] = {}
            for name, own in of_hosts:
                hosts_of.setdefault(own.get(label, "unknown"), []).append(name)
            values = [f"{value} ({', '.join(names)})" for value, names in hosts_of.items()]
            shared[label] = "; ".join(values) if len(values) > 1 else next(iter(hosts_of))
        return shared
    physical, quota = environment.physical_cores, environment.cpu_quota_cores
    cores = f"{environment.logical_cores} threads"
    cores += "" if physical is None else f" on {physical} cores"
    cores += "" if quota is None else f", quota {quota:g}"
    facts = {
        "GPUs": ", ".join(gpu.name or "unnamed" for gpu in environment.gpus) or "none",
        "GPU memory": ", ".join(units.format_bytes(gpu.memory_total_bytes) for gpu in environment.gpus),
        "GPU driver": environment.gpu_driver_version,
        "CUDA": environment.torch_cuda_version,
        "CPU": environment.cpu_model,
        "cores": cores,
        "host memory": units.format_bytes(environment.host_memory_bytes),
        "memory limit": units.format_bytes(environment.cgroup_memory_limit_bytes),
        "NUMA nodes": environment.numa_nodes,
        "operating system": environment.operating_system,
        "kernel": environment.kernel,
        "Python": environment.python_version,
        **environment.packages,
    }
    return {label: str(value) for label, value in facts.items() if value not in (None, "", units.MISSING)}


def one_line(environment: Environment) -> str:
    """Return the facts of :func:`machine` in one line."""
    return " · ".join(f"{label} {value}" for label, value in machine(environment).items())


def title(runs: Sequence[Run]) -> str:
    """Return one line with model, devices, batch and number of steps."""
    return " · ".join(facts(runs))


def facts(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return model, devices, precision, batch and steps in a few words each."""
    if not runs:
        return ("nothing was run",)
    workload, placement = runs[0].trial.workload, runs[0].trial.placement
    number = placement.ranks_text
    devices = f"{number} CPU rank{'' if number.split()[-1] == '1' else 's'}"
    if placement.accelerator == "cuda":
        measured = [each.row.device for each in runs if each.row.device]
        known = [gpu.name for each in runs if each.environment for gpu in each.environment.gpus if gpu.name]
        devices = f"{number} × {next(iter([*measured, *known]), 'GPU').replace('NVIDIA ', '')}"
    if workload.script is not None:
        return f"{workload.model}{_trained_share(runs)}", devices, units.format_items(workload.num_steps, "step")
    trials = [run.trial for run in runs]
    axis_fields = {name for trial in trials for name in workload_fields(trial.configuration.axis_values)}
    # Workload fields that axes set to different values in these rows.
    own = {name for name in axis_fields if len({getattr(trial.workload, name) for trial in trials}) > 1}
    precision = "each row's precision" if "precision" in own else workload.precision
    batch = "each row's micro-batch" if "batch_size" in own else f"micro-batch {workload.batch_size}"
    if workload.batch_policy == "largest":
        batch = "each row's largest micro-batch"
    length = "each row's longest sequence" if workload.seq_policy == "longest" else f"{workload.seq_length} tokens"
    accumulated = f" × {workload.grad_accum} accumulated" if workload.grad_accum > 1 else ""
    if "grad_accum" in own:
        accumulated = " × each row's accumulation"
    return (
        f"{workload.model}{_trained_share(runs)}",
        devices,
        precision,
        f"{batch} × {length}{accumulated}",
        *([] if workload.synchronized else ["NOT SYNCHRONIZED (wrong on purpose)"]),
        *([] if workload.warmup_steps else ["no warm-up"]),
        f"{workload.num_steps} {STEP_NAMES[workload.pass_type]}",
        *([f"data {Path(workload.data_path).name}"] if workload.data_path else []),
        *(point_text({path: value}) for path, value in unnamed_values(runs[0].trial)),
    )


_NAMED = (
    "model.name", "model.factory", "training.seq_len", "training.local_batch_size", "training.global_batch_size",
    "training.grad_accum", "training.steps", "training.precision", "dataset.seq_len", "dataset.path",
    "launch.num_gpus", "training.pass_type", "training.synchronized",
)  # fmt: skip
"""Recipe key paths whose values a title shows anyway."""


def unnamed_values(trial: Trial) -> Iterator[tuple[str, Any]]:
    """Return the values of a sweep's point that a title does not already show."""
    return ((path, value) for path, value in trial.point.items() if path not in _NAMED)


def _trained_share(runs: Sequence[Run]) -> str:
    """Return the size and trained share of a partially trained model; empty for any other."""
    for row in (run.row for run in runs):
        if row.trainable_parameter_count and row.parameter_count:
            if row.trainable_parameter_count == row.parameter_count:
                return ""
            return f" · {units.format_parameters(row.parameter_count, row.trainable_parameter_count)}"
    return ""
