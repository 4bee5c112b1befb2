"""Rows as text: the table that ends every run, in colour, ASCII, Markdown or JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from . import units
from .analysis import Summary
from .rows import COLUMNS, status_text

HEADINGS = (
    "Strategy",
    "Status",
    "Step ms",
    "± ms",
    "Tokens/s",
    "Relative",
    "GPU peak GB",
    "of card",
    "CPU GB",
    "Notes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One configuration in the table, its repeats taken together."""

    cells: tuple[str, ...]
    success: bool


def lines(summaries: Sequence[Summary], notes: Sequence[str]) -> list[Line]:
    """One line per configuration, its repeats together, in order of appearance.

    ``notes``: all caveats; their numbers go in the last column.
    """
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(replace(summary.record.trial, repeat=0).key, []).append(summary)
    first = next(iter(groups.values()), [])
    baseline = _median(first, "tokens_per_second")
    return [_line(group, baseline if _alike(group, first) else None, notes) for group in groups.values()]


def _alike(group: Sequence[Summary], first: Sequence[Summary]) -> bool:
    """Whether a ratio of the two means anything: a resumed run may hold rows of another workload."""
    a, b = group[0].record, first[0].record
    return (a.trial.workload, a.trial.placement, a.method_version) == (
        b.trial.workload,
        b.trial.placement,
        b.method_version,
    )


def _line(group: Sequence[Summary], baseline: float | None, notes: Sequence[str]) -> Line:
    good = [summary for summary in group if summary.record.outcome.success]
    tokens = _median(good, "tokens_per_second")
    fraction = _median(good, "gpu_fraction")
    cells = (
        group[0].record.trial.strategy.label,
        _status(group, good),
        units.format_ms(_median(good, "step_seconds")),
        units.format_ms(_spread(good)),
        units.format_count(tokens),
        units.format_ratio(tokens / baseline if tokens and baseline else None),
        units.format_gb(_median(good, "gpu_peak_bytes")),
        units.format_percent(fraction, digits=0),
        units.format_gb(_median(good, "host_peak_bytes")),
        " ".join(str(notes.index(text) + 1) for text in _texts(group)),
    )
    return Line(cells=cells, success=bool(good))


def _status(group: Sequence[Summary], good: Sequence[Summary]) -> str:
    bad = [summary for summary in group if not summary.record.outcome.success]
    status = status_text((bad or good)[0].record.outcome.status)
    return status if len(group) == 1 or not bad or not good else f"{status} ({len(bad)} of {len(group)})"


def _median(group: Sequence[Summary], name: str) -> float | None:
    values = [value for summary in group if (value := getattr(summary, name)) is not None]
    return statistics.median(values) if values else None


def _spread(good: Sequence[Summary]) -> float | None:
    """Between runs where there are several, else between the steps of the one."""
    means = [summary.step_seconds for summary in good if summary.step_seconds is not None]
    return statistics.stdev(means) if len(means) > 1 else (good[0].step_seconds_std if good else None)


def _texts(group: Sequence[Summary]) -> list[str]:
    texts = []
    for summary in group:
        texts += [*summary.caveats]
        if not summary.record.outcome.success and summary.record.outcome.details:
            texts.append(summary.record.outcome.details)
    return list(dict.fromkeys(texts))


def all_notes(summaries: Sequence[Summary]) -> list[str]:
    """Every caveat and cause of failure once, in order; their positions are the numbers in the table."""
    return list(dict.fromkeys(text for summary in summaries for text in _texts([summary])))


def prints(text: str, stream: IO[str]) -> bool:
    """Whether the stream's encoding can show the text."""
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


_ASCII = {
    "✅": "[ok]",
    "❌": "[failed]",
    "⏹️": "[stopped]",
    "⏭️": "[skipped]",
    "—": "-",
    "→": "->",
    "×": "x",
    "±": "+/-",
    "…": "...",
}


def ascii_only(text: str) -> str:
    """The same in ASCII, for terminals that print nothing else."""
    for sign, plain in _ASCII.items():
        text = text.replace(sign, plain)
    return text.encode("ascii", "replace").decode("ascii")


def print_table(title: str, summaries: Sequence[Summary], run_notes: Sequence[str], stream: IO[str]) -> None:
    """The summary table with its numbered notes. Columns that nobody measured are left out."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    fancy = prints("✅❌—→±", stream)
    write = (lambda text: text) if fancy else ascii_only
    notes = all_notes(summaries)
    body = lines(summaries, notes)
    shown = [i for i in range(len(HEADINGS)) if i < 6 or any(line.cells[i] not in ("", units.MISSING) for line in body)]
    table = Table(title=Text(write(title)), title_justify="left", box=box.SIMPLE_HEAD if fancy else box.ASCII2)
    for i in shown:
        table.add_column(write(HEADINGS[i]), justify="left" if i in (0, 1, 9) else "right", no_wrap=i != 1)
    for line in body:
        table.add_row(*(Text(write(line.cells[i])) for i in shown), style=None if line.success else "red")
    width = None if stream.isatty() else 160
    console = Console(file=stream, width=width, highlight=False, safe_box=not fancy, emoji=False)
    console.print(table)
    for number, note in enumerate(notes, 1):
        console.print(Text(write(f"  {number}. {note}")), soft_wrap=True)
    for note in run_notes:
        console.print(Text(write(f"  * {note}")), soft_wrap=True)


def markdown(title: str, summaries: Sequence[Summary], run_notes: Sequence[str]) -> str:
    """The same as a Markdown block."""
    notes = all_notes(summaries)
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *(line.cells for line in lines(summaries, notes))]
    table = "\n".join("| " + " | ".join(_escape(cell) for cell in row) + " |" for row in rows)
    listed = "".join(f"\n{number}. {_escape(note)}" for number, note in enumerate(notes, 1))
    starred = "".join(f"\n- {_escape(note)}" for note in run_notes)
    return f"### {_escape(title)}\n\n{table}\n{listed}\n{starred}\n"


def _escape(text: str) -> str:
    text = " ".join(text.splitlines()).replace("\\", "\\\\")
    return text.replace("|", "\\|").replace("<", "&lt;")


def as_json(rows: Sequence[dict[str, Any]], *, ascii_only: bool = False) -> str:
    """The flat records, as in the file; with escapes for a stream that prints ASCII only."""
    return json.dumps(list(rows), indent=1, allow_nan=False, ensure_ascii=ascii_only)


__all__ = ["COLUMNS", "all_notes", "as_json", "ascii_only", "lines", "markdown", "print_table"]
