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


def ignore_progress(_progress: Progress) -> None:
    """A callback for trials of which no progress is shown."""


class ProgressReporter:
    """Prints what happens to each trial. ``level``: 0 quiet, 1 normal, 2 verbose."""

    def __init__(self, stream: IO[str], trials: Sequence[Trial], level: int) -> None:
        self._stream = stream
        self._total = len(trials)
        self._level = level
        self._number = 0
        self._wall_seconds: list[float] = []
        self._live: Any = None
        self._ascii = not can_encode("✅❌→…", stream)

    def say(self, text: str) -> None:
        """One line, unless quiet."""
        if self._level > 0:
            self.close()
            print_text(text, self._stream)

    def begin(self, trial: Trial) -> ProgressCallback:
        """A trial starts. Returns the callback for its progress."""
        self._number += 1
        head = f"[{self._number}/{self._total}] {trial.configuration.label}"
        if self._level == 0:
            return ignore_progress
        if self._stream.isatty():
            return self._live_callback(head, trial)
        self.say(f"{head} …")
        return ignore_progress

    def _live_callback(self, head: str, trial: Trial) -> ProgressCallback:
        shown_at = 0.0
        total = trial.workload.warmup_steps + trial.workload.num_steps

        def show_progress(progress: Progress) -> None:
            nonlocal shown_at
            now = time.monotonic()
            if now - shown_at < _REFRESH_SECONDS:
                return
            shown_at = now
            text = f"{head} · {self._describe_step(progress, trial, total)}{self._time_left(progress, total)}"
            self._show(to_ascii(text) if self._ascii else escape_controls(text))

        return show_progress

    def _describe_step(self, progress: Progress, trial: Trial, total: int) -> str:
        if progress.step < 0:
            return progress.phase
        warmup = trial.workload.warmup_steps
        if progress.step < warmup:
            step = f"warm-up {progress.step}/{warmup}"
        else:
            step = f"step {min(progress.step, total) - warmup}/{total - warmup}"
        speed = f", last step {format_duration(progress.last_step_seconds)}" if progress.last_step_seconds else ""
        return f"{step} ({progress.phase}){speed}"

    def _time_left(self, progress: Progress, total: int) -> str:
        """Estimate for the whole comparison: this trial by its last step, later ones by the mean of those done."""
        if not progress.last_step_seconds:
            return ""
        rest = max(0, total - progress.step) * progress.last_step_seconds
        if self._wall_seconds:
            mean_seconds = sum(self._wall_seconds) / len(self._wall_seconds)
        else:
            mean_seconds = progress.elapsed_seconds + rest
        return f", about {format_duration(rest + mean_seconds * (self._total - self._number))} left"

    def end(self, record: TrialRecord) -> None:
        """A trial has ended: prints its status, duration and error; if verbose its caveats too."""
        if record.wall_seconds is not None:
            self._wall_seconds.append(record.wall_seconds)
        outcome = record.outcome
        cause = f": {outcome.error}" if outcome.error else ""
        took = f" in {format_duration(record.wall_seconds)}" if record.wall_seconds is not None else ""
        label = record.trial.configuration.label
        self.say(f"[{self._number}/{self._total}] {label} {status_text(outcome.status)}{took}{cause}")
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

    def close(self) -> None:
        """Removes the live line; the next one starts anew."""
        if self._live is not None:
            self._live.stop()
            self._live = None
