"""From a comparison to a choice: which row to use, why, what it costs, and what to try next.

The rule is ``rule``'s, the words are ``reasons``', what a failed row needs is ``remedies``'; here it is decided which
rows may stand. Rows that do not compare with the others, or did not train what was asked, are never recommended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..analysis.caveats import Caveat
from ..analysis.comparison import Comparison, StrategyResult, ratio_between
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..config import deepspeed_config
from ..config.options import GOALS as GOALS
from ..config.spec import Trial
from ..records.schema import OOM
from ..units import format_percent
from . import reasons, remedies, strategy_guide
from .headroom import larger_batch, too_full
from .reasons import ON_DEVICE, ON_HOST, Words
from .rule import Candidate, Decision, IntervalOf, Speeds, decide, standing
from .rule import choose as choose

_MOST_NAMED = 6
"""Rows that get words of their own where many failed or were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What to use. Every text is one line, ready to print; none is escaped."""

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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "decided": self.decided}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """Who may stand, and why the others may not."""

    candidates: tuple[Candidate, ...]
    """Rows that may stand, those too full included: the rule drops them."""
    incomparable: tuple[str, ...]
    """One sentence per row that does not compare with the others."""
    left_out: tuple[tuple[str, Candidate | None], ...]
    """One sentence per row left out for another reason, and the row where that is how full it is."""


def recommend(comparison: Comparison, goal: str = "balanced") -> Recommendation:
    """The row to use for that goal.

    Raises UsageError for a goal that is none of ``GOALS``.
    """
    words = ON_HOST if _on_cpu(comparison) else ON_DEVICE
    field = _field(comparison, words)
    decision = decide(field.candidates, goal, _intervals(comparison))
    if decision is None or (field.incomparable and len(field.candidates) < 2):
        return _nothing(comparison, field)
    choice, fitting = decision.choice, [candidate for candidate in field.candidates if candidate.fits]
    speeds = Speeds(candidates=fitting, interval_of=_intervals(comparison))
    open_rows = [row.label for row in (choice, *decision.undecided)] if decision.undecided else []
    return Recommendation(
        choice=choice.label,
        key=choice.key,
        reason=_reason(decision, speeds, field, comparison, goal, words),
        cost=reasons.cost(choice, speeds, words),
        next_steps=_once(_next_steps(choice, open_rows, comparison, goal)),
        tied=tuple(candidate.label for candidate in decision.tied),
        undecided=tuple(open_rows),
    )


def lines(recommendation: Recommendation, goal: str = "balanced") -> list[str]:
    """For a console: the choice, why, its cost, and each next step on a line of its own."""
    found = [f"Recommendation ({goal}): {_headline(recommendation)}", f"Why: {recommendation.reason}"]
    if recommendation.cost is not None:
        found.append(f"Cost: {recommendation.cost}")
    return [*found, *(f"Next: {step}" for step in recommendation.next_steps)]


def _headline(recommendation: Recommendation) -> str:
    if not recommendation.undecided:
        return recommendation.choice or "none"
    return f"undecided between {_listed(recommendation.undecided)}; until then {recommendation.choice}"


def _listed(labels: Sequence[str]) -> str:
    """``A, B and C``."""
    return " and ".join([", ".join(labels[:-1]), labels[-1]]) if len(labels) > 1 else labels[0]


def _intervals(comparison: Comparison) -> IntervalOf:
    return lambda row, other: ratio_between(comparison.result(row.key), comparison.result(other.key))


def _field(comparison: Comparison, words: Words) -> _Field:
    candidates: list[Candidate] = []
    incomparable: list[str] = []
    left_out: list[tuple[str, Candidate | None]] = []
    for row in comparison.results:
        if not row.succeeded or row.tokens_per_second is None:
            continue
        if row.differences:
            incomparable.append(f"{row.label} does not compare with the others ({'; '.join(row.differences)})")
        elif reason := _unfit(row):
            left_out.append((f"{row.label} is left out: {reason}", None))
        else:
            candidates.append(candidate := _candidate(row, row.tokens_per_second, comparison, words))
            if not candidate.fits:
                share, limit = format_percent(candidate.fraction), format_percent(NEAR_CAPACITY, digits=0)
                left_out.append((f"{row.label} is left out: {share} of {words.capacity}, above {limit}", candidate))
    return _Field(candidates=tuple(candidates), incomparable=tuple(incomparable), left_out=tuple(left_out))


def _unfit(row: StrategyResult) -> str | None:
    """Why a row that has numbers is still not one to use."""
    short = sum(run.record.outcome.status in remedies.RAN_OUT for run in row.summaries)
    ran_out = f"{short} of its {len(row.summaries)} runs ran out of memory or disk" if short else None
    return row.disqualification or ran_out


def _candidate(row: StrategyResult, tokens_per_second: float, comparison: Comparison, words: Words) -> Candidate:
    on_host, capacity = words is ON_HOST, comparison.host_capacity_bytes
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
    """Values of the trial's DeepSpeed configuration that the strategy alone would not have given it."""
    changes = deepspeed_config.changes_of(trial.ds_config, trial.strategy, trial.workload, trial.placement)
    return sum(1 for _ in _leaves(changes))


def _leaves(block: Mapping[str, Any]) -> Iterator[Any]:
    for value in block.values():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield value


def _step_spread(row: StrategyResult) -> float:
    """Relative standard deviation of the steps of the run that varied most, or between the runs where that is more."""
    within = [
        run.step_seconds_std / run.step_seconds for run in row.successes if run.step_seconds_std and run.step_seconds
    ]
    between = row.step_seconds_spread / row.step_seconds if row.step_seconds_spread and row.step_seconds else 0.0
    return max([*within, between])


def _on_cpu(comparison: Comparison) -> bool:
    """There is no card: every row ran on the CPU accelerator."""
    placements = [run.record.trial.placement for row in comparison.results for run in row.summaries]
    return bool(placements) and all(placement.accelerator == "cpu" for placement in placements)


def _reason(decision: Decision, speeds: Speeds, field: _Field, comparison: Comparison, goal: str, words: Words) -> str:
    runs = {row.key: len(row.successes) for row in comparison.results}
    sentence = reasons.why(decision, speeds, goal, words)
    doubt = reasons.noise(decision.choice, speeds, runs)
    told = [sentence if doubt is None else f"{sentence}; {doubt}"]
    others = [row for row in speeds.candidates if row.optimizer != decision.choice.optimizer]
    if others:
        steps = f"steps with {others[0].optimizer}" if len(others) == 1 else "step with other optimizers"
        told.append(
            f"{_listed([row.label for row in others])} {steps} and not with {decision.choice.optimizer}: "
            f"on CPU ranks no choice is made between optimizers by speed"
        )
    told += _named(field, decision.choice, speeds)
    if words is ON_HOST:
        told.append("These are CPU ranks: nothing here is a statement about GPUs")
    return ". ".join(told)


def _nothing(comparison: Comparison, field: _Field) -> Recommendation:
    told = [_why_nothing(comparison, field), *_named(field)]
    return Recommendation(
        choice=None, key=None, reason=". ".join(told), cost=None, next_steps=_once(_ways_out(comparison, field))
    )


def _named(field: _Field, choice: Candidate | None = None, speeds: Speeds | None = None) -> list[str]:
    """The rows left out, those that do not compare first; the too full ones with what that costs beside the choice."""
    told = [*field.incomparable]
    for sentence, row in field.left_out:
        price = None
        if row is not None and choice is not None and speeds is not None:
            price = reasons.cost_of_leaving_out(row, choice, speeds)
        told.append(sentence if price is None else f"{sentence}; {price}")
    more = len(told) - _MOST_NAMED
    return [*told[:_MOST_NAMED], f"{more} more rows are left out"] if more > 0 else told


def _why_nothing(comparison: Comparison, field: _Field) -> str:
    if not comparison.results:
        return "There are no rows"
    if field.incomparable:
        return "There is no choice among rows that do not compare"
    if field.left_out:
        return "No row that trained can be recommended"
    ends = [(row.label, run.outcome.status) for row in comparison.results if (run := remedies.failed_run(row))]
    counts = Counter(status for _, status in ends)
    named = [f"{label} {status}" for label, status in ends] if len(ends) <= _MOST_NAMED else None
    return "No row trained: " + ", ".join(named or (f"{count} {status}" for status, count in counts.items()))


def _ways_out(comparison: Comparison, field: _Field) -> Iterator[str]:
    """What to do where there is no choice: the one smallest change first, then row by row."""
    if not any(row.succeeded for row in comparison.results):
        yield from filter(None, [remedies.smallest_change(comparison)])
    full = {candidate.key for candidate in field.candidates if not candidate.fits}
    for row in comparison.results:
        if row.key in full:
            yield from filter(None, [too_full(row, comparison)])
    yield from _of_failures(comparison)
    yield from _of_caveats([caveat for row in comparison.results for caveat in row.caveats if caveat.disqualifying])
    yield from _of_caveats(comparison.caveats)


def _next_steps(choice: Candidate, open_rows: Sequence[str], comparison: Comparison, goal: str) -> Iterator[str]:
    row = comparison.result(choice.key)
    if open_rows:
        yield f"to decide between {_listed(open_rows)}, run them again with {_more_runs(comparison.result(choice.key))}"
    yield from _of_failures(comparison)
    yield from _of_caveats(row.caveats)
    yield from filter(None, [larger_batch(row, comparison), _pattern(comparison, goal)])
    yield from _of_caveats(comparison.caveats)


def _more_runs(row: StrategyResult) -> str:
    """Flags that make differences visible that these runs do not show: at least five runs, and longer ones."""
    runs, steps = len(row.successes), row.summaries[0].record.trial.workload.num_steps
    return f"--repeats {max(5, 2 * runs)} --num-steps {max(50, steps)}"


def _of_failures(comparison: Comparison) -> Iterator[str]:
    failed = [row for row in comparison.results if remedies.failed_run(row) is not None]
    labels_of: dict[str, list[str]] = {}  # by what is said of each
    for row in failed[:_MOST_NAMED]:
        if text := remedies.remedy(row, comparison):
            labels_of.setdefault(text.removeprefix(row.label), []).append(row.label)
    for said, labels in labels_of.items():
        several = f" were {said[5:]}" if said.startswith(" was ") else said
        yield _listed(labels) + (several if len(labels) > 1 else said)
    if len(failed) > _MOST_NAMED:
        yield f"{len(failed) - _MOST_NAMED} more rows failed: the table has their causes"


def _of_caveats(caveats: Sequence[Caveat]) -> Iterator[str]:
    yield from (caveat.next_step for caveat in caveats if caveat.next_step is not None)


def _pattern(comparison: Comparison, goal: str) -> str | None:
    """The rule of thumb for how full the fastest row without offload leaves the card, or for what ran out of memory."""
    alike = [row for row in comparison.results if not row.differences]
    plain = [row for row in alike if not row.strategy.offloads_optimizer]
    if not plain or _on_cpu(comparison):
        return None
    placement = plain[0].summaries[0].record.trial.placement
    return strategy_guide.pattern(_seen(plain, alike, comparison, goal), goal=goal, num_gpus=placement.num_gpus)


def _standing(rows: Sequence[StrategyResult], comparison: Comparison) -> StrategyResult | None:
    """The simplest of the rows that cannot be told from the fastest of these by speed."""
    weighed = [_candidate(row, row.tokens_per_second or 0.0, comparison, ON_DEVICE) for row in rows]
    if not weighed:
        return None
    return comparison.result(standing(Speeds(candidates=weighed, interval_of=_intervals(comparison))).key)


def _seen(
    plain: Sequence[StrategyResult], alike: Sequence[StrategyResult], comparison: Comparison, goal: str
) -> strategy_guide.Seen:
    trained = [row for row in plain if row.tokens_per_second is not None and _unfit(row) is None]
    fitting = [row for row in trained if row.leaves_room]
    best = _standing(fitting if goal == "speed" else trained, comparison)
    ended = [(row.strategy, run.outcome.status) for row in alike if (run := remedies.failed_run(row)) is not None]
    return strategy_guide.Seen(
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


def _once(steps: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(steps))
