"""A trial that ran out of memory, as its record tells it: how much was missing, and what is known around it.

Reads records and decides nothing; what could be done about it is ``changes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..analysis.comparison import Comparison, StrategyResult
from ..config.spec import Strategy, Trial, Workload
from ..records import schema
from ..records.schema import TrialRecord
from ..units import format_bytes

Pool = Literal["device", "host", "both"]
"""The memory that ran out. ``both``: the CPU accelerator, where the host's memory is also the device's."""

_PHASES = {
    "build": "while the model was built",
    "init": "in deepspeed.initialize",
    "warmup": "in the warm-up steps",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "step": "in the optimizer step",
}


_NEVER_TRIED = (schema.SKIPPED, schema.INTERRUPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What one rank asked for and could not have."""

    phase: str | None = None
    """As in ``Outcome.phase``; None where unknown."""
    requested_bytes: int | None = None
    """Of the one allocation that failed: what follows it may need more."""
    free_bytes: int | None = None

    @property
    def missing_bytes(self) -> int | None:
        """Requested less free: the least that was missing. None unless both are known."""
        if self.requested_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.requested_bytes - self.free_bytes)

    @property
    def target_bytes(self) -> int | None:
        """What a change must free for the allocation to succeed: without the free bytes, all that was requested."""
        return self.requested_bytes if self.missing_bytes is None else self.missing_bytes

    @property
    def fragmented(self) -> bool:
        """As much was free as was asked for, only not in one piece."""
        return self.missing_bytes == 0

    @property
    def where(self) -> str:
        """``in the optimizer step``; empty where unknown."""
        return _PHASES.get(self.phase or "", f"in phase {self.phase}" if self.phase else "")

    @property
    def text(self) -> str:
        """How much was missing, as far as is known."""
        if self.fragmented:
            asked, free = format_bytes(self.requested_bytes), format_bytes(self.free_bytes)
            return f"{asked} asked with {free} free, but not in one piece"
        if self.missing_bytes is not None:
            return f"at least {format_bytes(self.missing_bytes)} short"
        if self.requested_bytes is not None:
            return f"{format_bytes(self.requested_bytes)} asked, free bytes not known"
        return "how much was missing is not known"


def arrangement(strategy: Strategy) -> tuple[int, str, str]:
    """What decides where a strategy's bytes live, whatever it is called."""
    return strategy.stage, strategy.offload_optimizer, strategy.offload_param


def shortage_of(run: TrialRecord) -> Shortage:
    """What its outcome says was asked and free."""
    outcome = run.outcome
    return Shortage(phase=outcome.phase, requested_bytes=outcome.requested_bytes, free_bytes=outcome.free_bytes)


def predicted_shortage(run: TrialRecord, comparison: Comparison) -> Shortage | None:
    """What each card is predicted to lack for a trial that was skipped; None where it lacks nothing or is not known."""
    tier, capacity = (run.trial.prediction or {}).get("gpu"), comparison.device_capacity_bytes
    if run.outcome.status != schema.SKIPPED or capacity is None or not isinstance(tier, Mapping):
        return None
    sizes = list(tier.values())
    needed = sum(sizes) if all(isinstance(size, int) for size in sizes) else 0
    return Shortage(requested_bytes=needed, free_bytes=capacity) if needed > capacity else None


def alike(comparison: Comparison, trial: Trial) -> list[StrategyResult]:
    """Rows that ran the same work in the same place, whatever came of it; the repeats of a row are alike.

    So are rows that are each at their own largest micro-batch.
    """
    asked = (_work(trial), trial.placement)
    found = []
    for row in comparison.results:
        ran = next((run.record for run in row.summaries if run.record.outcome.status not in _NEVER_TRIED), None)
        if ran is not None and (_work(ran.trial), ran.trial.placement) == asked:
            found.append(row)
    return found


def _work(trial: Trial) -> Workload:
    work = trial.workload
    return replace(work, batch_size=1) if work.batch_policy == "largest" else work


def pool_of(run: TrialRecord) -> Pool:
    """The memory that a run out of memory was out of."""
    if run.trial.placement.accelerator == "cpu":
        return "both"
    return "host" if run.outcome.status == schema.OOM_HOST else "device"


def measured_activations(comparison: Comparison, run: TrialRecord, batch: int) -> int | None:
    """The fullest rank's, of a row that trained the same at any micro-batch, scaled to this one: they are linear."""
    tier = "cpu" if run.trial.placement.accelerator == "cpu" else "gpu"
    for row in comparison.results:
        for each in row.successes:
            counted = [
                size * batch // rank.micro_batch_size
                for rank in each.record.ranks
                if (size := rank.ledger.get(tier, {}).get("activations"))
            ]
            if counted and _same_activations(each.record, run):
                return max(counted)
    return None


def _same_activations(a: TrialRecord, b: TrialRecord) -> bool:
    names = ("model", "seq_length", "precision", "activation_checkpointing")
    return all(getattr(a.trial.workload, name) == getattr(b.trial.workload, name) for name in names)
