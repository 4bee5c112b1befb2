"""Reads a result: the files that the user names become runs and the environment of the measurement.

A run folder holds everything, a flat JSON only figures (see :mod:`flat_run`). A file that is not usable is a
UsageError of one line. :mod:`merge_results` puts several results together.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..models.presets import find_preset
from ..records import json_files, reader
from ..records.reader import RunInfo
from ..records.run_folder import RECORDS_FILE, RUN_FILE, flat_json_path
from ..records.schema import TrialRecord
from ..system.environment import Environment
from ..units import format_place
from . import flops
from .flat_run import flat_run
from .loss_parity import with_loss_caveats
from .row import Row, Run, make_run

_FLAT_NAME = re.compile(r"(?:(zero|offload)_)?comparison_(\w+)")
_MAX_NOTES = 20
_MAX_PEAK_TFLOPS = 1e9
_VALUE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that impossible values of a file, of the right type, cause when they are computed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The content of one result. None or empty where its files do not hold it."""

    source: Path
    """What the user named; in a folder of one result, that result."""
    runs: tuple[Run, ...]
    """The last run of each trial, in the order of the plan."""
    environment: Environment | None
    family: str | None
    """``zero``, ``offload`` or ``recipe``."""
    arguments: tuple[str, ...]
    """As they were typed, without the script."""
    notes: tuple[str, ...]
    """Notes of the run, then those of reading it."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """See ``reader.RunInfo``."""

    @property
    def has_records(self) -> bool:
        """Whether it was read from a run folder, not from flat rows."""
        return all(run.record is not None for run in self.runs)


class NoTrialsError(UsageError):
    """A run of which no trial had finished."""


def load(path: Path) -> Result:
    """Reads a run folder, its run.json or records.jsonl, a flat JSON, or a folder that holds one such result.

    Raises UsageError.
    """
    try:
        return _load(Path(path))
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply", remedy="give a result as ds_bench wrote it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy="give a result that you may read") from None


def make_runs(
    records: Sequence[TrialRecord],
    peak_tflops: float | None = None,
    environment: Environment | None = None,
    run_id: str | None = None,
) -> tuple[Run, ...]:
    """Make the runs of one table. ``peak_tflops``: of one device, if the user gave it."""
    find_model, find_peak = cache(find_preset), cache(flops.peak_flops)
    runs = []
    for record in records:
        workload = record.trial.workload
        facts = find_model(workload.model) if workload.model_source == "preset" else None
        # A rate that the user gave counts on any device; the table is asked for GPUs alone.
        peak_flops = peak_tflops * 1e12 if peak_tflops else None
        if peak_flops is None and record.ranks and record.trial.placement.accelerator == "cuda":
            peak_flops = find_peak(record.ranks[0].device_name, flops.peak_precision(record))
        runs.append(make_run(record, facts, peak_flops, environment, run_id))
    return tuple(with_loss_caveats(runs))


def trial_identity(run: Run) -> tuple[Any, ...]:
    """Return what is equal for the record and the flat row of one trial, and for no other trial that was launched."""
    row, rate = run.row, run.row.throughput_tokens_per_sec
    # JSON of another writer may round the throughput.
    return (
        row.model, row.strategy, row.stage, row.repeat, row.num_gpus, row.status, row.started_at, row.wall_seconds,
        None if rate is None else f"{rate:.9g}",
    )  # fmt: skip


def _load(path: Path) -> Result:
    if path.is_dir():
        if _holds_run(path):
            return _load_run(path, path)
        if len(results := _results_in(path)) == 1:
            return _load(results[0])
        raise _no_run_error(path, results)
    if path.name in (RUN_FILE, RECORDS_FILE):
        with json_files.opened(path):  # raises UsageError unless it exists and is a file
            return _load_run(path.parent, path)
    # Records under another name, as of a copy: the run.json beside them may be of another run.
    if path.suffix == ".jsonl":
        return _load_records(path, RunInfo(), path, [])
    rows_path = path.with_name(path.name.replace("recommendation_", "comparison_", 1))
    if rows_path != path and _FLAT_NAME.match(rows_path.name) and rows_path.is_file():
        path = rows_path  # the recommendation beside the rows, as in a list of all files of a folder
    data = json_files.read_bytes(path)
    if path.suffix.lower() == ".csv" or data[:20].startswith((b"stage,strategy,", b"\xef\xbb\xbfstage,strategy,")):
        json_path = path.with_suffix(".json")
        remedy = f"give {json_path}" if json_path.is_file() else "give the .json beside it"
        raise UsageError(f"{path} is the CSV of a result", remedy=remedy)
    return _load_flat_json(path, data)


def run_folder_of(path: Path) -> Path | None:
    """The run folder that a result lies in or belongs to by its name; None for a flat JSON alone."""
    if path.is_dir() or path.name in (RUN_FILE, RECORDS_FILE):
        return (path if path.is_dir() else path.parent).resolve()
    if (name := _FLAT_NAME.match(path.stem)) is None:
        return None
    folder = path.parent / "runs" / f"{name[1] or 'comparison'}_{name[2]}"
    return folder if _holds_run(folder) else None


def _holds_run(folder: Path) -> bool:
    return (folder / RUN_FILE).is_file() or (folder / RECORDS_FILE).is_file()


def _results_in(folder: Path) -> list[Path]:
    """The run folders and flat JSONs directly inside, sorted."""
    return [
        entry
        for entry in sorted(folder.iterdir())
        if (entry.is_dir() and _holds_run(entry)) or (entry.suffix == ".json" and _FLAT_NAME.match(entry.name))
    ]


def _no_run_error(folder: Path, results: Sequence[Path]) -> UsageError:
    """The error for a folder without a run of its own. ``results``: those inside, of which the remedy names one."""
    remedy = (
        f"give one result, such as {results[-1]}" if results else "give <output-dir>/runs/<run> or a result's .json"
    )
    ended_early = folder.resolve().parent.name == "runs" and not results
    kind = NoTrialsError if ended_early else UsageError
    return kind(f"{folder} holds no {RUN_FILE} and no {RECORDS_FILE}", remedy=remedy)


# ------------------------------------------------------------------ a run folder


def _load_run(folder: Path, source: Path) -> Result:
    notes: list[str] = []
    run_info = reader.read_run(folder / RUN_FILE, notes)
    file = folder / RECORDS_FILE
    if not file.exists():
        raise NoTrialsError(f"{folder} has no {RECORDS_FILE}: no trial had finished", remedy="give another result")
    result = _load_records(source, run_info, file, notes)
    return replace(result, runs=_with_flops_of_flat_json(result.runs, folder))


def _load_records(source: Path, run_info: RunInfo, file: Path, notes: list[str]) -> Result:
    records = reader.read_records(file, run_info.trials, notes)
    # Without run.json the folder need not be that of a run.
    run_id = file.resolve().parent.name if run_info.trials else None
    try:
        runs = make_runs(records, _peak_tflops(run_info), run_info.environment, run_id)
    except _VALUE_ERRORS as error:
        # One by one only now, to name the trial.
        record = next((record for record in records if not _can_be_summarised(record)), None)
        name = f"{source}: {record.trial.trial_id}" if record else str(source)
        problem = f"{name} holds impossible figures or an impossible configuration: {type(error).__name__}: {error}"
        raise UsageError(problem, remedy="give a result as ds_bench wrote it") from error
    return Result(
        source=source,
        runs=runs,
        environment=run_info.environment,
        family=run_info.family,
        arguments=run_info.arguments,
        notes=(*run_info.notes, *_limit_notes(notes)),
        recipe=run_info.recipe,
    )


def _can_be_summarised(record: TrialRecord) -> bool:
    try:
        make_runs([record])
    except _VALUE_ERRORS:
        return False
    return True


def recipe_value(recipe: Mapping[str, Any], section: str, key: str) -> Any:
    """A value of the recipe that a run keeps; None where it has none. It is as the file has it, and not checked."""
    sections = recipe.get("values")
    block = sections.get(section) if isinstance(sections, dict) else None
    return block.get(key) if isinstance(block, dict) else None


def _peak_tflops(run_info: RunInfo) -> float | None:
    """The peak rate that the flags or the recipe of a run give; None if it was not given or is impossible."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--peak-tflops", type=float)
    value = recipe_value(run_info.recipe, "launch", "peak_tflops")
    # A recipe's run was given the rate in its file; the words of a script's run are its flags.
    if not run_info.recipe:
        with contextlib.suppress(argparse.ArgumentError):
            value = parser.parse_known_args(run_info.arguments)[0].peak_tflops
    possible = isinstance(value, (int, float)) and 0 < value < _MAX_PEAK_TFLOPS
    return float(value) if possible else None


_EFFICIENCY = (
    "model_flops_per_token", "causal_flops_per_token", "hardware_flops_per_token", "model_tflops_per_gpu", "mfu",
    "flops_convention",
)  # fmt: skip
"""Columns that need the model's shape."""


def _with_flops_of_flat_json(runs: tuple[Run, ...], folder: Path) -> tuple[Run, ...]:
    """Fills in the FLOPs of a model that is not a preset: only the run knew its shape, and wrote them to its JSON."""
    if all(run.row.flops_convention == flops.MODEL_CONVENTION or not run.ranks for run in runs):
        return runs
    path = flat_json_path(folder.resolve())
    try:
        rows = read_rows(path, json_files.read_bytes(path))
    except UsageError:
        return runs
    # By id and repeat, as rows and records need not be in one order.
    row_of = {(row.trial_id, row.repeat): row for row in rows}
    complete = []
    for run in runs:
        row = row_of.get((run.trial.trial_id, run.trial.repeat))
        if row and row.model_flops_per_token and run.row.flops_convention != flops.MODEL_CONVENTION:
            run = run.with_row(**{name: getattr(row, name) for name in _EFFICIENCY})
        complete.append(run)
    return tuple(complete)


def _limit_notes(notes: Sequence[str]) -> list[str]:
    """The first notes, each once, and a line with the number of the others."""
    notes = list(dict.fromkeys(notes))
    return notes if len(notes) <= _MAX_NOTES else [*notes[:_MAX_NOTES], f"and {len(notes) - _MAX_NOTES} more notes"]


# ------------------------------------------------------------------ a flat JSON


def _load_flat_json(path: Path, data: bytes) -> Result:
    """The run folder of a flat JSON, if it is there and holds the same trials; else the rows of the JSON alone."""
    notes: list[str] = []
    runs = []
    for number, row in enumerate(read_rows(path, data), 1):
        try:
            runs.append(flat_run(row))
        except ValueError as error:
            raise UsageError(f"{path}: row {number} is not usable: {error}", remedy="correct or remove it") from None
    name, folder = _FLAT_NAME.match(path.stem), run_folder_of(path)
    if folder is not None:
        try:
            run = _load_run(folder, path)
        except UsageError as error:
            notes.append(f"its run folder cannot be used: {error}")
        else:
            # The folder holds more, but the file may have been edited, or stand beside a folder of another run.
            if Counter(map(trial_identity, run.runs)) == Counter(map(trial_identity, runs)):
                return run
            notes.append(f"{folder} holds other rows than {path.name}: the file is used")
    notes.append("flat rows only: no series of steps and no DeepSpeed configurations are known")
    environment = runs[0].environment
    return Result(
        source=path,
        runs=tuple(runs),
        environment=environment if all(run.environment == environment for run in runs) else None,
        family=(name[1] or "recipe") if name else None,
        arguments=(),
        notes=tuple(_limit_notes(notes)),
    )


def read_rows(path: Path, data: bytes) -> list[Row]:
    """Read the rows of a flat JSON. Raises UsageError."""
    from pydantic import ValidationError

    remedy = "give a run folder, or a result's .json"
    try:
        rows = json_files.adapter(list[Row]).validate_json(data.removeprefix(b"\xef\xbb\xbf"))
    except ValidationError as error:
        found = json_files.invalid_value(error)
        if not found.place:
            raise UsageError(f"{path} {found.reason}", remedy=remedy) from None
        index, *cell = found.place
        place = ": ".join(filter(None, [f"row {int(index) + 1}", format_place(cell)]))
        raise UsageError(f"{path}: {place} {found.reason}", remedy="give a result as ds_bench wrote it") from None
    if not rows:
        raise UsageError(f"{path} has no rows", remedy="no trial had finished; run it again")
    return rows
