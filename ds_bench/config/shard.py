"""Shards: parts of a plan's trials that run in runs of their own, on one machine or on many.

Rows that are compared with each other stay together where they can: a plan of many points is split between points, and
only a plan with fewer points than shards is split within them, between rows. The repeats of a row are never separated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..units import format_items

MOST_SHARDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One of the parts that a plan is split into."""

    number: int
    """From 1."""
    count: int
    """Into how many parts the plan is split."""

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count <= MOST_SHARDS:
            raise ValueError(f"{self}: I must be from 1 to N, and N at most {MOST_SHARDS}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads ``3/8``. Raises ValueError."""
        number, _, count = text.partition("/")
        # int() would take digits of other scripts too, and fail on thousands of digits.
        if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in (number, count)):
            raise ValueError(f"expected I/N, for example 3/8; got {text!r}")
        return cls(number=int(number), count=int(count))

    @property
    def file_suffix(self) -> str:
        """``_shard03of12``: the end of the names of its files, which sort by number."""
        return f"_shard{self.number:0{len(str(self.count))}d}of{self.count}"


def rows_of_shard(rows_per_point: Sequence[int], shard: Shard) -> list[range]:
    """The indices of the rows of each point that a shard runs; an empty range for a point that it leaves out.

    ``rows_per_point``: number of rows of each point, in the order of the plan. With as many points as shards or more,
    points are assigned in turn, every other turn backwards: in the order of a plan the points become longer along each
    axis, so that no shard gets all the long ones. With fewer points each shard has consecutive rows, the numbers of
    rows of two shards differing by one at most. Raises UsageError where there are fewer rows than shards.
    """
    points, total = len(rows_per_point), sum(rows_per_point)
    if shard.count > total:
        problem = f"{shard.count} shards of a plan with {format_items(total, 'row')} in all"
        raise UsageError(problem, remedy=f"give {total} or fewer" if total > 1 else "run it as a whole")
    if shard.count <= points:
        return [
            range(rows if _assigned_to(index, shard.count) == shard.number - 1 else 0)
            for index, rows in enumerate(rows_per_point)
        ]
    begin, end = (total * number // shard.count for number in (shard.number - 1, shard.number))
    selected, before = [], 0
    for rows in rows_per_point:
        selected.append(range(min(max(begin - before, 0), rows), min(max(end - before, 0), rows)))
        before += rows
    return selected


def _assigned_to(index: int, count: int) -> int:
    turn, position = divmod(index, count)
    return count - 1 - position if turn % 2 else position
