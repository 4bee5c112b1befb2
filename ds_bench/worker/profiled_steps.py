"""Steps after the measured window that a profiler observes, the files that it leaves, and what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config.spec import Trial
from . import training_loop

MOST_ROWS = 10
"""Rows of a table that the record and the report hold; the file has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a profiler found in its steps."""

    lines: tuple[str, ...] = ()
    """In short, for the report; the files have the rest."""
    notes: tuple[str, ...] = ()
    """Caveats of the row."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the RankMeasurement."""


class ProfiledSteps:
    """The steps of one profiler on one rank."""

    def __init__(self, name: str, trainer: training_loop.Trainer, trial: Trial, folder: Path, count: int) -> None:
        """``folder``: of the trial. ``count``: steps that every rank takes."""
        self.trainer = trainer
        self.trial = trial
        self.count = trial.inspection.profile_steps
        """Steps to observe."""
        self.rank = torch.distributed.get_rank()
        self.left = count
        """Steps that are still to be taken, further ones of the profiler included."""
        self.is_training = False
        """Whether a step is being taken: an exception then comes from training, not from the profiler."""
        self.files: list[Path] = []
        self.name = name
        self._folder = folder / "profiles"

    @property
    def on_cuda(self) -> bool:
        return self.trainer.accelerator == "cuda"

    def step(self) -> None:
        """Takes one optimizer step. Raises whatever training raises."""
        self.left -= 1
        # No finally: where the step raises, this stays True and says where the exception came from.
        self.is_training = True
        self.trainer.step()
        self.is_training = False

    def synchronize(self) -> None:
        training_loop.synchronize(self.trainer.accelerator)

    def file(self, ending: str) -> Path:
        """A file to write, ``profiles/<profiler>_rank<N>.<ending>`` in the trial's folder."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{self.name}_rank{self.rank}.{ending}"
        self.files.append(path)
        return path
