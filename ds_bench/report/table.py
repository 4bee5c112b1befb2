"""A comparison as text: the table that ends every run, in colour, ASCII, Markdown or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Literal

from .. import units
from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.flat_rows import status_text
from ..system.terminal import ascii_only, plain, print_text, prints
from .columns import COLUMNS
from .markdown import escape

_COLUMNS = tuple(column for column in COLUMNS if not column.page_only)
HEADINGS = ("Strategy", "Status", *(column.heading for column in _COLUMNS), "Notes")
_ALWAYS_SHOWN = HEADINGS.index("Relative")
"""The last of the columns that are there even where nobody has a number."""
_STATUS = HEADINGS.index("Status")
_TEXT_COLUMNS = (HEADINGS.index("Strategy"), _STATUS, HEADINGS.index("Notes"))
_WRAPPED = (HEADINGS.index("Strategy"), _STATUS)
"""Columns that may be broken between words on a narrow terminal."""
_OPTIONAL_HEADINGS = ("Predicted", "Tok/s/GB", "95 % interval")
"""What a narrow terminal does without, in this order."""
_MOST_DRAWN = 500
"""Rows that rich draws; more are aligned by spaces alone."""
_UNBOUNDED = 10_000
"""Columns of a terminal on which every table has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One configuration in the table, its repeats taken together."""

    cells: tuple[str, ...]
    success: bool


def lines(comparison: Comparison, notes: Sequence[str]) -> list[TableRow]:
    """One line per configuration, in order of appearance.

    ``notes``: all of them; the numbers of a row's own go in its last column.
    """
    numbers = {text: number for number, text in enumerate(notes, 1)}
    body = []
    for row in comparison.results:
        cells = (
            row.label,
            _status(row),
            *(column.cell(row, comparison)[0] for column in _COLUMNS),
            " ".join(str(numbers[text]) for text in _texts(row) if text in numbers),
        )
        body.append(TableRow(cells=tuple(map(plain, cells)), success=row.succeeded))
    return body


def _status(row: ComparisonRow) -> str:
    bad = [run for run in row.summaries if not run.record.outcome.success]
    status = status_text((bad or row.summaries)[0].record.outcome.status)
    return f"{status} ({len(bad)} of {len(row.summaries)})" if bad and row.succeeded else status


def _texts(row: ComparisonRow) -> list[str]:
    """What a row's last column refers to: its caveats with the remedy, why it has no ratio, how its runs failed."""
    texts = [caveat.line for caveat in row.caveats]
    if row.differences:
        texts.append(f"no ratio, as rows differ: {'; '.join(row.differences)}")
    outcomes = (run.record.outcome for run in row.summaries)
    texts += [outcome.details for outcome in outcomes if not outcome.success and outcome.details]
    return list(dict.fromkeys(plain(text) for text in texts))


def all_notes(comparison: Comparison) -> list[str]:
    """What is to be said of rows, each text once, in order; their positions are the numbers in the table."""
    return list(dict.fromkeys(text for row in comparison.results for text in _texts(row)))


def _general_notes(comparison: Comparison, run_notes: Sequence[str]) -> list[str]:
    """What holds for every row; a note of the run that says the same as a caveat is left out."""
    said = {caveat.text for caveat in comparison.caveats}
    texts = [caveat.line for caveat in comparison.caveats] + [note for note in run_notes if note not in said]
    return list(dict.fromkeys(plain(text) for text in texts))


def print_table(title: str, comparison: Comparison, run_notes: Sequence[str], stream: IO[str]) -> None:
    """The summary table with its numbered notes. Columns that nobody measured are left out."""
    from rich.console import Console
    from rich.text import Text

    fancy = prints("✅❌—→±", stream)

    def write(text: str) -> str:
        return text if fancy and prints(text, stream) else ascii_only(text)

    notes = all_notes(comparison)
    body = [replace(line, cells=tuple(map(write, line.cells))) for line in lines(comparison, notes)]
    console = Console(
        file=stream, width=None if stream.isatty() else 160, highlight=False, safe_box=not fancy, emoji=False
    )
    grid = _TerminalTable(title=write(plain(title)), headings=tuple(map(write, HEADINGS)), body=body, fancy=fancy)
    table, left_out = (None, []) if len(body) > _MOST_DRAWN else grid.fitted(console)
    if table is None:
        grid.print_aligned(stream)
    else:
        console.print(table)
    starred = _general_notes(comparison, run_notes)
    starred += [f"no room for {', '.join(left_out)}: a wider terminal shows them"] if left_out else []
    for note in [*(f"{number}. {note}" for number, note in enumerate(notes, 1)), *(f"* {note}" for note in starred)]:
        console.print(Text(write(f"  {note}")), soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TerminalTable:
    """The table before rich draws it; every text as the stream can print it."""

    title: str
    headings: tuple[str, ...]
    body: Sequence[TableRow]
    fancy: bool

    def fitted(self, console: Any) -> tuple[Any, list[str]]:
        """The table as the terminal has room for it, and the headings that it has none for; None where none fits."""
        wide, shown = console.options.update(max_width=_UNBOUNDED), _measured_columns(self.body)
        table = self.drawn(shown)
        if console.measure(table, options=wide).maximum <= console.width:
            return table, []
        for count in range(len(_OPTIONAL_HEADINGS) + 1):
            kept = [i for i in shown if HEADINGS[i] not in _OPTIONAL_HEADINGS[:count]]
            table = self.drawn(kept, narrow=True)
            if console.measure(table, options=wide).minimum <= console.width:
                return table, [self.headings[i] for i in shown if i not in kept]
        return None, []

    def drawn(self, shown: Sequence[int], *, narrow: bool = False) -> Any:
        """Failures in red. ``narrow``: nothing to spare between columns, labels and headings may wrap."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        style, pad = box.SIMPLE_HEAD if self.fancy else box.ASCII2, 0 if narrow else 1
        table = Table(title=Text(self.title), title_justify="left", box=style, pad_edge=not narrow, padding=(0, pad))
        for i in shown:
            justify: Literal["left", "right"] = "left" if i in _TEXT_COLUMNS else "right"
            heading = self._stacked(i) if narrow else self.headings[i]
            wraps = i in (_WRAPPED if narrow else (_STATUS,))
            least = self._least(i, heading) if narrow else None
            table.add_column(Text(heading), justify=justify, no_wrap=not wraps, min_width=least)
        for line in self.body:
            table.add_row(*(Text(line.cells[i]) for i in shown), style=None if line.success else "red")
        return table

    def _least(self, column: int, heading: str) -> int:
        """Characters without which a word of the column would be cut."""
        from rich.cells import cell_len

        texts = [*heading.split("\n"), *(line.cells[column] for line in self.body)]
        return max(
            cell_len(part) for text in texts for part in (text.split() or [""] if column in _WRAPPED else [text])
        )

    def _stacked(self, column: int) -> str:
        """On two lines where the heading is what makes the column wide."""
        heading = self.headings[column]
        widest = max((len(line.cells[column]) for line in self.body), default=0)
        return "\n".join(heading.rsplit(" ", 1)) if len(heading) > widest else heading

    def print_aligned(self, stream: IO[str]) -> None:
        """Columns padded to their widest cell: rich takes a millisecond for a row, too long for thousands."""
        from rich.cells import cell_len

        shown = _measured_columns(self.body)
        every = [[cells[i] for i in shown] for cells in (self.headings, *(line.cells for line in self.body))]
        widths = [max(map(cell_len, column)) for column in zip(*every, strict=True)]
        print_text(self.title, stream)
        for cells in every:
            padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True))
            print_text("  ".join(padded).rstrip(), stream)


def _measured_columns(body: Sequence[TableRow]) -> list[int]:
    """Columns that somebody measured."""
    empty = ("", units.MISSING, ascii_only(units.MISSING))
    return [i for i in range(len(HEADINGS)) if i <= _ALWAYS_SHOWN or any(line.cells[i] not in empty for line in body)]


def markdown(title: str, comparison: Comparison, run_notes: Sequence[str]) -> str:
    """The same as a Markdown block."""
    notes = all_notes(comparison)
    body = lines(comparison, notes)
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *(line.cells for line in body)]
    shown = _measured_columns(body)
    table = "\n".join("| " + " | ".join(escape(row[i]) for i in shown) + " |" for row in rows)
    listed = "".join(f"\n{number}. {escape(note)}" for number, note in enumerate(notes, 1))
    starred = "".join(f"\n- {escape(note)}" for note in _general_notes(comparison, run_notes))
    return f"### {escape(title)}\n\n{table}\n{listed}\n{starred}\n"


def as_json(rows: Sequence[dict[str, Any]]) -> str:
    """The flat records, as in the file."""
    return json.dumps(list(rows), indent=1, allow_nan=False, ensure_ascii=False)
