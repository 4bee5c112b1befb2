"""What a step's time is spent on, in words and in the chart of phases, everywhere it is reported."""

from __future__ import annotations

import io

import pytest

from ds_bench.analysis.comparison import ComparisonRow
from ds_bench.analysis.row_difference import explain
from ds_bench.analysis.summary import TrialSummary
from ds_bench.records.schema import CommunicationOperation, OffloadTimes, Profile
from ds_bench.report.chart_data import StackChart, charts_of
from ds_bench.report.comparison_report import ComparisonReport
from ds_bench.report.html_report import render_page
from ds_bench.report.markdown import render_markdown
from ds_bench.report.profile_text import report_profiles
from ds_bench.report.row_explanation import explanation_lines
from ds_bench.report.step_time import HEADING, step_time_texts
from ds_bench.report.table import print_report
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


def test_a_row_of_which_parts_are_known_is_told(report: ComparisonReport) -> None:
    assert step_time_texts(report) == [
        (
            "NVMe",
            "forward 20 %, backward 25 %, optimizer step 10 %, communication 5 %, transfer 40 % of a synchronised step "
            "of 100.0 ms; communication takes 5.00 ms for 1.00 MB, 1.00 ms of it waiting for other ranks; transfers "
            "take 40.0 ms; CPU Adam moves 12.50 GB/s; the disk moves 6.25 GB/s where 4.17 GB/s are needed: not "
            "disk-bound.",
        )
    ]


def test_flops_of_a_partly_trained_model_have_no_ratio_and_the_text_says_why() -> None:
    """Three times the forward pass is more than forward and backward take without gradients of frozen weights."""
    for trained, said in ((100, "counts 1.50x the FLOPs of the formula"), (5, "frozen parameters have no gradients")):
        facts = {"parameter_count": 100, "trainable_parameter_count": trained, "forward_backward_flops": 10_240}
        run = samples.run(fakes.zero(1), 0.1, profiled_forward_flops=5120.0, **facts)
        ((_, text),) = step_time_texts(samples.report(samples.comparison(samples.row("ZeRO-1", run))))
        assert said in text
        assert ("counts" in text) == (run.costs.profiled_flops_per_token is not None) == (trained == 100)


def test_the_texts_are_in_every_form_of_the_report(report: ComparisonReport) -> None:
    stream = io.StringIO()
    print_report(report, stream)
    for text in (stream.getvalue(), render_markdown(report), render_page([report], generated="now")):
        assert HEADING in text
        assert "not disk-bound" in " ".join(text.split())
    silent = samples.report(samples.zero_comparison())
    assert HEADING not in render_markdown(silent)


def test_the_chart_of_phases_has_every_part_that_a_row_has(report: ComparisonReport) -> None:
    (chart,) = [each for each in charts_of(report.comparison, None).charts if each.name == "phases"]
    assert isinstance(chart, StackChart)
    assert chart.categories == ("forward", "backward", "step", "communication", "transfer")
    parts = {stack.label: stack.parts for stack in chart.stacks}
    assert parts["NVMe"] == pytest.approx((20, 25, 10, 5, 40))
    assert parts["ZeRO-0"] == pytest.approx((20, 30, 50, 0, 0))


def test_text_chart_and_profiles_show_the_same_run_of_several() -> None:
    def run(repeat: int, seconds: float, communication: float) -> TrialSummary:
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
    ((_, text),) = step_time_texts(shown)
    assert "communication 50 % of a synchronised step of 200.0 ms" in text
    (chart,) = [each for each in charts_of(shown.comparison, None).charts if each.name == "phases"]
    assert isinstance(chart, StackChart)
    assert dict(zip(chart.categories, chart.stacks[0].parts, strict=True))["communication"] == pytest.approx(50)
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
    (chart,) = [each for each in charts_of(samples.comparison(a, b), None).charts if each.name == "phases"]
    assert chart.note.endswith("Of several runs the one nearest to the row's mean is shown.")
    assert [(cells[0], *cells[-1:]) for cells in chart.table] == [("a", "200"), ("b", "400")]  # the sums, ms
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
