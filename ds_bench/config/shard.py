"""A shard of a plan, such as ``3/8``, and the rows that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..units import format_items

MAX_SHARDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part of a plan that runs separately, on this or another machine.

    Rows that are compared with each other stay together if possible. The repeats of a row are never separated.
    """

    number: int
    """From 1."""
    count: int
    """Number of shards of the plan."""

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count <= MAX_SHARDS:
            raise ValueError(f"{self}: in I/N, I must be between 1 and N, and N at most {MAX_SHARDS}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``3/8``. Raises ValueError."""
        number, _, count = text.partition("/")
        # int() would also accept digits of other scripts, and fail on thousands of digits.
        if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in (number, count)):
            raise ValueError(f"expected I/N, for example 3/8; got {text!r}")
        return cls(number=int(number), count=int(count))

    @property
    def file_suffix(self) -> str:
        """``_shard03of12``: ends the names of its files, which therefore sort by number."""
        return f"_shard{self.number:0{len(str(self.count))}d}of{self.count}"

    def rows_of(self, rows_per_point: Sequence[int]) -> list[range]:
        """Return for each point the indices of the rows that this shard runs; an empty range if it runs none.

        ``rows_per_point``: in the order of the plan. Points are dealt out in turn, in reverse every second turn,
        because points take longer toward the end of each axis. With fewer points than shards, each shard gets
        consecutive rows. Raises UsageError for fewer rows than shards.
        """
        points, total = len(rows_per_point), sum(rows_per_point)
        if self.count > total:
            problem = f"a plan with {format_items(total, 'row')} cannot be split into {self.count} shards"
            raise UsageError(problem, remedy=f"give {total} or fewer" if total > 1 else "run it as a whole")
        selected, before = [], 0
        if self.count <= points:
            for point, rows in enumerate(rows_per_point):
                turn, position = divmod(point, self.count)
                number = self.count - position if turn % 2 else position + 1
                selected.append(range(rows if number == self.number else 0))
            return selected
        begin, end = (total * number // self.count for number in (self.number - 1, self.number))
        for rows in rows_per_point:
            selected.append(range(min(max(begin - before, 0), rows), min(max(end - before, 0), rows)))
            before += rows
        return selected
