"""Runs a Trial in an isolated process tree and returns its TrialRecord.

``Launcher`` is the interface: ``WarmLauncher`` and ``DeepSpeedLauncher`` implement it, and tests pass a fake.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ..config.spec import Trial
from ..records.schema import TrialRecord
from .trial_watcher import Limits, Progress, ProgressCallback

__all__ = ["Launcher", "Limits", "Progress", "ProgressCallback"]


class Launcher(Protocol):
    """Runs a trial to its end; a failure of the trial is a record, not an exception."""

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:
        """Run ``trial`` with its files in the existing ``folder``; ``listen`` is called with the progress."""
        ...
