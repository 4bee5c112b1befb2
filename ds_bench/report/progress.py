"""What a run prints: its plan before it starts, a line as each trial ends, and where its profiles are.

On a terminal a live line follows the current trial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..analysis.provenance import STEP_NAMES
from ..config.caveat_texts import CaveatKind, as_caveat, has_kind
from ..config.spec import Trial, point_text
from ..launch import Progress, ProgressCallback
from ..planning.trial_planner import Plan, RunPlan
from ..prediction.fit_verdict import DOES_NOT_FIT, TIGHT, UNKNOWN
from ..prediction.trial_predictions import stored_prediction
from ..recommend.remedies import predicted_bytes
from ..records.schema import INTERRUPTED, Tier, TrialRecord
from ..system import invocation
from ..system.terminal import StatusLine
from ..units import format_bytes, format_duration, format_items, format_significant
from .comparison_columns import failure_text
from .memory_plan import gpu_range
from .table_layout import Column, Table

if TYPE_CHECKING:
    from ..analysis.row import Run


class ProgressReporter:
    """Prints how each trial ended, and how long the rest of the comparison is likely to take.

    ``trials``: those that will run. ``repeats``: runs of each row. ``verbose``: also prints when a trial begins, its
    caveats, and the files of its profiles.
    """

    def __init__(self, line: StatusLine, trials: Sequence[Trial], repeats: int = 1, *, verbose: bool = False) -> None:
        self._line = line
        self._total = len(trials)
        self._repeats = repeats
        self._verbose = verbose
        self._number = 0
        self._wall_seconds: list[float] = []

    def replan(self, trials_left: int) -> None:
        """Use a different total from here on: the trials that have begun, and ``trials_left``."""
        self._total = self._number + trials_left

    def begin(self, trial: Trial) -> ProgressCallback:
        """A trial starts. Returns the callback for its progress."""
        self._number += 1
        head = self._head(trial)
        if self._verbose:
            self._line.say(f"{head} …")
        # A log would get a line for every step.
        if self._line.quiet or not self._line.stream.isatty():
            return lambda _progress: None
        warmup, steps = trial.workload.warmup_steps, trial.workload.num_steps

        def show(progress: Progress) -> None:
            text = progress.phase
            if progress.step >= 0:
                done = progress.step - warmup
                step = f"warm-up {progress.step}/{warmup}" if done < 0 else f"step {min(done, steps)}/{steps}"
                text = f"{step} ({progress.phase})"
            if progress.last_step_seconds:
                # The rest of this trial is estimated from its last step, later trials from the mean of those done.
                rest = max(0, warmup + steps - progress.step) * progress.last_step_seconds
                # Until a trial has ended, this one's time stands in for the mean.
                mean_seconds = self._mean_wall_seconds() or progress.elapsed_seconds + rest
                left = format_duration(rest + mean_seconds * (self._total - self._number))
                text += f", last step {format_duration(progress.last_step_seconds)}, about {left} left"
            self._line.show(f"{head} · {text}")

        return show

    def _head(self, trial: Trial) -> str:
        """``[2/24] ZeRO-1 run 1/3``; without the run number if each row runs once; with the point in a sweep."""
        run = f" run {trial.repeat + 1}/{self._repeats}" if self._repeats > 1 else ""
        point = f"{text}: " if (text := point_text(trial.point)) else ""
        pass_type, what = trial.workload.pass_type, trial.configuration.label
        if pass_type != "train" and trial.configuration.name == "zero0":
            what = STEP_NAMES[pass_type]  # without DeepSpeed
        return f"[{self._number}/{self._total}] {point}{what}{run}"

    def _mean_wall_seconds(self) -> float | None:
        """Mean duration of the trials that have ended; None before the first."""
        return sum(self._wall_seconds) / len(self._wall_seconds) if self._wall_seconds else None

    def end(self, record: TrialRecord) -> None:
        """A trial has ended: prints its result and the time left, and if verbose its duration, caveats and profiles."""
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
            for rank in record.ranks:
                for profile in rank.profiles:
                    files = ", ".join(profile.files) or "no file"
                    self._line.say(f"      profile {profile.name}, rank {rank.rank}: {files}")


def _result_text(record: TrialRecord) -> str:
    """``✓ 19,600 tok/s 75.4 GB``, or ``✗`` with the cause; the memory is the GPU's, or else the host's."""
    if not record.outcome.success:
        return f"✗ {failure_text(record)}"
    from ..analysis.row import make_run  # here, so that pydantic does not delay the first trial

    run = make_run(record)
    row = run.row
    speed = f"✓ {format_significant(row.rate)} {row.rate_unit.replace('tokens', 'tok')}"
    if has_kind(run.caveats, CaveatKind.OWN_BATCHES):
        speed = f"✓ {format_significant(row.throughput_samples_per_sec)} samples/s"
    if row.gpu_peak_gb is not None:
        return f"{speed} {format_significant(row.gpu_peak_gb)} GB"
    if row.cpu_used_gb is not None:
        return f"{speed} {format_significant(row.cpu_used_gb)} GB of host memory"
    return speed


# ------------------------------------------------------------------ the plan


def count_line(plan: RunPlan) -> str:
    """``4 points × 3 rows × 2 runs = 24 trials``, and how many of them will not run."""
    trials, runs, points = plan.trials, plan.options.repeats, len(plan.plans)
    rows = {len(each.configurations) for each in plan.plans}
    count, max_rows = f"{len(trials):,} trial{'s' if len(trials) != 1 else ''}", max(rows)
    if len(rows) == 1 and len(trials) == points * max_rows * runs:
        factors = ((points, "point"), (max_rows, "row"), (runs, "run"))
        parts = [f"{number:,} {name}s" for number, name in factors if number > 1]
        count = " × ".join(parts) + f" = {count}" if len(parts) > 1 else count
    unsupported = sum(bool(trial.unsupported) for trial in trials)
    skipped = sum(trial.not_launched for trial in trials) - unsupported
    why = "predicted not to fit" if plan.options.skip_predicted_oom else "predicted to need far too much memory"
    reasons = [(number, reason) for number, reason in ((skipped, why), (unsupported, "unsupported")) if number]
    if not reasons:
        return count
    idle = skipped + unsupported
    named = ", ".join(f"{number:,} {reason}" if len(reasons) > 1 else reason for number, reason in reasons)
    which = "none of which will run" if idle == len(trials) else f"of which {idle:,} will not run"
    return f"{count}, {which} ({named})"


def stand_in_line(plan: RunPlan) -> str | None:
    """Say which size stands in for the one that a search will find; None without a search."""
    if not plan.options.searches_size:
        return None
    what, size = "--batch-size auto: each micro-batch", 1
    if plan.options.auto_seq:
        what, size = "--seq-length auto: each sequence length", plan.trials[0].workload.seq_length
    return f"{what} is searched for in the run; this plan assumes {size}"


def run_plan_lines(plan: RunPlan, max_lines: int) -> list[str]:
    """The plan as a table with a line for each point of a sweep or, without a sweep, for each row.

    Lines beyond ``max_lines`` are only counted.
    """
    cells = []
    tier: Tier = "gpu" if plan.placement.accelerator == "cuda" else "cpu"
    if len(plan.plans) > 1:
        headings = ("Point", "fit")
        for each in plan.plans:
            sizes = [size for trial in each.trials if (size := predicted_bytes(trial, tier)) is not None]
            memory = " – ".join(dict.fromkeys(map(format_bytes, (min(sizes), max(sizes))))) if sizes else ""
            verdicts = [*{trial.configuration.name: _fit_text(each, trial) for trial in each.trials}.values()]
            others = "".join(f", {verdicts.count(name)} {name}" for name in ("tight", "?") if name in verdicts)
            fits = f"{verdicts.count('yes')} of {len(verdicts)}{others}"
            cells.append((each.options.point_text, str(len(each.trials)), memory, fits))
    else:
        headings = ("Configuration", "fits")
        for name, count in Counter(trial.configuration.name for trial in plan.trials_by_row).items():
            first = next(trial for trial in plan.trials if trial.configuration.name == name)
            prediction = stored_prediction(first)
            if tier == "gpu" and prediction is not None and not prediction.unknown:
                memory = f"{gpu_range(prediction.gpu_need)} GB"
            else:
                least = "≥ " if prediction is not None and prediction.unknown else ""
                memory = least + format_bytes(predicted_bytes(first, tier))
            fits = "unsupported" if first.unsupported else _fit_text(plan.plans[0], first)
            cells.append((first.configuration.label, str(count), memory, fits))
    memory = "GPU memory" if tier == "gpu" else "host memory"
    columns = [Column[str](heading) for heading in (headings[0], "trials", memory, headings[1])]
    lines = Table(columns=columns, rows=cells[:max_lines]).to_terminal(1000)
    left = [f"and {len(cells) - max_lines:,} more"] if len(cells) > max_lines else []
    stand_in = stand_in_line(plan)
    return [count_line(plan), "", *(line.text for line in lines), *left, *(["", stand_in] if stand_in else [])]


def _fit_text(plan: Plan, trial: Trial) -> str:
    """``yes``, ``tight``, ``no``, or ``?`` if its memory is not fully predicted and the predicted part would fit."""
    if trial.not_launched:
        return "no"
    prediction = stored_prediction(trial)
    if prediction is None:
        return "?"
    verdict = prediction.verdict(plan.facts.memory.gpu_bytes, plan.facts.memory.host_bytes)
    return {DOES_NOT_FIT: "no", UNKNOWN: "?", TIGHT: "tight"}.get(verdict, "yes")


# ------------------------------------------------------------------ profiles


def profile_files_line(runs: Sequence[Run], folder: Path) -> str | None:
    """``Profiles: 6 files, 4.31 MB, in <run>/trials/*/profiles``; None without any. ``folder``: the run's."""
    profiles = [profile for run in runs for rank in run.ranks for profile in rank.profiles]
    # Files of profiles may have been deleted since the run.
    paths = [path for profile in profiles for name in profile.files if (path := folder / name).is_file()]
    size = format_bytes(sum(path.stat().st_size for path in paths))
    return f"Profiles: {format_items(len(paths), 'file')}, {size}, in {folder}/trials/*/profiles" if paths else None


def nsys_command(family: str, arguments: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The command that repeats a run under nsys, to record its windows; None if it runs under nsys already.

    Ranks are started cold, as nsys records no process that was forked without an exec. Each window becomes a file.
    """
    if environ.get("NSYS_PROFILING_SESSION_ID"):  # nsys sets it in the processes that it records
        return None
    launcher = ["--launcher", "deepspeed"]  # the last one counts
    flags = "--trace=cuda,nvtx,cublas --sample=none --capture-range=cudaProfilerApi --capture-range-end=repeat"
    # A dry run prints this command too, but the command itself is meant to run.
    repeated = [argument for argument in arguments if argument != "--dry-run"]
    command = invocation.comparison(family, [*repeated, *launcher])
    return f"nsys profile {flags} --output=nsys_window {command}"
