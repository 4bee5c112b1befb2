"""The main path: for each trial launch, save, yield."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .config.spec import Trial
from .launch import Launcher, Listener
from .records import schema
from .records.run_folder import RunStore
from .records.schema import Outcome, TrialRecord
from .system import signals

Observe = Callable[[Trial], Listener]
"""Called as a trial begins; what it returns is told of the trial's progress."""


def run(trials: Sequence[Trial], launcher: Launcher, store: RunStore, observe: Observe) -> Iterator[TrialRecord]:
    """Runs the trials in order, each saved before it is yielded. Ends early after an interruption."""
    for trial in trials:
        listen = observe(trial)
        if trial.not_launched:
            finished = _refused(trial)
        else:
            finished = launcher.launch(trial, store.trial_folder(trial.trial_id), listen)
        store.append(finished)
        yield finished
        if finished.outcome.status == schema.INTERRUPTED or signals.asked():
            return


def _refused(trial: Trial) -> TrialRecord:
    status, reason = (
        (schema.UNSUPPORTED, trial.unsupported) if trial.unsupported is not None else (schema.SKIPPED, trial.skipped)
    )
    outcome = Outcome(status=status, error=reason, details=reason)
    return TrialRecord(trial=trial, outcome=outcome, caveats=trial.caveats)


def missing(trials: Sequence[Trial], done: Sequence[TrialRecord], retry: Sequence[str]) -> list[Trial]:
    """The trials without a record, by hash; those interrupted, or ended as ``retry`` says, count as missing."""
    again = {schema.INTERRUPTED.lower(), *(status.lower() for status in retry)}
    finished = {entry.trial.key for entry in done if entry.outcome.status.lower() not in again}
    return [trial for trial in trials if trial.key not in finished]


def latest(trials: Sequence[Trial], records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The last record of each trial, in the order of the trials; others follow as they were written."""
    by_key = {entry.trial.key: entry for entry in records}
    ordered = [by_key.pop(trial.key) for trial in trials if trial.key in by_key]
    return ordered + list(by_key.values())
