"""What ends a run, and what ``report`` prints: the rows against the recommended one, the answer, one thing to try.

``--verbose`` prints ``table`` in its place: every column, every note and the recommendation at length.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from ..analysis.comparison import Comparison, ComparisonRow, ratio_between
from ..analysis.intervals import FEWEST_RUNS
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..config.caveats import UNSTABLE_KINDS, Caveat, CaveatKind
from ..recommend.remedies import failed_run
from ..recommend.short_answer import format_list
from ..system.terminal import can_encode, escape_controls, make_console, print_text, to_ascii, width_of
from ..units import MISSING, format_count, format_items, format_percent, format_significant, to_gb
from . import models_table, pass_table, sweep_report, table
from .comparison_report import ComparisonReport
from .markdown import render_markdown
from .table_columns import failure_text

_SIGNS = "★✗×±·…—"
_MAX_TEXT_WIDTH = 120
"""Columns of a sentence; a table may be wider."""
_MIN_LABEL_WIDTH = 12
_MAX_NOTES = 2
_ROW_KINDS = (
    *UNSTABLE_KINDS,
    CaveatKind.NOT_STEADY,
    CaveatKind.ALLOCATOR_RETRIED,
    CaveatKind.DISK_BOUND,
    CaveatKind.TORCH_ADAM,
    CaveatKind.OTHER_OPTIMIZER,
)
"""Kinds of caveats of single rows that change how a table is read, besides those that disqualify a row."""
_GENERAL_KINDS = (
    CaveatKind.ENVIRONMENT_DIFFERS,
    CaveatKind.MEASURED_APART,
    CaveatKind.OTHER_PROCESS,
    CaveatKind.THROTTLED_BEFORE,
    CaveatKind.SWAP_USED,
    CaveatKind.ONE_GPU,
)
"""Kinds of caveats of the whole comparison that do."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the report and its style on a terminal (``rich``); an empty style is the terminal's own."""

    text: str
    style: str = ""


def print_reports(
    reports: Sequence[ComparisonReport],
    stream: IO[str],
    *,
    as_markdown: bool = False,
    verbose: bool = False,
    in_short: bool = False,
) -> None:
    """Prints the reports one after the other, and what they show side by side.

    Where passes other than training steps were timed, the table of them is all that a reader wants at first.
    ``in_short``: of several reports, as of a sweep that has just run, the answer of each in one line.
    """
    of_passes, brief = pass_table.is_wanted(reports), not as_markdown and not verbose
    if brief and of_passes:
        print_text(pass_table.render_text(reports), stream)
        return
    if brief and in_short and len(reports) > 1:
        print_text("\n".join(sweep_report.summary_lines(reports)), stream)
        return
    for number, report in enumerate(reports):
        if number:
            print_text("", stream)
        if as_markdown:
            print_text(render_markdown(report), stream)
        else:
            print_report(report, stream, verbose=verbose)
    tables = pass_table if of_passes else models_table
    if side_by_side := (tables.render_markdown if as_markdown else tables.render_text)(reports):
        print_text(f"\n{side_by_side}", stream)


def print_report(report: ComparisonReport, stream: IO[str], *, verbose: bool = False) -> None:
    """Prints the report for people: the answer, or with ``verbose`` everything."""
    if verbose:
        table.print_report(report, stream)
        return
    lines = report_lines(report, width_of(stream), can_encode(_SIGNS, stream))
    if not stream.isatty():
        for line in lines:
            print_text(line.text, stream)
        return
    from rich.text import Text

    console = make_console(stream, emoji=False)
    for line in lines:
        shown = line.text if can_encode(line.text, stream) else to_ascii(line.text)
        console.print(Text(escape_controls(shown), style=line.style), soft_wrap=True)


def report_lines(report: ComparisonReport, width: int, unicode: bool = True) -> list[Line]:
    """The lines of the report, none wider than ``width`` unless a single word is. ``unicode``: else ASCII alone."""

    def printable(text: str) -> str:
        return escape_controls(text) if unicode else to_ascii(escape_controls(text))

    text_width = min(width, _MAX_TEXT_WIDTH)
    runs = max((len(row.summaries) for row in report.comparison.rows), default=0)
    title = f"{report.title} · {runs} runs" if runs > 1 else report.title
    dot = printable("·")
    facts = (
        printable(title).replace(" ", "\u00a0").replace(f"\u00a0{dot}\u00a0", f"\u00a0{dot} ")
    )  # break between facts
    lines = [Line(line.replace("\u00a0", " ")) for line in _wrap(facts, text_width)]
    if report.comparison.rows:
        lines += [Line(""), *_table_lines(report, width, printable)]
    lines += [Line(""), *_answer_lines(report, text_width, printable)]
    return lines if unicode else [Line(to_ascii(line.text), line.style) for line in lines]


def _wrap(text: str, width: int, indent: str = "", *, max_lines: int | None = None) -> list[str]:
    """The text in lines that break between words; those after the first are indented. A longer word stays whole."""
    return textwrap.wrap(
        text,
        max(width, 20),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=max_lines,
        placeholder=" …",
    ) or [""]


# ------------------------------------------------------------------ the table


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    cell: Callable[[ComparisonRow], str]
    dispensable: int = 0
    """Columns are left out on a narrow terminal by this number, the highest first; 0: never."""


def _columns(report: ComparisonReport) -> list[_Column]:
    """The columns that some row has a value for; a run on GPUs and one on CPU ranks have different ones."""
    comparison = report.comparison
    columns = [
        _Column("batch", lambda row: _searched(row, "batch_policy", "batch_size")),
        _Column("sequence", lambda row: _searched(row, "seq_policy", "seq_length")),
        _Column("samples/s", lambda row: format_significant(row.samples_per_second))
        if any(row.samples_per_second is not None for row in comparison.rows)
        else _Column("tok/s", lambda row: format_significant(row.tokens_per_second)),
        _Column("±95 %", _relative_margin, 4),
    ]
    if (chosen := report.recommended_row) is not None:
        columns.append(_Column("vs ★", lambda row: _against(row, chosen)))
    gpu = [
        _Column("GPU GB", lambda row: format_significant(to_gb(row.gpu_peak_bytes)), 2),
        _Column("of card", lambda row: _share(row.gpu_fraction, warns=not row.fills_memory)),
    ]
    host = [_Column("host GB", lambda row: format_significant(to_gb(row.host_peak_bytes)), 3)]
    if all(row.gpu_peak_bytes is None for row in comparison.rows):
        columns += [*host, _Column("of host", lambda row: _host_share(row, comparison), 1)]
    else:
        columns += [*gpu, *host]
    columns.append(_Column("NVMe GB", _nvme_gigabytes, 1))
    return [column for column in columns if any(column.cell(row) != MISSING for row in comparison.rows)]


def _searched(row: ComparisonRow, policy: str, size: str) -> str:
    """The micro-batch or sequence length that was found for the row."""
    workload = row.trial.workload
    return MISSING if getattr(workload, policy) == "given" else format_count(getattr(workload, size))


def _relative_margin(row: ComparisonRow) -> str:
    """How far the 95 % interval reaches from the mean, as a factor less 1."""
    if row.interval is None or row.interval[0] <= 0:
        return MISSING
    return f"{float(f'{100 * (math.sqrt(row.interval[1] / row.interval[0]) - 1):.2g}'):,g} %"


def _against(row: ComparisonRow, chosen: ComparisonRow) -> str:
    """``1.13× faster`` than the chosen row; with ``?`` if that was not tested, below three runs."""
    if row.key == chosen.key or row.tokens_per_second is None or not chosen.tokens_per_second:
        return MISSING
    if row.differences or chosen.differences:
        return "no ratio"
    ratio, interval = row.tokens_per_second / chosen.tokens_per_second, ratio_between(row, chosen)
    if interval is not None and not interval.distinguishable:
        return "within noise"
    factor = format_significant(max(ratio, 1 / ratio))
    text = "as fast" if factor == "1.00" else f"{factor}× {'faster' if ratio > 1 else 'slower'}"
    return text if interval is not None else f"{text} ?"


def _share(fraction: float | None, *, warns: bool) -> str:
    """A share of the memory, with ``!`` above 95 %."""
    if fraction is None:
        return MISSING
    full = fraction > NEAR_CAPACITY
    # Whole percents, but tenths where 95 % alone would not say on which side of the limit it is.
    digits = 0 if fraction >= 0.1 and not 0.95 <= fraction < 0.955 else 1
    return format_percent(fraction, digits=digits) + (" !" if full and warns else "")


def _host_share(row: ComparisonRow, comparison: Comparison) -> str:
    capacity = comparison.host_capacity_bytes
    fraction = row.host_peak_bytes / capacity if row.host_peak_bytes is not None and capacity else None
    return _share(fraction, warns=True)


def _nvme_gigabytes(row: ComparisonRow) -> str:
    stored = max((run.nvme_stored_bytes or 0 for run in row.successes), default=0)
    return format_significant(to_gb(stored or None))


def _table_lines(report: ComparisonReport, width: int, printable: Callable[[str], str]) -> Iterator[Line]:
    from rich.cells import cell_len

    rows = report.comparison.rows
    trained = [row for row in rows if row.succeeded]
    columns = _columns(report) if trained else []
    labels = [printable(row.label) for row in rows]
    widest_label = max([len("Configuration") if trained else 0, *map(cell_len, labels)])
    mark_width = max(map(cell_len, map(printable, ("★", "✗")))) + 1

    widths = {
        column.heading: max(map(cell_len, map(printable, [column.heading, *map(column.cell, trained)])))
        for column in columns
    }

    def room_for_labels() -> int:
        return width - mark_width - sum(widths[column.heading] + 2 for column in columns)

    # Columns are left out until labels have their least width; what is longer continues on further lines.
    while room_for_labels() < min(widest_label, _MIN_LABEL_WIDTH) and any(column.dispensable for column in columns):
        columns.remove(max(columns, key=lambda column: column.dispensable))
    label_width = min(widest_label, max(room_for_labels(), _MIN_LABEL_WIDTH))

    def line(mark: str, label: str, cells: Sequence[str]) -> str:
        padded = [mark, " " * (mark_width - cell_len(mark)), label, " " * (label_width - cell_len(label))]
        for column, cell in zip(columns, cells, strict=True):
            padded += ["  ", " " * (widths[column.heading] - cell_len(cell)), cell]
        return "".join(padded).rstrip()

    if trained:
        yield Line(line("", "Configuration"[:label_width], [printable(column.heading) for column in columns]))
    for row, label in zip(rows, labels, strict=True):
        chosen = row.key == report.recommendation.key
        if not row.succeeded:
            yield from _failed_row_lines(row, printable, mark_width, label_width, width)
            continue
        mark = printable("★" if chosen else "!" if row.invalid_reason is not None else " ")
        first, *rest = textwrap.wrap(label, label_width, subsequent_indent="  ", break_on_hyphens=False) or [""]
        style = "bold" if chosen else ""
        yield Line(line(mark, first, [printable(column.cell(row)) for column in columns]), style)
        yield from (Line(" " * mark_width + more, style) for more in rest)


def _failed_row_lines(
    row: ComparisonRow, printable: Callable[[str], str], mark_width: int, label_width: int, width: int
) -> Iterator[Line]:
    """One line that says where and why; two if the terminal is too narrow."""
    from rich.cells import cell_len

    run = failed_run(row)
    cause = printable(MISSING if run is None else failure_text(run))
    label = printable(row.label)
    mark = printable("✗").ljust(mark_width)
    aligned = f"{mark}{label}{' ' * (label_width - cell_len(label))}  {cause}"
    text = aligned if cell_len(aligned) <= width else f"{mark}{label}  {cause}"
    fits = cell_len(text) <= width
    lines = [text] if fits else _wrap(f"{mark}{label}: {cause}", width, " " * (mark_width + 2), max_lines=2)
    yield from (Line(line, "red") for line in lines)


# ------------------------------------------------------------------ the answer


def _answer_lines(report: ComparisonReport, width: int, printable: Callable[[str], str]) -> Iterator[Line]:
    recommendation = report.recommendation
    mark = "?" if recommendation.undecided else "★" if recommendation.choice is not None else "✗"
    mark = printable(mark)
    indent = " " * (len(mark) + 1)
    headline = printable(recommendation.headline or recommendation.lines[0])
    yield from (Line(line, "bold") for line in _wrap(f"{mark} {headline}", width, indent))
    if recommendation.provisional is not None:  # never shortened, since it ends with a command
        yield from (Line(indent + line) for line in _wrap(printable(recommendation.provisional), width - len(indent)))
    shown = [] if recommendation.alternative is None else [recommendation.alternative]
    shown += notes_that_matter(report)
    shown += _notes_of_rows(report.comparison, lambda caveat: caveat.kind is CaveatKind.LONGEST_POSSIBLE)
    if any(caveat.kind is CaveatKind.CPU_ACCELERATOR for caveat in report.comparison.caveats):
        shown.append("CPU ranks: this says nothing about GPUs.")
    for text in shown:
        yield from (Line(indent + line) for line in _wrap(printable(text), width - len(indent), max_lines=3))
    yield from map(Line, _last_lines(report, width, indent, printable))


def _last_lines(report: ComparisonReport, width: int, indent: str, printable: Callable[[str], str]) -> Iterator[str]:
    """What to try, and how many notes there are; on one line if both fit."""
    recommendation = report.recommendation
    try_next = None if recommendation.provisional is not None else recommendation.try_next
    try_lines = [] if try_next is None else _wrap(printable(f"Try:    {try_next}"), width - len(indent), " " * 8)
    count = len(table.numbered_notes(report)) + len(table.general_notes(report))
    notes = f"{format_items(count, 'note')}: --verbose, or the HTML report" if count else ""
    if len(try_lines) == 1 and notes and len(indent) + len(try_lines[0]) + 4 + len(notes) <= min(width, 100):
        yield f"{indent}{try_lines[0]}    {notes}"
        return
    yield from (indent + line for line in (*try_lines, notes) if line)


def notes_that_matter(report: ComparisonReport) -> list[str]:
    """The notes that change how the table is read, most serious first, at most ``_MAX_NOTES``; each in a sentence.

    What the headline or the alternative says is left out.
    """
    recommendation = report.recommendation
    said = f"{recommendation.headline} {recommendation.alternative or ''}"
    notes = (
        note for note in dict.fromkeys(_candidate_notes(report)) if note.partition(": ")[2].rstrip(".") not in said
    )
    return [note for note, _ in zip(notes, range(_MAX_NOTES), strict=False)]


def _candidate_notes(report: ComparisonReport) -> Iterator[str]:
    comparison, alternative = report.comparison, report.recommendation.alternative or ""
    for row in comparison.rows:
        run = failed_run(row)
        if row.succeeded and run is not None and not alternative.startswith(f"{row.label} is "):
            count = sum(not each.record.outcome.success for each in row.summaries)
            yield f"{row.label}: {count} of {len(row.summaries)} runs failed, {failure_text(run)}."
    for row in comparison.rows:
        if row.differences:
            yield f"{row.label}: no ratio, as rows differ in {'; '.join(row.differences)}."
    yield from _notes_of_rows(
        comparison, lambda caveat: caveat.disqualifying or caveat.kind is CaveatKind.OTHER_TRAINING
    )
    for caveat in comparison.caveats:
        if caveat.kind in _GENERAL_KINDS:
            yield f"{caveat.text[0].upper()}{caveat.text[1:]}."
    undecided = bool(report.recommendation.undecided)
    too_few = any(caveat.kind is CaveatKind.TOO_FEW_REPEATS for caveat in comparison.caveats)
    if too_few and report.recommendation.choice is not None and not undecided:
        yield f"Rows with fewer than {FEWEST_RUNS} runs: differences marked ? are not tested."
    kinds = [kind for kind in _ROW_KINDS if not (undecided and kind in UNSTABLE_KINDS)]
    yield from _notes_of_rows(comparison, lambda caveat: caveat.kind in kinds)


def _notes_of_rows(comparison: Comparison, matters: Callable[[Caveat], bool]) -> Iterator[str]:
    """One note for each form of caveat, with the rows that have it."""
    rows_by_kind: dict[CaveatKind | str, list[tuple[str, Caveat]]] = {}
    for row in comparison.rows:
        for caveat in dict.fromkeys(filter(matters, row.caveats)):
            kind = caveat.text if caveat.kind is CaveatKind.NOTE else caveat.kind
            labelled = rows_by_kind.setdefault(kind, [])
            if row.label not in dict(labelled):
                labelled.append((row.label, caveat))
    trained = [row for row in comparison.rows if row.succeeded]
    for labelled in rows_by_kind.values():
        labels = [label for label, _ in labelled]
        texts = dict.fromkeys(caveat.text for _, caveat in labelled)
        long = any("," in label for label in labels)  # as rows of axes and files have
        named = f"{len(labels)} rows" if long and len(labels) > 2 else format_list(labels, most=4)
        which = "all rows" if len(labels) == len(trained) > 1 else named
        example = f" (here {labels[0]})" if len(texts) > 1 or which == f"{len(labels)} rows" else ""
        yield f"{which}{example}: {next(iter(texts))}."
