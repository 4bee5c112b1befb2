"""From a comparison to a recommendation: which row to use, why, what it costs, and what to try next.

``eligibility`` tells which rows may be chosen, ``decision`` chooses one, ``reasons`` words why, ``short_answer`` says
it at a glance, and ``remedies`` and ``rules_of_thumb`` have the next steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..analysis.comparison import Comparison
from ..config.caveats import Caveat
from . import reasons, remedies, rules_of_thumb, short_answer
from .decision import Candidate, Decision, decide
from .eligibility import ON_HOST, EligibleRows, eligible_rows, intervals
from .reasons import MOST_ROWS_NAMED
from .short_answer import format_list


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

    provisional: str | None = None
    """Why fewer than three runs do not decide the choice, and the command that does; None if they do, or more ran."""
    headline: str = ""
    """The row to use and why, that it is too close to call, or why there is none."""
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
            choice = f"start with {choice}; {format_list(self.undecided)} are too close to call"
        provisional = [] if self.provisional is None else [self.provisional]
        cost = [] if self.cost is None else [f"Cost: {self.cost}"]
        steps = [f"Next: {step}" for step in self.next_steps]
        return [f"Recommendation ({self.goal}): {choice}", *provisional, f"Why: {self.reason}", *cost, *steps]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "decided": self.decided}


def recommend(comparison: Comparison, goal: str = "balanced", resume: str | None = None) -> Recommendation:
    """The row to use for that goal. ``resume``: the command that goes on with the run; None without one run's folder.

    Raises UsageError for a goal that is none of ``config.options.GOALS``.
    """
    if any(run.trial.workload.pass_type != "train" for row in comparison.rows for run in row.runs):
        reason = "These are passes of the model alone: a configuration is chosen by training steps"
        return Recommendation(goal=goal, reason=reason, headline=f"{reason}.")
    eligible = eligible_rows(comparison)
    decision = decide(eligible.candidates, goal, intervals(comparison))
    # One row beside rows that do not compare with it was compared with nothing.
    if decision is None or (eligible.incomparable and len(eligible.candidates) < 2):
        reason, headline = reasons.why_no_choice(comparison, eligible)
        return Recommendation(
            goal=goal,
            reason=". ".join([reason, *reasons.rows_left_out(eligible)]),
            next_steps=tuple(dict.fromkeys(_steps_without_choice(comparison, eligible))),
            headline=headline,
            try_next=short_answer.try_without_choice(comparison),
        )
    undecided = [row.label for row in (decision.choice, *decision.undecided)] if decision.undecided else []
    reason, short_reason = reasons.why(decision, comparison, goal, eligible)
    command = short_answer.command_to_decide(decision, comparison, resume)
    provisional = short_answer.say_provisional(decision, command)
    steps = _next_steps(decision.choice, None if provisional else command, comparison, goal)
    return Recommendation(
        goal=goal,
        choice=decision.choice.label,
        key=decision.choice.key,
        reason=_whole_reason(reason, decision, eligible),
        cost=reasons.cost(decision, eligible.terms),
        next_steps=tuple(dict.fromkeys(steps)),
        tied=tuple(candidate.label for candidate in decision.tied),
        undecided=tuple(undecided),
        provisional=provisional,
        headline=short_answer.say_choice(decision, comparison, short_reason),
        alternative=short_answer.say_alternative(decision, eligible, comparison),
        try_next=short_answer.try_after_choice(decision, eligible, comparison, command),
    )


def _whole_reason(why: str, decision: Decision, eligible: EligibleRows) -> str:
    """``why`` with how certain the choice is, and the rows that are no choice."""
    choice = decision.choice
    sentences = ["; ".join(filter(None, [why, reasons.speed_difference_text(decision)]))]
    others = [row for row in decision.speeds.candidates if row.optimizer != choice.optimizer]
    if others:
        steps = f"steps with {others[0].optimizer}" if len(others) == 1 else "step with other optimizers"
        sentences.append(
            f"{format_list([row.label for row in others])} {steps} and not with {choice.optimizer}: "
            f"on CPU ranks no choice is made between optimizers by speed"
        )
    sentences += reasons.rows_left_out(eligible, decision)
    if eligible.terms is ON_HOST:
        sentences.append("These are CPU ranks: nothing here is a statement about GPUs")
    return ". ".join(sentences)


def _steps_without_choice(comparison: Comparison, eligible: EligibleRows) -> Iterator[str]:
    """Steps if no row is chosen: the least change that fits first, then row by row."""
    if not any(row.succeeded for row in comparison.rows):
        yield from filter(None, [remedies.smallest_change(comparison)])
    for left_out in eligible.left_out.values():
        if left_out.too_full is not None:
            yield from filter(None, [remedies.suggest_for_full_row(left_out.row, comparison)])
    yield from _steps_for_failures(comparison)
    yield from _steps_for_caveats([caveat for row in comparison.rows for caveat in row.caveats if caveat.disqualifying])
    yield from _steps_for_caveats(comparison.caveats)


def _next_steps(choice: Candidate, to_decide: str | None, comparison: Comparison, goal: str) -> Iterator[str]:
    """Steps if a row is chosen. ``to_decide``: the command that decides between tied rows, if that is still open."""
    row = comparison.row(choice.key)
    if to_decide is not None:
        yield f"to decide: {to_decide}"
    yield from _steps_for_failures(comparison)
    yield from _steps_for_caveats(row.caveats)
    yield from filter(None, [remedies.suggest_larger_batch(row, comparison), rules_of_thumb.rule_for(comparison, goal)])
    yield from _steps_for_caveats(comparison.caveats)


def _steps_for_failures(comparison: Comparison) -> Iterator[str]:
    """One line per remedy, which may be that of several rows."""
    failed = [row for row in comparison.rows if remedies.failed_run(row) is not None]
    labels_by_remedy: dict[str, list[str]] = {}
    for row in failed[:MOST_ROWS_NAMED]:
        if text := remedies.remedy(row, comparison):
            # Without the label, so that rows with one remedy share a line.
            labels_by_remedy.setdefault(text.removeprefix(row.label), []).append(row.label)
    for text, labels in labels_by_remedy.items():
        # Of several rows: "A and B were skipped".
        plural = f" were {text[5:]}" if text.startswith(" was ") else text
        yield format_list(labels) + (plural if len(labels) > 1 else text)
    if len(failed) > MOST_ROWS_NAMED:
        yield f"{len(failed) - MOST_ROWS_NAMED} more rows failed: the table has their causes"


def _steps_for_caveats(caveats: Sequence[Caveat]) -> Iterator[str]:
    yield from (caveat.next_step for caveat in caveats if caveat.next_step is not None)
