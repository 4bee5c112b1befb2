"""Charts: which ones a comparison gives, that they show what was measured, and that labels are only text."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from ds_bench.analysis.comparison import Comparison
from ds_bench.analysis.row import Run, make_run
from ds_bench.config.caveat_texts import Caveat, CaveatKind
from ds_bench.config.spec import Placement
from ds_bench.records import schema
from ds_bench.report import comparison_charts
from ds_bench.report.chart_drawing import Chart, Drawing, image_source, save_charts
from ds_bench.report.comparison_charts import charts_of
from tests.support import fakes
from tests.support import sample_reports as samples

GB = fakes.GB
ZERO, OFFLOAD = samples.zero_comparison(), samples.offload_comparison()


def chart(of: Comparison, name: str) -> Chart:
    return next(one for one in charts_of(of)[0] if one.name == name)


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


def alone(run: Run, label: str = "ZeRO-2") -> Comparison:
    return samples.comparison(samples.row(label, run))


def out_of_memory(status: str = schema.OOM, gpu: float | None = 95, **changes: Any) -> Run:
    """A run that failed, predicted to need ``gpu`` GB on the device, 70 GB in host memory and 900 GB on NVMe."""
    failed = samples.failed(fakes.zero(2), status=status, **changes)
    sizes = {tier: {"x": int(size * GB)} for tier, size in (("gpu", gpu), ("host", 70), ("nvme", 900)) if size}
    trial = replace(failed.trial, prediction=fakes.prediction(**sizes) if gpu else None)
    return replace(failed, stored=replace(failed.stored, trial=trial))


# ------------------------------------------------------------------ what is shown


def test_charts_are_those_with_numbers_and_the_others_are_named(subtests: pytest.Subtests) -> None:
    for of, names, missing in (
        (ZERO, "pareto-device throughput ledger-gpu ledger-cpu steps losses", []),
        (OFFLOAD, "pareto-device throughput ledger-gpu ledger-cpu ledger-nvme steps losses", []),
        (samples.cpu_comparison(), "throughput ledger-cpu steps losses", []),
        (replace(samples.cpu_comparison(), pareto_host=("ZeRO-0",)),
         "pareto-host throughput ledger-cpu steps losses", []),
        (samples.flat_comparison(), "pareto-device throughput ledger-gpu ledger-cpu",
         ["These results do not contain memory by category, individual step times or losses per step."]),
        (alone(samples.run(fakes.zero(0), 0.1)), "throughput ledger-gpu ledger-cpu steps losses", []),
        (alone(out_of_memory(schema.CRASHED)), "", ["No row succeeded, so there is nothing to draw."]),
        # Out of memory, but by how much nobody knows.
        (alone(out_of_memory(gpu=None)), "", ["No row succeeded, so there is nothing to draw."]),
    ):  # fmt: skip
        with subtests.test(names):
            drawn, left_out = charts_of(of)
            assert (" ".join(one.name for one in drawn), left_out) == (names, missing)


def test_memory_is_the_fullest_ranks_and_the_fullest_nodes_sum() -> None:
    """Nodes a (ranks 0, 1) and b (rank 2). GPU: rank 2 holds 5 GB, the most. CPU: a holds 1 + 2 = 3 GB, b 2.5 GB."""
    one = samples.run(fakes.zero(2), 0.1, on=Placement(accelerator="cuda", num_gpus=3))
    held = [("a", 1, 1.0), ("a", 2, 2.0), ("b", 5, 2.5)]
    ranks = tuple(
        replace(rank, hostname=node, ledger={"gpu": {"gradients": gpu * GB}, "cpu": {"parameters": int(cpu * GB)}})
        for rank, (node, gpu, cpu) in zip(one.ranks, held, strict=True)
    )
    of = alone(replace(one, stored=replace(one.stored, ranks=ranks)))
    assert bars(chart(of, "ledger-gpu")) == [[(0, 5), (5, 3)]]  # the rest of a peak of 8 GB
    assert bars(chart(of, "ledger-cpu")) == [[(0, 3), (3, 3)]]  # two ranks of 3 GB
    table = chart(of, "ledger-gpu").table
    assert table is not None
    headings = ["parameters", "gradients", "optimizer states", "DeepSpeed buffers", "activations", "other"]
    assert table.headings == ["Strategy", *headings, "rest of the peak", "peak"]
    assert [*table.rows] == [("ZeRO-2", "0", "5.00", "0", "0", "0", "0", "3.00", "8.00")]
    # Categories, each at its own maximum, may exceed the peak.
    exceeding = alone(samples.run(fakes.zero(2), 0.1, peak=4, ledger={"gpu": {"gradients": 5 * GB}}))
    assert bars(chart(exceeding, "ledger-gpu")) == [[(0, 5)]]
    # Without a ledger, the measured peak; a row that stores nothing on the disk is not in its chart.
    device = chart(samples.flat_comparison(), "ledger-gpu")
    assert (device.title, bars(device)) == ("Device memory", [[(0, 8)], [(0, 8)]])
    assert chart(OFFLOAD, "ledger-nvme").values == [("ZeRO-3 + NVMe optimizer and parameters", "14.0")]


@pytest.mark.parametrize(
    ("on", "unknown", "marks"),
    [
        (samples.CARD, None, [[(7, 0)], [(5, 0)]]),
        (samples.CARD, "activations", [[], []]),
        (fakes.placement(), None, [[(7, 0)], []]),  # on the CPU accelerator not all is resident
    ],
)
def test_a_prediction_leaves_out_what_the_allocator_does_not_see(on: Placement, unknown: Any, marks: Any) -> None:
    prediction = fakes.prediction(gpu={"x": 7 * GB, "overhead": GB}, host={"x": 5 * GB}, unknown=unknown)
    run = samples.run(fakes.zero(2), 0.1, on=on)
    run = replace(run, stored=replace(run.stored, trial=replace(run.trial, prediction=prediction)))
    drawn, _ = charts_of(alone(run))
    assert [points(one, "|") for one in drawn if one.name.startswith("ledger")] == marks


def test_the_capacity_is_drawn_to_scale_or_named_as_beyond_the_axis(subtests: pytest.Subtests) -> None:
    for gigabytes, places, label in ((16, [16], "card 16.0 GB"), (80, [], "card 80.0 GB (beyond the axis →)")):
        with subtests.test(label):
            of = replace(samples.flat_comparison(), device_capacity_bytes=gigabytes * GB)
            axes, drawing = draw(chart(of, "ledger-gpu"))
            handle, shown = drawing.legend[-1]
            assert (shown, {segment[0][0] for segment in handle.get_segments()}) == (label, set(places))
            assert (axes.get_xlim()[1] > gigabytes) == bool(places)


def test_bars_carry_every_run_and_an_interval_if_there_is_one() -> None:
    three, one = chart(ZERO, "throughput"), chart(OFFLOAD, "throughput")
    assert [sum(y == row for _, y in points(three, "o")) for row in range(4)] == [3, 3, 3, 3]
    assert points(one, "o") == []
    whiskers = [each for each in draw(three)[0].containers if hasattr(each, "has_xerr") and each.has_xerr]
    assert len(whiskers) == 4
    assert whiskers[0].lines[2][0].get_segments()[0][:, 0] == pytest.approx([*(ZERO.rows[0].interval or ())])
    assert bars(three)[0] == [(0, ZERO.rows[0].tokens_per_second)]


def test_step_times_are_the_slowest_ranks_with_warm_up_first() -> None:
    """Steps of 0.1 s and 0.2 s after one warm-up step of 0.5 s: 500, 100, 200 ms."""
    work = fakes.workload(num_steps=2, warmup_steps=1)
    one = samples.run(fakes.zero(1), 0.1, of=work, on=Placement(accelerator="cuda", num_gpus=2))
    fast, slow = one.ranks
    slow = replace(slow, step_seconds=(0.1, 0.2), warmup_step_seconds=(0.5,), window_seconds=0.3)
    changed = replace(one, stored=replace(one.stored, ranks=(replace(fast, window_seconds=0.2), slow)))
    axes, drawing = draw(chart(alone(changed, "ZeRO-1"), "steps"))
    (line,) = axes.lines
    assert ([*line.get_xdata()], [*line.get_ydata()]) == ([1, 2, 3], pytest.approx([500, 100, 200]))
    # A slow warm-up does not flatten what was measured; the legend has its height.
    assert axes.get_ylim() == pytest.approx((0, 220))
    assert [label for _, label in drawing.legend] == ["ZeRO-1", "warm-up, up to 500"]
    (shade,) = axes.patches
    assert (shade.get_x(), shade.get_width()) == (1, 0.5)


def test_a_loss_that_is_not_finite_leaves_a_gap() -> None:
    holed = samples.run(fakes.zero(0), 0.1, losses=(7.0, None, 6.0, None))
    (line,) = draw(chart(alone(holed), "losses"))[0].lines
    assert [*zip(line.get_xdata(), line.get_ydata(), strict=True)] == [(1, 7.0), (3, 6.0)]


# ------------------------------------------------------------------ rows that failed


def test_a_row_out_of_memory_is_drawn_in_that_tier_at_what_it_asked_for(subtests: pytest.Subtests) -> None:
    for run, name, requested, text in (
        # What was in use, 80 GB less the free ones, and the request; else the prediction.
        (out_of_memory(requested_bytes=50 * GB, free_bytes=4 * GB), "ledger-gpu", 126, "OOM, ≥ 126"),
        (out_of_memory(requested_bytes=50 * GB), "ledger-gpu", 95, "OOM, predicted 95.0"),
        (out_of_memory(gpu=None, requested_bytes=50 * GB), "ledger-gpu", None, "OOM"),
        (out_of_memory(requested_bytes=50 * GB, free_bytes=90 * GB), "ledger-gpu", 95, "OOM, predicted 95.0"),
        (out_of_memory(schema.OOM_HOST), "ledger-cpu", 70, "OOM, predicted 70.0"),
        (out_of_memory(schema.OOM_DISK), "ledger-nvme", 900, "OOM, predicted 900"),
        (out_of_memory(schema.SKIPPED), "ledger-gpu", 95, "not run, predicted 95.0"),
        (out_of_memory(schema.CRASHED), None, None, ""),
    ):
        with subtests.test(name=name, text=text):
            of = samples.comparison(*OFFLOAD.rows, samples.row("failed", run), host_capacity_bytes=1000 * GB)
            drawn = [one for one in charts_of(of)[0] if "failed" in dict(one.values)]
            pareto = ["pareto-device"] if requested and name == "ledger-gpu" else []
            assert [one.name for one in drawn] == [*pareto, *([name] if name else [])]
            assert {one.values[-1][1] for one in drawn} <= {text}
            requests = [each for one in drawn[-1:] for each in draw(one)[0].patches if each.get_hatch() == "xxx"]
            assert [each.get_width() for each in requests] == ([requested] if requested else [])
            if pareto:
                assert points(drawn[0], "X") == [(requested, 0)]


def test_on_the_cpu_accelerator_a_row_runs_out_of_host_memory() -> None:
    trial = replace(fakes.trial(fakes.zero(2)), prediction=fakes.prediction(host={"x": 70 * GB}))
    failed = samples.row("failed", make_run(fakes.failure(trial), None, None))
    (one,), _ = charts_of(samples.comparison(failed, device_capacity_bytes=None, host_capacity_bytes=64 * GB))
    assert (one.name, one.values) == ("ledger-cpu", [("failed", "OOM, predicted 70.0")])


def test_a_huge_request_does_not_shrink_the_others_below_half_of_the_axis() -> None:
    of = samples.comparison(*ZERO.rows[:4], samples.row("failed", out_of_memory(gpu=9000)))
    pareto = chart(of, "pareto-device")
    for one in (chart(of, "ledger-gpu"), pareto):
        assert draw(one)[0].get_xlim()[1] <= 170
    assert points(pareto, "X") == [(160, 0)]
    assert draw(pareto)[1].dot_labels[-1].text == "failed\nOOM, predicted 9,000 GB →"


# ------------------------------------------------------------------ labels and styles


def test_of_many_rows_the_recommended_one_is_drawn_with_a_star_though_it_is_the_slowest() -> None:
    drawn, _ = charts_of(samples.many_rows(60), recommended="ZeRO-3 micro-batch 59")
    assert len(drawn) == 6
    for one in drawn:
        assert [label for label, _ in one.values if "★" in label] == ["★ ZeRO-3 micro-batch 59"]
        if one.name != "pareto-device":
            assert re.search(r" of 60 rows are drawn: ★, the baseline and the fastest\.$", one.note)
    alt_text = chart(samples.many_rows(30), "throughput").alt_text
    assert alt_text.startswith("Throughput, tokens/s: ZeRO-0 micro-batch 0 5,120; ")
    assert alt_text.endswith("; 4 more rows.")


def test_a_row_has_the_same_color_in_every_overlay() -> None:
    of = samples.many_rows(20)
    scatter, steps, losses = (draw(chart(of, name)) for name in ("pareto-device", "steps", "losses"))
    dots = {(line.get_xdata()[0], line.get_ydata()[0]): line.get_markeredgecolor() for line in scatter[0].lines}
    colors = {label.text.replace("\n", " "): dots[label.x, label.y] for label in scatter[1].dot_labels}
    assert len(colors) == comparison_charts.MAX_OVERLAID_ROWS
    for _, drawing in (steps, losses):
        assert {label: line.get_color() for line, label in drawing.legend[:-1]} == colors


def test_rows_that_take_no_part_are_crossed_out_and_named() -> None:
    first, second, third, fourth = ZERO.rows[:4]
    odd = replace(second, differences=("torch 2.13.0 vs 2.11.0",))
    wrong = replace(third, caveats=(Caveat(CaveatKind.LOSS_NOT_FINITE),))
    busy = replace(fourth, caveats=(Caveat(CaveatKind.CPU_QUOTA, {"fraction": 0.5}),))
    of = replace(ZERO, rows=(first, odd, wrong, busy), pareto_device=(first.key,))
    plot = chart(of, "pareto-device")
    names = ["ZeRO-0", "ZeRO-1 (not comparable)", "ZeRO-2 (disqualified)", "ZeRO-3 (in doubt)"]
    assert [label for label, _ in plot.values] == [label for label, _ in chart(of, "throughput").values] == names
    assert len(points(plot, "x")) == 3
    filled = [line for line in draw(plot)[0].lines if line.get_marker() in "os^" and line.get_mfc() != "none"]
    assert [line.get_xdata()[0] for line in filled] == pytest.approx([58.2])
    assert "in doubt, disqualified or not comparable" in plot.note


def test_every_chart_is_a_png_and_an_svg_that_needs_no_font(tmp_path: Path) -> None:
    drawn, _ = charts_of(samples.flat_comparison())
    for folder in ("a", "new/b"):
        paths = save_charts("a title", drawn[:2], tmp_path / folder)
    assert [path.name for path in paths] == [f"{one.name}.{form}" for one in drawn[:2] for form in ("png", "svg")]
    for path in paths:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        else:
            assert not list(ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text"))
            assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()  # the same numbers, the same file


def test_any_label_is_text_and_any_number_is_drawn(subtests: pytest.Subtests) -> None:
    """XML, mathtext and a leading underscore have no meaning; what XML cannot hold is replaced."""
    for label in ("_<a>&\"'$x^2$", "\x00\ud800 ]]>", "optimizer " * 20):
        with subtests.test(ascii(label)):  # xdist sends it, and no surrogate
            row = replace(
                samples.row(label, samples.run(fakes.zero(0), 0.1, losses=(1e300, 0.0))), tokens_per_second=0.0
            )
            for name in ("losses", "throughput"):
                drawing = svg(chart(replace(ZERO, rows=(row,)), name))
                shown = "".join(sign if sign.isprintable() else "\ufffd" for sign in label.strip())
                assert shown[:15] in "".join(ElementTree.fromstring(drawing).itertext())
                assert not re.findall(r"\b(?:nan|inf)\b", drawing)
