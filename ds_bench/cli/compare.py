"""The command ``compare``: two results row by row, before and after a change, as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .. import units
from ..analysis import load_results
from ..analysis.before_after import ABSENT, BeforeAfter, RowChange, compare_before_after
from ..analysis.comparison import ComparisonRow
from ..analysis.intervals import RatioInterval
from ..system import terminal


def show_changes(before: Path, after: Path) -> int:
    """Prints both results row by row. Returns 0; raises UsageError."""
    for line in lines(compare_before_after(load_results.load(before), load_results.load(after))):
        terminal.print_text(line)
    return 0


def lines(comparison: BeforeAfter) -> Iterator[str]:
    """The comparison as text: the rows, then the differences between machines, versions and settings."""
    width = max((len(row.label) for row in comparison.rows), default=0)
    for row in comparison.rows:
        yield f"{row.label:<{width}}  {_figures(row)}"
        for reason in row.incomparable_reasons:
            if comparison.environment_unknown and reason in comparison.hardware:  # printed once, below
                continue
            yield f"{'':<{width}}    no ratio: {reason}"
        for change in row.changes:
            yield f"{'':<{width}}    changed: {change}"
        for caveat in row.caveats:
            yield f"{'':<{width}}    {caveat}"
    yield ""
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
    if comparison.configs_unknown:
        yield "the DeepSpeed configurations of a result are not known, nor what changed in them"


def _figures(row: RowChange) -> str:
    parts = [f"{_throughput(row.before)} → {_throughput(row.after)}"]
    if row.before is None or row.after is None:
        return parts[0]
    if row.ratio is not None:
        parts.append(f"{units.format_ratio(row.ratio)} {_interval_text(row.interval)}")
    parts += _memory_change("GPU", row.before.gpu_peak_bytes, row.after.gpu_peak_bytes)
    parts += _memory_change("CPU", row.before.host_peak_bytes, row.after.host_peak_bytes)
    return "; ".join(parts)


def _throughput(row: ComparisonRow | None) -> str:
    if row is None:
        return ABSENT
    if row.tokens_per_second is None:
        return row.summaries[-1].record.outcome.status
    return f"{units.format_count(row.tokens_per_second)} tokens/s"


def _interval_text(interval: RatioInterval | None) -> str:
    if interval is None:
        return "(not tested: fewer than three runs)"
    verdict = ""
    if not interval.distinguishable:
        verdict = ", too wide to decide anything" if interval.too_wide else ", inside the noise"
    return f"(95 % interval {interval.low:.2f} to {interval.high:.2f}{verdict})"


def _memory_change(name: str, before: int | None, after: int | None) -> list[str]:
    if before is None or after is None:
        return []
    sign = "+" if after >= before else "-"
    return [f"{name} memory {units.format_bytes(after)} ({sign}{units.format_bytes(abs(after - before))})"]
