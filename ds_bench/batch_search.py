"""Finds each strategy's largest micro-batch that trains: isolated probe trials, started at the prediction.

Probes are kept in the run folder beside the rows, so that a resumed run need not repeat them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .config.spec import Strategy, Trial
from .launch import Launcher
from .plan import Plan, make_configuration, requested_strategies
from .prediction.memory import DOES_NOT_FIT, predict
from .prediction.model_profile import ModelProfile
from .records import schema
from .records.run_folder import RunFolder
from .records.schema import TrialRecord
from .system import signals

LIMIT = 4096
"""The largest micro-batch that is ever tried."""
_PROBE_STEPS = 2
"""Measured steps of a probe; the first step of all has already allocated the optimizer's states."""
_DID_NOT_FIT = (schema.OOM, schema.OOM_HOST, schema.OOM_DISK, schema.KILLED, schema.TIMEOUT)
"""How a probe ends whose micro-batch is too large; any other ending has another cause, which a row must show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSearch:
    """Finds the largest micro-batch of each row of a plan."""

    plan: Plan
    launcher: Launcher
    store: RunFolder
    say: Callable[[str], None]

    def find_largest(self, strategy: Strategy) -> int:
        """The largest micro-batch that trains.

        If none trains, or a probe fails for a reason other than memory or time, returns the failing size, so that the
        comparison shows the error.

        Raises KeyboardInterrupt where the user interrupts it; what is known by then is kept for ``--resume``.
        """
        known = self._previous_probes(strategy)
        start = self.start(strategy)
        while (size := next_batch_size(known, start, LIMIT)) is not None:
            found = self._probe(strategy, size)
            status = found.outcome.status
            if status == schema.INTERRUPTED or signals.interrupt_requested():
                self.say(f"the search was interrupted at {strategy.label}")
                raise KeyboardInterrupt
            self.say(f"{strategy.label}: micro-batch {size} {'trains' if found.outcome.success else status}")
            if not found.outcome.success and status not in _DID_NOT_FIT:
                return size
            known[size] = found.outcome.success
        return largest(known) or 1

    def start(self, strategy: Strategy) -> int:
        """The largest that is predicted to fit; 1 where there is no prediction."""
        if not isinstance(self.plan.profile, ModelProfile):
            return 1
        low, high = 1, LIMIT + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._predicted_to_fit(strategy, middle) else (low, middle)
        return low

    def _predicted_to_fit(self, strategy: Strategy, size: int) -> bool:
        profile, memory = self.plan.profile, self.plan.memory
        trial = self._trial(strategy, size, predicted=False)
        if trial.unsupported or not isinstance(profile, ModelProfile):
            return False
        try:
            prediction = predict(profile, trial.workload, trial.placement, trial.ds_config)
        except (ValueError, KeyError, TypeError, ZeroDivisionError):  # a configuration of a shape the formulas lack
            return False
        return prediction.verdict(memory.gpu_bytes, memory.host_bytes) != DOES_NOT_FIT

    def _trial(self, strategy: Strategy, size: int, *, predicted: bool) -> Trial:
        """The row's first trial at that micro-batch."""
        configuration = make_configuration(strategy, size, self.plan.options, self.plan.make_config)
        return self.plan.trials_of([configuration], predicted=predicted)[0]

    def _probe(self, strategy: Strategy, size: int) -> TrialRecord:
        trial = self._trial(strategy, size, predicted=True)
        work = replace(trial.workload, num_steps=_PROBE_STEPS, warmup_steps=1)
        trial = replace(trial, trial_id=f"probe_{strategy.name}_batch{size}", workload=work)
        found = self.launcher.launch(trial, self.store.trial_folder(trial.trial_id), _ignore_progress)
        self.store.append_probe(found)
        return found

    def _previous_probes(self, strategy: Strategy) -> dict[int, bool]:
        """What earlier probes of this run found."""
        asked = (strategy.name, strategy.stage)
        rows = [(entry, entry.trial.configuration) for entry in self.store.probes()]
        kept = [entry for entry, configuration in rows if (configuration.name, configuration.stage) == asked]
        return {
            entry.trial.workload.batch_size: entry.outcome.success
            for entry in kept
            if entry.outcome.success or entry.outcome.status in _DID_NOT_FIT
        }


def _ignore_progress(_progress: object) -> None:
    return None


def at_largest_batch(plan: Plan, launcher: Launcher, store: RunFolder, say: Callable[[str], None]) -> Plan:
    """The plan with every row at its own largest micro-batch; with ``--common-batch`` also at the smallest of those."""
    search = BatchSearch(plan=plan, launcher=launcher, store=store, say=say)
    options, strategies = plan.options, requested_strategies(plan.options)
    sizes = {strategy.name: search.find_largest(strategy) for strategy in strategies}
    configurations = [
        make_configuration(strategy, sizes[strategy.name], options, plan.make_config, "largest")
        for strategy in strategies
    ]
    if options.common_batch:
        common = min(sizes.values())
        configurations += [make_configuration(strategy, common, options, plan.make_config) for strategy in strategies]
    return plan.with_configurations(configurations)


def next_batch_size(known: Mapping[int, bool], start: int, limit: int) -> int | None:
    """The micro-batch to try next; None when the answer is settled.

    ``known``: micro-batch → whether it trained. ``start``: the predicted largest, 1 or more. ``limit``: the largest
    that is ever tried. Exponential search from ``start``: the step doubles upwards after a success and downwards after
    a failure. Once one size trains and a larger one fails, bisects until the gap is at most 1/32 of the size (1 below
    64). If the prediction is exact, two probes are enough.
    """
    best, worst = largest(known), smallest_failure(known)
    start = min(max(start, 1), limit)
    if not known:
        return start
    if best is None:
        return _below(worst or 1, start)
    if worst is None:
        return None if best >= limit else min(best + _step_size(best, start), limit)
    return None if worst - best <= resolution(best) else _between(best, worst)


def resolution(size: int) -> int:
    """How exactly the answer is wanted: the next finer micro-batch is within run-to-run noise of this one."""
    return max(1, size // 32)


def largest(known: Mapping[int, bool]) -> int | None:
    """The largest micro-batch that trained, below every failure: one that trained above a failure was luck."""
    worst = smallest_failure(known)
    return max((size for size, trained in known.items() if trained and (worst is None or size < worst)), default=None)


def smallest_failure(known: Mapping[int, bool]) -> int | None:
    """The smallest micro-batch that did not train."""
    return min((size for size, trained in known.items() if not trained), default=None)


def _below(worst: int, start: int) -> int | None:
    """Downwards from the prediction; at last 1; None when even 1 failed."""
    if worst == 1:
        return None
    return max(worst - _step_size(start, worst), 1)


def _step_size(reached: int, start: int) -> int:
    """A grain upwards or downwards at first, then as far again as the walk has come, and from there in eighths."""
    gone = abs(reached - start)
    return resolution(start) if gone == 0 else max(gone, start // 8, 1)


def _between(best: int, worst: int) -> int:
    """The largest power of two in the gap, then the middle."""
    power = 1 << (worst - 1).bit_length() - 1
    return power if best < power < worst else (best + worst) // 2
