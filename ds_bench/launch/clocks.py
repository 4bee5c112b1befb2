"""A launcher that also looks at the cards' clocks in a trial's measured window: an idle card tells nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .. import gpus
from ..record import TrialRecord
from ..spec import Trial
from . import Launcher, Listener, Progress


class ClockWatcher:
    """Passes every trial on, reads NVML once in the middle of its measured steps, and writes what held a card back."""

    def __init__(self, launcher: Launcher, query: gpus.GpuQuery, indices: tuple[int, ...]) -> None:
        self._launcher, self._query, self._indices = launcher, query, indices

    def launch(self, trial: Trial, folder: Path, listen: Listener) -> TrialRecord:
        """See :class:`Launcher`."""
        middle = trial.workload.warmup_steps + trial.workload.num_steps // 2
        seen: list[str] = []
        looked: list[bool] = []

        def also_look(progress: Progress) -> None:
            if progress.step >= middle and not looked:
                looked.append(True)
                seen.extend(self._look())
            listen(progress)

        found = self._launcher.launch(trial, folder, also_look)
        return replace(found, caveats=(*found.caveats, *seen)) if seen else found

    def _look(self) -> list[str]:
        cards = [gpu for gpu in self._query.read().gpus if gpu.index in self._indices]
        return [
            f"GPU {gpu.index} was held back while this ran: {', '.join(reasons)}"
            for gpu in cards
            if (reasons := gpus.held_back(gpu))
        ]
