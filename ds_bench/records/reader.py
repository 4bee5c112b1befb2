"""Reads run.json and records.jsonl of a run folder, which ``run_folder`` writes, and checks them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ..config.identity import placement_facts
from ..config.options import Shard
from ..config.spec import Placement, Trial
from ..errors import UsageError
from ..system.environment import Environment
from . import json_files
from .json_files import InvalidJsonError, InvalidValueError
from .schema import SCHEMA_VERSION, RankMeasurement, TrialRecord

_REMEDY = "give a result as ds_bench wrote it"
_Document = TypeVar("_Document", "RunInfo", TrialRecord)


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

    Thousands of records have few distinct ones; copies would take most of the memory. ``id`` then distinguishes two.
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


def read_run(path: Path, notes: list[str]) -> RunInfo:
    """Read run.json. Raises UsageError if it is damaged or of another version; ``notes`` reports a missing file."""
    if not path.exists():
        notes.append(f"no {path.name}: environment, arguments and the order of the plan are not known")
        return RunInfo()
    return _read(RunInfo, json_files.read_bytes(path), str(path))


def read_records(path: Path, planned: Sequence[Trial], notes: list[str]) -> tuple[TrialRecord, ...]:
    """Read the last record of each trial, in the order of the plan. Raises UsageError.

    A line that is not JSON, as a crash may leave it, is left out with a note; other JSON than a record is refused.
    """
    parts = _RepeatedParts()
    latest: dict[Any, TrialRecord] = {}
    with json_files.opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = parse_record(line, f"{path}: line {number}")
            except InvalidJsonError as error:
                notes.append(f"{path.name} line {number} {error}: left out")
                continue
            parts.share(record)
            # A trial that was run again has several records. The last one counts.
            latest[_identity(record.trial)] = record
    if not latest:
        raise UsageError(f"{path} has no rows: no line is a record", remedy="no trial had finished; run it again")
    # _identity compares parts by id(), so the plan must share the objects of the records.
    for trial in planned:
        parts.share_trial(trial)
    identities = dict.fromkeys(map(_identity, planned))
    ordered = [latest.pop(each) for each in identities if each in latest]
    if len(ordered) < len(identities):
        missing = len(identities) - len(ordered)
        notes.append(f"{missing} of the {len(planned)} planned trials have no record: the run did not end")
    # Last come trials that were not planned: all of them, where run.json is missing.
    return (*ordered, *latest.values())


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
    return json.dumps(placement_facts(placement), sort_keys=True)
