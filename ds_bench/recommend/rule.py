"""The rule by which a row is chosen, on plain numbers; ``docs/choosing.md`` describes it.

Which rows are eligible is decided in ``recommendation``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..analysis.intervals import RatioInterval
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..config.options import GOALS
from ..errors import UsageError

COMFORTABLE_FRACTION = 0.60
"""Fraction of the memory below which the fastest row is kept."""
MIN_SPEED_FRACTION = 0.90
"""Fraction of the fastest row's throughput from which less memory is preferred to it."""
LEAST_LEAD = 0.03
"""A lead in speed up to this fraction decides nothing below three runs, nor ever for offload where memory is not
short; memories that differ by less are equal."""
_DEVICES = ("none", "cpu", "nvme")
"""From the simplest place of a tensor to the one that needs most around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The values of one row that the rule reads."""

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
    stage: int = 0
    changed_keys: int = 0
    """Values of the DeepSpeed configuration that are not the strategy's own."""
    step_spread: float = 0.0
    """Relative standard deviation of its steps, or between its runs where that is more."""
    succeeded: bool = True
    filled: bool = False
    """Its micro-batch was chosen to fill the memory: how full that is says nothing about the strategy."""
    optimizer: str = ""
    """The class that stepped, where rows of different ones are not told apart by speed (on the CPU accelerator)."""

    @property
    def fits(self) -> bool:
        """True if the row trained and used at most 95 % of the memory, as far as is known.

        Rows at their own largest micro-batch are exempt, because they fill the memory on purpose.
        """
        return self.succeeded and (self.filled or self.fraction is None or self.fraction <= NEAR_CAPACITY)

    @property
    def comfortable(self) -> bool:
        """True if less memory would gain nothing: under 60 % is used, or the micro-batch fills it on purpose."""
        return self.filled or self.fraction is None or self.fraction < COMFORTABLE_FRACTION

    @property
    def complexity(self) -> tuple[int, int, int, int]:
        """Orders rows from the simplest: no offload before offload, lower stage before higher, fewer keys changed."""
        optimizer, params = (_DEVICES.index(device) for device in self.offload_level)
        return max(optimizer, params), optimizer + params, self.stage, self.changed_keys


IntervalOf = Callable[[Candidate, Candidate], RatioInterval | None]
"""The confidence interval of the ratio of two rows' throughputs; None if they have too few runs."""


def no_interval(_row: Candidate, _other: Candidate) -> None:
    """The interval of rows with fewer than three runs each: none."""
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The measured speeds of the rows that are compared with each other."""

    candidates: Sequence[Candidate]
    interval_of: IntervalOf = no_interval

    def differ(self, row: Candidate, other: Candidate) -> bool:
        """Whether the measurements show which of the two rows is faster.

        From three runs on the interval of their ratio must exclude 1; ``comparison.ratio_between`` corrects it for the
        number of rows, as the fastest was chosen by its luck too. With fewer runs the lead must be more than the
        standard deviation of their steps and more than ``LEAST_LEAD``.
        """
        interval = self.interval_of(row, other)
        if interval is not None:
            return interval.distinguishable
        return abs(math.log(row.tokens_per_second / other.tokens_per_second)) > math.log1p(_doubt(row, other))

    def undecided(self, row: Candidate, other: Candidate) -> bool:
        """Whether it matters which of two tied rows is faster, and the measurements do not show it.

        With equal offload it matters beyond the speed that memory is worth (``MIN_SPEED_FRACTION``). With different
        offload one row costs host memory or a disk: three runs or more must exclude even ``LEAST_LEAD``.
        """
        interval = self.interval_of(row, other)
        possible = _doubt(row, other) if interval is None else _widest(interval) - 1
        if row.offload_level != other.offload_level:
            return interval is None or possible > LEAST_LEAD
        return possible > 1 - MIN_SPEED_FRACTION

    def alike(self, row: Candidate) -> list[Candidate]:
        """The candidates that stepped with the optimizer of ``row``, so that speed tells them apart."""
        return _with_optimizer_of(row, self.candidates)

    def tied(self, best: Candidate, rows: Sequence[Candidate]) -> list[Candidate]:
        """Those of ``rows`` that cannot be told from ``best``, itself included where it is among them.

        So are rows within ``LEAST_LEAD`` of it that offload less and leave room: where device memory is not short, so
        small a lead is not worth host memory or a disk.
        """
        return [row for row in rows if row == best or not self.differ(best, row) or _nearly_with_less(row, best)]


def _nearly_with_less(row: Candidate, best: Candidate) -> bool:
    lead = math.log(best.tokens_per_second / row.tokens_per_second)
    return row.complexity[:2] < best.complexity[:2] and row.comfortable and lead <= math.log1p(LEAST_LEAD)


def _with_optimizer_of(row: Candidate, rows: Sequence[Candidate]) -> list[Candidate]:
    return [each for each in rows if each.optimizer == row.optimizer]


def _doubt(row: Candidate, other: Candidate) -> float:
    """Lead up to which one or two runs do not show which row is faster."""
    return max(LEAST_LEAD, math.hypot(row.step_spread, other.step_spread))


def _widest(interval: RatioInterval) -> float:
    """The largest factor between two rows, whichever is the faster, that the interval holds."""
    return max(interval.high, 1 / interval.low if interval.low > 0 else math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The chosen row, and the rows whose speed cannot be told from the fastest."""

    choice: Candidate
    fastest: Candidate
    """By the measured speeds."""
    stands: Candidate
    """The simplest of the rows tied with the fastest, which the rule considers in their place."""
    tied: tuple[Candidate, ...] = ()
    """Rows that tie with the fastest (``Speeds.tied``), itself included; empty where it stands alone."""
    undecided: tuple[Candidate, ...] = ()
    """Of these, other than the choice, those of which it matters whether they are faster, and is not known."""


def choose(
    candidates: Sequence[Candidate], goal: str = "balanced", interval_of: IntervalOf = no_interval
) -> Candidate | None:
    """The row to use; None where none fits. Raises UsageError for a goal that is none of ``GOALS``."""
    decision = decide(candidates, goal, interval_of)
    return None if decision is None else decision.choice


def decide(
    candidates: Sequence[Candidate], goal: str = "balanced", interval_of: IntervalOf = no_interval
) -> Decision | None:
    """The row to use and how sure that is; None where none fits.

    Raises UsageError for a goal that is none of ``GOALS``.
    """
    if goal not in _RULES:
        raise UsageError(f"goal {goal!r} is not known", remedy=f"one of {', '.join(GOALS)}")
    fitting = [candidate for candidate in candidates if candidate.fits]
    return _RULES[goal](Speeds(candidates=fitting, interval_of=interval_of)) if fitting else None


def fastest(candidates: Sequence[Candidate]) -> Candidate:
    """The most tokens per second; of equals the one with less memory."""
    return min(candidates, key=lambda c: (-c.tokens_per_second, _memory(c)))


def least_memory(candidates: Sequence[Candidate]) -> Candidate:
    """The least memory; of equals the faster. A row whose memory is not known comes last."""
    return min(candidates, key=lambda c: (_memory(c), -c.tokens_per_second))


def nearly_least_memory(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Rows whose memory is within ``LEAST_LEAD`` of the least."""
    least = _memory(least_memory(candidates))
    return [candidate for candidate in candidates if _memory(candidate) <= least * (1 + LEAST_LEAD)]


def same_offload_nearly_as_fast(best: Candidate, speeds: Speeds) -> list[Candidate]:
    """Rows at the offload level of ``best`` with nearly its throughput, itself among them."""
    return [
        c
        for c in speeds.alike(best)
        if c.offload_level == best.offload_level
        and (c.tokens_per_second / best.tokens_per_second >= MIN_SPEED_FRACTION or not speeds.differ(best, c))
    ]


def standing(speeds: Speeds) -> Candidate:
    """The simplest of the rows that cannot be told from the fastest: the one that stands for them."""
    return _speed(speeds).stands


def _simplest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda c: (c.complexity, _memory(c), -c.tokens_per_second))


def _fastest_decides(speeds: Speeds, rows: Sequence[Candidate]) -> Decision:
    """Of ``rows`` the simplest that cannot be told from the fastest.

    Rows that stepped with another optimizer than the simplest of all take no part: their speed is the optimizer's too.
    """
    weighed = _with_optimizer_of(_simplest(rows), rows)
    best = fastest(weighed)
    tied = speeds.tied(best, weighed)
    return _decided(speeds, _simplest(tied), best, tied)


def _decided(speeds: Speeds, choice: Candidate, best: Candidate, tied: Sequence[Candidate]) -> Decision:
    stands = _simplest(tied)
    weighed = choice if choice in tied else stands
    return Decision(
        choice=choice,
        fastest=best,
        stands=stands,
        tied=tuple(tied) if len(tied) > 1 else (),
        undecided=tuple(row for row in tied if row not in (choice, weighed) and speeds.undecided(row, weighed)),
    )


def _speed(speeds: Speeds) -> Decision:
    return _fastest_decides(speeds, speeds.candidates)


def _balanced(speeds: Speeds) -> Decision:
    """The row that stands for the fastest if it is comfortable, else the leanest of those nearly as fast that offload
    alike."""
    found = _speed(speeds)
    if found.stands.comfortable:
        return found
    choice = _memory_decides(speeds, same_offload_nearly_as_fast(found.stands, speeds)).choice
    return _decided(speeds, choice, found.fastest, found.tied or (found.fastest,))


def _memory_decides(speeds: Speeds, rows: Sequence[Candidate]) -> Decision:
    return _fastest_decides(speeds, nearly_least_memory(rows))


def _memory(candidate: Candidate) -> float:
    return float("inf") if candidate.memory_bytes is None else candidate.memory_bytes


_RULES: Mapping[str, Callable[[Speeds], Decision]] = {
    "speed": _speed,
    "balanced": _balanced,
    "memory": lambda speeds: _memory_decides(speeds, speeds.candidates),
}
