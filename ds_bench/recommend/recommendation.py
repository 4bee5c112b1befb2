"""From a comparison to a recommendation: which row to use, why, what it costs, and what to try next.

``decision`` says which rows may be chosen and chooses one, ``remedies`` and ``guide`` have the next steps, and
``words`` puts all of it into sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..analysis.comparison import Comparison, ComparisonRow, ratio_between
from ..analysis.intervals import FEWEST_RUNS
from ..config.caveats import UNSTABLE_KINDS, Caveat, CaveatKind, has_kind
from ..records import schema
from ..units import format_bytes, format_count, format_percent
from . import guide, remedies
from .decision import (
    NEGLIGIBLE,
    ON_HOST,
    Candidate,
    Decision,
    EligibleRows,
    Speeds,
    decide,
    eligible_rows,
    fastest,
    intervals,
    least_memory,
    nearly_least_memory,
)  # fmt: skip
from .words import Fact, format_list, runs_of_each, two_digits

MOST_ROWS_NAMED = 6
"""Rows that are described one by one if many failed or were left out."""
MORE_STEPS = 50
"""Measured steps of a run that is to decide between rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The row to use, as values; the properties put them into words. Every text is one line without escapes."""

    goal: str
    """speed, balanced or memory."""
    choice: str | None = None
    """Label of the row; None if nothing can be recommended."""
    key: str | None = None
    """The row's key in the comparison."""
    tied: tuple[str, ...] = ()
    """Labels of the rows that tie with the fastest (docs/choosing.md); empty if no other does."""
    undecided: tuple[str, ...] = ()
    """Labels of rows, the choice first, that the measurements cannot rank although the difference matters;
    empty if the choice is decided."""
    verdict: Fact
    """The headline: the row to use and why, a tie, or why no row can be recommended."""
    too_few_runs: Fact | None = None
    """Set if fewer than three runs leave the choice open: why, and the command that decides it."""
    other_row: Fact | None = None
    """The fastest row that was not chosen: its lead, and why it was not."""
    other_key: str | None = None
    """The key of that row."""
    facts: tuple[Fact, ...] = ()
    """Why, with the row's numbers and how certain they are, and the rows left out."""
    price: Fact | None = None
    """Speed lost and memory saved against the fastest row that fits."""
    action: Fact | None = None
    """What to try first; None if nothing is left to try."""
    steps: tuple[tuple[tuple[str, ...], Fact], ...] = ()
    """Further steps, most useful first, each with the labels of the failed rows that it is about."""

    @property
    def decided(self) -> bool:
        """Whether the measurements decide, as far as it matters. False too if there is no choice."""
        return self.choice is not None and not self.undecided

    @property
    def headline(self) -> str:
        """The verdict in words."""
        return str(self.verdict)

    @property
    def provisional(self) -> str | None:
        """Why fewer than three runs do not decide the choice, and the command that does."""
        return _text(self.too_few_runs)

    @property
    def alternative(self) -> str | None:
        """The fastest row that was not chosen, in words."""
        return _text(self.other_row)

    @property
    def reason(self) -> str:
        """Why the row was chosen, and the facts, in one line."""
        why = [self.verdict.values["why"]] if "why" in self.verdict.values else []
        return "; ".join(map(str, (*why, *self.facts))) or self.headline

    @property
    def cost(self) -> str | None:
        """Speed lost and memory saved against the fastest row that fits; None if the choice is that row."""
        return _text(self.price)

    @property
    def try_next(self) -> str | None:
        """Flags of the next run, or what else to do first."""
        return _text(self.action)

    @property
    def next_steps(self) -> tuple[str, ...]:
        """Every step in words, each once."""
        return tuple(dict.fromkeys(_step_text(labels, step) for labels, step in self.steps))

    @property
    def lines(self) -> list[str]:
        """For a console: the choice, why, its cost, and each next step on a line of its own."""
        return [*self._answer_lines(), *(f"Next: {step}" for step in self.next_steps)]

    @property
    def lines_beside_notes(self) -> list[str]:
        """The same without the remedies of caveats, where those are listed already."""
        steps = dict.fromkeys(_step_text(labels, step) for labels, step in self.steps if step.kind != "caveat")
        return [*self._answer_lines(), *(f"Next: {step}" for step in steps)]

    def _answer_lines(self) -> list[str]:
        choice = self.choice or "none"
        if self.undecided:
            choice = f"start with {choice}; {format_list(self.undecided)} are too close to call"
        facts = [self.headline, self.provisional, *map(str, self.facts), self.alternative]
        cost = None if self.cost is None else f"Cost: {self.cost}"
        return [f"Recommendation ({self.goal}): {choice}", *filter(None, [*facts, cost])]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        names = ("goal", "choice", "key", "reason", "cost", "next_steps", "tied", "undecided", "provisional")
        return {name: getattr(self, name) for name in (*names, "headline", "alternative", "try_next", "decided")}


def _text(fact: Fact | None) -> str | None:
    return None if fact is None else str(fact)


def _step_text(labels: Sequence[str], step: Fact) -> str:
    if not labels:
        return str(step)
    was = "was" if len(labels) == 1 else "were"
    values = {**step.values, "rows": format_list(labels)}
    if "how" in values:
        values["how"] = values["how"].format(was=was)
    return str(Fact(step.kind, values))


def recommend(comparison: Comparison, goal: str = "balanced", resume: str | None = None) -> Recommendation:
    """The row to use for that goal. ``resume``: the command that goes on with the run; None without one run's folder.

    Raises UsageError for a goal that is none of ``config.options.GOALS``.
    """
    if any(run.trial.workload.pass_type != "train" for row in comparison.rows for run in row.runs):
        return Recommendation(goal=goal, verdict=Fact("other_pass"))
    eligible = eligible_rows(comparison)
    decision = decide(eligible.candidates, goal, intervals(comparison))
    # A single row among rows that do not compare with it was compared with nothing.
    if decision is None or (eligible.incomparable and len(eligible.candidates) < 2):
        return Recommendation(
            goal=goal,
            verdict=_why_no_choice(comparison, eligible),
            facts=tuple(_left_out(eligible)),
            action=_action_without_choice(comparison),
            steps=tuple(_steps_without_choice(comparison, eligible)),
        )
    choice, undecided = decision.choice, decision.undecided
    decide_by = _command_to_decide(decision, comparison, resume)
    too_few = None if decide_by is None or decision.fewest_runs >= FEWEST_RUNS else _too_few_runs(decision, decide_by)
    other_key, other_row = _other_row(decision, eligible, comparison)
    return Recommendation(
        goal=goal,
        choice=choice.label,
        key=choice.key,
        tied=tuple(candidate.label for candidate in decision.tied),
        undecided=tuple(row.label for row in (choice, *undecided)) if undecided else (),
        verdict=_verdict(decision, comparison, goal, eligible),
        too_few_runs=too_few,
        other_row=other_row,
        other_key=other_key,
        facts=tuple(_facts(decision, eligible, other_key)),
        price=_price(decision, eligible),
        action=_action(decision, eligible, comparison, decide_by),
        steps=tuple(_steps(choice, None if too_few else decide_by, comparison, goal)),
    )


# ------------------------------------------------------------------ the verdict


def _verdict(decision: Decision, comparison: Comparison, goal: str, eligible: EligibleRows) -> Fact:
    choice, fewest = decision.choice, decision.fewest_runs
    if decision.undecided:
        spread = two_digits(max(row.step_spread for row in (choice, *decision.undecided)))
        reason = f" after {runs_of_each(fewest)}" if fewest < FEWEST_RUNS else f": runs vary by up to {spread}"
        kind = "tie" if choice == decision.simplest_tied else "tie_for_memory"
        return Fact(kind, {"choice": choice.label, "reason": reason})
    values = {"choice": choice.label, "why": _why(decision, comparison, goal, eligible)}
    length = comparison.row(choice.key).longest_seq_length
    return Fact("use", values) if length is None else Fact("use_longest", {**values, "tokens": length})


def _why(decision: Decision, comparison: Comparison, goal: str, eligible: EligibleRows) -> Fact:
    """The part of the rule that chose the row."""
    choice, best, speeds = decision.choice, decision.simplest_tied, decision.speeds
    values: dict[str, Any] = {
        "row": "DeepSpeed row" if eligible.references else "row",
        "memory": eligible.terms.memory,
        "capacity": eligible.terms.capacity,
        "count": len(speeds.candidates),
        "runs": "",
        "with_optimizer": "",
    }
    if len(speeds.candidates) == 1:
        return Fact("only", values)
    if goal == "memory":
        return Fact(
            "nearly_least_memory" if len(nearly_least_memory(speeds.candidates)) > 1 else "least_memory", values
        )
    if best != choice:  # the rule traded speed for memory
        saved = (best.memory_bytes or 0) - (choice.memory_bytes or 0)
        values |= {"share": _speed_fraction(choice, best), "best": best.label, "saved": saved}
        return Fact("less_memory", {**values, "runs": _untested((choice, best))})
    if choice != decision.fastest and speeds.differ(choice, decision.fastest):
        # Tied although it is slower for certain: as it offloads less (decision.Speeds.tied).
        return Fact("offloads_less", {"best": decision.fastest.label})
    if decision.tied:
        return Fact("simplest", {**values, "count": len(decision.tied)})
    compared = speeds.with_optimizer_of(decision.fastest)
    if len(compared) < len(speeds.candidates):
        values["with_optimizer"] = f" that step with {decision.fastest.optimizer}"
    if len(compared) == 1:
        return Fact("only_with_optimizer", values)
    values |= {"count": len(compared), "runs": _untested(compared)}
    full = any(each.gpu_fraction is not None and not each.leaves_room for each in comparison.rows)
    return Fact("fastest_with_room" if full else "fastest", values)


def _untested(rows: Iterable[Candidate]) -> str:
    """End a headline that rests on too few runs; a sweep shows only the headline."""
    fewest = min(row.runs for row in rows)
    return f", by {runs_of_each(fewest)}" if fewest < FEWEST_RUNS else ""


def _why_no_choice(comparison: Comparison, eligible: EligibleRows) -> Fact:
    if not comparison.rows:
        return Fact("no_rows")
    if eligible.incomparable:
        return Fact("none_compares")
    if any(row.succeeded for row in comparison.rows):
        return Fact("none_valid")
    runs = filter(None, map(remedies.failed_run, comparison.rows))
    counts = Counter(run.outcome.status for run in runs)
    if len(counts) != 1:
        each = ", ".join(f"{count} {status}" for status, count in counts.items())
        return Fact("none_trained_variously", {"counts": each})
    ((status, count),) = counts.items()
    return Fact("none_trained", {"which": ("it", "both")[count - 1] if count < 3 else f"all {count}", "status": status})


def _command_to_decide(decision: Decision, comparison: Comparison, resume: str | None) -> Fact | None:
    """The command that adds runs to an open choice; None for a decided one. ``resume``: it goes on with the run."""
    if not decision.undecided:
        return None
    attempts = max(len(comparison.row(row.key).runs) for row in (decision.choice, *decision.undecided))
    # Runs that failed are not repeated, so each run that is missing is one more.
    missing = FEWEST_RUNS - decision.fewest_runs
    repeats = attempts + missing if missing > 0 else max(5, 2 * attempts)
    return Fact("decide", {"command": resume or "the same command with"}, {"repeats": repeats})


def _too_few_runs(decision: Decision, decide_by: Fact) -> Fact:
    lead = two_digits(max(decision.speeds.chance_lead(decision.choice, row) for row in decision.undecided))
    values = {**decide_by.values, "runs": runs_of_each(decision.fewest_runs), "lead": lead}
    return Fact("provisional", values, decide_by.settings)


# ------------------------------------------------------------------ facts


def _facts(decision: Decision, eligible: EligibleRows, other_key: str | None) -> Iterator[Fact]:
    """The numbers of the choice and how certain it is, then the rows that were left out."""
    choice, speeds, terms = decision.choice, decision.speeds, eligible.terms
    memory = f"{terms.memory} not measured"
    if choice.memory_bytes is not None:
        share = "" if choice.fraction is None else f" ({format_percent(choice.fraction)} of {terms.capacity})"
        memory = f"{format_bytes(choice.memory_bytes)} of {terms.memory}{share}"
    tokens = choice.tokens_per_second
    speed = format_count(tokens) if tokens >= 100 else f"{tokens:.3g}"
    yield Fact("numbers", {"choice": choice.label, "speed": speed, "memory": memory})
    if rivals := [each for each in speeds.with_optimizer_of(choice) if each != choice]:
        yield _lead(choice, fastest(rivals), speeds)
    if others := [row.label for row in speeds.candidates if row.optimizer != choice.optimizer]:
        yield Fact("other_optimizers", {"choice": choice.label, "rows": format_list(others)})
    yield from _left_out(eligible, other_key)
    if terms is ON_HOST:
        yield Fact("on_host")


def _lead(choice: Candidate, rival: Candidate, speeds: Speeds) -> Fact:
    """The difference in speed to the next fastest row, or to the fastest, and whether it is more than the noise."""
    difference = _speed_fraction(choice, rival) - 1
    kind, fewest = "lead" if difference >= 0 else "lag", min(choice.runs, rival.runs)
    if speeds.interval_of(choice, rival) is None:
        kind += "_untested"
    elif not speeds.differ(choice, rival):
        kind += "_in_noise"
    return Fact(kind, {"rival": rival.label, "difference": abs(difference), "runs": runs_of_each(fewest)})


def _left_out(eligible: EligibleRows, other_key: str | None = None) -> list[Fact]:
    """Return one fact for each row with numbers that was not eligible, except ``other_key``, which has its own."""
    facts = [
        Fact("not_comparable", {"row": row.label, "differences": "; ".join(row.differences)})
        for row in eligible.incomparable
    ]
    facts += [Fact("reference", {"row": row.label}) for row in eligible.references if row.key != other_key]
    facts += [
        Fact("left_out", {"row": eligible.labels[key], "reason": reason})
        for key, reason in eligible.left_out.items()
        if key != other_key
    ]
    if (more := len(facts) - MOST_ROWS_NAMED) > 0:
        facts[MOST_ROWS_NAMED:] = [Fact("more_left_out", {"count": more})]
    return facts


def _other_row(decision: Decision, eligible: EligibleRows, comparison: Comparison) -> tuple[str | None, Fact | None]:
    """The fastest row that was not chosen and why it was not, by its key; Nones if nothing speaks for another."""
    choice, speeds = decision.choice, decision.speeds
    if decision.undecided:
        return None, None
    by_key = {candidate.key: candidate for candidate in (*eligible.candidates, *eligible.references)}
    chosen = comparison.row(choice.key)
    rows = [row for row in comparison.rows if row.key != choice.key and not row.differences]
    for row in sorted((row for row in rows if _ahead(row, chosen)), key=lambda row: -(row.tokens_per_second or 0.0)):
        lead = two_digits((row.tokens_per_second or 0.0) / choice.tokens_per_second - 1)
        values: dict[str, Any] = {"row": row.label, "lead": lead}
        candidate = by_key.get(row.key)
        if candidate is None:
            kind = "faster_invalid" if row.invalid_reason is not None else "faster_left_out"
            return row.key, Fact(kind, {**values, "reason": eligible.left_out[row.key]})
        if candidate.optimizer != choice.optimizer:
            return row.key, Fact("faster_optimizer", {**values, "optimizer": candidate.optimizer})
        if not speeds.differ(candidate, choice) or candidate.key == decision.simplest_tied.key:
            continue  # no faster, or weighed against the choice in the headline
        if candidate in eligible.references:
            return row.key, Fact("faster_reference", values)
        if not candidate.fits:
            return row.key, Fact("faster_too_full", {**values, "fraction": candidate.fraction})
        if candidate.memory_bytes is not None and choice.memory_bytes is not None:
            more = candidate.memory_bytes - choice.memory_bytes
            kind = "faster_takes_more" if more > 0 else "faster_offloads_more"
            return row.key, Fact(kind, {**values, "more": more})
    smaller = smaller_equally_fast(choice, speeds)
    if smaller is None:
        return None, None
    saved = (choice.memory_bytes or 0) - (smaller.memory_bytes or 0)
    return smaller.key, Fact("leaner", {"row": smaller.label, "saved": saved})


def _ahead(row: ComparisonRow, chosen: ComparisonRow) -> bool:
    """Whether it was measured faster, and the table does not say that this is within noise."""
    interval = ratio_between(row, chosen)
    ahead = (row.tokens_per_second or 0.0) > (chosen.tokens_per_second or 0.0)
    return ahead and (interval is None or interval.distinguishable)


def smaller_equally_fast(choice: Candidate, speeds: Speeds) -> Candidate | None:
    """Return the row with the least memory among those tied with the choice; None unless it needs less."""
    if choice.memory_bytes is None:
        return None
    smaller = [
        rival
        for rival in speeds.with_optimizer_of(choice)
        if rival != choice
        and rival.memory_bytes is not None
        and rival.memory_bytes * (1 + NEGLIGIBLE) < choice.memory_bytes
        and speeds.interval_of(choice, rival) is not None
        and not speeds.differ(choice, rival)
    ]
    return least_memory(smaller) if smaller else None


def _price(decision: Decision, eligible: EligibleRows) -> Fact | None:
    """Speed lost and memory saved against the fastest row that fits; None if it is that row, or nothing differs."""
    choice, speeds = decision.choice, decision.speeds
    best = fastest(speeds.with_optimizer_of(choice))
    if best == choice:
        return None
    differ = speeds.differ(choice, best)
    values = {"share": 1 - _speed_fraction(choice, best), "best": best.label, "memory": eligible.terms.memory}
    if choice.memory_bytes is None or best.memory_bytes is None or choice.memory_bytes == best.memory_bytes:
        return Fact("slower", values) if differ else None
    saved = best.memory_bytes - choice.memory_bytes
    kind = f"{'slower' if differ else 'tied'}_{'saves' if saved > 0 else 'takes'}"
    return Fact(kind, {**values, "saved": abs(saved)})


def _speed_fraction(choice: Candidate, best: Candidate) -> float:
    return choice.tokens_per_second / best.tokens_per_second


# ------------------------------------------------------------------ what to try


def _action(decision: Decision, eligible: EligibleRows, comparison: Comparison, decide_by: Fact | None) -> Fact | None:
    """What to try first after a choice. ``decide_by``: the command that decides it, if it is open."""
    # Before all else: the rows that are missing may change the choice.
    if any(run.outcome.status == schema.INTERRUPTED for each in comparison.rows for run in each.runs):
        return Fact("interrupted")
    if decide_by is not None:
        return decide_by
    # A row that ran out at its largest size may also be in the table at a smaller one.
    trained = {each.configuration.name for each in comparison.rows if each.fills_memory and each.successes}
    short = [
        row
        for row in comparison.rows
        if row.key in eligible.too_full or (remedies.short_of_memory(row) and row.configuration.name not in trained)
    ]
    return next(_actions(comparison.row(decision.choice.key), short, comparison), None)


def _actions(row: ComparisonRow, short: Sequence[ComparisonRow], comparison: Comparison) -> Iterator[Fact]:
    """The reasons for another run, most useful first. ``row``: the chosen one; ``short``: those short of memory."""
    caveats, workload = [*row.caveats, *comparison.caveats], row.trial.workload
    if short and (less := remedies.settings_for_less_memory(short, comparison)):
        yield Fact("try", settings=less)
    if any(has_kind(each.caveats, CaveatKind.OTHER_ADAM) for each in comparison.rows):
        yield Fact("try", settings={"optimizer.params.torch_adam": "true"})
    if has_kind(caveats, CaveatKind.TOO_FEW_REPEATS):
        yield Fact("try", settings={"repeats": FEWEST_RUNS})
    if has_kind(caveats, CaveatKind.UNSTABLE_RUNS):
        yield Fact("try", settings={"repeats": max(5, 2 * len(row.successes))})
    if has_kind(caveats, CaveatKind.NOT_STEADY):
        yield Fact("try", settings={"warmup_steps": max(10, 2 * workload.warmup_steps)})
    if has_kind(caveats, *UNSTABLE_KINDS, CaveatKind.SHORT_WINDOW):
        yield Fact("try", settings={"num_steps": max(MORE_STEPS, 2 * workload.num_steps)})
    if has_kind(caveats, CaveatKind.CPU_ACCELERATOR):
        yield Fact("try_gpu")
    if (larger := remedies.larger_batch(row, comparison)) is not None:
        yield Fact("try", settings={"batch_size": larger[0]})
    if not row.fills_memory:
        yield Fact("try", settings={"batch_size": "auto"})


def _action_without_choice(comparison: Comparison) -> Fact | None:
    """Options that are predicted to let a row train, or what to do about the cause; None without rows."""
    if (change := remedies.find_smallest_change(comparison)) is not None:
        return Fact("try", settings=remedies.settings_of_change(*change[:2], comparison))
    caveats = [caveat for row in comparison.rows for caveat in row.caveats if caveat.disqualifying]
    if (step := next(_caveat_steps(caveats), None)) is not None:
        return step[1]
    short = [row for row in comparison.rows if remedies.short_of_memory(row) or not row.leaves_room]
    if short:
        if less := remedies.less_memory(short[0], comparison):
            return Fact("try", settings=less)
        run, known = remedies.failed_run(short[0]), remedies.setup_of(short[0], comparison) is not None
        resorts = "" if run is None else remedies.last_resorts(run)
        return Fact("resorts", {"resorts": resorts}) if known else Fact("text", {"text": f"offload, {resorts}"})
    run = next(filter(None, map(remedies.failed_run, comparison.rows)), None)
    return None if run is None else remedies.action_of(run)


_Steps = Iterator[tuple[tuple[str, ...], Fact]]


def _steps(choice: Candidate, decide_by: Fact | None, comparison: Comparison, goal: str) -> _Steps:
    """Further steps after a choice. ``decide_by``: the command that decides it, unless reported already."""
    row = comparison.row(choice.key)
    if decide_by is not None:
        yield (), decide_by
    yield from _steps_for_failures(comparison)
    yield from _caveat_steps(row.caveats)
    if (larger := remedies.larger_batch(row, comparison)) is not None:
        yield (), Fact("larger_batch", {"size": larger[0], "share": larger[1]}, {"batch_size": larger[0]})
    if (rule := guide.rule_for(comparison, goal)) is not None:
        yield (), rule
    yield from _caveat_steps(comparison.caveats)


def _steps_without_choice(comparison: Comparison, eligible: EligibleRows) -> _Steps:
    """Steps if no row is chosen: the least change that fits first, then row by row."""
    smallest = None if any(row.succeeded for row in comparison.rows) else remedies.smallest_change(comparison)
    full = [remedies.remedy_of_full_row(row, comparison) for row in comparison.rows if row.key in eligible.too_full]
    yield from (((), fact) for fact in (smallest, *full) if fact is not None)
    yield from _steps_for_failures(comparison)
    yield from _caveat_steps([caveat for row in comparison.rows for caveat in row.caveats if caveat.disqualifying])
    yield from _caveat_steps(comparison.caveats)


def _steps_for_failures(comparison: Comparison) -> _Steps:
    """One step per remedy; several rows may share it."""
    failed = [row for row in comparison.rows if remedies.failed_run(row) is not None]
    for labels, fact in remedies.remedies_of(failed[:MOST_ROWS_NAMED], comparison):
        yield tuple(labels), fact
    if len(failed) > MOST_ROWS_NAMED:
        yield (), Fact("more_failures", {"count": len(failed) - MOST_ROWS_NAMED})


def _caveat_steps(caveats: Iterable[Caveat]) -> _Steps:
    yield from (((), Fact("caveat", {"remedy": each.next_step})) for each in caveats if each.next_step is not None)
