"""Selects the launcher of a run's trials: warm or cold, and on GPUs with their clocks and memory watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..config.spec import Placement, Trial
from ..errors import UsageError
from ..system import gpus
from . import Launcher, Limits
from .deepspeed import DeepSpeedLauncher
from .gpu_monitor import GpuMonitoringLauncher
from .hosts import Hosts
from .warm import WarmLauncher


def choose_launcher(
    requested: str,
    placement: Placement,
    variables: Mapping[str, str],
    limits: Limits,
    trials: Sequence[Trial],
    gpu_indices: tuple[int, ...],
    say: Callable[[str], None],
    hosts: Hosts | None = None,
) -> tuple[Launcher, str | None]:
    """The launcher for these trials, and a note where ranks may not be forked warm and ``requested`` leaves it open.

    ``requested``: ``auto``, ``warm`` or ``deepspeed``. ``gpu_indices``: NVML's, of the visible GPUs. ``hosts``: of a
    placement on several. Raises UsageError where ``warm`` is requested and not safe.
    """
    on_gpus = placement.accelerator == "cuda"
    devices = gpu_indices if on_gpus else None
    launcher: Launcher = DeepSpeedLauncher(variables, limits, device_indices=devices, hosts=hosts)
    note = None
    if placement.launcher != "deepspeed" and not all(trial.not_launched for trial in trials):
        warm = WarmLauncher(variables, limits, otherwise=None if requested == "warm" else launcher)
        say("loading torch, DeepSpeed and Transformers once, for every trial …")
        reason = warm.prepare()
        if reason is None:
            launcher = warm
        elif requested == "warm":
            raise UsageError(f"--launcher warm is not safe here: {reason}", remedy="use --launcher deepspeed")
        else:
            note = f"cold launch: the preloaded server may not be forked, {reason}"
    if on_gpus:
        launcher = GpuMonitoringLauncher(
            launcher, gpus.read_gpus, gpu_indices, hosts=hosts
        )  # a sweep has several counts
    return launcher, note
