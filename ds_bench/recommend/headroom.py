"""Room on the card: how much larger a micro-batch a row could take, and what a row needs that is too full."""

from __future__ import annotations

from ..analysis.comparison import Comparison, StrategyResult
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..units import format_bytes, format_percent
from . import remedies
from .changes import case_of
from .rule import COMFORTABLE
from .shortage import Shortage, measured_activations

_LEAVE_FREE = 0.10
"""Fraction of the card that a suggested micro-batch is to leave, for what is not linear in it."""


def larger_batch(row: StrategyResult, comparison: Comparison) -> str | None:
    """The largest doubling of the micro-batch predicted to leave room; None where unknown, or where there is none.

    Only activations grow with it, linearly; they must have been counted for this row. A row at its own largest
    micro-batch has had a larger one tried.
    """
    capacity, fraction = comparison.device_capacity_bytes, row.gpu_fraction
    if capacity is None or fraction is None or fraction >= COMFORTABLE or row.at_largest_batch:
        return None
    run = row.successes[0].record
    batch = run.ranks[0].micro_batch_size
    each = measured_activations(comparison, run, batch)
    if not each:
        return None
    factor = 1
    while fraction * capacity + each * (2 * factor - 1) <= (1 - _LEAVE_FREE) * capacity:
        factor *= 2
    if factor == 1:
        return None
    share = fraction + each * (factor - 1) / capacity
    grown = f"about {format_percent(share, digits=0)} of the card by {row.label}'s ledger"
    return f"there is room for more: try micro-batch {batch * factor} ({grown})"


def too_full(row: StrategyResult, comparison: Comparison) -> str | None:
    """What is predicted to bring a row that trained with more than ``NEAR_CAPACITY`` of the card back under that.

    None where its share of the card or the card's size is not known, as on the CPU accelerator.
    """
    capacity = comparison.device_capacity_bytes
    if row.gpu_fraction is None or capacity is None:
        return None
    excess = int((row.gpu_fraction - NEAR_CAPACITY) * capacity)
    case = case_of(row.successes[0].record, comparison, Shortage(requested_bytes=excess, free_bytes=0))
    head = f"{row.label} is {format_bytes(excess)} over {format_percent(NEAR_CAPACITY, digits=0)} of the card"
    return f"{head}: {remedies.suggested(case)}"
