"""Reads a result: the files that the user names become records, summaries and the environment of the measurement.

A run folder holds everything, a flat JSON only figures (see :mod:`flat_reader`). A file that is not usable is a
UsageError of one line. :mod:`merge_results` puts several results together.
"""

from __future__ import annotations

import argparse
import contextlib
import math
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
from ..records.json_files import InvalidJsonError, InvalidValueError
from ..records.reader import RunInfo
from ..records.run_folder import RECORDS_FILE, RUN_FILE, flat_json_path
from ..records.schema import TrialRecord
from ..system.environment import Environment
from ..units import format_place
from . import flat_reader, flops
from .loss_parity import with_loss_caveats
from .summary import TrialSummary, summarise

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
    records: tuple[TrialRecord, ...] | None
    """The last record of each trial, in the order of the plan; None if there are flat rows only."""
    summaries: tuple[TrialSummary, ...]
    environment: Environment | None
    family: str | None
    """``zero``, ``offload`` or ``recipe``."""
    arguments: tuple[str, ...]
    """As they were typed, without the script."""
    notes: tuple[str, ...]
    """Notes of the run, then those of reading it."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """See ``reader.RunInfo``."""


class NoTrialsError(UsageError):
    """A run of which no trial had finished."""


def load(path: Path) -> Result:
    """Reads a run folder, its run.json or records.jsonl, a flat JSON, or a folder that holds one such result.

    Raises UsageError.
    """
    try:
        with reader.gc_paused():
            return _load(Path(path))
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply", remedy="give a result as ds_bench wrote it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy="give a result that you may read") from None


def summarise_all(
    records: Sequence[TrialRecord],
    peak_tflops: float | None = None,
    environment: Environment | None = None,
    run_id: str | None = None,
) -> tuple[TrialSummary, ...]:
    """Summarises the records of one table. ``peak_tflops``: of one device, if the user gave it."""
    find_model, find_peak = cache(find_preset), cache(flops.peak_flops)
    summaries = []
    for record in records:
        workload = record.trial.workload
        facts = find_model(workload.model) if workload.model_source == "preset" else None
        # A rate that the user gave counts on any device; the table is asked for GPUs alone.
        peak_flops = peak_tflops * 1e12 if peak_tflops else None
        if peak_flops is None and record.ranks and record.trial.placement.accelerator == "cuda":
            peak_flops = find_peak(record.ranks[0].device_name, flops.peak_precision(record))
        summaries.append(summarise(record, facts, peak_flops, environment, run_id))
    return tuple(with_loss_caveats(summaries))


def trial_identity(summary: TrialSummary) -> tuple[Any, ...]:
    """Equal for the record and the flat row of one trial, different for any two trials that were launched.

    The throughput counts with nine digits, as the units of flat rows round it.
    """
    trial, rate = summary.record.trial, summary.tokens_per_second
    return (
        trial.workload.model, trial.configuration.name, trial.configuration.stage, trial.repeat,
        trial.placement.num_gpus, summary.record.outcome.status, summary.record.started_at, summary.record.wall_seconds,
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
    return replace(result, summaries=_with_flops_of_flat_json(result.summaries, folder))


def _load_records(source: Path, run_info: RunInfo, file: Path, notes: list[str]) -> Result:
    records = reader.read_records(file, run_info.trials, notes)
    # Without run.json the folder need not be that of a run.
    run_id = file.resolve().parent.name if run_info.trials else None
    try:
        summaries = summarise_all(records, _peak_tflops(run_info), run_info.environment, run_id)
        if any(summary.tokens_per_second == math.inf for summary in summaries):
            # Caught below with all other impossible figures.
            raise OverflowError("a throughput is not finite")
    except _VALUE_ERRORS as error:
        # One by one only now, to name the trial.
        record = next((record for record in records if not _can_be_summarised(record)), None)
        name = f"{source}: {record.trial.trial_id}" if record else str(source)
        problem = f"{name} holds impossible figures or an impossible configuration: {type(error).__name__}: {error}"
        raise UsageError(problem, remedy="give a result as ds_bench wrote it") from error
    return Result(
        source=source,
        records=records,
        summaries=summaries,
        environment=run_info.environment,
        family=run_info.family,
        arguments=run_info.arguments,
        notes=(*run_info.notes, *_limit_notes(notes)),
        recipe=run_info.recipe,
    )


def _can_be_summarised(record: TrialRecord) -> bool:
    try:
        summarise_all([record])
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


def _with_flops_of_flat_json(summaries: tuple[TrialSummary, ...], folder: Path) -> tuple[TrialSummary, ...]:
    """Fills in the FLOPs of a model that is not a preset: only the run knew its shape, and wrote them to its JSON."""
    if all(summary.flops_convention == flops.MODEL_CONVENTION or not summary.record.ranks for summary in summaries):
        return summaries
    path = flat_json_path(folder.resolve())
    try:
        rows = _check_rows(path, json_files.read_bytes(path), [])
    except UsageError:
        return summaries
    # By id and repeat, as rows and records need not be in one order.
    row_of = {(row.get("trial_id"), row.get("repeat")): row for row in rows}
    complete = []
    for summary in summaries:
        row = row_of.get((summary.record.trial.trial_id, summary.record.trial.repeat))
        if row and row.get("model_flops_per_token") and summary.flops_convention != flops.MODEL_CONVENTION:
            summary = replace(summary, **flat_reader.read_efficiency(row))
        complete.append(summary)
    return tuple(complete)


def _limit_notes(notes: Sequence[str]) -> list[str]:
    """The first notes, each once, and a line with the number of the others."""
    notes = list(dict.fromkeys(notes))
    return notes if len(notes) <= _MAX_NOTES else [*notes[:_MAX_NOTES], f"and {len(notes) - _MAX_NOTES} more notes"]


# ------------------------------------------------------------------ a flat JSON


def _load_flat_json(path: Path, data: bytes) -> Result:
    """The run folder of a flat JSON, if it is there and holds the same trials; else the rows of the JSON alone."""
    notes: list[str] = []
    summaries = []
    for number, row in enumerate(_check_rows(path, data, notes), 1):
        try:
            summaries.append(flat_reader.read_summary(row))
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
            if Counter(map(trial_identity, run.summaries)) == Counter(map(trial_identity, summaries)):
                return run
            notes.append(f"{folder} holds other rows than {path.name}: the file is used")
    notes.append("flat rows only: no series of steps and no DeepSpeed configurations are known")
    environment = summaries[0].environment
    return Result(
        source=path,
        records=None,
        summaries=tuple(summaries),
        environment=environment if all(summary.environment == environment for summary in summaries) else None,
        family=(name[1] or "recipe") if name else None,
        arguments=(),
        notes=tuple(_limit_notes(notes)),
    )


def _check_rows(path: Path, data: bytes, notes: list[str]) -> list[dict[str, Any]]:
    """The checked rows of a flat JSON. Raises UsageError."""
    try:
        value = json_files.parse_json(data)
    except InvalidJsonError as error:
        raise UsageError(f"{path} {error}", remedy="give a result as ds_bench wrote it, or copy it again") from None
    if not isinstance(value, list):
        what = "a run.json under another name" if isinstance(value, dict) and "trials" in value else "no list of rows"
        raise UsageError(f"{path} is {what}", remedy="give a run folder, or a result's .json")
    if not value:
        raise UsageError(f"{path} has no rows", remedy="no trial had finished; run it again")
    names = dict.fromkeys(name for row in value if isinstance(row, dict) for name in row)
    unknown = [name for name in names if name not in flat_reader.KNOWN_COLUMNS]
    if unknown:
        notes.append(f"{path.name}: unknown columns left out: {', '.join(unknown)}")
    try:
        return flat_reader.check_rows(value)
    except InvalidValueError as error:
        index, *cell = error.place
        place = ": ".join(filter(None, [f"row {int(index) + 1}", format_place(cell)]))
        raise UsageError(f"{path}: {place} {error.reason}", remedy="give a result as ds_bench wrote it") from None
