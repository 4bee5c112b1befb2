"""The verb ``compare``: two results row by row, before and after a change, with what may explain what changed.

Versions may differ here, since an upgrade is what such a comparison is about; they are named. A ratio is given
only where hardware, workload and method agree and both rows' figures are fit to be used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import units
from ..analysis import load_results
from ..analysis.before_after import ABSENT, Pair, both_tell_config, pairs
from ..analysis.comparison import StrategyResult
from ..analysis.intervals import RatioInterval
from ..analysis.load_results import LoadedResult
from ..system import environment, terminal
from ..system.environment import Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """Two results side by side."""

    pairs: tuple[Pair, ...]
    hardware: tuple[str, ...]
    """Differences of the hosts, or that one of them is not known: they forbid every ratio."""
    software: tuple[str, ...]
    """Versions that differ."""
    settings: tuple[str, ...]
    """What else differs between the machines' states."""
    unknown: bool
    """Whether a result does not tell its environment."""
    configs_unknown: bool = False
    """Whether a row does not tell its DeepSpeed configuration, so that changes of it are not known."""


def versus(before: LoadedResult, after: LoadedResult) -> Versus:
    """Every row of either result, and what their machines differ in."""
    a, b = before.environment, after.environment
    hardware = _of(environment.hardware_differences, a, b)
    silent = [str(result.source) for result in (before, after) if result.environment is None]
    if silent:
        hardware = (f"hardware and versions are not known of {' and '.join(silent)}; give the run folder",)
    software = _of(environment.software_differences, a, b)
    found = tuple(pairs(before.summaries, after.summaries, hardware, software))
    return Versus(
        pairs=found,
        hardware=hardware,
        software=software,
        settings=_of(environment.setting_differences, a, b),
        unknown=a is None or b is None,
        configs_unknown=any(
            pair.before and pair.after and not both_tell_config(pair.before, pair.after) for pair in found
        ),
    )


def _of(differences: Any, a: Environment | None, b: Environment | None) -> tuple[str, ...]:
    return tuple(differences(a, b)) if a and b else ()


def lines(found: Versus) -> Iterator[str]:
    """The whole comparison as text."""
    width = max((len(pair.label) for pair in found.pairs), default=0)
    for pair in found.pairs:
        yield f"{pair.label:<{width}}  {_numbers(pair)}"
        for why in pair.obstacles:
            if found.unknown and why in found.hardware:  # said once, below
                continue
            yield f"{'':<{width}}    no ratio: {why}"
        for change in pair.changes:
            yield f"{'':<{width}}    changed: {change}"
        for caveat in pair.caveats:
            yield f"{'':<{width}}    {caveat}"
    yield ""
    for heading, differences in (
        ("no ratio is given" if found.unknown else "hardware differs, so no ratio is given", found.hardware),
        ("versions differ", found.software),
        ("other differences", found.settings),
    ):
        if differences:
            yield f"{heading}: {'; '.join(differences)}"
    if not (found.hardware or found.software):
        same = not found.settings and not found.configs_unknown and all(pair.same_settings for pair in found.pairs)
        yield "same hardware, versions and settings" if same else "same hardware and versions"
    if found.configs_unknown:
        yield "a result does not tell its DeepSpeed configurations: what changed in them is not known"


def _numbers(pair: Pair) -> str:
    if pair.before is None or pair.after is None:
        return f"{_row(pair.before)} → {_row(pair.after)}"
    parts = [f"{_row(pair.before)} → {_row(pair.after)}"]
    if pair.ratio is not None:
        parts.append(f"{units.format_ratio(pair.ratio)} {_tested(pair.interval)}")
    parts += _memory("GPU", pair.before.gpu_peak_bytes, pair.after.gpu_peak_bytes)
    parts += _memory("CPU", pair.before.host_peak_bytes, pair.after.host_peak_bytes)
    return "; ".join(parts)


def _row(row: StrategyResult | None) -> str:
    if row is None:
        return ABSENT
    if row.tokens_per_second is None:
        return row.summaries[-1].record.outcome.status
    return f"{units.format_count(row.tokens_per_second)} tokens/s"


def _tested(interval: RatioInterval | None) -> str:
    if interval is None:
        return "(not tested: fewer than three runs)"
    verdict = ", too wide to decide anything" if interval.too_wide else ", inside the noise"
    verdict = "" if interval.distinguishable else verdict
    return f"(95 % interval {interval.low:.2f} to {interval.high:.2f}{verdict})"


def _memory(name: str, before: int | None, after: int | None) -> list[str]:
    if before is None or after is None:
        return []
    sign = "+" if after >= before else "-"
    return [f"{name} memory {units.format_bytes(after)} ({sign}{units.format_bytes(abs(after - before))})"]


def show_versus(before: Path, after: Path) -> int:
    """Prints both results side by side. Raises UsageError; returns 0."""
    found = versus(load_results.load(before), load_results.load(after))
    for line in lines(found):
        terminal.print_text(line)
    return 0
