"""How much memory a failed run was short of, and which changes were predicted to make it fit.

No formula of memory is here: ``prediction.what_if`` predicted every change when the trial was planned, and the record
has the predictions (``Prediction.alternatives``). They are predictions, not promises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..analysis.comparison import Comparison, ComparisonRow
from ..config.spec import Strategy, Trial, Workload
from ..prediction.memory import TIGHT_FRACTION, Prediction
from ..prediction.what_if import Alternative
from ..records import schema
from ..records.schema import TrialRecord
from ..units import format_bytes

Pool = Literal["device", "host", "both"]
"""The memory that ran out. ``both``: on the CPU accelerator the host's memory is the device's too."""

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
    """The allocation of one rank that failed."""

    phase: str | None = None
    """As in ``Outcome.phase``; None where unknown."""
    requested_bytes: int | None = None
    """Size of the allocation that failed; later ones might have failed too."""
    free_bytes: int | None = None

    @property
    def missing_bytes(self) -> int | None:
        """Requested less free bytes, the least that was missing. None unless both are known."""
        if self.requested_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.requested_bytes - self.free_bytes)

    @property
    def target_bytes(self) -> int | None:
        """What a change must free for the allocation to succeed: all requested bytes if the free ones are not known."""
        return self.requested_bytes if self.missing_bytes is None else self.missing_bytes

    @property
    def fragmented(self) -> bool:
        """Enough bytes were free, but not in one block."""
        return self.missing_bytes == 0

    @property
    def where(self) -> str:
        """``in the optimizer step``; empty where unknown."""
        return _PHASES.get(self.phase or "", f"in phase {self.phase}" if self.phase else "")

    @property
    def text(self) -> str:
        """How much was missing, or that it is not known."""
        if self.fragmented:
            requested, free = format_bytes(self.requested_bytes), format_bytes(self.free_bytes)
            return f"{requested} asked with {free} free, but not in one piece"
        if self.missing_bytes is not None:
            return f"at least {format_bytes(self.missing_bytes)} short"
        if self.requested_bytes is not None:
            return f"{format_bytes(self.requested_bytes)} asked, free bytes not known"
        return "how much was missing is not known"


def strategy_layout(strategy: Strategy) -> tuple[int, str, str]:
    """ZeRO stage and offload devices: what decides where the bytes of a strategy are."""
    return strategy.stage, strategy.offload_optimizer, strategy.offload_param


def shortage_of(run: TrialRecord) -> Shortage:
    """The shortage that the outcome of a run reports."""
    outcome = run.outcome
    return Shortage(phase=outcome.phase, requested_bytes=outcome.requested_bytes, free_bytes=outcome.free_bytes)


def predicted_shortage(run: TrialRecord, comparison: Comparison) -> Shortage | None:
    """The predicted shortage per GPU of a trial that was skipped; None if there is none or it is not known."""
    tier, capacity = (run.trial.prediction or {}).get("gpu"), comparison.device_capacity_bytes
    if run.outcome.status != schema.SKIPPED or capacity is None or not isinstance(tier, Mapping):
        return None
    sizes = list(tier.values())
    needed = sum(sizes) if all(isinstance(size, int) for size in sizes) else 0
    return Shortage(requested_bytes=needed, free_bytes=capacity) if needed > capacity else None


def rows_of_same_work(comparison: Comparison, trial: Trial) -> list[ComparisonRow]:
    """Rows that were tried with the workload and placement of ``trial``, whatever the outcome.

    The micro-batch is ignored for rows that are each at their own largest one.
    """
    workload_and_placement = (_work(trial), trial.placement)
    rows = []
    for row in comparison.results:
        tried = next((run.record for run in row.summaries if run.record.outcome.status not in _NEVER_TRIED), None)
        if tried is not None and (_work(tried.trial), tried.trial.placement) == workload_and_placement:
            rows.append(row)
    return rows


def _work(trial: Trial) -> Workload:
    work = trial.workload
    return replace(work, batch_size=1) if work.batch_policy == "largest" else work


def pool_of(run: TrialRecord) -> Pool:
    """Which memory a run was out of."""
    if run.trial.placement.accelerator == "cpu":
        return "both"
    return "host" if run.outcome.status == schema.OOM_HOST else "device"


def measured_activations(comparison: Comparison, run: TrialRecord, batch: int) -> int | None:
    """Activation bytes of the fullest rank, from a row that trained the same model, scaled linearly to ``batch``."""
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


# ------------------------------------------------------------------ changes that would fit


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSetup:
    """A configuration that did not fit: its prediction, the predicted changes and the memory there is."""

    prediction: Prediction
    micro_batch_size: int
    checkpointed: bool
    """It ran with activation checkpointing."""
    alternatives: tuple[Alternative, ...]
    """Least intrusive first; without strategies whose layout failed here or left the GPU too full."""
    gpu_limit_bytes: int | None
    """What a change must be predicted to stay under; None if neither the GPU nor the shortage is known."""
    host_limit_bytes: int | None
    trained: frozenset[tuple[int, str, str]] = frozenset()
    """Layouts that trained here with room to spare, with equal workload and placement."""

    def fits(self, change: Alternative, share: float = 1.0) -> bool:
        """Whether the change is predicted to take at most that share of the memory there is."""
        pairs = ((change.gpu_bytes, self.gpu_limit_bytes), (change.host_bytes, self.host_limit_bytes))
        return all(limit is None or size <= share * limit for size, limit in pairs)


def failed_setup(run: TrialRecord, comparison: Comparison, shortage: Shortage) -> FailedSetup | None:
    """The setup of a run that did not fit; None if its record has no complete prediction of the known format."""
    try:
        prediction = Prediction.from_dict(run.trial.prediction or {})
        alternatives = tuple(Alternative(**each) for each in prediction.alternatives)
        sizes = prediction.gpu_bytes, prediction.host_bytes
    except (TypeError, ValueError, AttributeError):
        return None
    sizes_to_check = [prediction.activation_bytes, prediction.checkpointed_activation_bytes]
    sizes_to_check += [size for each in alternatives for size in (each.gpu_bytes, each.host_bytes, each.rank)]
    if not all(size is None or isinstance(size, int) for size in sizes_to_check) or not all(
        isinstance(each.text, str) for each in alternatives
    ):
        return None  # not a file of this program
    if prediction.unknown is not None:  # without the activations nobody knows what would fit
        return None
    rows = rows_of_same_work(comparison, run.trial)
    good = {strategy_layout(row.strategy) for row in rows if row.valid and row.leaves_room}
    bad = {strategy_layout(row.strategy) for row in rows} - good
    device, host = comparison.device_capacity_bytes, comparison.host_capacity_bytes
    on_device = pool_of(run) == "device"
    return FailedSetup(
        prediction=prediction,
        micro_batch_size=_micro_batch(run),
        checkpointed=run.trial.workload.activation_checkpointing,
        alternatives=tuple(each for each in alternatives if not (each.strategy_alone and each.arrangement in bad)),
        gpu_limit_bytes=_limit(sizes[0], device, shortage if on_device else Shortage()),
        host_limit_bytes=_limit(sizes[1], host, Shortage() if on_device else shortage),
        trained=frozenset(good),
    )


def _limit(predicted: int, capacity: int | None, shortage: Shortage) -> int | None:
    """The capacity, or less if the run was short of memory although it was predicted to fit."""
    target = None if shortage.fragmented else shortage.target_bytes
    known = [capacity, None if target is None else predicted - target]
    return min((size for size in known if size is not None), default=None)


def _micro_batch(run: TrialRecord) -> int:
    """Micro-batch of the DeepSpeed configuration, which an override may have changed."""
    size = run.trial.ds_config.get("train_micro_batch_size_per_gpu")
    return size if isinstance(size, int) and size > 0 else run.trial.workload.batch_size


def smallest_fit(case: FailedSetup) -> Alternative | None:
    """The least intrusive change predicted to fit, one with room to spare before a tight one; None without any."""
    if case.gpu_limit_bytes is None and case.host_limit_bytes is None:
        return None
    shares = (TIGHT_FRACTION, 1.0)
    return next((each for share in shares for each in case.alternatives if case.fits(each, share)), None)


def suggest_change(case: FailedSetup, more: str) -> str:
    """The least change predicted to fit with the memory it would take, and what the simplest changes save.

    ``more``: what else to try if no change is predicted to be enough.
    """
    fit = smallest_fit(case)
    if fit is not None:
        text = f"try {describe_change(fit, case)}"
    elif case.alternatives and (case.gpu_limit_bytes or case.host_limit_bytes):
        least = min(case.alternatives, key=lambda each: each.gpu_bytes or each.host_bytes)
        text = f"no change is predicted to be enough, the most is {describe_change(least, case)}; try it with {more}"
    else:
        text = f"try a smaller micro-batch, {more}"
    return "; ".join(filter(None, [text, activation_savings(case)]))


def describe_change(change: Alternative, case: FailedSetup) -> str:
    """``batch size 2 (predicted 60.00 GB per GPU instead of 90.00 GB)``."""
    sizes: Mapping[str, tuple[int, int]] = {
        "per GPU": (change.gpu_bytes, case.prediction.gpu_bytes),
        "of host memory per node": (change.host_bytes, case.prediction.host_bytes),
    }
    differences = [
        f"{format_bytes(new)} {where} instead of {format_bytes(old)}"
        for where, (new, old) in sizes.items()
        if new != old
    ]
    here = "; it trained here" if change.strategy_alone and change.arrangement in case.trained else ""
    return f"{change.text} (predicted {' and '.join(differences) or 'to take the same'}{here})"


def activation_savings(case: FailedSetup) -> str | None:
    """Size of the activations now, with half the micro-batch and with checkpointing; None if unknown."""
    prediction, batch = case.prediction, case.micro_batch_size
    whole, kept = prediction.activation_bytes, prediction.checkpointed_activation_bytes
    if not whole or case.checkpointed or not case.prediction.gpu:
        return None
    ways = [f"{format_bytes(whole * (batch // 2) // batch)} with batch size {batch // 2}"] if batch > 1 else []
    ways += [f"{format_bytes(kept)} with activation checkpointing"] if kept else []
    return f"its activations are {format_bytes(whole)}, {' and '.join(ways)}" if ways else None


def least_intrusive(
    cases: Sequence[tuple[ComparisonRow, FailedSetup]],
) -> tuple[Alternative, ComparisonRow, FailedSetup] | None:
    """The least intrusive of the changes of several rows; None if none is predicted to fit."""
    changes = [(fit, row, case) for row, case in cases if (fit := smallest_fit(case)) is not None]
    return min(changes, key=lambda entry: (entry[0].text.count(", "), entry[0].rank), default=None)
