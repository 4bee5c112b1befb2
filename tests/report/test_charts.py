"""Charts as files and as images of the page: drawn to scale, and safe whatever the labels hold."""

from __future__ import annotations

import base64
import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.report import charts
from ds_bench.report.chart_data import Bar, BarChart, Chart, Line, LineChart, ScatterChart, Stack, StackChart, charts_of
from ds_bench.report.charts import image_source, save_charts
from tests.support import fakes
from tests.support import sample_reports as samples


def drawn(chart: Chart) -> str:
    kind, data = image_source(chart).split(",")
    assert kind == "data:image/svg+xml;base64"
    return base64.b64decode(data).decode()


def test_every_chart_is_a_png_and_an_svg_that_needs_no_font(tmp_path: Path) -> None:
    paths = save_charts("a title", samples.offload_comparison(), tmp_path / "new" / "plots")
    names = "pareto-device pareto-host throughput ledger-gpu ledger-cpu ledger-nvme phases steps losses"
    assert [path.name for path in paths] == [f"{name}.{form}" for name in names.split() for form in ("png", "svg")]
    for path in paths:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        else:
            assert not list(ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text"))


def test_the_same_numbers_give_the_same_svg(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        save_charts("a title", samples.flat_comparison(), tmp_path / folder)
    for name in ("throughput.svg", "pareto-device.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_nothing_is_drawn_where_nothing_succeeded(tmp_path: Path) -> None:
    failed = samples.comparison(samples.row("ZeRO-0", samples.failed(fakes.zero(0))))
    assert save_charts("a title", failed, tmp_path) == []


def test_dots_that_take_no_part_look_different() -> None:
    full = samples.flat_comparison()
    odd = replace(full.rows[1], differences=("torch 2.13.0 against 2.11.0",))
    plain, crossed = (charts_of(of).charts[0] for of in (full, replace(full, rows=(full.rows[0], odd))))
    assert isinstance(crossed, ScatterChart)
    without_texts = [re.sub("<text.*?</text>", "", drawn(chart)).count("<use") for chart in (plain, crossed)]
    assert without_texts[1] == without_texts[0] + 1


@settings(deadline=None, max_examples=25)
@given(st.text(max_size=60))
def test_any_label_is_text_of_the_drawing(label: str) -> None:
    """XML, mathtext and a leading underscore have no meaning; what XML cannot hold is replaced."""
    line = Line(label=label, points=((1, 2), (2, 3)), style=0)
    chart = LineChart(name="t", title=label, axis="ms", lines=(line,))
    root = ElementTree.fromstring(drawn(chart))
    shown = "".join(sign if sign.isprintable() else "\ufffd" for sign in " ".join(label.split()))
    assert shown[:20] in "".join(root.itertext())
    known = "svg metadata RDF Work type format creator Agent title defs style g path use text tspan rect clipPath"
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= set(known.split())


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio of two ``#rrggbb`` colours."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_are_visible_on_a_light_and_a_dark_page() -> None:
    styles = (Path(charts.__file__).parent / "templates" / "report.css").read_text()
    light, dark = re.findall(r"--page: (#[0-9a-f]{6})", styles)[:2]
    assert all(contrast(colour, page) >= 3 for colour in charts.COLOURS for page in (light, dark))
    for ink, in_dark in charts.DARK_INKS.items():
        assert contrast(ink, light) >= 4.5
        assert contrast(in_dark, dark) >= 4.5
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawn(charts_of(samples.offload_comparison()).charts[0])))
    assert used <= {*charts.COLOURS, charts.RULE, *charts.DARK_INKS, *charts.DARK_INKS.values()}


def bars_of(drawing: str, style: str) -> list[tuple[float, float]]:
    """Left and right ends of the paths whose style contains the text."""
    found = []
    for path in re.findall(r"<path [^>]*>", drawing):
        if style in path and len(points := re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path)) >= 2:
            xs = [float(x) for x, _ in points]
            found.append((min(xs), max(xs)))
    return found


def test_stacked_parts_are_as_long_as_their_numbers() -> None:
    """1 and 3 GB: the second part is three times the first and begins where that ends."""
    stacks = (Stack(label="x", parts=(1, 3)),)
    chart = StackChart(name="t", title="t", axis="GB", categories=("a", "b"), stacks=stacks, value_heading="peak")
    drawing = drawn(chart)
    first, second = bars_of(drawing, f"fill: {charts.COLOURS[0]}")[0], bars_of(drawing, "fill: url(#")[0]
    assert second[1] - second[0] == pytest.approx(3 * (first[1] - first[0]), abs=0.3)
    assert second[0] == pytest.approx(first[1], abs=0.11)


def test_a_near_capacity_is_drawn_to_scale_and_a_far_one_is_beyond_the_axis() -> None:
    near, far = (
        drawn(
            StackChart(
                name="t",
                title="t",
                axis="GB",
                categories=("a",),
                stacks=(Stack(label="x", parts=(8.0,)),),
                value_heading="peak",
                capacity=capacity,
                capacity_label="card",
            )
        )
        for capacity in (16.0, 80.0)
    )
    assert "card (beyond the axis →)" in far
    (left, right), *_ = bars_of(near, f"fill: {charts.COLOURS[0]}")
    (line, _), *_ = bars_of(near, f"stroke-dasharray: 5.55,2.4; stroke-dashoffset: 0; stroke: {charts.WARNING}")
    assert line == pytest.approx(left + 2 * (right - left), abs=0.3)


def test_extreme_numbers_and_long_labels_are_drawn(subtests: pytest.Subtests) -> None:
    for values in ((0.1, 0.1, 0.1), (0.0, 0.0), (5.0, 1e-9), (-1.0, -1.0), (1e12, 1e12), (1e300, 1e300)):
        with subtests.test(values=values):
            line = Line(label="x", points=tuple((float(n), value) for n, value in enumerate(values, 1)), style=0)
            drawing = drawn(LineChart(name="t", title="t", axis="ms", lines=(line,), warmup=len(values)))
            assert not re.findall(r"\b(?:nan|inf)\b", drawing)
    for bar in (Bar(label="zero2", value=1.3e41), Bar(label="optimizer " * 20, value=0.0)):
        with subtests.test(bar.label):
            assert bar.label[:5] in drawn(BarChart(name="t", title="t", axis="a", bars=(bar,)))


@pytest.mark.parametrize("comparison", [samples.zero_comparison(), samples.offload_comparison(), samples.many_rows(20)])
def test_labels_of_dots_do_not_overlap(comparison: samples.Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    import adjustText

    boxes: list[Any] = []
    adjust = adjustText.adjust_text

    def record(texts: list[Any], **settings: Any) -> None:
        adjust(texts, **settings)
        boxes[:] = [text.get_window_extent() for text in texts]

    monkeypatch.setattr(adjustText, "adjust_text", record)
    for chart in charts_of(comparison).charts:
        if isinstance(chart, ScatterChart):
            drawn(chart)
            assert len(boxes) == sum(dot.style is not None for dot in chart.dots)
            for a, b in itertools.combinations(boxes, 2):
                assert not a.overlaps(b)
