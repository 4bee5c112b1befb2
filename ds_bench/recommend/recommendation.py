"""From a comparison to a recommendation: which row to use, why, what it costs, and what to try next.

This module decides which rows are eligible: rows that do not compare with the others, or did not train as requested,
are never recommended. ``decision`` chooses one, ``reasons`` words why, and ``remedies`` has the steps for other rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..analysis.caveats import Caveat
from ..analysis.comparison import Comparison, ComparisonRow, ratio_between
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..config import deepspeed_config
from ..config.deepspeed_config import paths_of
from ..config.spec import SAME_TRAINING_FIELDS, SEARCH_ACCURACY, Trial, Workload
from ..records.schema import OOM
from ..units import format_count, format_percent
from . import reasons, remedies, short_answer, strategy_guide
from .decision import Candidate, Decision, IntervalOf, Speeds, decide, decide_for_speed
from .reasons import ON_DEVICE, ON_HOST, MemoryTerms
from .short_answer import format_list

_MAX_ROWS_NAMED = 6
"""Rows that are described one by one if many failed or were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The row to use. Every text is one line without escapes."""

    goal: str
    """speed, balanced or memory."""
    choice: str | None = None
    """Label of the row; None if nothing can be recommended."""
    key: str | None = None
    """The row's key in the comparison."""
    reason: str
    """Why, with the row's numbers and how certain they are; or why there is no choice. Names the rows left out."""
    cost: str | None = None
    """What it costs, and saves, against the fastest row that fits; None if it is that row."""
    next_steps: tuple[str, ...] = ()
    """Most useful first."""
    tied: tuple[str, ...] = ()
    """Labels of the rows that tie with the fastest (docs/choosing.md); empty if no other does."""
    undecided: tuple[str, ...] = ()
    """Labels of rows, the choice first, of which the measurements do not show which is faster, though it matters;
    empty if the choice is decided."""

    headline: str = ""
    """One sentence: the row to use and why, that it is undecided, or why there is none."""
    alternative: str | None = None
    """What the fastest row that was not chosen would give, and why it was not; None if nothing speaks for another."""
    try_next: str | None = None
    """Flags of the next run, or what else to do first; None if nothing is left to try."""

    @property
    def decided(self) -> bool:
        """Whether the measurements decide, as far as it matters. False too if there is no choice."""
        return self.choice is not None and not self.undecided

    @property
    def lines(self) -> list[str]:
        """For a console: the choice, why, its cost, and each next step on a line of its own."""
        choice = self.choice or "none"
        if self.undecided:
            choice = f"undecided between {format_list(self.undecided)}; until then {self.choice}"
        cost = [] if self.cost is None else [f"Cost: {self.cost}"]
        steps = [f"Next: {step}" for step in self.next_steps]
        return [f"Recommendation ({self.goal}): {choice}", f"Why: {self.reason}", *cost, *steps]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "decided": self.decided}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Rows eligible for a recommendation, and one sentence for each row that is not."""

    candidates: Sequence[Candidate]
    """Eligible rows, and rows that are too full, which the rule drops."""
    references: Sequence[Candidate]
    """Rows of torch's own engines, which are no DeepSpeed configuration and so no choice."""
    incomparable: Sequence[str]
    """One sentence per row that does not compare with the others."""
    left_out: Sequence[tuple[str, Candidate | None]]
    """One sentence per row left out for another reason, and the row if the reason is that it is too full."""

    def sentences(self, decision: Decision | None = None) -> list[str]:
        """On the rows that are not eligible; for rows that are too full with what leaving them out costs."""
        sentences = [*self.incomparable, *(reasons.reference_text(row, decision) for row in self.references)]
        for sentence, row in self.left_out:
            cost = None if row is None or decision is None else reasons.cost_of_leaving_out(row, decision)
            sentences.append(sentence if cost is None else f"{sentence}; {cost}")
        more = len(sentences) - _MAX_ROWS_NAMED
        return (
            [*sentences[:_MAX_ROWS_NAMED], f"{more} more {'row is' if more == 1 else 'rows are'} left out"]
            if more > 0
            else sentences
        )


def recommend(comparison: Comparison, goal: str = "balanced") -> Recommendation:
    """The row to use for that goal.

    Raises UsageError for a goal that is none of ``config.options.GOALS``.
    """
    if any(run.record.trial.workload.pass_type != "train" for row in comparison.rows for run in row.summaries):
        reason = "These are passes of the model alone: a configuration is chosen by training steps"
        return Recommendation(goal=goal, reason=reason, headline=f"{reason}.")
    terms = ON_HOST if _on_cpu(comparison) else ON_DEVICE
    candidates = _candidates(comparison, terms)
    decision = decide(candidates.candidates, goal, _intervals(comparison))
    # One row beside rows that do not compare with it was compared with nothing.
    if decision is None or (candidates.incomparable and len(candidates.candidates) < 2):
        return Recommendation(
            goal=goal,
            reason=". ".join([_why_no_choice(comparison, candidates), *candidates.sentences()]),
            next_steps=tuple(dict.fromkeys(_steps_without_choice(comparison, candidates))),
            headline=short_answer.say_no_choice(comparison, bool(candidates.incomparable)),
            try_next=short_answer.try_without_choice(comparison),
        )
    undecided = [row.label for row in (decision.choice, *decision.undecided)] if decision.undecided else []
    return Recommendation(
        goal=goal,
        choice=decision.choice.label,
        key=decision.choice.key,
        reason=_reason(decision, candidates, comparison, goal, terms),
        cost=reasons.cost(decision, terms),
        next_steps=tuple(dict.fromkeys(_next_steps(decision.choice, undecided, comparison, goal))),
        tied=tuple(candidate.label for candidate in decision.tied),
        undecided=tuple(undecided),
        headline=short_answer.say_choice(decision, comparison, goal, terms),
        alternative=short_answer.say_alternative(decision, candidates.candidates, candidates.references, comparison),
        try_next=short_answer.try_after_choice(decision, candidates.candidates, comparison),
    )


def _intervals(comparison: Comparison) -> IntervalOf:
    return lambda row, other: ratio_between(comparison.row(row.key), comparison.row(other.key))


def _candidates(comparison: Comparison, terms: MemoryTerms) -> Candidates:
    candidates: list[Candidate] = []
    references: list[Candidate] = []
    incomparable: list[str] = []
    left_out: list[tuple[str, Candidate | None]] = []
    for row in comparison.rows:
        if not row.succeeded or row.tokens_per_second is None:
            continue
        if row.differences:
            incomparable.append(f"{row.label} does not compare with the others ({'; '.join(row.differences)})")
        elif reason := _reason_not_eligible(row):
            left_out.append((f"{row.label} is left out: {reason}", None))
        elif row.configuration.is_reference:
            references.append(_candidate(row, comparison, terms))
        else:
            candidates.append(candidate := _candidate(row, comparison, terms))
            # It stays among the candidates, so that the cost of leaving it out can be told; the rule drops it.
            if not candidate.fits:
                share, limit = format_percent(candidate.fraction), format_percent(NEAR_CAPACITY, digits=0)
                left_out.append((f"{row.label} is left out: {share} of {terms.capacity}, above {limit}", candidate))
    # Where the longest sequence was searched for, only rows that train it count, to the accuracy of the search.
    # Without a search all lengths are 0, and no row is left out.
    lengths = {each.key: comparison.row(each.key).longest_seq_length or 0 for each in candidates}
    enough = max(lengths.values(), default=0) * (1 - SEARCH_ACCURACY)
    for short in (each for each in candidates if lengths[each.key] < enough):
        at_most = f"it trains sequences of {format_count(lengths[short.key])} tokens at most"
        left_out.append((f"{short.label} is left out: {at_most}", None))
    return Candidates(
        candidates=[each for each in candidates if lengths[each.key] >= enough],
        references=references,
        incomparable=incomparable,
        left_out=left_out,
    )


def _reason_not_eligible(row: ComparisonRow) -> str | None:
    """Why a row with numbers is not eligible; None if it is."""
    count = sum(run.record.outcome.status in remedies.RAN_OUT for run in row.summaries)
    ran_out = f"{count} of its {len(row.summaries)} runs ran out of memory or disk" if count else None
    return row.invalid_reason or ran_out


def _candidate(row: ComparisonRow, comparison: Comparison, terms: MemoryTerms) -> Candidate:
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
        *((run.step_seconds_std, run.mean_step_seconds) for run in row.successes),
    ]
    return max((std / mean for std, mean in pairs if std and mean), default=0.0)


def _on_cpu(comparison: Comparison) -> bool:
    """Whether every row ran on the CPU accelerator."""
    return bool(comparison.rows) and all(row.on_cpu for row in comparison.rows)


def _reason(decision: Decision, candidates: Candidates, comparison: Comparison, goal: str, terms: MemoryTerms) -> str:
    choice = decision.choice
    difference = reasons.speed_difference_text(decision, {row.key: len(row.successes) for row in comparison.rows})
    sentences = ["; ".join(filter(None, [reasons.why(decision, goal, terms), difference]))]
    others = [row for row in decision.speeds.candidates if row.optimizer != choice.optimizer]
    if others:
        steps = f"steps with {others[0].optimizer}" if len(others) == 1 else "step with other optimizers"
        sentences.append(
            f"{format_list([row.label for row in others])} {steps} and not with {choice.optimizer}: "
            f"on CPU ranks no choice is made between optimizers by speed"
        )
    sentences += candidates.sentences(decision)
    if terms is ON_HOST:
        sentences.append("These are CPU ranks: nothing here is a statement about GPUs")
    return ". ".join(sentences)


def _why_no_choice(comparison: Comparison, candidates: Candidates) -> str:
    if not comparison.rows:
        return "There are no rows"
    if candidates.incomparable:
        return "There is no choice among rows that do not compare"
    if candidates.left_out or candidates.references:
        return "No row that trained can be recommended"
    outcomes = [(row.label, run.outcome.status) for row in comparison.rows if (run := remedies.failed_run(row))]
    if len(outcomes) <= _MAX_ROWS_NAMED:
        return "No row trained: " + ", ".join(f"{label} {status}" for label, status in outcomes)
    counts = Counter(status for _, status in outcomes)
    return "No row trained: " + ", ".join(f"{count} {status}" for status, count in counts.items())


def _steps_without_choice(comparison: Comparison, candidates: Candidates) -> Iterator[str]:
    """Steps if no row is chosen: the least change that fits first, then row by row."""
    if not any(row.succeeded for row in comparison.rows):
        yield from filter(None, [remedies.smallest_change(comparison)])
    too_full = {candidate.key for candidate in candidates.candidates if not candidate.fits}
    for row in comparison.rows:
        if row.key in too_full:
            yield from filter(None, [remedies.suggest_for_full_row(row, comparison)])
    yield from _steps_for_failures(comparison)
    yield from _steps_for_caveats([caveat for row in comparison.rows for caveat in row.caveats if caveat.disqualifying])
    yield from _steps_for_caveats(comparison.caveats)


def _next_steps(choice: Candidate, undecided: Sequence[str], comparison: Comparison, goal: str) -> Iterator[str]:
    """Steps if a row is chosen. ``undecided``: labels of the rows between which more runs would decide."""
    row = comparison.row(choice.key)
    if undecided:
        repeats, steps = max(5, 2 * len(row.successes)), max(50, row.trial.workload.num_steps)
        yield f"to decide between {format_list(undecided)}, run them again with --repeats {repeats} --num-steps {steps}"
    yield from _steps_for_failures(comparison)
    yield from _steps_for_caveats(row.caveats)
    yield from filter(None, [remedies.suggest_larger_batch(row, comparison), _rule_of_thumb(comparison, goal)])
    yield from _steps_for_caveats(comparison.caveats)


def _steps_for_failures(comparison: Comparison) -> Iterator[str]:
    """One line per remedy, which may be that of several rows."""
    failed = [row for row in comparison.rows if remedies.failed_run(row) is not None]
    labels_by_remedy: dict[str, list[str]] = {}
    for row in failed[:_MAX_ROWS_NAMED]:
        if text := remedies.remedy(row, comparison):
            # Without the label, so that rows with one remedy share a line.
            labels_by_remedy.setdefault(text.removeprefix(row.label), []).append(row.label)
    for text, labels in labels_by_remedy.items():
        # Of several rows: "A and B were skipped".
        plural = f" were {text[5:]}" if text.startswith(" was ") else text
        yield format_list(labels) + (plural if len(labels) > 1 else text)
    if len(failed) > _MAX_ROWS_NAMED:
        yield f"{len(failed) - _MAX_ROWS_NAMED} more rows failed: the table has their causes"


def _steps_for_caveats(caveats: Sequence[Caveat]) -> Iterator[str]:
    yield from (caveat.next_step for caveat in caveats if caveat.next_step is not None)


def _rule_of_thumb(comparison: Comparison, goal: str) -> str | None:
    """The rule of thumb for the memory that the fastest row without offload uses, or for rows out of memory."""
    comparable = [row for row in comparison.rows if not row.differences and not row.configuration.is_reference]
    without_offload = [row for row in comparable if not row.configuration.offloads_optimizer]
    if not without_offload or _on_cpu(comparison):
        return None
    trained = [
        row for row in without_offload if row.tokens_per_second is not None and _reason_not_eligible(row) is None
    ]
    fitting = [row for row in trained if row.leaves_room]
    # For speed the rule names a row to use, which must leave room; else it speaks of how full the fastest is.
    rows = fitting if goal == "speed" else trained
    fastest = None
    if rows:
        speeds = Speeds(
            candidates=[_candidate(row, comparison, ON_DEVICE) for row in rows], interval_of=_intervals(comparison)
        )
        fastest = comparison.row(decide_for_speed(speeds).simplest_tied.key)
    outcomes = [(row.configuration, run.outcome.status) for row in comparable if (run := remedies.failed_run(row))]
    observed = strategy_guide.ObservedRows(
        fastest_stage=None if fastest is None else fastest.configuration.stage,
        fastest_label=None if fastest is None else fastest.label,
        fraction=None if fastest is None or fastest.fills_memory else fastest.gpu_fraction,
        trained_stages=frozenset(row.configuration.stage for row in fitting),
        out_of_memory_stages=frozenset(
            strategy.stage for strategy, status in outcomes if status == OOM and not strategy.offloads_optimizer
        ),
        full_stages=frozenset(row.configuration.stage for row in trained)
        - {row.configuration.stage for row in fitting},
        failed_offloads=frozenset(
            strategy.name for strategy, status in outcomes if status in remedies.RAN_OUT and strategy.offloads_optimizer
        ),
    )
    num_gpus = without_offload[0].trial.placement.num_gpus
    return strategy_guide.rule_of_thumb(observed, goal=goal, num_gpus=num_gpus)
