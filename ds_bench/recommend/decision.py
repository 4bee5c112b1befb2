"""Which row to choose: the rule of ``docs/reading.md`` on plain numbers, and which rows it may choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from ..analysis.comparison import Comparison, ComparisonRow, ratio_between
from ..analysis.intervals import FEWEST_RUNS, RatioInterval, normal_range_quantile
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..config import deepspeed_config
from ..config.caveat_texts import CPU_KINDS, CaveatKind, has_kind
from ..config.deepspeed_config import paths_of
from ..config.options import GOALS
from ..config.spec import SAME_TRAINING_FIELDS, SEARCH_ACCURACY, Workload
from ..config.strategies import simplicity
from ..errors import UsageError
from ..records import schema
from .message_templates import Fact

RAN_OUT = (schema.OOM, schema.OOM_HOST, schema.OOM_DISK)

COMFORTABLE_FRACTION = 0.60
"""Fraction of the memory below which the fastest row is kept."""
MIN_SPEED_FRACTION = 0.90
"""Fraction of the fastest row's throughput at which the rule starts to prefer less memory."""
NEGLIGIBLE = 0.03
"""A difference too small to matter, however certain: in speed between a row that offloads and one that offloads less,
and in memory between any two rows. It is not an estimate of noise."""
UNTESTED_NOISE = 0.05
"""Assumed relative standard deviation between the runs of a row that has too few runs to measure it."""


# ------------------------------------------------------------------ the rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The numbers of one row that trained, as the rule reads them."""

    label: str
    key: str = ""
    """Key of the row in its comparison; the rule does not read it."""
    tokens_per_second: float
    """Throughput of the whole job."""
    memory_bytes: int | None
    """Peak of the fullest device; on the CPU accelerator, of all ranks of a node. None if not measured."""
    fraction: float | None
    """Fraction of the card reserved, or of the host's memory used; None if the capacity is unknown."""
    offload_level: tuple[str, str] = ("none", "none")
    """Offload devices of optimizer and parameters. The rule never changes this level to save memory."""
    stage: int = 0
    changed_keys: int = 0
    """Number of settings that are not the strategy's own."""
    runs: int = 1
    """Number of successful runs."""
    step_spread: float = 0.0
    """Relative standard deviation of its steps, or between its runs if that is larger."""
    fills_memory: bool = False
    """The micro-batch or sequence was chosen to fill the memory, so a full card says nothing about the row."""
    optimizer: str = ""
    """Class of the optimizer on the CPU accelerator, else empty. Only rows of one class are compared by speed."""

    @property
    def fits(self) -> bool:
        """Whether the row leaves 5 % of the memory free, as far as is known, or fills it on purpose."""
        return self.fills_memory or self.fraction is None or self.fraction <= NEAR_CAPACITY

    @property
    def comfortable(self) -> bool:
        """Whether saving memory would gain nothing."""
        return self.fills_memory or self.fraction is None or self.fraction < COMFORTABLE_FRACTION

    @property
    def complexity(self) -> tuple[int, int, int, int]:
        """Sort key that puts the simplest row first: ``simplicity``, then fewer changed keys."""
        return *simplicity((self.stage, *self.offload_level)), self.changed_keys


IntervalOf = Callable[[Candidate, Candidate], RatioInterval | None]
"""Confidence interval of the ratio of two rows' throughputs; None if they have too few runs."""


def no_interval(_row: Candidate, _other: Candidate) -> None:
    """Return None, as for rows with fewer than three runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The measured speeds of rows that are comparable with each other."""

    candidates: Sequence[Candidate]
    interval_of: IntervalOf = no_interval

    def differ(self, row: Candidate, other: Candidate) -> bool:
        """Whether the measurements show which of the two rows is faster.

        With three runs or more, the interval of their ratio must exclude 1; ``comparison.ratio_between`` corrects it
        for the number of rows, because chance alone makes some row the fastest. With fewer runs the lead must exceed
        ``chance_lead``.
        """
        interval = self.interval_of(row, other)
        if interval is not None:
            return interval.distinguishable
        # Logarithms make the answer independent of the order of the two rows.
        return abs(math.log(row.tokens_per_second / other.tokens_per_second)) > math.log1p(self.chance_lead(row, other))

    def chance_lead(self, row: Candidate, other: Candidate) -> float:
        """Return the lead, as a fraction, that two rows with too few runs to test may show by chance.

        If runs vary by ``UNTESTED_NOISE``, the fastest of equal rows leads the slowest by more than this in
        ``ERROR_RATE`` of comparisons. Source: C. Y. Kramer, "Extension of multiple range tests to group means with
        unequal numbers of replications", Biometrics 12 (1956). The lead is at least the spread of the steps.
        """
        noise = UNTESTED_NOISE * math.sqrt((1 / row.runs + 1 / other.runs) / 2)
        chance = math.expm1(normal_range_quantile(max(2, len(self.candidates))) * noise)
        return max(chance, math.hypot(row.step_spread, other.step_spread))

    def undecided(self, row: Candidate, other: Candidate) -> bool:
        """Whether it matters which of two tied rows is faster, and the measurements do not show it.

        With too few runs to test, it always matters. With equal offload it matters beyond the speed that memory is
        worth (``MIN_SPEED_FRACTION``). With different offload one row costs host memory or a disk, so the interval must
        exclude even a ``NEGLIGIBLE`` difference.
        """
        interval = self.interval_of(row, other)
        accepted = 1 - MIN_SPEED_FRACTION if row.offload_level == other.offload_level else NEGLIGIBLE
        return interval is None or interval.high > 1 + accepted or interval.low * (1 + accepted) < 1

    def with_optimizer_of(self, row: Candidate, rows: Sequence[Candidate] | None = None) -> list[Candidate]:
        """Return the ``rows`` (None: all) that step with the optimizer of ``row``, so that speeds are comparable."""
        return [other for other in (self.candidates if rows is None else rows) if other.optimizer == row.optimizer]

    def tied(self, best: Candidate, rows: Sequence[Candidate]) -> list[Candidate]:
        """Return the ``rows`` tied with ``best`` by speed, including ``best`` itself if it is among them.

        Rows within ``NEGLIGIBLE`` of it are also tied if they offload less and use a comfortable share of the card: so
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
    simplest_tied: Candidate
    """The simplest of the rows tied with the fastest; the rule considers it in place of the fastest."""
    tied: tuple[Candidate, ...] = ()
    """The rows tied with the fastest, itself included; empty without a tie."""
    undecided: tuple[Candidate, ...] = ()
    """The tied rows, without the choice, that may be faster by a lead that matters (``Speeds.undecided``)."""

    @property
    def fewest_runs(self) -> int:
        """Fewest runs of the choice and of the undecided rows."""
        return min(row.runs for row in (self.choice, *self.undecided))


def decide(
    candidates: Sequence[Candidate], goal: str = "balanced", interval_of: IntervalOf = no_interval
) -> Decision | None:
    """Return the row to use and how certain that is; None if no row fits.

    Raises UsageError for a goal that is not one of ``GOALS``.
    """
    if goal not in GOALS:
        raise UsageError(f"goal {goal!r} is not known", remedy=f"choose from {', '.join(GOALS)}")
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return None
    speeds = Speeds(candidates=fitting, interval_of=interval_of)
    if goal == "memory":
        return decide_for_speed(speeds, nearly_least_memory(fitting))
    decision = decide_for_speed(speeds)
    best = decision.simplest_tied
    if goal == "speed" or best.comfortable:
        return decision
    nearly_as_fast = [
        row
        for row in speeds.with_optimizer_of(best)
        if row.offload_level == best.offload_level
        and (
            row.tokens_per_second / best.tokens_per_second >= MIN_SPEED_FRACTION
            or (min(row.runs, best.runs) >= FEWEST_RUNS and not speeds.differ(best, row))
        )
    ]
    choice = decide_for_speed(speeds, nearly_least_memory(nearly_as_fast)).choice
    return _decision(speeds, choice, decision.fastest, decision.tied or (decision.fastest,))


def decide_for_speed(speeds: Speeds, rows: Sequence[Candidate] | None = None) -> Decision:
    """Choose the simplest of the ``rows`` (None: all) that are tied with the fastest of them.

    Only rows with the optimizer of the simplest row take part, because the optimizer affects the speed too.
    """
    rows = speeds.candidates if rows is None else rows
    # The simplest row's optimizer, not the fastest's: on CPU ranks CPU Adam alone can make an offload row the fastest.
    compared = speeds.with_optimizer_of(_simplest(rows), rows)
    best = fastest(compared)
    tied = speeds.tied(best, compared)
    return _decision(speeds, _simplest(tied), best, tied)


def fastest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the row with the most tokens per second; among equals, the one with less memory."""
    return min(candidates, key=lambda c: (-c.tokens_per_second, _memory(c)))


def nearly_least_memory(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the rows whose memory is within ``NEGLIGIBLE`` of the least."""
    least = min(map(_memory, candidates))
    return [candidate for candidate in candidates if _memory(candidate) <= least * (1 + NEGLIGIBLE)]


def _simplest(candidates: Sequence[Candidate]) -> Candidate:
    # Among equally simple rows, the leaner one, but the faster one if there are too few runs to show a tie.
    key = lambda c: (c.complexity, c.runs >= FEWEST_RUNS and _memory(c), -c.tokens_per_second, _memory(c))  # noqa: E731
    return min(candidates, key=key)


def _decision(speeds: Speeds, choice: Candidate, best: Candidate, tied: Sequence[Candidate]) -> Decision:
    simplest = _simplest(tied)
    # If a row that was chosen for its memory is not tied, the others are compared with the row that it replaces.
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
    """Sort key that puts a row with unknown memory last."""
    return math.inf if candidate.memory_bytes is None else candidate.memory_bytes


# ------------------------------------------------------------------ which rows may be chosen


class MemoryTerms(NamedTuple):
    """Names of the memory that the rule compares."""

    memory: str
    capacity: str


ON_DEVICE = MemoryTerms("device memory", "the card")
ON_HOST = MemoryTerms("host memory", "the host's memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class EligibleRows:
    """The rows with numbers: the candidates, and why the others are left out."""

    terms: MemoryTerms
    candidates: Sequence[Candidate]
    """Rows that may be chosen, and rows that are too full, which the rule drops."""
    left_out: Mapping[str, Fact]
    """Key of every other row, and of those that are too full → why it is left out."""
    disturbed: Sequence[str] = ()
    """Labels of the candidates that ran while the CPU was busy: an answer from them is provisional."""

    def left_out_as(self, kind: str) -> list[str]:
        """Return the keys of the rows that are left out for a reason of this kind."""
        return [key for key, reason in self.left_out.items() if reason.kind == kind]


def eligible_rows(comparison: Comparison) -> EligibleRows:
    """Split the rows into candidates and rows that are left out."""
    terms = ON_HOST if comparison.accelerator == "cpu" else ON_DEVICE
    candidates: list[Candidate] = []
    left_out: dict[str, Fact] = {}
    for row in comparison.rows:
        if not row.succeeded or row.tokens_per_second is None:
            continue
        if (reason := _reason_not_eligible(row)) is not None:
            left_out[row.key] = reason
            continue
        candidates.append(candidate := candidate_of(row, comparison, terms))
        # It stays among the candidates, because it is comparable with them; the rule drops it.
        if not candidate.fits:
            left_out[row.key] = Fact("too_full", {"fraction": candidate.fraction, "capacity": terms.capacity})
    # If the longest sequence was searched for, only rows that train it count, to the accuracy of the search.
    # Without a search all lengths are 0, and no row is left out.
    lengths = {each.key: comparison.row(each.key).longest_seq_length or 0 for each in candidates}
    enough = max(lengths.values(), default=0) * (1 - SEARCH_ACCURACY)
    short = {key: Fact("too_short", {"tokens": length}) for key, length in lengths.items() if length < enough}
    candidates = [each for each in candidates if each.key not in short]
    disturbed = [each.label for each in candidates if has_kind(comparison.row(each.key).caveats, *CPU_KINDS)]
    return EligibleRows(terms=terms, candidates=candidates, left_out={**left_out, **short}, disturbed=disturbed)


def _reason_not_eligible(row: ComparisonRow) -> Fact | None:
    """Return why a row with numbers cannot be chosen, whatever its memory and speed; None if it can."""
    if row.differences:
        return Fact("not_comparable", {"differences": "; ".join(row.differences)})
    # A busy CPU leaves no row out; it only makes the answer provisional (``EligibleRows.disturbed``).
    disqualifying = [caveat for caveat in row.caveats if caveat.kind.disqualifies and caveat.kind not in CPU_KINDS]
    if disqualifying:
        return Fact("invalid", {"text": disqualifying[0].text})
    if count := sum(run.outcome.status in RAN_OUT for run in row.runs if not run.row.success):
        return Fact("ran_out", {"count": count, "runs": len(row.runs)})
    for caveat in row.caveats:
        if caveat.kind is CaveatKind.OTHER_TRAINING:
            return Fact("other_training", {"text": caveat.text})
    return Fact("reference") if row.configuration.is_reference else None


def candidate_of(row: ComparisonRow, comparison: Comparison, terms: MemoryTerms) -> Candidate:
    """Return the numbers of a row that trained, with the memory that ``terms`` names."""
    on_host, capacity, trial = terms is ON_HOST, comparison.host_capacity_bytes, row.trial
    host_fraction = row.host_peak_bytes / capacity if row.host_peak_bytes is not None and capacity else None
    # Within the run that varied most, or between the runs if that is more.
    spreads = [(row.step_seconds_std, row.mean_step_seconds)]
    spreads += [(run.row.std_step_time_ms, run.row.avg_step_time_ms) for run in row.successes]
    # Keys of the configuration, fields of the workload that change how a step is computed, and variables.
    changes = deepspeed_config.changes_of(trial.ds_config, trial.configuration, trial.workload, trial.placement)
    defaults = {each.name: each.default for each in fields(Workload)}
    changed = [name for name in SAME_TRAINING_FIELDS if getattr(trial.workload, name) != defaults[name]]
    return Candidate(
        label=row.label,
        key=row.key,
        tokens_per_second=row.tokens_per_second or 0.0,
        memory_bytes=row.host_peak_bytes if on_host else row.gpu_peak_bytes,
        fraction=host_fraction if on_host else row.gpu_fraction,
        offload_level=row.configuration.layout[1:],
        stage=row.configuration.stage,
        changed_keys=len(list(paths_of(changes))) + len(changed) + len(trial.configuration.variables),
        runs=len(row.successes),
        step_spread=max((std / mean for std, mean in spreads if std and mean), default=0.0),
        fills_memory=row.fills_memory,
        optimizer=row.optimizer or "" if on_host else "",
    )


def intervals(comparison: Comparison) -> IntervalOf:
    """Return the function that gives the interval of the ratio of two candidates of a comparison."""
    return lambda row, other: ratio_between(comparison.row(row.key), comparison.row(other.key))
