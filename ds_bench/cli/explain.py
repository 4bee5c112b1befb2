"""The command ``explain``: why one row of a result needs more or less memory and time than another."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..analysis import provenance
from ..analysis.comparison import ComparisonRow, rows_called
from ..analysis.row_difference import RowDifference, explain
from ..errors import UsageError
from ..report.comparison_report import ComparisonReport
from ..report.row_explanation import explanation_lines
from ..system import terminal
from .report import build_reports

_MOST_COLUMNS = 80


def show_explanation(a: str, b: str, results: Sequence[Path], as_json: bool) -> int:
    """Prints why row ``b`` differs from row ``a``. Returns 0; raises UsageError."""
    pairs = _find_pairs(a, b, build_reports(results))
    if as_json:
        found = [{"title": title, **difference.to_dict()} for title, difference in pairs]
        terminal.print_json(json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False))
        return 0
    width = min(_MOST_COLUMNS, terminal.width_of(sys.stdout))
    for number, (title, difference) in enumerate(pairs):
        if number:
            terminal.print_text("")
        for line in explanation_lines(difference, title, width):
            terminal.print_text(line)
    return 0


def _find_pairs(a: str, b: str, reports: Sequence[ComparisonReport]) -> list[tuple[str, RowDifference]]:
    """The two rows in each comparison that has both; if none has, the first row of either name.

    Raises UsageError if a text means no row, or both texts the same one.
    """
    # A text must mean a row somewhere; a comparison that has no such row is passed over below.
    for text in (a, b):
        if not any(rows_called(report.comparison.rows, text) for report in reports):
            names = dict.fromkeys(row.configuration.name for report in reports for row in report.comparison.rows)
            raise UsageError(f"{text}: no row is called that", remedy=f"one of {', '.join(names)}")
    pairs: list[tuple[str, ComparisonRow, ComparisonRow]] = []
    for report in reports:
        found = [rows_called(report.comparison.rows, text) for text in (a, b)]
        if all(found):
            # Both texts may mean several rows, such as a stage with and without offload: take two different ones.
            first = found[0][0]
            second = next((row for row in found[1] if row.key != first.key), first)
            pairs.append((report.title, first, second))
    distinct = [pair for pair in pairs if pair[1].key != pair[2].key]
    # The same row is compared across two comparisons, such as those of two batch sizes.
    if not distinct:
        distinct = [_across_comparisons(a, b, reports)]
    return [(title, explain(first, second)) for title, first, second in distinct]


def _across_comparisons(
    a: str, b: str, reports: Sequence[ComparisonReport]
) -> tuple[str, ComparisonRow, ComparisonRow]:
    """The first row that ``a`` means, and the first of another comparison that ``b`` means. Raises UsageError."""
    for report in reports:
        for other in reports:
            found = [rows_called(each.comparison.rows, text) for each, text in ((report, a), (other, b))]
            if other is not report and all(found):
                titles = dict.fromkeys(provenance.title(row.runs) for (row, *_) in found)
                return "; ".join(titles), found[0][0], found[1][0]
    label = next(row.label for report in reports for row in rows_called(report.comparison.rows, a))
    raise UsageError(f"{a} and {b} are the same row, {label}", remedy="name two rows, or give two results that differ")
