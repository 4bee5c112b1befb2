"""Searches each row's largest micro-batch that trains, by probe trials that start at the predicted size.

Probes are stored in the run folder beside the rows, so that a resumed run does not repeat them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .config.spec import NO_INSPECTION, Trial, Workload
from .launch import Launcher
from .planner import Plan, RequestedRow
from .prediction.memory import DOES_NOT_FIT, predict
from .prediction.model_profile import ModelProfile
from .records import schema
from .records.run_folder import RunFolder
from .records.schema import TrialRecord
from .system import signals

MAX_BATCH_SIZE = 4096
"""The largest micro-batch that is tried."""
_PROBE_STEPS = 2
"""Measured steps of a probe, after one warm-up step, which allocates the optimizer's states."""
_DID_NOT_FIT = (schema.OOM, schema.OOM_HOST, schema.OOM_DISK, schema.KILLED, schema.TIMEOUT)
"""Statuses of a probe whose micro-batch is too large; any other failure has another cause, which a row must show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSearch:
    """Searches the largest micro-batch of each row of a plan."""

    plan: Plan
    launcher: Launcher
    store: RunFolder
    say: Callable[[str], None]

    def find_largest(self, row: RequestedRow) -> int:
        """Finds the largest micro-batch that trains.

        If none trains, or a probe fails for a reason other than memory or time, returns the failing size, so that the
        comparison shows the error. Raises KeyboardInterrupt if the user interrupts it; finished probes are kept for
        ``--resume``.
        """
        trained = self._previous_probes(row)
        start = self.predict_largest(row)
        while (size := next_batch_size(trained, start, MAX_BATCH_SIZE)) is not None:
            outcome = self._probe(row, size).outcome
            status = outcome.status
            if status == schema.INTERRUPTED or signals.interrupt_requested():
                self.say(f"the search was interrupted at {row.label}")
                raise KeyboardInterrupt
            self.say(f"{row.label}: micro-batch {size} {'trains' if outcome.success else status}")
            if not outcome.success and status not in _DID_NOT_FIT:
                return size
            trained[size] = outcome.success
        return largest_trained(trained) or 1

    def predict_largest(self, row: RequestedRow) -> int:
        """Returns the largest micro-batch that is predicted to fit; 1 without a prediction."""
        if not isinstance(self.plan.profile, ModelProfile):
            return 1
        sizes = range(2, MAX_BATCH_SIZE + 1)
        return 1 + bisect_left(sizes, True, key=lambda size: not self._predicted_to_fit(row, size))

    def _predicted_to_fit(self, row: RequestedRow, size: int) -> bool:
        profile, memory = self.plan.profile, self.plan.memory
        trial = self._trial(row, size, predicted=False)
        if trial.unsupported or not isinstance(profile, ModelProfile):
            return False
        try:
            engine = trial.configuration.engine
            prediction = predict(profile, trial.workload, trial.placement, trial.ds_config, engine=engine)
        except (
            ValueError,
            KeyError,
            TypeError,
            ZeroDivisionError,
        ):  # a configuration of a shape that the formulas do not know
            return False
        return prediction.verdict(memory.gpu_bytes, memory.host_bytes) != DOES_NOT_FIT

    def _trial(self, row: RequestedRow, size: int, *, predicted: bool) -> Trial:
        """The row's first trial at that micro-batch."""
        configuration = self.plan.builder.build(row, size)
        return self.plan.trials_of([configuration], predicted=predicted)[0]

    def _probe(self, row: RequestedRow, size: int) -> TrialRecord:
        trial = self._trial(row, size, predicted=True)
        trial_id = f"probe_{row.name}_batch{size}"
        trial = replace(trial, trial_id=trial_id, workload=_of_probe(trial.workload), inspection=NO_INSPECTION)
        record = self.launcher.launch(trial, self.store.trial_folder(trial.trial_id), lambda _progress: None)
        self.store.append_probe(record)
        return record

    def _previous_probes(self, row: RequestedRow) -> dict[int, bool]:
        """Micro-batch → whether it trained, from earlier probes of this run."""
        return {
            record.trial.workload.batch_size: record.outcome.success
            for record in self.store.probes()
            if record.trial.configuration.name == row.name
            and self._is_probe_of(record.trial, row)
            and (record.outcome.success or record.outcome.status in _DID_NOT_FIT)
        }

    def _is_probe_of(self, trial: Trial, row: RequestedRow) -> bool:
        """Whether a trial is what a probe of this row would run: another point of a sweep has another workload."""
        own = self._trial(row, trial.workload.batch_size, predicted=False)
        return trial.configuration == own.configuration and trial.workload == _of_probe(own.workload)


def _of_probe(workload: Workload) -> Workload:
    return replace(workload, num_steps=_PROBE_STEPS, warmup_steps=1)


def at_largest_batch(plan: Plan, launcher: Launcher, store: RunFolder, say: Callable[[str], None]) -> Plan:
    """Returns the plan with every row at its own largest micro-batch.

    With ``--common-batch`` every row also runs at the smallest of those, which all of them train.
    """
    search = BatchSearch(plan=plan, launcher=launcher, store=store, say=say)
    rows = plan.rows
    sizes = {row.name: search.find_largest(row) for row in rows}
    configurations = [plan.builder.build(row, sizes[row.name], "largest") for row in rows]
    if plan.options.common_batch:
        common = min(sizes.values())
        configurations += [plan.builder.build(row, common) for row in rows]
    return plan.with_configurations(configurations)


def next_batch_size(trained: Mapping[int, bool], start: int, limit: int) -> int | None:
    """Returns the micro-batch to try next; None once the largest is known.

    ``trained``: micro-batch → whether it trained. ``start``: the predicted largest, 1 or more. ``limit``: the largest
    that is tried. Exponential search from ``start``: the step doubles upwards after a success and downwards after
    a failure. Once one size trains and a larger one fails, bisects until the gap is at most 1/32 of the size (1 below
    64). If the prediction is exact, two probes are enough.
    """
    largest, failed = largest_trained(trained), smallest_failure(trained)
    start = min(max(start, 1), limit)
    if not trained:
        return start
    if largest is None:
        return None if failed in (None, 1) else max(failed - _step_size(abs(failed - start), failed), 1)
    if failed is None:
        return None if largest >= limit else min(largest + _step_size(abs(largest - start), start), limit)
    if failed - largest <= resolution(largest):
        return None
    power_of_two = 1 << (failed - 1).bit_length() - 1  # sizes that users choose, where the gap holds one
    return power_of_two if largest < power_of_two < failed else (largest + failed) // 2


def resolution(size: int) -> int:
    """Returns the gap at which the search ends: speeds at sizes so close differ by less than the noise of runs."""
    return max(1, size // 32)


def largest_trained(trained: Mapping[int, bool]) -> int | None:
    """Returns the largest micro-batch that trained below every failure; one that trained above a failure was luck."""
    failed = smallest_failure(trained)
    return max(
        (size for size, success in trained.items() if success and (failed is None or size < failed)), default=None
    )


def smallest_failure(trained: Mapping[int, bool]) -> int | None:
    """Returns the smallest micro-batch that did not train; None if all did."""
    return min((size for size, success in trained.items() if not success), default=None)


def _step_size(distance: int, size: int) -> int:
    """The first step is the resolution; each further one is the distance so far, but at least an eighth of ``size``."""
    return resolution(size) if distance == 0 else max(distance, size // 8, 1)
