"""The steps of a trial that has ended, as the monitor wrote them or as its record holds them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ..records.run_folder import last_trial_folder
from ..records.step_series import TrialStep, read_steps

if TYPE_CHECKING:
    from .row import Run


def steps_of(run: Run, run_folders: Mapping[str, Path]) -> list[TrialStep]:
    """The steps of a trial: those of ``steps.jsonl``, which tells memory too, else those of the record.

    ``run_folders``: name of a run → its folder. Empty for a trial without either, such as a flat row or one that failed
    without ``--monitor``.
    """
    folder = run_folders.get(run.row.run_id or "")
    monitored = [] if folder is None else read_steps(last_trial_folder(folder, run.trial.trial_id))
    return monitored or _steps_of_record(run)


def _steps_of_record(run: Run) -> list[TrialStep]:
    record, row = run.record, run.row
    if record is None or not (record.ranks and row.throughput_tokens_per_sec and row.avg_step_time_ms):
        return []
    tokens_per_step = row.throughput_tokens_per_sec * row.avg_step_time_ms / 1000
    slowest = record.slowest_rank
    seconds = [*slowest.warmup_step_seconds, *slowest.step_seconds]
    begun = 0.0 if record.started_at is None else datetime.fromisoformat(record.started_at).timestamp()
    ends = accumulate(seconds, initial=begun + (record.start_seconds or 0.0))
    # The first is where the first step begins.
    next(ends)
    losses = [*run.losses, *[None] * (len(seconds) - len(run.losses))]
    warmup_count = len(slowest.warmup_step_seconds)
    return [
        TrialStep(
            step=number,
            phase="warmup" if number < warmup_count else "measured",
            time=end,
            seconds=duration,
            tokens_per_second=tokens_per_step / duration if duration > 0 else None,
            loss=loss,
        )
        for number, (end, duration, loss) in enumerate(zip(ends, seconds, losses, strict=False))
    ]
