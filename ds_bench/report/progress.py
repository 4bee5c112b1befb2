"""What the terminal shows while trials run: a live line on a terminal, else a plain line per event."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import IO, Any

from ..analysis.flat_rows import status_text
from ..config.spec import Trial
from ..launch import Progress, ProgressCallback
from ..records.schema import TrialRecord
from ..system.terminal import can_encode, escape_controls, print_text, to_ascii
from ..units import format_duration

_REFRESH_SECONDS = 1.0


def _deaf(_progress: Progress) -> None:
    return None


class Reporter:
    """Tells of trials as they begin, go on and end. ``level``: 0 quiet, 1 normal, 2 verbose."""

    def __init__(self, stream: IO[str], trials: Sequence[Trial], level: int) -> None:
        self._stream = stream
        self._total = len(trials)
        self._level = level
        self._number = 0
        self._walls: list[float] = []
        self._live: Any = None
        self._plain = not can_encode("✅❌→…", stream)

    def say(self, text: str) -> None:
        """One line, unless quiet."""
        if self._level > 0:
            self._clear()
            print_text(text, self._stream)

    def begin(self, trial: Trial) -> ProgressCallback:
        """A trial starts; returns who is told of its progress."""
        self._number += 1
        head = f"[{self._number}/{self._total}] {trial.strategy.label}"
        if self._level == 0:
            return _deaf
        if self._stream.isatty():
            return self._live_listener(head, trial)
        self.say(f"{head} …")
        return _deaf

    def _live_listener(self, head: str, trial: Trial) -> ProgressCallback:
        last = 0.0
        total = trial.workload.warmup_steps + trial.workload.num_steps

        def listen(progress: Progress) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < _REFRESH_SECONDS:
                return
            last = now
            text = f"{head} · {self._where(progress, trial, total)}{self._eta(progress, total)}"
            self._show(to_ascii(text) if self._plain else escape_controls(text))

        return listen

    def _where(self, progress: Progress, trial: Trial, total: int) -> str:
        if progress.step < 0:
            return progress.phase
        warmup = trial.workload.warmup_steps
        done = progress.step
        where = f"warm-up {done}/{warmup}" if done < warmup else f"step {min(done, total) - warmup}/{total - warmup}"
        speed = f", last step {format_duration(progress.last_step_seconds)}" if progress.last_step_seconds else ""
        return f"{where} ({progress.phase}){speed}"

    def _eta(self, progress: Progress, total: int) -> str:
        """Of the whole comparison: this trial by its last step, the rest by the mean of those done."""
        if not progress.last_step_seconds:
            return ""
        rest = max(0, total - progress.step) * progress.last_step_seconds
        each = sum(self._walls) / len(self._walls) if self._walls else progress.elapsed_seconds + rest
        return f", about {format_duration(rest + each * (self._total - self._number))} left"

    def end(self, record: TrialRecord) -> None:
        """A trial has ended."""
        if record.wall_seconds is not None:
            self._walls.append(record.wall_seconds)
        outcome = record.outcome
        cause = f": {outcome.error}" if outcome.error else ""
        took = f" in {format_duration(record.wall_seconds)}" if record.wall_seconds is not None else ""
        self.say(
            f"[{self._number}/{self._total}] {record.trial.strategy.label} {status_text(outcome.status)}{took}{cause}"
        )
        if self._level > 1:
            for text in (*record.caveats, *filter(None, [outcome.details])):
                self.say(f"      {text}")

    def _show(self, text: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        line = Text(text, no_wrap=True, overflow="ellipsis")
        if self._live is None:
            console = Console(file=self._stream, highlight=False)
            self._live = Live(line, console=console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(line, refresh=True)

    def _clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self._clear()
