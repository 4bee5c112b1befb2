"""Charts across the points of a sweep."""

from __future__ import annotations

from dataclasses import replace

from ds_bench.analysis.summary import summarise
from ds_bench.report.comparison_report import ComparisonReport, build_report
from ds_bench.report.sweep_charts import sweep_charts
from ds_bench.report.sweep_report import summary_lines
from tests.support import fakes


def point(seconds: float, **workload: object) -> ComparisonReport:
    """A comparison of stages 0 and 2, the latter twice as slow."""
    of = fakes.workload(**workload)
    records = [
        fakes.success(fakes.trial(fakes.zero(stage), of=of), step_seconds=[seconds * (1 + stage / 2)] * of.num_steps)
        for stage in (0, 2)
    ]
    return build_report([summarise(record, None, None) for record in records], goal="balanced")


def test_each_axis_has_a_chart_for_each_value_of_the_others_on_one_scale() -> None:
    reports = [
        point(length * batch / 1000, seq_length=length, batch_size=batch) for batch in (1, 2) for length in (32, 16, 64)
    ]
    charts = {chart.name: chart for chart in sweep_charts(reports)}
    by_length = charts["sweep-seq-len-throughput-2"]
    assert by_length.title == "Throughput by seq_len: local_batch_size 2"
    assert (by_length.ticks, by_length.horizontal) == (("16", "32", "64"), "seq_len")
    assert [line.label for line in by_length.lines] == ["ZeRO-0", "ZeRO-2"]
    assert {chart.limits for chart in charts.values() if "throughput" in chart.name} == {by_length.limits}
    assert by_length.table[0] == ("ZeRO-0", "1,000", "1,000", "1,000")
    assert {name.rpartition("-")[0] for name in charts} == {
        f"sweep-{axis}-{quantity}" for axis in ("seq-len", "local-batch-size") for quantity in ("throughput", "memory")
    }
    assert sum("local-batch-size-throughput" in name for name in charts) == 3


def test_values_that_are_no_numbers_keep_their_order() -> None:
    reports = [point(0.1, precision=precision) for precision in ("fp32", "bf16")]
    assert {chart.ticks for chart in sweep_charts(reports)} == {("fp32", "bf16")}


def test_one_workload_and_different_machines_have_no_such_chart() -> None:
    first, second = point(0.1), point(0.1, seq_length=64)
    assert sweep_charts([first]) == []
    elsewhere = replace(second, environments=(fakes.environment(cpu_model="another"),))
    assert sweep_charts([first, elsewhere]) == []


def test_the_end_of_a_sweep_has_a_line_for_each_point_with_what_differs() -> None:
    lines = summary_lines([point(0.1, seq_length=16), point(0.1, seq_length=32)])
    assert lines[0] == "2 points · tiny · 1 CPU rank · bf16 · 10 steps"
    assert lines[2].endswith("micro-batch 4 × 16 tokens: Use ZeRO-0: fastest of 2 rows, by one run each.")
    assert "tiny, 32 tokens" in lines[-1]
