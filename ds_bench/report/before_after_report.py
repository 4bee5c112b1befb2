"""Two results row by row: as text, as a Markdown table, for JSON, and as tests for CI."""

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
from .table_layout import Column, make_table


def lines(comparison: BeforeAfter) -> Iterator[str]:
    """Yield the comparison as text: the rows, then the differences between machines, versions and settings."""
    width = max((len(row.label) for row in comparison.rows), default=0)
    labels_of = _labels_by_remark(comparison)
    # Each row with its own remarks, then each remark that several rows share.
    for row in comparison.rows:
        yield f"{row.label:<{width}}  {_figures(row)}"
        for text, labels in labels_of.items():
            if labels == [row.label]:
                yield f"{'':<{width}}    {text}"
    for text, labels in labels_of.items():
        if len(labels) > 1:
            yield f"{'all rows' if len(labels) == len(comparison.rows) else '; '.join(labels)}: {text}"
    yield ""
    yield from _general_lines(comparison)


def markdown_table(comparison: BeforeAfter) -> str:
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
    remarks = [f"{'; '.join(labels)}: {text}" for text, labels in _labels_by_remark(comparison).items()]
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

    def runs(rows: Iterable[ComparisonRow | None]) -> set[tuple[object, ...]]:
        launched = [run.row for row in rows if row is not None for run in row.runs if run.row.started_at is not None]
        return set(map(identity, launched))

    before, after = runs(row.before for row in comparison.rows), runs(row.after for row in comparison.rows)
    if shared := before & after:
        yield f"{len(shared)} of the {units.format_items(len(after), 'run')} in AFTER are runs of BEFORE too"
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
        yield "a result has no DeepSpeed configurations, so what changed in them is unknown"


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
    unsure = ", too wide to decide anything" if interval.too_wide else ", within the noise"
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
    return f"{units.format_rate(row.tokens_per_second)} {row.rate_unit}"


def _memory_change(name: str, before: int | None, after: int | None) -> list[str]:
    if before is None or after is None:
        return []
    sign = "+" if after >= before else "-"
    return [f"{name} memory {units.format_bytes(after)} ({sign}{units.format_bytes(abs(after - before))})"]


def junit_cases(comparison: BeforeAfter) -> list[TestCase]:
    """Return a test for each row: it fails if the row trained before and does not now, or is new and did not train.

    Unlike those of a baseline, figures have no limit here.
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
