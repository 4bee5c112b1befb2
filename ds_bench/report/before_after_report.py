"""Two results row by row: as a table, for JSON, and as tests for CI."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from .. import units
from ..analysis.before_after import BeforeAfter, RowChange
from ..analysis.comparison import ComparisonRow
from ..analysis.intervals import RatioInterval
from ..analysis.merge_results import identity
from ..records.schema import INTERRUPTED, SKIPPED, UNSUPPORTED
from .junit import TestCase
from .table_layout import Column, Table, make_table


def changes_table(comparison: BeforeAfter) -> Table:
    """Return a line for each row, with all remarks below, then the differences in machines, versions and settings."""
    table = make_table(_COLUMNS, comparison.rows, always=len(_COLUMNS))
    labels_of: dict[str, list[str]] = {}
    for row in comparison.rows:
        reasons = row.incomparable_reasons
        if comparison.environment_unknown:  # printed once for all rows, with the hardware
            reasons = tuple(reason for reason in reasons if reason not in comparison.hardware)
        texts = [*(f"no ratio: {reason}" for reason in reasons), *(f"changed: {change}" for change in row.changes)]
        # A caveat that both results have counts once.
        for text in dict.fromkeys([*texts, *row.caveats]):
            labels_of.setdefault(text, []).append(row.label)
    remarks = [
        f"{'all rows' if len(labels) == len(comparison.rows) > 1 else '; '.join(labels)}: {text}"
        for text, labels in labels_of.items()
    ]
    return replace(table, notes=[*remarks, *_general_lines(comparison)])


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
    """Yield differences in machines, versions and settings, and how far ratios can be trusted."""

    def runs(rows: Iterable[ComparisonRow | None]) -> set[tuple[object, ...]]:
        launched = [run.row for row in rows if row is not None for run in row.runs if run.row.started_at is not None]
        return set(map(identity, launched))

    before, after = runs(row.before for row in comparison.rows), runs(row.after for row in comparison.rows)
    if shared := before & after:
        yield f"{len(shared)} of the {units.format_items(len(after), 'run')} in AFTER are in BEFORE too"
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
        yield "intervals cover differences within a session; to see those between sessions, measure the same code twice"
    if comparison.configs_unknown:
        yield "at least one result has no DeepSpeed configurations, so what changed in them is unknown"


def _interval_text(row: RowChange) -> str:
    if row.ratio is None:
        return units.MISSING
    if row.interval is None:
        return "not tested: fewer than three runs"
    unsure = ", too wide to decide anything" if row.interval.too_wide else ", within the noise"
    return f"{row.interval.low:.2f} to {row.interval.high:.2f}{'' if row.interval.distinguishable else unsure}"


def _throughput(row: ComparisonRow | None) -> str:
    if row is None:
        return "absent"
    if row.tokens_per_second is None:
        return row.runs[-1].outcome.status
    return f"{units.format_rate(row.tokens_per_second)} {row.rate_unit}"


def _memory_changes(row: RowChange) -> str:
    changes = []
    for name, attribute in (("GPU", "gpu_peak_bytes"), ("CPU", "host_peak_bytes")):
        before, after = getattr(row.before, attribute, None), getattr(row.after, attribute, None)
        if before is not None and after is not None:
            sign = "+" if after >= before else "-"
            changes.append(f"{name} {units.format_bytes(after)} ({sign}{units.format_bytes(abs(after - before))})")
    return ", ".join(changes) or units.MISSING


_COLUMNS: tuple[Column[RowChange], ...] = (
    Column("Row", lambda row: row.label),
    Column("Before", lambda row: _throughput(row.before)),
    Column("After", lambda row: _throughput(row.after)),
    Column("Ratio", lambda row: units.format_ratio(row.ratio)),
    Column("95 % interval", _interval_text, left=True),
    Column("Memory", _memory_changes, left=True, priority=1, noted=True),
)


def _figures(row: RowChange) -> str:
    cells = ((column.heading, column.cell(row)) for column in _COLUMNS[1:])
    return "; ".join(f"{heading}: {text}" for heading, text in cells if text != units.MISSING)


def junit_cases(comparison: BeforeAfter) -> list[TestCase]:
    """Return a test for each row: it fails if the row trained before and does not now, or is new and did not train.

    Unlike in a check against baselines, figures have no limits here.
    """
    cases = []
    for row in comparison.rows:
        trained_before = row.before is not None and row.before.succeeded
        trains = row.after is not None and row.after.succeeded
        case = TestCase(
            name=row.label, outcome="passed", message="; ".join([_figures(row), *row.changes, *row.caveats])
        )
        # A row that was interrupted or not launched says nothing about the code.
        unjudged = row.after is not None and row.after.last_run.outcome.status in (INTERRUPTED, SKIPPED, UNSUPPORTED)
        if row.before is None and not unjudged:
            case = replace(case, outcome="passed" if trains else "failure", message=f"new: {_figures(row)}")
        elif trained_before and not trains and not unjudged:
            case = replace(case, outcome="failure", message=_figures(row))
        elif row.ratio is None:
            reasons = "; ".join([_figures(row), *row.incomparable_reasons])
            case = replace(case, outcome="skipped", message=f"no ratio: {reasons}")
        cases.append(case)
    return cases
