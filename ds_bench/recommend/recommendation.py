"""Turns a comparison into a recommendation: which row to use, why, what it costs, and what to try next.

``decision`` chooses the row, ``remedies`` says what to do about failures, and ``message_templates`` has the text of
every fact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..analysis.comparison import Comparison, ComparisonRow, ratio_between
from ..analysis.intervals import FEWEST_RUNS
from ..config.caveat_texts import UNSTABLE_KINDS, Caveat, CaveatKind, has_kind
from ..records import schema
from ..system.invocation import OpenCommand
from ..units import BYTES_PER_GB, format_bytes, format_items, format_percent, format_rate
from . import remedies
from .decision import (
    COMFORTABLE_FRACTION,
    NEGLIGIBLE,
    Candidate,
    Decision,
    EligibleRows,
    candidate_of,
    decide,
    eligible_rows,
    fastest,
    intervals,
    nearly_least_memory,
)  # fmt: skip
from .message_templates import Fact, flags, format_list, runs_of_each, two_digits

MAX_ROWS_NAMED = 6
"""Maximum number of failed rows, or of rows left out, that are named one by one."""
MAX_LETTERS_NAMED = 24
"""Maximum number of letters of labels in a headline, so that it fits on one line: enough for four stages."""
MORE_STEPS = 50
"""Measured steps of a run that should decide between rows."""
_LEAVE_FREE = 0.10
"""Fraction of the GPU that a suggested micro-batch leaves free, for memory that does not grow linearly with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The row to use and why. ``str`` of a fact gives its words, on one line without escapes."""

    goal: str
    """``speed``, ``balanced`` or ``memory``."""
    accelerator: str | None = None
    """Where every row ran: ``cuda``, or ``cpu``, whose figures say nothing about GPUs; None if unknown or both."""
    choice: str | None = None
    """Label of the row; None if nothing can be recommended."""
    key: str | None = None
    tied: tuple[str, ...] = ()
    """Labels of the rows tied with the fastest (docs/reading.md); empty without a tie."""
    undecided: tuple[str, ...] = ()
    """Labels of the rows, the choice first, that the measurements cannot rank although their order matters."""
    headline: Fact
    """The row to use and why, a tie, or the reason that no row can be recommended."""
    disturbed: tuple[str, ...] = ()
    """Labels of the rows that ran while the CPU was busy, which makes the answer provisional."""
    provisional: Fact | None = None
    """Set if too few runs leave the choice open. ``try_next`` then has the command to run next."""
    alternative: Fact | None = None
    """The fastest row that was not chosen, its lead, and why it was not chosen."""
    facts: tuple[Fact, ...] = ()
    """The numbers of the choice, how certain they are, and the rows left out."""
    cost: Fact | None = None
    """Speed lost and memory saved relative to the fastest row that fits; None if the choice is that row."""
    try_next: Fact | None = None
    """What to try first; None if nothing is left to try."""
    next_steps: tuple[Fact, ...] = ()
    """Every step, most useful first."""

    @property
    def decided(self) -> bool:
        """Whether the measurements settle every comparison that matters. False without a choice."""
        return self.choice is not None and not self.undecided and not self.disturbed

    @property
    def reason(self) -> str:
        """Why the row was chosen, and the facts, in one line."""
        why = [self.headline.values["why"]] if "why" in self.headline.values else []
        return "; ".join(map(str, (*why, *self.facts))) or str(self.headline)

    @property
    def lines(self) -> list[str]:
        """One line each for the answer, the facts and the next steps; a report's notes have the steps for caveats."""
        # Named here if the headline only counts them, or does not name them.
        unnamed = self.headline.kind == "disturbed" or not _fit_headline(self.undecided)
        tie = [f"Too close to call: {format_list(self.undecided)}"] if self.undecided and unnamed else []
        steps = (f"Next: {step}" for step in self.next_steps if step.kind not in ("caveat", "run_idle"))
        facts = map(str, filter(None, (self.provisional, *self.facts, self.alternative)))
        cost = [] if self.cost is None else [f"Cost: {self.cost}"]
        return [f"Recommendation ({self.goal}): {self.headline}", *tie, *facts, *cost, *steps]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the facts in words."""
        names = (
            "goal", "choice", "key", "reason", "cost", "next_steps", "tied", "undecided", "provisional", "headline",
            "alternative", "try_next", "decided", "accelerator",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        texts = {name: str(value) for name, value in values.items() if isinstance(value, Fact)}
        return {**values, **texts, "next_steps": tuple(map(str, self.next_steps))}


def _fit_headline(labels: Sequence[str]) -> bool:
    """Whether a headline names these rows: two always, more if their names are short; otherwise it counts them."""
    return len(labels) == 2 or sum(map(len, labels)) <= MAX_LETTERS_NAMED


def recommend(comparison: Comparison, goal: str = "balanced", resume: OpenCommand | None = None) -> Recommendation:
    """Recommend a row for a goal.

    ``resume``: the command that continues the run; None unless all rows come from one run folder. Raises UsageError for
    a goal that is not one of ``config.options.GOALS``.
    """
    if any(run.trial.workload.pass_type != "train" for row in comparison.rows for run in row.runs):
        return Recommendation(goal=goal, accelerator=comparison.accelerator, headline=Fact("other_pass"))
    eligible = eligible_rows(comparison)
    decision = decide(eligible.candidates, goal, intervals(comparison))
    # A row that is comparable with no other row has won nothing.
    if decision is None or (eligible.left_out_as("not_comparable") and len(eligible.candidates) < 2):
        return _without_choice(comparison, eligible, goal, resume)
    choice, undecided = decision.choice, decision.undecided
    chosen = comparison.row(choice.key)
    decide_by = Fact("run_idle") if eligible.disturbed else _command_to_decide(decision, comparison, resume)
    provisional = None
    if undecided and decision.fewest_runs < FEWEST_RUNS:
        lead = two_digits(max(decision.speeds.chance_lead(choice, row) for row in undecided))
        runs = runs_of_each([row.runs for row in (choice, *undecided)])
        provisional = Fact("provisional", {"runs": runs, "lead": lead})
    rivals = sorted((choice, *undecided), key=lambda row: row.complexity)
    labels = [row.label for row in rivals]
    named = format_list(labels) if _fit_headline(labels) else f"{len(labels)} rows"
    if all(row.label == f"ZeRO-{row.stage}" for row in rivals):
        named = f"ZeRO-{format_list([str(row.stage) for row in rivals])}"
    if eligible.disturbed and undecided and goal != "memory":
        headline = Fact("disturbed_tie", {"choice": choice.label, "rows": named})
    elif eligible.disturbed:
        rows = decision.speeds.candidates
        # For memory, rows with a different optimizer compete as well.
        compared = rows if goal == "memory" else decision.speeds.with_optimizer_of(choice)
        tied = "looks as fast as any" if choice in decision.tied else "looks best"
        looks = "looks fastest" if choice == decision.fastest else tied
        if goal == "memory":
            looks = "looks best for memory"
        if len(rows) == 1:
            looks = "is the only row that can be recommended"
        elif len(compared) == 1:
            looks = f"is the only row with {_optimizer_name(choice)}, and speed does not decide between optimizers"
        elif len(compared) < len(rows):
            looks += f" of the rows that train with {_optimizer_name(choice)}"
        headline = Fact("disturbed", {"choice": choice.label, "looks": looks})
    elif undecided:
        kind = "tie" if choice == decision.simplest_tied else "tie_for_memory"
        headline = Fact(kind, {"choice": choice.label, "rows": named})
    else:
        values = {"choice": choice.label, "why": _why(decision, eligible, comparison, goal)}
        length = chosen.longest_seq_length
        headline = Fact("use", values) if length is None else Fact("use_longest", {**values, "tokens": length})
    alternative = None if decide_by else _alternative(decision, eligible, comparison)
    return Recommendation(
        goal=goal,
        accelerator=comparison.accelerator,
        choice=choice.label,
        key=choice.key,
        tied=tuple(candidate.label for candidate in decision.tied),
        undecided=tuple(row.label for row in (choice, *undecided)) if undecided else (),
        disturbed=tuple(eligible.disturbed),
        headline=headline,
        provisional=provisional,
        alternative=alternative,
        facts=tuple(_facts(decision, eligible, comparison, alternative)),
        cost=_cost(decision, eligible),
        try_next=next(_actions(chosen, decide_by, eligible, comparison, resume), None),
        next_steps=_once(_steps(chosen, decide_by, comparison)),
    )


def _once(steps: Iterable[Fact]) -> tuple[Fact, ...]:
    return tuple({str(step): step for step in steps}.values())


# ------------------------------------------------------------------ the headline


def _why(decision: Decision, eligible: EligibleRows, comparison: Comparison, goal: str) -> Fact:
    """Return the part of the rule that chose the row."""
    choice, best, speeds = decision.choice, decision.simplest_tied, decision.speeds
    rows = speeds.candidates
    compared = speeds.with_optimizer_of(decision.fastest)
    optimizer = _optimizer_name(decision.fastest) if len(compared) < len(rows) else ""
    row = "DeepSpeed row" if eligible.left_out_as("reference") else "row"
    values = {**eligible.terms._asdict(), "row": row, "count": len(rows)}
    values["with_optimizer"] = optimizer and f" that steps with {optimizer}"
    values["all_with_optimizer"] = optimizer and f" that step with {optimizer}"
    if len(rows) == 1:
        return Fact("only", values)
    if goal == "memory":
        return Fact("nearly_least_memory" if len(nearly_least_memory(rows)) > 1 else "least_memory", values)
    # A sweep shows only the headline, so the headline itself must say that there are too few runs.
    runs = [each.runs for each in ((choice, best) if best != choice else compared)]
    values["runs"] = f" after {runs_of_each(runs)}" if min(runs) < FEWEST_RUNS else ""
    if best != choice:  # the rule traded speed for memory
        saved = (best.memory_bytes or 0) - (choice.memory_bytes or 0)
        share = choice.tokens_per_second / best.tokens_per_second
        return Fact("less_memory", {**values, "share": share, "best": best.label, "saved": saved})
    if choice != decision.fastest and speeds.differ(choice, decision.fastest):
        # It is certainly slower, but counts as tied because it offloads less (decision.Speeds.tied).
        return Fact("offloads_less", {"best": decision.fastest.label})
    if decision.tied:
        return Fact("simplest", {**values, "count": len(decision.tied)})
    if len(compared) == 1:
        return Fact("only_with_optimizer", values)
    rival = fastest([row for row in compared if row != choice])
    ratio = choice.tokens_per_second / rival.tokens_per_second
    ahead = f"{two_digits(ratio - 1)} ahead of" if ratio < 2 else f"{ratio:.1f} times as fast as"
    is_short = len(choice.label) + len(rival.label) <= MAX_LETTERS_NAMED
    values |= {"count": len(compared), "ahead": f", {ahead} {rival.label}" if is_short else ""}
    if any(each.gpu_fraction is not None and not each.leaves_room for each in comparison.rows):
        return Fact("fastest_with_room", values)
    ran_out = any(map(remedies.short_of_memory, comparison.rows)) and not optimizer
    return Fact("fastest_that_fits" if ran_out else "fastest", values)


def _optimizer_name(candidate: Candidate) -> str:
    """Return the class of the row's optimizer. DeepSpeed's own classes have different names from torch's."""
    return f"torch's {candidate.optimizer}" if candidate.optimizer in ("Adam", "AdamW") else str(candidate.optimizer)


def _command_to_decide(decision: Decision, comparison: Comparison, resume: OpenCommand | None) -> Fact | None:
    """Return the command that adds the runs an open choice needs; None if it is decided."""
    if not decision.undecided:
        return None
    attempts = max(len(comparison.row(row.key).runs) for row in (decision.choice, *decision.undecided))
    # Runs that failed are not repeated, so each missing run needs another attempt.
    missing = FEWEST_RUNS - decision.fewest_runs
    repeats = attempts + missing if missing > 0 else max(5, 2 * attempts)
    settings = {"repeats": repeats}
    if resume is None:
        return Fact("decide_again", settings=settings)
    return Fact("decide", {"command": resume.with_flags(flags(settings))})


# ------------------------------------------------------------------ facts


def _facts(
    decision: Decision, eligible: EligibleRows, comparison: Comparison, alternative: Fact | None
) -> Iterator[Fact]:
    """Yield the numbers of the choice and how certain they are, then the rows that were left out."""
    choice, speeds, terms = decision.choice, decision.speeds, eligible.terms
    memory = f"{terms.memory} not measured"
    if choice.memory_bytes is not None:
        share = "" if choice.fraction is None else f" ({format_percent(choice.fraction)} of {terms.capacity})"
        memory = f"{format_bytes(choice.memory_bytes)} of {terms.memory}{share}"
    tokens = choice.tokens_per_second
    unit = comparison.row(choice.key).rate_unit
    yield Fact("numbers", {"choice": choice.label, "speed": format_rate(tokens), "memory": memory, "unit": unit})
    if others := [row.label for row in speeds.candidates if row.optimizer != choice.optimizer]:
        yield Fact("other_optimizers", {"choice": choice.label, "rows": others})
    yield from _left_out(eligible, comparison, alternative)


def _left_out(eligible: EligibleRows, comparison: Comparison, alternative: Fact | None = None) -> list[Fact]:
    """Return a fact for each row with numbers that was left out, except the alternative."""
    facts = [
        Fact("left_out", {"row": comparison.row(key).label, "reason": reason})
        for key, reason in eligible.left_out.items()
        if alternative is None or key != alternative.values["key"]
    ]
    if (more := len(facts) - MAX_ROWS_NAMED) > 0:
        facts[MAX_ROWS_NAMED:] = [Fact("more_left_out", {"count": more})]
    return facts


def _alternative(decision: Decision, eligible: EligibleRows, comparison: Comparison) -> Fact | None:
    """Return the fastest row that was not chosen, and why; None if no other row has an advantage."""
    choice, speeds = decision.choice, decision.speeds
    chosen = comparison.row(choice.key)
    rows = [(row.tokens_per_second or 0.0, row) for row in comparison.rows if not row.differences]
    for speed, row in sorted(rows, key=lambda each: -each[0]):
        interval = ratio_between(row, chosen)
        # Not ahead, or only within the noise that the table shows.
        if speed <= (chosen.tokens_per_second or 0.0) or (interval is not None and not interval.distinguishable):
            continue
        reason, candidate = eligible.left_out.get(row.key), candidate_of(row, comparison, eligible.terms)
        values: dict[str, Any] = {
            "row": row.label,
            "key": row.key,
            "lead": two_digits(speed / choice.tokens_per_second - 1),
        }
        if reason is None and candidate.optimizer != choice.optimizer:
            return Fact("faster_optimizer", {**values, "optimizer": candidate.optimizer})
        if not speeds.differ(candidate, choice) or candidate.key == decision.simplest_tied.key:
            continue  # no faster, or already weighed in the headline
        if reason is not None:
            return Fact("faster_left_out", {**values, "reason": reason})
        if candidate.memory_bytes is not None and choice.memory_bytes is not None:
            more = candidate.memory_bytes - choice.memory_bytes
            return Fact("faster_takes_more" if more > 0 else "faster_offloads_more", {**values, "more": more})
    return None


def _cost(decision: Decision, eligible: EligibleRows) -> Fact | None:
    """Return speed lost and memory saved relative to the fastest row that fits; None if the choice is no different."""
    choice, speeds = decision.choice, decision.speeds
    best = fastest(speeds.with_optimizer_of(choice))
    if best == choice:
        return None
    saved, memory = (best.memory_bytes or 0) - (choice.memory_bytes or 0), eligible.terms.memory
    if None in (choice.memory_bytes, best.memory_bytes) or abs(saved) <= NEGLIGIBLE * (best.memory_bytes or 0):
        saved = 0
    values = {"best": best.label, "share": 1 - choice.tokens_per_second / best.tokens_per_second}
    values["saved"] = f"{format_bytes(abs(saved))} {'less' if saved > 0 else 'more'} {memory}" if saved else ""
    if speeds.differ(choice, best):
        return Fact("slower_with_other_memory" if saved else "slower", values)
    return Fact("tied_with_other_memory", values) if saved else None


# ------------------------------------------------------------------ what to try


def _actions(
    row: ComparisonRow,
    decide_by: Fact | None,
    eligible: EligibleRows,
    comparison: Comparison,
    resume: OpenCommand | None,
) -> Iterator[Fact]:
    """Yield reasons for another run, most useful first. ``row``: the choice. ``decide_by``: the step to decide it."""
    caveats, workload = [*row.caveats, *comparison.caveats], row.trial.workload
    # First, because the missing rows may change the choice.
    if _was_interrupted(comparison):
        yield Fact("resume", {"command": resume or "the same command with --resume RUN_DIR"})
    if decide_by is not None:
        yield decide_by
    # A row that ran out of memory at its largest size may have trained at a smaller one.
    trained = {each.configuration.name for each in comparison.rows if each.fills_memory and each.successes}
    short = [
        each
        for each in comparison.rows
        if each.key in eligible.left_out_as("too_full")
        or (remedies.short_of_memory(each) and each.configuration.name not in trained)
    ]
    if less := remedies.settings_for_less_memory(short, comparison):
        yield Fact("try", settings=less)
    if any(has_kind(each.caveats, CaveatKind.OTHER_ADAM) for each in comparison.rows):
        yield Fact("try", settings={"optimizer.params.torch_adam": "true"})
    if has_kind(caveats, CaveatKind.TOO_FEW_REPEATS):
        yield Fact("try", settings={"repeats": FEWEST_RUNS})
    if has_kind(caveats, CaveatKind.EVALUATED):  # which may explain unsteady steps
        yield Fact("caveat", {"remedy": CaveatKind.EVALUATED.remedy})
    if has_kind(caveats, CaveatKind.UNSTABLE_RUNS):
        yield Fact("try", settings={"repeats": max(5, 2 * len(row.successes))})
    if has_kind(caveats, CaveatKind.NOT_STEADY):
        yield Fact("try", settings={"warmup_steps": max(10, 2 * workload.warmup_steps)})
    if has_kind(caveats, *UNSTABLE_KINDS, CaveatKind.SHORT_WINDOW):
        yield Fact("try", settings={"num_steps": max(MORE_STEPS, 2 * workload.num_steps)})
    if has_kind(caveats, CaveatKind.CPU_ACCELERATOR):
        yield Fact("try_gpu")
    if (larger := _larger_batch(row, comparison)) is not None:
        yield Fact("try", settings={"batch_size": larger[0]})
    if not row.fills_memory:
        yield Fact("try", settings={"batch_size": "auto"})


def _steps(row: ComparisonRow, decide_by: Fact | None, comparison: Comparison) -> Iterator[Fact]:
    """Yield the steps that follow a choice. ``decide_by``: the step that decides it."""
    if decide_by is not None:
        yield decide_by
    yield from _steps_for_failures(comparison)
    yield from _caveat_steps(row.caveats)
    if (larger := _larger_batch(row, comparison)) is not None:
        yield Fact("larger_batch", {"size": larger[0], "share": larger[1]})
    yield from _caveat_steps(comparison.caveats)


def _larger_batch(row: ComparisonRow, comparison: Comparison) -> tuple[int, float] | None:
    """Return the largest micro-batch, by doubling, predicted to leave memory free, and its share of the card.

    None if unknown or if none does. Only activations are assumed to grow, linearly; they must have been measured for
    this row. A row at its own largest micro-batch is not extended, because the search has tried more.
    """
    capacity, fraction = comparison.device_capacity_bytes, row.gpu_fraction
    if capacity is None or fraction is None or fraction >= COMFORTABLE_FRACTION or row.fills_memory:
        return None
    measured = row.successes[0].row
    activation_bytes = round((measured.ledger_gpu_activations_gb or 0.0) * BYTES_PER_GB)
    if not activation_bytes or measured.batch_size is None:
        return None
    factor = 1
    # One batch of activations is in the fraction already: twice the factor adds 2 * factor - 1 of them.
    while fraction * capacity + activation_bytes * (2 * factor - 1) <= (1 - _LEAVE_FREE) * capacity:
        factor *= 2
    if factor == 1:
        return None
    return measured.batch_size * factor, fraction + activation_bytes * (factor - 1) / capacity


def _steps_for_failures(comparison: Comparison) -> Iterator[Fact]:
    """Yield one step per remedy, which several rows may share."""
    failed = [row for row in comparison.rows if remedies.failed_run(row) is not None]
    yield from remedies.remedies_of(failed[:MAX_ROWS_NAMED], comparison)
    if len(failed) > MAX_ROWS_NAMED:
        yield Fact("more_failures", {"rows": format_items(len(failed) - MAX_ROWS_NAMED, "more row")})


def _caveat_steps(caveats: Sequence[Caveat]) -> Iterator[Fact]:
    explained = (CaveatKind.UNSTABLE_STEPS, CaveatKind.NOT_STEADY) if has_kind(caveats, CaveatKind.EVALUATED) else ()
    steps = (each.kind.remedy for each in caveats if each.kind not in explained)
    yield from (Fact("caveat", {"remedy": step}) for step in steps if step is not None)


def _was_interrupted(comparison: Comparison) -> bool:
    return any(run.outcome.status == schema.INTERRUPTED for row in comparison.rows for run in row.runs)


# ------------------------------------------------------------------ no choice


def _without_choice(
    comparison: Comparison, eligible: EligibleRows, goal: str, resume: OpenCommand | None
) -> Recommendation:
    """Say why no row is recommended, and what would make one train."""
    failed = list(filter(None, map(remedies.failed_run, comparison.rows)))
    smallest = remedies.smallest_change(comparison)
    disqualifying = [caveat for row in comparison.rows for caveat in row.caveats if caveat.kind.disqualifies]
    causes = list(_caveat_steps(disqualifying))
    short = [row for row in comparison.rows if remedies.short_of_memory(row) or not row.leaves_room]
    trained = any(row.succeeded for row in comparison.rows)
    if not comparison.rows:
        headline = Fact("no_rows")
    elif eligible.left_out_as("not_comparable"):
        headline = Fact("none_compares")
    elif trained:
        headline = Fact("none_valid")
    else:
        counts = Counter(run.outcome.status for run in failed)
        headline = Fact("none_trained", {"counts": [f"{count} {status}" for status, count in counts.items()]})
    # Settings predicted to make a row train, else what to do about the cause.
    try_next = None
    if resume is not None and _was_interrupted(comparison):
        try_next = Fact("resume", {"command": resume})
    elif smallest is not None and smallest.settings:
        try_next = Fact("try", settings=smallest.settings)
    elif causes:
        try_next = causes[0]
    elif short and (less := remedies.less_memory(short[0], comparison)):
        try_next = Fact("try", settings=less)
    elif short:
        run = remedies.failed_run(short[0]) or short[0].last_run
        setup = remedies.setup_of(short[0], comparison)
        resorts = remedies.last_resorts(run) if setup else remedies.ways_to_less_memory(run, comparison)
        try_next = Fact("resorts" if setup else "try_resorts", {"resorts": resorts})
    elif failed:
        try_next = remedies.action_of(failed[0])
    # First the smallest change that makes a row fit, then row by row.
    steps = [] if smallest is None or trained else [smallest]
    for row in map(comparison.row, eligible.left_out_as("too_full")):
        if excess := remedies.excess_bytes(row, comparison):
            change = remedies.suggestion(remedies.setup_of(row, comparison), row.successes[0], comparison)
            steps.append(Fact("over_limit", {"row": row.label, "excess": excess, "change": change}))
    steps += [*_steps_for_failures(comparison), *causes, *_caveat_steps(comparison.caveats)]
    return Recommendation(
        goal=goal,
        accelerator=comparison.accelerator,
        headline=headline,
        facts=tuple(_left_out(eligible, comparison)),
        try_next=try_next,
        next_steps=_once(steps),
    )
