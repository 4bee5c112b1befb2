"""Reads run.json and records.jsonl of a run folder, which ``run_folder`` writes, and checks them."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ..config.identity import work_key
from ..config.options import Shard
from ..config.spec import Trial
from ..errors import UsageError
from ..system.environment import Environment
from . import json_files
from .json_files import InvalidJsonError, InvalidValueError
from .schema import SCHEMA_VERSION, TrialRecord

_REMEDY = "give a result as ds_bench wrote it"
_TRIALS, _TRIAL_ID = b',\n "trials": [', b'\n   "trial_id": '
"""Texts in run.json as ``json_files.json_text`` writes it."""
_HEAD = re.compile(rb'\{"trial": \{("trial_id": "[^"\\]+", "repeat": \d+, )')
_TAIL = re.compile(rb'"started_at": (?:null|"[^"\\]*"), "wall_seconds": [^,]+, ')
_ROUND = re.compile(rb'"round_position": (?:null|\d+), ')
_WINDOW = re.compile(rb'"window_seconds": ([0-9.eE+-]+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The contents of run.json but for the trials; the defaults stand for a run without one."""

    family: str | None = None
    arguments: tuple[str, ...] = ()
    folder: str | None = None
    """In which it was started: paths among its arguments are relative to it."""
    environment: Environment | None = None
    notes: tuple[str, ...] = ()
    trial_count: int = 0
    """Number of planned trials; ``read_trials`` reads them."""
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
    """Read run.json. Raises UsageError if it is damaged or of another version; ``notes`` reports a missing file."""
    if not path.exists():
        notes.append(f"no {path.name}: environment, arguments and the order of the plan are not known")
        return RunInfo()
    data = json_files.read_bytes(path)
    # The trials come last and are nearly the whole file, which a result with thousands of them need not parse.
    facts, found, trials = data.partition(_TRIALS)
    if found:
        with contextlib.suppress(UsageError):
            count = trials.count(_TRIAL_ID)
            return replace(_read(RunInfo, facts + b"}", str(path)), trial_count=count)
    return replace(_read(RunInfo, data, str(path)), trial_count=len(_read(_Trials, data, str(path)).trials))


def read_trials(path: Path) -> tuple[Trial, ...]:
    """Read the planned trials of run.json, in order; none without the file. Raises UsageError if it is damaged."""
    return _read(_Trials, json_files.read_bytes(path), str(path)).trials if path.exists() else ()


def index_records(path: Path) -> dict[bytes, StoredRecord]:
    """Return the last record of each trial by ``record_key``, without reading repeats of the same trial.

    Empty if a line is not as ``run_folder`` writes it: ``read_records`` reads such a file, or says what is wrong.
    """
    with json_files.opened(path) as file:
        if not file.seek(0, os.SEEK_END):
            return {}
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    trials: dict[int, Trial] = {}
    latest: dict[tuple[int, bytes], tuple[bytes, StoredRecord]] = {}
    start = 0
    while start < len(data):
        end, outcome = data.find(b"\n", start), data.find(b'}, "outcome": {', start)
        if not start < outcome < end:
            return {}
        head = _HEAD.match(data, start)
        position = _ROUND.match(data, data.rfind(b'"round_position": ', start, outcome))
        tail = _TAIL.match(data, data.rfind(b'"started_at": ', outcome, end))
        if head is None or position is None or tail is None:
            return {}
        # Repeats have the same text, apart from their numbers: thousands of records have few different trials.
        text = hash((data[head.end() : position.start()], data[position.end() : outcome]))
        if text not in trials:
            try:
                trials[text] = parse_record(data[start:end], str(path)).trial
            except (InvalidJsonError, UsageError):
                return {}
        # A trial that was run again has several records.
        windows = map(float, _WINDOW.findall(data, outcome, end))
        record = StoredRecord(
            trial=trials[text], path=path, start=start, size=end - start, window_seconds=max(windows, default=0.0)
        )
        latest[text, head[1]] = head[1] + tail[0], record
        start = end + 1
    return dict(latest.values())


def record_key(trial_id: str | None, repeat: int, started_at: str | None, wall_seconds: float | None) -> bytes:
    """Return the identity of a record within its file; its flat row has the same values."""
    values = {"trial_id": trial_id, "repeat": repeat, "started_at": started_at, "wall_seconds": wall_seconds}
    return json_files.json_line(values)[1:-1] + b", "


def read_records(path: Path, planned: Sequence[Trial], notes: list[str]) -> tuple[TrialRecord, ...]:
    """Read the last record of each trial, in the order of the plan. Raises UsageError.

    A line that is not JSON, as a crash may leave it, is left out with a note; other JSON than a record is refused.
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
    # Last come trials that were not planned: all of them, where run.json is missing.
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
        # A document of another version may have other fields: the version is the reason.
        _require_version(json_files.parse_json(data), where)
        raise UsageError(f"{where}: {error}", remedy=_REMEDY) from None
    if read.schema_version != SCHEMA_VERSION or b'"schema_version"' not in data:
        _require_version(json_files.parse_json(data), where)
    return read


def _require_version(document: Any, where: str) -> None:
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{where}: schema_version is {version}, and this version of ds_bench reads {SCHEMA_VERSION}",
            remedy="read it with the version that wrote it, or measure again",
        )
