"""The table that ends every run: dashes for what was not measured, and text that any terminal can print."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.analysis import comparison
from ds_bench.analysis.comparison import Comparison
from ds_bench.analysis.flat_rows import flat_rows
from ds_bench.analysis.summary import TrialSummary, summarise
from ds_bench.config.caveats import CaveatKind
from ds_bench.records import schema
from ds_bench.records.json_files import json_text
from ds_bench.records.schema import TrialRecord
from ds_bench.report import table as tables
from ds_bench.report.comparison_report import ComparisonReport
from ds_bench.report.markdown import render_markdown
from ds_bench.system import terminal
from tests.support import fakes
from tests.support import sample_reports as samples

CUDA = fakes.placement(accelerator="cuda")
GB = 2**30
COLUMN = {name: number for number, name in enumerate(tables.HEADINGS)}


def gpu(stage: int, repeat: int = 0, **changes: Any) -> Any:
    return fakes.trial(fakes.zero(stage), on=CUDA, repeat=repeat, **changes)


def summaries(*records: TrialRecord) -> list[TrialSummary]:
    return [summarise(each, None, None) for each in records]


def compared(*records: TrialRecord, relative_to: str | None = None) -> Comparison:
    return comparison.compare(summaries(*records), relative_to)


def report(comparison: Comparison, title: str = "t", notes: tuple[str, ...] = ()) -> ComparisonReport:
    return samples.report(comparison, title, notes=notes, environments=(), commands=())


def cells(*records: TrialRecord) -> list[dict[str, str]]:
    """The rows of the table, each by heading."""
    rows = tables.table_rows(report(compared(*records)))
    return [dict(zip(tables.HEADINGS, row.cells, strict=True)) for row in rows]


def printed(*records: TrialRecord, encoding: str = "utf-8", notes: tuple[str, ...] = ()) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    tables.print_table(report(compared(*records), "a title · tiny", notes), stream)
    stream.flush()
    raw: bytes = stream.buffer.getvalue()  # type: ignore[attr-defined]
    return raw.decode(encoding)


# ------------------------------------------------------------------ the cells


def test_a_line_by_hand() -> None:
    (line,) = cells(fakes.success(gpu(2), step_seconds=[0.1] * 9 + [0.11]))
    assert line["Strategy"] == "ZeRO-2"
    assert line["Status"] == "✅ Success"
    assert line["Step ms"] == "101.0"
    assert line["± ms"] == "3.16"
    assert line["Tokens/s"] == "5,069"
    assert line["Relative"] == "1.00x"
    assert line["GPU peak GB"] == "8.00"
    assert line["of card"] == "15 %"
    assert line["Tok/s/GB"] == "634"  # 5,069 by 8 GB
    assert line["CPU GB"] == "2.00"


def test_a_failed_row_shows_its_class_and_dashes(subtests: pytest.Subtests) -> None:
    for status, shown in (("OOM", "❌ OOM"), ("RuntimeError", "❌ RuntimeError"), ("Timeout", "❌ Timeout")):
        with subtests.test(status):
            _, line = cells(fakes.success(gpu(0)), fakes.failure(gpu(1), status))
            assert line["Status"] == shown
            measured = set(tables.HEADINGS) - {"Strategy", "Status", "Notes"}
            assert {line[name] for name in measured} == {"—"}


def test_a_cpu_run_shows_no_gpu_memory() -> None:
    (line,) = cells(fakes.success())
    assert (line["GPU peak GB"], line["of card"]) == ("—", "—")
    assert line["CPU GB"] == "2.00"


def test_every_row_is_relative_to_the_first() -> None:
    lines = cells(*(fakes.success(gpu(s), step_seconds=[0.1 * (s + 1)] * 10) for s in (0, 1, 3)))
    assert [line["Relative"] for line in lines] == ["1.00x", "0.50x", "0.25x"]


def test_where_the_first_row_failed_the_others_are_relative_to_the_first_good_one() -> None:
    lines = cells(fakes.failure(gpu(0)), fakes.success(gpu(1)), fakes.success(gpu(2)))
    assert [line["Relative"] for line in lines] == ["—", "1.00x", "1.00x"]


def test_the_order_is_that_of_the_run() -> None:
    assert [line["Strategy"] for line in cells(*(fakes.success(gpu(s)) for s in (3, 0, 2)))] == [
        "ZeRO-3", "ZeRO-0", "ZeRO-2",
    ]  # fmt: skip


def test_no_rows_are_no_lines() -> None:
    assert cells() == []


# ------------------------------------------------------------------ repeats


def test_repeats_of_a_strategy_are_one_line_with_their_median_and_the_spread_between_runs() -> None:
    runs = [fakes.success(gpu(1, repeat), step_seconds=[s] * 10) for repeat, s in enumerate((0.1, 0.2, 0.4))]
    (line,) = cells(*runs)
    assert line["Step ms"] == "200.0"
    assert line["± ms"] == "152.8"  # of 100, 200, 400; inside each run there is none


def test_interleaved_repeats_find_their_line() -> None:
    lines = cells(*(fakes.success(gpu(s, r), step_seconds=[0.1 * (s + 1)] * 10) for r in (0, 1) for s in (0, 1)))
    assert [line["Step ms"] for line in lines] == ["100.0", "200.0"]


def test_a_strategy_that_failed_once_says_how_often_and_keeps_its_numbers() -> None:
    (line,) = cells(fakes.success(gpu(1, 0)), fakes.failure(gpu(1, 1)), fakes.success(gpu(1, 2)))
    assert line["Status"] == "❌ OOM (1 of 3)"
    assert line["Step ms"] == "100.0"


def test_a_strategy_that_failed_always_does_not_count_its_failures() -> None:
    (line,) = cells(fakes.failure(gpu(1, 0)), fakes.failure(gpu(1, 1)))
    assert line["Status"] == "❌ OOM"


def test_rows_of_another_workload_are_never_mixed_into_a_median_nor_given_a_ratio() -> None:
    """A run resumed with another --batch-size holds both."""
    small, large = fakes.workload(batch_size=1), fakes.workload(batch_size=64)
    lines = cells(
        fakes.success(gpu(1, of=small), step_seconds=[0.1] * 10),
        fakes.success(gpu(1, of=large), step_seconds=[0.4] * 10),
    )
    assert [line["Step ms"] for line in lines] == ["100.0", "400.0"]
    assert [line["Relative"] for line in lines] == ["1.00x", "—"]


def test_rows_of_another_configuration_are_lines_of_their_own() -> None:
    plain = gpu(1)
    edited = replace(plain, ds_config={**plain.ds_config, "gradient_clipping": 0.5})
    lines = cells(fakes.success(plain), fakes.success(edited, step_seconds=[0.2] * 10))
    assert [line["Relative"] for line in lines] == ["1.00x", "0.50x"]


# ------------------------------------------------------------------ the interval


def repeated(stage: int, *seconds: float) -> list[TrialRecord]:
    return [fakes.success(gpu(stage, repeat), step_seconds=[each] * 10) for repeat, each in enumerate(seconds)]


def test_the_interval_of_a_ratio_by_hand() -> None:
    """Half the speed in three rounds, the one getting slower as the other gets faster: there is no common trend.

    ln 0.095, ln 0.1, ln 0.105 deviate by 0.050049 from their mean, as the logs of twice the times do. Squares of both
    rows 4 × 0.050049² = 0.0100196, of 6 - 2 - 1 = 3 degrees of freedom: standard error of the difference
    √(0.0100196 / 3 × 2 / 3) = 0.047187, t of 3 degrees 3.182446, margin 0.150171: 0.5 × 0.86056 = 0.430 to
    0.5 × 1.16203 = 0.581.
    """
    lines = cells(*repeated(0, 0.095, 0.1, 0.105), *repeated(1, 0.21, 0.2, 0.19))
    assert [line["95 % interval"] for line in lines] == ["—", "[0.43, 0.58]"]


def test_fewer_than_three_runs_are_called_not_tested_and_a_failed_row_is_not() -> None:
    lines = cells(fakes.success(gpu(0)), fakes.success(gpu(1)), fakes.failure(gpu(2)))
    assert [line["95 % interval"] for line in lines] == ["—", "not tested", "—"]


def test_the_row_that_others_are_held_against_is_the_one_asked_for() -> None:
    found = compared(fakes.success(gpu(0)), fakes.success(gpu(1)), relative_to="zero1")
    column = COLUMN["95 % interval"]
    assert [row.cells[column] for row in tables.table_rows(report(found))] == ["not tested", "—"]


# ------------------------------------------------------------------ notes


def test_a_note_says_what_to_do_next() -> None:
    text = printed(fakes.success(gpu(1), gpu_alloc_retries=2))
    assert "the allocator retried" in text
    assert str(CaveatKind.ALLOCATOR_RETRIED.remedy) in " ".join(text.split())


def test_a_row_that_does_not_compare_says_why_it_has_no_ratio() -> None:
    other = fakes.success(gpu(2), torch_version="2.11.0")
    assert "1. no ratio, as rows differ: torch 2.13.0 against 2.11.0" in printed(fakes.success(gpu(1)), other)
    assert [line["Notes"] for line in cells(fakes.success(gpu(1)), other)] == ["", "1"]


def test_what_holds_for_every_row_is_starred_with_what_to_do_and_said_once() -> None:
    twin = "CPU accelerator: these figures say nothing about GPUs"
    text = printed(fakes.success(), notes=(twin, "cold launch"))
    assert text.count(twin) == 1
    assert f"* {twin}; {CaveatKind.CPU_ACCELERATOR.remedy}" in text
    assert "* cold launch" in text
    assert render_markdown(report(compared(fakes.success()), notes=(twin,))).count(twin) == 1


def test_a_caveat_is_listed_once_and_numbered_in_every_row_that_has_it() -> None:
    shared, own = "it is warm in here", "and loud"
    found = [
        replace(fakes.success(gpu(0)), caveats=(shared,)),
        fakes.success(gpu(1)),
        replace(fakes.success(gpu(2)), caveats=(shared, own)),
    ]
    assert tables.numbered_notes(report(compared(*found))) == [shared, own]
    assert [line["Notes"] for line in cells(*found)] == ["1", "", "1 2"]


def test_the_cause_of_a_failure_is_a_note_with_its_log() -> None:
    text = printed(fakes.failure(gpu(1)))
    assert "1. OOM in backward: asked 2.00 GB; phase backward; rank 0; log /run/rank0.log" in text


def test_notes_of_the_run_are_below_the_table() -> None:
    assert "* the host has 3 GB swapped out" in printed(fakes.success(), notes=("the host has 3 GB swapped out",))


# ------------------------------------------------------------------ on a terminal that prints ASCII only


MIXED = (
    fakes.success(fakes.trial(fakes.offload("cpu_full"))),
    fakes.failure(fakes.trial(fakes.zero(1))),
    fakes.failure(fakes.trial(fakes.zero(2)), schema.SKIPPED, error="größer als 4 × 8 …"),
    fakes.failure(fakes.trial(fakes.zero(3)), schema.INTERRUPTED),
)


def test_a_stream_that_prints_everything_gets_the_signs() -> None:
    text = printed(*MIXED, notes=("4 × 8 → out …",))
    assert all(sign in text for sign in ("✅ Success", "❌ OOM", "⏭️ Skipped", "⏹️ Interrupted", "—", "→"))


def test_a_stream_that_does_not_gets_ascii_with_the_same_words(subtests: pytest.Subtests) -> None:
    for encoding in ("ascii", "latin-1", "cp1252"):
        with subtests.test(encoding):
            text = printed(*MIXED, encoding=encoding, notes=("4 × 8 → out …",))
            assert text.isascii()
            assert all(
                word in text for word in ("[ok] Success", "[failed] OOM", "[skipped] Skipped", "[stopped] Interrupted")
            )
            assert "ZeRO-3 + CPU optimizer and parameters" in text
            assert "4 x 8 -> out ..." in text
            assert re.search(r"\s-\s", text)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_can_be_made_ascii(text: str) -> None:
    assert terminal.to_ascii(text).isascii()


NASTY = "\x1b[31mred\x07\x9b2J\u202egnp.exe\ud800\r\n\u2028end"


def test_no_text_of_a_user_or_a_model_steers_the_terminal() -> None:
    entry = fakes.failure(
        fakes.trial(replace(fakes.zero(1), label=NASTY), on=CUDA), status="Oops\x1b[2J", details=NASTY
    )
    entry = replace(entry, caveats=(f"note {NASTY}",))
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    found = compared(entry)
    tables.print_table(report(found, NASTY, (f"run {NASTY}",)), stream)
    stream.flush()
    for text in (
        stream.buffer.getvalue().decode("utf-8"),  # type: ignore[attr-defined]
        render_markdown(report(found, NASTY, (NASTY,))),
    ):
        assert "x1b[31mred" in text  # visible, not swallowed
        assert not set(NASTY.replace("[31mred", "").replace("gnp.exe", "").replace("2J", "").replace("end", "")) & (
            set(text) - {"\n"}
        )


@settings(deadline=None, max_examples=50)
@given(st.text(alphabet=st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp", "Lu"]), max_size=12))
def test_whatever_the_label_a_row_is_one_line_that_can_be_written(label: str) -> None:
    trial = fakes.trial(replace(fakes.zero(1), label=f"a{label}"), on=CUDA)
    text = printed(fakes.success(trial))
    assert sum("✅ Success" in line for line in text.split("\n")) == 1


def test_a_stream_without_an_encoding_is_taken_for_ascii() -> None:
    assert not terminal.can_encode("✅", io.StringIO())
    assert terminal.can_encode("ok", io.StringIO())


def test_brackets_in_a_message_are_not_taken_for_colours() -> None:
    text = printed(fakes.failure(gpu(1), details="[red]expected [1, 2] at [/red] [link=x]"))
    assert "[red]expected [1, 2] at [/red] [link=x]" in text


def test_no_column_is_shown_that_nobody_measured() -> None:
    for heading in ("GPU peak", "Tok/s/GB"):
        assert heading not in printed(fakes.success())
        assert heading in printed(fakes.success(gpu(1)))
        assert heading not in render_markdown(report(compared(fakes.success())))
        assert heading in render_markdown(report(compared(fakes.success(gpu(1)))))


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def on_terminal(found: Comparison, columns: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    tables.print_table(report(found), stream)
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())


def usual(*strategies: Any) -> Comparison:
    """Three runs each on 80 GB cards, with predictions, of steps of more than a second."""
    full = {
        "gpu_peak_bytes": int(58.2 * GB),
        "gpu_peak_reserved_bytes": 65 * GB,
        "gpu_device_used_bytes": 0,
        "host_peak_bytes": 125 * GB,
    }
    found = []
    for strategy in strategies:
        for repeat in range(3):
            entry = fakes.success(
                fakes.trial(strategy, on=CUDA, repeat=repeat), step_seconds=[1.234 + 0.01 * repeat] * 10, **full
            )
            found.append(replace(summarise(entry, None, None), predicted_over_measured=0.98))
    return comparison.compare(found)


ZERO = tuple(fakes.zero(stage) for stage in range(4))
OFFLOAD = tuple(map(fakes.offload, ("none", "cpu_optimizer", "cpu_full", "nvme")))


@pytest.mark.parametrize("strategies", [ZERO, OFFLOAD], ids=["zero", "offload"])
@pytest.mark.parametrize("columns", [120, 160])
def test_a_usual_result_is_whole_on_a_terminal_of_120_columns(
    strategies: Any, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs, a prediction, every column: nothing is cut, nothing left out."""
    text = on_terminal(usual(*strategies), columns, monkeypatch)
    table = re.split(r"\n  (?:1\.|\*) ", text)[0]
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= columns
    for word in ("Tok/s/GB", "Predicted", "interval", "GPU peak", "1,244.0", "125.00", "0.98x", "81 %"):
        assert word in table
    assert "no room" not in text


def test_a_narrow_terminal_does_without_the_extras_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_terminal(usual(*ZERO), 80, monkeypatch)
    table = text.split("\n  * ")[0]
    assert "…" not in table
    assert all(word in table for word in ("ZeRO-3", "✅ Success", "Relative", "GPU peak", "81 %", "125.00"))
    assert "Predicted" not in table
    assert "no room for 95 % interval, Tok/s/GB, Predicted: a wider terminal shows them" in text


def test_a_status_is_never_cut_however_narrow_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(fakes.success(gpu(1)), fakes.failure(gpu(2), "RuntimeError"))
    for columns in (20, 40, 60, 80):
        words = " ".join(on_terminal(found, columns, monkeypatch).split())
        for word in ("RuntimeError", "5,120", "ZeRO-2"):
            assert word in words


# ------------------------------------------------------------------ thousands of rows


def many(count: int) -> Comparison:
    trial = gpu(1)
    return compared(
        *(
            fakes.success(replace(trial, ds_config={**trial.ds_config, "gradient_clipping": number}))
            for number in range(count)
        )
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_more_rows_than_are_drawn_are_aligned_and_hold_the_same_words(encoding: str) -> None:
    found = many(501)
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    tables.print_table(report(found), stream)
    stream.flush()
    body = stream.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]
    assert body[0] == "t"
    assert body[1].split()[:2] == ["Strategy", "Status"]
    assert len({line.index("5,120") for line in body[2:503]}) == 1
    shown = [" ".join(line.split()) for line in body[2:503]]
    ok = "✅ Success" if encoding == "utf-8" else "[ok] Success"
    assert shown[500].startswith(
        f"ZeRO-1 (gradient_clipping 500) {ok} 100.0 0.00 5,120 1.00x not tested 8.00 15 % 640 2.00"
    )


# ------------------------------------------------------------------ Markdown


def test_no_label_becomes_a_link_or_a_picture_in_an_issue() -> None:
    trial = fakes.trial(replace(fakes.zero(1), label="![x](http://example.org/x.png)"), on=CUDA)
    assert "](" not in render_markdown(report(compared(fakes.success(trial))))


def table_rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def columns(line: str) -> int:
    """Cells as Markdown counts them: pipes that no backslash escapes, an escaped backslash escaping nothing."""
    return len(re.findall(r"\|", re.sub(r"\\.", "", line))) - 1


def test_a_markdown_table_has_a_heading_a_rule_and_a_line_per_row() -> None:
    text = render_markdown(report(compared(fakes.success(gpu(0)), fakes.failure(gpu(1))), notes=("run note",)))
    assert len(table_rows(text)) == 4
    assert {columns(line) for line in table_rows(text)} == {11}  # nobody has an interval, nobody was predicted
    assert "| ZeRO-1 | ❌ OOM | — |" in text
    assert "- run note" in text


@settings(deadline=None)
@given(label=st.text(alphabet="ab|<\\\n\r\x0b\u2028`*", max_size=12))
def test_no_label_can_add_a_cell_or_a_line_to_a_markdown_table(label: str) -> None:
    trial = fakes.trial(replace(fakes.zero(1), label=label), on=CUDA)
    text = render_markdown(report(compared(fakes.success(trial))))
    assert {columns(line) for line in table_rows(text)} == {10}
    plain = render_markdown(report(compared(fakes.success(fakes.trial(fakes.zero(1), on=CUDA)))))
    assert len(text.splitlines()) == len(plain.splitlines())
    assert "<" not in text


def test_a_note_with_a_pipe_or_a_tag_is_escaped() -> None:
    text = render_markdown(report(compared(fakes.failure(gpu(1), details="<script>|x")), "a|b", ("<b>",)))
    assert "1. &lt;script>\\|x" in text
    assert "- &lt;b>" in text
    assert "### a\\|b" in text


# ------------------------------------------------------------------ JSON


def test_json_on_the_screen_is_what_the_file_holds() -> None:
    rows = flat_rows(summaries(*MIXED))
    assert json.loads(json_text(rows)) == rows


def test_json_on_the_screen_refuses_a_number_that_is_none() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_text([{"a": float("nan")}])
