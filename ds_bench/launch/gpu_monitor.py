"""A launcher that also looks at the cards: their free memory before a trial, their clocks in its measured window.

Clocks are read while the card works, since an idle card tells nothing. Memory is read before, since a process that is
killed may hold a card for seconds after it has ended.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ..config.spec import Trial
from ..records.schema import TrialRecord
from ..system import gpus
from ..units import format_bytes
from . import Launcher, Progress, ProgressCallback

_UNRETURNED_BYTES = 256 * 2**20
"""Free bytes less than before that are no sign of a process that still holds the card."""
_POLL_SECONDS = 0.2


class CardWatcher:
    """Passes every trial on. Before it, waits for memory that an earlier trial held, ``wait_seconds`` at most.

    Writes beside the record how much was free when it began, and what held a card back in the middle of its steps.
    """

    def __init__(
        self, launcher: Launcher, query: gpus.GpuQuery, indices: tuple[int, ...], *, wait_seconds: float = 30.0
    ) -> None:
        self._launcher, self._query, self._indices, self._wait_seconds = launcher, query, indices, wait_seconds
        self._most_free: int | None = None

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:
        """See :class:`Launcher`."""
        free, caveats = self._wait_for_memory()
        middle = trial.workload.warmup_steps + trial.workload.num_steps // 2
        looked: list[bool] = []

        def also_look(progress: Progress) -> None:
            if progress.step >= middle and not looked:
                looked.append(True)
                caveats.extend(self._look())
            listen(progress)

        found = self._launcher.launch(trial, folder, also_look)
        return replace(found, caveats=(*found.caveats, *caveats), gpu_free_start_bytes=free)

    def _cards(self) -> list[gpus.GpuFacts]:
        return [gpu for gpu in self._query.read().gpus if gpu.index in self._indices]

    def _wait_for_memory(self) -> tuple[int | None, list[str]]:
        """Free bytes of the fullest card, and a caveat where less is free than an earlier trial began with."""
        deadline = time.monotonic() + self._wait_seconds
        expected = self._most_free
        while True:
            free = self._least_free()
            if free is None or expected is None or free >= expected - _UNRETURNED_BYTES:
                break
            if time.monotonic() >= deadline:
                self._most_free = free  # somebody else's for good: the next trial does not wait for it
                text = f"{format_bytes(expected - free)} less of the card was free than when an earlier trial began"
                return free, [text]
            time.sleep(_POLL_SECONDS)
        known = [size for size in (free, expected) if size is not None]
        self._most_free = max(known, default=None)
        return free, []

    def _least_free(self) -> int | None:
        sizes = [
            gpu.memory_total_bytes - gpu.memory_used_bytes
            for gpu in self._cards()
            if gpu.memory_total_bytes is not None and gpu.memory_used_bytes is not None
        ]
        return min(sizes, default=None)

    def _look(self) -> list[str]:
        return [
            f"GPU {gpu.index} was held back while this ran: {', '.join(reasons)}"
            for gpu in self._cards()
            if (reasons := gpus.throttle_faults(gpu))
        ]
