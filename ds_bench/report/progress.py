"""Progress of a run: a line as each trial ends, and on a terminal a live line about the current one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..analysis.provenance import STEP_NAMES
from ..config.caveats import CaveatKind, as_caveat, has_kind
from ..config.spec import Trial
from ..launch import Progress, ProgressCallback
from ..records.schema import INTERRUPTED, TrialRecord
from ..system.terminal import StatusLine
from ..units import format_duration, format_significant
from .profile_text import profiles_of
from .table_columns import failure_text


def ignore_progress(_progress: Progress) -> None:
    """A callback that shows no progress."""


class ProgressReporter:
    """Prints how each trial ended, and how long the rest of the comparison is likely to take.

    ``trials``: those that will run. ``repeats``: runs of each row. ``verbose``: also that a trial begins, its caveats
    and its files. ``point_of``: the point of a sweep that a trial belongs to, as text.
    """

    def __init__(
        self,
        line: StatusLine,
        trials: Sequence[Trial],
        repeats: int = 1,
        *,
        verbose: bool = False,
        point_of: Callable[[Trial], str] = lambda _trial: "",
    ) -> None:
        self._line = line
        self._total = len(trials)
        self._repeats = repeats
        self._verbose = verbose
        self._point_of = point_of
        self._number = 0
        self._wall_seconds: list[float] = []

    def replan(self, trials_left: int) -> None:
        """Count with another number of trials from here on."""
        self._total = self._number + trials_left

    def begin(self, trial: Trial) -> ProgressCallback:
        """A trial starts. Returns the callback for its progress."""
        self._number += 1
        head = self._head(trial)
        if self._verbose:
            self._line.say(f"{head} …")
        # A log would get a line for every step.
        if self._line.quiet or not self._line.stream.isatty():
            return ignore_progress
        total = trial.workload.warmup_steps + trial.workload.num_steps
        return lambda progress: self._line.show(
            f"{head} · {self._describe_step(progress, trial, total)}{self._time_left_with(progress, total)}"
        )

    def _head(self, trial: Trial) -> str:
        """``[2/24] ZeRO-1 run 1/3``; without the run where there is one of each row; in a sweep with the point."""
        run = f" run {trial.repeat + 1}/{self._repeats}" if self._repeats > 1 else ""
        point = f"{text}: " if (text := self._point_of(trial)) else ""
        pass_type, what = trial.workload.pass_type, trial.configuration.label
        if pass_type != "train" and trial.configuration.name == "zero0":
            what = STEP_NAMES[pass_type]  # without DeepSpeed
        return f"[{self._number}/{self._total}] {point}{what}{run}"

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

    def _time_left_with(self, progress: Progress, total: int) -> str:
        """Estimate for the whole comparison: this trial by its last step, later ones by the mean of those done."""
        if not progress.last_step_seconds:
            return ""
        rest = max(0, total - progress.step) * progress.last_step_seconds
        # Until a trial has ended, this one's time stands for those to come.
        mean_seconds = self._mean_wall_seconds() or progress.elapsed_seconds + rest
        return f", about {format_duration(rest + mean_seconds * (self._total - self._number))} left"

    def _mean_wall_seconds(self) -> float | None:
        """Mean duration of the trials that have ended; None before the first."""
        return sum(self._wall_seconds) / len(self._wall_seconds) if self._wall_seconds else None

    def end(self, record: TrialRecord) -> None:
        """A trial has ended: prints its result and the time left; if verbose its duration and caveats too."""
        if record.wall_seconds is not None:
            self._wall_seconds.append(record.wall_seconds)
        took = f" · took {format_duration(record.wall_seconds)}" if self._verbose and record.wall_seconds else ""
        mean_seconds = self._mean_wall_seconds()
        # After an interruption no further trial runs.
        trials_left = 0 if record.outcome.status == INTERRUPTED else self._total - self._number
        left = f" · about {format_duration(mean_seconds * trials_left)} left" if mean_seconds and trials_left else ""
        self._line.say(f"{self._head(record.trial)} {_result_text(record)}{took}{left}")
        if self._verbose:
            for text in (*(as_caveat(each).text for each in record.caveats), *filter(None, [record.outcome.details])):
                self._line.say(f"      {text}")
            for rank, profile in profiles_of(record.ranks):
                self._line.say(f"      profile {profile.name}, rank {rank}: {', '.join(profile.files) or 'no file'}")


def _result_text(record: TrialRecord) -> str:
    """``✓ 19,600 tok/s 75.4 GB``, or ``✗`` with the cause; the memory is the GPU's, or else the host's."""
    if not record.outcome.success:
        return f"✗ {failure_text(record.outcome)}"
    from ..analysis.row import make_run  # here, so that pydantic is not loaded before the first trial

    run = make_run(record)
    row = run.row
    speed = f"✓ {format_significant(row.throughput_tokens_per_sec)} tok/s"
    if has_kind(run.caveats, CaveatKind.OWN_BATCHES):
        speed = f"✓ {format_significant(row.throughput_samples_per_sec)} samples/s"
    if row.gpu_peak_gb is not None:
        return f"{speed} {format_significant(row.gpu_peak_gb)} GB"
    if row.cpu_used_gb is not None:
        return f"{speed} {format_significant(row.cpu_used_gb)} GB of host memory"
    return speed
