"""Charts as inline SVG: drawn 360 wide so that they can be read on a phone, coloured by the page's CSS."""

from __future__ import annotations

import html
from collections.abc import Sequence

from . import svg
from .chart_data import BarChart, Chart, Dot, LineChart, ScatterChart, Stack, StackChart, number
from .svg import Scale, element, path, text

WIDTH = 360.0
_LEFT, _RIGHT = 4.0, 356.0
_ROW = 38.0
"""Height of a row of bars: its label above, its bar below."""
_BAR = 13.0
_PLOT_LEFT, _PLOT_HEIGHT = 52.0, 200.0
_AXIS_HEIGHT = 40.0
_LEGEND_ROW = 19.0


def draw(chart: Chart, uid: str) -> str:
    """One ``<svg role="img">`` with title and description. ``uid``: unique in the page, letters, digits and dashes."""
    body, height = _body(chart, uid)
    names = f"{uid}-title {uid}-desc"
    return element(
        "svg",
        element("title", html.escape(chart.title), id=f"{uid}-title"),
        element("desc", html.escape(f"{chart.words} {chart.note}".strip()), id=f"{uid}-desc"),
        *body,
        role="img",
        viewBox=f"0 0 {svg.number(WIDTH)} {svg.number(height)}",
        aria_labelledby=names,
        class_="chart",
    )


def _body(chart: Chart, uid: str) -> tuple[list[str], float]:
    if isinstance(chart, BarChart):
        return _bars(chart)
    if isinstance(chart, StackChart):
        return _stacks(chart)
    if isinstance(chart, LineChart):
        return _lines(chart, uid)
    assert isinstance(chart, ScatterChart), f"no drawing of {type(chart).__name__}"
    return _scatter(chart)


def _bars(chart: BarChart) -> tuple[list[str], float]:
    most = max(value for bar in chart.bars for value in (bar.value, *(bar.interval or ()), *bar.runs))
    scale, bottom = Scale(0.0, most * 1.04 or 1.0, _LEFT, _RIGHT), _ROW * len(chart.bars) + 4
    parts = _value_axis(scale, bottom, chart.axis)
    for index, bar in enumerate(chart.bars):
        top = _ROW * index
        label = f"{bar.label} (baseline)" if bar.baseline else bar.label
        parts += _row_label(top, label, number(bar.value))
        y = top + 19
        parts.append(element("rect", x=_LEFT, y=y, width=scale(bar.value) - _LEFT, height=_BAR, class_="bar"))
        middle = y + _BAR / 2
        if bar.interval:
            parts += _whisker(scale(bar.interval[0]), scale(bar.interval[1]), middle)
        parts += [
            element("circle", cx=scale(run), cy=middle, r=2.2, class_="run")
            for run in bar.runs[:20]
            if len(bar.runs) > 1
        ]
    return parts, bottom + _AXIS_HEIGHT


def _whisker(low: float, high: float, y: float) -> list[str]:
    line = f"M{svg.number(low)} {svg.number(y)}H{svg.number(high)}"
    ends = "".join(f"M{svg.number(x)} {svg.number(y - 5)}v10" for x in (low, high))
    return [element("path", d=line + ends, class_=name) for name in ("halo", "whisker")]


def _row_label(top: float, label: str, value: str) -> list[str]:
    room = _RIGHT - _LEFT - svg.CHARACTER_WIDTH * (len(value) + 2)
    return [
        element("text", svg.tooltip(label), html.escape(svg.shortened(label, room)), x=_LEFT, y=top + 14),
        text(_RIGHT, top + 14, value, class_="end value"),
    ]


def _value_axis(scale: Scale, bottom: float, title: str, end: float | None = None) -> list[str]:
    """Grid lines, their numbers and the title of a horizontal axis of bars; ``end``: the last value with a tick."""
    parts = []
    for tick in svg.ticks(scale.low, scale.high if end is None else end):
        x = scale(tick)
        anchor = "start" if x < _LEFT + 12 else "middle" if x < _RIGHT - 16 else "end"
        parts += [
            element("path", d=f"M{svg.number(x)} 16V{svg.number(bottom)}", class_="grid"),
            text(x, bottom + 15, svg.tick_text(tick), class_=f"{anchor} small"),
        ]
    return [*parts, text((_LEFT + _RIGHT) / 2, bottom + 33, title, class_="middle small")]


def _stacks(chart: StackChart) -> tuple[list[str], float]:
    present = [i for i in range(len(chart.categories)) if any(stack.parts[i] for stack in chart.stacks)]
    entries = [(chart.categories[i], _swatch(i)) for i in present]
    legend, top = _legend([*entries, *_marker_entry(chart)])
    near = chart.capacity if chart.capacity_is_near else None
    scale = Scale(
        0.0, max(chart.most, near or 0.0) * 1.03 or 1.0, _LEFT, _RIGHT if near or not chart.capacity else _RIGHT - 40
    )
    first, bottom = top + 4, top + 4 + _ROW * len(chart.stacks) + (16 if chart.capacity else 0)
    shift = first + (16 if chart.capacity else 0)
    axis = _shifted(_value_axis(scale, bottom - first, chart.axis), first)
    rows = [part for index, stack in enumerate(chart.stacks) for part in _stack(stack, shift + _ROW * index, scale)]
    return [*legend, axis, *rows, *_capacity_line(chart, scale, first, bottom)], bottom + _AXIS_HEIGHT


def _shifted(parts: Sequence[str], y: float) -> str:
    return element("g", *parts, transform=f"translate(0 {svg.number(y)})")


def _marker_entry(chart: StackChart) -> list[tuple[str, list[str]]]:
    if not any(stack.marker is not None for stack in chart.stacks):
        return []
    return [("measured peak", [svg.marker(3, 6, 5, 4.5, class_="peak")])]


def _swatch(index: int) -> list[str]:
    return [element("rect", x=0, y=0, width=12, height=10, class_=f"part p{index}")]


def _stack(stack: Stack, top: float, scale: Scale) -> list[str]:
    parts = _row_label(top, stack.label, number(stack.total))
    y, before = top + 19, 0.0
    for index, size in enumerate(stack.parts):
        if size:
            x = scale(before)
            before += size
            parts.append(element("rect", x=x, y=y, width=scale(before) - x, height=_BAR, class_=f"part p{index}"))
    if stack.marker is not None:
        parts.append(svg.marker(3, scale(stack.marker), y + _BAR / 2, 4.5, class_="peak"))
    return parts


def _capacity_line(chart: StackChart, scale: Scale, top: float, bottom: float) -> list[str]:
    """On the axis where that reaches it; else at the edge, beyond a break."""
    if chart.capacity is None:
        return []
    if chart.capacity_is_near:
        x, label = scale(chart.capacity), chart.capacity_label
    else:
        x, label = _RIGHT - 4, f"{chart.capacity_label} (beyond the axis)"
    rows = (top + 33 + _ROW * index for index in range(len(chart.stacks)))
    beside_bars = "".join(f"M{svg.number(x)} {svg.number(row)}v{svg.number(_BAR + 6)}" for row in rows)
    parts = [
        element("path", d=beside_bars, class_="capacity"),
        text(_RIGHT, top + 11, label, class_="end small strong"),
    ]
    if not chart.capacity_is_near:
        parts += [text(_RIGHT - 21, bottom + 4, "//", class_="middle")]
    return parts


def _legend(entries: Sequence[tuple[str, Sequence[str]]]) -> tuple[list[str], float]:
    """Rows of (label, drawing 28 px wide at most) in as many columns as the longest label leaves, and the height."""
    longest = max(len(label) for label, _ in entries)
    columns = max(1, min(3, int((_RIGHT - _LEFT) / (34 + longest * svg.CHARACTER_WIDTH))))
    wide = (_RIGHT - _LEFT) / columns
    parts = []
    for index, (label, drawing) in enumerate(entries):
        x, y = _LEFT + wide * (index % columns), _LEGEND_ROW * (index // columns)
        name = element(
            "text", svg.tooltip(label), html.escape(svg.shortened(label, wide - 30)), x=26, y=10, class_="small"
        )
        parts.append(element("g", *drawing, name, transform=f"translate({svg.number(x)} {svg.number(y + 3)})"))
    return parts, _LEGEND_ROW * -(-len(entries) // columns) + 6


def _frame(x: Scale, y: Scale, horizontal: str, vertical: str) -> list[str]:
    """Grid and numbers of both axes; the vertical title stands above, where it can be read without turning."""
    parts = [text(_LEFT, y.end - 8, vertical, class_="small")]
    for tick in svg.ticks(y.low, y.high):
        level = y(tick)
        parts += [
            element("path", d=f"M{svg.number(x.start)} {svg.number(level)}H{svg.number(x.end)}", class_="grid"),
            text(x.start - 6, level + 4, svg.tick_text(tick), class_="end small"),
        ]
    for tick in svg.ticks(x.low, x.high):
        parts.append(text(x(tick), y.start + 16, svg.tick_text(tick), class_="middle small"))
    parts.append(element("path", d=f"M{svg.number(x.start)} {svg.number(y.start)}H{svg.number(x.end)}", class_="axis"))
    return [*parts, text((x.start + x.end) / 2, y.start + 33, horizontal, class_="middle small")]


def _lines(chart: LineChart, uid: str) -> tuple[list[str], float]:
    entries = [
        (line.label, [_stroke([(0.0, 5.0), (22.0, 5.0)], line.style), _point(line.style, 11, 5)])
        for line in chart.lines
    ]
    legend, top = _legend(entries)
    x, y = _scales(chart, top)
    parts = [element("clipPath", _area(x, y), id=f"{uid}-clip"), *_shade(chart, x, y)]
    parts += _frame(x, y, chart.horizontal, chart.axis)
    drawn = []
    for line in chart.lines:
        points = [(x(step), y(value)) for step, value in line.points]
        every = max(1, len(points) // 6)
        marks = [_point(line.style, *point) for point in points[line.style % every :: every]]
        drawn += [_stroke(points, line.style), *marks]
    parts.append(element("g", *drawn, clip_path=f"url(#{uid}-clip)"))
    return [*legend, *parts], y.start + _AXIS_HEIGHT


def _scales(chart: LineChart, top: float) -> tuple[Scale, Scale]:
    steps = [step for line in chart.lines for step, _ in line.points]
    x = Scale(min(steps), max(steps), _PLOT_LEFT, _RIGHT - 4)
    return x, Scale(*chart.limits, top + 24 + _PLOT_HEIGHT, top + 24)


def _stroke(points: Sequence[tuple[float, float]], style: int) -> str:
    """Later lines are thinner, so that lines that lie on each other all show."""
    return path(
        points, class_=f"line s{style}", stroke_dasharray=svg.DASHES[style] or None, stroke_width=3.2 - 0.28 * style
    )


def _point(style: int, x: float, y: float) -> str:
    return svg.marker(style, x, y, 3.2, class_=f"point s{style}")


def _area(x: Scale, y: Scale) -> str:
    return element("rect", x=x.start, y=y.end - 2, width=x.end - x.start, height=y.start - y.end + 4)


def _shade(chart: LineChart, x: Scale, y: Scale) -> list[str]:
    if not chart.warmup:
        return []
    end = x(min(chart.warmup + 0.5, x.high))
    told = f"shaded: warm-up{', ' if chart.cut_off else ''}{chart.cut_off}"
    return [
        element("rect", x=x.start, y=y.end, width=end - x.start, height=y.start - y.end, class_="shade"),
        text(_RIGHT - 4, y.end - 8, told, class_="end small faint"),
    ]


def _scatter(chart: ScatterChart) -> tuple[list[str], float]:
    named = [dot for dot in chart.dots if dot.style is not None]
    legend, top = _legend([(dot.label, _mark(dot, 11, 5)) for dot in named])
    x = Scale(0.0, max(dot.x for dot in chart.dots) * 1.06 or 1.0, _PLOT_LEFT, _RIGHT - 4)
    y = Scale(0.0, max(dot.y for dot in chart.dots) * 1.08 or 1.0, top + 24 + _PLOT_HEIGHT, top + 24)
    parts = _frame(x, y, chart.horizontal, chart.axis)
    if chart.capacity is not None and chart.capacity <= x.high:
        at = x(chart.capacity)
        parts.append(
            element("path", d=f"M{svg.number(at)} {svg.number(y.end)}V{svg.number(y.start)}", class_="capacity")
        )
        parts.append(text(at - 4, y.end + 12, chart.capacity_label, class_="end small strong"))
    parts.append(path([(x(dot.x), y(dot.y)) for dot in chart.front], class_="front"))
    for dot in sorted(chart.dots, key=lambda dot: (dot.style is not None, dot.on_front)):
        marks = _mark(dot, x(dot.x), y(dot.y))
        parts.append(element("g", svg.tooltip(f"{dot.label}: {number(dot.x)} GB, {number(dot.y)} tokens/s"), *marks))
    return [*legend, *parts], y.start + _AXIS_HEIGHT


def _mark(dot: Dot, x: float, y: float) -> list[str]:
    """Filled on the front, hollow off it; crossed out where the row takes no part."""
    cross = [path([(x - 7, y - 7), (x + 7, y + 7)], class_="whisker")] if dot.aside else []
    if dot.style is None:
        return [element("circle", cx=x, cy=y, r=2.5, class_="dot other"), *cross]
    filled = "" if dot.on_front else " hollow"
    return [svg.marker(dot.style, x, y, 5.5, class_=f"dot s{dot.style}{filled}"), *cross]
