"""Finds each strategy's largest micro-batch that trains: isolated probe trials, started at the prediction.

Probes are kept in the run folder beside the rows, so that a resumed run need not repeat them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from . import batchsearch, plan
from .config.options import Options
from .config.spec import Strategy, Trial
from .launch import Launcher
from .plan import Draft, MakeConfig
from .prediction import trial_predictions
from .prediction.memory import DOES_NOT_FIT, Prediction
from .prediction.model_profile import ModelProfile
from .prediction.trial_predictions import Room, Unpredicted
from .records import schema
from .records.run_folder import RunStore
from .records.schema import TrialRecord
from .system import signals

LIMIT = 4096
"""The largest micro-batch that is ever tried."""
_PROBE_STEPS = 2
"""Measured steps of a probe; the first step of all has already allocated the optimizer's states."""
_DID_NOT_FIT = (schema.OOM, schema.OOM_HOST, schema.OOM_DISK, schema.KILLED, schema.TIMEOUT)
"""How a probe ends whose micro-batch is too large; any other ending has another cause, which a row must show."""

MakeTrials = Callable[[Sequence[Draft]], list[Trial]]
"""Completes drafts for this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a search needs of the run."""

    options: Options
    make_config: MakeConfig
    make_trials: MakeTrials
    launcher: Launcher
    store: RunStore
    profile: ModelProfile | Unpredicted
    room: Room
    say: Callable[[str], None]

    def largest(self, strategy: Strategy) -> int:
        """The largest micro-batch that trains; where none does, or probes fail for another cause, one that shows it.

        Raises KeyboardInterrupt where the user interrupts it; what is known by then is kept for ``--resume``.
        """
        known = self._kept(strategy)
        start = self.start(strategy)
        while (size := batchsearch.next_probe(known, start, LIMIT)) is not None:
            found = self._probe(strategy, size)
            status = found.outcome.status
            if status == schema.INTERRUPTED or signals.asked():
                self.say(f"the search was interrupted at {strategy.label}; go on with --resume {self.store.folder}")
                raise KeyboardInterrupt
            self.say(f"{strategy.label}: micro-batch {size} {'trains' if found.outcome.success else status}")
            if not found.outcome.success and status not in _DID_NOT_FIT:
                return size
            known[size] = found.outcome.success
        return batchsearch.largest(known) or 1

    def start(self, strategy: Strategy) -> int:
        """The largest that is predicted to fit; 1 where there is no prediction."""
        if isinstance(self.profile, Unpredicted):
            return 1
        low, high = 1, LIMIT + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._predicted_to_fit(strategy, middle) else (low, middle)
        return low

    def _predicted_to_fit(self, strategy: Strategy, size: int) -> bool:
        (trial,) = trial_predictions.foresee(self._trials(strategy, size), self.profile, self.room, skip=False)
        if trial.prediction is None:
            return False
        verdict = Prediction.from_dict(trial.prediction).verdict(self.room.gpu_bytes, self.room.host_bytes)
        return verdict != DOES_NOT_FIT

    def _trials(self, strategy: Strategy, size: int) -> list[Trial]:
        return self.make_trials([plan.draft_of(strategy, size, self.options, self.make_config)])[:1]

    def _probe(self, strategy: Strategy, size: int) -> TrialRecord:
        (trial,) = self._trials(strategy, size)
        work = replace(trial.workload, num_steps=_PROBE_STEPS, warmup_steps=1)
        trial = replace(trial, trial_id=f"probe_{strategy.name}_batch{size}", workload=work)
        found = self.launcher.launch(trial, self.store.trial_folder(trial.trial_id), _silent)
        self.store.append_probe(found)
        return found

    def _kept(self, strategy: Strategy) -> dict[int, bool]:
        """What earlier probes of this run found."""
        kept = [entry for entry in self.store.probes() if entry.trial.strategy == strategy]
        return {
            entry.trial.workload.batch_size: entry.outcome.success
            for entry in kept
            if entry.outcome.success or entry.outcome.status in _DID_NOT_FIT
        }


def _silent(_progress: object) -> None:
    return None


def drafts(search: Search, strategies: Sequence[Strategy]) -> list[Draft]:
    """Every strategy at its own largest micro-batch; with ``--common-batch`` also at the smallest of those."""
    sizes = {strategy.name: search.largest(strategy) for strategy in strategies}
    options, make = search.options, search.make_config
    made = [plan.draft_of(strategy, sizes[strategy.name], options, make, "largest") for strategy in strategies]
    if options.common_batch:
        common = min(sizes.values())
        made += [plan.draft_of(strategy, common, options, make) for strategy in strategies]
    return made
