"""May this run be resumed, and which of its trials are left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..config.spec import Trial
from ..errors import UsageError
from ..system.environment import Environment, comparability_differences
from .run_folder import RunFolder
from .schema import INTERRUPTED, TrialRecord


def require_same_machine(store: RunFolder, facts: Environment) -> None:
    """Rows of other hardware or versions do not belong in one result."""
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
    """One result holds one workload on one placement; more stages, strategies or repeats may be added."""

    def asked(part: Any) -> Any:
        plain = json.loads(json.dumps(part))
        return (
            {key: value for key, value in plain.items() if key not in leave_out} if isinstance(plain, dict) else plain
        )

    for stored in store.load_run().get("trials", []):
        for name in ("workload", "placement"):
            if asked(trials[0].to_dict()[name]) != asked(stored.get(name)):
                raise UsageError(
                    f"--resume {store.folder}: another {name} than it began with", remedy="start a new run"
                )


def remaining_trials(trials: Sequence[Trial], done: Sequence[TrialRecord], retry: Sequence[str]) -> list[Trial]:
    """The trials without a record, by hash; those interrupted, or ended as ``retry`` says, count as missing."""
    again = {INTERRUPTED.lower(), *(status.lower() for status in retry)}
    finished = {entry.trial.key for entry in done if entry.outcome.status.lower() not in again}
    return [trial for trial in trials if trial.key not in finished]


def latest_records(trials: Sequence[Trial], records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The last record of each trial, in the order of the trials; others follow as they were written."""
    by_key = {entry.trial.key: entry for entry in records}
    ordered = [by_key.pop(trial.key) for trial in trials if trial.key in by_key]
    return ordered + list(by_key.values())
