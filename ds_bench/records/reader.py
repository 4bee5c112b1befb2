"""The files of a run folder read back and checked: run.json, records.jsonl. ``store`` writes them.

Older forms are brought up to the present one by :data:`MIGRATIONS`; a newer one is refused.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import UsageError
from ..system.environment import Environment
from . import strict_json
from .schema import SCHEMA_VERSION, TrialRecord
from .shapes import Builder, ShapeError
from .shared_objects import Numbering
from .strict_json import NotJsonError, Reader

Kind = Literal["record", "run"]
Migration = Callable[[Kind, dict[str, Any]], dict[str, Any]]

MIGRATIONS: dict[int, Migration] = {}
"""Version → what makes the next one of a document of that version. Run in order; there is one version so far."""

_SHARED = ("strategy", "workload", "placement", "ds_config", "prediction", "outcome", "resolved_config")
"""What many records repeat word for word, in the order in which they hold it."""
_OF_TRIALS = _SHARED[:5]
"""Those of them that a planned trial has."""
_PARTS = _SHARED[:4]
"""What, with the number of the repeat, makes a trial the one it is: ``Trial.key``."""
_AS_WRITTEN = "give a result as ds_bench wrote it"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What run.json tells; nothing where it is missing."""

    family: str | None = None
    arguments: tuple[str, ...] = ()
    environment: Environment | None = None
    notes: tuple[str, ...] = ()
    trials: tuple[Mapping[str, Any], ...] = ()
    """As planned, in order; raw."""


@contextmanager
def collector_paused() -> Iterator[None]:
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


def read_run(path: Path, notes: list[str]) -> RunFacts:
    """run.json, or nothing with a note where there is none. Raises UsageError where it is damaged or newer."""
    if not path.exists():
        notes.append(f"no {path.name}: environment, arguments and the order of the plan are not known")
        return RunFacts()
    data = strict_json.read_json(path, notes, _OF_TRIALS)
    if not isinstance(data, dict):
        raise UsageError(f"{path} is no JSON object", remedy=_AS_WRITTEN)
    data = _present(data, "run", str(path))
    family = data.get("family")
    return RunFacts(
        family=family if isinstance(family, str) else None,
        arguments=_texts(data, "arguments", path, notes),
        environment=_environment(data.get("environment"), path, notes),
        notes=_texts(data, "notes", path, notes),
        trials=tuple(entry for entry in _list(data, "trials", path, notes) if isinstance(entry, dict)),
    )


def _list(data: Mapping[str, Any], name: str, path: Path, notes: list[str]) -> list[Any]:
    value = data.get(name, [])
    if isinstance(value, list):
        return value
    notes.append(f"{path.name}: {name} is not a list: left out")
    return []


def _texts(data: Mapping[str, Any], name: str, path: Path, notes: list[str]) -> tuple[str, ...]:
    values = _list(data, name, path, notes)
    if all(isinstance(value, str) for value in values):
        return tuple(values)
    notes.append(f"{path.name}: {name} holds more than texts: left out")
    return ()


def _environment(data: Any, path: Path, notes: list[str]) -> Environment | None:
    """The environment; None with a note where it cannot be read, because rows can be shown without it."""
    builder = Builder()
    try:
        found = builder.build(Environment, data)
    except ShapeError as error:
        notes.append(f"{path.name}: environment {error}: taken as not known")
        return None
    notes += _ignored(builder, path)
    return found


def read_records(path: Path, planned: Sequence[Mapping[str, Any]], notes: list[str]) -> tuple[TrialRecord, ...]:
    """The last record of each trial, in the order of the plan. Raises UsageError.

    A line that is no JSON, as a crash leaves it, is left out with a note; one of another shape is refused.
    """
    reader, builder, number = Reader(_SHARED), Builder(_SHARED), Numbering()
    latest: dict[Any, TrialRecord] = {}
    lines = 0
    for count, line in enumerate(strict_json.read_lines(path), 1):
        if not line.strip():
            continue
        lines += 1
        where = f"{path.name} line {count}"
        try:
            data = reader.parse(strict_json.decode(line.rstrip()), where, notes)
        except NotJsonError as error:
            notes.append(f"{where} {error}: left out")
            continue
        if not isinstance(data, dict):
            raise UsageError(f"{path}: line {count} is no JSON object", remedy=_AS_WRITTEN)
        data = _present(data, "record", f"{path}: line {count}")
        record = _record(builder, data, f"{path}: line {count}")
        latest[_identity(number, data["trial"])] = record
    if not latest:
        problem = f"no line of {path} is a record: {notes[-1]}" if lines else f"{path} has no rows: it is empty"
        raise UsageError(problem, remedy=_AS_WRITTEN if lines else "no trial had finished; run it again")
    notes += _ignored(builder, path)
    return _in_order(latest, [_identity(number, trial) for trial in planned], notes)


def _record(builder: Builder, data: dict[str, Any], where: str) -> TrialRecord:
    try:
        return builder.build(TrialRecord, data)
    except ShapeError as error:
        trial = data.get("trial")
        name = trial.get("trial_id") if isinstance(trial, dict) else None
        named = f"{where} ({name})" if isinstance(name, str) else where
        raise UsageError(f"{named}: {error}", remedy="correct or remove that line") from None


def _in_order(latest: dict[Any, TrialRecord], planned: Sequence[Any], notes: list[str]) -> tuple[TrialRecord, ...]:
    ordered = [latest.pop(key) for key in dict.fromkeys(planned) if key in latest]
    missing = len(dict.fromkeys(planned)) - len(ordered)
    if missing:
        notes.append(f"{missing} of the {len(planned)} planned trials have no record: the run did not end")
    return (*ordered, *latest.values())


def _identity(number: Numbering, trial: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for records of one trial, as ``Trial.key`` is. ``trial``: its JSON object."""
    repeat = trial.get("repeat")  # other in nearly every record, so not worth a number of its own
    return repeat if type(repeat) is int else (number(repeat),), *[number(trial.get(part)) for part in _PARTS]


def _present(data: dict[str, Any], kind: Kind, where: str) -> dict[str, Any]:
    """The same in the present form. Raises UsageError for a newer one, or where no migration leads here."""
    version = data.get("schema_version")
    if type(version) is not int or version < 1:
        raise UsageError(f"{where}: schema_version is missing or no version", remedy=_AS_WRITTEN)
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


def _ignored(builder: Builder, path: Path) -> list[str]:
    return [f"{path.name}: unknown keys left out: {', '.join(builder.ignored)}"] if builder.ignored else []
