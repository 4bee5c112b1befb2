"""Which launcher starts the trials: warm or cold, on GPUs with an eye on their clocks and their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..config.spec import Placement, Trial
from ..errors import UsageError
from ..system import gpus
from . import Launcher, Limits
from .deepspeed import DeepSpeedLauncher
from .gpu_monitor import CardWatcher
from .warm import WarmLauncher


def choose_launcher(
    requested: str,
    placement: Placement,
    variables: Mapping[str, str],
    limits: Limits,
    trials: Sequence[Trial],
    gpu_indices: tuple[int, ...],
    say: Callable[[str], None],
) -> tuple[Launcher, str | None]:
    """The launcher for these trials, and a note where ranks may not be forked warm and ``requested`` leaves it open.

    ``requested``: ``auto``, ``warm`` or ``deepspeed``. ``gpu_indices``: NVML's, of the visible GPUs. On GPUs the
    launcher also watches them. Raises UsageError where ``warm`` is requested and not safe.
    """
    launcher, why_cold = _launcher(requested, placement, variables, limits, trials, gpu_indices, say)
    if placement.accelerator == "cpu":
        return launcher, why_cold
    return CardWatcher(launcher, gpus.NvmlQuery(), gpu_indices[: placement.num_gpus]), why_cold


def _launcher(
    requested: str,
    placement: Placement,
    variables: Mapping[str, str],
    limits: Limits,
    trials: Sequence[Trial],
    gpu_indices: tuple[int, ...],
    say: Callable[[str], None],
) -> tuple[Launcher, str | None]:
    cold = DeepSpeedLauncher(variables, limits, device_indices=gpu_indices if placement.accelerator == "cuda" else None)
    if placement.launcher == "deepspeed" or all(trial.not_launched for trial in trials):
        return cold, None
    warm = WarmLauncher(variables, limits, otherwise=None if requested == "warm" else cold)
    say("loading torch, DeepSpeed and Transformers once, for every trial …")
    reason = warm.prepare()
    if reason is None:
        return warm, None
    if requested == "warm":
        raise UsageError(f"--launcher warm is not safe here: {reason}", remedy="use --launcher deepspeed")
    return cold, f"cold launch: the preloaded server may not be forked, {reason}"
