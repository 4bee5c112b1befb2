"""Copies the runs of a result to programs that show runs: trackio, Weights & Biases, TensorBoard.

Every trial is one run: what was trained as its configuration, its steps as series, its figures as summary. Everything
stays on this machine: wandb runs offline and trackio without a Space, unless their own variables say otherwise.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..analysis.flat_rows import flat_rows
from ..analysis.load_results import Result, run_folder_of
from ..analysis.step_series import steps_of
from ..analysis.summary import TrialSummary
from ..errors import UsageError
from ..records.step_series import TrialStep
from ..records.tensorboard_files import TensorBoardFile

PROJECT = "ds_bench"
TENSORBOARD_FOLDER = Path("tensorboard")
_CONFIG_COLUMNS = (
    "model", "strategy", "stage", "engine", "batch_size", "seq_length", "grad_accum", "precision", "optimizer",
    "activation_checkpointing", "dropout", "num_steps", "warmup_steps", "repeat", "accelerator", "device", "num_gpus",
    "num_nodes", "data_parallel_size", "parameter_count", "launch", "method_version", "config_hash", "torch_version",
    "deepspeed_version", "transformers_version", "cuda_version", "gpu_driver_version", "run_id", "trial_id",
)  # fmt: skip
"""Columns of the flat files that say what ran; the others are what came of it."""
_NOT_SHOWN = ("success", "round_position", "started_at", "flops_convention", "cpu_model", "gpu_name", "batch_policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """One trial as a tracker shows it."""

    group: str
    """Name of the run folder, or of the file where a flat JSON does not tell it."""
    name: str
    """``00_zero0``: the trial's, unique in its group."""
    config: Mapping[str, Any]
    steps: Sequence[TrialStep]
    summary: Mapping[str, Any]
    succeeded: bool
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
    for result in sorted(results, key=lambda result: result.records is not None):
        source, folder = result.source, run_folder_of(result.source)
        name = source.stem if names[source.stem] == 1 else str(source.with_suffix(""))
        for run in _runs_of(result.summaries, folders, name if folder is None else folder.name):
            runs[run.group, run.name] = run
    return list(runs.values())


def _runs_of(summaries: Sequence[TrialSummary], run_folders: Mapping[str, Path], group: str) -> Iterator[TrackedRun]:
    """``run_folders``: name of a run → its folder. ``group``: that of trials that do not tell their run."""
    for summary, row in zip(summaries, flat_rows(summaries), strict=True):
        yield TrackedRun(
            group=summary.run_id or group,
            name=summary.record.trial.trial_id,
            config={
                **{name: row[name] for name in _CONFIG_COLUMNS if row[name] is not None},
                "deepspeed": summary.record.trial.to_dict()["ds_config"],
            },
            steps=steps_of(summary, run_folders),
            summary={
                name: value
                for name, value in row.items()
                if value is not None and name not in (*_CONFIG_COLUMNS, *_NOT_SHOWN)
            },
            succeeded=summary.record.outcome.success,
            started_at=summary.record.started_at,
        )


def send(runs: Sequence[TrackedRun], tracker: str) -> list[str]:
    """Gives the runs to a tracker. Returns lines that say where they are. Sent again, they take their own place."""
    senders: dict[str, Callable[[Sequence[TrackedRun]], list[str]]]
    senders = {"tensorboard": _to_tensorboard, "trackio": _to_trackio, "wandb": _to_wandb}
    return senders[tracker](runs)


# ------------------------------------------------------------------ TensorBoard


def _to_tensorboard(runs: Sequence[TrackedRun]) -> list[str]:
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    for run in runs:
        folder = TENSORBOARD_FOLDER / _plain(run.group) / _plain(run.name)
        # Files of this package alone: others may write to this folder too.
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
    return [f"tensorboard: {len(runs)} runs in {TENSORBOARD_FOLDER}; look at them: {look}"]


def _summary_numbers(run: TrackedRun) -> dict[str, float]:
    """The figures of a run as values of one step, for trackers that have no summary."""
    return {
        f"summary/{name}": value
        for name, value in run.summary.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _plain(name: str) -> str:
    """A name as that of a folder."""
    return re.sub(r"[^\w.+=-]", "-", name).lstrip(".") or "run"


# ------------------------------------------------------------------ trackio


def _to_trackio(runs: Sequence[TrackedRun]) -> list[str]:
    """Writes to trackio's database on this machine, and so needs neither its server nor a Space."""
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import TRACKIO_DIR

    for run in runs:
        name = f"{run.group}/{run.name}"
        last_step, last_time = run.end
        # Sent again, the steps would be added to those that are there.
        SQLiteStorage.delete_run(PROJECT, name, run_id=name)
        SQLiteStorage.bulk_log(
            PROJECT,
            name,
            [*(step.shown_values for step in run.steps), _summary_numbers(run)],
            steps=[*(step.step for step in run.steps), last_step],
            timestamps=[_iso(each) for each in (*(step.time for step in run.steps), last_time)],
            config={**run.config, "_Group": run.group, "_Created": _iso(last_time)},
            run_id=name,
        )
    look = f"trackio show --project {PROJECT}"
    return [f"trackio: {len(runs)} runs of project {PROJECT} in {TRACKIO_DIR}; look at them: {look}"]


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


# ------------------------------------------------------------------ Weights & Biases


def _to_wandb(runs: Sequence[TrackedRun]) -> list[str]:
    """Writes offline runs to ``wandb/``, unless WANDB_MODE says otherwise. Nothing of this machine is added to them."""
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    if mode == "offline":  # its reports on its own errors are sent all the same
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    # wandb would otherwise add output, repository, code, machine, its load and its packages to each run.
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    folder = None
    for run in runs:
        # The same id for the same trial: synchronised twice, it is one run.
        identity = hashlib.sha256(f"{run.group}/{run.name}".encode()).hexdigest()[:16]
        try:
            target = wandb.init(
                project=project,
                group=run.group,
                name=run.name,
                id=identity,
                resume="allow" if mode == "online" else None,
                config=dict(run.config),
                mode=mode,
                settings=settings,
            )
        except wandb.Error as error:  # such as nobody being logged in
            raise UsageError(f"--to wandb: {error}", remedy="wandb login, or WANDB_MODE=offline") from None
        # target.dir is the folder files of a run, below wandb/.
        folder = Path(target.dir).parent.parent
        for step in run.steps:
            target.log(step.shown_values, step=step.step)
        target.summary.update(dict(run.summary))
        target.finish(exit_code=0 if run.succeeded else 1)
    where = f"in {folder}; send them: wandb sync {folder}/offline-run-*"
    if mode != "offline":
        where = f"with WANDB_MODE={mode}"
    return [f"wandb: {len(runs)} runs of project {project} {where}"]
