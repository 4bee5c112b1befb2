"""The cells of a comparison's columns: their texts, what they are sorted by, and which columns are shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_bench.analysis import flops
from ds_bench.analysis.comparison import ComparisonRow
from ds_bench.analysis.intervals import RatioInterval
from ds_bench.config.caveats import Caveat, CaveatKind
from ds_bench.records.schema import CommunicationOperation, OffloadTimes, Profile
from ds_bench.report.comparison_charts import charts_of
from ds_bench.report.comparison_columns import NOT_TESTED, TABLE_COLUMNS, detail_tables, measured_columns, row_status
from ds_bench.units import MISSING, format_significant
from tests.support import fakes
from tests.support import sample_reports as samples

GB = fakes.GB
MEASURED = samples.row(
    "ZeRO-1",
    *(samples.run(fakes.zero(1), 0.1, repeat=repeat).with_row(mfu=0.415) for repeat in range(3)),
    tokens_per_second=5000.0,
    mean_step_seconds=0.1024,
    step_seconds_std=0.002,
    interval=(4900.0, 5100.0),
    ratio=1.25,
    ratio_interval=RatioInterval(ratio=1.25, low=1.1, high=1.4, degrees_of_freedom=3.0),
    tokens_per_second_per_gb=625.0,
    gpu_peak_bytes=8 * GB,
    gpu_fraction=0.5,
    gpu_difference_bytes=-2 * GB,
    host_peak_bytes=3 * GB,
    predicted_over_measured=0.98,
    caveats=(Caveat(CaveatKind.OWN_BATCHES, {"seq_length": 512}),),
)


def cells(row: ComparisonRow) -> dict[str, tuple[str, float | None]]:
    return {column.heading: (column.cell(row), column.value(row)) for column in TABLE_COLUMNS}


def test_the_text_and_the_sort_key_of_every_column_by_hand() -> None:
    final_loss = MEASURED.runs[0].losses[-1]
    samples_per_second = 5000 / MEASURED.runs[0].trial.workload.seq_length
    assert cells(MEASURED) == {
        "Step ms": ("102.4", 0.1024),
        "± ms": ("2.00", 0.002),
        "Tokens/s": ("5,000", 5000.0),
        "Samples/s": (format_significant(samples_per_second), samples_per_second),
        "Tokens/s, 95 %": ("4,900 to 5,100", 4900.0),
        "Relative": ("1.25x", 1.25),
        "95 % interval": ("[1.10, 1.40]", 1.1),
        "GPU peak GB": ("8.00", 8 * GB),
        "of card": ("50 %", 0.5),
        "GPU less baseline": ("−2.00 GB", -2 * GB),
        "Tok/s/GB": ("625", 625.0),
        "CPU GB": ("3.00", 3 * GB),
        "MFU": ("41.5 %", 0.415),
        "Final loss": (f"{final_loss:.4f}", final_loss),
        "Predicted": ("0.98x", 0.98),
    }


def test_a_failed_row_has_dashes_that_sort_last_in_every_column() -> None:
    assert set(cells(samples.row("ZeRO-1", samples.failed(fakes.zero(1)))).values()) == {(MISSING, None)}


def test_below_three_runs_intervals_are_not_tested_and_sort_last() -> None:
    shown = cells(replace(MEASURED, interval=None, ratio_interval=None))
    assert shown["95 % interval"] == shown["Tokens/s, 95 %"] == (NOT_TESTED, None)


def test_the_baseline_is_not_compared_with_itself() -> None:
    comparison = samples.comparison(MEASURED)
    against = [column.for_comparison(comparison) for column in TABLE_COLUMNS if column.against_baseline]
    assert [column.heading for column in against] == ["95 % interval", "GPU less baseline"]
    row = comparison.rows[0]
    assert {(column.cell(row), column.value(row)) for column in against} == {(MISSING, None)}


def test_the_page_shows_throughput_and_every_column_that_some_row_has_a_value_for() -> None:
    failed = samples.row("ZeRO-0", samples.failed(fakes.zero(0)))
    assert [column.heading for column in measured_columns(samples.comparison(failed))] == ["Tokens/s"]
    both = replace(samples.comparison(failed), rows=(failed, MEASURED), baseline=None)
    assert measured_columns(both) == TABLE_COLUMNS


def test_mfu_is_told_with_how_the_flops_were_had() -> None:
    def meaning(convention: str) -> str:
        runs = tuple(run.with_row(flops_convention=convention) for run in MEASURED.runs)
        columns = measured_columns(samples.comparison(replace(MEASURED, runs=runs)))
        return next(column.meaning for column in columns if column.heading == "MFU")

    assert meaning(flops.MODEL_CONVENTION) == "model FLOPs utilisation, dense peak; PaLM convention"
    assert meaning(flops.COUNTED_CONVENTION).endswith("; FLOPs counted on what ran forward and backward")
    assert "a third of" in meaning(flops.FORWARD_CONVENTION)


def test_a_status_is_that_of_a_failed_run_with_how_many_failed(subtests: pytest.Subtests) -> None:
    for runs, text in (
        ((True,), "! Success"),
        ((False,), "! OOM"),
        ((False, False), "! OOM"),
        ((True, False, True), "! OOM (1 of 3)"),
    ):
        with subtests.test(runs=runs):
            strategy = fakes.zero(1)
            row = samples.row(
                "ZeRO-1", *(samples.run(strategy, 0.1) if good else samples.failed(strategy) for good in runs)
            )
            assert row_status(row, lambda status: f"! {status}") == text


# ------------------------------------------------------------------ parts and costs of a step


PHASES = {"forward": 0.02, "backward": 0.03, "step": 0.05}
SWAPPED = OffloadTimes(
    cpu_adam_seconds=0.01,
    cpu_adam_bytes=2**27,
    disk_read_bytes=2**27,
    disk_written_bytes=2**27,
    disk_wait_seconds=0.04,
    disk_busy_seconds=0.04,
)
REDUCED = CommunicationOperation(name="all_reduce", count=3, bytes=2**20, seconds=0.005, wait_seconds=0.001)


def tables_of_steps(*rows: ComparisonRow) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The only row of the table of details, and the rows of the chart's table; cells by heading."""
    comparison = samples.comparison(*rows)
    (table,) = [each for each in detail_tables(comparison) if each.title == ("Where the time of a step goes",)]
    (chart,) = [each for each in charts_of(comparison)[0] if each.name == "phases"]
    assert chart.table is not None
    ((details,), charted) = (
        [dict(zip(each.headings, row, strict=True)) for row in each.rows] for each in (table, chart.table)
    )
    return details, charted


def test_parts_and_costs_of_a_step_are_in_a_table_and_in_the_chart_of_phases() -> None:
    """Parts of 100 ms; 1 MB in 5 ms; 2**27 B in 10 ms are 12.5 GB/s; the disk moves 2**28 B in 40 ms, of 60 ms."""
    parts = {"forward": 0.02, "backward": 0.025, "step": 0.01, "communication": 0.005, "transfer": 0.04}
    costs = {"phase_seconds": PHASES, "step_parts": parts, "offload": SWAPPED, "communication": (REDUCED,)}
    plain = samples.run(fakes.zero(0), 0.1, phase_seconds=PHASES)
    swapping = samples.run(fakes.offload("nvme"), 0.09, **costs)
    details, charted = tables_of_steps(samples.row("ZeRO-0", plain), samples.row("NVMe", swapping))
    assert details == {
        "Strategy": "NVMe",
        "forward": "20 %",
        "backward": "25 %",
        "optimizer step": "10 %",
        "communication": "5 %",
        "transfer": "40 %",
        "step ms": "100.0",
        "communication ms": "5.00",
        "of it waiting": "1.00",
        "sent": "1.00 MB",
        "transfers ms": "40.0",
        "CPU Adam /s": "12.50 GB",
        "disk /s": "6.25 GB",
        "needed /s": "4.17 GB",
        "disk-bound": "no",
    }
    assert [[*row.values()] for row in charted] == [
        ["ZeRO-0", "20.0", "30.0", "50.0", "0", "0", "100 ms"],
        ["NVMe", "20.0", "25.0", "10.0", "5.00", "40.0", "100 ms"],
    ]


def test_text_chart_and_profiles_show_the_same_run_of_several() -> None:
    """The second run is nearest to the mean."""
    runs = [
        samples.run(
            fakes.zero(1),
            seconds,
            repeat=repeat,
            phase_seconds=PHASES,
            step_parts={**PHASES, "communication": communication},
            communication=(REDUCED,),
            profiles=(Profile(name="comms", files=(f"run{repeat}.csv",)),),
        )
        for repeat, (seconds, communication) in enumerate(((0.3, 0.9), (0.2, 0.1), (0.1, 0.4)))
    ]
    row = samples.row("ZeRO-1", *runs)
    details, (charted,) = tables_of_steps(row)
    assert (details["communication"], details["step ms"]) == ("50 %", "200.0")
    assert charted["communication"] == "50.0"
    assert samples.report(samples.comparison(row)).profiles == [("ZeRO-1: comms, rank 0", "run1.csv")]
