"""Which rows of a comparison may be recommended, as candidates of the rule in ``decision``.

Rows that do not compare with the others, or did not train as requested, are never recommended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from ..analysis.comparison import Comparison, ComparisonRow, ratio_between
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..config import deepspeed_config
from ..config.caveats import CaveatKind
from ..config.deepspeed_config import paths_of
from ..config.spec import SAME_TRAINING_FIELDS, SEARCH_ACCURACY, Trial, Workload
from ..units import format_count, format_percent
from . import remedies
from .decision import Candidate, IntervalOf


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerms:
    """Names of the memory that the rule compares, for sentences."""

    memory: str = "device memory"
    capacity: str = "the card"


ON_DEVICE = MemoryTerms()
ON_HOST = MemoryTerms(memory="host memory", capacity="the host's memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A row with numbers that is no choice."""

    row: ComparisonRow
    reason: str
    too_full: Candidate | None = None
    """Its values if the reason is that it leaves too little memory; None for any other reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EligibleRows:
    """The rows with numbers, by what may be done with them."""

    terms: MemoryTerms
    candidates: Sequence[Candidate]
    """Eligible rows, and rows that are too full, which the rule drops."""
    references: Sequence[Candidate]
    """Rows of torch's own engines, which are no DeepSpeed configuration and so no choice."""
    incomparable: Sequence[ComparisonRow]
    """Rows that do not compare with the others."""
    left_out: Mapping[str, LeftOut]
    """Rows that are left out for another reason, by their keys."""


def eligible_rows(comparison: Comparison) -> EligibleRows:
    """Tells the rows that may be chosen from those that may not."""
    terms = ON_HOST if on_cpu(comparison) else ON_DEVICE
    candidates: list[Candidate] = []
    references: list[Candidate] = []
    incomparable: list[ComparisonRow] = []
    left_out: dict[str, LeftOut] = {}
    for row in comparison.rows:
        if not row.succeeded or row.tokens_per_second is None:
            continue
        if row.differences:
            incomparable.append(row)
        elif reason := reason_not_eligible(row):
            left_out[row.key] = LeftOut(row=row, reason=reason)
        elif row.configuration.is_reference:
            references.append(candidate_of(row, comparison, terms))
        else:
            candidates.append(candidate := candidate_of(row, comparison, terms))
            # It stays among the candidates, so that the cost of leaving it out can be told; the rule drops it.
            if not candidate.fits:
                share, limit = format_percent(candidate.fraction), format_percent(NEAR_CAPACITY, digits=0)
                reason = f"{share} of {terms.capacity}, above {limit}"
                left_out[row.key] = LeftOut(row=row, reason=reason, too_full=candidate)
    # Where the longest sequence was searched for, only rows that train it count, to the accuracy of the search.
    # Without a search all lengths are 0, and no row is left out.
    lengths = {each.key: comparison.row(each.key).longest_seq_length or 0 for each in candidates}
    enough = max(lengths.values(), default=0) * (1 - SEARCH_ACCURACY)
    for short in (each for each in candidates if lengths[each.key] < enough):
        reason = f"it trains sequences of {format_count(lengths[short.key])} tokens at most"
        left_out[short.key] = LeftOut(row=comparison.row(short.key), reason=reason)
    return EligibleRows(
        terms=terms,
        candidates=[each for each in candidates if lengths[each.key] >= enough],
        references=references,
        incomparable=incomparable,
        left_out=left_out,
    )


def on_cpu(comparison: Comparison) -> bool:
    """Whether every row ran on the CPU accelerator."""
    return bool(comparison.rows) and all(row.on_cpu for row in comparison.rows)


def reason_not_eligible(row: ComparisonRow) -> str | None:
    """Return why a row with numbers is no choice, whatever its memory and speed; None if nothing rules it out."""
    count = sum(run.outcome.status in remedies.RAN_OUT for run in row.runs)
    ran_out = f"{count} of its {len(row.runs)} runs ran out of memory or disk" if count else None
    other_training = (each.text for each in row.caveats if each.kind is CaveatKind.OTHER_TRAINING)
    return row.invalid_reason or ran_out or next(other_training, None)


def candidate_of(row: ComparisonRow, comparison: Comparison, terms: MemoryTerms) -> Candidate:
    """The values of a row that trained, of the memory that ``terms`` names."""
    on_host, capacity = terms is ON_HOST, comparison.host_capacity_bytes
    host_fraction = row.host_peak_bytes / capacity if row.host_peak_bytes is not None and capacity else None
    trial = row.trial
    changes = deepspeed_config.changes_of(trial.ds_config, trial.configuration, trial.workload, trial.placement)
    return Candidate(
        label=row.label,
        key=row.key,
        tokens_per_second=row.tokens_per_second or 0.0,
        memory_bytes=row.host_peak_bytes if on_host else row.gpu_peak_bytes,
        fraction=host_fraction if on_host else row.gpu_fraction,
        offload_level=row.configuration.layout[1:],
        stage=row.configuration.stage,
        changed_keys=len(list(paths_of(changes))) + _count_workload_changes(trial),
        runs=len(row.successes),
        step_spread=_step_spread(row),
        fills_memory=row.fills_memory,
        optimizer=row.optimizer or "" if on_host else "",
    )


def _count_workload_changes(trial: Trial) -> int:
    """Number of ways in which a step is computed otherwise than by default, and of environment variables."""
    defaults = {each.name: each.default for each in fields(Workload)}
    changed = [name for name in SAME_TRAINING_FIELDS if getattr(trial.workload, name) != defaults[name]]
    return len(changed) + len(trial.configuration.variables)


def _step_spread(row: ComparisonRow) -> float:
    """Relative standard deviation of the steps of the run that varied most, or between the runs if that is more."""
    pairs = [
        (row.step_seconds_std, row.mean_step_seconds),
        *((run.row.std_step_time_ms, run.row.avg_step_time_ms) for run in row.successes),
    ]
    return max((std / mean for std, mean in pairs if std and mean), default=0.0)


def intervals(comparison: Comparison) -> IntervalOf:
    """The intervals between the candidates of a comparison."""
    return lambda row, other: ratio_between(comparison.row(row.key), comparison.row(other.key))
