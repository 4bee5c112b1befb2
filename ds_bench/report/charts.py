"""The charts drawn by matplotlib: SVG inside the HTML page, PNG and SVG files for papers. One drawing serves both.

Sizes follow the font size, so that a chart can be narrow enough for a phone. In the page every colour becomes one of
the style sheet's variables, which differ between the light and the dark scheme, and text stays text.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..analysis.comparison import Comparison
from .chart_data import BarChart, Chart, Dot, LineChart, ScatterChart, StackChart, charts_of, format_value

INK, FAINT, RULE, PAPER, WARNING, HATCH = "#1b1f24", "#57606a", "#d5dae0", "#ffffff", "#a33b00", "#3a3f45"
ROW_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8508f", "#e69f00", "#56b4e9", INK, "#847400")
"""By style; after Okabe and Ito, darkened where white paper needs it."""
CATEGORY_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#b8508f", "#56b4e9", "#c3c9d0", PAPER)
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
HATCHES = ("", "///", "||", "--", "\\\\\\", "", "")
"""By category, so that categories differ without colour too."""
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (4, 2)), (0, (8, 3)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))
MARKERS = "os^Dv*Xh"

PAGE_WIDTH, PAGE_FONT_SIZE = 330.0, 11.5
"""Points. A phone shows one point as about one of its pixels."""
FILE_WIDTH, FILE_FONT_SIZE = 460.0, 9.0
"""Points: the width of the text on a printed page."""
ROW_HEIGHT_EM = 3.3
"""Height of a bar or stack with its label of one line above, in font sizes."""
BAR_HEIGHT = 0.36
"""Height of a bar, as a fraction of its row's."""
SCATTER_HEIGHT_EM = 21.0
STUB_HEIGHT = 0.08
"""Height of the mark of a row that ran out of memory, as a fraction of a scatter's."""
DOT_EM = 0.7
"""Half the width of a dot and the space around it, in font sizes."""
_LABEL_DISTANCES = (0.0, 0.8, 1.6, 2.4, 4.0, 6.0)
"""How far a label may be from its dot, in font sizes; one that is not beside it gets a line to it."""
_SIDES = (0.0, -0.5, 0.5, -1.0, 1.0)
_LABEL_DIRECTIONS = tuple(
    direction for side in _SIDES for direction in ((1.0, side), (-1.0, side), (side, 1.0), (side, -1.0))
)
"""Where a label lies from its point, across and up, the best first: 1 is beside it, 0 centred on it."""
CHARACTER_WIDTH_EM = 0.6
"""Width of a character of DejaVu Sans in font sizes, rather too large: text is cut too early and never overlaps."""
# hashsalt: ids that follow from the drawing instead of random ones; parse_math: a $ in a name is no formula.
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


def save_charts(title: str, comparison: Comparison, folder: Path, recommended: str | None = None) -> list[Path]:
    """Writes every chart of a comparison as PNG (200 dpi) and SVG (no font needed). Returns the files.

    ``recommended``: key of the row to mark. The same numbers give the same SVG. Makes the folder. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for chart in charts_of(comparison, recommended).charts:
        for form in ("png", "svg"):
            path = folder / f"{chart.name}.{form}"
            # A date would make two files of the same numbers differ.
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
        # Inside HTML svg elements have no namespace.
        element.tag = element.tag.rpartition("}")[2]
        for child in list(element):
            # The style of matplotlib's SVG is one of all elements (*) and would act on the whole page (backend_svg.py).
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
    # Without a width and a height, which report.css gives.
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
            frame = _draw_scatter(chart, axes, width / font_size)
        # Laid out by hand in font sizes: matplotlib's own layout draws everything twice.
        below = 3.2 + _draw_legend(axes, frame.legend, columns)
        heading = [chart.title, *textwrap.wrap(_printable(title), int(columns))] if title else []
        above = frame.above + 1.35 * len(heading) + (0.6 if title else 0)
        across, height = width / font_size, above + frame.height + below
        figure.set_size_inches(width / 72, height * font_size / 72)
        figure.subplots_adjust(
            left=frame.left / across, right=1 - 0.8 / across, bottom=below / height, top=1 - above / height
        )
        if title:
            figure.text(0.8 / across, 1 - 0.4 / height, "\n".join(heading), va="top")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowLabel:
    """The texts above a bar: the label at the left end and the value at the right end."""

    label: str
    value: str
    colour: str = INK


def _draw_rows(axes: Any, title: str, rows: Sequence[_RowLabel], columns: float) -> _Frame:
    """Axis and grid of bars of the height ``BAR_HEIGHT``, and above each its label, of two lines if it is long."""
    lines = 1
    for index, row in enumerate(rows):
        room = max(10, int(columns - len(row.value) - 3))  # a value may be as long as the line
        label = textwrap.wrap(_printable(row.label), room, max_lines=2, placeholder=" …")
        lines = max(lines, len(label))
        for text, x, side in (("\n".join(label), 0, "left"), (row.value, 1, "right")):
            position = (x, index - BAR_HEIGHT / 2)
            axes.annotate(
                text,
                position,
                (0, 1),
                ("axes fraction", "data"),
                "offset points",
                va="bottom",
                ha=side,
                color=row.colour,
            )
    # From high to low: the first row is on top, and above it there is room for its label.
    axes.set_ylim(len(rows) - 0.5, -0.75)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(title)
    axes.set_axisbelow(True)
    axes.grid(axis="x")
    _format_ticks(axes.xaxis)
    return _Frame(height=(ROW_HEIGHT_EM + 1.2 * (lines - 1)) * (len(rows) + 0.25))


def _format_ticks(axis: Any) -> None:
    """About five round numbers: ``45,000``, ``0.25``."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.set_major_locator(MaxNLocator(5))
    large = max(map(abs, axis.get_view_interval())) >= 1000
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if large else "{x:.4g}"))


def _draw_legend(axes: Any, entries: Sequence[tuple[Any, str]], columns: float) -> float:
    """Draws the legend below the chart, in one to three columns. Returns its height in font sizes."""
    if not entries:
        return 0.0
    across = max(1, min(3, int(columns / (max(len(label) for _, label in entries) + 6.5))))
    labels = [_printable(label, columns / across - 6.5) for _, label in entries]
    # matplotlib leaves out a label that begins with an underscore; a space of no width comes before it
    labels = [f"\u200b{label}" if label.startswith("_") else label for label in labels]
    axes.figure.legend(
        [handle for handle, _ in entries],
        labels,
        loc="lower left",
        borderaxespad=0,
        ncols=across,
        handlelength=2,
        columnspacing=1,
        labelspacing=0.3,
    )
    return 1.4 * -(-len(entries) // across) + 0.8


def _draw_bars(chart: BarChart, axes: Any, columns: float) -> _Frame:
    axes.barh(range(len(chart.bars)), [bar.value for bar in chart.bars], height=BAR_HEIGHT, color=ROW_COLOURS[0])
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
    # "or 1", since matplotlib warns of an axis of which both ends are the same.
    axes.set_xlim(0, largest * 1.04 or 1)
    labels = [
        _RowLabel(label=f"{bar.label} (baseline)" if bar.baseline else bar.label, value=format_value(bar.value))
        for bar in chart.bars
    ]
    return _draw_rows(axes, chart.axis, labels, columns)


def _draw_stacks(chart: StackChart, axes: Any, columns: float) -> _Frame:
    rows = range(len(chart.stacks))
    starts = [0.0] * len(chart.stacks)
    entries: list[tuple[Any, str]] = []
    for part, category in enumerate(chart.categories):
        sizes = [0.0 if stack.failed else stack.parts[part] for stack in chart.stacks]
        drawn = [row for row in rows if sizes[row]]  # a bar of no width would still show its edges
        colour = CATEGORY_COLOURS[part % len(CATEGORY_COLOURS)]
        if drawn:
            bars = axes.barh(
                drawn,
                [sizes[row] for row in drawn],
                left=[starts[row] for row in drawn],
                height=BAR_HEIGHT,
                color=colour,
                hatch=HATCHES[part % len(HATCHES)],
                edgecolor=FAINT if colour == PAPER else HATCH,
                linewidth=0.6,
            )
            entries.append((bars, category))
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.set_xlim(0, chart.end * 1.03 or 1)
    requests = [(row, stack.requested) for row, stack in enumerate(chart.stacks) if stack.requested is not None]
    if requests:
        numbers, lengths = zip(*requests, strict=True)
        bars = axes.barh(
            numbers,
            lengths,
            height=BAR_HEIGHT,
            color=PAPER,
            hatch="xxx",
            edgecolor=WARNING,
            linewidth=0.8,
            linestyle=":",
        )
        entries.append((bars, "out of memory"))
    # A bar ends at the peak, unless its categories, each at its own largest, are longer.
    peaks = [
        (stack.measured, row)
        for row, stack in enumerate(chart.stacks)
        if stack.measured and stack.total > 1.005 * stack.measured
    ]
    if peaks:
        style: Any = {"markerfacecolor": INK, "markeredgecolor": PAPER, "markersize": 7, "clip_on": False, "zorder": 4}
        (points,) = axes.plot(*zip(*peaks, strict=True), "D", **style)
        entries.append((points, "measured peak"))
    predictions = [(stack.predicted, row) for row, stack in enumerate(chart.stacks) if stack.predicted is not None]
    if predictions:
        for colour, line_width in ((PAPER, 5.0), (INK, 2.5)):  # a halo, to be seen on the bar and beside it
            style = {"color": colour, "markeredgewidth": line_width, "markersize": 17, "zorder": 3}
            axes.plot(*zip(*predictions, strict=True), "|", **style)
        # The ticks at the bars are too high for a line of the legend, which gets one of its own.
        (tick,) = axes.plot([], [], "|", color=INK, markeredgewidth=2.5, markersize=8)
        entries.append((tick, "predicted"))
    if chart.capacity is not None:
        (line,) = axes.plot([], [], linestyle="--", color=WARNING)
        if chart.capacity_is_drawn:
            half = 0.65 * BAR_HEIGHT
            bottoms, tops = [row - half for row in rows], [row + half for row in rows]
            axes.vlines([chart.capacity] * len(rows), bottoms, tops, color=WARNING, linestyle="--")
            entries.append((line, chart.capacity_label))
        else:
            entries.append((line, f"{chart.capacity_label} (beyond the axis →)"))
    labels = [
        _RowLabel(
            label=stack.label, value=stack.value or format_value(stack.total), colour=WARNING if stack.failed else INK
        )
        for stack in chart.stacks
    ]
    return replace(_draw_rows(axes, chart.axis, labels, columns), legend=entries)


def _draw_plane(axes: Any, horizontal: str, vertical: str, legend: Sequence[tuple[Any, str]]) -> _Frame:
    """Draws both axes. The title of the vertical one is above it, where it needs no rotation."""
    axes.set_xlabel(horizontal)
    axes.set_title(vertical, loc="left", fontsize="medium")
    axes.set_axisbelow(True)
    axes.grid(axis="y")
    _format_ticks(axes.xaxis)
    _format_ticks(axes.yaxis)
    # Of a damaged record a number may have hundreds of digits, for which there is no space.
    longest_number = min(max(6, len(f"{axes.get_ylim()[1]:,.0f}")), 20)
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
            # The markers of each line begin at another step, so that those of equal lines are all visible.
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


def _draw_scatter(chart: ScatterChart, axes: Any, across: float) -> _Frame:
    """``across``: width of the figure in font sizes, by which the labels are placed."""
    axes.plot([dot.x for dot in chart.front], [dot.y for dot in chart.front], "--", color=FAINT, linewidth=1)
    axes.set_xlim(0, chart.end * 1.06 or 1)
    axes.set_ylim(0, max(dot.y for dot in chart.dots) * 1.12 or 1)
    entries: list[tuple[Any, str]] = []
    if chart.capacity is not None and chart.capacity <= axes.get_xlim()[1]:
        entries.append((axes.axvline(chart.capacity, color=WARNING, linestyle="--"), chart.capacity_label))
    failed = [dot for dot in chart.dots if dot.failed]
    if failed:
        # What was asked for beyond the axis is drawn at its end; an arrow in the label says so.
        places, stub = [min(dot.x, chart.end) for dot in failed], STUB_HEIGHT * axes.get_ylim()[1]
        bars = axes.bar(
            places, stub, width=0.025 * chart.end, color=PAPER, hatch="xxx", edgecolor=WARNING, linewidth=0.8, zorder=3
        )
        entries.append((bars, "out of memory"))
    for dot in chart.dots:
        if dot.excluded:
            axes.plot(dot.x, dot.y, "x", color=INK, markersize=12, zorder=4)
        if dot.style is None:
            if not dot.failed:
                axes.plot(dot.x, dot.y, ".", color=FAINT, alpha=0.6)
            continue
        colour = ROW_COLOURS[dot.style]
        axes.plot(
            dot.x,
            dot.y,
            "*" if dot.recommended else MARKERS[dot.style],
            markeredgecolor=colour,
            markerfacecolor=colour if dot.on_front else PAPER,
            markersize=14 if dot.recommended else 9,
            zorder=3,
        )
    frame = replace(_draw_plane(axes, chart.horizontal, chart.axis, entries), height=SCATTER_HEIGHT_EM)
    _label_dots(chart, axes, across - frame.left - 0.8, frame.height)
    return frame


def _label_dots(chart: ScatterChart, axes: Any, width: float, height: float) -> None:
    """Writes labels at the dots. ``width`` and ``height``: of the plot in font sizes."""
    # Labels are placed in font sizes, the unit in which their own sizes are known, and drawn in units of the axes.
    scale_x, scale_y = width / axes.get_xlim()[1], height / axes.get_ylim()[1]

    def position(dot: Dot) -> tuple[float, float]:
        return min(dot.x, chart.end) * scale_x, STUB_HEIGHT * height if dot.failed else dot.y * scale_y

    labelled = [dot for dot in chart.dots if dot.style is not None or dot.failed]
    texts = [textwrap.wrap(_printable(dot.label), 24, max_lines=2, placeholder=" …") for dot in labelled]
    for dot, text in zip(labelled, texts, strict=True):
        if dot.failed:
            text.append(f"{dot.failed} GB" + (" →" if dot.x > chart.end else ""))
    sizes = [(CHARACTER_WIDTH_EM * max(map(len, text), default=0), 1.2 * len(text)) for text in texts]
    places = place_labels(
        [position(dot) for dot in labelled],
        sizes,
        (width, height),
        [position(dot) for dot in chart.dots],
        [
            [position(dot) for dot in chart.front],
            [] if chart.capacity is None else [(chart.capacity * scale_x, 0), (chart.capacity * scale_x, height)],
        ],
    )
    for dot, text, size, place in zip(labelled, texts, sizes, places, strict=True):
        if place is not None:
            left, bottom = place
            x, y = position(dot)
            end = _nearest((left, bottom, left + size[0], bottom + size[1]), (x, y))
            if math.dist((x, y), end) > 1.8 * DOT_EM:
                axes.plot([x / scale_x, end[0] / scale_x], [y / scale_y, end[1] / scale_y], color=FAINT, linewidth=0.7)
            side, start = ("left", left) if left >= x else ("right", left + size[0])
            if left < x < left + size[0]:
                side, start = "center", left + size[0] / 2
            axes.text(
                start / scale_x,
                bottom / scale_y,
                "\n".join(text),
                va="bottom",
                ha=side,
                linespacing=1.1,
                color=WARNING if dot.failed else INK,
            )


Point = tuple[float, float]


def place_labels(
    points: Sequence[Point],
    sizes: Sequence[Point],
    plot: Point,
    obstacles: Sequence[Point],
    lines: Sequence[Sequence[Point]],
) -> list[Point | None]:
    """Lower left corners of labels beside their points; None for a label for which there is no room.

    Labels lie within the plot, from (0, 0) to ``plot``, and cover no other label and no obstacle, which are points that
    take ``DOT_EM`` each way. They cross ``lines``, each through the points given, only if nothing else is free.
    ``sizes``: width and height of the labels. All in font sizes.
    """
    dots = [(x - DOT_EM, y - DOT_EM, x + DOT_EM, y + DOT_EM) for x, y in obstacles]
    crossed = [(*at, *at) for line in lines for start, end in itertools.pairwise(line) for at in _along(start, end)]
    numbers = range(len(points))
    orders = {  # a label takes the place that is best for it alone, so the order decides what is left for the others
        tuple(numbers),
        *(
            tuple(sorted(numbers, key=lambda number: sign * points[number][axis]))
            for axis in (0, 1)
            for sign in (1, -1)
        ),
    }
    attempts = []
    # Sorted, so that of equally good attempts it is always the same one that is taken.
    for order in sorted(orders):
        total, places, labels = 0.0, dict[int, Point](), list[_Box]()
        for number in order:
            others = [dot for dot, center in zip(dots, obstacles, strict=True) if center != points[number]]
            best: tuple[float, _Box | None] = (_NO_PLACE, None)
            for cost, box in _free_boxes(points[number], sizes[number], plot, [*dots, *labels], labels):
                if cost >= best[0]:  # as are all that follow
                    break
                cost += _badness(box, points[number], crossed, others)
                best = min(best, (cost, box), key=lambda each: each[0])
            total += best[0]
            if best[1] is not None:
                labels.append(best[1])
                places[number] = best[1][:2]
        attempts.append((total, places))
    _, places = min(attempts, key=lambda attempt: attempt[0])
    return [places.get(number) for number in numbers]


_NO_PLACE = 1000.0
"""The cost of a label without a place."""
_Box = tuple[float, float, float, float]
"""Left, bottom, right and top."""


def _free_boxes(
    point: Point, size: Point, plot: Point, taken: Sequence[_Box], labels: Sequence[_Box]
) -> Iterator[tuple[float, _Box]]:
    """Boxes of a label that overlap nothing, each with a cost, the cheapest and nearest first."""
    wide, high = size
    for order, (distance, (across, up)) in enumerate(itertools.product(_LABEL_DISTANCES, _LABEL_DIRECTIONS)):
        left = point[0] + across * (DOT_EM + 0.2 + distance) - wide * (1 - across) / 2
        bottom = point[1] + up * (DOT_EM + 0.2 + distance) - high * (1 - up) / 2
        box = (left, bottom, left + wide, bottom + high)
        if left < 0 or bottom < 0 or box[2] > plot[0] or box[3] > plot[1] or _overlaps(box, taken):
            continue
        # The line from a distant label to its point must not cross another label.
        if not distance or not any(_overlaps((*at, *at), labels) for at in _along(point, _nearest(box, point))):
            yield order / 6, box


def _badness(box: _Box, point: Point, crossed: Sequence[_Box], others: Sequence[_Box]) -> float:
    """How hard a label is to read: on a line, so near to the dot of another row that it seems to be of that one."""
    near = (box[0] - DOT_EM, box[1] - DOT_EM / 2, box[2] + DOT_EM, box[3] + DOT_EM / 2)
    leader = _along(point, _nearest(box, point))
    return (
        sum(_overlaps(at, [box]) for at in crossed)
        + 8 * _overlaps(near, others)
        + sum(_overlaps((*at, *at), others) for at in leader)
    )


def _overlaps(box: _Box, others: Sequence[_Box]) -> bool:
    return any(box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in others)


def _nearest(box: _Box, point: Point) -> Point:
    """The point of the box that is nearest to the given one."""
    return min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])


def _along(start: Point, end: Point) -> list[Point]:
    """Points that divide a line into 16 equal parts, ends included."""
    return [
        (start[0] + (end[0] - start[0]) * part / 16, start[1] + (end[1] - start[1]) * part / 16) for part in range(17)
    ]
