"""Writes a result as TensorBoard runs: one per trial, with its settings, its steps and its summary figures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.load_results import Result, run_folder_of
from ..analysis.loss_parity import with_loss_caveats
from ..records.run_folder import last_trial_folder
from ..records.step_series import TrialStep, read_steps
from ..records.tensorboard_files import TensorBoardFile

if TYPE_CHECKING:
    from ..analysis.row import Run

TENSORBOARD_FOLDER = Path("tensorboard")
_CONFIG_COLUMNS = (
    "model", "strategy", "stage", "engine", "batch_size", "seq_length", "grad_accum", "precision", "optimizer",
    "activation_checkpointing", "dropout", "num_steps", "warmup_steps", "repeat", "accelerator", "device", "num_gpus",
    "num_nodes", "data_parallel_size", "parameter_count", "launch", "method_version", "config_hash", "torch_version",
    "deepspeed_version", "transformers_version", "cuda_version", "gpu_driver_version", "run_id", "trial_id",
)  # fmt: skip
"""Columns of the flat files that say what ran; the others are what came of it."""
_NOT_SHOWN = (
    "success",
    "round_position",
    "started_at",
    "flops_convention",
    "cpu_model",
    "gpu_name",
    "batch_policy",
    "caveat_list",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """One trial as TensorBoard shows it."""

    group: str
    """Name of the run folder, or of the file if a flat JSON does not have it."""
    name: str
    """``00_zero0``: the trial's, unique in its group."""
    config: Mapping[str, Any]
    steps: Sequence[TrialStep]
    summary: Mapping[str, Any]
    started_at: str | None
    """ISO 8601; None where it is not known."""

    @property
    def end(self) -> tuple[int, float]:
        """Number of the last step, and its end in seconds since the epoch; without steps 0 and the run's beginning."""
        if self.steps:
            return self.steps[-1].step, self.steps[-1].time
        return 0, 0.0 if self.started_at is None else datetime.fromisoformat(self.started_at).timestamp()


def tracked_runs(results: Sequence[Result]) -> list[TrackedRun]:
    """One run for each trial; of a trial that several results hold, that with its steps."""
    # A flat JSON of a run has no steps, but its run folder may be among the results.
    folders = {folder.name: folder for result in results if (folder := run_folder_of(result.source)) is not None}
    # Files of the same name in two folders would otherwise be one group.
    names = Counter(result.source.stem for result in results)
    runs: dict[tuple[str, str], TrackedRun] = {}
    # Results with records last: they replace the same trials of a flat JSON, which hold no steps.
    for result in sorted(results, key=lambda result: result.has_records):
        source, folder = result.source, run_folder_of(result.source)
        name = source.stem if names[source.stem] == 1 else str(source.with_suffix(""))
        for run in _runs_of(result.runs, folders, name if folder is None else folder.name):
            runs[run.group, run.name] = run
    return list(runs.values())


def _runs_of(runs: Sequence[Run], run_folders: Mapping[str, Path], group: str) -> Iterator[TrackedRun]:
    """``run_folders``: name of a run → its folder. ``group``: group of trials whose run is unknown."""
    for run in with_loss_caveats(runs):
        row = run.row.values()
        yield TrackedRun(
            group=run.row.run_id or group,
            name=run.trial.trial_id,
            config={
                **{name: row[name] for name in _CONFIG_COLUMNS if row[name] is not None},
                "deepspeed": run.trial.to_dict()["ds_config"],
            },
            steps=steps_of(run, run_folders),
            summary={
                name: value
                for name, value in row.items()
                if value is not None and name not in (*_CONFIG_COLUMNS, *_NOT_SHOWN)
            },
            started_at=run.row.started_at,
        )


def write_tensorboard(runs: Sequence[TrackedRun]) -> str:
    """Write the runs below ``tensorboard/``, replacing earlier copies. Return a line that says how to look at them."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    for run in runs:
        folder = TENSORBOARD_FOLDER / _plain(run.group) / _plain(run.name)
        # Only files of this package: others may write to this folder too.
        for old in folder.glob("events.out.tfevents.*.ds_bench"):
            old.unlink()
        last_step, last_time = run.end
        # hparams takes values of these types only.
        settings = {name: value for name, value in run.config.items() if isinstance(value, (bool, int, float, str))}
        file = TensorBoardFile(folder)
        file.add_summary(hparams_pb(settings, f"{run.group}/{run.name}", last_time), last_time)
        for step in run.steps:
            file.add_scalars(step.shown_values, step.step, step.time)
        file.add_scalars(_summary_numbers(run), last_step, last_time)
        file.close()
    look = f"tensorboard --logdir {TENSORBOARD_FOLDER}"
    return f"tensorboard: {len(runs)} runs in {TENSORBOARD_FOLDER}; look at them: {look}"


def _summary_numbers(run: TrackedRun) -> dict[str, float]:
    """Return the figures of a run as values of one step: TensorBoard has no summary."""
    return {
        f"summary/{name}": value
        for name, value in run.summary.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _plain(name: str) -> str:
    """The name with only the characters that a folder may have."""
    return re.sub(r"[^\w.+=-]", "-", name).lstrip(".") or "run"


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
