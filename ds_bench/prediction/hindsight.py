"""Prediction against measurement: how far a trial's predicted memory was from what it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..records.schema import TrialRecord
from .memory import Prediction

MISS_FRACTION = 0.10
"""A prediction further off than this deserves a caveat."""


def of_record(record: TrialRecord) -> tuple[float | None, float | None]:
    """``predicted_over_measured`` and ``predicted_over_ledger`` of the prediction that a record carries.

    None for both without a prediction, or with one of another version's form.
    """
    if record.trial.prediction is None:
        return None, None
    try:
        prediction = Prediction.from_dict(record.trial.prediction)
        return predicted_over_measured(prediction, record), predicted_over_ledger(prediction, record)
    except (TypeError, AttributeError):
        return None, None


def predicted_over_measured(prediction: Prediction, record: TrialRecord) -> float | None:
    """Predicted GPU memory to the allocator's peak in the training steps, both on the fullest rank.

    The overhead that is assumed outside the allocator is left out. None without predicted activations, and where no
    GPU's peak was measured: what the processes of the CPU accelerator take of host memory is not predicted to the same
    meaning (untouched buffers are not resident, and forked ranks share libraries), see ``predicted_over_ledger``.
    """
    if prediction.unknown is not None:
        return None
    peak = max((rank.gpu_peak_bytes for rank in record.ranks if rank.gpu_peak_bytes), default=None)
    return (prediction.gpu_bytes - prediction.gpu.get("overhead", 0)) / peak if peak else None


def predicted_over_ledger(prediction: Prediction, record: TrialRecord) -> float | None:
    """Predicted ledger to the ledger of the fullest rank: all tiers, the category ``other`` left out.

    Bytes of tensors on either side, resident or not; without activations where they are not predicted. None where no
    ledger was taken.
    """
    left_out = ("other",) if prediction.unknown is None else ("other", "activations")
    counted = max((_total(rank.ledger, left_out) for rank in record.ranks), default=0)
    return _total(prediction.ledger, left_out) / counted if counted else None


def outside_allocator(record: TrialRecord) -> int | None:
    """Bytes in use on the card beyond what torch's allocator had reserved, after the last measured step.

    CUDA's context, NCCL, and any other process on the card: what ``overhead`` of a prediction assumes, if there is no
    other process. Of the rank with the most; None without a GPU.
    """
    sizes = [
        max(0, rank.gpu_device_used_bytes - rank.gpu_reserved_bytes)
        for rank in record.ranks
        if rank.gpu_device_used_bytes is not None and rank.gpu_reserved_bytes is not None
    ]
    return max(sizes, default=None)


def _total(ledger: Mapping[str, Mapping[str, int]], left_out: Sequence[str]) -> int:
    return sum(size for row in ledger.values() for name, size in row.items() if name not in left_out)


def is_miss(ratio: float) -> bool:
    """Whether the prediction was more than 10 % off."""
    return abs(ratio - 1) > MISS_FRACTION
