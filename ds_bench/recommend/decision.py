"""The rule by which a row is chosen, on plain numbers, and which rows it may choose; ``docs/choosing.md`` describes it.

Rows that do not compare with the others, or did not train as requested, are never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from ..analysis.comparison import Comparison, ComparisonRow, ratio_between
from ..analysis.intervals import FEWEST_RUNS, RatioInterval, normal_range_quantile
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..config import deepspeed_config
from ..config.caveats import CaveatKind
from ..config.deepspeed_config import paths_of
from ..config.options import GOALS
from ..config.spec import DEVICES, SAME_TRAINING_FIELDS, SEARCH_ACCURACY, Trial, Workload
from ..errors import UsageError
from ..records import schema
from .words import Fact

RAN_OUT = (schema.OOM, schema.OOM_HOST, schema.OOM_DISK)

COMFORTABLE_FRACTION = 0.60
"""Fraction of the memory below which the fastest row is kept."""
MIN_SPEED_FRACTION = 0.90
"""Fraction of the fastest row's throughput at which the rule starts to prefer less memory."""
NEGLIGIBLE = 0.03
"""A difference that is not worth anything, however certain it is: in speed between a row that offloads and one that
offloads less, and in memory between any two rows. It does not estimate noise."""
UNTESTED_NOISE = 0.05
"""Assumed standard deviation between the runs of a row, as a fraction, where too few runs show it."""


def simplicity(layout: tuple[int, str, str]) -> tuple[int, int, int]:
    """Sorts the simplest configuration first: no offload before offload, then lower stages."""
    stage, *devices = layout
    optimizer, params = (DEVICES.index(device) for device in devices)
    return max(optimizer, params), optimizer + params, stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The values of one row that trained, which the rule reads."""

    label: str
    key: str = ""
    """Key of the row in its comparison; the rule does not read it."""
    tokens_per_second: float
    """Throughput of the whole job."""
    memory_bytes: int | None
    """Peak on the fullest device; on the CPU accelerator of all ranks of a node. None if not measured."""
    fraction: float | None
    """Fraction of the card that was reserved, or of the host's memory; None if the capacity is not known."""
    offload_level: tuple[str, str] = ("none", "none")
    """Offload devices of optimizer and parameters. Less memory never leads to a row of another level."""
    stage: int = 0
    changed_keys: int = 0
    """Number of values in the DeepSpeed configuration that are not the strategy's own."""
    runs: int = 1
    """Number of its runs that succeeded."""
    step_spread: float = 0.0
    """Relative standard deviation of its steps, or between its runs, whichever is more."""
    fills_memory: bool = False
    """The micro-batch or sequence was chosen to fill the memory, so how full that is says nothing about the row."""
    optimizer: str = ""
    """Class of the optimizer on the CPU accelerator, else empty: different classes are not compared by speed."""

    @property
    def fits(self) -> bool:
        """True if the row used at most 95 % of the memory, as far as is known.

        Rows at their own largest micro-batch or longest sequence are exempt, because they fill the memory on purpose.
        """
        return self.fills_memory or self.fraction is None or self.fraction <= NEAR_CAPACITY

    @property
    def comfortable(self) -> bool:
        """True if less memory would gain nothing: under 60 % is used, or the memory is filled on purpose."""
        return self.fills_memory or self.fraction is None or self.fraction < COMFORTABLE_FRACTION

    @property
    def complexity(self) -> tuple[int, int, int, int]:
        """Sorts the simplest row first: no offload before offload, then lower stages, then fewer changed keys."""
        return *simplicity((self.stage, *self.offload_level)), self.changed_keys


IntervalOf = Callable[[Candidate, Candidate], RatioInterval | None]
"""The confidence interval of the ratio of two rows' throughputs; None if they have too few runs."""


def no_interval(_row: Candidate, _other: Candidate) -> None:
    """The interval of rows with fewer than three runs each: None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The measured speeds of the rows that are compared with each other."""

    candidates: Sequence[Candidate]
    interval_of: IntervalOf = no_interval

    def differ(self, row: Candidate, other: Candidate) -> bool:
        """Whether the measurements show which of the two rows is faster.

        From three runs on the interval of their ratio must exclude 1; ``comparison.ratio_between`` corrects it for the
        number of rows, as chance too makes a row the fastest. With fewer runs the lead must exceed ``chance_lead``.
        """
        interval = self.interval_of(row, other)
        if interval is not None:
            return interval.distinguishable
        # Logarithms, so that it does not matter which of the two rows is named first.
        return abs(math.log(row.tokens_per_second / other.tokens_per_second)) > math.log1p(self.chance_lead(row, other))

    def chance_lead(self, row: Candidate, other: Candidate) -> float:
        """Return the lead, as a fraction, that two rows with too few runs to test may show by chance.

        The fastest of equal rows leads the slowest by more in ``ERROR_RATE`` of comparisons if their runs vary by
        ``UNTESTED_NOISE``. Source: C. Y. Kramer, "Extension of multiple range tests to group means with unequal
        numbers of replications", Biometrics 12 (1956). It is at least the spread of the steps.
        """
        noise = UNTESTED_NOISE * math.sqrt((1 / row.runs + 1 / other.runs) / 2)
        chance = math.expm1(normal_range_quantile(max(2, len(self.candidates))) * noise)
        return max(chance, math.hypot(row.step_spread, other.step_spread))

    def undecided(self, row: Candidate, other: Candidate) -> bool:
        """Whether it matters which of two tied rows is faster, and the measurements do not show it.

        With too few runs to test it always does. With equal offload it matters beyond the speed that memory is worth
        (``MIN_SPEED_FRACTION``). With different offload one row costs host memory or a disk: the interval must exclude
        even a ``NEGLIGIBLE`` difference.
        """
        interval = self.interval_of(row, other)
        accepted = 1 - MIN_SPEED_FRACTION if row.offload_level == other.offload_level else NEGLIGIBLE
        return interval is None or interval.high > 1 + accepted or interval.low * (1 + accepted) < 1

    def with_optimizer_of(self, row: Candidate, rows: Sequence[Candidate] | None = None) -> list[Candidate]:
        """Return the ``rows`` (None: all) with the optimizer of ``row``: only these are compared with it by speed."""
        return [other for other in (self.candidates if rows is None else rows) if other.optimizer == row.optimizer]

    def tied(self, best: Candidate, rows: Sequence[Candidate]) -> list[Candidate]:
        """Return the ``rows`` tied with ``best`` by speed, including itself if it is among them.

        Rows within ``NEGLIGIBLE`` of it that offload less and leave room count too: if device memory is not short, so
        small a lead is not worth host memory or a disk.
        """
        return [
            row
            for row in rows
            if row == best
            or not self.differ(best, row)
            # The first two parts of the complexity are the offload devices.
            or (
                row.complexity[:2] < best.complexity[:2]
                and row.comfortable
                and best.tokens_per_second <= (1 + NEGLIGIBLE) * row.tokens_per_second
            )
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The chosen row, and the rows tied with the fastest."""

    speeds: Speeds
    """Of the rows that fit."""
    choice: Candidate
    fastest: Candidate
    """The row of the highest measured speed."""
    simplest_tied: Candidate
    """The simplest of the rows tied with the fastest, which the rule considers in its place."""
    tied: tuple[Candidate, ...] = ()
    """Rows that tie with the fastest (``Speeds.tied``), itself included; empty if no other does."""
    undecided: tuple[Candidate, ...] = ()
    """Of these, without the choice: rows that may be faster, which would matter (``Speeds.undecided``)."""

    @property
    def fewest_runs(self) -> int:
        """Of the rows between which it is open which is faster."""
        return min(row.runs for row in (self.choice, *self.undecided))


def decide(
    candidates: Sequence[Candidate], goal: str = "balanced", interval_of: IntervalOf = no_interval
) -> Decision | None:
    """The row to use and how certain that is; None if no row fits.

    Raises UsageError for a goal that is none of ``GOALS``.
    """
    if goal not in _RULES:
        raise UsageError(f"goal {goal!r} is not known", remedy=f"one of {', '.join(GOALS)}")
    fitting = [candidate for candidate in candidates if candidate.fits]
    return _RULES[goal](Speeds(candidates=fitting, interval_of=interval_of)) if fitting else None


def fastest(candidates: Sequence[Candidate]) -> Candidate:
    """The most tokens per second; of equals the one with less memory."""
    return min(candidates, key=lambda c: (-c.tokens_per_second, _memory(c)))


def least_memory(candidates: Sequence[Candidate]) -> Candidate:
    """The least memory; of equals the faster. A row whose memory is not known comes last."""
    return min(candidates, key=lambda c: (_memory(c), -c.tokens_per_second))


def nearly_least_memory(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Rows whose memory is within ``NEGLIGIBLE`` of the least."""
    least = _memory(least_memory(candidates))
    return [candidate for candidate in candidates if _memory(candidate) <= least * (1 + NEGLIGIBLE)]


def same_offload_nearly_as_fast(best: Candidate, speeds: Speeds) -> list[Candidate]:
    """Rows at the offload level of ``best`` that reach 90 % of its throughput or are tied with it by enough runs."""
    return [
        row
        for row in speeds.with_optimizer_of(best)
        if row.offload_level == best.offload_level
        and (
            row.tokens_per_second / best.tokens_per_second >= MIN_SPEED_FRACTION
            or (min(row.runs, best.runs) >= FEWEST_RUNS and not speeds.differ(best, row))
        )
    ]


def _simplest(candidates: Sequence[Candidate]) -> Candidate:
    # Of equally simple rows the leaner one, but the faster one if too few ran to show a tie.
    key = lambda c: (c.complexity, c.runs >= FEWEST_RUNS and _memory(c), -c.tokens_per_second, _memory(c))  # noqa: E731
    return min(candidates, key=key)


def decide_for_speed(speeds: Speeds, rows: Sequence[Candidate] | None = None) -> Decision:
    """The simplest of the ``rows`` (None: all) tied with the fastest of them.

    Rows with another optimizer than the simplest row take no part, as their speed is the optimizer's too.
    """
    rows = speeds.candidates if rows is None else rows
    # Of the simplest row, not of the fastest: CPU Adam by itself can make an offload row the fastest on CPU ranks.
    compared = speeds.with_optimizer_of(_simplest(rows), rows)
    best = fastest(compared)
    tied = speeds.tied(best, compared)
    return _decision(speeds, _simplest(tied), best, tied)


def _decide_for_memory(speeds: Speeds, rows: Sequence[Candidate] | None = None) -> Decision:
    return decide_for_speed(speeds, nearly_least_memory(speeds.candidates if rows is None else rows))


def _decide_balanced(speeds: Speeds) -> Decision:
    """The choice for speed if it is comfortable, else that for memory among rows nearly as fast that offload alike."""
    decision = decide_for_speed(speeds)
    if decision.simplest_tied.comfortable:
        return decision
    nearly_as_fast = same_offload_nearly_as_fast(decision.simplest_tied, speeds)
    choice = _decide_for_memory(speeds, nearly_as_fast).choice
    # tied is empty where no other row ties with the fastest.
    return _decision(speeds, choice, decision.fastest, decision.tied or (decision.fastest,))


def _decision(speeds: Speeds, choice: Candidate, best: Candidate, tied: Sequence[Candidate]) -> Decision:
    simplest = _simplest(tied)
    # A choice for its memory may be no tied row; the others are then held against the row that it replaces.
    reference = choice if choice in tied else simplest
    undecided = (row for row in tied if row not in (choice, reference) and speeds.undecided(row, reference))
    return Decision(
        speeds=speeds,
        choice=choice,
        fastest=best,
        simplest_tied=simplest,
        tied=tuple(tied) if len(tied) > 1 else (),
        undecided=tuple(undecided),
    )


def _memory(candidate: Candidate) -> float:
    return float("inf") if candidate.memory_bytes is None else candidate.memory_bytes


_RULES: Mapping[str, Callable[[Speeds], Decision]] = {
    "speed": decide_for_speed,
    "balanced": _decide_balanced,
    "memory": _decide_for_memory,
}


# ------------------------------------------------------------------ which rows may be chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerms:
    """Names of the memory that the rule compares, for sentences."""

    memory: str = "device memory"
    capacity: str = "the card"


ON_DEVICE = MemoryTerms()
ON_HOST = MemoryTerms(memory="host memory", capacity="the host's memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class EligibleRows:
    """The rows with numbers, by what may be done with them."""

    terms: MemoryTerms
    candidates: Sequence[Candidate]
    """Eligible rows, and rows that are too full, which the rule drops."""
    references: Sequence[Candidate]
    """Rows of torch's own engines: not a DeepSpeed configuration, so never chosen."""
    incomparable: Sequence[ComparisonRow]
    """Rows that do not compare with the others."""
    left_out: Mapping[str, Fact]
    """Key of a row that is left out → why."""
    labels: Mapping[str, str]
    """Key of every row → its label."""
    too_full: frozenset[str]
    """Keys of those that leave too little memory."""


def eligible_rows(comparison: Comparison) -> EligibleRows:
    """Split the rows into those that may be chosen and those that may not."""
    terms = ON_HOST if on_cpu(comparison) else ON_DEVICE
    candidates: list[Candidate] = []
    references: list[Candidate] = []
    incomparable: list[ComparisonRow] = []
    left_out: dict[str, Fact] = {}
    too_full = set()
    for row in comparison.rows:
        if not row.succeeded or row.tokens_per_second is None:
            continue
        if row.differences:
            incomparable.append(row)
        elif (reason := reason_not_eligible(row)) is not None:
            left_out[row.key] = reason
        elif row.configuration.is_reference:
            references.append(candidate_of(row, comparison, terms))
        else:
            candidates.append(candidate := candidate_of(row, comparison, terms))
            # It stays among the candidates, so that what it would give can be reported; the rule drops it.
            if not candidate.fits:
                left_out[row.key] = Fact("too_full", {"fraction": candidate.fraction, "capacity": terms.capacity})
                too_full.add(row.key)
    # Where the longest sequence was searched for, only rows that train it count, to the accuracy of the search.
    # Without a search all lengths are 0, and no row is left out.
    lengths = {each.key: comparison.row(each.key).longest_seq_length or 0 for each in candidates}
    enough = max(lengths.values(), default=0) * (1 - SEARCH_ACCURACY)
    short = {key: Fact("too_short", {"tokens": length}) for key, length in lengths.items() if length < enough}
    return EligibleRows(
        terms=terms,
        candidates=[each for each in candidates if each.key not in short],
        references=references,
        incomparable=incomparable,
        left_out={**left_out, **short},
        labels={row.key: row.label for row in comparison.rows},
        too_full=frozenset(too_full - short.keys()),
    )


def on_cpu(comparison: Comparison) -> bool:
    """Whether every row ran on the CPU accelerator."""
    return bool(comparison.rows) and all(row.on_cpu for row in comparison.rows)


def reason_not_eligible(row: ComparisonRow) -> Fact | None:
    """Return why a row with numbers cannot be chosen, whatever its memory and speed; None if nothing rules it out."""
    if row.invalid_reason is not None:
        return Fact("text", {"text": row.invalid_reason})
    if count := sum(run.outcome.status in RAN_OUT for run in row.runs):
        return Fact("ran_out", {"count": count, "runs": len(row.runs)})
    other_training = (each.text for each in row.caveats if each.kind is CaveatKind.OTHER_TRAINING)
    return next((Fact("text", {"text": text}) for text in other_training), None)


def candidate_of(row: ComparisonRow, comparison: Comparison, terms: MemoryTerms) -> Candidate:
    """The values of a row that trained, of the memory that ``terms`` names."""
    on_host, capacity = terms is ON_HOST, comparison.host_capacity_bytes
    host_fraction = row.host_peak_bytes / capacity if row.host_peak_bytes is not None and capacity else None
    # Of the run that varied most, or between the runs if that is more.
    spreads = [(row.step_seconds_std, row.mean_step_seconds)]
    spreads += [(run.row.std_step_time_ms, run.row.avg_step_time_ms) for run in row.successes]
    return Candidate(
        label=row.label,
        key=row.key,
        tokens_per_second=row.tokens_per_second or 0.0,
        memory_bytes=row.host_peak_bytes if on_host else row.gpu_peak_bytes,
        fraction=host_fraction if on_host else row.gpu_fraction,
        offload_level=row.configuration.layout[1:],
        stage=row.configuration.stage,
        changed_keys=_count_changes(row.trial),
        runs=len(row.successes),
        step_spread=max((std / mean for std, mean in spreads if std and mean), default=0.0),
        fills_memory=row.fills_memory,
        optimizer=row.optimizer or "" if on_host else "",
    )


def _count_changes(trial: Trial) -> int:
    """Count changed keys, fields of the workload that change how a step is computed, and variables."""
    changes = deepspeed_config.changes_of(trial.ds_config, trial.configuration, trial.workload, trial.placement)
    defaults = {each.name: each.default for each in fields(Workload)}
    changed = [name for name in SAME_TRAINING_FIELDS if getattr(trial.workload, name) != defaults[name]]
    return len(list(paths_of(changes))) + len(changed) + len(trial.configuration.variables)


def intervals(comparison: Comparison) -> IntervalOf:
    """The intervals between the candidates of a comparison."""
    return lambda row, other: ratio_between(comparison.row(row.key), comparison.row(other.key))
