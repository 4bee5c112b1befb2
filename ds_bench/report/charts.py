"""Matplotlib figures of charts: SVG images for the HTML page, PNG and SVG files for papers.

Bars and lines have colours of 3:1 contrast on white and on the page's dark background. Ink is dark, and an SVG of the
page swaps it for a light one where the reader prefers a dark colour scheme.
"""

from __future__ import annotations

import base64
import io
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..analysis.comparison import Comparison
from .chart_data import BarChart, Chart, LineChart, ScatterChart, StackChart, charts_of, format_value

INK, FAINT, RULE, WARNING = "#1b1f24", "#57606a", "#80868c", "#a33b00"
DARK_INKS = {INK: "#e8ebee", FAINT: "#a3adb8", WARNING: "#ff9a5c"}
"""Ink → its replacement in the page's dark colour scheme."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8508f", "#b07d00", "#7a6fd0", "#80868c", "#847400")
"""By row or category; after Okabe and Ito, with their bright ones darkened."""
HATCHES = ("", "///", "||", "--", "\\\\\\", "++", "")
"""By category, so that categories differ without colour too."""
MARKERS = "os^Dv*Xh"
DASHES = ("-", "--", ":", "-.")
PAGE_WIDTH, PAGE_FONT_SIZE = 330.0, 11.5
"""Points. A phone shows one point as about one of its pixels."""
FILE_WIDTH, FILE_FONT_SIZE = 460.0, 9.0
"""Points: the width of the text on a printed page."""
BAR_HEIGHT = 0.36
"""As a fraction of its row's."""
_SETTINGS: Any = {
    "font.sans-serif": ["DejaVu Sans"],
    "svg.hashsalt": "ds_bench",  # the same numbers give the same file
    "text.color": INK,
    "text.parse_math": False,  # a $ in a name starts no formula
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.alpha": 0.35,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": "medium",
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
}


def save_charts(title: str, comparison: Comparison, folder: Path, recommended: str | None = None) -> list[Path]:
    """Write every chart of a comparison as PNG (200 dpi) and SVG (no font needed). Return the files.

    ``recommended``: key of the row to mark. The same numbers give the same SVG. Makes the folder. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for chart in charts_of(comparison, recommended).charts:
        for form in ("png", "svg"):
            path = folder / f"{chart.name}.{form}"
            _draw(chart, path, FILE_WIDTH, FILE_FONT_SIZE, title=title, dpi=200, facecolor="white")
            paths.append(path)
    return paths


def image_source(chart: Chart) -> str:
    """The chart as the ``src`` of an ``<img>``: an SVG that refers to nothing outside, with its text as text."""
    buffer = io.StringIO()
    _draw(chart, buffer, PAGE_WIDTH, PAGE_FONT_SIZE, format="svg", transparent=True)
    rules = " ".join(
        f"[style*='{what}: {ink}'] {{ {what}: {light} !important }}"
        for ink, light in DARK_INKS.items()
        for what in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"
    drawing = buffer.getvalue().replace("<defs>", f"{style}<defs>", 1)
    return f"data:image/svg+xml;base64,{base64.b64encode(drawing.encode()).decode()}"


def _draw(chart: Chart, target: Any, width: float, font_size: float, *, title: str = "", **options: Any) -> None:
    """Draw into a path or a stream. ``width`` and ``font_size`` in points; ``options``: of ``Figure.savefig``.

    With a ``title``, as in files, text becomes outlines, so that a file needs no font.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = {**_SETTINGS, "font.size": font_size, "svg.fonttype": "path" if title else "none"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a browser's fonts may have it
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        columns = int(width / font_size / 0.56)  # characters of a line of text
        if isinstance(chart, BarChart):
            height, entries = _draw_bars(chart, axes, columns)
        elif isinstance(chart, StackChart):
            height, entries = _draw_stacks(chart, axes, columns)
        elif isinstance(chart, LineChart):
            height, entries = _draw_lines(chart, axes)
        else:
            assert isinstance(chart, ScatterChart), f"no drawing of {type(chart).__name__}"
            height, entries = _draw_scatter(chart, axes)
        height += 4 + 1.4 * _draw_legend(figure, entries, columns)
        if title:
            heading = [chart.title, *textwrap.wrap(_printable(title), columns)]
            height += 1.35 * len(heading) + 0.6
            figure.suptitle("\n".join(heading), x=0.01, ha="left", fontsize=font_size)
        figure.set_size_inches(width / 72, height * font_size / 72)
        if isinstance(chart, ScatterChart):
            _label_dots(chart, axes)
        # A date would make two files of the same numbers differ.
        metadata = {"Date": None} if not str(target).endswith(".png") else None
        figure.savefig(target, metadata=metadata, **options)


def _printable(text: str, columns: int | None = None) -> str:
    """One line that XML can hold, cut to a width in characters."""
    line = "".join(sign if sign.isprintable() else "\ufffd" for sign in " ".join(text.split()))
    return line if columns is None or len(line) <= columns else line[: max(3, columns - 1)].rstrip() + "…"


Entries = list[tuple[Any, str]]
"""Handles and labels of a legend."""


def _draw_legend(figure: Any, entries: Entries, columns: int) -> int:
    """Draw the legend below the chart, in one to three columns. Return its lines."""
    if not entries:
        return 0
    across = max(1, min(3, int(columns / (max(len(label) for _, label in entries) + 6.5))))
    # matplotlib leaves out a label that begins with an underscore; a space of no width comes before it
    labels = [f"\u200b{_printable(label, columns // across - 6)}" for _, label in entries]
    handles = [handle for handle, _ in entries]
    figure.legend(handles, labels, loc="outside lower left", ncols=across, columnspacing=1, labelspacing=0.3)
    return -(-len(entries) // across)


def _draw_rows(axes: Any, title: str, rows: Sequence[tuple[str, str, bool]], columns: int) -> float:
    """Draw axis and grid of bars, and above each its label, its value, and whether it failed. Return the height."""
    for index, (label, value, failed) in enumerate(rows):
        for text, x, side in ((_printable(label, max(10, columns - len(value) - 3)), 0, "left"), (value, 1, "right")):
            axes.text(
                x,
                index - BAR_HEIGHT / 2 - 0.05,
                text,
                transform=axes.get_yaxis_transform(),
                va="bottom",
                ha=side,
                color=WARNING if failed else INK,
                in_layout=False,
            )
    # From high to low: the first row is on top, with room for its label above.
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(title)
    axes.grid(axis="x")
    _format_ticks(axes.xaxis)
    return 3.3 * (len(rows) + 0.3)


def _format_ticks(axis: Any) -> None:
    """About five round numbers: ``45,000``, ``0.25``."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.set_major_locator(MaxNLocator(5))
    thousands = 1000 <= max(map(abs, axis.get_view_interval())) < 1e9
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if thousands else "{x:.4g}"))


def _draw_bars(chart: BarChart, axes: Any, columns: int) -> tuple[float, Entries]:
    axes.barh(range(len(chart.bars)), [bar.value for bar in chart.bars], height=BAR_HEIGHT, color=COLOURS[0])
    for index, bar in enumerate(chart.bars):
        if bar.interval:
            low, high = bar.interval
            axes.errorbar([(low + high) / 2], [index], xerr=(high - low) / 2, color=INK, capsize=4, linewidth=1.5)
        if len(bar.runs) > 1:
            runs = bar.runs[:20]
            axes.plot(runs, [index] * len(runs), "o", mfc="white", mec=INK, markersize=4, zorder=4)
    largest = max(value for bar in chart.bars for value in (bar.value, *(bar.interval or ()), *bar.runs))
    axes.set_xlim(0, largest * 1.04 or 1)  # "or 1", since matplotlib warns of an axis whose ends are the same
    rows = [(bar.label, format_value(bar.value), False) for bar in chart.bars]
    return _draw_rows(axes, chart.axis, rows, columns), []


def _draw_stacks(chart: StackChart, axes: Any, columns: int) -> tuple[float, Entries]:
    entries: Entries = []
    for part, category in enumerate(chart.categories):
        bars = [
            (row, stack.parts[part], sum(stack.parts[:part]))
            for row, stack in enumerate(chart.stacks)
            if stack.parts and stack.parts[part]
        ]
        if bars:
            rest = category == "rest of the peak"
            rows, sizes, starts = zip(*bars, strict=True)
            drawn = axes.barh(
                rows,
                sizes,
                left=starts,
                height=BAR_HEIGHT,
                color="none" if rest else COLOURS[part % len(COLOURS)],
                hatch=HATCHES[part % len(HATCHES)],
                edgecolor=FAINT if rest else INK,
                linewidth=0.6,
            )
            entries.append((drawn, category))
    requests = [(row, stack.requested) for row, stack in enumerate(chart.stacks) if stack.requested is not None]
    if requests:
        rows, sizes = zip(*requests, strict=True)
        drawn = axes.barh(rows, sizes, height=BAR_HEIGHT, color="none", hatch="xxx", edgecolor=WARNING, linestyle=":")
        entries.append((drawn, "out of memory"))
    # A bar ends at the peak, unless its categories, each at its own maximum, are longer.
    peaks = [
        (stack.measured, row)
        for row, stack in enumerate(chart.stacks)
        if stack.measured and sum(stack.parts) > 1.005 * stack.measured
    ]
    predictions = [(stack.predicted, row) for row, stack in enumerate(chart.stacks) if stack.predicted is not None]
    for points, label, marker, size in ((peaks, "measured peak", "D", 6), (predictions, "predicted", "|", 14)):
        if points:
            style: Any = {"color": INK, "markersize": size, "mew": 2.5 if marker == "|" else 0, "linestyle": "none"}
            (drawn,) = axes.plot(*zip(*points, strict=True), marker=marker, clip_on=False, zorder=4, **style)
            entries.append((drawn, label))
    if chart.capacity is not None:
        inside = chart.capacity <= chart.end
        places = range(len(chart.stacks)) if inside else ()
        ends = [[row + side * 0.65 * BAR_HEIGHT for row in places] for side in (-1, 1)]
        line = axes.vlines([chart.capacity] * len(places), *ends, color=WARNING, linestyle="--")
        entries.append((line, chart.capacity_label + ("" if inside else " (beyond the axis →)")))
    axes.set_xlim(0, chart.end * 1.03 or 1)
    labels = [(stack.label, stack.value, not stack.parts) for stack in chart.stacks]
    return _draw_rows(axes, chart.axis, labels, columns), entries


def _draw_plane(axes: Any, horizontal: str, vertical: str) -> None:
    """Draw both axes. The title of the vertical one is above it, where it needs no rotation."""
    axes.set_xlabel(horizontal)
    axes.set_title(vertical, loc="left", fontsize="medium")
    axes.grid(axis="y")
    _format_ticks(axes.xaxis)
    _format_ticks(axes.yaxis)


def _draw_lines(chart: LineChart, axes: Any) -> tuple[float, Entries]:
    entries: Entries = []
    for line in chart.lines:
        steps, values = zip(*line.points, strict=True)
        (drawn,) = axes.plot(
            steps,
            values,
            color=COLOURS[line.style],
            linestyle=DASHES[line.style % len(DASHES)],
            linewidth=2.4 - 0.19 * line.style,  # later lines are thinner, so that lines that coincide are all visible
            marker=MARKERS[line.style],
            markevery=(line.style, max(1, len(steps) // 7)),  # and their markers begin at different steps
            markersize=5,
        )
        entries.append((drawn, line.label))
    if chart.warmup:
        first = min(line.points[0][0] for line in chart.lines)
        shade = axes.axvspan(first, chart.warmup + 0.5, facecolor=RULE, edgecolor="none", alpha=0.25)
        entries.append((shade, f"warm-up{chart.cut_off}"))
    axes.set_ylim(*chart.limits)
    axes.margins(x=0.01)
    _draw_plane(axes, "optimizer step", chart.axis)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return 18, entries


def _draw_scatter(chart: ScatterChart, axes: Any) -> tuple[float, Entries]:
    axes.plot([dot.x for dot in chart.front], [dot.y for dot in chart.front], "--", color=FAINT, linewidth=1)
    axes.set_xlim(0, chart.end * 1.06 or 1)
    axes.set_ylim(0, max(dot.y for dot in chart.dots) * 1.2 or 1)
    entries: Entries = []
    if chart.capacity is not None and chart.capacity <= axes.get_xlim()[1]:
        entries.append((axes.axvline(chart.capacity, color=WARNING, linestyle="--"), chart.capacity_label))
    for dot in chart.dots:
        if dot.failed:  # what was asked for beyond the axis is drawn at its end
            axes.plot(min(dot.x, chart.end), 0, "X", color=WARNING, markersize=9, clip_on=False, zorder=4)
            continue
        if dot.excluded:
            axes.plot(dot.x, dot.y, "x", color=INK, markersize=12, zorder=4)
        if dot.style is None:
            axes.plot(dot.x, dot.y, ".", color=FAINT, alpha=0.6)
            continue
        colour = COLOURS[dot.style]
        marker, size = ("*", 14) if dot.recommended else (MARKERS[dot.style], 9)
        axes.plot(dot.x, dot.y, marker, mec=colour, mfc=colour if dot.on_front else "none", markersize=size, zorder=3)
    _draw_plane(axes, chart.horizontal, chart.axis)
    return 21, entries


def _label_dots(chart: ScatterChart, axes: Any) -> None:
    """Write labels at the dots with a style and at failed rows, moved apart where they would overlap."""
    from adjustText import adjust_text

    figure = axes.figure
    figure.draw_without_rendering()  # the layout, which the labels must not change
    figure.set_layout_engine("none")
    drawn = [line for line in axes.lines if line.get_marker() != "None"]
    texts, targets = [], []
    for dot in chart.dots:
        if dot.style is not None or dot.failed:
            lines = textwrap.wrap(_printable(dot.label), 24, max_lines=2, placeholder=" …")
            if dot.failed:
                lines.append(f"{dot.failed} GB" + (" →" if dot.x > chart.end else ""))
            x, y = min(dot.x, chart.end), dot.y
            targets.append((x, y))
            # Failed rows may share a place: each label begins above the one before.
            y += 0.15 * axes.get_ylim()[1] * sum(other[1] == 0 for other in targets)
            texts.append(axes.text(x, y, "\n".join(lines), color=WARNING if dot.failed else INK))
    adjust_text(
        texts,
        target_x=[x for x, _ in targets],
        target_y=[y for _, y in targets],
        objects=drawn,
        ax=axes,
        expand=(1.2, 1.6),
        force_text=(0.3, 0.6),
        iter_lim=300,  # a limit of time would make two drawings of the same numbers differ
        arrowprops={"arrowstyle": "-", "color": FAINT, "lw": 0.7},
    )
