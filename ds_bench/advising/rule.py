"""The rule by which a row is chosen, on plain numbers (acceptance A22).

Which rows may stand at all is ``recommend``'s to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..doubts import NEAR_CAPACITY
from ..errors import UsageError
from ..options import GOALS

COMFORTABLE = 0.60
"""Fraction of the memory below which the fastest row is kept."""
FAST_ENOUGH = 0.90
"""Fraction of the fastest row's throughput from which less memory is preferred to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One row, as far as the rule looks at it."""

    label: str
    key: str = ""
    """Of the row in its comparison; the rule does not read it."""
    tokens_per_second: float
    """Whole job."""
    memory_bytes: int | None
    """Peak on the fullest device; on the CPU accelerator of a node's ranks together. None where not measured."""
    fraction: float | None
    """Of the card that was reserved, or of the host's memory; None where the capacity is not known."""
    offload_level: tuple[str, str] = ("none", "none")
    """Where optimizer and parameters live; rows of different levels do not stand in for each other."""
    succeeded: bool = True
    filled: bool = False
    """Its micro-batch was chosen to fill the memory: how full that is says nothing about the strategy."""

    @property
    def fits(self) -> bool:
        """Trained, and is not known to be within a hair of running out where it was not meant to be."""
        return self.succeeded and (self.filled or self.fraction is None or self.fraction <= NEAR_CAPACITY)

    @property
    def comfortable(self) -> bool:
        """Nothing is gained by less memory, as far as is known."""
        return self.filled or self.fraction is None or self.fraction < COMFORTABLE


def choose(candidates: Sequence[Candidate], goal: str = "balanced") -> Candidate | None:
    """The row to use; None where none fits. Exact ties go to the row that comes first.

    Raises UsageError for a goal that is none of ``GOALS``.
    """
    if goal not in _RULES:
        raise UsageError(f"goal {goal!r} is not known", remedy=f"one of {', '.join(GOALS)}")
    fitting = [candidate for candidate in candidates if candidate.fits]
    return _RULES[goal](fitting) if fitting else None


def fastest(candidates: Sequence[Candidate]) -> Candidate:
    """The most tokens per second; of equals the one with less memory."""
    return min(candidates, key=lambda c: (-c.tokens_per_second, _memory(c)))


def leanest(candidates: Sequence[Candidate]) -> Candidate:
    """The least memory; of equals the faster. A row whose memory is not known comes last."""
    return min(candidates, key=lambda c: (_memory(c), -c.tokens_per_second))


def balanced(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest if it is comfortable, else the leanest of those nearly as fast that offload alike."""
    best = fastest(candidates)
    return best if best.comfortable else leanest(stand_ins(best, candidates))


def stand_ins(best: Candidate, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Rows at the offload level of ``best`` with nearly its throughput, itself among them."""
    return [
        c
        for c in candidates
        if c.offload_level == best.offload_level and c.tokens_per_second / best.tokens_per_second >= FAST_ENOUGH
    ]


def _memory(candidate: Candidate) -> float:
    return float("inf") if candidate.memory_bytes is None else candidate.memory_bytes


_RULES: Mapping[str, Callable[[Sequence[Candidate]], Candidate]] = {
    "speed": fastest,
    "balanced": balanced,
    "memory": leanest,
}
