"""The charts drawn by matplotlib: SVG inside the HTML page, PNG and SVG files for papers. One drawing serves both.

Sizes follow the font size, so that a chart can be narrow enough for a phone. In the page every colour becomes one of
the style sheet's variables, which differ between the light and the dark scheme, and text stays text.
"""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis.comparison import Comparison
from .chart_data import BarChart, Chart, LineChart, ScatterChart, StackChart, charts_of, format_value

INK, FAINT, RULE, PAPER, WARNING, HATCH = "#1b1f24", "#57606a", "#d5dae0", "#ffffff", "#a33b00", "#3a3f45"
ROW_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8508f", "#e69f00", "#56b4e9", INK, "#847400")
"""By style; after Okabe and Ito, darkened where white paper needs it."""
CATEGORY_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#b8508f", "#56b4e9", "#c3c9d0")
CSS_VARIABLES = {
    INK: "--ink",
    FAINT: "--faint",
    RULE: "--rule",
    PAPER: "--page",
    WARNING: "--bad",
    HATCH: "--hatch",
    "#0072b2": "--c0",
    "#d55e00": "--c1",
    "#009e73": "--c2",
    "#b8508f": "--c3",
    "#e69f00": "--c4",
    "#56b4e9": "--c5",
    "#847400": "--c6",
    "#c3c9d0": "--c7",
}
"""What the page draws each colour with; ``report.css`` defines them for both colour schemes."""
HATCHES = ("", "///", "||", "--", "\\\\\\", "")
"""By category, so that categories differ without colour too."""
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (4, 2)), (0, (8, 3)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))
MARKERS = "os^Dv*Xh"

PAGE_WIDTH, PAGE_FONT_SIZE = 360.0, 11.0
"""Points. A phone shows one point as about one of its pixels."""
FILE_WIDTH, FILE_FONT_SIZE = 460.0, 9.0
"""Points: the width of the text on a printed page."""
ROW_HEIGHT_EM = 3.3
"""Height of a bar or stack with its label above, in font sizes."""
CHARACTER_WIDTH_EM = 0.6
"""Width of a character of DejaVu Sans in font sizes, rather too large: text is cut too early and never overlaps."""
_SETTINGS: Any = {
    "svg.hashsalt": "ds_bench",
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": "medium",
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
}


def save_charts(title: str, comparison: Comparison, folder: Path) -> list[Path]:
    """Writes every chart of a comparison as PNG (200 dpi) and SVG (no font needed). Returns the files.

    The same numbers give the same SVG. Makes the folder. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for chart in charts_of(comparison).charts:
        for form in ("png", "svg"):
            path = folder / f"{chart.name}.{form}"
            options: Any = {"dpi": 200} if form == "png" else {"metadata": {"Date": None}}
            _draw(chart, path, FILE_WIDTH, FILE_FONT_SIZE, title=title, **options)
            paths.append(path)
    return paths


def inline_svg(chart: Chart, uid: str) -> str:
    """One ``<svg role="img">`` for the HTML page, with a title and a text alternative.

    ``uid``: unique in the page, of letters, digits and dashes; every id inside begins with it. The markup refers to
    nothing outside, and its colours are CSS variables of the page.
    """
    buffer = io.BytesIO()
    _draw(chart, buffer, PAGE_WIDTH, PAGE_FONT_SIZE, format="svg", metadata={"Date": None})
    drawing = ElementTree.fromstring(buffer.getvalue())
    for element in list(drawing.iter()):
        element.tag = element.tag.rpartition("}")[2]
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                element.remove(child)
    referred = set(re.findall(r"#([\w.-]+)", " ".join(v for e in drawing.iter() for v in e.attrib.values())))
    for element in drawing.iter():
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        if attributes.get("id") not in referred:
            attributes.pop("id", None)
        if "fill" in attributes:  # a variable may stand in a style alone
            attributes["style"] = f"fill: {attributes.pop('fill')}; {attributes.get('style', '')}"
        element.attrib = {name: _for_page(name, value, uid) for name, value in attributes.items()}
    title = ElementTree.Element("title", id=f"{uid}-title")
    title.text = _printable(chart.title)
    description = ElementTree.Element("desc", id=f"{uid}-desc")
    description.text = _printable(f"{chart.alt_text} {chart.note}")
    drawing[:0] = [title, description]
    drawing.attrib = {
        "role": "img",
        "viewBox": drawing.attrib["viewBox"],
        "aria-labelledby": f"{uid}-title {uid}-desc",
        "class": "chart",
    }
    return ElementTree.tostring(drawing, encoding="unicode")


def _for_page(name: str, value: str, uid: str) -> str:
    """An attribute as the page needs it: unique ids, colours and fonts of the page, numbers to a tenth of a pixel."""
    if name == "id":
        return f"{uid}-{value}"
    if name == "href":
        return f"#{uid}-{value[1:]}"
    if name in ("d", "x", "y", "transform"):
        return re.sub(r"\d+\.\d\d+", lambda match: f"{float(match[0]):.1f}", value)
    value = value.replace("url(#", f"url(#{uid}-")
    if name == "style":
        value = re.sub(r"font-family:[^;]*;?\s*", "", value)
        value = re.sub(r"#[0-9a-f]{6}\b", lambda match: f"var({CSS_VARIABLES[match[0]]})", value)
    return value


def _draw(chart: Chart, target: Any, width: float, font_size: float, *, title: str = "", **options: Any) -> None:
    """Draws into a path or a stream. ``width`` and ``font_size`` in points; ``options``: of ``Figure.savefig``.

    With a ``title``, as in files, text becomes outlines; in the page, which has fonts, it stays text.
    """
    import matplotlib
    from matplotlib.figure import Figure

    settings = {**_SETTINGS, "font.size": font_size, "svg.fonttype": "path" if title else "none"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the page's own fonts may have it
        figure = Figure()
        axes = figure.add_subplot()
        columns = width / font_size / CHARACTER_WIDTH_EM
        if isinstance(chart, BarChart):
            frame = _draw_bars(chart, axes, columns)
        elif isinstance(chart, StackChart):
            frame = _draw_stacks(chart, axes, columns)
        elif isinstance(chart, LineChart):
            frame = _draw_lines(chart, axes)
        else:
            assert isinstance(chart, ScatterChart), f"no drawing of {type(chart).__name__}"
            frame = _draw_scatter(chart, axes)
        # Laid out by hand in font sizes: matplotlib's own layout draws everything twice.
        below = 3.2 + _draw_legend(axes, frame.legend, columns)
        above = frame.above + (3 if title else 0)
        across, height = width / font_size, above + frame.height + below
        figure.set_size_inches(width / 72, height * font_size / 72)
        figure.subplots_adjust(
            left=frame.left / across, right=1 - 0.8 / across, bottom=below / height, top=1 - above / height
        )
        if title:
            text = f"{chart.title}\n{_printable(title, columns)}"
            figure.text(0.8 / across, 1 - 0.4 / height, text, va="top")
        figure.savefig(target, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """The size of a chart's plot and of the space around it, in font sizes, and its legend."""

    height: float
    left: float = 0.8
    """Space for the numbers of the vertical axis."""
    above: float = 0.0
    legend: Sequence[tuple[Any, str]] = ()


def _printable(text: str, columns: float | None = None) -> str:
    """One line that XML can hold, cut to a width in characters."""
    line = "".join(sign if sign.isprintable() else "\ufffd" for sign in " ".join(text.split()))
    if columns is None or len(line) <= columns:
        return line
    return line[: max(3, int(columns) - 1)].rstrip() + "…"


def _draw_rows(axes: Any, title: str, rows: Sequence[tuple[str, str]], columns: float) -> None:
    """Axis and grid of bars: above each bar its label and, at the right end, its value."""
    for index, (label, value) in enumerate(rows):
        for text, x, side in ((_printable(label, columns - len(value) - 3), 0, "left"), (value, 1, "right")):
            axes.annotate(text, (x, index - 0.18), xycoords=("axes fraction", "data"), va="bottom", ha=side)
    axes.set_ylim(len(rows) - 0.5, -0.75)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(title)
    axes.set_axisbelow(True)
    axes.grid(axis="x")
    _format_ticks(axes.xaxis)


def _format_ticks(axis: Any) -> None:
    """About five round numbers: ``45,000``, ``0.25``."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter, StrMethodFormatter

    axis.set_major_locator(MaxNLocator(5))
    large = max(map(abs, axis.get_view_interval())) >= 1000
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}") if large else ScalarFormatter(useOffset=False))


def _draw_legend(axes: Any, entries: Sequence[tuple[Any, str]], columns: float) -> float:
    """Draws the legend below the chart, in one to three columns. Returns its height in font sizes."""
    if not entries:
        return 0.0
    across = max(1, min(3, int(columns / (max(len(label) for _, label in entries) + 8))))
    labels = [_printable(label, columns / across - 8) for _, label in entries]
    # matplotlib leaves out a label that begins with an underscore; a space of no width comes before it
    labels = [f"\u200b{label}" if label.startswith("_") else label for label in labels]
    axes.figure.legend(
        [handle for handle, _ in entries],
        labels,
        loc="lower left",
        borderaxespad=0,
        ncols=across,
        handlelength=2.8,
        columnspacing=1,
        labelspacing=0.3,
    )
    return 1.4 * -(-len(entries) // across) + 0.8


def _draw_bars(chart: BarChart, axes: Any, columns: float) -> _Frame:
    axes.barh(range(len(chart.bars)), [bar.value for bar in chart.bars], height=0.36, color=ROW_COLOURS[0])
    for index, bar in enumerate(chart.bars):
        if bar.interval:
            low, high = bar.interval
            for colour, width in ((PAPER, 4.0), (INK, 1.5)):  # a halo, to be seen on the bar and beside it
                middle, half = (low + high) / 2, (high - low) / 2
                axes.errorbar([middle], [index], xerr=half, color=colour, capsize=4, linewidth=width)
        if len(bar.runs) > 1:
            runs = bar.runs[:20]
            style: Any = {"markerfacecolor": PAPER, "markeredgecolor": INK, "markersize": 4, "zorder": 4}
            axes.plot(runs, [index] * len(runs), "o", **style)
    largest = max(value for bar in chart.bars for value in (bar.value, *(bar.interval or ()), *bar.runs))
    axes.set_xlim(0, largest * 1.04 or 1)
    labels = [f"{bar.label} (baseline)" if bar.baseline else bar.label for bar in chart.bars]
    values = [format_value(bar.value) for bar in chart.bars]
    _draw_rows(axes, chart.axis, list(zip(labels, values, strict=True)), columns)
    return _Frame(height=ROW_HEIGHT_EM * len(chart.bars))


def _draw_stacks(chart: StackChart, axes: Any, columns: float) -> _Frame:
    rows = range(len(chart.stacks))
    starts = [0.0] * len(chart.stacks)
    entries = []
    for part, category in enumerate(chart.categories):
        sizes = [stack.parts[part] for stack in chart.stacks]
        if any(sizes):
            bars = axes.barh(
                rows,
                sizes,
                left=starts,
                height=0.36,
                color=CATEGORY_COLOURS[part % len(CATEGORY_COLOURS)],
                hatch=HATCHES[part % len(HATCHES)],
                edgecolor=HATCH,
                linewidth=0.6,
            )
            entries.append((bars, category))
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    peaks = [(stack.marker, row) for row, stack in enumerate(chart.stacks) if stack.marker is not None]
    if peaks:
        style: Any = {"markerfacecolor": INK, "markeredgecolor": PAPER, "markersize": 7, "clip_on": False, "zorder": 4}
        (points,) = axes.plot(*zip(*peaks, strict=True), "D", **style)
        entries.append((points, "measured peak"))
    end = chart.largest * 1.03
    if chart.capacity is not None:
        (line,) = axes.plot([], [], linestyle="--", color=WARNING)
        if chart.capacity_is_near:
            end = max(chart.largest, chart.capacity) * 1.03
            bottoms, tops = [row - 0.3 for row in rows], [row + 0.3 for row in rows]
            axes.vlines([chart.capacity] * len(rows), bottoms, tops, color=WARNING, linestyle="--")
            entries.append((line, chart.capacity_label))
        else:
            end = chart.largest * 1.12
            entries.append((line, f"{chart.capacity_label} (beyond the axis →)"))
    axes.set_xlim(0, end or 1)
    _draw_rows(axes, chart.axis, [(stack.label, format_value(stack.total)) for stack in chart.stacks], columns)
    return _Frame(height=ROW_HEIGHT_EM * len(chart.stacks), legend=entries)


def _draw_plane(axes: Any, horizontal: str, vertical: str, legend: Sequence[tuple[Any, str]]) -> _Frame:
    """Draws both axes. The title of the vertical one is above it, where it needs no rotation."""
    axes.set_xlabel(horizontal)
    axes.set_title(vertical, loc="left", fontsize="medium")
    axes.set_axisbelow(True)
    axes.grid(axis="y")
    _format_ticks(axes.xaxis)
    _format_ticks(axes.yaxis)
    longest_number = max(6, len(f"{axes.get_ylim()[1]:,.0f}"))
    return _Frame(height=18, left=1 + longest_number * CHARACTER_WIDTH_EM, above=1.8, legend=legend)


def _draw_lines(chart: LineChart, axes: Any) -> _Frame:
    entries = []
    for line in chart.lines:
        steps, values = zip(*line.points, strict=True)
        (drawn,) = axes.plot(
            steps,
            values,
            color=ROW_COLOURS[line.style],
            linestyle=DASHES[line.style],
            linewidth=2.4 - 0.19 * line.style,  # later lines are thinner, so that equal lines are all visible
            marker=MARKERS[line.style],
            markevery=(line.style, max(1, len(steps) // 7)),
            markersize=5,
        )
        entries.append((drawn, line.label))
    if chart.warmup:
        first = min(line.points[0][0] for line in chart.lines)
        shade = axes.axvspan(first, chart.warmup + 0.5, facecolor=INK, edgecolor="none", alpha=0.08)
        entries.append((shade, f"warm-up{', ' if chart.cut_off else ''}{chart.cut_off}"))
    axes.set_ylim(*chart.limits)
    axes.margins(x=0.01)
    frame = _draw_plane(axes, chart.horizontal, chart.axis, entries)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return frame


def _draw_scatter(chart: ScatterChart, axes: Any) -> _Frame:
    axes.plot([dot.x for dot in chart.front], [dot.y for dot in chart.front], "--", color=FAINT, linewidth=1)
    entries = []
    for dot in chart.dots:
        if dot.excluded:
            axes.plot(dot.x, dot.y, "x", color=INK, markersize=12, zorder=3)
        if dot.style is None:
            axes.plot(dot.x, dot.y, ".", color=FAINT, alpha=0.6)
            continue
        colour = ROW_COLOURS[dot.style]
        (drawn,) = axes.plot(
            dot.x,
            dot.y,
            MARKERS[dot.style],
            markeredgecolor=colour,
            markerfacecolor=colour if dot.on_front else PAPER,
            markersize=9,
        )
        entries.append((drawn, dot.label))
    axes.set_xlim(0, max(dot.x for dot in chart.dots) * 1.06 or 1)
    axes.set_ylim(0, max(dot.y for dot in chart.dots) * 1.08 or 1)
    if chart.capacity is not None and chart.capacity <= axes.get_xlim()[1]:
        entries.append((axes.axvline(chart.capacity, color=WARNING, linestyle="--"), chart.capacity_label))
    return _draw_plane(axes, chart.horizontal, chart.axis, entries)
