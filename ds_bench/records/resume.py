"""What ``--resume`` requires of a run, and which of its trials it and ``--retry`` run again."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config.identity import differences, placement_facts, work_key
from ..config.spec import Trial
from ..errors import UsageError
from ..system.environment import Environment, comparability_differences
from ..units import format_names
from . import reader
from .run_folder import PROBES_FILE, RECORDS_FILE, RUN_FILE, RunFolder, cannot_resume
from .schema import INTERRUPTED, TrialRecord


def require_same_machine(store: RunFolder, facts: Environment) -> None:
    """Raise UsageError if the run used different hardware or versions, so that its rows would not be comparable."""
    earlier = store.load_run().environment
    if earlier is None:
        raise UsageError(f"{store.folder} has no readable environment", remedy="start a new run")
    machine_differences = comparability_differences(earlier, facts)
    if machine_differences:
        raise cannot_resume(store.folder, f"other hardware or versions: {'; '.join(machine_differences)}")


def require_same_workload(store: RunFolder, trials: Sequence[Trial], leave_out: Sequence[str]) -> None:
    """Raise UsageError if the run has a different workload, placement or inspection, or if its trials cannot be read.

    Stages, strategies and repeats may be added.

    ``leave_out``: fields that may differ, besides those that a row itself sets. In a sweep, each stored trial must have
    the workload of one of the points.
    """
    present = {
        # Thousands of trials share a few workloads: each is converted once.
        "workload": [asdict(each) for each in {id(trial.workload): trial.workload for trial in trials}.values()],
        "placement": [placement_facts(trial.placement) for trial in trials],
    }
    own_changes = {field for trial in trials for field in trial.configuration.workload_changes}
    texts = {trial.configuration.name: trial.configuration.file_text for trial in trials}
    digests = {trial.workload.data_path: trial.workload.data_digest for trial in trials}
    scripts = {each.command: {each.digest} for trial in trials if (each := trial.workload.script) is not None}
    inspections = {replace(trial.inspection, checkpoint_path=None) for trial in trials}  # the run may have been moved
    known: dict[tuple[str, frozenset[str]], set[str]] = {}
    for stored in reader.read_trials(store.folder / RUN_FILE):
        configuration, workload = stored.configuration, stored.workload
        # A row that is not requested this time is compared with itself. None: the row does not come from a file.
        if configuration.file_text not in (None, texts.get(configuration.name, configuration.file_text)):
            raise cannot_resume(
                store.folder,
                f"the file of {configuration.name} has changed since the run began",
                remedy="put it back as it was (run.json has its text), or start a new run",
            )
        if replace(stored.inspection, checkpoint_path=None) not in inspections:
            raise cannot_resume(
                store.folder, "different --profile, --checkpoint or --monitor flags from those it began with"
            )
        script = workload.script
        if script is not None and script.digest not in scripts.get(script.command, {script.digest}):
            raise cannot_resume(
                store.folder,
                f"the script {script.name} has changed since the run began",
                remedy="put it back as it was, or start a new run",
            )
        path, digest = workload.data_path, workload.data_digest
        if path is not None and digests.get(path, digest) != digest:
            raise cannot_resume(
                store.folder,
                f"the file {path} has changed since the run began",
                remedy="put it back as it was, or start a new run",
            )
        # A row may itself set fields of the workload, whether it is stored or added.
        left_out = frozenset({*leave_out, *own_changes, *configuration.workload_changes})
        for name, part in (("workload", asdict(workload)), ("placement", placement_facts(stored.placement))):
            # Cached for each set of fields, because a sweep has thousands of trials but few such sets.
            if (name, left_out) not in known:
                known[name, left_out] = {_text_without(each, left_out) for each in present[name]}
            if (text := _text_without(part, left_out)) not in known[name, left_out]:
                changes = [differences(json.loads(each), json.loads(text)) for each in known[name, left_out]]
                named = format_names([each.text for each in min(changes, key=len)], 4, "; ")
                raise cannot_resume(store.folder, f"a different {name} from the one it began with: {named}")


def _text_without(part: dict[str, Any], left_out: Container[str]) -> str:
    """A part of a trial as text, without some of its fields; as in a file, a list and a tuple are the same."""
    return json.dumps({key: value for key, value in part.items() if key not in left_out}, sort_keys=True)


def remaining_trials(trials: Sequence[Trial], done: Sequence[TrialRecord]) -> list[Trial]:
    """Return the trials without a record, by ``work_key``, and those whose last record is an interruption."""
    last = {work_key(record.trial): record.outcome.status for record in done}
    return [trial for trial in trials if last.get(work_key(trial), INTERRUPTED) == INTERRUPTED]


def with_retries(store: RunFolder, statuses: Iterable[str]) -> RunFolder:
    """Return the run, setting aside the records of trials that ended with one of ``statuses``; these run again."""
    wanted = {status.lower() for status in statuses}
    retried = (
        (name, index)
        for name in (RECORDS_FILE, PROBES_FILE)
        for index, record in enumerate(store.records(name) if wanted else ())
        if record.outcome.status.lower() in wanted
    )
    return replace(store, retried=frozenset(retried))


def is_finished(folder: Path) -> bool:
    """Whether every trial that a run has planned has ended uninterrupted; False before it has planned any."""
    planned = reader.read_trials(folder / RUN_FILE)
    return bool(planned) and not remaining_trials(planned, RunFolder.open(folder).records())
