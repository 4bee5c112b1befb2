"""Checks whether a run can be resumed, and finds the trials that are left."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from ..config.spec import Trial
from ..errors import UsageError
from ..system.environment import Environment, comparability_differences
from .run_folder import RunFolder
from .schema import INTERRUPTED, TrialRecord


def require_same_machine(store: RunFolder, facts: Environment) -> None:
    """Raises UsageError if the run was made with other hardware or versions: its rows would not compare."""
    try:
        earlier = Environment.from_dict(store.load_run()["environment"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UsageError(f"{store.folder} has no readable environment", remedy="start a new run") from None
    differences = comparability_differences(earlier, facts)
    if differences:
        raise UsageError(
            f"--resume {store.folder}: not the same machine: {'; '.join(differences)}", remedy="start a new run"
        )


def require_same_workload(store: RunFolder, trials: Sequence[Trial], leave_out: Sequence[str]) -> None:
    """Raises UsageError if the run has another workload or placement; stages, strategies and repeats may be added.

    ``leave_out``: fields that may differ.
    """

    def requested(part: Any, changed: Collection[str]) -> Any:
        values = json.loads(json.dumps(part))  # as they are read from the file: lists, not tuples
        return {key: values[key] for key in values if key not in changed} if isinstance(values, dict) else values

    present = trials[0].to_dict()
    own_changes = trials[0].configuration.workload_changes
    texts = {trial.configuration.name: trial.configuration.file_text for trial in trials}
    for stored in store.load_run().get("trials", []):
        configuration = stored.get("configuration")
        configuration = configuration if isinstance(configuration, dict) else {}
        row, text = str(configuration.get("name")), configuration.get("file_text")
        if text is not None and texts.get(row, text) != text:
            raise UsageError(
                f"--resume {store.folder}: the file of {row} has changed since the run began",
                remedy="put it back as it was (run.json has its text), or start a new run",
            )
        row_changes = configuration.get("workload_changes")
        changed = {*leave_out, *own_changes, *(row_changes if isinstance(row_changes, dict) else ())}
        for name in ("workload", "placement"):
            if requested(present[name], changed) != requested(stored.get(name), changed):
                raise UsageError(
                    f"--resume {store.folder}: another {name} than it began with", remedy="start a new run"
                )


def remaining_trials(trials: Sequence[Trial], done: Sequence[TrialRecord], retry: Sequence[str]) -> list[Trial]:
    """Returns the trials without a record, by ``Trial.key``. Interrupted ones, and those with a status in ``retry``,
    are run again."""
    repeated = {INTERRUPTED.lower(), *(status.lower() for status in retry)}
    finished = {record.trial.key for record in done if record.outcome.status.lower() not in repeated}
    return [trial for trial in trials if trial.key not in finished]


def latest_records(trials: Sequence[Trial], records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Returns the last record of each trial, in the order of the trials; other records follow as they were written."""
    by_key = {record.trial.key: record for record in records}
    ordered = [by_key.pop(trial.key) for trial in trials if trial.key in by_key]
    return ordered + list(by_key.values())
