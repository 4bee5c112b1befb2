"""From a comparison to a recommendation: which row to use, why, what it costs, and what to try next.

This module decides which rows are eligible: rows that do not compare with the others, or did not train as requested,
are never recommended. The choice is made by ``rule``, worded by ``reasons``; ``remedies`` has the steps for other rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..analysis.caveats import Caveat
from ..analysis.comparison import Comparison, ComparisonRow, ratio_between
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..config import deepspeed_config
from ..config.options import GOALS as GOALS
from ..config.spec import Trial
from ..records.schema import OOM
from ..units import format_percent
from . import reasons, remedies, strategy_guide
from .reasons import ON_DEVICE, ON_HOST, MemoryTerms
from .rule import Candidate, Decision, IntervalOf, Speeds, decide, standing
from .rule import choose as choose

_MOST_NAMED = 6
"""Rows that get words of their own where many failed or were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The row to use. Every text is one line without escapes."""

    goal: str
    """speed, balanced or memory."""
    choice: str | None
    """Label of the row; None where nothing can be recommended."""
    key: str | None
    """The row's key in the comparison."""
    reason: str
    """Why, with the row's numbers and how sure they are; or why there is no choice. Names the rows left out."""
    cost: str | None
    """What it costs, and saves, against the fastest row that fits; None where it is that row."""
    next_steps: tuple[str, ...]
    """Most useful first."""
    tied: tuple[str, ...] = ()
    """Labels of the rows that tie with the fastest (docs/choosing.md); empty where that stands alone."""
    undecided: tuple[str, ...] = ()
    """Labels of the rows, the choice first, of which it matters which is faster, and the measurements do not tell;
    empty where the choice is decided."""

    @property
    def decided(self) -> bool:
        """Whether the measurements decide, as far as it matters. False too where there is no choice."""
        return self.choice is not None and not self.undecided

    @property
    def lines(self) -> list[str]:
        """For a console: the choice, why, its cost, and each next step on a line of its own."""
        headline = self.choice or "none"
        if self.undecided:
            headline = f"undecided between {_listed(self.undecided)}; until then {self.choice}"
        cost = [] if self.cost is None else [f"Cost: {self.cost}"]
        steps = [f"Next: {step}" for step in self.next_steps]
        return [f"Recommendation ({self.goal}): {headline}", f"Why: {self.reason}", *cost, *steps]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "decided": self.decided}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Rows eligible for a recommendation, and one sentence for each row that is not."""

    candidates: tuple[Candidate, ...]
    """Eligible rows, and rows that are too full, which the rule drops."""
    incomparable: tuple[str, ...]
    """One sentence per row that does not compare with the others."""
    left_out: tuple[tuple[str, Candidate | None], ...]
    """One sentence per row left out for another reason, and the row where that is how full it is."""


def recommend(comparison: Comparison, goal: str = "balanced") -> Recommendation:
    """The row to use for that goal.

    Raises UsageError for a goal that is none of ``GOALS``.
    """
    terms = ON_HOST if _on_cpu(comparison) else ON_DEVICE
    candidates = _candidates(comparison, terms)
    decision = decide(candidates.candidates, goal, _intervals(comparison))
    if decision is None or (candidates.incomparable and len(candidates.candidates) < 2):
        return _no_recommendation(comparison, candidates, goal)
    choice, fitting = decision.choice, [candidate for candidate in candidates.candidates if candidate.fits]
    speeds = Speeds(candidates=fitting, interval_of=_intervals(comparison))
    open_rows = [row.label for row in (choice, *decision.undecided)] if decision.undecided else []
    return Recommendation(
        goal=goal,
        choice=choice.label,
        key=choice.key,
        reason=_reason(decision, speeds, candidates, comparison, goal, terms),
        cost=reasons.cost(choice, speeds, terms),
        next_steps=tuple(dict.fromkeys(_next_steps(choice, open_rows, comparison, goal))),
        tied=tuple(candidate.label for candidate in decision.tied),
        undecided=tuple(open_rows),
    )


def _listed(labels: Sequence[str]) -> str:
    """``A, B and C``."""
    return " and ".join([", ".join(labels[:-1]), labels[-1]]) if len(labels) > 1 else labels[0]


def _intervals(comparison: Comparison) -> IntervalOf:
    return lambda row, other: ratio_between(comparison.result(row.key), comparison.result(other.key))


def _candidates(comparison: Comparison, terms: MemoryTerms) -> Candidates:
    candidates: list[Candidate] = []
    incomparable: list[str] = []
    left_out: list[tuple[str, Candidate | None]] = []
    for row in comparison.results:
        if not row.succeeded or row.tokens_per_second is None:
            continue
        if row.differences:
            incomparable.append(f"{row.label} does not compare with the others ({'; '.join(row.differences)})")
        elif reason := _reason_not_eligible(row):
            left_out.append((f"{row.label} is left out: {reason}", None))
        else:
            candidates.append(candidate := _candidate(row, row.tokens_per_second, comparison, terms))
            if not candidate.fits:
                share, limit = format_percent(candidate.fraction), format_percent(NEAR_CAPACITY, digits=0)
                left_out.append((f"{row.label} is left out: {share} of {terms.capacity}, above {limit}", candidate))
    return Candidates(candidates=tuple(candidates), incomparable=tuple(incomparable), left_out=tuple(left_out))


def _reason_not_eligible(row: ComparisonRow) -> str | None:
    """Why a row with numbers is not eligible; None if it is."""
    short = sum(run.record.outcome.status in remedies.RAN_OUT for run in row.summaries)
    ran_out = f"{short} of its {len(row.summaries)} runs ran out of memory or disk" if short else None
    return row.invalid_reason or ran_out


def _candidate(row: ComparisonRow, tokens_per_second: float, comparison: Comparison, terms: MemoryTerms) -> Candidate:
    on_host, capacity = terms is ON_HOST, comparison.host_capacity_bytes
    host_fraction = row.host_peak_bytes / capacity if row.host_peak_bytes is not None and capacity else None
    return Candidate(
        label=row.label,
        key=row.key,
        tokens_per_second=tokens_per_second,
        memory_bytes=row.host_peak_bytes if on_host else row.gpu_peak_bytes,
        fraction=host_fraction if on_host else row.gpu_fraction,
        offload_level=(row.strategy.offload_optimizer, row.strategy.offload_param),
        stage=row.strategy.stage,
        changed_keys=_changed_keys(row.summaries[0].record.trial),
        step_spread=_step_spread(row),
        filled=row.at_largest_batch,
        optimizer=row.optimizer or "" if on_host else "",
    )


def _changed_keys(trial: Trial) -> int:
    """Number of values in the DeepSpeed configuration that are not the strategy's own."""
    changes = deepspeed_config.changes_of(trial.ds_config, trial.strategy, trial.workload, trial.placement)
    return sum(1 for _ in _leaves(changes))


def _leaves(block: Mapping[str, Any]) -> Iterator[Any]:
    for value in block.values():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield value


def _step_spread(row: ComparisonRow) -> float:
    """Relative standard deviation of the steps of the run that varied most, or between the runs where that is more."""
    within = [
        run.step_seconds_std / run.mean_step_seconds
        for run in row.successes
        if run.step_seconds_std and run.mean_step_seconds
    ]
    between = row.step_seconds_std / row.mean_step_seconds if row.step_seconds_std and row.mean_step_seconds else 0.0
    return max([*within, between])


def _on_cpu(comparison: Comparison) -> bool:
    """Whether every row ran on the CPU accelerator."""
    placements = [run.record.trial.placement for row in comparison.results for run in row.summaries]
    return bool(placements) and all(placement.accelerator == "cpu" for placement in placements)


def _reason(
    decision: Decision, speeds: Speeds, candidates: Candidates, comparison: Comparison, goal: str, terms: MemoryTerms
) -> str:
    runs = {row.key: len(row.successes) for row in comparison.results}
    sentence = reasons.why(decision, speeds, goal, terms)
    doubt = reasons.speed_difference_text(decision.choice, speeds, runs)
    sentences = [sentence if doubt is None else f"{sentence}; {doubt}"]
    others = [row for row in speeds.candidates if row.optimizer != decision.choice.optimizer]
    if others:
        steps = f"steps with {others[0].optimizer}" if len(others) == 1 else "step with other optimizers"
        sentences.append(
            f"{_listed([row.label for row in others])} {steps} and not with {decision.choice.optimizer}: "
            f"on CPU ranks no choice is made between optimizers by speed"
        )
    sentences += _named(candidates, decision.choice, speeds)
    if terms is ON_HOST:
        sentences.append("These are CPU ranks: nothing here is a statement about GPUs")
    return ". ".join(sentences)


def _no_recommendation(comparison: Comparison, candidates: Candidates, goal: str) -> Recommendation:
    sentences = [_why_nothing(comparison, candidates), *_named(candidates)]
    return Recommendation(
        goal=goal,
        choice=None,
        key=None,
        reason=". ".join(sentences),
        cost=None,
        next_steps=tuple(dict.fromkeys(_steps_without_choice(comparison, candidates))),
    )


def _named(candidates: Candidates, choice: Candidate | None = None, speeds: Speeds | None = None) -> list[str]:
    """Sentences on the rows left out, those that do not compare first; for rows that are too full with the cost."""
    sentences = [*candidates.incomparable]
    for sentence, row in candidates.left_out:
        price = None
        if row is not None and choice is not None and speeds is not None:
            price = reasons.cost_of_leaving_out(row, choice, speeds)
        sentences.append(sentence if price is None else f"{sentence}; {price}")
    more = len(sentences) - _MOST_NAMED
    return [*sentences[:_MOST_NAMED], f"{more} more rows are left out"] if more > 0 else sentences


def _why_nothing(comparison: Comparison, candidates: Candidates) -> str:
    if not comparison.results:
        return "There are no rows"
    if candidates.incomparable:
        return "There is no choice among rows that do not compare"
    if candidates.left_out:
        return "No row that trained can be recommended"
    ends = [(row.label, run.outcome.status) for row in comparison.results if (run := remedies.failed_run(row))]
    counts = Counter(status for _, status in ends)
    named = [f"{label} {status}" for label, status in ends] if len(ends) <= _MOST_NAMED else None
    return "No row trained: " + ", ".join(named or (f"{count} {status}" for status, count in counts.items()))


def _steps_without_choice(comparison: Comparison, candidates: Candidates) -> Iterator[str]:
    """Steps if no row is chosen: the least change that fits first, then row by row."""
    if not any(row.succeeded for row in comparison.results):
        yield from filter(None, [remedies.smallest_change(comparison)])
    full = {candidate.key for candidate in candidates.candidates if not candidate.fits}
    for row in comparison.results:
        if row.key in full:
            yield from filter(None, [remedies.suggest_for_full_row(row, comparison)])
    yield from _steps_for_failures(comparison)
    yield from _steps_for_caveats(
        [caveat for row in comparison.results for caveat in row.caveats if caveat.disqualifying]
    )
    yield from _steps_for_caveats(comparison.caveats)


def _next_steps(choice: Candidate, open_rows: Sequence[str], comparison: Comparison, goal: str) -> Iterator[str]:
    row = comparison.result(choice.key)
    if open_rows:
        yield f"to decide between {_listed(open_rows)}, run them again with {_more_runs(comparison.result(choice.key))}"
    yield from _steps_for_failures(comparison)
    yield from _steps_for_caveats(row.caveats)
    yield from filter(None, [remedies.suggest_larger_batch(row, comparison), _rule_of_thumb(comparison, goal)])
    yield from _steps_for_caveats(comparison.caveats)


def _more_runs(row: ComparisonRow) -> str:
    """Flags for a more sensitive test: at least five runs, each of at least 50 steps."""
    runs, steps = len(row.successes), row.summaries[0].record.trial.workload.num_steps
    return f"--repeats {max(5, 2 * runs)} --num-steps {max(50, steps)}"


def _steps_for_failures(comparison: Comparison) -> Iterator[str]:
    failed = [row for row in comparison.results if remedies.failed_run(row) is not None]
    labels_of: dict[str, list[str]] = {}  # by remedy
    for row in failed[:_MOST_NAMED]:
        if text := remedies.remedy(row, comparison):
            labels_of.setdefault(text.removeprefix(row.label), []).append(row.label)
    for text, labels in labels_of.items():
        several = f" were {text[5:]}" if text.startswith(" was ") else text
        yield _listed(labels) + (several if len(labels) > 1 else text)
    if len(failed) > _MOST_NAMED:
        yield f"{len(failed) - _MOST_NAMED} more rows failed: the table has their causes"


def _steps_for_caveats(caveats: Sequence[Caveat]) -> Iterator[str]:
    yield from (caveat.next_step for caveat in caveats if caveat.next_step is not None)


def _rule_of_thumb(comparison: Comparison, goal: str) -> str | None:
    """The rule of thumb for the memory that the fastest row without offload uses, or for rows out of memory."""
    alike = [row for row in comparison.results if not row.differences]
    plain = [row for row in alike if not row.strategy.offloads_optimizer]
    if not plain or _on_cpu(comparison):
        return None
    placement = plain[0].summaries[0].record.trial.placement
    return strategy_guide.rule_of_thumb(
        _observed_rows(plain, alike, comparison, goal), goal=goal, num_gpus=placement.num_gpus
    )


def _standing(rows: Sequence[ComparisonRow], comparison: Comparison) -> ComparisonRow | None:
    """The simplest of the rows that cannot be told from the fastest of these by speed."""
    weighed = [_candidate(row, row.tokens_per_second or 0.0, comparison, ON_DEVICE) for row in rows]
    if not weighed:
        return None
    return comparison.result(standing(Speeds(candidates=weighed, interval_of=_intervals(comparison))).key)


def _observed_rows(
    plain: Sequence[ComparisonRow], alike: Sequence[ComparisonRow], comparison: Comparison, goal: str
) -> strategy_guide.ObservedRows:
    trained = [row for row in plain if row.tokens_per_second is not None and _reason_not_eligible(row) is None]
    fitting = [row for row in trained if row.leaves_room]
    best = _standing(fitting if goal == "speed" else trained, comparison)
    ended = [(row.strategy, run.outcome.status) for row in alike if (run := remedies.failed_run(row)) is not None]
    return strategy_guide.ObservedRows(
        fastest_stage=None if best is None else best.strategy.stage,
        fastest_label=None if best is None else best.label,
        fraction=None if best is None or best.at_largest_batch else best.gpu_fraction,
        trained_stages=frozenset(row.strategy.stage for row in fitting),
        out_of_memory_stages=frozenset(
            strategy.stage for strategy, status in ended if status == OOM and not strategy.offloads_optimizer
        ),
        full_stages=frozenset(row.strategy.stage for row in trained) - {row.strategy.stage for row in fitting},
        failed_offloads=frozenset(
            strategy.name for strategy, status in ended if status in remedies.RAN_OUT and strategy.offloads_optimizer
        ),
    )
