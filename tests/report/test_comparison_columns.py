"""The cells of a comparison's columns: their texts, what they are sorted by, and which columns are shown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from syrupy.assertion import SnapshotAssertion

from ds_bench.analysis.comparison import ComparisonRow
from ds_bench.analysis.intervals import RatioInterval
from ds_bench.analysis.load_results import flat_run
from ds_bench.analysis.row import make_run
from ds_bench.config.caveat_texts import Caveat, CaveatKind
from ds_bench.records.schema import CommunicationOperation, OffloadTimes, Profile
from ds_bench.report.comparison_columns import (
    NOT_TESTED,
    TABLE_COLUMNS,
    detail_tables,
    failure_text,
    measured_columns,
    row_status,
    short_columns,
)
from ds_bench.units import MISSING
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
    host_peak_bytes=3 * GB,
    predicted_over_measured=0.98,
    caveats=(Caveat(CaveatKind.OWN_BATCHES, {"seq_length": 512}),),
)


def cells(row: ComparisonRow) -> dict[str, tuple[str, float | None]]:
    return {column.heading: (column.cell(row), column.value(row)) for column in TABLE_COLUMNS}


def test_the_text_and_the_sort_key_of_every_column(snapshot: SnapshotAssertion) -> None:
    assert cells(MEASURED) == snapshot


def test_a_failed_row_has_dashes_that_sort_last_in_every_column() -> None:
    assert set(cells(samples.row("ZeRO-1", samples.failed(fakes.zero(1)))).values()) == {(MISSING, None)}


def test_what_is_not_tested_or_is_the_baseline_itself_sorts_last() -> None:
    shown = cells(replace(MEASURED, interval=None, ratio_interval=None))
    assert shown["95 % interval"] == shown["Tokens/s, 95 %"] == (NOT_TESTED, None)
    assert cells(samples.comparison(MEASURED).rows[0])["95 % interval"] == (MISSING, None)


def test_the_page_shows_throughput_and_every_column_that_some_row_has_a_value_for() -> None:
    failed = samples.row("ZeRO-0", samples.failed(fakes.zero(0)))
    assert [column.heading for column in measured_columns(samples.comparison(failed))] == ["Tokens/s"]
    both = replace(samples.comparison(failed), rows=(failed, MEASURED), baseline=None)
    assert measured_columns(both) == TABLE_COLUMNS


def test_a_status_is_that_of_a_failed_run_with_how_many_failed(subtests: pytest.Subtests) -> None:
    for good, text in (([1], "! Success"), ([0], "! OOM"), ([0, 0], "! OOM"), ([1, 0, 1], "! OOM (1 of 3)")):
        with subtests.test(text):
            strategy = fakes.zero(1)
            runs = (samples.run(strategy, 0.1) if each else samples.failed(strategy) for each in good)
            assert row_status(samples.row("ZeRO-1", *runs), lambda status: f"! {status}") == text


ENDINGS = {
    # An exception: its class is the status, and the error names it.
    "OSError in step: No space": ("OSError", "OSError in step: No space"),
    "SystemExit in step: 3": ("SystemExit", "SystemExit in step: 3"),
    # Its class has the name of a status.
    "Crashed in the optimizer step: Timeout in step: no": ("Crashed", "Timeout in step: no"),
    "OOM (disk) in the optimizer step: OSError in step: No space": ("OOM (disk)", "OSError in step: No space"),
    # Only begins like an exception.
    "Killed in the optimizer step: Killed by an admin": ("Killed", "Killed by an admin"),
    "Interrupted in the optimizer step": ("Interrupted", "interrupted while it ran"),
    "Unsupported in the optimizer step": ("Unsupported", None),
}


def test_how_a_row_failed_names_its_status_and_phase_once(subtests: pytest.Subtests) -> None:
    for text, (status, error) in ENDINGS.items():
        record = fakes.failure(status=status, error=error, phase="step")
        with subtests.test(text):
            assert failure_text(record) == failure_text(make_run(record)) == text


def test_a_flat_row_shows_an_exception_as_its_record_does() -> None:
    for error in ("OSError in step: No space", "SystemExit in step: 3"):
        run = make_run(fakes.failure(status=error.split()[0], error=error, phase="step"))
        assert failure_text(flat_run(run.row)) == failure_text(run) == error


def test_a_script_that_exits_with_a_code_raised_no_exception() -> None:
    of = fakes.trial(of=fakes.with_another(fakes.workload(), "script"))
    error = "the script ended after 3 of 7 steps, with exit code 2"
    record = fakes.failure(of, "SystemExit", error=error, phase="")
    assert failure_text(record) == failure_text(make_run(record)) == f"SystemExit: {error}"


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


def step_rows(*rows: ComparisonRow) -> list[dict[str, str]]:
    """The rows of the table of steps; cells by heading."""
    tables = detail_tables(samples.comparison(*rows))
    (table,) = [each for each in tables if each.title == ("Where the time of a step goes",)]
    return [dict(zip(table.headings, row, strict=True)) for row in table.rows]


def test_parts_and_costs_of_a_step_are_in_a_table(snapshot: SnapshotAssertion) -> None:
    """Parts of 100 ms; 1 MB in 5 ms; 2**27 B in 10 ms are 12.5 GB/s; the disk moves 2**28 B in 40 ms, of 60 ms."""
    parts = {"forward": 0.02, "backward": 0.025, "step": 0.01, "communication": 0.005, "transfer": 0.04}
    costs = {"phase_seconds": PHASES, "step_parts": parts, "offload": SWAPPED, "communication": (REDUCED,)}
    plain = samples.run(fakes.zero(0), 0.1, phase_seconds=PHASES)
    swapping = samples.run(fakes.offload("nvme"), 0.09, **costs)
    assert step_rows(samples.row("ZeRO-0", plain), samples.row("NVMe", swapping)) == snapshot


def test_table_and_profiles_show_the_same_run_of_several() -> None:
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
    (details,) = step_rows(row)
    assert (details["communication"], details["step ms"]) == ("50 %", "200.0")
    assert samples.report(samples.comparison(row)).profiles == [("ZeRO-1: comms, rank 0", "run1.csv")]


@pytest.mark.parametrize(
    ("interval", "shown"),
    [((4900.0, 5100.0), "±2 %"), ((1000.0, 16_000.0), "×÷ 4"), ((0.0, 1.0), MISSING), (None, MISSING)],
)
def test_an_interval_is_a_percentage_or_a_factor(interval: tuple[float, float] | None, shown: str) -> None:
    report = samples.report(samples.comparison(replace(MEASURED, interval=interval)))
    (column,) = (each for each in short_columns(report) if each.heading == "95 % CI")
    assert column.cell(report.comparison.rows[0]) == shown
