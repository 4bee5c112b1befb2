"""Reading results back: from what the user names to records, summaries and the environment they were measured in.

A run folder tells all; a flat JSON alone tells its figures (see :mod:`flat_reader`). Whatever is wrong with a file is a
UsageError of one line. What several results come to together is for :mod:`merge_results`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..models.presets import ModelFacts, find_preset
from ..records import json_files, reader
from ..records.json_files import InvalidJsonError, InvalidValueError
from ..records.reader import RunInfo
from ..records.run_folder import RECORDS_FILE, RUN_FILE
from ..records.schema import TrialRecord
from ..system.environment import Environment
from . import flat_reader, flops
from .flat_rows import COLUMNS
from .loss_parity import with_loss_caveats
from .summary import TrialSummary, summarise

_FLAT_NAME = re.compile(r"(zero|offload)_comparison_(\w+)")
_MOST_NOTES = 20
_MOST_TFLOPS = 1e9
_ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One result as its files tell it."""

    source: Path
    """What the user named."""
    records: tuple[TrialRecord, ...] | None
    """The last record of each trial, in the order of the plan; None where there are flat rows only."""
    rows: Sequence[dict[str, Any]]
    """The flat rows, one per summary."""
    summaries: tuple[TrialSummary, ...]
    environment: Environment | None
    """None where the files do not tell it."""
    family: str | None
    """``zero`` or ``offload``; None where the files do not tell."""
    arguments: tuple[str, ...]
    """As they were typed, without the script; empty where the files do not tell."""
    notes: tuple[str, ...]
    """Of the run itself, then what reading it met."""


class _Rows(Sequence[dict[str, Any]]):
    """Flat rows of summaries, each made when asked for: most uses need none."""

    def __init__(self, summaries: Sequence[TrialSummary]) -> None:
        self._summaries = summaries

    def __len__(self) -> int:
        return len(self._summaries)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return {name: get(self._summaries[index]) for name, get in COLUMNS}


def load(path: Path) -> Result:
    """A run folder, its run.json or records.jsonl, or a flat JSON. Raises UsageError."""
    try:
        with reader.gc_paused():
            return _load(Path(path))
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply", remedy="give a result as ds_bench wrote it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy="give a file that you may read") from None


def summarise_all(entries: Sequence[TrialRecord], peak_tflops: float | None = None) -> tuple[TrialSummary, ...]:
    """The summaries of records that stand in one table. ``peak_tflops``: of one device, where the user gave it."""
    models: dict[tuple[str, str], ModelFacts | None] = {}
    peaks: dict[tuple[str, str], float | None] = {}
    made = []
    for entry in entries:
        work = entry.trial.workload
        model = work.model, work.model_source
        if model not in models:
            models[model] = find_preset(work.model) if work.model_source == "preset" else None
        peak = peak_tflops * 1e12 if peak_tflops else None
        if peak is None and entry.ranks and entry.trial.placement.accelerator == "cuda":
            device = entry.ranks[0].device_name, work.precision
            peak = peaks[device] = peaks[device] if device in peaks else flops.peak_flops(*device)
        made.append(summarise(entry, models[model], peak))
    return tuple(with_loss_caveats(made))


def _load(path: Path) -> Result:
    if _is_folder(path):
        return _run(path, path) if _holds_run(path) else _no_run(path)
    if path.name in (RUN_FILE, RECORDS_FILE):
        with json_files.opened(path):  # it is there, and a file
            return _run(path.parent, path)
    if path.suffix == ".jsonl":
        return _from_records(path, RunInfo(), path, [])
    data = json_files.read_bytes(path)
    if path.suffix.lower() == ".csv" or data[:20].startswith((b"stage,strategy,", b"\xef\xbb\xbfstage,strategy,")):
        beside = path.with_suffix(".json")
        found = f"give {beside}" if beside.is_file() else "give the .json beside it"
        raise UsageError(f"{path} is the CSV of a result", remedy=found)
    return _flat(path, data)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # reading it will say why
        return False


def _holds_run(folder: Path) -> bool:
    return (folder / RUN_FILE).is_file() or (folder / RECORDS_FILE).is_file()


def _no_run(folder: Path) -> Result:
    try:
        inside = sorted(entry for entry in folder.iterdir() if _FLAT_NAME.match(entry.name) or entry.is_dir())
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}", remedy="give a folder you may read") from None
    results = [entry for entry in inside if entry.suffix == ".json" or (entry.is_dir() and _holds_run(entry))]
    remedy = (
        f"give one result, such as {results[-1]}" if results else "give <output-dir>/runs/<run> or a result's .json"
    )
    raise UsageError(f"{folder} holds no {RUN_FILE} and no {RECORDS_FILE}", remedy=remedy)


# ------------------------------------------------------------------ a run folder


def _run(folder: Path, source: Path) -> Result:
    notes: list[str] = []
    facts = reader.read_run(folder / RUN_FILE, notes)
    file = folder / RECORDS_FILE
    if not file.exists():
        raise UsageError(f"{folder} has no {RECORDS_FILE}: no trial had finished", remedy="give another result")
    result = _from_records(source, facts, file, notes)
    summaries = _with_flops_of_flat_json(result.summaries, folder)
    return replace(result, summaries=summaries, rows=_Rows(summaries))


def _from_records(source: Path, facts: RunInfo, file: Path, notes: list[str]) -> Result:
    entries = reader.read_records(file, facts.trials, notes)
    run_id = file.resolve().parent.name if facts.trials else None
    made = _summaries(source, entries, _peak_tflops(facts.arguments))
    summaries = tuple(replace(entry, environment=facts.environment, run_id=run_id) for entry in made)
    return Result(
        source=source,
        records=entries,
        rows=_Rows(summaries),
        summaries=summaries,
        environment=facts.environment,
        family=facts.family,
        arguments=facts.arguments,
        notes=(*facts.notes, *_shortened(notes)),
    )


def _summaries(source: Path, entries: Sequence[TrialRecord], peak_tflops: float | None) -> tuple[TrialSummary, ...]:
    try:
        made = summarise_all(entries, peak_tflops)
        if any(entry.tokens_per_second == math.inf for entry in made):
            raise OverflowError("a throughput is beyond all measure")
        return made
    except _ODD as error:
        culprit = next(_invalid_records(entries), None)
        name = f"{source}: {culprit.trial.trial_id}" if culprit else str(source)
        problem = f"{name} holds figures or a configuration of no sense: {type(error).__name__}: {error}"
        raise UsageError(problem, remedy="give a result as ds_bench wrote it") from error


def _invalid_records(entries: Sequence[TrialRecord]) -> Iterator[TrialRecord]:
    for entry in entries:
        try:
            summarise_all([entry])
        except _ODD:
            yield entry


def _peak_tflops(arguments: Sequence[str]) -> float | None:
    """What ``--peak-tflops`` gave, as the run itself used it."""
    for given, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, _, joined = given.partition("=")
        if name == "--peak-tflops":
            with contextlib.suppress(ValueError):
                value = float(joined or following)
                return value if 0 < value < _MOST_TFLOPS else None
    return None


def _with_flops_of_flat_json(summaries: tuple[TrialSummary, ...], folder: Path) -> tuple[TrialSummary, ...]:
    """FLOPs of a model that is no preset: only the run itself knew its shape, and wrote them to the flat JSON."""
    if all(entry.model_flops_per_token or not entry.record.ranks for entry in summaries):
        return summaries
    family, _, stamp = folder.resolve().name.partition("_")
    path = folder.resolve().parent.parent / f"{family}_comparison_{stamp}.json"
    try:
        known = {(row.get("trial_id"), row.get("repeat")): row for row in _rows(path, json_files.read_bytes(path), [])}
    except UsageError:
        return summaries
    pairs = ((entry, known.get((entry.record.trial.trial_id, entry.record.trial.repeat))) for entry in summaries)
    return tuple(
        replace(entry, **flat_reader.efficiency(row)) if row and not entry.model_flops_per_token else entry
        for entry, row in pairs
    )


def _shortened(notes: list[str]) -> list[str]:
    notes = list(dict.fromkeys(notes))
    return notes if len(notes) <= _MOST_NOTES else [*notes[:_MOST_NOTES], f"and {len(notes) - _MOST_NOTES} more notes"]


# ------------------------------------------------------------------ a flat JSON


def _flat(path: Path, data: bytes) -> Result:
    notes: list[str] = []
    rows = _rows(path, data, notes)
    summaries = tuple(_flat_summary(path, number, row) for number, row in enumerate(rows, 1))
    named = _FLAT_NAME.match(path.stem)
    folder = path.parent / "runs" / f"{named[1]}_{named[2]}" if named else None
    if folder is not None and _holds_run(folder):
        try:
            run = _run(folder, path)
        except UsageError as error:
            notes.append(f"its run folder cannot be used: {error}")
        else:
            if _figures(run.summaries) == _figures(summaries):
                return run
            notes.append(f"{folder} holds other rows than {path.name}: the file is used")
    notes.append("flat rows only: no series of steps and no DeepSpeed configurations are known")
    told = [entry.environment for entry in summaries]
    return Result(
        source=path,
        records=None,
        rows=tuple(rows),
        summaries=summaries,
        environment=told[0] if all(each == told[0] for each in told) else None,
        family=named[1] if named else None,
        arguments=(),
        notes=tuple(_shortened(notes)),
    )


def _rows(path: Path, data: bytes, notes: list[str]) -> list[dict[str, Any]]:
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
    extra = dict.fromkeys(name for row in value if isinstance(row, dict) for name in flat_reader.unknown_columns(row))
    notes += [f"{path.name}: unknown columns left out: {', '.join(extra)}"] if extra else []
    try:
        return flat_reader.check_rows(value)
    except InvalidValueError as error:
        index, *cell = error.place
        place = ": ".join(filter(None, [f"row {int(index) + 1}", json_files.place_text(cell)]))
        raise UsageError(f"{path}: {place} {error.reason}", remedy="give a result as ds_bench wrote it") from None


def _flat_summary(path: Path, number: int, row: dict[str, Any]) -> TrialSummary:
    try:
        return flat_reader.summary(row)
    except ValueError as error:
        raise UsageError(f"{path}: row {number} is not usable: {error}", remedy="correct or remove it") from None


def _figures(summaries: Sequence[TrialSummary]) -> Counter[tuple[Any, ...]]:
    """What must agree for two tellings to be of one run; nine digits, for what rounding may add."""
    return Counter(trial_identity(entry) for entry in summaries)


def trial_identity(entry: TrialSummary) -> tuple[Any, ...]:
    """Equal for two tellings of one trial (its record, its flat row), and for no two trials that were launched."""
    trial, rate = entry.record.trial, entry.tokens_per_second
    return (
        trial.workload.model, trial.strategy.name, trial.strategy.stage, trial.repeat, trial.placement.num_gpus,
        entry.record.outcome.status, entry.record.started_at, entry.record.wall_seconds,
        None if rate is None else f"{rate:.9g}",
    )  # fmt: skip
