"""The files of a run folder read back and checked: run.json, records.jsonl. ``run_folder`` writes them.

Older forms are brought up to the present one by :data:`MIGRATIONS`; a newer one is refused.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config.spec import Trial
from ..errors import UsageError
from ..system.environment import Environment
from . import json_files
from .json_files import InvalidJsonError, InvalidValueError
from .schema import SCHEMA_VERSION, RankMeasurement, TrialRecord

Kind = Literal["record", "run"]
Migration = Callable[[Kind, dict[str, Any]], dict[str, Any]]


def _to_version_2(kind: Kind, data: dict[str, Any]) -> dict[str, Any]:
    """A trial has a configuration, whose stage and offload are read from its DeepSpeed configuration, not a strategy.

    What the row said before it was completed was not kept: the completed configuration takes its place.
    """
    trials = data.get("trials") if kind == "run" else [data.get("trial")]
    for trial in trials if isinstance(trials, list) else ():
        strategy = trial.pop("strategy", None) if isinstance(trial, dict) else None
        if isinstance(strategy, dict):
            devices = {name: {"device": strategy.get(name, "none")} for name in ("offload_optimizer", "offload_param")}
            block = {"stage": strategy.get("stage", 0), **devices}
            ran = trial.get("ds_config")
            trial["configuration"] = {
                "name": strategy.get("name", ""),
                "label": strategy.get("label", ""),
                "deepspeed_config": {"zero_optimization": block, **(ran if isinstance(ran, dict) else {})},
            }
    return data


MIGRATIONS: dict[int, Migration] = {1: _to_version_2}
"""Version → what makes the next one of a document of that version. Run in order."""

_REPEATED = ("configuration", "workload", "placement", "ds_config")
"""Parts of a trial that many trials have in common."""
_REMEDY = "give a result as ds_bench wrote it"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What run.json tells; nothing where it is missing."""

    family: str | None = None
    arguments: tuple[str, ...] = ()
    environment: Environment | None = None
    notes: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()
    """As planned, in order."""
    schema_version: int = SCHEMA_VERSION


class _SharedParts:
    """One object for equal parts of records: thousands of records repeat a few configurations word for word."""

    def __init__(self) -> None:
        self._by_text: dict[bytes, Any] = {}

    def share(self, holder: Trial | RankMeasurement, *names: str) -> None:
        """Puts into the fields with these names the first value that had the same JSON text.

        Equal values are not enough: 1 is not true. ``holder`` was just read and is in nobody else's hands, so that it
        may be changed although it is frozen; a copy for each record takes as long as to read it.
        """
        from pydantic_core import to_json

        for name in names:
            part = getattr(holder, name)
            object.__setattr__(holder, name, self._by_text.setdefault(to_json(part), part))


@contextmanager
def gc_paused() -> Iterator[None]:
    """Everything made in here is kept: looking for garbage again and again would take a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()  # together: all of it is old now, without being looked through
            gc.unfreeze()
            gc.enable()


def read_run(path: Path, notes: list[str]) -> RunInfo:
    """run.json, or nothing with a note where there is none. Raises UsageError where it is damaged or newer.

    A part of another form is left out with a note, because rows can be shown without it.
    """
    if not path.exists():
        notes.append(f"no {path.name}: environment, arguments and the order of the plan are not known")
        return RunInfo()
    data = json_files.read_bytes(path)
    info = json_files.validate(RunInfo, data, unknown_keys="ignore")  # other commands keep facts of theirs there
    if info is not None and info.schema_version == SCHEMA_VERSION and b'"schema_version"' in data:
        return info
    try:
        value = json_files.parse_json(data)
    except InvalidJsonError as error:
        raise UsageError(f"{path} {error}", remedy=f"{_REMEDY}, or copy it again") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is no JSON object", remedy=_REMEDY)
    value = _migrate(value, "run", str(path))
    while True:
        try:
            return json_files.build(RunInfo, value, unknown_keys={})
        except InvalidValueError as error:
            notes.append(f"{path.name}: {error}: left out")
            del value[str(error.place[0])]


def read_records(path: Path, planned: Sequence[Trial], notes: list[str]) -> tuple[TrialRecord, ...]:
    """The last record of each trial, in the order of the plan. Raises UsageError.

    A line that is no JSON, as a crash leaves it, is left out with a note; one of another shape is refused.
    """
    parts, unknown_keys = _SharedParts(), dict[str, None]()
    latest: dict[Any, TrialRecord] = {}
    lines = 0
    with json_files.opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            lines += 1
            try:
                record = parse_record(line.strip(), f"{path}: line {number}", unknown_keys)
            except InvalidJsonError as error:
                notes.append(f"{path.name} line {number} {error}: left out")
                continue
            parts.share(record.trial, *_REPEATED, "prediction")
            for rank in record.ranks:
                parts.share(rank, "resolved_config")
            latest[_identity(record.trial)] = record
    if not latest:
        problem = f"no line of {path} is a record: {notes[-1]}" if lines else f"{path} has no rows: it is empty"
        raise UsageError(problem, remedy=_REMEDY if lines else "no trial had finished; run it again")
    if unknown_keys:
        notes.append(f"{path.name}: unknown keys left out: {', '.join(unknown_keys)}")
    for trial in planned:
        parts.share(trial, *_REPEATED)
    identities = dict.fromkeys(map(_identity, planned))
    ordered = [latest.pop(identity) for identity in identities if identity in latest]
    if len(ordered) < len(identities):
        missing = len(identities) - len(ordered)
        notes.append(f"{missing} of the {len(planned)} planned trials have no record: the run did not end")
    return (*ordered, *latest.values())


def parse_record(line: bytes, where: str, unknown_keys: dict[str, None]) -> TrialRecord:
    """One line of records.jsonl. Raises InvalidJsonError, and UsageError where it is JSON and no record.

    ``where``: names the line in errors. ``unknown_keys`` receives the places of keys that no field has.
    """
    record = json_files.validate(TrialRecord, line)
    if record is not None and record.schema_version == SCHEMA_VERSION and b'"schema_version"' in line:
        return record
    value = json_files.parse_json(line)
    if not isinstance(value, dict):
        raise UsageError(f"{where} is no JSON object", remedy=_REMEDY)
    value = _migrate(value, "record", where)
    try:
        return json_files.build(TrialRecord, value, unknown_keys)
    except InvalidValueError as error:
        trial = value.get("trial")
        name = trial.get("trial_id") if isinstance(trial, dict) else None
        named = f"{where} ({name})" if isinstance(name, str) else where
        raise UsageError(f"{named}: {error}", remedy="correct or remove that line") from None


def _identity(trial: Trial) -> tuple[int | str, ...]:
    """Equal for trials whose ``key`` is equal, of trials that share their parts; a fraction of its cost."""
    shared = map(id, (trial.workload, trial.placement, trial.ds_config))
    return trial.repeat, trial.configuration.name, trial.configuration.engine, *shared


def _migrate(data: dict[str, Any], kind: Kind, where: str) -> dict[str, Any]:
    """The same in the present form. Raises UsageError for a newer one, or where no migration leads here."""
    version = data.get("schema_version")
    if type(version) is not int or version < 1:
        raise UsageError(f"{where}: schema_version is missing or no version", remedy=_REMEDY)
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{where}: written by a newer version (schema {version}, this one reads {SCHEMA_VERSION})",
            remedy="upgrade ds_bench",
        )
    while version < SCHEMA_VERSION:
        if version not in MIGRATIONS:
            raise UsageError(f"{where}: schema {version} is too old to be read", remedy="measure it again")
        data = MIGRATIONS[version](kind, deepcopy(data))
        version += 1
        data["schema_version"] = version
    return data
