"""Lays out a table for terminals, Markdown and HTML, and escapes its text for each."""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..system.terminal import escape_controls, to_ascii
from ..units import MISSING

MAX_TEXT_WIDTH = 120
"""Maximum width of a sentence in columns; a table may be wider."""
_LABEL_WIDTH, _MIN_LABEL_WIDTH = 16, 12
"""Minimum width of labels: while other columns can still be dropped, and in any case."""
_MARKUP = re.compile(r"[\\|*`~]|(?<=\])\(|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)|^[#>]")
"""Characters that open a cell, a span, a link, an entity or a block. An underscore between letters opens nothing."""
_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:GB|MB|KB|B|ms|%|GPUs?)(?!\w))")
_COMMAND = re.compile(
    r"(env \S+ )?(?<!\S)\S+ -m ds_bench \S+|(ds-compare|export|systemctl start) \S+| ?(?<![^\s(])--?\w[\w-]*( (?=\S))?"
)
"""A command, or a flag with the words around it."""
_NO_BREAK = "\N{NO-BREAK SPACE}"
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Line:
    """A line on a terminal and its style (``rich``); an empty style is the terminal's own."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Column(Generic[R]):
    """A heading, and the text of a row's cell. The first column of a table has the labels of the rows."""

    heading: str
    cell: Callable[[R], str] = str
    priority: int = 0
    """Narrow terminals drop the column with the highest number first; 0: never dropped."""
    left: bool = False
    """Whether cells are aligned to the left; the first column always is."""
    noted: bool = False
    """Whether the cells become notes if the column is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of strings under headings. They may hold any character; every form escapes them."""

    title: tuple[str, ...] = ()
    """Facts, each a few words."""
    columns: Sequence[Column[Any]] = ()
    rows: Sequence[Sequence[str]] = ()
    """Cells. The last cell of a row shorter than the columns runs to the end of the line."""
    styles: Sequence[str] = ()
    """Style of each row on a terminal; empty: no row has one."""
    numbered: Sequence[str] = ()
    """Notes that cells refer to by number, from 1."""
    notes: Sequence[str] = ()
    meaning: str = ""
    """Explanation of the cells; empty if the headings suffice."""

    @property
    def headings(self) -> list[str]:
        return [column.heading for column in self.columns]

    def to_markdown(self, heading: str = "### ") -> str:
        """The table as Markdown. ``heading``: what precedes the title."""
        rows = [[*map(escape, row), *[""] * (len(self.columns) - len(row))] for row in self.rows]
        lines = [[*map(escape, self.headings)], ["---"] * len(self.columns), *rows]
        parts = [
            f"{heading}{escape(' · '.join(self.title))}" if self.title else "",
            escape(self.meaning),
            "\n".join(f"| {' | '.join(line)} |" for line in lines) if self.rows else "",
            "\n".join(f"{number}. {escape(note)}" for number, note in enumerate(self.numbered, 1)),
            "\n".join(f"- {escape(note)}" for note in self.notes),
        ]
        return "\n\n".join(filter(None, parts))

    def to_html(self) -> str:
        """The table as an HTML element, without title and notes."""

        def row(kind: str, cells: Sequence[str]) -> str:
            first, *others = (html.escape(cell) for cell in cells)
            scope = "col" if kind == "th" else "row"
            label = f'<th scope="{scope}" class="words">{first}</th>'
            heading = ' scope="col"' if kind == "th" else ""
            return f"<tr>{label}{''.join(f'<{kind}{heading}>{cell}</{kind}>' for cell in others)}</tr>"

        body = "\n".join(row("td", cells) for cells in self.rows)
        return f"<table>\n<thead>{row('th', self.headings)}</thead>\n<tbody>\n{body}\n</tbody></table>"

    def to_terminal(self, width: int, *, unicode: bool = True) -> list[Line]:
        """The table as lines of at most ``width`` columns, if words and numbers fit.

        A terminal too narrow for it gets headings of two lines, then fewer columns, and finally wrapped labels.
        ``unicode``: if false, ASCII only.
        """

        def shown(text: str) -> str:
            return printable(text, unicode)

        text_width = min(width, MAX_TEXT_WIDTH)
        # The title breaks between facts, and within one only if it is wider than a line.
        facts = [*map(shown, self.title)]
        facts = [fact.replace(" ", _NO_BREAK) if len(fact) + 2 <= text_width else fact for fact in facts]
        title = shown(" · ").replace(" ", _NO_BREAK, 1).join(facts)
        lines = [Line(line) for line in wrap(title, text_width) if title]
        lines += [Line(line) for line in wrap(shown(self.meaning), text_width) if self.meaning]
        notes = [f"{number}. {note}" for number, note in enumerate(self.numbered, 1)] + [f"* {n}" for n in self.notes]
        if self.rows:
            body, left_out = _lay_out(self, shown, width)
            lines += [*([Line("")] if lines else []), *body]
            for i in (i for i in left_out if self.columns[i].noted):
                labels: dict[str, list[str]] = {}
                for row in self.rows:
                    if len(row) == len(self.columns) and row[i] not in ("", MISSING):
                        labels.setdefault(row[i], []).append(row[0])
                notes += [
                    f"* {'; '.join(rows)}: {self.columns[i].heading.lower()} {text}" for text, rows in labels.items()
                ]
            if hidden := [self.columns[i].heading for i in left_out if not self.columns[i].noted]:
                notes.append(f"* a wider terminal also shows: {'; '.join(hidden)}")
        if notes and lines:
            lines.append(Line(""))
        return [*lines, *(Line(line) for note in notes for line in wrap(f"  {shown(note)}", text_width, "     "))]


def make_table(
    columns: Sequence[Column[R]],
    rows: Sequence[R],
    *,
    title: tuple[str, ...] = (),
    meaning: str = "",
    always: int = 1,
    drop_empty_rows: bool = False,
) -> Table:
    """A table of one line per row. Columns without a value are left out, except the first ``always``.

    ``drop_empty_rows``: rows that have nothing but their label are left out too.
    """
    empty = ("", MISSING)
    cells = [[column.cell(row) for row in rows] for column in columns]
    shown = [i for i, column in enumerate(cells) if i < always or any(cell not in empty for cell in column)]
    lines = [*zip(*(cells[i] for i in shown), strict=True)]
    if drop_empty_rows:
        lines = [line for line in lines if any(cell not in empty for cell in line[1:])]
    return Table(title=title, meaning=meaning, columns=[columns[i] for i in shown], rows=lines)


def _lay_out(table: Table, shown: Callable[[str], str], width: int) -> tuple[list[Line], list[int]]:
    """Lines of the headings and rows, and the columns that do not fit."""
    from rich.cells import cell_len

    rows = [[*map(shown, row)] for row in table.rows]
    headings = [[shown(column.heading)] for column in table.columns]
    full = [row for row in rows if len(row) == len(headings)]  # the others have a label and one text
    kept, gap = list(range(len(headings))) if full else [0], 2
    widest = [max((cell_len(row[i]) for row in full), default=0) for i in range(len(headings))]
    widest[0] = max([widest[0], *(cell_len(row[0]) for row in rows)])

    def width_of(i: int) -> int:
        return max(widest[i], *map(cell_len, headings[i]))

    def room() -> int:
        """Columns left for labels."""
        return width - sum(width_of(i) + gap for i in kept[1:])

    if room() < width_of(0):
        for i in kept[1:]:
            if cell_len(headings[i][0]) > widest[i]:
                headings[i] = headings[i][0].rsplit(" ", 1)
    wanted, least = (min(width_of(0), max(size, cell_len(headings[0][0]))) for size in (_LABEL_WIDTH, _MIN_LABEL_WIDTH))
    while room() < wanted and any(table.columns[i].priority for i in kept):
        kept.remove(max(kept, key=lambda i: table.columns[i].priority))
    gap = 1 if room() < least else gap
    widths = {i: width_of(i) for i in kept}
    widths[0] = min(widths[0], max(room(), least))

    def pad(text: str, i: int) -> str:
        padding = " " * (widths[i] - cell_len(text))
        return text + padding if i == 0 or table.columns[i].left else padding + text

    def join(cells: Sequence[str]) -> str:
        return (" " * gap).join(map(pad, cells, kept)).rstrip()

    lines = []
    height = max(len(headings[i]) for i in kept) if full else 0
    for above in range(height, 0, -1):  # headings of one line are at the bottom
        lines.append(Line(join([headings[i][-above] if above <= len(headings[i]) else "" for i in kept])))
    for row, style in zip(rows, table.styles or [""] * len(rows), strict=True):
        if len(row) == len(headings):
            indent = " " * (len(row[0]) - len(row[0].lstrip()) + 2)
            label = [row[0]]
            if cell_len(row[0]) > widths[0]:
                label = textwrap.wrap(row[0], widths[0], subsequent_indent=indent, break_on_hyphens=False) or [""]
            lines += [Line(join([label[0], *(row[i] for i in kept[1:])]), style), *(Line(s, style) for s in label[1:])]
            continue
        texts = [f"{pad(row[0], 0)}  {row[1]}", f"{row[0]}  {row[1]}"]
        fitting = [text for text in texts if cell_len(text) <= width]
        lines += [Line(s, style) for s in fitting[:1] or wrap(": ".join(row), width, "    ", max_lines=2)]
    return lines, [i for i in range(len(headings)) if i not in kept and full]


def printable(text: str, unicode: bool = True) -> str:
    """The text on one line without control characters. ``unicode``: if false, in ASCII."""
    return escape_controls(text) if unicode else to_ascii(escape_controls(text))


def wrap(text: str, width: int, indent: str = "", *, max_lines: int | None = None) -> list[str]:
    """The text in lines that break between words; those after the first are indented. An overlong word stays whole.

    A number and its unit stay together. So do a flag and its value unless ``max_lines`` is given, because a command
    that is broken over two lines would be pasted as two.
    """
    text = _NUMBER_AND_UNIT.sub(_NO_BREAK, text)
    if max_lines is None:
        text = _COMMAND.sub(lambda found: found[0].replace(" ", _NO_BREAK), text)
    lines = textwrap.wrap(
        text,
        max(width, 20),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=max_lines,
        placeholder=" …",
    )
    return [line.replace(_NO_BREAK, " ") for line in lines] or [""]


# ------------------------------------------------------------------ Markdown


def escape(text: str) -> str:
    """One line of Markdown that shows the text and opens no cell, tag, link or emphasis."""
    line = escape_unprintable(escape_controls(" ".join(text.split())))
    return _MARKUP.sub(r"\\\g<0>", line).replace("<", "&lt;")


def escape_unprintable(text: str) -> str:
    """The text with control and other invisible characters, line breaks included, as JSON spells them."""
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


def inline_code(text: str) -> str:
    """A code span on one line: nothing in it is markup, and no text can close it."""
    line = escape_unprintable(text)
    fence = _fence(line, 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def code_block(text: str, language: str) -> str:
    """A code block that no text can close."""
    fence = _fence(text, 3)
    return "\n".join((f"{fence}{language}", *map(escape_unprintable, text.splitlines()), fence))


def _fence(text: str, shortest: int) -> str:
    """More backticks than the longest run of them in the text."""
    return "`" * max([shortest, *(len(run) + 1 for run in re.findall("`+", text))])
