"""A report as text: the short answer that ends a run, the full report (``--verbose``), and Markdown for an issue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import IO

from ..analysis import provenance
from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.intervals import FEWEST_RUNS
from ..config.caveat_texts import UNSTABLE_KINDS, Caveat, CaveatKind, has_kind
from ..recommend.message_templates import format_list
from ..recommend.remedies import failed_run
from ..records.schema import status_text
from ..system.terminal import can_encode, escape_controls, print_text, width_of
from ..units import MISSING, format_items
from . import combined_table
from .comparison_columns import TABLE_COLUMNS, detail_tables, failure_sentence, failure_text, row_status, short_columns
from .comparison_report import ComparisonReport
from .table_layout import MAX_TEXT_WIDTH, Column, Line, Table, code_block, escape, make_table, printable, wrap

_SIGNS = "★✗×÷±·…—✅❌→"
_MAX_NOTES = 2
_ROW_KINDS = (
    *UNSTABLE_KINDS,
    CaveatKind.NOT_STEADY,
    CaveatKind.ALLOCATOR_RETRIED,
    CaveatKind.DISK_BOUND,
    CaveatKind.OTHER_OPTIMIZER,
    CaveatKind.TORCH_ADAM,
)
"""Caveats of single rows that change how a table is read, in addition to disqualifying ones."""
_GENERAL_KINDS = (
    CaveatKind.ENVIRONMENT_DIFFERS,
    CaveatKind.MEASURED_APART,
    CaveatKind.OTHER_PROCESS,
    CaveatKind.THROTTLED_BEFORE,
    CaveatKind.SWAP_USED,
    CaveatKind.ONE_GPU,
)
"""Caveats of the whole comparison that change how a table is read."""
_SHOWN_KINDS = (
    CaveatKind.MAY_TRAIN_WRONGLY,
    CaveatKind.OTHER_DATA,
    CaveatKind.OTHER_FIRST_LOSS,
    CaveatKind.OTHER_LOSSES,
    CaveatKind.EVALUATED,
    CaveatKind.LONGEST_POSSIBLE,
    CaveatKind.SEARCH_TIMED_OUT,
)
"""Caveats of single rows that always get a line."""


def print_reports(
    reports: Sequence[ComparisonReport],
    stream: IO[str],
    *,
    as_markdown: bool = False,
    verbose: bool = False,
    in_short: bool = False,
) -> None:
    """Print the reports one after another, then the tables that compare them.

    For the ``model-size`` benchmark, and for passes other than training steps, print only the tables. With
    ``in_short``, for a sweep that has just run, reduce several reports to their answers. Neither applies with
    ``as_markdown`` or ``verbose``.
    """
    of_passes = combined_table.has_passes(reports)
    tables = (combined_table.pass_tables if of_passes else combined_table.model_tables)(reports)
    if as_markdown:
        if blocks := [*map(render_markdown, reports), *(table.to_markdown() for table in tables)]:
            print_text("\n".join(blocks), stream)
        return
    brief = in_short and not verbose
    if of_passes and not verbose:
        reports = []
    elif brief and len(reports) > 1:
        print_text("\n".join(combined_table.summary_lines(reports)), stream)
        reports = []
    for number, report in enumerate(reports):
        if number:
            print_text("", stream)
        print_report(report, stream, verbose=verbose)
    for number, table in enumerate(tables):
        lines = [Line("")] if reports or number or brief else []
        _print_lines([*lines, *table.to_terminal(width_of(stream), unicode=can_encode(_SIGNS, stream))], stream)


def print_report(report: ComparisonReport, stream: IO[str], *, verbose: bool = False) -> None:
    """Print the answer, or with ``verbose`` everything."""
    unicode = can_encode(_SIGNS, stream)
    if verbose:
        # A file or a pipe has no width.
        width = width_of(stream) if stream.isatty() else 160
        _print_lines(whole_report_lines(report, width, unicode), stream)
    else:
        _print_lines(report_lines(report, width_of(stream), unicode), stream)


def _print_lines(lines: Sequence[Line], stream: IO[str]) -> None:
    if not stream.isatty():
        print_text("\n".join(line.text for line in lines), stream)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, emoji=False)
    for line in lines:
        console.print(Text(line.text, style=line.style), soft_wrap=True)


# ------------------------------------------------------------------ the whole report


def whole_table(report: ComparisonReport) -> Table:
    """Return every row with all columns and its numbered notes; failed rows are red on a terminal."""
    comparison = report.comparison
    numbers = {line: str(number) for number, line in enumerate(report.numbered_notes, 1)}
    columns: list[Column[ComparisonRow]] = [
        Column("Strategy", lambda row: row.label),
        Column("Status", lambda row: row_status(row, status_text), left=True),
        *(column for column in TABLE_COLUMNS if not column.page_only),
        Column("Notes", lambda row: " ".join(numbers[note.line] for note in report.row_notes[row.key]), left=True),
    ]
    always = 1 + [column.heading for column in columns].index("Relative")
    return replace(
        make_table(columns, comparison.rows, title=report.facts, always=always),
        styles=["" if row.succeeded else "red" for row in comparison.rows],
        numbered=report.numbered_notes,
        notes=report.general_lines,
    )


def whole_report_lines(report: ComparisonReport, width: int, unicode: bool = True) -> list[Line]:
    """Return the table with notes, the detail tables, the recommendation and the profiles."""
    lines = whole_table(report).to_terminal(width, unicode=unicode)
    for table in detail_tables(report.comparison):
        lines += [Line(""), *table.to_terminal(width, unicode=unicode)]
    texts = ["", *report.recommendation.lines]
    for heading, text in report.profiles:
        texts += ["", heading, *(f"  {line}".rstrip() for line in text.splitlines())]
    return [*lines, *(Line(printable(text, unicode)) for text in texts)]


def render_markdown(report: ComparisonReport) -> str:
    """Return a block to paste into an issue: table, notes, recommendation, profiles, machines, commands."""
    table = whole_table(report)
    lines = report.recommendation.lines
    parts = [
        table.to_markdown(),
        *(each.to_markdown("#### ") for each in detail_tables(report.comparison)),
        "**Recommendation**",
        "\n".join(f"- {escape(line)}" for line in lines),
        *(f"**{escape(heading)}**\n\n{code_block(text, 'text')}" for heading, text in report.profiles),
        *(f"**Setup** {escape(provenance.one_line(environment))}" for environment in report.environments),
        *(f"**Command**\n\n{code_block(escape_controls(command), 'sh')}" for command in report.commands),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


# ------------------------------------------------------------------ the short answer


def report_lines(report: ComparisonReport, width: int, unicode: bool) -> list[Line]:
    """Return the answer, the table and notes. ``unicode``: False for ASCII only.

    No line is wider than ``width``, except commands, paths and single words that are wider.
    """
    recommendation, text_width = report.recommendation, min(width, MAX_TEXT_WIDTH)
    mark = "?" if recommendation.choice is not None else "✗"
    mark = printable("★" if recommendation.decided else mark, unicode)
    indent = " " * (len(mark) + 1)
    headline = printable(str(recommendation.headline), unicode)
    lines = [Line(line, "bold") for line in wrap(f"{mark} {headline}", text_width, indent)]
    if (step := recommendation.try_next) is not None and step.kind != "run_idle":  # the headline says that
        flags = "the same command with " if step.kind == "try" else ""
        text = f"{indent}Next:  {printable(flags + str(step), unicode)}"
        # A command on two lines would be two commands to a shell.
        is_command = step.settings or "command" in step.values
        lines += map(Line, [text] if is_command else wrap(text, text_width, f"{indent}       "))
    if report.files:
        lines.append(Line(f"{indent}Files: {printable(report.files, unicode)}"))
    lines += [Line(""), *short_table(report).to_terminal(width, unicode=unicode)]
    shown = [*map(str, filter(None, (recommendation.provisional, recommendation.alternative)))]
    shown += notes_that_matter(report)
    shown += _notes_of_rows(report.comparison, lambda caveat: caveat.kind in _SHOWN_KINDS)
    trained = any(row.succeeded for row in report.comparison.rows)
    if trained and has_kind(report.comparison.caveats, CaveatKind.CPU_ACCELERATOR):
        shown.append(combined_table.CPU_LINE)
    notes = []
    for text in shown:
        notes += wrap(printable(text, unicode), text_width - len(indent), max_lines=3)
    count = len(report.numbered_notes) + len(report.general_lines)
    what = f"{format_items(count, 'note')} and charts" if count else "Charts"
    if report.page_command or count:
        notes.append(f"{what}: {report.page_command or '--verbose or --html FILE'}")
    return [*lines, *([Line("")] if notes else []), *(Line(indent + line) for line in notes)]


def short_table(report: ComparisonReport) -> Table:
    """Return the rows, with a star next to the recommended one; a failed row shows why it failed."""
    rows = report.comparison.rows
    trained = [row for row in rows if row.succeeded]

    def label(row: ComparisonRow) -> str:
        chosen = row.key == report.recommendation.key
        sign = "✗" if not row.succeeded else "★" if chosen else "!" if row.invalid_reason is not None else " "
        return f"{sign} {row.label}"

    runs = max((len(row.runs) for row in rows), default=0)
    table = make_table([Column("  Configuration", label), *short_columns(report)], trained)
    cells = iter(table.rows)
    causes = [None if row.succeeded else failed_run(row) for row in rows]
    return replace(
        table,
        title=(*report.facts, *([f"{runs} runs"] if runs > 1 else [])),
        rows=[
            next(cells) if row.succeeded else (label(row), MISSING if cause is None else failure_text(cause))
            for row, cause in zip(rows, causes, strict=True)
        ],
        styles=["red" if not row.succeeded else "bold" if row.key == report.recommendation.key else "" for row in rows],
    )


def notes_that_matter(report: ComparisonReport) -> list[str]:
    """Return the notes that change how the table is read: at most ``_MAX_NOTES`` sentences, most serious first.

    Failures and disqualifying caveats of the alternative's row are left out: the alternative itself states them.
    """
    comparison, alternative = report.comparison, report.recommendation.alternative
    other_key = None if alternative is None else alternative.values["key"]
    notes = [failure_sentence(row) for row in comparison.rows if row.succeeded and row.key != other_key]
    notes = [*filter(None, notes)]
    for row in comparison.rows:
        if row.differences:
            notes.append(f"{row.label}: no ratio, because the rows differ in {'; '.join(row.differences)}.")
    notes += _notes_of_rows(
        comparison,
        lambda caveat: caveat.kind.disqualifies or caveat.kind is CaveatKind.OTHER_TRAINING,
        without=other_key,
    )
    undecided = bool(report.recommendation.undecided)
    too_few = has_kind(comparison.caveats, CaveatKind.TOO_FEW_REPEATS)
    if too_few and report.recommendation.choice is not None and not undecided:
        notes.append(f"Differences marked ? are not tested: rows have fewer than {FEWEST_RUNS} runs.")
    general = [caveat for caveat in comparison.caveats if caveat.kind in _GENERAL_KINDS]
    notes += [f"{caveat.text[0].upper()}{caveat.text[1:]}." for caveat in general]
    notes += _notes_of_rows(comparison, lambda caveat: caveat.kind in _ROW_KINDS)
    return list(dict.fromkeys(notes))[:_MAX_NOTES]


def _notes_of_rows(
    comparison: Comparison, matters: Callable[[Caveat], bool], *, without: str | None = None
) -> Iterator[str]:
    """Yield one note per kind of caveat, with the rows that have it. ``without``: key of a row to leave out."""
    rows_by_kind: dict[CaveatKind | str, list[tuple[str, Caveat]]] = {}
    for row in (row for row in comparison.rows if row.key != without):
        for caveat in dict.fromkeys(filter(matters, row.caveats)):
            kind = caveat.text if caveat.kind is CaveatKind.NOTE else caveat.kind
            labeled = rows_by_kind.setdefault(kind, [])
            if row.label not in dict(labeled):
                labeled.append((row.label, caveat))
    trained = {row.label for row in comparison.rows if row.succeeded}
    for labeled in rows_by_kind.values():
        labels = [label for label, _ in labeled]
        texts = dict.fromkeys(caveat.text for _, caveat in labeled)
        long = any("," in label for label in labels)  # as in rows of axes and files
        named = f"{len(labels)} rows" if long and len(labels) > 2 else format_list(labels, most=4)
        which = "All rows" if len(trained) > 1 and trained <= {*labels} else named
        example = ""
        if len(texts) > 1:
            example = f" (figures from {labels[0]})"
        elif which == f"{len(labels)} rows":
            example = f" (e.g. {labels[0]})"
        yield f"{which}{example}: {next(iter(texts))}."
