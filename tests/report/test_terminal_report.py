"""What ends a run: the rows compared with the recommended one, the answer, one thing to try, in any width."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from ds_bench.analysis.row import make_run
from ds_bench.config.caveat_texts import Caveat, CaveatKind
from ds_bench.config.spec import Configuration
from ds_bench.records import schema
from ds_bench.records.schema import Profile, TrialRecord
from ds_bench.report import terminal_report
from ds_bench.report.combined_table import summary_lines
from ds_bench.report.comparison_report import ComparisonReport, build_report
from ds_bench.report.html_report import render_page, render_tables
from ds_bench.report.terminal_report import render_markdown, report_lines, whole_report_lines
from ds_bench.system.invocation import OpenCommand
from tests.support import fakes

GB = fakes.GB
CARDS = fakes.placement(accelerator="cuda", num_gpus=2)
WORK = fakes.workload(model="meta-llama/Llama-2-7b-hf", batch_size=2, seq_length=2048, num_steps=20)
ZERO, OFFLOAD = fakes.zero, fakes.offload


def runs(
    configuration: Configuration, speed: float, gigabytes: float, *, count: int = 3, spread: float = 0.004, **more: Any
) -> list[TrialRecord]:
    """Runs on two 80 GB cards around that many tokens/s; ``spread``: half the relative range of the runs."""
    step = 2 * 2048 * 2 / speed
    values = {
        "gpu_peak_bytes": int(gigabytes * GB),
        "gpu_peak_reserved_bytes": int(gigabytes * GB),
        "gpu_device_used_bytes": 0,
    }
    return [
        fakes.success(
            fakes.trial(configuration, on=CARDS, of=WORK, repeat=repeat),
            step_seconds=[step * (1 + spread * (((repeat + configuration.stage) % 3) - 1))] * 20,
            **{**values, "host_peak_bytes": int(4.5 * GB), **more},
        )
        for repeat in range(count)
    ]


def failures(
    configuration: Configuration, status: str = schema.OOM, *, count: int = 3, **more: Any
) -> list[TrialRecord]:
    values: dict[str, Any] = {"phase": "init"}
    if status == schema.OOM:
        values |= {"requested_bytes": int(50.2 * GB), "free_bytes": int(3.6 * GB)}
    trials = [fakes.trial(configuration, on=CARDS, of=WORK, repeat=repeat) for repeat in range(count)]
    return [fakes.failure(trial, status, **{**values, **more}) for trial in trials]


def report(*rows: Sequence[TrialRecord], **more: Any) -> ComparisonReport:
    summaries = [make_run(record) for row in rows for record in row]
    return build_report(summaries, environments=[fakes.environment()], **more)


def clear_winner() -> ComparisonReport:
    rows = ((0, 11_400, 74), (1, 9_000, 38), (2, 8_000, 28), (3, 6_000, 18))
    return report(*(runs(ZERO(stage), speed, size) for stage, speed, size in rows))


def noise() -> ComparisonReport:
    rows = ((1, 19_000, 40), (2, 19_600, 39.5), (3, 18_400, 39))
    return report(*(runs(ZERO(stage), speed, size, spread=0.26) for stage, speed, size in rows))


def out_of_memory() -> ComparisonReport:
    return report(
        failures(ZERO(0)),
        runs(ZERO(2), 19_600, 77.8),
        runs(ZERO(3), 17_400, 72.7),
        runs(OFFLOAD("cpu_optimizer"), 5_470, 27.4, host_peak_bytes=59 * GB),
    )


def all_failed() -> ComparisonReport:
    return report(*(failures(ZERO(stage)) for stage in (0, 1, 2, 3)))


def interrupted() -> ComparisonReport:
    stopped = failures(ZERO(1), schema.INTERRUPTED, count=1, error="interrupted while it ran", phase="forward")
    return report(runs(ZERO(0), 11_400, 40, count=1), stopped)


def too_few_runs() -> ComparisonReport:
    return report(runs(ZERO(0), 1000, 8, count=1), runs(ZERO(3), 500, 8, count=1))


def some_runs_failed() -> ComparisonReport:
    """All rows share a caveat, and one of them is disqualified."""
    wrong = runs(ZERO(2), 1500, 8, losses=(None,) * 22, gpu_alloc_retries=1)
    rows = [runs(ZERO(stage), 1000 - stage, 8, count=3 - stage, gpu_alloc_retries=1) for stage in (0, 1)]
    return report(rows[0], rows[1] + failures(ZERO(1))[2:], wrong)


def cpu_ranks() -> ComparisonReport:
    return report(
        [fakes.success(fakes.trial(ZERO(stage), repeat=repeat)) for repeat in range(3) for stage in (0, 1)],
    )


def swapped() -> ComparisonReport:
    disk = runs(OFFLOAD("nvme"), 300, 8, nvme_stored_bytes=20 * GB, nvme_read_bytes=GB)
    return report(runs(OFFLOAD("none"), 1000, 40, gpu_alloc_retries=1), disk)


SITUATIONS = {
    each.__name__: each
    for each in (
        clear_winner, noise, out_of_memory, all_failed, interrupted, too_few_runs, some_runs_failed, cpu_ranks, swapped,
    )
}  # fmt: skip


def text_of(of: ComparisonReport, width: int = 80, unicode: bool = True) -> str:
    return "\n".join(line.text for line in report_lines(of, width, unicode)) + "\n"


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_end_of_a_run_at_80_columns(name: str, snapshot: SnapshotAssertion) -> None:
    text = text_of(SITUATIONS[name]())
    assert text == snapshot
    assert len(text.partition("\n\n")[0].splitlines()) <= 2  # and a line of paths
    assert len(text.splitlines()) <= 16


def test_what_makes_rows_of_a_script_differ_has_lines_of_its_own_and_explains_unsteady_steps() -> None:
    row = {"row": "ZeRO-1", "step": 2, "rank": 0, "own": 1.0, "theirs": 2.0, "difference": 0.1}
    evaluated = {"count": 1, "steps": 5, "apart": 2.0, "usual": 1.0}
    kinds = (CaveatKind.OTHER_DATA, CaveatKind.OTHER_FIRST_LOSS, CaveatKind.OTHER_LOSSES, CaveatKind.EVALUATED)
    shown = [Caveat(kind, row | evaluated) for kind in kinds]
    hidden = [Caveat(CaveatKind.UNSTABLE_STEPS), Caveat(CaveatKind.NOT_STEADY)]
    each = [make_run(replace(record, caveats=(*hidden, *shown))) for record in runs(ZERO(1), 1000, 8)]
    found = build_report(each, environments=[fakes.environment()])
    lines = text_of(found, 200)
    assert [caveat.text for caveat in shown if caveat.text not in lines] == []
    steps = {str(found.recommendation.try_next), *map(str, found.recommendation.next_steps)}
    assert CaveatKind.EVALUATED.remedy in steps
    assert not steps & {caveat.kind.remedy for caveat in hidden}


def test_the_whole_report(snapshot: SnapshotAssertion) -> None:
    of = out_of_memory()
    assert "\n".join(line.text for line in whole_report_lines(of, 120)) == snapshot(name="verbose")
    assert render_markdown(of) == snapshot(name="markdown")


def test_in_any_width_lines_fit_words_are_whole_and_nothing_is_repeated(subtests: pytest.Subtests) -> None:
    for width, name in product((60, 80, 100, 120, 200), SITUATIONS):
        with subtests.test(name, width=width):
            of = SITUATIONS[name]()
            for unicode in (True, False):
                text = text_of(of, width, unicode)
                assert max(map(len, text.splitlines())) <= width
                assert text.isascii() or unicode
                parts = [each.split("\n\n") for each in (text, text_of(of, 10_000, unicode))]
                # One of them has no notes: it ends with the table.
                answer, whole = (f"{first}\n{'' if name == 'clear_winner' else last}" for first, *_, last in parts)
                words = answer.split()
                assert set(words) - {"…", "..."} <= set(whole.split())
                sentences = [each for each in re.split(r"[.:;] |\n", " ".join(words)) if len(each.split()) > 3]
                assert len(sentences) == len(set(sentences))


def test_a_row_that_fills_the_card_on_purpose_has_no_warning_sign() -> None:
    given = report(runs(ZERO(0), 1000, 78))
    assert "98 % !" in text_of(given)
    row = given.comparison.rows[0]
    workload = replace(WORK, batch_policy="largest")
    filled = [replace(run, stored=replace(run.stored, trial=replace(run.trial, workload=workload))) for run in row.runs]
    text = text_of(replace(given, comparison=replace(given.comparison, rows=(replace(row, runs=tuple(filled)),))))
    assert "98 %" in text
    assert "!" not in text


def test_every_form_of_a_report_says_that_too_few_runs_are_provisional_and_names_the_command() -> None:
    """The short report with as many words as it needs, the long one, Markdown, the page, a notebook; a sweep's end."""
    command = "python zero_stage_comparison.py --resume results/runs/zero_20261123_093000 --repeats 3"
    rows = [runs(ZERO(stage), speed, 40, count=1) for stage, speed in ((0, 1000), (1, 1010))]
    of = report(*rows, resume=OpenCommand(command.removesuffix(" --repeats 3")))
    long = io.StringIO()
    terminal_report.print_report(of, long, verbose=True)
    shown = [
        text_of(of, 60),
        text_of(of, 200),
        long.getvalue(),
        render_markdown(of),
        render_page([of], ""),
        render_tables([of]),
    ]
    for text in shown:
        words = " ".join(text.split()).replace("\\", "")
        assert "After one run each, a lead below 15 % may be chance." in words
        assert f"Next: {command}" in words
    assert summary_lines([of, of]).count(f"  To decide: {command}") == 1


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_verbose_prints_the_full_table_and_a_terminal_gets_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    of = out_of_memory()
    stream = Terminal()
    terminal_report.print_report(of, stream)
    assert "\x1b[1m★ ZeRO-3" in stream.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()) == text_of(of, 160)
    stream = Terminal()
    terminal_report.print_report(of, stream, verbose=True)
    for word in ("Relative", "Recommendation", "Next: ", "✅ Success", "1. "):
        assert word in stream.getvalue()


def test_every_form_of_a_report_has_the_profiles_of_one_run_and_escapes_them() -> None:
    evil = "<b>aten::mm</b> ```\x1b[31m"
    profile = Profile(name="torch", files=("trials/00_zero1/profiles/torch_rank0.txt",), lines=("CPU ms/step", evil))
    of = report(runs(ZERO(1), 1000, 8, count=2, profiles=(profile,)), runs(ZERO(2), 900, 8))
    long = io.StringIO()
    terminal_report.print_report(of, long, verbose=True)
    forms = {"table": long.getvalue(), "markdown": render_markdown(of), "page": render_page([of], "")}
    for name, text in forms.items():
        assert text.count("ZeRO-1: torch, rank 0") == 1, name
        assert text.count(profile.files[0]) == 2, name  # of two ranks
        assert "\x1b" not in text, name
    assert "<b>aten" not in forms["page"]
    assert f"````text\nCPU ms/step\n{evil[:-5]}" in forms["markdown"]  # longer than any fence in the text
