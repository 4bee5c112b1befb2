"""Charts as files and as markup of the page: whatever the labels hold, and with nothing from outside."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ds_bench.report import charts
from ds_bench.report.chart_data import Bar, BarChart, Line, LineChart, ScatterChart, Stack, StackChart, charts_of
from ds_bench.report.charts import Point, inline_svg, place_labels, save_charts
from tests.support import fakes
from tests.support import sample_reports as samples

PNG = b"\x89PNG\r\n\x1a\n"


def test_every_chart_is_a_png_and_an_svg(tmp_path: Path) -> None:
    paths = save_charts("a title", samples.offload_comparison(), tmp_path / "new" / "plots")
    names = "pareto-device pareto-host throughput ledger-gpu ledger-cpu ledger-nvme phases steps losses"
    assert [path.name for path in paths] == [f"{name}.{form}" for name in names.split() for form in ("png", "svg")]
    for path in paths:
        content = path.read_bytes()
        if path.suffix == ".png":
            assert content.startswith(PNG)
            assert len(content) > 10_000
        else:
            assert ElementTree.fromstring(content).tag.endswith("svg")


def test_an_svg_needs_no_font(tmp_path: Path) -> None:
    save_charts("a title", samples.cpu_comparison(), tmp_path)
    source = (tmp_path / "throughput.svg").read_text()
    assert "font-family" not in source
    assert "<text" not in source


def test_the_same_numbers_give_the_same_svg(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        save_charts("a title", samples.flat_comparison(), tmp_path / folder)
    assert (tmp_path / "a/throughput.svg").read_bytes() == (tmp_path / "b/throughput.svg").read_bytes()


def test_labels_that_mean_something_to_mathtext_xml_or_no_font_are_plain_text(tmp_path: Path) -> None:
    evil = r"$\frac{<script>&\x $^_日本" + "\n\x1b" + "x" * 300
    row = samples.row(evil, samples.run(fakes.zero(0), 0.1))
    other = samples.row("_hidden", samples.run(fakes.zero(1), 0.2, peak=4))
    paths = save_charts(evil, samples.comparison(row, other), tmp_path)
    for path in paths:
        if path.suffix == ".svg":
            ElementTree.fromstring(path.read_bytes())
    assert len(paths) == 14


def test_dots_that_take_no_part_look_different(tmp_path: Path) -> None:
    full = samples.flat_comparison()
    odd = replace(full.rows[1], differences=("torch 2.13.0 against 2.11.0",))
    for name, of in (("plain", full), ("odd", replace(full, rows=(full.rows[0], odd)))):
        save_charts("a title", of, tmp_path / name)
    assert (tmp_path / "odd/pareto-device.svg").read_bytes() != (tmp_path / "plain/pareto-device.svg").read_bytes()


def test_a_value_longer_than_the_line_leaves_room_for_a_label() -> None:
    """A flat JSON of somebody else may hold any finite number."""
    chart = BarChart(name="t", title="t", axis="a", bars=(Bar(label="zero2", value=1.3e41),))
    assert "zero2" in inline_svg(chart, "u")


def test_a_long_title_takes_lines_and_is_not_cut(tmp_path: Path) -> None:
    """Counted in the picture: a margin stays on the right, and each further line makes the picture higher."""
    heights = []
    for words in (4, 40):
        save_charts("micro-batch " * words, samples.flat_comparison(), tmp_path)
        pixels = np.asarray(Image.open(tmp_path / "throughput.png").convert("L"))
        heights.append(len(pixels))
        assert pixels[:, -8:].min() > 250
    assert heights[1] - heights[0] > 5 * 200 / 72 * charts.FILE_FONT_SIZE


COORDINATE = st.floats(0, 20)
POINTS = st.lists(st.tuples(COORDINATE, COORDINATE), min_size=1, max_size=10)


@settings(deadline=None, max_examples=100)
@given(POINTS, st.lists(st.tuples(st.floats(1, 14), st.sampled_from((1.2, 2.4))), min_size=10, max_size=10))
def test_labels_cover_neither_each_other_nor_a_dot_and_stay_inside(points: list[Point], sizes: list[Point]) -> None:
    places = place_labels(points, sizes[: len(points)], (20, 20), points, [points])
    boxes = [
        (x, y, x + wide, y + high)
        for place, (wide, high) in zip(places, sizes, strict=False)
        if place is not None
        for x, y in [place]
    ]
    dots = [(x, y, x, y) for x, y in points]
    for index, box in enumerate(boxes):
        assert min(box) >= 0
        assert max(box) <= 20
        for other in (*boxes[index + 1 :], *dots):
            assert box[2] <= other[0] or other[2] <= box[0] or box[3] <= other[1] or other[3] <= box[1]


def test_a_label_is_beside_its_dot_where_there_is_room_and_farther_off_where_there_is_none() -> None:
    assert place_labels([(5, 5)], [(4, 1.2)], (20, 20), [(5, 5)], []) == [(pytest.approx(5.9), pytest.approx(4.4))]
    crowd = [(10, 9), (10, 10), (10, 11)]
    assert None not in place_labels(crowd, [(8, 1.2)] * 3, (20, 20), crowd, [])


@pytest.mark.parametrize("comparison", [samples.zero_comparison(), samples.offload_comparison()])
def test_every_row_of_a_small_comparison_is_labelled_at_its_dot(comparison: samples.Comparison) -> None:
    for chart in charts_of(comparison).charts:
        if isinstance(chart, ScatterChart):
            root = ElementTree.fromstring(inline_svg(chart, "u"))
            texts = " ".join(element.text or "" for element in root.iter("text"))
            assert all(texts.count(dot.label) >= 1 for dot in chart.dots)


def test_nothing_is_written_where_nothing_succeeded(tmp_path: Path) -> None:
    failed = samples.comparison(samples.row("ZeRO-0", samples.failed(fakes.zero(0))))
    assert save_charts("a title", failed, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


TEXT = st.text(max_size=60)


@settings(deadline=None, max_examples=25)
@given(TEXT)
def test_any_label_is_text_of_the_drawing_and_of_its_description(label: str) -> None:
    """Whatever XML cannot hold is replaced; nothing is markup, and nothing is lost from the text alternative."""
    line = Line(label=label, points=((1, 2), (2, 3)), style=0)
    drawing = inline_svg(LineChart(name="t", title=label, axis="ms", lines=(line,)), "u")
    root = ElementTree.fromstring(drawing)
    shown = " ".join(label.split())
    shown = "".join(sign if sign.isprintable() else "\ufffd" for sign in shown)
    assert (root[0].tag, root[0].text or "") == ("title", shown)
    assert shown in (root[1].text or "")
    assert (shown[:20] or "lowest") in "".join(root.itertext())
    assert {element.tag for element in root.iter()} <= {
        "svg",
        "title",
        "desc",
        "defs",
        "g",
        "path",
        "use",
        "text",
        "rect",
        "clipPath",
    }


def test_a_page_defines_every_colour_of_a_chart_in_both_schemes() -> None:
    """A colour that is no variable would vanish on one of the two backgrounds."""
    styles = (Path(charts.__file__).parent / "templates" / "report.css").read_text()
    light, dark = styles.split("prefers-color-scheme: dark")
    for comparison in (samples.offload_comparison(), samples.many_rows(9)):
        for chart in charts_of(comparison).charts:
            drawing = inline_svg(chart, "u")
            variables = set(re.findall(r"var\((--\w+)\)", drawing))
            assert {"--ink", "--rule"} <= variables
            assert not re.findall(r"(?:fill|stroke): ?#|(?:fill|stroke)=", drawing)
            for scheme in (light, dark.split("}")[0]):
                assert [name for name in variables if f"{name}:" not in scheme] == []


def bars_of(drawing: str, colour: str) -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of the rectangles of that colour or hatch."""
    found = []
    for path in re.findall(r"<path [^>]*>", drawing):
        if colour in path and (points := re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path)) and len(points) >= 4:
            xs, ys = [float(x) for x, _ in points], [float(y) for _, y in points]
            found.append((min(xs), max(xs), min(ys), max(ys)))
    return found


def test_stacked_parts_are_as_long_as_their_numbers() -> None:
    """1 and 3 GB: the second part is three times the first and begins where that ends."""
    chart = StackChart(name="t", title="t", axis="GB", categories=("a", "b"), stacks=(Stack(label="x", parts=(1, 3)),))
    drawing = inline_svg(chart, "u")
    first, second = bars_of(drawing, "fill: var(--c0)")[0], bars_of(drawing, "fill: url(#u-")[0]
    assert second[1] - second[0] == pytest.approx(3 * (first[1] - first[0]), abs=0.3)
    assert second[0] == pytest.approx(first[1], abs=0.11)


def test_a_capacity_far_away_is_said_to_be_beyond_the_axis_and_a_near_one_is_drawn_to_scale() -> None:
    def drawn(capacity: float) -> str:
        stacks = (Stack(label="x", parts=(8.0,)),)
        return inline_svg(
            StackChart(
                name="t",
                title="t",
                axis="GB",
                categories=("a",),
                stacks=stacks,
                capacity=capacity,
                capacity_label="card",
            ),
            "u",
        )

    far, near = drawn(80.0), drawn(16.0)
    assert "card (beyond the axis →)" in far
    assert "beyond" not in near
    ((left, right, *_),) = bars_of(near, "fill: var(--c0)")[:1]
    line = re.search(r'd="M ([\d.]+) [^"]*"[^>]*stroke-dasharray[^>]*var\(--bad\)', near)
    assert line is not None
    assert float(line[1]) == pytest.approx(left + 2 * (right - left), abs=0.3)


def test_a_flat_or_extreme_line_is_drawn_without_dividing_by_nothing(subtests: pytest.Subtests) -> None:
    for values in ((0.1, 0.1, 0.1), (0.0, 0.0), (5.0, 1e-9), (-1.0, -1.0), (1e12, 1e12), (1e300, 1e300)):
        with subtests.test(values=values):
            line = Line(label="x", points=tuple((float(n), value) for n, value in enumerate(values, 1)), style=0)
            drawing = inline_svg(LineChart(name="t", title="t", axis="ms", lines=(line,), warmup=len(values)), "u")
            assert not re.findall(r"\b(?:nan|inf)\b", drawing)


def test_a_bar_of_nothing_and_a_long_label_are_drawn() -> None:
    label = "optimizer " * 20
    drawing = inline_svg(BarChart(name="t", title="t", axis="a", bars=(Bar(label=label, value=0.0),)), "u")
    texts = [element.text or "" for element in ElementTree.fromstring(drawing).iter("text")]
    (cut,) = [text for text in texts if text.endswith("…")]
    assert label.startswith(cut[:-1])
    assert len(cut) < 60
