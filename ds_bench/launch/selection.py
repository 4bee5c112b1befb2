"""Which launcher starts the trials: warm or cold, on GPUs with an eye on their clocks and their memory."""

from __future__ import annotations

import os
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
    say: Callable[[str], None],
) -> tuple[Launcher, str | None]:
    """The launcher for these trials, and a note where ranks may not be forked warm and ``requested`` leaves it open.

    ``requested``: ``auto``, ``warm`` or ``deepspeed``. On GPUs the launcher also watches them. Raises UsageError where
    ``warm`` is requested and not safe.
    """
    launcher, why_cold = _launcher(requested, placement, variables, limits, trials, say)
    if placement.accelerator == "cpu":
        return launcher, why_cold
    used = gpus.visible_indices(os.environ, gpus.NvmlQuery())[: placement.num_gpus]
    return CardWatcher(launcher, gpus.NvmlQuery(), used), why_cold


def _launcher(
    requested: str,
    placement: Placement,
    variables: Mapping[str, str],
    limits: Limits,
    trials: Sequence[Trial],
    say: Callable[[str], None],
) -> tuple[Launcher, str | None]:
    devices = gpus.visible_indices(os.environ, gpus.NvmlQuery()) if placement.accelerator == "cuda" else None
    cold = DeepSpeedLauncher(variables, limits, device_indices=devices)
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
