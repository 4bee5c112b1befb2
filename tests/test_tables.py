"""The table that ends every run: dashes for what was not measured, and text that any terminal can print."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench import record, tables
from ds_bench.analysis import Summary, summarise
from ds_bench.record import TrialRecord
from ds_bench.rows import flat_rows

CUDA = fakes.placement(accelerator="cuda")
GB = 2**30
COLUMN = {name: number for number, name in enumerate(tables.HEADINGS)}


def gpu(stage: int, repeat: int = 0, **changes: Any) -> Any:
    return fakes.trial(fakes.zero(stage), on=CUDA, repeat=repeat, **changes)


def summaries(*records: TrialRecord) -> list[Summary]:
    return [summarise(each, None, None) for each in records]


def cells(*records: TrialRecord) -> list[dict[str, str]]:
    """The lines of the table, each by heading."""
    found = summaries(*records)
    return [
        dict(zip(tables.HEADINGS, line.cells, strict=True)) for line in tables.lines(found, tables.all_notes(found))
    ]


def printed(*records: TrialRecord, encoding: str = "utf-8", notes: tuple[str, ...] = ()) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    tables.print_table("a title · tiny", summaries(*records), notes, stream)
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
    assert line["of card"] == "12 %"
    assert line["CPU GB"] == "2.00"


@pytest.mark.parametrize(
    ("status", "shown"), [("OOM", "❌ OOM"), ("RuntimeError", "❌ RuntimeError"), ("Timeout", "❌ Timeout")]
)
def test_a_failed_row_shows_its_class_and_dashes(status: str, shown: str) -> None:
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


def test_where_the_first_row_failed_there_is_nothing_to_be_relative_to() -> None:
    lines = cells(fakes.failure(gpu(0)), fakes.success(gpu(1)), fakes.success(gpu(2)))
    assert [line["Relative"] for line in lines] == ["—", "—", "—"]


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


# ------------------------------------------------------------------ notes


def test_a_caveat_is_listed_once_and_numbered_in_every_row_that_has_it() -> None:
    shared, own = "it is warm in here", "and loud"
    found = [
        replace(fakes.success(gpu(0)), caveats=(shared,)),
        fakes.success(gpu(1)),
        replace(fakes.success(gpu(2)), caveats=(shared, own)),
    ]
    assert tables.all_notes(summaries(*found)) == [shared, own]
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
    fakes.failure(fakes.trial(fakes.zero(2)), record.SKIPPED, error="größer als 4 × 8 …"),
    fakes.failure(fakes.trial(fakes.zero(3)), record.INTERRUPTED),
)


def test_a_stream_that_prints_everything_gets_the_signs() -> None:
    text = printed(*MIXED)
    assert all(sign in text for sign in ("✅ Success", "❌ OOM", "⏭️ Skipped", "⏹️ Interrupted", "—", "→"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stream_that_does_not_gets_ascii_with_the_same_words(encoding: str) -> None:
    text = printed(*MIXED, encoding=encoding)
    assert text.isascii()
    assert all(word in text for word in ("[ok] Success", "[failed] OOM", "[skipped] Skipped", "[stopped] Interrupted"))
    assert "optimizer + parameters -> CPU" in text
    assert re.search(r"\s-\s", text)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_can_be_made_ascii(text: str) -> None:
    assert tables.ascii_only(text).isascii()


def test_a_stream_without_an_encoding_is_taken_for_ascii() -> None:
    assert not tables.prints("✅", io.StringIO())
    assert tables.prints("ok", io.StringIO())


def test_brackets_in_a_message_are_not_taken_for_colours() -> None:
    text = printed(fakes.failure(gpu(1), details="[red]expected [1, 2] at [/red] [link=x]"))
    assert "[red]expected [1, 2] at [/red] [link=x]" in text


def test_no_column_is_shown_that_nobody_measured() -> None:
    assert "GPU peak" not in printed(fakes.success())
    assert "GPU peak" in printed(fakes.success(gpu(1)))


def test_a_status_is_never_cut_however_narrow_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    tables.print_table("t", summaries(fakes.success(gpu(1)), fakes.failure(gpu(2), "RuntimeError")), (), stream)
    words = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).split())
    assert "RuntimeError" in words
    assert "5,120" in words


# ------------------------------------------------------------------ Markdown


def table_rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def columns(line: str) -> int:
    """Cells as Markdown counts them: pipes that no backslash escapes, an escaped backslash escaping nothing."""
    return len(re.findall(r"\|", re.sub(r"\\.", "", line))) - 1


def test_a_markdown_table_has_a_heading_a_rule_and_a_line_per_row() -> None:
    text = tables.markdown("t", summaries(fakes.success(gpu(0)), fakes.failure(gpu(1))), ["run note"])
    assert len(table_rows(text)) == 4
    assert {columns(line) for line in table_rows(text)} == {len(tables.HEADINGS)}
    assert "| ZeRO-1 | ❌ OOM | — |" in text
    assert "- run note" in text


@settings(deadline=None)
@given(label=st.text(alphabet="ab|<\\\n\r\x0b\u2028`*", max_size=12))
def test_no_label_can_add_a_cell_or_a_line_to_a_markdown_table(label: str) -> None:
    trial = fakes.trial(replace(fakes.zero(1), label=label), on=CUDA)
    text = tables.markdown("t", summaries(fakes.success(trial)), [])
    assert {columns(line) for line in table_rows(text)} == {len(tables.HEADINGS)}
    assert len(text.splitlines()) == len(tables.markdown("t", summaries(fakes.success()), []).splitlines())
    assert "<" not in text


def test_a_note_with_a_pipe_or_a_tag_is_escaped() -> None:
    text = tables.markdown("a|b", summaries(fakes.failure(gpu(1), details="<script>|x")), ["<b>"])
    assert "1. &lt;script>\\|x" in text
    assert "- &lt;b>" in text
    assert "### a\\|b" in text


# ------------------------------------------------------------------ JSON


def test_json_on_the_screen_is_what_the_file_holds() -> None:
    rows = flat_rows(summaries(*MIXED))
    assert json.loads(tables.as_json(rows)) == rows


def test_json_on_the_screen_refuses_a_number_that_is_none() -> None:
    with pytest.raises(ValueError, match="JSON"):
        tables.as_json([{"a": float("nan")}])
