"""The commands ``compare`` (two results row by row) and ``explain`` (why one row differs from another)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import permutations, product
from pathlib import Path

from ..analysis import load_results, provenance
from ..analysis.before_after import compare_before_after
from ..analysis.comparison import ComparisonRow, rows_called
from ..analysis.row_difference import RowDifference, explain
from ..errors import UsageError
from ..report.before_after_report import as_data, changes_table, junit_cases
from ..report.comparison_report import ComparisonReport
from ..report.junit import junit_text
from ..report.row_explanation import explanation_lines
from ..system import terminal
from .report import build_reports, check_output, write_output


def show_changes(
    before: Path, after: Path, junit: Path | None = None, markdown: bool = False, as_json: bool = False
) -> int:
    """Print both results row by row. Return 0; raises UsageError. ``junit``: file to write, with one test per row."""
    if markdown and as_json:
        raise UsageError("--markdown and --json cannot be combined", remedy="give one of them")
    if junit is not None:
        check_output("--junit", junit)
    comparison = compare_before_after(load_results.load(before), load_results.load(after))
    if as_json:
        terminal.print_json(json.dumps(as_data(comparison), indent=1, allow_nan=False, ensure_ascii=False))
    elif markdown:
        terminal.print_text(changes_table(comparison).to_markdown())
    else:
        for line in changes_table(comparison).to_terminal(terminal.width_of(sys.stdout)):
            terminal.print_text(line.text)
    if junit is not None:
        write_output("--junit", junit, junit_text("ds_bench compare", junit_cases(comparison)))
    return 0


def show_explanation(a: str, b: str, results: Sequence[Path], as_json: bool) -> int:
    """Print why row ``b`` differs from row ``a``. Return 0; raises UsageError."""
    for each in (a, b):
        if each.endswith(".json"):
            raise UsageError(f"{each} is not a row", remedy="give the two rows first, then the result")
    pairs = _find_pairs(a, b, build_reports(results))
    if as_json:
        found = [{"title": title, **difference.to_dict()} for title, difference in pairs]
        terminal.print_json(json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False))
        return 0
    width = terminal.width_of(sys.stdout)
    for number, (title, difference) in enumerate(pairs):
        if number:
            terminal.print_text("")
        for line in explanation_lines(difference, title, width):
            terminal.print_text(line)
    return 0


def _find_pairs(a: str, b: str, reports: Sequence[ComparisonReport]) -> list[tuple[str, RowDifference]]:
    """Explain how the rows differ in each comparison that has both, with a title; if none does, across two of them.

    Raises UsageError if a name matches no row, or both names match only the same one.
    """

    def rows(report: ComparisonReport, text: str) -> list[ComparisonRow]:
        return rows_called(report.comparison.rows, text)

    # Each text must match a row somewhere; the loop below skips comparisons without one.
    for text in (a, b):
        if not any(rows(report, text) for report in reports):
            names = dict.fromkeys(row.configuration.name for report in reports for row in report.comparison.rows)
            raise UsageError(f"Unknown row {text!r}", remedy=f"choose from {', '.join(names)}")
    found = []
    for report in reports:
        # Both names may match several rows, such as one strategy with two micro-batches: take two different ones.
        pairs = product(rows(report, a), rows(report, b))
        found += [(report.title, first, row) for first, row in pairs if row.key != first.key][:1]
    if not found:
        # Compare across the first two comparisons that have the rows, for example with two batch sizes.
        across = (
            pair
            for report, other in permutations(reports, 2)
            for pair in product(rows(report, a)[:1], rows(other, b)[:1])
        )
        if (pair := next(across, None)) is not None:
            found = [("; ".join(dict.fromkeys(provenance.title(row.runs) for row in pair)), *pair)]
    if not found:
        label = next(row.label for report in reports for row in rows(report, a))
        raise UsageError(
            f"{a} and {b} are the same row, {label}",
            remedy="name two rows; for one row before and after a change use compare BEFORE AFTER",
        )
    return [(title, explain(first, second)) for title, first, second in found]
