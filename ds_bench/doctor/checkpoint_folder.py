"""The folder that checkpoints are measured in: whether it can be written and has room."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ..config.spec import Trial
from ..errors import PreflightError
from ..launch.scratch import remove_abandoned
from ..prediction.model_profile import ModelProfile
from ..system import files
from ..units import format_bytes, format_millions

_CHECKPOINT_BYTES = 14
"""Of a checkpoint for each parameter: the 16-bit weight, its fp32 master and Adam's two moments."""
_SWAPPED_BYTES = 12
"""Besides, where the optimizer lies on a disk: DeepSpeed copies its swap files into the checkpoint."""


def require_folder(given: str | None, trials: Sequence[Trial]) -> Path:
    """The folder of the trials' checkpoints, or the nearest above it. Raises PreflightError if it cannot be written.

    ``given``: as the user named it; None for the folder of the results.
    """
    if given is not None and not Path(given).is_dir():
        raise PreflightError(f"--checkpoint-path {given} is not a folder", remedy="create it, or give another")
    # The folder of the results is made later.
    path = files.nearest_existing(Path(given or trials[0].inspection.checkpoint_path or "."))
    files.require_writable(path, "--checkpoint-path")
    return path


def check_folder(given: str | None, profiles: Sequence[ModelProfile], trials: Sequence[Trial]) -> None:
    """Removes checkpoints that ended runs left in the trials' folder, and checks its room for the largest model.

    ``given``: as of ``require_folder``. Raises PreflightError.
    """
    path = require_folder(given, trials)
    # Before the room is looked at, as this makes some.
    remove_abandoned(path)
    if not profiles:  # their sizes are not known
        return
    profile = max(profiles, key=_parameters)
    swaps = any(trial.configuration.offload_optimizer == "nvme" for trial in trials)
    each = _CHECKPOINT_BYTES + _SWAPPED_BYTES * swaps
    parameters = _parameters(profile)
    free, need = shutil.disk_usage(path).free, each * parameters
    if free < need:
        raise PreflightError(
            f"{path} has {format_bytes(free)} free, and a checkpoint of {profile.name} with its conversion takes about "
            f"{format_bytes(need)} ({format_millions(parameters)} parameters, {each} bytes of each)",
            remedy="free some space, or give a folder on another disk with --checkpoint-path",
        )


def _parameters(profile: ModelProfile) -> int:
    return profile.parameters + profile.frozen_parameters
