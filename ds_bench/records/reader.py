"""Reads run.json and records.jsonl of a run folder, which ``run_folder`` writes, and checks them.

Records of an older schema are migrated by :data:`MIGRATIONS`; those of a newer one are refused.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ..config.shard import ShardOfPlan
from ..config.spec import Placement, Trial
from ..errors import UsageError
from ..system.environment import Environment
from . import json_files
from .json_files import InvalidJsonError, InvalidValueError
from .schema import INTERRUPTED, SCHEMA_VERSION, TrialRecord

Kind = Literal["record", "run"]
Migration = Callable[[Kind, dict[str, Any]], dict[str, Any]]


def _to_version_2(kind: Kind, data: dict[str, Any]) -> dict[str, Any]:
    """Replaces a trial's ``strategy`` by a ``configuration``, whose DeepSpeed configuration has stage and offload.

    Version 1 did not keep the DeepSpeed configuration as it was before completion: the completed one takes its place.
    """
    trials = data.get("trials") if kind == "run" else [data.get("trial")]
    for trial in trials if isinstance(trials, list) else ():
        strategy = trial.pop("strategy", None) if isinstance(trial, dict) else None
        if isinstance(strategy, dict):
            devices = {name: {"device": strategy.get(name, "none")} for name in ("offload_optimizer", "offload_param")}
            block = {"stage": strategy.get("stage", 0), **devices}
            completed = trial.get("ds_config")
            trial["configuration"] = {
                "name": strategy.get("name", ""),
                "label": strategy.get("label", ""),
                "deepspeed_config": {
                    # Stands only where the completed configuration has no such block.
                    "zero_optimization": block,
                    **(completed if isinstance(completed, dict) else {}),
                },
            }
    return data


def _keep(_kind: Kind, data: dict[str, Any]) -> dict[str, Any]:
    """Changes nothing: what the next version adds has defaults that stand for this one."""
    return data


MIGRATIONS: dict[int, Migration] = {1: _to_version_2, 2: _keep, 3: _keep}
"""Version → the function that migrates a document of that version to the next; applied in order."""

_REMEDY = "give a result as ds_bench wrote it"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The contents of run.json; the defaults stand for a run without one."""

    family: str | None = None
    arguments: tuple[str, ...] = ()
    folder: str | None = None
    """In which it was started: paths among its arguments are relative to it."""
    environment: Environment | None = None
    notes: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()
    """As planned, in order."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """``values``: the sections of the recipe that was run; empty for a script's run."""
    shard: ShardOfPlan | None = None
    """None for a run of a whole plan."""
    schema_version: int = SCHEMA_VERSION


class _RepeatedParts:
    """Parts that many records have word for word in common: each is parsed once and is one object in all of them.

    Thousands of records repeat a few configurations and predictions, which are half of their text.
    """

    _MARKS = (b'_config": {', b'"prediction": {')
    """The text before each such part, and its first character, in a line as ``json_files.append_line`` writes it."""
    _MAX_TEXTS = 64
    """Texts that are remembered at most: each is compared with every part of every line."""

    def __init__(self) -> None:
        self._by_text: dict[bytes, Any] = {}
        self._by_json: dict[bytes, Any] = {}

    def cut(self, line: bytes) -> tuple[bytes, list[Any]]:
        """Replaces each known part of a line by ``{"": index}``; returns the line and those parts by index."""
        parts: list[Any] = []
        for mark in self._MARKS:
            pieces, end, start = [], 0, line.find(mark)
            while start >= 0:
                # To the brace, which is the last character of the mark and the first of the part.
                start += len(mark) - 1
                for text, part in self._by_text.items():
                    # Compares in place: a slice would copy the part for each text that is known.
                    if line.startswith(text, start):
                        pieces += [line[end:start], b'{"":%d}' % len(parts)]
                        parts.append(part)
                        start = end = start + len(text)
                        break
                start = line.find(mark, start)
            line = b"".join([*pieces, line[end:]])
        return line, parts

    def restore(self, record: TrialRecord, parts: Sequence[Any]) -> bool:
        """Puts the parts that were cut back, and learns the others; False if one was not cut from a field's value.

        The record was just read and nothing else refers to it, so that it may be changed although it is frozen: a copy
        takes as long as reading it.
        """
        trial, restored = record.trial, 0
        holders = [(trial.configuration, "deepspeed_config"), (trial.workload, "model_config"), (trial, "ds_config")]
        holders += [(trial, "prediction"), *((rank, "resolved_config") for rank in record.ranks)]
        for holder, name in holders:
            part = getattr(holder, name)
            if part and len(part) == 1 and "" in part:
                # A line may hold an empty key of its own; it is then read whole.
                if part[""] not in range(len(parts)):
                    return False
                object.__setattr__(holder, name, parts[part[""]])
                restored += 1
            elif part:
                # The text that append_line wrote, which cut() looks for in the lines that follow.
                text = json.dumps(part, ensure_ascii=False).encode("utf-8", "replace")
                if text in self._by_text or len(self._by_text) < self._MAX_TEXTS:
                    object.__setattr__(holder, name, self._by_text.setdefault(text, part))
        try:
            trial.configuration.__post_init__()  # its DeepSpeed configuration was not there to be checked before
        except ValueError:
            return False
        # Fewer, where a known text also stands within another value: nothing puts that back, so the line is read whole.
        return restored == len(parts)

    def share(self, trial: Trial) -> None:
        """Replaces parts of a trial by earlier ones with the same JSON text, so that equal parts are one object.

        Equal values are not enough: 1 equals true.
        """
        from pydantic_core import to_json

        for name in ("configuration", "workload", "placement", "ds_config"):
            part = getattr(trial, name)
            object.__setattr__(trial, name, self._by_json.setdefault(to_json(part), part))


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the garbage collector: everything that is read here is kept, and the search takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()  # freeze and unfreeze move all objects to the oldest generation without a search
            gc.unfreeze()
            gc.enable()


def read_run(path: Path, notes: list[str]) -> RunInfo:
    """Reads run.json. Raises UsageError if it is damaged or newer.

    A missing file, and each key whose value is invalid, is reported in ``notes``: rows can be shown without them.
    """
    if not path.exists():
        notes.append(f"no {path.name}: environment, arguments and the order of the plan are not known")
        return RunInfo()
    data = json_files.read_bytes(path)
    info = json_files.validate(RunInfo, data, unknown_keys="ignore")  # a run stores more there than is read here
    # The default of the field is the present version: a file without the key goes on to _migrate, which refuses it.
    if info is not None and info.schema_version == SCHEMA_VERSION and b'"schema_version"' in data:
        return info
    try:
        value = json_files.parse_json(data)
    except InvalidJsonError as error:
        raise UsageError(f"{path} {error}", remedy=f"{_REMEDY}, or copy it again") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is no JSON object", remedy=_REMEDY)
    value = _migrate(value, "run", str(path))
    # Every pass takes one key away and every field has a default, so that this ends.
    while True:
        try:
            return json_files.build(RunInfo, value, unknown_keys={})
        except InvalidValueError as error:
            notes.append(f"{path.name}: {error}: left out")
            del value[str(error.place[0])]


def read_records(path: Path, planned: Sequence[Trial], notes: list[str]) -> tuple[TrialRecord, ...]:
    """Reads the last record of each trial, in the order of the plan. Raises UsageError.

    A line that is not JSON, as a crash may leave it, is left out with a note; other JSON than a record is refused.
    """
    parts, unknown_keys = _RepeatedParts(), dict[str, None]()
    latest: dict[Any, TrialRecord] = {}
    lines = 0
    with json_files.opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            lines += 1
            try:
                record = parse_record(line.strip(), f"{path}: line {number}", unknown_keys, parts)
            except InvalidJsonError as error:
                notes.append(f"{path.name} line {number} {error}: left out")
                continue
            parts.share(record.trial)
            # A trial that was run again has several records, of which the last one counts.
            latest[_identity(record.trial)] = record
    if not latest:
        problem = f"no line of {path} is a record: {notes[-1]}" if lines else f"{path} has no rows: it is empty"
        raise UsageError(problem, remedy=_REMEDY if lines else "no trial had finished; run it again")
    if unknown_keys:
        notes.append(f"{path.name}: unknown keys left out: {', '.join(unknown_keys)}")
    # _identity compares parts by id(): those of the plan must be the objects that the records have.
    for trial in planned:
        parts.share(trial)
    identities = dict.fromkeys(map(_identity, planned))
    ordered = [latest.pop(each) for each in identities if each in latest]
    if len(ordered) < len(identities):
        missing = len(identities) - len(ordered)
        notes.append(f"{missing} of the {len(planned)} planned trials have no record: the run did not end")
    # Last come trials that were not planned: all of them, where run.json is missing.
    return (*ordered, *latest.values())


def count_trials_left(planned: Sequence[Trial], records: Sequence[TrialRecord]) -> int:
    """Number of planned trials without a record, or with one that was interrupted.

    ``records``: of these trials, as :func:`read_records` read them: both have their equal parts in common since then.
    """
    ended = {_identity(record.trial) for record in records if record.outcome.status != INTERRUPTED}
    return len(set(map(_identity, planned)) - ended)


def parse_record(
    line: bytes, where: str, unknown_keys: dict[str, None], parts: _RepeatedParts | None = None
) -> TrialRecord:
    """Reads one line of records.jsonl. Raises InvalidJsonError, and UsageError if it is JSON but not a record.

    ``where``: names the line in errors. ``unknown_keys`` receives the places of keys that no field has. ``parts``:
    the parts of the lines before it.
    """
    text, cut_parts = parts.cut(line) if parts else (line, [])
    record = json_files.validate(TrialRecord, text)
    if (
        record is not None
        and record.schema_version == SCHEMA_VERSION
        # The default of the field is the present version: a line without the key must be refused below.
        and b'"schema_version"' in text
        and (parts is None or parts.restore(record, cut_parts))
    ):
        return record
    # The line as it stands, without placeholders: this way names what is wrong and where.
    value = json_files.parse_json(line)
    if not isinstance(value, dict):
        raise UsageError(f"{where} is no JSON object", remedy=_REMEDY)
    value = _migrate(value, "record", where)
    try:
        record = json_files.build(TrialRecord, value, unknown_keys)
    except InvalidValueError as error:
        trial = value.get("trial")
        name = trial.get("trial_id") if isinstance(trial, dict) else None
        named = f"{where} ({name})" if isinstance(name, str) else where
        raise UsageError(f"{named}: {error}", remedy="correct or remove that line") from None
    if parts:
        # Nothing was cut from it: its parts are only learnt for the lines that follow.
        parts.restore(record, [])
    return record


def _identity(trial: Trial) -> tuple[object, ...]:
    """Identifies a trial as ``Trial.key`` does, among trials that share equal parts; several times cheaper."""
    parts = id(trial.workload), _placement_text(trial.placement), id(trial.ds_config)
    inspection = trial.inspection
    # A resumed run may write its checkpoints elsewhere: the trial is the same.
    if inspection.checkpoint_path is not None:
        inspection = replace(inspection, checkpoint_path=None)
    return trial.repeat, trial.configuration.name, trial.configuration.engine, inspection, *parts


@lru_cache(maxsize=1024)
def _placement_text(placement: Placement) -> str:
    """What decides a measurement in a placement, as text; made once for each, as thousands of records have few."""
    return json.dumps(placement.measured_facts, sort_keys=True)


def _migrate(data: dict[str, Any], kind: Kind, where: str) -> dict[str, Any]:
    """Migrates a document to the present schema. Raises UsageError if its version is newer, too old or missing."""
    version = data.get("schema_version")
    # Not isinstance(), by which true would be version 1.
    if type(version) is not int or version < 1:
        raise UsageError(f"{where}: schema_version is missing or no version", remedy=_REMEDY)
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{where}: written by a newer version (schema {version}, this one reads {SCHEMA_VERSION})",
            remedy="upgrade ds_bench",
        )
    # One version at a time, so that a migration knows only its own and the next one.
    while version < SCHEMA_VERSION:
        if version not in MIGRATIONS:
            raise UsageError(f"{where}: schema {version} is too old to be read", remedy="measure it again")
        data = MIGRATIONS[version](kind, deepcopy(data))
        version += 1
        data["schema_version"] = version
    return data
