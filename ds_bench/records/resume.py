"""Checks whether a run can be resumed, and finds the trials that are left."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Sequence
from dataclasses import asdict
from typing import Any

from ..config.spec import NO_INSPECTION, Placement, Trial
from ..errors import UsageError
from ..system.environment import Environment, comparability_differences
from . import json_files
from .run_folder import RunFolder, cannot_resume
from .schema import INTERRUPTED, TrialRecord


def require_same_machine(store: RunFolder, facts: Environment) -> None:
    """Raises UsageError if the run was made with other hardware or versions: its rows would not compare."""
    try:
        earlier = json_files.build(Environment, store.load_run()["environment"])
    except (KeyError, ValueError):
        raise UsageError(f"{store.folder} has no readable environment", remedy="start a new run") from None
    differences = comparability_differences(earlier, facts)
    if differences:
        raise cannot_resume(store.folder, f"not the same machine: {'; '.join(differences)}")


def require_same_workload(store: RunFolder, trials: Sequence[Trial], leave_out: Sequence[str]) -> None:
    """Raises UsageError if the run has another workload, placement or inspection.

    Stages, strategies and repeats may be added.

    ``leave_out``: fields that may differ, besides those that a row itself sets. Of a sweep, each stored trial must have
    the workload of one of the points.
    """
    present = {
        "workload": [asdict(each) for each in {id(trial.workload): trial.workload for trial in trials}.values()],
        "placement": [trial.placement.measured_facts for trial in trials],
    }
    own_changes = {field for trial in trials for field in trial.configuration.workload_changes}
    texts = {trial.configuration.name: trial.configuration.file_text for trial in trials}
    digests = {(trial.workload.data_path, trial.workload.data_digest) for trial in trials}
    elsewhere = ("checkpoint_path",)  # the run may have been moved
    inspections = {_text_without(asdict(trial.inspection), elsewhere) for trial in trials}
    known: dict[tuple[str, frozenset[str]], set[str]] = {}
    for stored in store.load_run().get("trials", []):
        configuration = stored.get("configuration")
        configuration = configuration if isinstance(configuration, dict) else {}
        row, text = str(configuration.get("name")), configuration.get("file_text")
        if text is not None and texts.get(row, text) != text:
            raise cannot_resume(
                store.folder,
                f"the file of {row} has changed since the run began",
                remedy="put it back as it was (run.json has its text), or start a new run",
            )
        inspection = stored.get("inspection")
        inspection = inspection if isinstance(inspection, dict) else {}  # older runs have none, or fewer fields
        if _text_without({**asdict(NO_INSPECTION), **inspection}, elsewhere) not in inspections:
            raise cannot_resume(store.folder, "other --profile, --checkpoint or --monitor flags than it began with")
        _require_same_data(store, stored.get("workload"), digests)
        changes = configuration.get("workload_changes")
        left_out = frozenset({*leave_out, *own_changes, *(changes if isinstance(changes, dict) else ())})
        for name, parts in present.items():
            if (name, left_out) not in known:
                known[name, left_out] = {_text_without(part, left_out) for part in parts}
            part = stored.get(name) if name == "workload" else _placement_facts(stored.get(name))
            if _text_without(part, left_out) not in known[name, left_out]:
                raise cannot_resume(store.folder, f"another {name} than it began with")


def _placement_facts(stored: Any) -> dict[str, Any] | None:
    """What decides a measurement in a stored placement, which may lie on other hosts; None if it is damaged."""
    try:
        return Placement.from_dict(stored).measured_facts
    except (TypeError, ValueError, AttributeError):
        return None


def _require_same_data(store: RunFolder, workload: Any, digests: Collection[tuple[str | None, str | None]]) -> None:
    """Raises UsageError if a file of token ids has another content than when the run began.

    ``digests``: path and hash of each file that is asked for now.
    """
    path, digest = (workload.get(name) if isinstance(workload, dict) else None for name in ("data_path", "data_digest"))
    if path is not None and any(path == other for other, _ in digests) and (path, digest) not in digests:
        raise cannot_resume(
            store.folder,
            f"the file {path} has changed since the run began",
            remedy="put it back as it was, or start a new run",
        )


def _text_without(part: Any, left_out: Container[str]) -> str:
    """A part of a trial as text, without some of its fields; a list and a tuple, as in a file, are the same."""
    if isinstance(part, dict):
        part = {key: value for key, value in part.items() if key not in left_out}
    return json.dumps(part, sort_keys=True)


def remaining_trials(trials: Sequence[Trial], done: Sequence[TrialRecord], retry: Sequence[str]) -> list[Trial]:
    """Returns the trials without a record, by ``Trial.key``. Interrupted ones, and those with a status in ``retry``,
    are run again."""
    repeated = {INTERRUPTED.lower(), *(status.lower() for status in retry)}
    finished = {record.trial.key for record in done if record.outcome.status.lower() not in repeated}
    return [trial for trial in trials if trial.key not in finished]
