"""The sentences of a recommendation: why a row was chosen, how sure that is, and what it costs.

Nothing is decided here. Numbers are those of the rows; whether two of them differ in speed is tested by runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..compare import StrategyResult
from ..inference import FEWEST_RUNS, ratio_interval
from ..units import format_bytes, format_count, format_percent
from .rule import COMFORTABLE, FAST_ENOUGH, Candidate, fastest, leanest, stand_ins

Verdict = Literal["tested", "inside the noise", "not tested"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What the memory is called that the rule weighed."""

    memory: str = "device memory"
    capacity: str = "the card"


ON_DEVICE = Words()
ON_HOST = Words(memory="host memory", capacity="the host's memory")


def why(choice: Candidate, fitting: Sequence[Candidate], goal: str, words: Words) -> str:
    """One sentence without its full stop: the part of the rule that chose the row, with its numbers."""
    numbers = f"{_speed(choice)} tokens/s with {_memory(choice, words)}"
    if len(fitting) == 1:
        return f"{choice.label} is the only row that trained and fits: {numbers}"
    if goal == "memory":
        return f"{choice.label} needs the least {words.memory} of {_rows(fitting)}: {numbers}"
    if goal == "speed":
        return f"{choice.label} is the fastest of {_rows(fitting)}: {numbers}"
    return _why_balanced(choice, fitting, numbers, words)


def _why_balanced(choice: Candidate, fitting: Sequence[Candidate], numbers: str, words: Words) -> str:
    best = fastest(fitting)
    if best != choice:
        return (
            f"{choice.label} needs the least {words.memory} of the rows that offload alike and reach "
            f"{_whole(FAST_ENOUGH)} of the fastest: {numbers}, {format_percent(_share(choice, best))} of "
            f"{best.label}'s {_speed(best)} tokens/s with {format_bytes(best.memory_bytes)} "
            f"({format_percent(best.fraction)})"
        )
    head = f"{choice.label} is the fastest of {_rows(fitting)}: {numbers}"
    if choice.filled:
        return f"{head}; it is at its own largest micro-batch, so how full {words.capacity} is weighs nothing"
    if choice.fraction is None:
        return f"{head}; how much of {words.capacity} that is cannot be told, so nothing is traded for memory"
    if choice.comfortable:
        return f"{head}, under the {_whole(COMFORTABLE)} from which less memory would be worth speed"
    others = len(stand_ins(choice, fitting)) > 1
    rest = "and needs less" if others else f"and reaches {_whole(FAST_ENOUGH)} of its speed"
    return f"{head}; no other row offloads alike {rest}"


def noise(choice: Candidate, fitting: Sequence[Candidate], rows: Sequence[StrategyResult]) -> str | None:
    """How sure the difference in speed is that was at stake; None where there is no second row.

    At stake is the lead over the next fastest, or what the choice gives up against the fastest.
    """
    rivals = [candidate for candidate in fitting if candidate.key != choice.key]
    if not rivals:
        return None
    runs, rival = {row.key: _means(row) for row in rows}, fastest(rivals)
    difference = choice.tokens_per_second / rival.tokens_per_second - 1
    kind = "lead over" if difference >= 0 else "lag behind"
    verdict = _verdict_text(runs[choice.key], runs[rival.key])
    text = f"its {kind} {rival.label} ({format_percent(abs(difference))}) is {verdict}"
    lean = _lean_equal(choice, rivals, runs)
    return text if lean is None else f"{text}; {lean}"


def _verdict_text(ours: Sequence[float], theirs: Sequence[float]) -> str:
    runs, verdict = min(len(ours), len(theirs)), verdict_of(ours, theirs)
    if verdict == "not tested":
        each = "one run each" if runs == 1 else f"{runs} runs each"
        return f"not tested: {each}, {FEWEST_RUNS} are needed" if runs < FEWEST_RUNS else "not tested"
    return f"{'more than' if verdict == 'tested' else 'inside'} the noise of {runs} runs each"


def verdict_of(ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
    """Whether two rows differ in speed: Welch's interval of their ratio, on per-run means."""
    interval = ratio_interval(ours, theirs)
    if interval is None:
        return "not tested"
    return "tested" if interval.distinguishable else "inside the noise"


def _lean_equal(choice: Candidate, rivals: Sequence[Candidate], runs: Mapping[str, Sequence[float]]) -> str | None:
    """A row that needs less memory and cannot be told from the choice by its speed: the rule stands, but is told."""
    if choice.memory_bytes is None:
        return None
    smaller = [c for c in rivals if c.memory_bytes is not None and c.memory_bytes < choice.memory_bytes]
    equal = [c for c in smaller if verdict_of(runs[choice.key], runs[c.key]) == "inside the noise"]
    if not equal:
        return None
    lean = leanest(equal)
    saved = format_bytes(choice.memory_bytes - (lean.memory_bytes or 0))
    return f"{lean.label} needs {saved} less and cannot be told from it by speed: take it if memory matters"


def cost(choice: Candidate, fitting: Sequence[Candidate], words: Words) -> str | None:
    """What the choice gives up against the fastest row that fits, and what it saves; None where it is that row."""
    best = fastest(fitting)
    if best == choice:
        return None
    slower = f"{format_percent(1 - _share(choice, best))} slower than {best.label}"
    if choice.memory_bytes is None or best.memory_bytes is None or choice.memory_bytes == best.memory_bytes:
        return slower
    return f"{slower}, saves {format_bytes(best.memory_bytes - choice.memory_bytes)} of {words.memory}"


def _means(row: StrategyResult) -> list[float]:
    """Tokens/s of every run that succeeded."""
    return [mean for run in row.successes if (mean := run.tokens_per_second) is not None]


def _rows(fitting: Sequence[Candidate]) -> str:
    return f"the {len(fitting)} rows that fit"


def _share(choice: Candidate, best: Candidate) -> float:
    return choice.tokens_per_second / best.tokens_per_second


def _whole(fraction: float) -> str:
    return format_percent(fraction, digits=0)


def _speed(candidate: Candidate) -> str:
    """Digits enough to tell slow rows apart."""
    speed = candidate.tokens_per_second
    return format_count(speed) if speed >= 100 else f"{speed:.3g}"


def _memory(candidate: Candidate, words: Words) -> str:
    if candidate.memory_bytes is None:
        return f"{words.memory} not measured"
    part = "" if candidate.fraction is None else f" ({format_percent(candidate.fraction)} of {words.capacity})"
    return f"{format_bytes(candidate.memory_bytes)} of {words.memory}{part}"
