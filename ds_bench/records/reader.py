"""Reads and checks run.json and records.jsonl of a run folder, which ``run_folder`` writes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from ..config.identity import work_key
from ..config.shard import Shard
from ..config.spec import Trial
from ..errors import UsageError
from ..system.environment import Environment
from . import json_files
from .json_files import InvalidJsonError, InvalidValueError
from .schema import SCHEMA_VERSION, TrialRecord

_REMEDY = "use the result as ds_bench wrote it"
_TRIALS = b' "trials": ['
"""Beginning of the line before the trials in run.json, as ``json_files.json_text`` writes it."""
_HEAD = re.compile(rb'\{"trial": \{"trial_id": "([^"\\]+)", "repeat": (\d+), ')
_ROUND = re.compile(rb'"round_position": (?:null|(\d+)), ')
_NUMBER = rb"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_TAIL = re.compile(rb'"started_at": (?:null|"([^"\\]*)"), "wall_seconds": (?:null|' + _NUMBER + rb"), ")
_WINDOW_NAME = b'"window_seconds": '
_WINDOW = re.compile(_WINDOW_NAME + _NUMBER)

RecordKey = tuple[str | None, int, str | None, float | None]
"""``trial_id``, ``repeat``, ``started_at`` and ``wall_seconds``: the identity of a record within its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The contents of run.json without the trials; the defaults are for a run without that file."""

    family: str | None = None
    arguments: tuple[str, ...] = ()
    folder: str | None = None
    """Folder where the run was started; paths among its arguments are relative to it."""
    environment: Environment | None = None
    notes: tuple[str, ...] = ()
    trial_count: int | None = None
    """Number of planned trials; ``read_trials`` reads them. None without a file."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """``values``: the sections of the recipe that was run; empty for a script's run."""
    shard: Shard | None = None
    """None for a run of a whole plan."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trials:
    """The trials of run.json."""

    trials: tuple[Trial, ...] = ()
    schema_version: int = SCHEMA_VERSION


_Document = TypeVar("_Document", RunInfo, _Trials, TrialRecord)


@dataclass(frozen=True, kw_only=True)
class StoredRecord:
    """A trial whose record is read when it is needed."""

    trial: Trial
    path: Path | None = None
    """The file of its record; None if there is only a flat row."""
    start: int = 0
    size: int = 0
    """Bytes of its line, from ``start``."""
    window_seconds: float = 0.0
    """Measured window of the slowest rank; 0 without one."""

    @cached_property
    def record(self) -> TrialRecord | None:
        """The record; None if there is only a flat row. Raises UsageError if it is damaged."""
        if self.path is None:
            return None
        with json_files.opened(self.path) as file:
            file.seek(self.start)
            return parse_record(file.read(self.size), f"{self.path}: byte {self.start}")


def read_run(path: Path, notes: list[str]) -> RunInfo:
    """Read run.json. Raises UsageError if it is damaged or of a different version; ``notes`` reports a missing file."""
    if not path.exists():
        notes.append(f"no {path.name}: environment, arguments and the order of the plan are not known")
        return RunInfo()
    # The trials come last and make up nearly the whole file; they need not be read.
    with json_files.opened(path) as file, contextlib.suppress(UsageError):
        facts = takewhile(lambda line: not line.startswith(_TRIALS), file)
        info = _read(RunInfo, b"".join(facts).rstrip(b",\n") + b"}", str(path))
        if info.trial_count is not None:
            return info
    data = json_files.read_bytes(path)
    return replace(_read(RunInfo, data, str(path)), trial_count=len(_read(_Trials, data, str(path)).trials))


def read_trials(path: Path) -> tuple[Trial, ...]:
    """Read the planned trials of run.json, in order; none without the file. Raises UsageError if it is damaged."""
    return _read(_Trials, json_files.read_bytes(path), str(path)).trials if path.exists() else ()


def index_records(path: Path) -> dict[RecordKey, StoredRecord]:
    """Return the last record of each trial, without parsing the repeats of a trial.

    Empty if a line is not as ``run_folder`` writes it: ``read_records`` reads such a file or says what is wrong.
    """
    trials: dict[int, Trial] = {}
    latest: dict[tuple[int, str, int], tuple[RecordKey, StoredRecord]] = {}
    start = 0
    with json_files.opened(path) as file:
        for line in file:
            outcome = line.find(b'}, "outcome": {')
            head = _HEAD.match(line)
            position = _ROUND.match(line, line.rfind(b'"round_position": ', 0, outcome))
            tail = _TAIL.match(line, line.rfind(b'"started_at": ', outcome))
            if outcome < 0 or head is None or position is None or tail is None or not line.endswith(b"\n"):
                return {}
            # Repeats have the same text apart from their numbers, so thousands of records have few different trials.
            text = hash((line[head.end() : position.start()], line[position.end() : outcome]))
            if text not in trials:
                try:
                    trials[text] = parse_record(line, str(path)).trial
                except (InvalidJsonError, UsageError):
                    return {}
            trial_id, repeat = head[1].decode("utf-8", "replace"), int(head[2])
            window_seconds, end = 0.0, len(line)
            while (end := line.rfind(_WINDOW_NAME, outcome, end)) > 0:  # from the end, which is faster
                if window := _WINDOW.match(line, end):
                    window_seconds = max(window_seconds, float(window[1]))
            record = StoredRecord(
                trial=replace(
                    trials[text],
                    trial_id=trial_id,
                    repeat=repeat,
                    round_position=None if position[1] is None else int(position[1]),
                ),
                path=path,
                start=start,
                size=len(line),
                window_seconds=window_seconds,
            )
            started_at = None if tail[1] is None else tail[1].decode("utf-8", "replace")
            wall_seconds = None if tail[2] is None else float(tail[2])
            # A trial that was run again has several records.
            latest[text, trial_id, repeat] = (trial_id, repeat, started_at, wall_seconds), record
            start += len(line)
    return dict(latest.values())


def read_records(path: Path, planned: Sequence[Trial], notes: list[str]) -> tuple[TrialRecord, ...]:
    """Read the last record of each trial, in the order of the plan. Raises UsageError.

    A line that is not JSON, which a crash may leave, is skipped with a note; JSON that is not a record is refused.
    """
    latest: dict[str, TrialRecord] = {}
    with json_files.opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = parse_record(line, f"{path}: line {number}")
            except InvalidJsonError as error:
                notes.append(f"{path.name} line {number} {error}: left out")
                continue
            # A trial that was run again has several records. The last one counts.
            latest[work_key(record.trial)] = record
    if not latest:
        raise UsageError(f"{path} has no rows: no line is a record", remedy="no trial had finished; run it again")
    keys = [key for key in dict.fromkeys(map(work_key, planned)) if key in latest]
    # Unplanned trials come last: all of them, if run.json is missing.
    return tuple(latest[key] for key in dict.fromkeys([*keys, *latest]))


def parse_record(line: bytes, where: str) -> TrialRecord:
    """Read one line of records.jsonl. Raises InvalidJsonError, and UsageError if it is JSON but not a record.

    ``where``: names the line in errors.
    """
    return _read(TrialRecord, line, where)


def _read(kind: type[_Document], data: bytes, where: str) -> _Document:
    try:
        read = json_files.parse(kind, data, unknown_keys="ignore")
    except InvalidJsonError as error:
        if kind is TrialRecord:
            raise
        raise UsageError(f"{where} {error}", remedy=_REMEDY) from None
    except InvalidValueError as error:
        # A document of a different version may have different fields: the version is then the reason.
        _require_version(data, where)
        raise UsageError(f"{where}: {error}", remedy=_REMEDY) from None
    if read.schema_version != SCHEMA_VERSION or b'"schema_version"' not in data:
        _require_version(data, where)
    return read


def _require_version(data: bytes, where: str) -> None:
    document = json_files.parse_json(data)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{where}: schema_version is {version}, and this version of ds_bench reads {SCHEMA_VERSION}",
            remedy="read it with the version that wrote it, or measure again",
        )
