"""The cells of a comparison's columns: their texts, what they are sorted by, and which columns are shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_bench.analysis import flops
from ds_bench.analysis.comparison import ComparisonRow
from ds_bench.analysis.intervals import RatioInterval
from ds_bench.config.caveats import Caveat, CaveatKind
from ds_bench.report.table_columns import NOT_TESTED, TABLE_COLUMNS, measured_columns, row_status
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
    comparison = samples.comparison(row)
    return {column.heading: column.cell(row, replace(comparison, baseline=None)) for column in TABLE_COLUMNS}


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
    against = [column for column in TABLE_COLUMNS if column.against_baseline]
    assert [column.heading for column in against] == ["95 % interval", "GPU less baseline"]
    assert {column.cell(comparison.rows[0], comparison) for column in against} == {(MISSING, None)}


def test_the_page_shows_throughput_and_every_column_that_some_row_has_a_value_for() -> None:
    failed = samples.row("ZeRO-0", samples.failed(fakes.zero(0)))
    assert [column.heading for column in measured_columns(samples.comparison(failed))] == ["Tokens/s"]
    assert measured_columns(replace(samples.comparison(failed), rows=(failed, MEASURED))) == TABLE_COLUMNS


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
