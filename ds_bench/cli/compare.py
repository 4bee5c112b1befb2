"""The commands ``compare``, two results row by row, and ``explain``, why one row differs from another."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

from .. import units
from ..analysis import load_results, provenance
from ..analysis.before_after import BeforeAfter, RowChange, compare_before_after
from ..analysis.comparison import ComparisonRow, rows_called
from ..analysis.intervals import RatioInterval
from ..analysis.row_difference import RowDifference, explain
from ..errors import UsageError
from ..report.comparison_report import ComparisonReport
from ..report.result_formats import TestCase, junit_text
from ..report.row_explanation import explanation_lines
from ..report.table_layout import Column, make_table
from ..system import terminal
from .report import build_reports, check_output, write_output


def show_changes(
    before: Path, after: Path, junit: Path | None = None, markdown: bool = False, as_json: bool = False
) -> int:
    """Print both results row by row. Return 0; raises UsageError. ``junit``: file that gets a test for each row."""
    if markdown and as_json:
        raise UsageError("--markdown and --json together", remedy="give one of them")
    if junit is not None:
        check_output("--junit", junit)
    comparison = compare_before_after(load_results.load(before), load_results.load(after))
    if as_json:
        terminal.print_json(json.dumps(as_data(comparison), indent=1, allow_nan=False, ensure_ascii=False))
    elif markdown:
        terminal.print_text(_markdown(comparison))
    else:
        for line in lines(comparison):
            terminal.print_text(line)
    if junit is not None:
        cases = []
        for row in comparison.rows:
            # A row fails if it trained before and does not now: unlike a baseline, figures have no limit here.
            trained_before = row.before is not None and row.before.succeeded
            case = TestCase(
                name=row.label, outcome="passed", message="; ".join([_figures(row), *row.changes, *row.caveats])
            )
            if trained_before and not (row.after is not None and row.after.succeeded):
                case = replace(case, outcome="failure", message=_figures(row))
            elif row.ratio is None:
                reasons = "; ".join([_figures(row), *row.incomparable_reasons])
                case = replace(case, outcome="skipped", message=f"no ratio: {reasons}")
            cases.append(case)
        write_output("--junit", junit, junit_text("ds_bench compare", cases))
    return 0


def lines(comparison: BeforeAfter) -> Iterator[str]:
    """Yield the comparison as text: the rows, then the differences between machines, versions and settings."""
    yield from _row_lines(comparison)
    yield ""
    yield from _general_lines(comparison)


def _markdown(comparison: BeforeAfter) -> str:
    """Return a table of each row's figures, with all remarks below it."""
    columns: list[Column[RowChange]] = [
        Column("Row", lambda row: row.label),
        Column("Before", lambda row: _throughput(row.before)),
        Column("After", lambda row: _throughput(row.after)),
        Column("Ratio", lambda row: units.format_ratio(row.ratio)),
        Column("95 % interval", lambda row: _interval_text(row.interval) if row.ratio is not None else units.MISSING),
        Column("Memory", lambda row: "; ".join(_memory_changes(row)) or units.MISSING),
    ]
    table = make_table(columns, comparison.rows, always=len(columns))
    remarks = [f"{', '.join(labels)}: {text}" for text, labels in _labels_by_remark(comparison).items()]
    return replace(table, notes=[*remarks, *_general_lines(comparison)]).to_markdown()


def as_data(comparison: BeforeAfter) -> dict[str, Any]:
    """Return both results for JSON, with sizes in bytes."""

    def side(row: ComparisonRow | None) -> dict[str, Any] | None:
        if row is None:
            return None
        names = ("tokens_per_second", "rate_unit", "mean_step_seconds", "gpu_peak_bytes", "host_peak_bytes")
        status = row.last_run.outcome.status
        return {"status": status, "runs": len(row.successes), **{name: getattr(row, name) for name in names}}

    def interval(of: RatioInterval | None) -> dict[str, Any] | None:
        return None if of is None else {"low": of.low, "high": of.high, "distinguishable": of.distinguishable}

    rows = [
        {
            "label": row.label,
            "before": side(row.before),
            "after": side(row.after),
            "ratio": row.ratio,
            "interval": interval(row.interval),
            "incomparable_reasons": row.incomparable_reasons,
            "changes": row.changes,
            "caveats": row.caveats,
        }
        for row in comparison.rows
    ]
    return {"rows": rows, **{name: getattr(comparison, name) for name in ("hardware", "software", "settings")}}


def _general_lines(comparison: BeforeAfter) -> Iterator[str]:
    """Yield differences between machines, versions and settings, and how far ratios can be trusted."""
    without_ratio = f"{'' if comparison.environment_unknown else 'hardware differs, so '}no ratio is given"
    for heading, differences in (
        (without_ratio, comparison.hardware),
        ("versions differ", comparison.software),
        ("other differences", comparison.settings),
    ):
        if differences:
            yield f"{heading}: {'; '.join(differences)}"
    if not (comparison.hardware or comparison.software):
        same = not (comparison.settings or comparison.configs_unknown) and all(
            row.same_settings for row in comparison.rows
        )
        yield "same hardware, versions and settings" if same else "same hardware and versions"
    if any(row.interval is not None and row.interval.distinguishable for row in comparison.rows):
        yield "intervals cover how runs of one session differ, not how sessions do: measure the same code twice"
    if comparison.configs_unknown:
        yield "the DeepSpeed configurations of a result are not known, nor what changed in them"


def _row_lines(comparison: BeforeAfter) -> Iterator[str]:
    """Yield each row with its own remarks, then each remark that several rows share."""
    width = max((len(row.label) for row in comparison.rows), default=0)
    labels_of = _labels_by_remark(comparison)
    for row in comparison.rows:
        yield f"{row.label:<{width}}  {_figures(row)}"
        for text, labels in labels_of.items():
            if labels == [row.label]:
                yield f"{'':<{width}}    {text}"
    for text, labels in labels_of.items():
        if len(labels) > 1:
            yield f"{'all rows' if len(labels) == len(comparison.rows) else ', '.join(labels)}: {text}"


def _labels_by_remark(comparison: BeforeAfter) -> dict[str, list[str]]:
    """Return every remark about rows with the labels of its rows."""
    labels_of: dict[str, list[str]] = {}
    for row in comparison.rows:
        reasons = row.incomparable_reasons
        if comparison.environment_unknown:  # printed once for all rows, with the hardware
            reasons = tuple(reason for reason in reasons if reason not in comparison.hardware)
        texts = [*(f"no ratio: {reason}" for reason in reasons), *(f"changed: {change}" for change in row.changes)]
        # A caveat of both results counts once.
        for text in dict.fromkeys([*texts, *row.caveats]):
            labels_of.setdefault(text, []).append(row.label)
    return labels_of


def _figures(row: RowChange) -> str:
    parts = [f"{_throughput(row.before)} → {_throughput(row.after)}"]
    if row.before is None or row.after is None:
        return parts[0]
    if row.ratio is not None:
        of = "" if row.interval is None else "95 % interval "
        parts.append(f"{units.format_ratio(row.ratio)} ({of}{_interval_text(row.interval)})")
    return "; ".join([*parts, *_memory_changes(row)])


def _interval_text(interval: RatioInterval | None) -> str:
    if interval is None:
        return "not tested: fewer than three runs"
    unsure = ", too wide to decide anything" if interval.too_wide else ", inside the noise"
    return f"{interval.low:.2f} to {interval.high:.2f}{'' if interval.distinguishable else unsure}"


def _memory_changes(row: RowChange) -> list[str]:
    if row.before is None or row.after is None:
        return []
    return [
        *_memory_change("GPU", row.before.gpu_peak_bytes, row.after.gpu_peak_bytes),
        *_memory_change("CPU", row.before.host_peak_bytes, row.after.host_peak_bytes),
    ]


def _throughput(row: ComparisonRow | None) -> str:
    if row is None:
        return "absent"
    if row.tokens_per_second is None:
        return row.runs[-1].outcome.status
    return f"{units.format_count(row.tokens_per_second)} {row.rate_unit}"


def _memory_change(name: str, before: int | None, after: int | None) -> list[str]:
    if before is None or after is None:
        return []
    sign = "+" if after >= before else "-"
    return [f"{name} memory {units.format_bytes(after)} ({sign}{units.format_bytes(abs(after - before))})"]


# ------------------------------------------------------------------ explain


def show_explanation(a: str, b: str, results: Sequence[Path], as_json: bool) -> int:
    """Print why row ``b`` differs from row ``a``. Return 0; raises UsageError."""
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
    """Return the two rows of each comparison that has both; if none has, the first row of each name.

    Raises UsageError if a text matches no row, or both texts match only the same one.
    """

    def rows(report: ComparisonReport, text: str) -> list[ComparisonRow]:
        return rows_called(report.comparison.rows, text)

    # Each text must match a row somewhere; the loop below skips comparisons without one.
    for text in (a, b):
        if not any(rows(report, text) for report in reports):
            names = dict.fromkeys(row.configuration.name for report in reports for row in report.comparison.rows)
            raise UsageError(f"{text}: no row is called that", remedy=f"choose from {', '.join(names)}")
    found = []
    for report in reports:
        # Both texts may match several rows, such as a stage with and without offload: take two different ones.
        for first in rows(report, a)[:1]:
            found += [(report.title, first, row) for row in rows(report, b) if row.key != first.key][:1]
    if not found:
        # Compare across the first two comparisons that have the rows, for example with two batch sizes.
        across = (
            pair
            for report, other in permutations(reports, 2)
            for pair in product(rows(report, a)[:1], rows(other, b)[:1])
        )
        for pair in islice(across, 1):
            found = [("; ".join(dict.fromkeys(provenance.title(row.runs) for row in pair)), *pair)]
    if not found:
        label = next(row.label for report in reports for row in rows(report, a))
        raise UsageError(
            f"{a} and {b} are the same row, {label}", remedy="name two rows, or give two results that differ"
        )
    return [(title, explain(first, second)) for title, first, second in found]
