"""What would make a configuration fit that ran out of memory: the changes that its own prediction was made with.

No arithmetic of memory is here: ``prediction.fitplan`` predicted each change when the trial was planned, and the record
carries the answers. It predicts, it does not promise. Which row to use is ``recommend``'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..analysis.comparison import Comparison, StrategyResult
from ..prediction.memory import TIGHT_FRACTION, Prediction
from ..prediction.what_if import Alternative
from ..records.schema import TrialRecord
from ..units import format_bytes
from .shortage import Shortage, alike, arrangement, pool_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration that did not fit, what it was predicted to take, and what there is."""

    prediction: Prediction
    micro_batch_size: int
    checkpointed: bool
    """It ran with activation checkpointing."""
    alternatives: tuple[Alternative, ...]
    """Gentlest first; those without the arrangements that failed here or left the card too little room."""
    gpu_limit_bytes: int | None
    """What a change must be predicted to stay under; None where neither a card nor the shortage tells."""
    host_limit_bytes: int | None
    trained: frozenset[tuple[int, str, str]] = frozenset()
    """Arrangements that trained here with room to spare, of the same work in the same place."""

    def fits(self, change: Alternative, share: float = 1.0) -> bool:
        """Whether it is predicted to take no more than that share of what there is."""
        pairs = ((change.gpu_bytes, self.gpu_limit_bytes), (change.host_bytes, self.host_limit_bytes))
        return all(limit is None or size <= share * limit for size, limit in pairs)


def case_of(run: TrialRecord, comparison: Comparison, shortage: Shortage) -> Case | None:
    """The case of a run that did not fit; None where its record has no whole prediction of this form."""
    try:
        prediction = Prediction.from_dict(run.trial.prediction or {})
        found = tuple(Alternative(**each) for each in prediction.alternatives)
        sizes = prediction.gpu_bytes, prediction.host_bytes
    except (TypeError, ValueError, AttributeError):
        return None
    told = [prediction.activation_bytes, prediction.checkpointed_activation_bytes]
    told += [size for each in found for size in (each.gpu_bytes, each.host_bytes, each.rank)]
    if not all(size is None or isinstance(size, int) for size in told) or not all(
        isinstance(e.text, str) for e in found
    ):
        return None  # a file that somebody else wrote
    if prediction.unknown is not None:  # what would fit is not known without the activations
        return None
    rows = alike(comparison, run.trial)
    good = {arrangement(row.strategy) for row in rows if row.sound and row.leaves_room}
    bad = {arrangement(row.strategy) for row in rows} - good
    device, host = comparison.device_capacity_bytes, comparison.host_capacity_bytes
    on_device = pool_of(run) == "device"
    return Case(
        prediction=prediction,
        micro_batch_size=_micro_batch(run),
        checkpointed=run.trial.workload.activation_checkpointing,
        alternatives=tuple(each for each in found if not (each.strategy_alone and each.arrangement in bad)),
        gpu_limit_bytes=_limit(sizes[0], device, shortage if on_device else Shortage()),
        host_limit_bytes=_limit(sizes[1], host, Shortage() if on_device else shortage),
        trained=frozenset(good),
    )


def _limit(predicted: int, capacity: int | None, shortage: Shortage) -> int | None:
    """The capacity, or less where the run fell short of memory although it was predicted to fit."""
    target = None if shortage.fragmented else shortage.target_bytes
    known = [capacity, None if target is None else predicted - target]
    return min((size for size in known if size is not None), default=None)


def _micro_batch(run: TrialRecord) -> int:
    """As DeepSpeed was told, which an edit of the configuration may have changed."""
    told = run.trial.ds_config.get("train_micro_batch_size_per_gpu")
    return told if isinstance(told, int) and told > 0 else run.trial.workload.batch_size


def smallest_fit(case: Case) -> Alternative | None:
    """The gentlest change that is predicted to fit, one with room to spare before one that is tight; None without."""
    if case.gpu_limit_bytes is None and case.host_limit_bytes is None:
        return None
    shares = (TIGHT_FRACTION, 1.0)
    return next((each for share in shares for each in case.alternatives if case.fits(each, share)), None)


def suggestion(case: Case, more: str) -> str:
    """The smallest change that is predicted to fit, what it would take, and what the simplest changes save.

    ``more``: what else to try where no change is predicted to be enough.
    """
    fit = smallest_fit(case)
    if fit is not None:
        text = f"try {described(fit, case)}"
    elif case.alternatives and (case.gpu_limit_bytes or case.host_limit_bytes):
        least = min(case.alternatives, key=lambda each: each.gpu_bytes or each.host_bytes)
        text = f"no change is predicted to be enough, the most is {described(least, case)}; try it with {more}"
    else:
        text = f"try a smaller micro-batch, {more}"
    return "; ".join(filter(None, [text, activation_savings(case)]))


def described(change: Alternative, case: Case) -> str:
    """``batch size 2 (predicted 60.00 GB per GPU instead of 90.00 GB)``."""
    sizes: Mapping[str, tuple[int, int]] = {
        "per GPU": (change.gpu_bytes, case.prediction.gpu_bytes),
        "of host memory per node": (change.host_bytes, case.prediction.host_bytes),
    }
    told = [
        f"{format_bytes(new)} {where} instead of {format_bytes(old)}"
        for where, (new, old) in sizes.items()
        if new != old
    ]
    here = "; it trained here" if change.strategy_alone and change.arrangement in case.trained else ""
    return f"{change.text} (predicted {' and '.join(told) or 'to take the same'}{here})"


def activation_savings(case: Case) -> str | None:
    """What the activations are and what the two changes make of them that touch nothing else; None where unknown."""
    prediction, batch = case.prediction, case.micro_batch_size
    whole, kept = prediction.activation_bytes, prediction.checkpointed_activation_bytes
    if not whole or case.checkpointed or not case.prediction.gpu:
        return None
    ways = [f"{format_bytes(whole * (batch // 2) // batch)} with batch size {batch // 2}"] if batch > 1 else []
    ways += [f"{format_bytes(kept)} with activation checkpointing"] if kept else []
    return f"its activations are {format_bytes(whole)}, {' and '.join(ways)}" if ways else None


def gentlest(cases: Sequence[tuple[StrategyResult, Case]]) -> tuple[Alternative, StrategyResult, Case] | None:
    """Of the smallest changes of several rows the one that changes least; None where none is predicted to fit."""
    found = [(fit, row, case) for row, case in cases if (fit := smallest_fit(case)) is not None]
    return min(found, key=lambda entry: (entry[0].text.count(", "), entry[0].rank), default=None)
