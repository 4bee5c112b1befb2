"""The charts as files for papers: PNG at 200 dpi and SVG that needs no font, one pair per picture, on white."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .chart_data import BarChart, Chart, LineChart, ScatterChart, StackChart, number
from .charts_of_comparison import pictures
from .sections import ReportSection

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8508f", "#e69f00", "#56b4e9", "#1b1f24", "#847400")
"""Of rows, by style; after Okabe and Ito, darkened where white paper needs it."""
FILLS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#c3c9d0")
HATCHES = ("", "////", "..", "---", "\\\\\\\\", "++")
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (4, 2)), (0, (8, 3)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))
MARKERS = "os^Dv*Xh"
_WIDTH = 6.4
"""Inches; text is 9 point at that size."""
_SETTINGS: Any = {
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "svg.hashsalt": "ds_bench",
    "font.size": 9.0,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,
}


def save_plots(sections: ReportSection | Sequence[ReportSection], folder: Path) -> list[Path]:
    """Writes every picture of every section and returns the files. Makes the folder; raises OSError.

    With several sections the names begin with their number: ``02_throughput.svg``.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    many = (sections,) if isinstance(sections, ReportSection) else tuple(sections)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context(_SETTINGS):
        for index, section in enumerate(many, 1):
            for chart in pictures(section.comparison).charts:
                figure = Figure(figsize=(_WIDTH, _height(chart)), layout="constrained")
                FigureCanvasAgg(figure)
                _draw(chart, figure.add_subplot(), section.title)
                stem = chart.name if len(many) == 1 else f"{index:02d}_{chart.name}"
                written += _save(figure, folder / stem)
    return written


def _save(figure: Any, stem: Path) -> list[Path]:
    """No date inside, so that the same numbers give the same file."""
    paths = [stem.with_name(f"{stem.name}.{form}") for form in ("png", "svg")]
    figure.savefig(paths[0], dpi=200)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _height(chart: Chart) -> float:
    """Inches: rows of bars need room, the others have one shape."""
    if isinstance(chart, BarChart):
        return 1.5 + 0.3 * len(chart.bars)
    if isinstance(chart, StackChart):
        return 2.1 + 0.3 * len(chart.stacks)
    return 4.0


def _draw(chart: Chart, axes: Any, section: str) -> None:
    drawings: dict[type, Callable[..., None]] = {
        BarChart: _bars,
        StackChart: _stacks,
        LineChart: _lines,
        ScatterChart: _scatter,
    }
    axes.set_title(f"{chart.title}\n{_printable(section)}", fontsize=9, loc="left")
    drawings[type(chart)](chart, axes)


def _printable(text: str, most: int = 90) -> str:
    """One line that the font and XML can hold."""
    line = re.sub(r"[^\x20-\x7e\xa0-\u024f\u0370-\u04ff\u2010-\u2027\u2190-\u21ff\u2200-\u22ff]", "\ufffd", text)
    return line if len(line) <= most else line[: most - 1] + "…"


def _row_axis(axes: Any, labels: Sequence[str], title: str) -> None:
    axes.set_yticks(range(len(labels)), [_printable(label, 40) for label in labels])
    axes.invert_yaxis()
    axes.set_xlabel(title)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#d5dae0", linewidth=0.6)


def _bars(chart: BarChart, axes: Any) -> None:
    axes.barh(range(len(chart.bars)), [bar.value for bar in chart.bars], height=0.6, color=FILLS[0])
    for index, bar in enumerate(chart.bars):
        if bar.interval:
            low, high = bar.interval
            axes.errorbar(
                [(low + high) / 2], [index], xerr=(high - low) / 2, color="black", capsize=3, linewidth=1.2, zorder=3
            )
        end = max((bar.value, *(bar.interval or ())))
        axes.annotate(number(bar.value), (end, index), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.margins(x=0.14)
    labels = [f"{bar.label} (baseline)" if bar.baseline else bar.label for bar in chart.bars]
    whiskers = ", whiskers: 95 % interval" if any(bar.interval for bar in chart.bars) else ""
    _row_axis(axes, labels, chart.axis + whiskers)


def _stacks(chart: StackChart, axes: Any) -> None:
    rows = range(len(chart.stacks))
    starts = [0.0] * len(chart.stacks)
    for part, category in enumerate(chart.categories):
        sizes = [stack.parts[part] for stack in chart.stacks]
        if any(sizes):
            fill, hatch = FILLS[part % len(FILLS)], HATCHES[part % len(HATCHES)]
            axes.barh(
                rows, sizes, left=starts, height=0.6, color=fill, hatch=hatch, label=category, edgecolor="#1b1f24"
            )
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    marked = [(stack.marker, row) for row, stack in enumerate(chart.stacks) if stack.marker is not None]
    if marked:
        axes.plot(*zip(*marked, strict=True), "D", color="black", markersize=5, label="measured peak", linestyle="none")
    axes.set_xlim(0, chart.most * 1.05 or 1.0)
    _capacity(chart, axes)
    _row_axis(axes, [stack.label for stack in chart.stacks], chart.axis)
    axes.figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _capacity(chart: StackChart, axes: Any) -> None:
    if chart.capacity is None:
        return
    if chart.capacity_is_near:
        axes.set_xlim(0, max(chart.most, chart.capacity) * 1.03)
        axes.axvline(chart.capacity, color="#a33b00", linestyle="--")
    beyond = "" if chart.capacity_is_near else " (beyond the axis →)"
    at = chart.capacity if chart.capacity_is_near else axes.get_xlim()[1]
    axes.annotate(
        f"{chart.capacity_label}{beyond}",
        (at, 1),
        (-3, 2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color="#a33b00",
    )


def _lines(chart: LineChart, axes: Any) -> None:
    for line in chart.lines:
        steps, values = zip(*line.points, strict=True)
        axes.plot(
            steps,
            values,
            color=COLOURS[line.style],
            linestyle=DASHES[line.style],
            linewidth=2.2 - 0.17 * line.style,
            marker=MARKERS[line.style],
            markevery=(line.style, max(1, len(steps) // 7)),
            markersize=4,
            label=_printable(line.label, 60),
        )
    if chart.warmup:
        told = f"warm-up{', ' if chart.cut_off else ''}{chart.cut_off}"
        axes.axvspan(min(line.points[0][0] for line in chart.lines), chart.warmup + 0.5, color="#00000014", label=told)
    axes.set_ylim(*chart.limits)
    axes.margins(x=0.01)
    axes.set_xlabel(chart.horizontal)
    axes.set_ylabel(chart.axis)
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _scatter(chart: ScatterChart, axes: Any) -> None:
    axes.plot([dot.x for dot in chart.front], [dot.y for dot in chart.front], "--", color="#57606a", linewidth=1)
    for dot in chart.dots:
        if dot.aside:
            axes.plot(dot.x, dot.y, "x", color="black", markersize=11, linestyle="none", zorder=3)
        if dot.style is None:
            axes.plot(dot.x, dot.y, ".", color="#57606a", alpha=0.6)
            continue
        face = COLOURS[dot.style] if dot.on_front else "white"
        axes.plot(
            dot.x,
            dot.y,
            MARKERS[dot.style],
            color=COLOURS[dot.style],
            markerfacecolor=face,
            markersize=8,
            linestyle="none",
            label=_printable(dot.label, 60),
        )
    axes.set_xlim(0, max(dot.x for dot in chart.dots) * 1.06 or 1.0)
    axes.set_ylim(0, max(dot.y for dot in chart.dots) * 1.08 or 1.0)
    if chart.capacity is not None and chart.capacity <= axes.get_xlim()[1]:
        axes.axvline(chart.capacity, color="#a33b00", linestyle="--", label=chart.capacity_label)
    axes.set_xlabel(chart.horizontal)
    axes.set_ylabel(chart.axis)
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
