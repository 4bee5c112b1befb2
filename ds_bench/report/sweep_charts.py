"""Charts across the points of a sweep: for each axis small charts side by side, one for each value of the others.

All charts of one quantity have the same vertical axis, from zero, so that they can be compared at a glance.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..analysis.comparison import ComparisonRow
from ..config.spec import Trial, Workload, point_name
from ..units import MISSING, to_gb
from .chart_data import MAX_OVERLAID_ROWS, Line, LineChart, format_value
from .comparison_report import ComparisonReport

_MOST_PANELS = 12
"""Charts of one axis and quantity."""
_AXES: dict[str, Callable[[Workload], object]] = {
    "model": lambda workload: workload.model,
    "seq_len": lambda workload: "longest" if workload.seq_policy == "longest" else workload.seq_length,
    "local_batch_size": lambda workload: "largest" if workload.batch_policy == "largest" else workload.batch_size,
    "grad_accum": lambda workload: workload.grad_accum,
    "precision": lambda workload: workload.precision,
    "activation_checkpointing": lambda workload: "on" if workload.activation_checkpointing else "off",
    "dropout": lambda workload: "model's own" if workload.dropout is None else workload.dropout,
    "steps": lambda workload: workload.num_steps,
    "warmup_steps": lambda workload: workload.warmup_steps,
    "seed": lambda workload: workload.seed,
    "vocab_size": lambda workload: "model's own" if workload.vocab_size is None else workload.vocab_size,
    "data": lambda workload: "random" if workload.data_path is None else Path(workload.data_path).name,
    "data workers": lambda workload: "none" if workload.data_workers is None else workload.data_workers,
    "prefetch": lambda workload: workload.data_prefetch,
}
"""Name of an axis, as recipes call it → its value in a workload."""


def _axis_values(trial: Trial) -> dict[str, object]:
    """The value of each axis: of the workload, the ranks, and what a point of a sweep sets in every configuration."""
    values: dict[str, object] = {name: read(trial.workload) for name, read in _AXES.items()}
    values["num_gpus"] = trial.placement.num_gpus
    settings = {point_name(path): value for path, value in trial.common_settings.items()}
    return values | {name: str(value) if isinstance(value, list) else value for name, value in settings.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepChart(LineChart):
    """A quantity over the values of one axis, a line for each row."""

    ticks: tuple[str, ...]
    """Texts of the axis' values, at 0, 1, …"""
    highest: float
    """Of all charts beside this one."""

    @property
    def limits(self) -> tuple[float, float]:
        return 0.0, self.highest * 1.08 or 1.0

    @property
    def headings(self) -> tuple[str, ...]:
        return ("Strategy", *self.ticks)

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        rows = []
        for line in self.lines:
            values = dict(line.points)
            cells = (format_value(values[place]) if place in values else MISSING for place in range(len(self.ticks)))
            rows.append((line.label, *cells))
        return tuple(rows)


@dataclass(frozen=True, slots=True)
class _Point:
    report: ComparisonReport
    values: tuple[object, ...]
    """Of the axes that vary."""


def sweep_charts(reports: Sequence[ComparisonReport]) -> list[SweepChart]:
    """The charts of several comparisons on one machine; none where only one workload was run, or machines differ."""
    found = [_values(report) for report in reports]
    machines = [report.environments for report in reports]
    # A line across machines would show their difference as that of the axis.
    if len(reports) < 2 or None in found or any(each != machines[0] for each in machines):
        return []
    known = [values for values in found if values is not None]
    names = dict.fromkeys(name for values in known for name in values)
    axes = [name for name in names if len({values.get(name) for values in known}) > 1]
    points = [
        _Point(report, tuple(values.get(name) for name in axes)) for report, values in zip(reports, known, strict=True)
    ]
    # By label, so that a row has the same colour in every chart.
    labels = list(dict.fromkeys(row.label for report in reports for row in report.comparison.rows if row.succeeded))
    styles = {label: style for style, label in enumerate(labels[:MAX_OVERLAID_ROWS])}
    on_gpus = any(row.gpu_peak_bytes is not None for report in reports for row in report.comparison.rows)
    quantities: list[tuple[str, str, Callable[[ComparisonRow], float | None]]] = [
        ("throughput", "tokens/s of the whole job", lambda row: row.tokens_per_second),
        ("memory", "peak GPU memory, GB", lambda row: to_gb(row.gpu_peak_bytes))
        if on_gpus
        else ("memory", "peak host memory, GB", lambda row: to_gb(row.host_peak_bytes)),
    ]
    charts: list[SweepChart] = []
    for (index, axis), quantity in itertools.product(enumerate(axes), quantities):
        charts += _panels(axis, index, axes, points, quantity, styles)
    return charts


def _values(report: ComparisonReport) -> dict[str, object] | None:
    """The values of the axes in a comparison, as in a row that does not change its workload; None without rows."""
    trials = [run.record.trial for row in report.comparison.rows for run in row.summaries]
    own = [trial for trial in trials if not trial.configuration.workload_changes]
    trial = next(iter([*own, *trials]), None)
    return None if trial is None else _axis_values(trial)


def _panels(
    axis: str,
    index: int,
    axes: Sequence[str],
    points: Sequence[_Point],
    quantity: tuple[str, str, Callable[[ComparisonRow], float | None]],
    styles: dict[str, int],
) -> Iterator[SweepChart]:
    """The charts of one axis and quantity: one for each combination of the other axes' values."""
    groups: dict[tuple[object, ...], dict[object, ComparisonReport]] = {}
    for point in points:
        others = (*point.values[:index], *point.values[index + 1 :])
        # Of several comparisons of one point the first one is drawn.
        groups.setdefault(others, {}).setdefault(point.values[index], point.report)
    names = [name for name in axes if name != axis]
    drawn = []
    for others, by_value in groups.items():
        values = list(by_value)
        if all(isinstance(value, (int, float)) for value in values):
            values.sort(key=lambda value: float(str(value)))
        lines = tuple(_lines([by_value[value] for value in values], quantity[2], styles))
        if len(values) > 1 and lines:
            drawn.append((others, values, lines))
    highest = max((value for _, _, lines in drawn for line in lines for _, value in line.points), default=0.0)
    for number, (others, values, lines) in enumerate(drawn[:_MOST_PANELS], 1):
        where = ", ".join(
            str(value) if name == "model" else f"{name} {value}" for name, value in zip(names, others, strict=True)
        )
        left_out = len(drawn) - _MOST_PANELS if number == _MOST_PANELS else 0
        yield SweepChart(
            name=f"sweep-{re.sub('[^a-z0-9]+', '-', axis.lower())}-{quantity[0]}-{number}",
            title=f"{quantity[0].capitalize()} by {axis}" + (f": {where}" if where else ""),
            axis=quantity[1],
            horizontal=axis,
            note=f"{left_out} more charts of this kind are left out." if left_out > 0 else "",
            lines=lines,
            ticks=tuple(map(str, values)),
            highest=highest,
        )


def _lines(
    reports: Sequence[ComparisonReport], read: Callable[[ComparisonRow], float | None], styles: dict[str, int]
) -> Iterator[Line]:
    for label, style in styles.items():
        found = [
            (place, row) for place, report in enumerate(reports) for row in report.comparison.rows if row.label == label
        ]
        values = [(float(place), value) for place, row in found if row.succeeded and (value := read(row)) is not None]
        if values:
            yield Line(label=label, points=tuple(values), style=style)
