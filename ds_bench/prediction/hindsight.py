"""Prediction against measurement: how far a trial's predicted memory was from what it took."""

from __future__ import annotations

from collections.abc import Mapping

from ..record import TrialRecord
from .memory import Prediction

MISS_FRACTION = 0.10
"""A prediction further off than this deserves a caveat."""


def of_record(record: TrialRecord) -> float | None:
    """The same of the prediction that a record carries; None without one, or for one of another version's form."""
    if record.trial.prediction is None:
        return None
    try:
        return predicted_over_measured(Prediction.from_dict(record.trial.prediction), record)
    except (TypeError, AttributeError):
        return None


def predicted_over_measured(prediction: Prediction, record: TrialRecord) -> float | None:
    """1.0 for a perfect prediction; None where nothing comparable was measured.

    On GPUs against the allocator's peak in the training steps on the fullest rank, the assumed overhead outside the
    allocator left out. On the CPU accelerator against the ledger of the fullest rank, all tiers, ``other`` left out.
    """
    peaks = [rank.gpu_peak_bytes for rank in record.ranks if rank.gpu_peak_bytes]
    if peaks:
        return (prediction.gpu_bytes - prediction.gpu.get("overhead", 0)) / max(peaks)
    measured = max((_total(rank.ledger) for rank in record.ranks), default=0)
    return _total(prediction.ledger) / measured if measured else None


def _total(ledger: Mapping[str, Mapping[str, int]]) -> int:
    rows = ledger.values()
    return sum(size for row in rows for name, size in row.items() if name != "other")


def is_miss(ratio: float | None) -> bool:
    """Whether the prediction was more than 10 % off; not where there is nothing to compare."""
    return ratio is not None and abs(ratio - 1) > MISS_FRACTION
