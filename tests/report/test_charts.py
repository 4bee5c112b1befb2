"""Charts: which ones a comparison gives, that they show what was measured, and that labels are only text."""

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
from matplotlib.figure import Figure

from ds_bench.analysis.comparison import Comparison
from ds_bench.analysis.row import Run, make_run
from ds_bench.config.caveats import Caveat, CaveatKind
from ds_bench.config.spec import Placement
from ds_bench.records import schema
from ds_bench.report import charts, comparison_charts
from ds_bench.report.charts import Chart, Drawing, image_source, save_charts
from ds_bench.report.comparison_charts import charts_of
from tests.support import fakes
from tests.support import sample_reports as samples

GB = fakes.GB
ZERO, OFFLOAD = samples.zero_comparison(), samples.offload_comparison()


def chart(of: Comparison, name: str, recommended: str | None = None) -> Chart:
    return next(one for one in charts_of(of, recommended)[0] if one.name == name)


def draw(one: Chart) -> tuple[Any, Drawing]:
    """The axes after drawing, and what is to be written around them."""
    axes = Figure().add_subplot()
    return axes, one.draw(axes, 50)


def bars(one: Chart) -> list[list[tuple[float, float]]]:
    """Start and length of each part of each bar, from the first row on."""
    found: dict[int, list[tuple[float, float]]] = {}
    for patch in draw(one)[0].patches:
        found.setdefault(round(patch.get_y() + patch.get_height() / 2), []).append((patch.get_x(), patch.get_width()))
    return [found[place] for place in sorted(found)]


def points(one: Chart, marker: str) -> list[tuple[float, float]]:
    """Where the chart has a marker of this kind."""
    lines = [line for line in draw(one)[0].lines if line.get_marker() == marker]
    return [(x, y) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def svg(one: Chart) -> str:
    kind, data = image_source(one).split(",")
    assert kind == "data:image/svg+xml;base64"
    return base64.b64decode(data).decode()


# ------------------------------------------------------------------ what is shown


def test_a_comparison_has_each_chart_it_has_numbers_for_and_says_what_is_missing() -> None:
    names = {
        "zero": "pareto-device throughput ledger-gpu ledger-cpu phases steps losses",
        "offload": "pareto-device pareto-host throughput ledger-gpu ledger-cpu ledger-nvme phases steps losses",
        "cpu": "throughput ledger-cpu phases steps losses",
        "flat": "pareto-device throughput ledger-gpu ledger-cpu",
        "one row": "throughput ledger-gpu ledger-cpu phases steps losses",
        "all failed": "",
    }
    comparisons = {
        "zero": ZERO,
        "offload": OFFLOAD,
        "cpu": samples.cpu_comparison(),
        "flat": samples.flat_comparison(),
        "one row": samples.comparison(samples.row("ZeRO-0", samples.run(fakes.zero(0), 0.1))),
        "all failed": samples.comparison(samples.row("ZeRO-0", out_of_memory(schema.CRASHED))),
    }
    assert {name: " ".join(one.name for one in charts_of(of)[0]) for name, of in comparisons.items()} == names
    missing = ("memory by category", "series of steps", "phases of a step", "losses per step")
    assert charts_of(comparisons["flat"])[1] == [f"These results hold no {what}." for what in missing]
    assert charts_of(comparisons["all failed"])[1] == ["No row succeeded, so there is nothing to draw."]
    assert charts_of(ZERO)[1] == []


def test_memory_is_the_fullest_ranks_and_the_fullest_nodes_sum() -> None:
    """Nodes a (ranks 0, 1) and b (rank 2). GPU: rank 2 holds 5 GB, the most. CPU: a holds 1 + 2 = 3 GB, b 2.5 GB."""
    one = samples.run(fakes.zero(2), 0.1, on=Placement(accelerator="cuda", num_gpus=3))
    held = [("a", 1, 1.0), ("a", 2, 2.0), ("b", 5, 2.5)]
    ranks = tuple(
        replace(rank, hostname=node, ledger={"gpu": {"gradients": gpu * GB}, "cpu": {"parameters": int(cpu * GB)}})
        for rank, (node, gpu, cpu) in zip(one.ranks, held, strict=True)
    )
    of = samples.comparison(samples.row("ZeRO-2", replace(one, stored=replace(one.stored, ranks=ranks))))
    assert bars(chart(of, "ledger-gpu")) == [[(0, 5), (5, 3)]]  # the rest of a peak of 8 GB
    assert bars(chart(of, "ledger-cpu")) == [[(0, 3), (3, 3)]]  # two ranks of 3 GB
    table = chart(of, "ledger-gpu").table
    assert table is not None
    assert (table.headings, [*table.rows]) == (
        ["Strategy", "parameters", "gradients", "optimizer states", "DeepSpeed buffers", "activations", "other",
         "rest of the peak", "peak"],
        [("ZeRO-2", "0", "5.00", "0", "0", "0", "0", "3.00", "8.00")],
    )  # fmt: skip


def test_memory_is_the_measured_peak_without_a_ledger() -> None:
    device = chart(samples.flat_comparison(), "ledger-gpu")
    assert (device.title, bars(device)) == ("Device memory", [[(0, 8)], [(0, 8)]])
    assert device.values == [("ZeRO-0", "8.00"), ("ZeRO-1", "8.00")]


def test_rows_that_store_nothing_on_disk_are_not_in_its_chart() -> None:
    assert chart(OFFLOAD, "ledger-nvme").values == [("ZeRO-3 + NVMe optimizer and parameters", "14.0")]


def test_a_prediction_leaves_out_what_the_allocator_does_not_see() -> None:
    prediction = fakes.prediction(gpu={"x": 7 * GB, "overhead": GB}, host={"x": 5 * GB})

    def predicted(on: Placement, **changes: Any) -> list[list[tuple[float, float]]]:
        run = samples.run(fakes.zero(2), 0.1, on=on)
        run = replace(run, stored=replace(run.stored, trial=replace(run.trial, prediction=prediction | changes)))
        drawn, _ = charts_of(samples.comparison(samples.row("ZeRO-2", run)))
        return [points(one, "|") for one in drawn if one.name.startswith("ledger")]

    assert predicted(samples.CARD) == [[(7, 0)], [(5, 0)]]
    assert predicted(samples.CARD, unknown="activations") == [[], []]
    assert predicted(fakes.placement())[-1] == []  # of the CPU accelerator not all is resident


def test_the_capacity_is_drawn_to_scale_or_named_as_beyond_the_axis() -> None:
    for gigabytes, places, label in ((16, [16], "card 16.0 GB"), (80, [], "card 80.0 GB (beyond the axis →)")):
        of = replace(samples.flat_comparison(), device_capacity_bytes=gigabytes * GB)
        axes, drawing = draw(chart(of, "ledger-gpu"))
        handle, shown = drawing.legend[-1]
        assert (shown, {segment[0][0] for segment in handle.get_segments()}) == (label, set(places))
        assert (axes.get_xlim()[1] > gigabytes) == bool(places)


def test_bars_carry_every_run_and_an_interval_if_there_is_one() -> None:
    three, one = chart(ZERO, "throughput"), chart(OFFLOAD, "throughput")
    assert [sum(y == row for _, y in points(three, "o")) for row in range(4)] == [3, 3, 3, 3]
    assert points(one, "o") == []
    low, high = ZERO.rows[0].interval or (0, 0)
    whiskers = [each for each in draw(three)[0].containers if hasattr(each, "has_xerr") and each.has_xerr]
    assert len(whiskers) == 4
    assert whiskers[0].lines[2][0].get_segments()[0][:, 0] == pytest.approx([low, high])
    assert bars(three)[0] == [(0, ZERO.rows[0].tokens_per_second)]


def test_phases_are_shares_of_their_sum() -> None:
    phases = chart(ZERO, "phases")
    assert all(sum(length for _, length in parts) == pytest.approx(100) for parts in bars(phases))
    assert phases.table is not None
    assert phases.table.headings == ["Strategy", "forward", "backward", "step", "sum"]
    assert phases.table.rows[0] == ("ZeRO-0", "27.3", "50.0", "22.7", "233 ms")


def test_step_times_are_the_slowest_ranks_with_warm_up_first() -> None:
    """Steps of 0.1 s and 0.2 s after one warm-up step of 0.5 s: 500, 100, 200 ms."""
    work = fakes.workload(num_steps=2, warmup_steps=1)
    one = samples.run(fakes.zero(1), 0.1, of=work, on=Placement(accelerator="cuda", num_gpus=2))
    fast, slow = one.ranks
    slow = replace(slow, step_seconds=(0.1, 0.2), warmup_step_seconds=(0.5,), window_seconds=0.3)
    changed = replace(one, stored=replace(one.stored, ranks=(replace(fast, window_seconds=0.2), slow)))
    axes, drawing = draw(chart(samples.comparison(samples.row("ZeRO-1", changed)), "steps"))
    (line,) = axes.lines
    assert [*line.get_xdata()] == [1, 2, 3]
    assert [*line.get_ydata()] == pytest.approx([500, 100, 200])
    # A slow warm-up does not flatten what was measured; the legend has its height.
    assert axes.get_ylim() == pytest.approx((0, 220))
    assert [label for _, label in drawing.legend] == ["ZeRO-1", "warm-up, up to 500"]
    (shade,) = axes.patches
    assert (shade.get_x(), shade.get_width()) == (1, 0.5)


def test_a_loss_that_is_not_finite_leaves_a_gap() -> None:
    holed = samples.run(fakes.zero(0), 0.1, losses=(7.0, None, 6.0, None))
    (line,) = draw(chart(samples.comparison(samples.row("ZeRO-0", holed)), "losses"))[0].lines
    assert [*zip(line.get_xdata(), line.get_ydata(), strict=True)] == [(1, 7.0), (3, 6.0)]


# ------------------------------------------------------------------ rows that failed


def out_of_memory(status: str = schema.OOM, gpu: float | None = 95, **changes: Any) -> Run:
    """A run that failed, predicted to need ``gpu`` GB on the device, 70 GB in host memory and 900 GB on NVMe."""
    failed = samples.failed(fakes.zero(2), status=status, **changes)
    sizes = {tier: {"x": int(size * GB)} for tier, size in (("gpu", gpu), ("host", 70), ("nvme", 900)) if size}
    trial = replace(failed.trial, prediction=fakes.prediction(**sizes) if gpu else None)
    return replace(failed, stored=replace(failed.stored, trial=trial))


def test_a_row_out_of_memory_is_drawn_in_that_tier_at_what_it_asked_for(subtests: pytest.Subtests) -> None:
    """What was in use, 80 GB less the free ones, and the request; else the prediction."""
    for run, name, requested, text in (
        (out_of_memory(requested_bytes=50 * GB, free_bytes=4 * GB), "ledger-gpu", 126, "OOM, ≥ 126"),
        (out_of_memory(requested_bytes=50 * GB), "ledger-gpu", 95, "OOM, predicted 95.0"),
        (out_of_memory(gpu=None, requested_bytes=50 * GB), "ledger-gpu", None, "OOM"),
        (out_of_memory(requested_bytes=50 * GB, free_bytes=90 * GB), "ledger-gpu", 95, "OOM, predicted 95.0"),
        (out_of_memory(schema.OOM_HOST), "ledger-cpu", 70, "OOM, predicted 70.0"),
        (out_of_memory(schema.OOM_DISK), "ledger-nvme", 900, "OOM, predicted 900"),
        (out_of_memory(schema.SKIPPED), "ledger-gpu", 95, "not run, predicted 95.0"),
    ):
        with subtests.test(text):
            of = samples.comparison(*OFFLOAD.rows, samples.row("failed", run), host_capacity_bytes=1000 * GB)
            drawn = [one for one in charts_of(of)[0] if one.values[-1] == ("failed", text)]
            pareto = ["pareto-device"] if requested and name == "ledger-gpu" else []
            assert [one.name for one in drawn] == [*pareto, name]
            requests = [each for each in draw(drawn[-1])[0].patches if each.get_hatch() == "xxx"]
            assert [each.get_width() for each in requests] == ([requested] if requested else [])
            if pareto:
                assert points(drawn[0], "X") == [(requested, 0)]


def test_on_the_cpu_accelerator_a_row_runs_out_of_host_memory() -> None:
    trial = replace(fakes.trial(fakes.zero(2)), prediction=fakes.prediction(host={"x": 70 * GB}))
    failed = samples.row("failed", make_run(fakes.failure(trial), None, None))
    (one,), _ = charts_of(samples.comparison(failed, device_capacity_bytes=None, host_capacity_bytes=64 * GB))
    assert (one.name, one.values) == ("ledger-cpu", [("failed", "OOM, predicted 70.0")])


def test_a_row_that_failed_otherwise_is_in_no_chart_and_unknown_bytes_make_none() -> None:
    crashed = samples.row("failed", out_of_memory(schema.CRASHED))
    for one in charts_of(samples.comparison(*ZERO.rows[:4], crashed))[0]:
        assert "failed" not in one.alt_text
    assert charts_of(samples.comparison(samples.row("failed", out_of_memory(gpu=None))))[0] == []


def test_a_huge_request_does_not_shrink_the_others_below_half_of_the_axis() -> None:
    wide = samples.row("failed", out_of_memory(gpu=9000))
    of = samples.comparison(*ZERO.rows[:4], wide)
    for name in ("ledger-gpu", "pareto-device"):
        assert draw(chart(of, name))[0].get_xlim()[1] <= 170
    assert points(chart(of, "pareto-device"), "X") == [(160, 0)]
    assert draw(chart(of, "pareto-device"))[1].dot_labels[-1].text == "failed\nOOM, predicted 9,000 GB →"


# ------------------------------------------------------------------ labels and styles


def test_the_recommended_row_has_a_star_in_every_chart_though_it_is_the_slowest() -> None:
    drawn, _ = charts_of(samples.many_rows(60), recommended="ZeRO-3 micro-batch 59")
    assert len(drawn) == 7
    for one in drawn:
        assert [label for label, _ in one.values if "★" in label] == ["★ ZeRO-3 micro-batch 59"]
        if one.name != "pareto-device":
            assert re.search(r" of 60 rows are drawn: ★, the baseline and the fastest\.$", one.note)


def test_a_row_has_the_same_colour_in_every_overlay() -> None:
    of = samples.many_rows(20)
    scatter, steps, losses = (draw(chart(of, name)) for name in ("pareto-device", "steps", "losses"))
    dots = {(line.get_xdata()[0], line.get_ydata()[0]): line.get_markeredgecolor() for line in scatter[0].lines}
    colours = {label.text.replace("\n", " "): dots[label.x, label.y] for label in scatter[1].dot_labels}
    assert len(colours) == comparison_charts.MAX_OVERLAID_ROWS
    assert "ZeRO-0 micro-batch 0" in colours
    for _, drawing in (steps, losses):
        assert {label: line.get_color() for line, label in drawing.legend[:-1]} == colours


def test_rows_that_take_no_part_are_crossed_out_and_named() -> None:
    first, second, third = ZERO.rows[:3]
    odd = replace(second, differences=("torch 2.13.0 against 2.11.0",))
    wrong = replace(third, caveats=(Caveat(CaveatKind.LOSS_NOT_FINITE),))
    of = replace(ZERO, rows=(first, odd, wrong), pareto_device=(first.key,))
    plot = chart(of, "pareto-device")
    names = ["ZeRO-0", "ZeRO-1 (not comparable)", "ZeRO-2 (disqualified)"]
    assert [label for label, _ in plot.values] == [label for label, _ in chart(of, "throughput").values] == names
    assert len(points(plot, "x")) == 2
    filled = [line for line in draw(plot)[0].lines if line.get_marker() in "os^" and line.get_mfc() != "none"]
    assert [line.get_xdata()[0] for line in filled] == pytest.approx([58.2])
    assert "disqualified or not comparable" in plot.note
    assert "disqualified or not comparable" not in chart(ZERO, "pareto-device").note


def test_the_text_alternative_of_many_rows_names_some_and_counts_the_rest() -> None:
    alt_text = chart(samples.many_rows(30), "throughput").alt_text
    assert alt_text.startswith("Throughput, tokens/s: ZeRO-0 micro-batch 0 5,120; ")
    assert alt_text.endswith("; 18 more rows.")


# ------------------------------------------------------------------ files and images


def test_every_chart_is_a_png_and_an_svg_that_needs_no_font(tmp_path: Path) -> None:
    drawn, _ = charts_of(samples.flat_comparison())
    for folder in ("a", "new/b"):
        paths = save_charts("a title", drawn, tmp_path / folder)
    names = "pareto-device throughput ledger-gpu ledger-cpu"
    assert [path.name for path in paths] == [f"{name}.{form}" for name in names.split() for form in ("png", "svg")]
    for path in paths:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        else:
            assert not list(ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text"))
            assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()  # the same numbers, the same file


@settings(deadline=None, max_examples=25)
@given(st.text(max_size=60))
def test_any_label_is_text_of_the_drawing(label: str) -> None:
    """XML, mathtext and a leading underscore have no meaning; what XML cannot hold is replaced."""
    of = samples.comparison(samples.row(label, samples.run(fakes.zero(0), 0.1)))
    root = ElementTree.fromstring(svg(chart(of, "losses")))
    shown = "".join(sign if sign.isprintable() else "\ufffd" for sign in " ".join(label.split()))
    assert shown[:20] in "".join(root.itertext())
    known = "svg metadata RDF Work type format creator Agent title defs style g path use text tspan rect clipPath"
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= set(known.split())


def test_extreme_numbers_and_long_labels_are_drawn(subtests: pytest.Subtests) -> None:
    run = samples.run(fakes.zero(0), 0.1)
    for losses in ((0.1, 0.1, 0.1), (0.0, 0.0), (5.0, 1e-9), (-1.0, -1.0), (1e12, 1e12), (1e300, 1e300)):
        with subtests.test(losses=losses):
            lossy = samples.run(fakes.zero(0), 0.1, losses=losses)
            drawing = svg(chart(samples.comparison(samples.row("x", lossy)), "losses"))
            assert not re.findall(r"\b(?:nan|inf)\b", drawing)
    for label, speed in (("zero2", 1.3e41), ("optimizer " * 20, 0.0)):
        with subtests.test(label):
            row = replace(samples.row(label, run), tokens_per_second=speed)
            assert label[:5] in svg(chart(replace(ZERO, rows=(row,)), "throughput"))


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
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg(charts_of(OFFLOAD)[0][0])))
    assert used <= {*charts.COLOURS, charts.RULE, *charts.DARK_INKS, *charts.DARK_INKS.values()}


@pytest.mark.parametrize("comparison", [ZERO, OFFLOAD, samples.many_rows(20)], ids=["zero", "offload", "many"])
def test_labels_of_dots_do_not_overlap(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    import adjustText

    boxes: list[Any] = []
    adjust = adjustText.adjust_text

    def record(texts: list[Any], **options: Any) -> None:
        adjust(texts, **options)
        boxes[:] = [text.get_window_extent() for text in texts]

    monkeypatch.setattr(adjustText, "adjust_text", record)
    for one in charts_of(comparison)[0]:
        if one.name.startswith("pareto"):
            svg(one)
            assert len(boxes) == len(draw(one)[1].dot_labels) > 0
            for a, b in itertools.combinations(boxes, 2):
                assert not a.overlaps(b)
