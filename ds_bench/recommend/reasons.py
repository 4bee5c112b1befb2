"""The sentences of a recommendation: why a row was chosen, how certain that is, what it costs, and what was left out.

What a recommendation says at length and in its headline is worded side by side. Nothing is decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..analysis.comparison import Comparison
from ..analysis.intervals import FEWEST_RUNS
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..units import format_bytes, format_count, format_gigabytes, format_percent
from . import remedies
from .decision import (
    COMFORTABLE_FRACTION,
    MIN_SPEED_FRACTION,
    NEGLIGIBLE,
    Candidate,
    Decision,
    Speeds,
    fastest,
    least_memory,
    nearly_least_memory,
    same_offload_nearly_as_fast,
)
from .eligibility import EligibleRows, MemoryTerms

MOST_ROWS_NAMED = 6
"""Rows that are described one by one if many failed or were left out."""


def why(decision: Decision, comparison: Comparison, goal: str, eligible: EligibleRows) -> tuple[str, str]:
    """The part of the rule that chose the row: one sentence with its numbers, and a few words for the headline.

    Both without a full stop.
    """
    choice, best, fitting = decision.choice, decision.simplest_tied, decision.speeds.candidates
    terms, row = eligible.terms, _row_noun(eligible)
    numbers = f"{_speed(choice)} tokens/s with {_memory(choice, terms)}"
    if len(fitting) == 1:
        only = f"the only {row} that trained and fits"
        return f"{choice.label} is {only}: {numbers}", f"{only} {terms.capacity}"
    if goal == "memory":
        near = f"within {whole_percent(NEGLIGIBLE)} of others" if len(nearly_least_memory(fitting)) > 1 else ""
        within = f", {near}," if near else ""
        return (
            f"{choice.label} needs the least {terms.memory}{within} of the {len(fitting)} {row}s that fit: {numbers}",
            ", ".join(filter(None, [f"least {terms.memory} of {len(fitting)} {row}s", near])),
        )
    if best != choice:  # the rule traded speed for memory
        share = _speed_fraction(choice, best)
        tie = " or cannot be told from it" if share < MIN_SPEED_FRACTION else ""
        sentence = (
            f"{choice.label} needs the least {terms.memory} of the rows that offload alike and reach "
            f"{whole_percent(MIN_SPEED_FRACTION)} of {best.label}'s speed{tie}: {numbers}, "
            f"{format_percent(share)} of {best.label}'s {_speed(best)} tokens/s with "
            f"{format_bytes(best.memory_bytes)} ({format_percent(best.fraction)})"
        )
        saved = format_gigabytes((best.memory_bytes or 0) - (choice.memory_bytes or 0))
        short = f"{whole_percent(share)} of {best.label}'s speed with {saved} less of {terms.memory}"
        return sentence, short + _untested((choice, best))
    rank, short_rank = _speed_rank(decision, comparison, eligible)
    head = f"{choice.label} is {rank}: {numbers}"
    return head if goal == "speed" else f"{head}{_why_no_less_memory(decision, terms)}", short_rank


def _row_noun(eligible: EligibleRows) -> str:
    """What the rows are called that the choice is made from: beside torch's own engines, only those of DeepSpeed."""
    return "DeepSpeed row" if eligible.references else "row"


def _speed_rank(decision: Decision, comparison: Comparison, eligible: EligibleRows) -> tuple[str, str]:
    """The place of the choice among the rows by speed, in some words and in fewer."""
    terms, row = eligible.terms, _row_noun(eligible)
    choice, best, speeds, count = decision.choice, decision.fastest, decision.speeds, len(decision.tied)
    simplest = f"simplest of {count} {row}s that are tied by speed"
    if choice != best and speeds.differ(choice, best):
        # Tied although it is slower for certain: as it offloads less (decision.Speeds.tied).
        text = f"within {whole_percent(NEGLIGIBLE)} of the fastest, {best.label}, and offloads less"
        return text, text
    if choice != best:
        return (
            f"the simplest of the {count} {row}s tied with the fastest, {best.label}",
            simplest,
        )
    compared = speeds.with_optimizer_of(best)
    steps = "" if len(compared) == len(speeds.candidates) else f"step with {best.optimizer}"
    long, short = (f" and {steps}", f" that {steps}") if steps else ("", "")
    if len(compared) == 1:
        return f"the only {row} to fit{long}", f"the only {row}{short}"
    rank = f"the fastest of the {len(compared)} {row}s that fit{long}"
    if decision.tied:
        return rank, simplest
    untested = _untested(compared)
    if any(each.gpu_fraction is not None and not each.leaves_room for each in comparison.rows):
        return rank, f"fastest {row}{short} under {whole_percent(NEAR_CAPACITY)} of {terms.capacity}{untested}"
    return rank, f"fastest of {len(compared)} {row}s{short}{untested}"


def _untested(rows: Iterable[Candidate]) -> str:
    """The end of a headline from too few runs. Not in the table alone: of a sweep nothing but the headline is shown."""
    fewest = min(row.runs for row in rows)
    return f", by {runs_of_each(fewest)}" if fewest < FEWEST_RUNS else ""


def runs_of_each(count: int) -> str:
    return "one run each" if count == 1 else f"{count} runs each"


def _why_no_less_memory(decision: Decision, terms: MemoryTerms) -> str:
    """Why no speed was given up for memory."""
    choice = decision.choice
    if choice.fills_memory:
        return f"; it fills the memory on purpose, so how full {terms.capacity} is weighs nothing"
    if choice.fraction is None:
        return f"; how much of {terms.capacity} that is cannot be told, so nothing is traded for memory"
    if choice.comfortable:
        return f", under the {whole_percent(COMFORTABLE_FRACTION)} from which less memory would be worth speed"
    others = len(same_offload_nearly_as_fast(choice, decision.speeds)) > 1
    rest = "and needs less" if others else f"and reaches {whole_percent(MIN_SPEED_FRACTION)} of its speed"
    return f"; no other row offloads alike {rest}"


def why_no_choice(comparison: Comparison, eligible: EligibleRows) -> tuple[str, str]:
    """Why there is no row to use: one sentence without its full stop, and the headline."""
    if not comparison.rows:
        return "There are no rows", "No row to use: nothing was run."
    if eligible.incomparable:
        return (
            "There is no choice among rows that do not compare",
            "No row to use: the rows do not compare with each other.",
        )
    if any(row.succeeded for row in comparison.rows):
        return (
            "No row that trained can be recommended",
            "No row to use: the reasons stand beside the rows that trained.",
        )
    outcomes = [(row.label, run.outcome.status) for row in comparison.rows if (run := remedies.failed_run(row))]
    counts = Counter(status for _, status in outcomes)
    counted = ", ".join(f"{count} {status}" for status, count in counts.items())
    few = len(outcomes) <= MOST_ROWS_NAMED
    sentence = f"No row trained: {', '.join(f'{label} {status}' for label, status in outcomes) if few else counted}"
    if len(counts) != 1:
        return sentence, f"No row trained: {counted}."
    ((status, count),) = counts.items()
    return (
        sentence,
        f"No row trained: {('it', 'both')[count - 1] if count < 3 else f'all {count}'} ended with {status}.",
    )


def rows_left_out(eligible: EligibleRows, decision: Decision | None = None) -> list[str]:
    """One sentence for each row with numbers that is no choice; for rows that are too full what leaving them out
    costs."""
    sentences = [
        f"{row.label} does not compare with the others ({'; '.join(row.differences)})" for row in eligible.incomparable
    ]
    sentences += [_reference_text(row, decision) for row in eligible.references]
    for each in eligible.left_out.values():
        cost = None if each.too_full is None or decision is None else _cost_of_leaving_out(each.too_full, decision)
        sentences.append("; ".join(filter(None, [f"{each.row.label} is left out: {each.reason}", cost])))
    if (more := len(sentences) - MOST_ROWS_NAMED) > 0:
        sentences[MOST_ROWS_NAMED:] = [f"{more} more {'row is' if more == 1 else 'rows are'} left out"]
    return sentences


def speed_difference_text(decision: Decision) -> str | None:
    """The difference in speed to the next fastest row, or to the fastest, and whether it is more than the noise.

    None without a second row.
    """
    choice, speeds = decision.choice, decision.speeds
    rivals = [candidate for candidate in speeds.with_optimizer_of(choice) if candidate != choice]
    if not rivals:
        return None
    rival = fastest(rivals)
    difference = choice.tokens_per_second / rival.tokens_per_second - 1
    kind = "lead over" if difference >= 0 else "lag behind"
    fewest = min(choice.runs, rival.runs)
    runs_text = runs_of_each(fewest)
    if speeds.interval_of(choice, rival) is not None:
        verdict = f"{'more than' if speeds.differ(choice, rival) else 'inside'} the noise of {runs_text}"
    else:
        verdict = f"not tested: {runs_text}, {FEWEST_RUNS} are needed" if fewest < FEWEST_RUNS else "not tested"
    text = f"its {kind} {rival.label} ({format_percent(abs(difference))}) is {verdict}"
    smaller = smaller_equally_fast(choice, speeds)
    if smaller is None:
        return text
    saved = format_bytes((choice.memory_bytes or 0) - (smaller.memory_bytes or 0))
    return f"{text}; {smaller.label} needs {saved} less and cannot be told from it by speed: take it if memory matters"


def smaller_equally_fast(choice: Candidate, speeds: Speeds) -> Candidate | None:
    """The row of least memory whose speed cannot be told from that of the choice; None if none needs less."""
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


def cost(decision: Decision, terms: MemoryTerms) -> str | None:
    """Speed lost and memory saved against the fastest row that fits; None if it is that row, or nothing differs."""
    choice, speeds = decision.choice, decision.speeds
    best = fastest(speeds.with_optimizer_of(choice))
    if best == choice:
        return None
    differ = speeds.differ(choice, best)
    slower = f"{format_percent(1 - _speed_fraction(choice, best))} slower than {best.label}"
    if choice.memory_bytes is None or best.memory_bytes is None or choice.memory_bytes == best.memory_bytes:
        return slower if differ else None
    saved = best.memory_bytes - choice.memory_bytes
    text = f"{'saves' if saved > 0 else 'takes'} {format_bytes(abs(saved))}{'' if saved > 0 else ' more'}"
    if differ:
        return f"{slower}, {text} of {terms.memory}"
    return f"{text} of {terms.memory} against {best.label}, which cannot be told from it by speed"


def _cost_of_leaving_out(row: Candidate, decision: Decision) -> str | None:
    """Speed lost by not using a row that is too full; None if it is no faster or used another optimizer."""
    choice = decision.choice
    if row.tokens_per_second <= choice.tokens_per_second or row.optimizer != choice.optimizer:
        return None
    if not decision.speeds.differ(row, choice):
        return "its lead in speed cannot be told from noise"
    return f"leaving it out costs {format_percent(1 - _speed_fraction(choice, row))} of its speed"


def _reference_text(row: Candidate, decision: Decision | None) -> str:
    """One sentence on a row of torch's own engines: its speed beside that of the choice, and why it is no choice."""
    text = f"{row.label} is a reference, torch's own engine, and no DeepSpeed configuration to choose"
    if decision is None or row.optimizer != decision.choice.optimizer:
        return text
    choice = decision.choice
    share = f"it reaches {format_percent(_speed_fraction(row, choice), digits=0)} of {choice.label}'s speed"
    if not decision.speeds.differ(row, choice):
        return f"{text}: {share}, which is within the noise"
    faster = row.tokens_per_second > choice.tokens_per_second
    return f"{text}: {share}{'; faster than the choice, so hold both against your own needs' if faster else ''}"


def _speed_fraction(choice: Candidate, best: Candidate) -> float:
    return choice.tokens_per_second / best.tokens_per_second


def whole_percent(fraction: float) -> str:
    """``95 %``."""
    return format_percent(fraction, digits=0)


def _speed(candidate: Candidate) -> str:
    """Tokens/s with three significant digits below 100."""
    speed = candidate.tokens_per_second
    return format_count(speed) if speed >= 100 else f"{speed:.3g}"


def _memory(candidate: Candidate, terms: MemoryTerms) -> str:
    if candidate.memory_bytes is None:
        return f"{terms.memory} not measured"
    part = "" if candidate.fraction is None else f" ({format_percent(candidate.fraction)} of {terms.capacity})"
    return f"{format_bytes(candidate.memory_bytes)} of {terms.memory}{part}"
