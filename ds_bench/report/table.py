"""A report as text on a terminal: every row with all columns, its notes and the recommendation.

A run and ``report`` print it with ``--verbose``; without it they print the short answer (``terminal_report``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Literal

from ..analysis.flat_rows import status_text
from ..system.terminal import (
    aligned_lines,
    can_encode,
    escape_controls,
    make_console,
    print_text,
    to_ascii,
    width_of,
    wrapped_lines,
)
from ..units import MISSING
from .comparison_report import ComparisonReport
from .profile_text import report_profiles
from .row_details import DetailTable, detail_tables, row_texts
from .table_columns import TABLE_COLUMNS, row_status

_COLUMNS = tuple(column for column in TABLE_COLUMNS if not column.page_only)
HEADINGS = ("Strategy", "Status", *(column.heading for column in _COLUMNS), "Notes")
_LAST_ALWAYS_SHOWN = HEADINGS.index("Relative")
"""Columns up to this one are shown even if no row has a value."""
_STATUS = HEADINGS.index("Status")
_LEFT_ALIGNED = (HEADINGS.index("Strategy"), _STATUS, HEADINGS.index("Notes"))
_WRAPPED = (HEADINGS.index("Strategy"), _STATUS)
"""Columns that a narrow terminal breaks between words."""
_OPTIONAL_HEADINGS = ("Predicted", "Tok/s/GB", "95 % interval")
"""Columns that a narrow terminal leaves out, in this order."""
_MAX_ROWS_FOR_RICH = 500
"""rich takes a millisecond per row: longer tables are aligned with spaces."""
_UNLIMITED_WIDTH = 10_000
_MAX_TEXT_WIDTH = 120
"""Columns of a paragraph; the table may be wider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row of the comparison as cells, one for each of ``HEADINGS``."""

    cells: tuple[str, ...]
    success: bool


def numbered_notes(report: ComparisonReport) -> list[str]:
    """The notes of rows, each once, in order; their positions from 1 are the numbers in the column Notes."""
    notes = (note for row_notes in report.row_notes.values() for note in row_notes)
    return list(dict.fromkeys(escape_controls(note.line) for note in notes if not note.page_only))


def general_notes(report: ComparisonReport) -> list[str]:
    """The notes that hold for every row, and those of the run."""
    return list(dict.fromkeys(map(escape_controls, [*(note.line for note in report.general_notes), *report.run_notes])))


def table_rows(report: ComparisonReport) -> list[TableRow]:
    """The rows in order of appearance."""
    numbers = {text: str(number) for number, text in enumerate(numbered_notes(report), 1)}
    rows = []
    for row in report.comparison.rows:
        lines = dict.fromkeys(escape_controls(note.line) for note in report.row_notes[row.key] if not note.page_only)
        cells = (
            row.label,
            row_status(row, status_text),
            *(column.cell(row, report.comparison)[0] for column in _COLUMNS),
            " ".join(numbers[line] for line in lines),
        )
        rows.append(TableRow(cells=tuple(map(escape_controls, cells)), success=row.succeeded))
    return rows


def print_report(report: ComparisonReport, stream: IO[str]) -> None:
    """Prints the table, its notes, tables of details, the recommendation, why rows differ, and where the time of a step
    goes."""
    print_table(report, stream)
    for details in detail_tables(report.comparison):
        _print_details(details, stream)
    for line in ("", *report.recommendation.lines):
        print_text(line, stream)
    width = min(width_of(stream), _MAX_TEXT_WIDTH)
    for heading, texts in row_texts(report):
        lines = [line for label, text in texts for line in wrapped_lines(f"{label}: {text}", width, indent="  ")]
        for line in ("", f"{heading}:", *lines):
            print_text(line, stream)
    for heading, text in report_profiles(report):
        for line in ("", heading, *text.splitlines()):
            print_text(line if line == heading else f"  {line}".rstrip(), stream)


def print_table(report: ComparisonReport, stream: IO[str]) -> None:
    """Prints the table with its notes. Columns that no row has a value for are left out."""
    from rich.text import Text

    has_signs = can_encode("✅❌—→±", stream)

    def printable(text: str) -> str:
        return text if has_signs and can_encode(text, stream) else to_ascii(text)

    rows = [replace(row, cells=tuple(map(printable, row.cells))) for row in table_rows(report)]
    # A file or a pipe has no width of its own.
    width = None if stream.isatty() else 160
    console = make_console(stream, width=width, safe_box=not has_signs, emoji=False)
    layout = _TerminalTable(
        title=printable(escape_controls(report.title)),
        headings=tuple(map(printable, HEADINGS)),
        rows=rows,
        unicode=has_signs,
    )
    table, left_out = (None, []) if len(rows) > _MAX_ROWS_FOR_RICH else layout.fit(console)
    if table is None:
        layout.print_aligned(stream)
    else:
        console.print(table)
    starred = general_notes(report)
    if left_out:
        starred.append(f"no room for {', '.join(left_out)}: a wider terminal shows them")
    numbered = [f"{number}. {note}" for number, note in enumerate(numbered_notes(report), 1)]
    for note in [*numbered, *(f"* {note}" for note in starred)]:
        console.print(Text(printable(f"  {note}")), soft_wrap=True)


def _print_details(details: DetailTable, stream: IO[str]) -> None:
    rows = [details.headings, *details.rows]
    if not can_encode("→—", stream):
        rows = [tuple(to_ascii(escape_controls(cell)) for cell in cells) for cells in rows]
    for line in (f"\n{details.heading} ({details.meaning})", *aligned_lines(rows)):
        print_text(line, stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TerminalTable:
    """The table before rich draws it; the stream can encode all its text."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[TableRow]
    unicode: bool

    def fit(self, console: Any) -> tuple[Any, list[str]]:
        """The widest form that fits the terminal, and the headings left out; None if no form fits."""
        # Measured against the console's own width, rich would say of every table that it fits.
        unlimited, shown = console.options.update(max_width=_UNLIMITED_WIDTH), measured_indices(self.rows)
        table = self._draw(shown)
        if console.measure(table, options=unlimited).maximum <= console.width:
            return table, []
        # Narrow columns first, then one optional column after the other is left out.
        for count in range(len(_OPTIONAL_HEADINGS) + 1):
            kept = [i for i in shown if HEADINGS[i] not in _OPTIONAL_HEADINGS[:count]]
            table = self._draw(kept, narrow=True)
            if console.measure(table, options=unlimited).minimum <= console.width:
                return table, [self.headings[i] for i in shown if i not in kept]
        return None, []

    def _draw(self, shown: Sequence[int], *, narrow: bool = False) -> Any:
        """The table with these columns, failed rows in red. ``narrow``: one space between columns, cells may wrap."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        style, pad = box.SIMPLE_HEAD if self.unicode else box.ASCII2, 0 if narrow else 1
        table = Table(title=Text(self.title), title_justify="left", box=style, pad_edge=not narrow, padding=(0, pad))
        for i in shown:
            justify: Literal["left", "right"] = "left" if i in _LEFT_ALIGNED else "right"
            heading = self._narrow_heading(i) if narrow else self.headings[i]
            wraps = i in (_WRAPPED if narrow else (_STATUS,))
            min_width = self._min_width(i, heading) if narrow else None
            table.add_column(Text(heading), justify=justify, no_wrap=not wraps, min_width=min_width)
        for row in self.rows:
            table.add_row(*(Text(row.cells[i]) for i in shown), style=None if row.success else "red")
        return table

    def _min_width(self, column: int, heading: str) -> int:
        """Characters that the column needs so that no word of it is cut."""
        from rich.cells import cell_len

        texts = [*heading.split("\n"), *(row.cells[column] for row in self.rows)]
        parts = (part for text in texts for part in (text.split() or [""] if column in _WRAPPED else [text]))
        return max(map(cell_len, parts))

    def _narrow_heading(self, column: int) -> str:
        """The heading, on two lines if it is wider than all cells below it."""
        heading = self.headings[column]
        widest = max((len(row.cells[column]) for row in self.rows), default=0)
        return "\n".join(heading.rsplit(" ", 1)) if len(heading) > widest else heading

    def print_aligned(self, stream: IO[str]) -> None:
        """Prints the columns padded with spaces to their widest cell."""
        shown = measured_indices(self.rows)
        cells = [[cells[i] for i in shown] for cells in (self.headings, *(row.cells for row in self.rows))]
        for line in (self.title, *aligned_lines(cells, left=range(len(shown)))):
            print_text(line, stream)


def measured_indices(rows: Sequence[TableRow]) -> list[int]:
    """Indices of the columns to show: those always shown, and those that some row has a value for."""
    empty = ("", MISSING, to_ascii(MISSING))
    return [
        i for i in range(len(HEADINGS)) if i <= _LAST_ALWAYS_SHOWN or any(row.cells[i] not in empty for row in rows)
    ]
