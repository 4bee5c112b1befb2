"""Which rows a picture has room for, and the pictures that lay rows over each other: step times and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..analysis.comparison import StrategyResult
from ..analysis.summary import Summary
from ..units import to_ms
from .chart_data import Chart, Line, LineChart

MOST_OVERLAID = 8
"""Lines that can still be told apart."""
MOST_BARS = 40
"""Bars that can still be read in one picture."""
MOST_POINTS = 300
"""Points per line; more are thinned to the extremes of each stretch."""


def overlaid(rows: Sequence[StrategyResult], baseline: StrategyResult | None) -> dict[str, int]:
    """Key → style of the rows that overlays show: all, or the baseline and the fastest."""
    return {row.key: style for style, row in enumerate(foremost(rows, baseline, MOST_OVERLAID))}


def foremost(
    rows: Sequence[StrategyResult], baseline: StrategyResult | None, most: int = MOST_BARS
) -> list[StrategyResult]:
    """The baseline and the fastest, ``most`` in all, in order of appearance."""
    ranked = sorted(rows, key=lambda row: (baseline is None or row.key != baseline.key, -(row.tokens_per_second or 0)))
    kept = {row.key for row in ranked[:most]}
    return [row for row in rows if row.key in kept]


def cut(rows: Sequence[StrategyResult], shown: Sequence[object]) -> str:
    if len(shown) >= len(rows):
        return ""
    return f"{len(shown)} of {len(rows)} rows are drawn: the baseline and the fastest."


def marked(row: StrategyResult) -> str:
    """The row's label, with why its numbers are not to be held against the others'."""
    if row.differences:
        return f"{row.label} (not comparable)"
    return row.label if row.disqualification is None else f"{row.label} (disqualified)"


def words(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def typical(row: StrategyResult) -> Summary:
    """The run nearest to the row's mean."""
    middle = row.tokens_per_second or 0.0
    return min(row.successes, key=lambda run: abs((run.tokens_per_second or 0.0) - middle))


def steps(rows: Sequence[StrategyResult], shown: Mapping[str, int]) -> Chart | None:
    def series(run: Summary) -> list[float | None]:
        if not run.record.ranks:
            return []
        slowest = max(run.record.ranks, key=lambda rank: rank.window_seconds)
        return [to_ms(seconds) for seconds in (*slowest.warmup_step_seconds, *slowest.step_seconds)]

    lines = _lines(rows, shown, series)
    if not lines:
        return None
    note = "The slowest rank of the run nearest to the median; warm-up steps are in no statistic."
    return LineChart(
        name="steps",
        title="Step times",
        axis="ms per optimizer step",
        lines=lines,
        warmup=_warmup(rows),
        least_span=0.2,
        note=words(note, cut(rows, lines)),
    )


def losses(rows: Sequence[StrategyResult], shown: Mapping[str, int]) -> Chart | None:
    lines = _lines(rows, shown, lambda run: list(run.losses))
    if not lines:
        return None
    return LineChart(
        name="losses",
        title="Losses",
        axis="loss",
        lines=lines,
        warmup=_warmup(rows),
        note=words("Same seed and data in every row, so the lines should lie on each other.", cut(rows, lines)),
    )


def _warmup(rows: Sequence[StrategyResult]) -> int:
    """Warm-up goes on until a real step was taken, so the fewest of all rows is what is warm-up in every one."""
    counts = [len(rank.warmup_step_seconds) for row in rows for run in row.successes for rank in run.record.ranks]
    return min(counts, default=0)


def _lines(
    rows: Sequence[StrategyResult],
    shown: Mapping[str, int],
    series: Callable[[Summary], list[float | None]],
) -> tuple[Line, ...]:
    """One point is no series."""
    lines = []
    for row in rows:
        if row.key in shown:
            values = series(typical(row))
            points = [(float(step), value) for step, value in enumerate(values, 1) if value is not None]
            if len(points) > 1:
                lines.append(Line(label=row.label, points=thinned(points), style=shown[row.key]))
    return tuple(lines)


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> tuple[tuple[float, float], ...]:
    """At most ``most`` points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return tuple(points)
    stretches = most // 2
    kept: list[tuple[float, float]] = []
    for number in range(stretches):
        part = points[number * len(points) // stretches : (number + 1) * len(points) // stretches]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return tuple(kept)
