"""What a step's time is spent on, in words and in the chart of phases, everywhere it is reported."""

from __future__ import annotations

import pytest

from ds_bench.analysis.comparison import ComparisonRow
from ds_bench.analysis.row import Run
from ds_bench.analysis.row_difference import explain
from ds_bench.records.schema import CommunicationOperation, OffloadTimes, Profile
from ds_bench.report.comparison_charts import charts_of
from ds_bench.report.comparison_report import ComparisonReport
from ds_bench.report.profile_text import report_profiles
from ds_bench.report.row_explanation import explanation_lines
from ds_bench.report.table_columns import detail_tables
from tests.support import fakes
from tests.support import sample_reports as samples

SHARES = {"forward": 0.2, "backward": 0.3, "step": 0.5}
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


@pytest.fixture
def report() -> ComparisonReport:
    parts = {"forward": 0.02, "backward": 0.025, "step": 0.01, "communication": 0.005, "transfer": 0.04}
    swapping = samples.run(
        fakes.offload("nvme"),
        0.09,
        phase_seconds=PHASES,
        step_parts=parts,
        offload=SWAPPED,
        communication=(REDUCED,),
    )
    plain = samples.run(fakes.zero(0), 0.1, phase_seconds=PHASES)
    rows = (samples.row("ZeRO-0", plain), samples.row("NVMe", swapping))
    return samples.report(samples.comparison(*rows))


def step_table(of: ComparisonReport) -> dict[str, str]:
    """The only row of the table, by heading."""
    (table,) = [each for each in detail_tables(of.comparison) if each.title == ("Where the time of a step goes",)]
    (row,) = table.rows
    return dict(zip(table.headings, row, strict=True))


def phase_shares(of: ComparisonReport) -> dict[str, dict[str, str]]:
    """Label of a row → its cells in the table of the chart of phases, by heading."""
    (chart,) = [each for each in charts_of(of.comparison)[0] if each.name == "phases"]
    assert chart.table is not None
    return {row[0]: dict(zip(chart.table.headings[1:], row[1:], strict=True)) for row in chart.table.rows}


def test_parts_and_costs_of_a_step_are_a_row_of_a_table(report: ComparisonReport) -> None:
    """Parts of 100 ms; 1 MB in 5 ms; 2**27 B in 10 ms are 12.5 GB/s; the disk moves 2**28 B in 40 ms, of 60 ms."""
    assert step_table(report) == {
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


def test_the_chart_of_phases_has_every_part_that_a_row_has(report: ComparisonReport) -> None:
    assert [*phase_shares(report).values()] == [
        {"forward": "20.0", "backward": "30.0", "step": "50.0", "communication": "0", "transfer": "0", "sum": "100 ms"},
        {"forward": "20.0", "backward": "25.0", "step": "10.0", "communication": "5.00", "transfer": "40.0",
         "sum": "100 ms"},
    ]  # fmt: skip


def test_text_chart_and_profiles_show_the_same_run_of_several() -> None:
    def run(repeat: int, seconds: float, communication: float) -> Run:
        return samples.run(
            fakes.zero(1),
            seconds,
            repeat=repeat,
            phase_seconds=PHASES,
            step_parts={**PHASES, "communication": communication},
            communication=(REDUCED,),
            profiles=(Profile(name="comms", files=(f"run{repeat}.csv",)),),
        )

    runs = run(0, 0.3, 0.9), run(1, 0.2, 0.1), run(2, 0.1, 0.4)
    shown = samples.report(samples.comparison(samples.row("ZeRO-1", *runs)))
    assert (step_table(shown)["communication"], step_table(shown)["step ms"]) == ("50 %", "200.0")
    assert phase_shares(shown)["ZeRO-1"]["communication"] == "50.0"
    assert [text for _, text in report_profiles(shown)] == ["run1.csv"]


def test_explain_names_the_phases_that_the_chart_shows_of_rows_with_several_runs() -> None:
    def row(stage: int, label: str) -> ComparisonRow:
        """Of the second run, which is nearest to the mean, the phases take as long as a step; of the others longer."""
        times = (0.3 + stage / 10, 3.0), (0.2 + stage / 10, 1.0), (0.1 + stage / 10, 2.0)
        runs = (
            samples.run(
                fakes.zero(stage),
                seconds,
                repeat=repeat,
                phase_seconds={phase: factor * seconds * share for phase, share in SHARES.items()},
            )
            for repeat, (seconds, factor) in enumerate(times)
        )
        return samples.row(label, *runs)

    a, b = row(0, "a"), row(2, "b")
    shares = phase_shares(samples.report(samples.comparison(a, b)))
    assert [shares[label]["sum"] for label in "ab"] == ["200 ms", "400 ms"]
    lines = [line.split() for line in explanation_lines(explain(a, b), "t", 200) if "timed apart" in line]
    assert [(line[0].rstrip(","), line[3], line[5]) for line in lines] == [
        ("forward", "40.0", "80.0"),
        ("backward", "60.0", "120"),
        ("step", "100", "200"),
    ]


def test_explain_names_communication_where_both_rows_have_it() -> None:
    def row(label: str, seconds: float) -> ComparisonRow:
        return samples.row(label, samples.run(fakes.zero(1), 0.1, step_parts={**PHASES, "communication": seconds}))

    difference = explain(row("a", 0.005), row("b", 0.02))
    (line,) = [line for line in explanation_lines(difference, "t", 200) if "communication" in line]
    assert line.split()[3:7] == ["5.00", "ms", "20.0", "ms"]
    without = explain(row("a", 0.005), samples.row("c", samples.run(fakes.zero(2), 0.1)))
    assert "communication" not in "".join(explanation_lines(without, "t", 200))
