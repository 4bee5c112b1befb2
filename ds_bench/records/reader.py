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

from ..config.shard import Shard
from ..config.spec import Placement, Trial
from ..errors import UsageError
from ..system.environment import Environment
from . import json_files
from .json_files import InvalidJsonError, InvalidValueError
from .schema import SCHEMA_VERSION, RankMeasurement, TrialRecord

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


MIGRATIONS: dict[int, Migration] = {1: _to_version_2, 2: _keep, 3: _keep, 4: _keep}
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
    shard: Shard | None = None
    """None for a run of a whole plan."""
    schema_version: int = SCHEMA_VERSION


class _RepeatedParts:
    """Parts that many records have in common, such as their configurations: equal ones become one object.

    Thousands of records have few of them, which would take most of the memory; by ``id`` two are then told apart.
    """

    def __init__(self) -> None:
        self._by_json: dict[tuple[type, bytes], Any] = {}

    def share(self, record: TrialRecord) -> None:
        """Replaces parts of a record that was just read by equal ones of earlier records."""
        self.share_trial(record.trial)
        for rank in record.ranks:
            self._share(rank, "resolved_config")

    def share_trial(self, trial: Trial) -> None:
        """Replaces parts of a trial likewise."""
        for name in ("configuration", "workload", "placement", "ds_config", "prediction"):
            self._share(trial, name)

    def _share(self, holder: Trial | RankMeasurement, name: str) -> None:
        from pydantic_core import to_json

        part = getattr(holder, name)
        # By their text: equal values are not enough, as 1 equals true. Nothing else refers to the holder yet, so that
        # it may be changed although it is frozen: a copy takes as long as reading it.
        object.__setattr__(holder, name, self._by_json.setdefault((type(part), to_json(part)), part))


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
                record = parse_record(line.strip(), f"{path}: line {number}", unknown_keys)
            except InvalidJsonError as error:
                notes.append(f"{path.name} line {number} {error}: left out")
                continue
            parts.share(record)
            # A trial that was run again has several records, of which the last one counts.
            latest[_identity(record.trial)] = record
    if not latest:
        problem = f"no line of {path} is a record: {notes[-1]}" if lines else f"{path} has no rows: it is empty"
        raise UsageError(problem, remedy=_REMEDY if lines else "no trial had finished; run it again")
    if unknown_keys:
        notes.append(f"{path.name}: unknown keys left out: {', '.join(unknown_keys)}")
    # _identity compares parts by id(): those of the plan must be the objects that the records have.
    for trial in planned:
        parts.share_trial(trial)
    identities = dict.fromkeys(map(_identity, planned))
    ordered = [latest.pop(each) for each in identities if each in latest]
    if len(ordered) < len(identities):
        missing = len(identities) - len(ordered)
        notes.append(f"{missing} of the {len(planned)} planned trials have no record: the run did not end")
    # Last come trials that were not planned: all of them, where run.json is missing.
    return (*ordered, *latest.values())


def parse_record(line: bytes, where: str, unknown_keys: dict[str, None]) -> TrialRecord:
    """Reads one line of records.jsonl. Raises InvalidJsonError, and UsageError if it is JSON but not a record.

    ``where``: names the line in errors. ``unknown_keys`` receives the places of keys that no field has.
    """
    record = json_files.validate(TrialRecord, line)
    # The default of the field is the present version: a line without the key must be refused below.
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
