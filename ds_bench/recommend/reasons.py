"""The sentences of a recommendation: why a row was chosen, how certain that is, and what it costs.

Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..analysis.intervals import FEWEST_RUNS
from ..units import format_bytes, format_count, format_percent
from .decision import (
    COMFORTABLE_FRACTION,
    LEAST_LEAD,
    MIN_SPEED_FRACTION,
    Candidate,
    Decision,
    Speeds,
    fastest,
    least_memory,
    nearly_least_memory,
    same_offload_nearly_as_fast,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerms:
    """Names of the memory that the rule compared, for sentences."""

    memory: str = "device memory"
    capacity: str = "the card"


ON_DEVICE = MemoryTerms()
ON_HOST = MemoryTerms(memory="host memory", capacity="the host's memory")


def why(decision: Decision, goal: str, terms: MemoryTerms) -> str:
    """One sentence without its full stop: the part of the rule that chose the row, with its numbers."""
    choice, fitting = decision.choice, decision.speeds.candidates
    numbers = f"{_speed(choice)} tokens/s with {_memory(choice, terms)}"
    if len(fitting) == 1:
        return f"{choice.label} is the only row that trained and fits: {numbers}"
    if goal == "memory":
        near = len(nearly_least_memory(fitting)) > 1
        within = f", within {whole_percent(LEAST_LEAD)} of others," if near else ""
        return f"{choice.label} needs the least {terms.memory}{within} of {_rows(fitting)}: {numbers}"
    head = f"{choice.label} is {_speed_rank(decision)}: {numbers}"
    return head if goal == "speed" else _why_balanced(decision, head, terms)


def _speed_rank(decision: Decision) -> str:
    best, speeds = decision.fastest, decision.speeds
    if decision.choice == best:
        compared = speeds.with_optimizer_of(best)
        stepped = "" if len(compared) == len(speeds.candidates) else f" and step with {best.optimizer}"
        return f"the fastest of {_rows(compared)}{stepped}" if len(compared) > 1 else f"the only row to fit{stepped}"
    if speeds.differ(decision.choice, best):
        # Tied although it is slower for certain: as it offloads less (decision.Speeds.tied).
        return f"within {whole_percent(LEAST_LEAD)} of the fastest, {best.label}, and offloads less"
    count = len(decision.tied)
    return f"the simplest of the {count} rows that cannot be told from the fastest, {best.label}, by speed"


def _why_balanced(decision: Decision, head: str, terms: MemoryTerms) -> str:
    choice, best = decision.choice, decision.simplest_tied
    if best != choice:
        return (
            f"{choice.label} needs the least {terms.memory} of the rows that offload alike and reach "
            f"{whole_percent(MIN_SPEED_FRACTION)} of {best.label}'s speed: {head.partition(': ')[2]}, "
            f"{format_percent(_speed_fraction(choice, best))} of {best.label}'s {_speed(best)} tokens/s with "
            f"{format_bytes(best.memory_bytes)} ({format_percent(best.fraction)})"
        )
    if choice.fills_memory:
        return f"{head}; it fills the memory on purpose, so how full {terms.capacity} is weighs nothing"
    if choice.fraction is None:
        return f"{head}; how much of {terms.capacity} that is cannot be told, so nothing is traded for memory"
    if choice.comfortable:
        return f"{head}, under the {whole_percent(COMFORTABLE_FRACTION)} from which less memory would be worth speed"
    others = len(same_offload_nearly_as_fast(choice, decision.speeds)) > 1
    rest = "and needs less" if others else f"and reaches {whole_percent(MIN_SPEED_FRACTION)} of its speed"
    return f"{head}; no other row offloads alike {rest}"


def speed_difference_text(decision: Decision, runs: Mapping[str, int]) -> str | None:
    """The difference in speed to the next fastest row, or to the fastest, and whether it is more than the noise.

    None without a second row. ``runs``: number of successful runs by row key.
    """
    choice, speeds = decision.choice, decision.speeds
    rivals = [candidate for candidate in speeds.with_optimizer_of(choice) if candidate != choice]
    if not rivals:
        return None
    rival = fastest(rivals)
    difference = choice.tokens_per_second / rival.tokens_per_second - 1
    kind = "lead over" if difference >= 0 else "lag behind"
    fewest = min(runs[choice.key], runs[rival.key])
    runs_text = "one run each" if fewest == 1 else f"{fewest} runs each"
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
        and rival.memory_bytes * (1 + LEAST_LEAD) < choice.memory_bytes
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


def cost_of_leaving_out(row: Candidate, decision: Decision) -> str | None:
    """Speed lost by not using a row that is too full; None if it is no faster or used another optimizer."""
    choice = decision.choice
    if row.tokens_per_second <= choice.tokens_per_second or row.optimizer != choice.optimizer:
        return None
    if not decision.speeds.differ(row, choice):
        return "its lead in speed cannot be told from noise"
    return f"leaving it out costs {format_percent(1 - _speed_fraction(choice, row))} of its speed"


def reference_text(row: Candidate, decision: Decision | None) -> str:
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


def _rows(fitting: Sequence[Candidate]) -> str:
    return f"the {len(fitting)} rows that fit"


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
