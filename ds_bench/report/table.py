"""One table for terminals, Markdown and HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..system.terminal import NO_BREAK, escape_controls, to_ascii
from ..units import MISSING
from .markdown import escape

MAX_TEXT_WIDTH = 120
"""Columns of a sentence; a table may be wider."""
_MIN_LABEL_WIDTH = 12
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Line:
    """A line on a terminal and its style (``rich``); an empty style is the terminal's own."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A heading, and how its cells are shown. The first column of a table has the labels of the rows."""

    heading: str
    priority: int = 0
    """Narrow terminals drop the column with the highest number first; 0: never dropped."""
    left: bool = False
    """Whether cells are aligned to the left; the first column always is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of texts under headings. Any text may hold any character; every form escapes it."""

    title: tuple[str, ...] = ()
    """Facts, each a few words."""
    columns: Sequence[Column] = ()
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
        rows = [[*map(escape, row)] for row in self.rows]
        rows = [[*row, *[""] * (len(self.columns) - len(row))] for row in rows]
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
        """The table as lines of at most ``width`` columns where words and numbers leave that room.

        A terminal too narrow for it gets headings of two lines, then fewer columns, and last wrapped labels.
        ``unicode``: else ASCII only.
        """

        def shown(text: str) -> str:
            return printable(text, unicode)

        text_width = min(width, MAX_TEXT_WIDTH)
        lines = [Line(line) for line in wrap_facts([*map(shown, self.title)], text_width, shown(" · "))]
        lines += [Line(line) for line in wrap(shown(self.meaning), text_width) if self.meaning]
        left_out: list[str] = []
        if self.rows:
            layout = _Layout(self.columns, [[*map(shown, row)] for row in self.rows], shown, width)
            left_out = layout.left_out
            lines += [Line("")] if lines else []
            lines += map(Line, layout.heading_lines())
            styles = self.styles or [""] * len(self.rows)
            for row, style in zip(layout.rows, styles, strict=True):
                lines += [Line(line, style) for line in layout.row_lines(row)]
        notes = [f"{number}. {note}" for number, note in enumerate(self.numbered, 1)] + [f"* {n}" for n in self.notes]
        if left_out:
            notes.append(f"* no room for {', '.join(left_out)}: a wider terminal shows them")
        if notes and lines:
            lines.append(Line(""))
        return [*lines, *(Line(line) for note in notes for line in wrap(f"  {shown(note)}", text_width, "     "))]


def make_table(
    columns: Sequence[tuple[Column, Callable[[R], str]]],
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
    cells = [[cell(row) for row in rows] for _, cell in columns]
    shown = [i for i, column in enumerate(cells) if i < always or any(cell not in empty for cell in column)]
    lines = [*zip(*(cells[i] for i in shown), strict=True)]
    if drop_empty_rows:
        lines = [line for line in lines if any(cell not in empty for cell in line[1:])]
    return Table(title=title, meaning=meaning, columns=[columns[i][0] for i in shown], rows=lines)


def printable(text: str, unicode: bool = True) -> str:
    """The text on one line without control characters. ``unicode``: else in ASCII."""
    return escape_controls(text) if unicode else to_ascii(escape_controls(text))


def wrap(text: str, width: int, indent: str = "", *, max_lines: int | None = None) -> list[str]:
    """The text in lines that break between words; those after the first are indented. A longer word stays whole.

    Words with ``NO_BREAK`` between them stay together.
    """
    lines = textwrap.wrap(
        text,
        max(width, 20),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=max_lines,
        placeholder=" …",
    )
    return [line.replace(NO_BREAK, " ") for line in lines] or [""]


def wrap_facts(facts: Sequence[str], width: int, separator: str = " · ") -> list[str]:
    """The facts in lines that break between facts where they can."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(separator) + len(fact) <= width:
            lines[-1] += separator + fact
        else:
            if lines:
                lines[-1] += separator.rstrip()
            lines += wrap(fact, width)
    return lines


class _Layout:
    """Which columns fit a terminal, and their widths. Texts are printable already."""

    def __init__(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str]], printable: Callable[[str], str], width: int
    ) -> None:
        from rich.cells import cell_len

        self._length, self._width, self._gap = cell_len, width, 2
        count = len(columns)
        self._headings = [printable(column.heading).split("\n") for column in columns]
        self._full = [row for row in rows if len(row) == count]  # the others have a label and one text
        cells = [max((cell_len(row[i]) for row in self._full), default=0) for i in range(count)]
        cells[0] = max([cells[0], *(cell_len(row[0]) for row in rows)])
        shown = list(range(count)) if self._full else [0]
        self._widths = [max(widest, self._heading_width(i)) for i, widest in enumerate(cells)]
        if self._room(shown) < self._widths[0]:
            for i in shown[1:]:
                if self._heading_width(i) > cells[i]:
                    self._headings[i] = printable(columns[i].heading).rsplit(" ", 1)
                    self._widths[i] = max(cells[i], self._heading_width(i))
        least = min(self._widths[0], max(_MIN_LABEL_WIDTH, self._heading_width(0) if self._full else 0))
        while self._room(shown) < least and any(columns[i].priority for i in shown):
            shown.remove(max(shown, key=lambda i: columns[i].priority))
        if self._room(shown) < least:
            self._gap = 1
        self._widths[0] = min(self._widths[0], max(self._room(shown), least))
        self._shown, self._left = shown, [i == 0 or column.left for i, column in enumerate(columns)]
        self.left_out = [printable(columns[i].heading) for i in range(count) if i not in shown] if self._full else []
        self.rows = rows

    def _heading_width(self, column: int) -> int:
        return max(map(self._length, self._headings[column]))

    def _room(self, shown: Sequence[int]) -> int:
        """Columns left for labels."""
        return self._width - sum(self._widths[i] + self._gap for i in shown[1:])

    def heading_lines(self) -> Iterator[str]:
        """One line, or two where a heading is broken; none if no row has the columns."""
        if self._full:
            height = max(len(self._headings[i]) for i in self._shown)
            for line in range(height):
                yield self._line(
                    [(["" for _ in range(height)] + self._headings[i])[line - height :][0] for i in self._shown]
                )

    def row_lines(self, row: Sequence[str]) -> Iterator[str]:
        """One line, or more if the label is wrapped or a failed row's text is long."""
        indent = " " * (len(row[0]) - len(row[0].lstrip()) + 2)
        if len(row) == len(self._left):
            first, *more = textwrap.wrap(row[0], self._widths[0], subsequent_indent=indent, break_on_hyphens=False) or [
                ""
            ]
            yield self._line([first, *(row[i] for i in self._shown[1:])])
            yield from more
            return
        text = f"{self._pad(row[0], 0)}  {row[1]}"
        if self._length(text) > self._width:
            text = f"{row[0]}  {row[1]}"
        lines = [text] if self._length(text) <= self._width else wrap(": ".join(row), self._width, "    ", max_lines=2)
        yield from lines

    def _pad(self, text: str, column: int) -> str:
        padding = " " * (self._widths[column] - self._length(text))
        return text + padding if self._left[column] else padding + text

    def _line(self, cells: Sequence[str]) -> str:
        return (" " * self._gap).join(map(self._pad, cells, self._shown)).rstrip()
