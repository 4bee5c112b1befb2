"""Charts as matplotlib figures: SVG images for the HTML page, PNG and SVG files for papers.

``comparison_charts`` makes the charts. Bars and lines have colors with a 3:1 contrast on white and on the page's
dark background. Ink is dark, and an SVG of the page swaps it for a light one if the reader prefers a dark color scheme.
"""

from __future__ import annotations

import base64
import io
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..units import format_items, format_significant
from .table_layout import Table

INK, FAINT, RULE, WARNING = "#1b1f24", "#57606a", "#80868c", "#a33b00"
DARK_INKS = {INK: "#e8ebee", FAINT: "#a3adb8", WARNING: "#ff9a5c"}
"""Ink → its replacement in the page's dark color scheme."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#b8508f", "#b07d00", "#7a6fd0", "#80868c", "#847400")
"""By row or category; after Okabe and Ito, with their bright colors darkened."""
PAGE_WIDTH, PAGE_FONT_SIZE = 330.0, 11.5
"""Points. A phone shows one point as about one of its pixels."""
FILE_WIDTH, FILE_FONT_SIZE = 460.0, 9.0
"""Points: the width of the text on a printed page."""
BAR_HEIGHT = 0.36
"""As a fraction of the row's height."""
MAX_ROWS_IN_ALT_TEXT = 12
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


class DotLabel(NamedTuple):
    """A label to write next to a dot, moved if it would cover another."""

    x: float
    y: float
    text: str
    color: str


class Drawing(NamedTuple):
    """What the axes of a chart need around them."""

    height: float
    """Of the axes, in lines of text."""
    legend: Sequence[tuple[Any, str]] = ()
    """Handles and labels."""
    dot_labels: Sequence[DotLabel] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure that is drawn on demand, with its text alternative."""

    name: str
    """Stem of its files, such as ``throughput``."""
    title: str
    axis: str
    """Quantity and unit: for bars, of the horizontal axis; otherwise of the vertical one."""
    values: Sequence[tuple[str, str]]
    """Label and value of each row drawn."""
    draw: Callable[[Any, int], Drawing]
    """Draw into matplotlib's axes; the second argument is the width in characters."""
    note: str = ""
    """How to read it, and which rows are left out."""
    table: Table | None = None
    """The numbers drawn, if no other table of the page has them."""

    @property
    def alt_text(self) -> str:
        """The text alternative: title, axis and the value of each row."""
        listed = [" ".join(pair) for pair in self.values[:MAX_ROWS_IN_ALT_TEXT]]
        if more := len(self.values) - len(listed):
            listed.append(format_items(more, "more row"))
        return f"{self.title}, {self.axis}: {'; '.join(listed)}."


def save_charts(title: str, charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Write every chart as PNG (200 dpi) and SVG (no font needed). Return the files.

    The same numbers give the same SVG. Makes the folder. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for chart in charts:
        for form in ("png", "svg"):
            paths.append(folder / f"{chart.name}.{form}")
            _render(chart, paths[-1], FILE_WIDTH, FILE_FONT_SIZE, title=title, dpi=200, facecolor="white")
    return paths


def image_source(chart: Chart) -> str:
    """The chart as the ``src`` of an ``<img>``: an SVG that refers to nothing outside, with its text as text."""
    buffer = io.StringIO()
    _render(chart, buffer, PAGE_WIDTH, PAGE_FONT_SIZE, format="svg", transparent=True)
    rules = " ".join(
        f"[style*='{what}: {ink}'] {{ {what}: {light} !important }}"
        for ink, light in DARK_INKS.items()
        for what in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"
    drawing = buffer.getvalue().replace("<defs>", f"{style}<defs>", 1)
    return f"data:image/svg+xml;base64,{base64.b64encode(drawing.encode()).decode()}"


def _render(chart: Chart, target: Any, width: float, font_size: float, *, title: str = "", **options: Any) -> None:
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
        columns = int(width / font_size / 0.56)  # characters in a line of text
        drawing = chart.draw(axes, columns)
        height = drawing.height + 4
        if drawing.legend:
            handles, labels = zip(*drawing.legend, strict=True)
            across = max(1, min(3, int(columns / (max(map(len, labels)) + 6.5))))
            # matplotlib leaves out a label that begins with an underscore; a zero-width space comes before it
            shown = [f"\u200b{printable(label, columns // across - 6)}" for label in labels]
            figure.legend(handles, shown, loc="outside lower left", ncols=across, columnspacing=1, labelspacing=0.3)
            height += 1.4 * -(-len(labels) // across)
        if title:
            heading = [chart.title, *textwrap.wrap(printable(title), columns)]
            height += 1.35 * len(heading) + 0.6
            figure.suptitle("\n".join(heading), x=0.01, ha="left", fontsize=font_size)
        figure.set_size_inches(width / 72, height * font_size / 72)
        if drawing.dot_labels:
            _label_dots(axes, drawing.dot_labels)
        # A date would make two files of the same numbers differ.
        metadata = {"Date": None} if not str(target).endswith(".png") else None
        figure.savefig(target, metadata=metadata, **options)


def format_value(value: float | None) -> str:
    """A value with three significant digits, even for small models: ``45,000``, ``12.3``, ``0.000413``."""
    small = value is not None and 0 < abs(value) < 0.01
    return f"{value:.3g}" if small else format_significant(value)


def printable(text: str, columns: int | None = None) -> str:
    """One line that XML can hold, cut in the middle to a width in characters: labels often differ only at the end."""
    line = "".join(sign if sign.isprintable() else "\ufffd" for sign in " ".join(text.split()))
    if columns is None or len(line) <= columns:
        return line
    end = columns // 2 - 1
    return f"{line[: columns - end - 1].rstrip()}…{line[len(line) - end :].lstrip()}"


def label_bars(axes: Any, title: str, rows: Sequence[tuple[str, str, bool]], end: float, columns: int) -> float:
    """Finish a chart of horizontal bars: axis to ``end``, grid, and label and value above each bar. Return the height.

    ``rows``: label, value, and whether the row failed.
    """
    for index, (label, value, failed) in enumerate(rows):
        for text, x, side in ((printable(label, max(10, columns - len(value) - 3)), 0, "left"), (value, 1, "right")):
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
    axes.set_xlim(0, end * 1.04 or 1)  # "or 1", since matplotlib warns about an axis whose ends are the same
    # From high to low: the first row is on top, with room for its label above.
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(title)
    axes.grid(axis="x")
    _format_ticks(axes.xaxis)
    return 3.3 * (len(rows) + 0.3)


def label_plane(axes: Any, horizontal: str, vertical: str) -> None:
    """Label both axes. The title of the vertical one is above it, where it needs no rotation."""
    axes.set_xlabel(horizontal)
    axes.set_title(vertical, loc="left", fontsize="medium")
    axes.grid(axis="y")
    _format_ticks(axes.xaxis)
    _format_ticks(axes.yaxis)


def _format_ticks(axis: Any) -> None:
    """About five round numbers: ``45,000``, ``0.25``."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.set_major_locator(MaxNLocator(5))
    thousands = 1000 <= max(map(abs, axis.get_view_interval())) < 1e9
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if thousands else "{x:.4g}"))


def _label_dots(axes: Any, labels: Sequence[DotLabel]) -> None:
    """Write labels at their dots, moved apart if they would overlap."""
    from adjustText import adjust_text

    axes.figure.draw_without_rendering()  # the layout, which the labels must not change
    axes.figure.set_layout_engine("none")
    texts, on_axis = [], 0
    for label in labels:
        # Failed rows may share a place: each label begins above the one before.
        on_axis += label.y == 0
        y = label.y or 0.15 * axes.get_ylim()[1] * on_axis
        texts.append(axes.text(label.x, y, label.text, color=label.color))
    adjust_text(
        texts,
        target_x=[label.x for label in labels],
        target_y=[label.y for label in labels],
        objects=[line for line in axes.lines if line.get_marker() != "None"],
        ax=axes,
        expand=(1.2, 1.6),
        force_text=(0.3, 0.6),
        iter_lim=300,  # a time limit would make two drawings of the same numbers differ
        arrowprops={"arrowstyle": "-", "color": FAINT, "lw": 0.7},
    )
