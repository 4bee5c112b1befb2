"""One table in three forms: what a narrow terminal drops, and that no text of a user is more than text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.cells import cell_len

from ds_bench.report.table_layout import Column, Table, escape, inline_code, make_table

NASTY = "\x1b[31mred\x07\x9b2J\u202egnp.exe\ud800\r\n\u2028end"
WIDE = Table(
    title=("gpt2", "2 CPU ranks", "bf16"),
    columns=[
        Column("Strategy"),
        Column("Status", left=True),
        Column("Tokens/s"),
        Column("GPU peak GB"),
        Column("95 % interval", priority=1),
        Column("Predicted", priority=2),
    ],
    rows=[
        ("ZeRO-3 + CPU optimizer and parameters", "ok", "1,240", "8.00", "[0.98, 1.01]", "0.98x"),
        ("ZeRO-1", "OOM", "—", "—", "—", "—"),
        ("✗ mine", "OOM in init, requested 50.2 GB, 3.60 GB free"),
    ],
    styles=["bold", "", "red"],
    numbered=["unstable"],
    notes=["CPU ranks: this says nothing about GPUs."],
)


def text_of(table: Table, width: int, *, unicode: bool = True) -> str:
    return "\n".join(line.text for line in table.to_terminal(width, unicode=unicode))


def test_a_wide_terminal_shows_every_column_aligned() -> None:
    assert text_of(WIDE, 120) == (
        "gpt2 · 2 CPU ranks · bf16\n"
        "\n"
        "Strategy                               Status  Tokens/s  GPU peak GB  95 % interval  Predicted\n"
        "ZeRO-3 + CPU optimizer and parameters  ok         1,240         8.00   [0.98, 1.01]      0.98x\n"
        "ZeRO-1                                 OOM            —            —              —          —\n"
        "✗ mine                                 OOM in init, requested 50.2 GB, 3.60 GB free\n"
        "\n"
        "  1. unstable\n"
        "  * CPU ranks: this says nothing about GPUs."
    )
    assert [line.style for line in WIDE.to_terminal(120)][3:6] == ["bold", "", "red"]


def test_a_narrow_terminal_breaks_headings_then_drops_columns_by_priority_then_wraps_labels() -> None:
    shown = {width: text_of(WIDE, width) for width in (90, 60, 50, 40)}
    assert "GPU peak GB" not in shown[90]  # in two lines
    assert "also shows" not in shown[90]
    assert shown[60].endswith("also shows: Predicted")
    assert " ".join(shown[50].split()).endswith("also shows: 95 % interval; Predicted")
    for width, text in shown.items():
        assert max(map(cell_len, text.splitlines())) <= width
        words = set(text.split())
        assert {"1,240", "8.00", "ok", "OOM", "optimizer", "parameters"} <= words


def test_dropped_cells_become_notes_where_the_column_says_so() -> None:
    columns = [Column[str]("Strategy"), Column[str]("Fits with", priority=1, noted=True)]
    rows = [("ZeRO-0", "activation checkpointing"), ("ZeRO-1", "activation checkpointing"), ("ZeRO-3", "")]
    text = text_of(Table(columns=columns, rows=rows), 30)
    assert " ".join(text.split()).endswith("ZeRO-3 * ZeRO-0; ZeRO-1: fits with activation checkpointing")


def test_a_terminal_without_unicode_gets_the_same_words_aligned() -> None:
    text = text_of(WIDE, 120, unicode=False)
    assert text.isascii()
    lines = text.splitlines()
    assert lines[0] == "gpt2 | 2 CPU ranks | bf16"
    assert lines[5].startswith("x mine ")
    assert len(lines[3]) == len(lines[2])


def test_wide_signs_keep_the_columns() -> None:
    table = Table(columns=WIDE.columns[:3], rows=[("設定一", "行", "1"), ("mine", "ok", "22"), ("設", "failed here")])
    lines = text_of(table, 80).splitlines()
    assert len({cell_len(line.rstrip()) for line in lines[:3]}) == 1
    assert cell_len(lines[3].partition("failed")[0]) == cell_len(lines[2].partition("ok")[0])


def test_columns_and_rows_without_values_are_left_out() -> None:
    columns = [Column(heading, lambda row, i=i: row[i]) for i, heading in enumerate("abcd")]
    rows = [("x", "—", "1", "—"), ("y", "—", "—", "")]
    assert make_table(columns, rows).headings == ["a", "c"]
    assert make_table(columns, rows, always=2).headings == ["a", "b", "c"]
    assert make_table(columns, rows, drop_empty_rows=True).rows == [("x", "1")]


def test_titles_break_between_facts_and_within_one_that_is_wider_than_a_line() -> None:
    for facts, lines in (
        (("gpt2", "2 × H100 80GB HBM3", "bf16"), ["gpt2 ·", "2 × H100 80GB HBM3 ·", "bf16"]),
        (("gpt2", "tokens/s of the whole job, side by side"), ["gpt2 · tokens/s of the", "whole job, side by side"]),
    ):
        assert text_of(Table(title=facts), 24).splitlines() == lines


@settings(deadline=None, max_examples=50)
@given(st.text(alphabet=st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp", "Lu"]), max_size=12))
def test_no_text_steers_a_terminal_or_ends_its_line(text: str) -> None:
    table = Table(title=(text,), columns=WIDE.columns[:2], rows=[(f"a{text}", text)], notes=[f"n{text}"])
    lines = table.to_terminal(200)
    assert len(lines) <= 6
    for line in lines:
        assert all(sign.isprintable() or sign == "\u200d" for sign in line.text)
    assert "x1b[31mred" in text_of(Table(notes=[NASTY]), 80)  # visible, not swallowed


def columns_of(line: str) -> int:
    """Cells as Markdown counts them: pipes that no backslash escapes, an escaped backslash escaping nothing."""
    return len(re.findall(r"\|", re.sub(r"\\.", "", line))) - 1


def test_markdown_has_a_heading_a_rule_a_line_per_row_and_notes() -> None:
    assert WIDE.to_markdown() == (
        "### gpt2 · 2 CPU ranks · bf16\n\n"
        "| Strategy | Status | Tokens/s | GPU peak GB | 95 % interval | Predicted |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| ZeRO-3 + CPU optimizer and parameters | ok | 1,240 | 8.00 | [0.98, 1.01] | 0.98x |\n"
        "| ZeRO-1 | OOM | — | — | — | — |\n"
        "| ✗ mine | OOM in init, requested 50.2 GB, 3.60 GB free |  |  |  |  |\n\n"
        "1. unstable\n\n"
        "- CPU ranks: this says nothing about GPUs."
    )


@settings(deadline=None)
@given(text=st.text(alphabet="ab|<\\\n\r\x0b\u2028`*", max_size=12))
def test_no_text_adds_a_cell_a_line_or_a_tag_to_markdown(text: str) -> None:
    lines = Table(title=("t",), columns=WIDE.columns[:2], rows=[(text, text)], notes=[text]).to_markdown().split("\n")
    assert [columns_of(line) for line in lines[2:5]] == [2, 2, 2]
    assert len(lines) == 7
    assert "<" not in "".join(lines)
    assert "](" not in Table(notes=["![x](http://example.org/x.png)"]).to_markdown()


@settings(deadline=None)
@given(text=st.text(alphabet="ab<>&\"'/=", max_size=12))
def test_text_in_html_is_only_text(text: str) -> None:
    seen: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
            seen.append(tag)

        def handle_data(self, data: str) -> None:
            seen.append(data)

    Reader().feed(Table(columns=WIDE.columns[:2], rows=[("label", text)]).to_html())
    tags = ["table", "thead", "tr", "th", "Strategy", "th", "Status", "tbody", "tr", "th", "label", "td"]
    assert [each for each in seen if each != "\n"] == [*tags, *([text] if text else [])]


@given(st.text() | st.text(alphabet="`~*_<>&;[]()!#|-+=\\ \n\t1.ab/:"))
def test_any_text_stays_one_line_keeps_its_code_span_and_opens_no_markup(text: str) -> None:
    assert MarkdownIt().render("x " + escape(text)).count("<") == 2  # of the paragraph itself
    assert (inline_code(text) + escape(text)).isprintable()
    rendered = MarkdownIt().render(f"x {inline_code('a' + text + 'a')} y")
    assert rendered.count("<code>") == 1
    assert rendered.startswith("<p>x <code>a")
    assert rendered.endswith("a</code> y</p>\n")
