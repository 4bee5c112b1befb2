"""The elements that charts are made of: escaping, axes, and that drawings stay inside their frame."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.report import charts_of_comparison, svg, svg_charts
from ds_bench.report.chart_data import Bar, BarChart, Line, LineChart, Stack, StackChart
from tests.support import sample_reports as samples

PRINTABLE = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=60)


@given(PRINTABLE)
def test_any_label_comes_back_out_of_the_drawing_as_it_went_in(label: str) -> None:
    chart = BarChart(name="t", title=label, axis=label, bars=(Bar(label=label, value=1.0),))
    root = ElementTree.fromstring(svg_charts.draw(chart, "u"))
    assert (root[0].text or "") == label
    assert label in "".join(root[1].itertext())


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 10))
def test_ticks_are_evenly_spaced_rise_and_lie_inside(low: float, span: float, count: int) -> None:
    high = low + span
    if not high > low or span < 1e-6 * abs(low):
        return
    found = svg.ticks(low, high, count)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert len(found) <= count + 2
    assert all(low - span * 1e-6 <= tick <= high + span * 1e-6 for tick in found)
    assert all(gap == pytest.approx(gaps[0], rel=1e-3) for gap in gaps)


def test_ticks_of_a_hand_worked_axis() -> None:
    """0 to 23 in about five: a rough step of 4.6, so steps of 5."""
    assert svg.ticks(0, 23) == [0, 5, 10, 15, 20]
    assert svg.ticks(0.2, 1.0) == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert svg.ticks(3, 3) == [3]


def test_a_scale_maps_its_ends_and_its_middle() -> None:
    scale = svg.Scale(10, 20, 100, 0)
    assert (scale(10), scale(15), scale(20)) == (100, 50, 0)


def test_attributes_are_escaped_and_none_is_left_out() -> None:
    written = svg.element("text", "x", class_='"><script>', stroke_width=1.25, x=None)
    assert written == '<text class="&quot;&gt;&lt;script&gt;" stroke-width="1.2">x</text>'


def test_a_long_label_is_cut_and_whole_in_the_tooltip() -> None:
    label = "optimizer " * 20
    root = ElementTree.fromstring(
        svg_charts.draw(BarChart(name="t", title="t", axis="a", bars=(Bar(label=label, value=1.0),)), "u")
    )
    (text,) = [node for node in root.iter("text") if "…" in "".join(node.itertext())]
    assert len("".join(text.itertext())) < len(label) + 60
    assert text[0].text == label


@pytest.mark.parametrize("make", [samples.zero_comparison, samples.offload_comparison, samples.cpu_comparison])
def test_every_bar_lies_inside_the_picture(make: object) -> None:
    for chart in charts_of_comparison.pictures(make()).charts:  # type: ignore[operator]
        root = ElementTree.fromstring(svg_charts.draw(chart, "u"))
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for node in root.iter("rect"):
            assert float(node.attrib["x"]) >= 0
            assert float(node.attrib["x"]) + float(node.attrib["width"]) <= width
            assert float(node.attrib["y"]) + float(node.attrib["height"]) <= height


def test_stacked_parts_are_as_long_as_their_numbers() -> None:
    """1 and 3 GB: the second part is three times the first and begins where that ends."""
    chart = StackChart(name="t", title="t", axis="GB", categories=("a", "b"), stacks=(Stack(label="x", parts=(1, 3)),))
    root = ElementTree.fromstring(svg_charts.draw(chart, "u"))
    bars = [node.attrib for node in root.iter("rect") if float(node.attrib["width"]) > 12]
    first, second = ((float(bar["x"]), float(bar["width"])) for bar in bars)
    assert second[1] == pytest.approx(3 * first[1], abs=0.3)
    assert second[0] == pytest.approx(first[0] + first[1], abs=0.11)


def test_a_capacity_far_away_is_drawn_beyond_a_break_and_a_near_one_to_scale() -> None:
    stacks = (Stack(label="x", parts=(8.0,)),)
    far, near = (
        svg_charts.draw(
            StackChart(
                name="t", title="t", axis="GB", categories=("a",), stacks=stacks, capacity=size, capacity_label="card"
            ),
            "u",
        )
        for size in (80.0, 16.0)
    )
    assert "card (beyond the axis)" in far
    assert "//" in far
    assert "beyond" not in near
    # to scale: 16 of 16.48 on the axis from 4 to 356
    x = float(re.search(r'd="M([\d.]+) [^"]*" class="capacity"', near)[1])  # type: ignore[index]
    assert x == pytest.approx(4 + 352 * 16 / 16.48, abs=0.2)


@pytest.mark.parametrize("values", [(0.1, 0.1, 0.1), (0.0, 0.0), (5.0, 1e-9), (-1.0, -1.0), (1e12, 1e12)])
def test_a_flat_or_extreme_line_is_drawn_without_dividing_by_nothing(values: tuple[float, ...]) -> None:
    line = Line(label="x", points=tuple((float(n), value) for n, value in enumerate(values, 1)), style=0)
    drawn = svg_charts.draw(LineChart(name="t", title="t", axis="ms", lines=(line,), warmup=len(values)), "u")
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_a_bar_of_nothing_is_drawn() -> None:
    drawn = svg_charts.draw(BarChart(name="t", title="t", axis="a", bars=(Bar(label="x", value=0.0),)), "u")
    assert 'width="0"' in drawn


@pytest.mark.parametrize("style", range(8))
def test_every_style_has_a_shape_of_its_own(style: int) -> None:
    others = {svg.marker(other, 0, 0, 4) for other in range(8) if other != style}
    assert svg.marker(style, 0, 0, 4) not in others
    assert len(set(svg.DASHES)) == 8
