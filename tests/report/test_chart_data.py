"""Which charts a comparison gives, and that what they hold is what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.analysis.row import Run
from ds_bench.config.caveats import Caveat, CaveatKind
from ds_bench.config.spec import Placement
from ds_bench.records import schema
from ds_bench.report import chart_data
from ds_bench.report.chart_data import BarChart, Chart, LineChart, ScatterChart, StackChart, charts_of
from tests.support import fakes
from tests.support import sample_reports as samples

GB = fakes.GB


def chart(of: samples.Comparison, name: str) -> Chart:
    return next(one for one in charts_of(of).charts if one.name == name)


def test_the_device_ledger_is_the_fullest_ranks_and_the_host_ledger_the_fullest_nodes_sum() -> None:
    """Nodes a (ranks 0, 1) and b (rank 2). GPU: rank 2 holds 5 GB, the most. CPU: a holds 1 + 2 = 3 GB, b 2.5 GB."""
    one = samples.run(fakes.zero(2), 0.1, on=Placement(accelerator="cuda", num_gpus=3))
    held = [("a", 1, 1.0), ("a", 2, 2.0), ("b", 5, 2.5)]
    ranks = tuple(
        replace(rank, hostname=node, ledger={"gpu": {"gradients": gpu * GB}, "cpu": {"parameters": int(cpu * GB)}})
        for rank, (node, gpu, cpu) in zip(one.ranks, held, strict=True)
    )
    of = samples.comparison(samples.row("ZeRO-2", replace(one, stored=replace(one.stored, ranks=ranks))))
    device, host = chart(of, "ledger-gpu"), chart(of, "ledger-cpu")
    assert isinstance(device, StackChart)
    assert isinstance(host, StackChart)
    assert device.stacks[0].parts == (0, 5, 0, 0, 0, 0, 3)  # the rest of a peak of 8 GB
    assert host.stacks[0].parts == (3, 0, 0, 0, 0, 0, 3)  # two ranks of 3 GB


def test_step_times_are_the_slowest_ranks_with_warm_up_first() -> None:
    """Steps of 0.1 s and 0.2 s after one warm-up step of 0.5 s: 500, 100, 200 ms."""
    work = fakes.workload(num_steps=2, warmup_steps=1)
    place = Placement(accelerator="cuda", num_gpus=2)
    one = samples.run(fakes.zero(1), 0.1, of=work, on=place)
    fast, slow = one.ranks
    slow = replace(slow, step_seconds=(0.1, 0.2), warmup_step_seconds=(0.5,), window_seconds=0.3)
    changed = replace(one, stored=replace(one.stored, ranks=(replace(fast, window_seconds=0.2), slow)))
    steps = chart(samples.comparison(samples.row("ZeRO-1", changed)), "steps")
    assert isinstance(steps, LineChart)
    assert steps.lines[0].points == ((1, 500), (2, pytest.approx(100)), (3, 200))
    assert steps.warmup == 1


def test_a_slow_warm_up_does_not_flatten_what_was_measured_and_its_height_is_told() -> None:
    steps = chart(samples.zero_comparison(), "steps")
    assert isinstance(steps, LineChart)
    assert steps.limits[1] < 400
    assert steps.cut_off == ", up to 2,620"


def test_a_loss_that_is_not_finite_leaves_a_gap_and_no_nan() -> None:
    one = samples.run(fakes.zero(0), 0.1)
    ranks = tuple(replace(rank, losses=(7.0, None, 6.0, None)) for rank in one.ranks)
    holed = replace(one, stored=replace(one.stored, ranks=ranks))
    losses = chart(samples.comparison(samples.row("ZeRO-0", holed)), "losses")
    assert isinstance(losses, LineChart)
    assert losses.lines[0].points == ((1, 7.0), (3, 6.0))


def test_bars_carry_every_run_and_an_interval_only_where_there_is_one() -> None:
    three, one = chart(samples.zero_comparison(), "throughput"), chart(samples.offload_comparison(), "throughput")
    assert isinstance(three, BarChart)
    assert isinstance(one, BarChart)
    assert [len(bar.runs) for bar in three.bars] == [3, 3, 3, 3]
    assert all(bar.interval for bar in three.bars)
    assert not any(bar.interval for bar in one.bars)
    assert "--repeats 3" in one.note


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
            measured = samples.offload_comparison().rows
            of = samples.comparison(*measured, samples.row("failed", run), host_capacity_bytes=1000 * GB)
            drawn = [one for one in charts_of(of).charts if "failed" in one.alt_text]
            assert [one.name for one in drawn] == [
                *(["pareto-device"] if requested and name == "ledger-gpu" else []),
                name,
            ]
            stacks = drawn[-1]
            assert isinstance(stacks, StackChart)
            assert (stacks.stacks[-1].requested, stacks.stacks[-1].value, stacks.stacks[-1].parts) == (
                requested,
                text,
                (),
            )
            if len(drawn) == 2:
                assert isinstance(drawn[0], ScatterChart)
                assert (drawn[0].dots[-1].x, drawn[0].dots[-1].failed) == (requested, text)


def test_a_row_that_failed_otherwise_is_in_no_chart_and_unknown_bytes_make_none() -> None:
    full = samples.zero_comparison().rows[:4]
    crashed = samples.row("failed", out_of_memory(schema.CRASHED))
    for one in charts_of(samples.comparison(*full, crashed)).charts:
        assert "failed" not in one.alt_text
    assert charts_of(samples.comparison(samples.row("failed", out_of_memory(gpu=None)))).charts == ()


def test_what_a_row_asked_for_does_not_shrink_the_others_below_half_of_the_axis() -> None:
    wide = samples.row("failed", out_of_memory(gpu=9000))
    for name in ("ledger-gpu", "pareto-device"):
        one = chart(samples.comparison(*samples.zero_comparison().rows[:4], wide), name)
        assert isinstance(one, (StackChart, ScatterChart))
        assert one.end <= 160


def test_the_prediction_of_a_gpu_leaves_out_what_the_allocator_does_not_see() -> None:
    prediction = fakes.prediction(gpu={"x": 7 * GB, "overhead": GB}, host={"x": 5 * GB})

    def predicted(on: Placement, **changes: Any) -> list[float | None]:
        run = samples.run(fakes.zero(2), 0.1, on=on)
        run = replace(run, stored=replace(run.stored, trial=replace(run.trial, prediction=prediction | changes)))
        drawn = charts_of(samples.comparison(samples.row("ZeRO-2", run))).charts
        return [stack.predicted for one in drawn if one.name.startswith("ledger") for stack in one.stacks]  # type: ignore[attr-defined]

    assert predicted(samples.CARD) == [7, 5]
    assert predicted(samples.CARD, unknown="activations") == [None, None]
    assert predicted(fakes.placement())[-1] is None  # of the CPU accelerator not all is resident


def test_phases_are_shares_of_their_sum() -> None:
    phases = chart(samples.zero_comparison(), "phases")
    assert isinstance(phases, StackChart)
    assert all(sum(stack.parts) == pytest.approx(100) for stack in phases.stacks)
    assert phases.table.headings == ["Strategy", "forward", "backward", "step", "sum"]
    assert phases.table.rows[0] == ("ZeRO-0", "27.3", "50.0", "22.7", "233 ms")


def test_the_recommended_row_has_a_star_in_every_chart_though_it_is_the_slowest() -> None:
    drawn = charts_of(samples.many_rows(60), recommended="ZeRO-3 micro-batch 59").charts
    for one in drawn:
        assert [label for label, _ in one.values if "★" in label] == ["★ ZeRO-3 micro-batch 59"]
    assert drawn[0].name == "pareto-device"


def test_memory_is_the_measured_peak_where_there_is_no_ledger() -> None:
    device = chart(samples.flat_comparison(), "ledger-gpu")
    assert device.title == "Device memory"
    assert device.values == [("ZeRO-0", "8.00"), ("ZeRO-1", "8.00")]


def test_rows_that_store_nothing_on_disk_are_not_in_its_chart() -> None:
    disk = chart(samples.offload_comparison(), "ledger-nvme")
    assert [label for label, _ in disk.values] == ["ZeRO-3 + NVMe optimizer and parameters"]
    assert not any(one.name == "ledger-nvme" for one in charts_of(samples.zero_comparison()).charts)


def test_a_row_has_the_same_style_in_every_overlay() -> None:
    drawn = charts_of(samples.many_rows(20)).charts
    styles: dict[str, set[int]] = {}
    for one in drawn:
        if isinstance(one, LineChart):
            for line in one.lines:
                styles.setdefault(line.label, set()).add(line.style)
        if isinstance(one, ScatterChart):
            for dot in one.dots:
                if dot.style is not None:
                    styles.setdefault(dot.label, set()).add(dot.style)
    assert len(styles) == chart_data.MAX_OVERLAID_ROWS
    assert all(len(found) == 1 for found in styles.values())
    assert "ZeRO-0 micro-batch 0" in styles


def test_dots_that_take_no_part_are_crossed_out_and_named() -> None:
    full = samples.zero_comparison()
    lost = Caveat(CaveatKind.LOSS_NOT_FINITE)
    first, second, third = full.rows[0], full.rows[1], full.rows[2]
    odd = replace(second, differences=("torch 2.13.0 against 2.11.0",))
    wrong = replace(third, caveats=(lost,))
    of = replace(full, rows=(first, odd, wrong), pareto_device=(first.key,))
    plot = chart(of, "pareto-device")
    assert isinstance(plot, ScatterChart)
    assert [(dot.label, dot.excluded, dot.on_front) for dot in plot.dots] == [
        ("ZeRO-0", False, True),
        ("ZeRO-1 (not comparable)", True, False),
        ("ZeRO-2 (disqualified)", True, False),
    ]
    assert "disqualified or not comparable" in plot.note
    assert "disqualified or not comparable" not in chart(full, "pareto-device").note


def test_a_bar_says_whether_its_row_takes_part() -> None:
    full = samples.zero_comparison()
    lost = Caveat(CaveatKind.LOSS_NOT_FINITE)
    odd = replace(full.rows[1], differences=("seq_length 512 against 1024",))
    bars = chart(replace(full, rows=(full.rows[0], odd, replace(full.rows[2], caveats=(lost,)))), "throughput")
    assert isinstance(bars, BarChart)
    labels = ["ZeRO-0 (baseline)", "ZeRO-1 (not comparable)", "ZeRO-2 (disqualified)"]
    assert [bar.label for bar in bars.bars] == labels


def test_no_pareto_plot_of_a_single_row() -> None:
    alone = samples.comparison(samples.row("ZeRO-0", samples.run(fakes.zero(0), 0.1)))
    assert not any(one.name.startswith("pareto") for one in charts_of(alone).charts)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=2000), st.integers(2, 400))
def test_downsampling_keeps_the_order_the_extremes_and_the_limit(values: list[float], most: int) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    kept = chart_data.downsample(points, most)
    assert len(kept) <= max(most, 2)
    assert set(kept) <= set(points)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert max(value for _, value in kept) == max(values)
    assert min(value for _, value in kept) == min(values)


def test_the_text_alternative_of_many_rows_names_some_and_counts_the_rest() -> None:
    alt_text = chart(samples.many_rows(30), "throughput").alt_text
    assert alt_text.startswith("Throughput, tokens/s: ZeRO-0 micro-batch 0 (baseline) 5,120; ")
    assert alt_text.endswith("; 18 more rows.")
