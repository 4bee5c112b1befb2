"""What a picture holds, before anything is drawn: five kinds of chart, their words and their numbers as a table.

Values are in the unit that the axis names. Drawing is ``svgcharts`` (in the page) and ``plots`` (files for papers);
which charts a comparison gives is ``pictures``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..units import MISSING

MOST_ROWS_IN_WORDS = 12
"""A text alternative that lists more rows than this is worse than the table of numbers beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What every picture has."""

    name: str
    """Stem of its files and part of its ids: ``throughput``."""
    title: str
    axis: str
    """Quantity and unit: of the horizontal axis in bars and stacks, of the vertical one otherwise."""
    note: str = ""
    """One sentence or more on how to read it; what was left out, and why."""

    @property
    def headings(self) -> tuple[str, ...]:
        """Of the table of numbers."""
        raise NotImplementedError

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        """The numbers drawn, one row per configuration."""
        raise NotImplementedError

    @property
    def words(self) -> str:
        """The text alternative: what a reader would take from the picture."""
        rows = self.table
        told = [_sentence(self.headings, row) for row in rows[:MOST_ROWS_IN_WORDS]]
        more = len(rows) - len(told)
        return " ".join(told + ([f"{more} further rows are in the table of numbers."] if more else []))


def _sentence(headings: Sequence[str], row: Sequence[str]) -> str:
    cells = zip(headings[1:], row[1:], strict=True)
    return f"{row[0]}: {', '.join(f'{heading} {cell}' for heading, cell in cells if cell != MISSING)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row's value."""

    label: str
    value: float
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the geometric mean; None below three runs."""
    runs: tuple[float, ...] = ()
    """Each successful run's mean."""
    baseline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart(Chart):
    """Horizontal bars from zero."""

    bars: tuple[Bar, ...]

    @property
    def headings(self) -> tuple[str, ...]:
        return ("Strategy", self.axis, "95 % interval", "runs")

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (
                bar.label,
                number(bar.value),
                MISSING if bar.interval is None else f"{number(bar.interval[0])} to {number(bar.interval[1])}",
                str(len(bar.runs)),
            )
            for bar in self.bars
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One row's parts, in the order of the chart's categories."""

    label: str
    parts: tuple[float, ...]
    marker: float | None = None
    """A measured total to hold against the stack; None where there is none."""

    @property
    def total(self) -> float:
        return sum(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackChart(Chart):
    """Horizontal stacked bars from zero."""

    categories: tuple[str, ...]
    stacks: tuple[Stack, ...]
    capacity: float | None = None
    """Drawn as a line; None where unknown or meaningless."""
    capacity_label: str = ""
    marker_label: str = ""
    """What ``Stack.marker`` is; empty where no row has one."""

    @property
    def most(self) -> float:
        """The largest number drawn, capacity aside."""
        return max(max(stack.total, stack.marker or 0.0) for stack in self.stacks)

    @property
    def capacity_is_near(self) -> bool:
        """Whether bars stay readable on an axis that reaches the capacity."""
        return self.capacity is not None and self.most >= 0.25 * self.capacity

    @property
    def headings(self) -> tuple[str, ...]:
        marker = (self.marker_label,) if self.marker_label else ()
        return ("Strategy", *(f"{category}" for category in self.categories), f"total, {self.axis}", *marker)

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self._row(stack) for stack in self.stacks)

    def _row(self, stack: Stack) -> tuple[str, ...]:
        marker = (number(stack.marker),) if self.marker_label else ()
        return (stack.label, *map(number, stack.parts), number(stack.total), *marker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row's value at each step."""

    label: str
    points: tuple[tuple[float, float], ...]
    """(step, value), steps rising."""
    style: int
    """Which colour, dash and marker; the same row has the same in every picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart(Chart):
    """Values over steps, rows overlaid."""

    lines: tuple[Line, ...]
    warmup: int = 0
    """Steps 1 to this one are warm-up and are shaded."""
    horizontal: str = "optimizer step"
    least_span: float = 0.0
    """The axis spans at least this fraction of its top, so that small jitter looks small."""

    @property
    def limits(self) -> tuple[float, float]:
        """Of the vertical axis: the measured steps, and warm-up too where that does not flatten them."""
        everything = [value for line in self.lines for _, value in line.points]
        measured = [value for line in self.lines for step, value in line.points if step > self.warmup] or everything
        low, high = min(measured), max(measured)
        span = max(high - low, self.least_span * high, 1e-9 * abs(high), 1e-12)
        if min(everything) >= low - 2 * span and max(everything) <= high + 2 * span:
            low, high = min(everything), max(everything)
        extra = (max(high - low, span) - (high - low)) / 2 + 0.05 * span
        return (max(0.0, low - extra) if low >= 0 else low - extra), high + extra

    @property
    def cut_off(self) -> str:
        """How far warm-up leaves the axis; empty where it does not."""
        top = max(value for line in self.lines for _, value in line.points)
        return f"up to {number(top)}" if top > self.limits[1] else ""

    @property
    def headings(self) -> tuple[str, ...]:
        return ("Strategy", "first", "lowest", "highest", "last")

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        rows = []
        for line in self.lines:
            values = [value for _, value in line.points]
            rows.append((line.label, *map(number, (values[0], min(values), max(values), values[-1]))))
        return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One row of a Pareto plot."""

    label: str
    x: float
    y: float
    on_front: bool
    style: int | None
    """As in Line; None for a row that the legend has no room for."""
    aside: bool = False
    """Disqualified or not comparable: shown, but held against no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterChart(Chart):
    """Throughput against memory; the front is joined."""

    horizontal: str
    """Quantity and unit of the horizontal axis."""
    dots: tuple[Dot, ...]
    capacity: float | None = None
    capacity_label: str = ""

    @property
    def front(self) -> tuple[Dot, ...]:
        """From the least memory to the most."""
        return tuple(sorted((dot for dot in self.dots if dot.on_front), key=lambda dot: (dot.x, dot.y)))

    @property
    def headings(self) -> tuple[str, ...]:
        return ("Strategy", self.horizontal, self.axis, "on the front")

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        return tuple((dot.label, number(dot.x), number(dot.y), "yes" if dot.on_front else "no") for dot in self.dots)


def number(value: float | None) -> str:
    """A value in its axis' unit, about four digits: ``45,012``, ``12.30``, ``0.01230``."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.4g}"
