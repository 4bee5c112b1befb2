"""One Trial → one isolated process tree → one TrialRecord.

``Launcher`` is the seam: ``warm`` and ``deepspeed`` implement it, tests inject a fake.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ..config.spec import Trial
from ..records.schema import TrialRecord
from .monitor import Limits, Progress, ProgressCallback

__all__ = ["Launcher", "Limits", "Progress", "ProgressCallback"]


class Launcher(Protocol):
    """Runs a trial to its end, whatever that is; never raises for a trial's own failure."""

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:
        """Runs ``trial`` with its files in ``folder`` (which exists), telling ``listen`` of progress."""
        ...
