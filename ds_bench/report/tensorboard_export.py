"""A result as TensorBoard shows it: every trial's steps, settings and figures, as event files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..analysis.load_results import Result, run_folder_of
from ..analysis.loss_parity import with_loss_caveats
from ..records.run_folder import last_trial_folder
from ..records.step_files import TensorBoardFile, TrialStep, read_steps
from ..units import format_items

if TYPE_CHECKING:
    from ..analysis.row import Run

TENSORBOARD_FOLDER = Path("tensorboard")
_SETTINGS = (
    "model", "strategy", "stage", "engine", "batch_size", "seq_length", "grad_accum", "precision", "optimizer",
    "activation_checkpointing", "dropout", "num_steps", "warmup_steps", "repeat", "accelerator", "device", "num_gpus",
    "num_nodes", "data_parallel_size", "parameter_count", "launch", "method_version", "config_hash", "torch_version",
    "deepspeed_version", "transformers_version", "cuda_version", "gpu_driver_version", "run_id", "trial_id",
)  # fmt: skip
"""Columns of the flat files that say what ran; the others are its results."""

TrackedRuns = Mapping[tuple[str, str], "tuple[Run, list[TrialStep]]"]
"""Run folder (or file, if a flat JSON does not name it) and trial → the run with its steps."""


def tracked_runs(results: Sequence[Result]) -> TrackedRuns:
    """Every trial once; if several results hold it, the one with its steps."""
    # A flat JSON of a run has no steps, but its run folder may be among the results.
    folders = {folder.name: folder for result in results if (folder := run_folder_of(result.source)) is not None}
    # Files of the same name in two folders would otherwise be one group.
    names = Counter(result.source.stem for result in results)
    runs = {}
    # Results with records last: they replace the same trials of a flat JSON, which hold no steps.
    for result in sorted(results, key=lambda result: result.has_records):
        source, folder = result.source, run_folder_of(result.source)
        name = source.stem if names[source.stem] == 1 else str(source.with_suffix(""))
        for run in with_loss_caveats(result.runs):
            group = run.row.run_id or (name if folder is None else folder.name)
            runs[group, run.trial.trial_id] = run, [*_steps(run, folders.get(run.row.run_id or ""))]
    return runs


def write_tensorboard(runs: TrackedRuns) -> str:
    """Write the runs below ``tensorboard/``, replacing earlier copies. Return a line that says how to look at them."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    folders: set[Path] = set()
    for (group, name), (run, steps) in runs.items():
        folder = TENSORBOARD_FOLDER / _plain(group) / _plain(name)
        while folder in folders:  # "a b" and "a-b"
            folder = folder.with_name(f"{folder.name}+")
        folders.add(folder)
        # Only this package's files: other programs may write to this folder too.
        for old in folder.glob("events.out.tfevents.*.ds_bench"):
            old.unlink()
        row = run.row.values()
        numbers = {
            f"summary/{key}": value
            for key, value in row.items()
            if key not in _SETTINGS and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        started_at = run.row.started_at
        begun = 0.0 if started_at is None else datetime.fromisoformat(started_at).timestamp()
        last_step, last_time = (steps[-1].step, steps[-1].time) if steps else (0, begun)
        file = TensorBoardFile(folder)
        settings = {key: row[key] for key in _SETTINGS if row[key] is not None}
        file.add_summary(hparams_pb(settings, f"{group}/{name}", last_time), last_time)
        for step in steps:
            file.add_scalars(step.shown_values, step.step, step.time)
        # TensorBoard has no place for figures of a whole run, so they are written as values of its last step.
        file.add_scalars(numbers, last_step, last_time)
        file.close()
    look = f"tensorboard --logdir {TENSORBOARD_FOLDER}"
    return f"TensorBoard: {format_items(len(runs), 'run')} in {TENSORBOARD_FOLDER}. To view: {look}"


def _plain(name: str) -> str:
    """The name with only the characters that a folder's name may have."""
    return re.sub(r"[^\w.+=-]", "-", name).lstrip(".") or "run"


def _steps(run: Run, run_folder: Path | None) -> Iterator[TrialStep]:
    """Yield the steps in ``steps.jsonl``, which has memory too; without it, the steps of the record.

    A trial with neither, such as a flat row or one that failed without ``--monitor``, yields nothing.
    """
    if run_folder is not None and (monitored := read_steps(last_trial_folder(run_folder, run.trial.trial_id))):
        yield from monitored
        return
    record, row = run.record, run.row
    if record is None or not record.ranks:
        return
    tokens_per_step = (row.throughput_tokens_per_sec or 0) * (row.avg_step_time_ms or 0) / 1000
    slowest, losses = record.slowest_rank, run.losses
    end = 0.0 if record.started_at is None else datetime.fromisoformat(record.started_at).timestamp()
    end += record.start_seconds or 0.0
    for number, duration in enumerate(slowest.all_step_seconds):
        end += duration
        yield TrialStep(
            step=number,
            phase="warmup" if number < len(slowest.warmup_step_seconds) else "measured",
            time=end,
            seconds=duration,
            tokens_per_second=tokens_per_step / duration if tokens_per_step and duration > 0 else None,
            loss=losses[number] if number < len(losses) else None,
        )
