"""The verb ``compare``: two results row by row, before and after a change, with what may explain what changed.

Versions may differ here, since an upgrade is what such a comparison is about; they are named. A ratio is given
only where hardware, workload and method agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from . import compare, console, environment, load, units
from .compare import StrategyResult
from .environment import Environment
from .inference import RatioInterval, ratio_interval
from .load import LoadedResult

ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One row of both results."""

    label: str
    before: StrategyResult | None
    after: StrategyResult | None
    ratio: float | None = None
    """Throughput after to before; None where the two do not compare or one has no numbers."""
    interval: RatioInterval | None = None
    """95 % on per-run means; None below three runs on either side ("not tested")."""
    obstacles: tuple[str, ...] = ()
    """Why there is no ratio."""
    changes: tuple[str, ...] = ()
    """Of the DeepSpeed configuration and of what was resolved from it: what may explain a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """Two results side by side."""

    pairs: tuple[Pair, ...]
    hardware: tuple[str, ...]
    """Differences that forbid every ratio."""
    software: tuple[str, ...]
    """Versions that differ."""
    settings: tuple[str, ...]
    """What else differs between the machines' states."""
    unknown: bool
    """Whether a result does not tell its environment."""


def versus(before: LoadedResult, after: LoadedResult) -> Versus:
    """Rows paired by model and strategy, in order of the first result; then what only the second has."""
    a, b = before.environment, after.environment
    hardware = tuple(environment.hardware_differences(a, b)) if a and b else ()
    return Versus(
        pairs=tuple(_pairs(before, after, hardware)),
        hardware=hardware,
        software=_of(environment.software_differences, a, b),
        settings=_of(environment.setting_differences, a, b),
        unknown=a is None or b is None,
    )


def _of(differences: Any, a: Environment | None, b: Environment | None) -> tuple[str, ...]:
    return tuple(differences(a, b)) if a and b else ()


def _pairs(before: LoadedResult, after: LoadedResult, hardware: Sequence[str]) -> Iterator[Pair]:
    left = compare.build(before.summaries).results
    right = list(compare.build(after.summaries).results)
    for row in left:
        partner = next((other for other in right if _same_row(row, other)), None)
        if partner is not None:
            right.remove(partner)
        yield _pair(row, partner, hardware)
    for row in right:
        yield _pair(None, row, hardware)


def _same_row(a: StrategyResult, b: StrategyResult) -> bool:
    def name(row: StrategyResult) -> tuple[object, ...]:
        return row.strategy.name, row.strategy.stage, row.summaries[0].record.trial.workload.model

    return name(a) == name(b)


def _pair(before: StrategyResult | None, after: StrategyResult | None, hardware: Sequence[str]) -> Pair:
    label = before.label if before else after.label if after else ABSENT
    if before is None or after is None:
        return Pair(
            label=label, before=before, after=after, obstacles=(f"{'before' if after else 'after'}: no such row",)
        )
    obstacles = (*hardware, *_obstacles(before, after))
    changes = tuple(_changes(before, after))
    if obstacles or not before.tokens_per_second or not after.tokens_per_second:
        return Pair(label=label, before=before, after=after, obstacles=obstacles, changes=changes)
    return Pair(
        label=label,
        before=before,
        after=after,
        ratio=after.tokens_per_second / before.tokens_per_second,
        interval=ratio_interval(_runs(after), _runs(before)),
        changes=changes,
    )


def _runs(row: StrategyResult) -> list[float]:
    return [run.tokens_per_second for run in row.successes if run.tokens_per_second is not None]


def _obstacles(before: StrategyResult, after: StrategyResult) -> Iterator[str]:
    """What makes the two rows measurements of different things."""
    a, b = before.summaries[0].record, after.summaries[0].record
    yield from _field_differences(a.trial.workload, b.trial.workload, leave_out=("num_steps", "warmup_steps"))
    yield from _field_differences(
        a.trial.placement, b.trial.placement, leave_out=("launcher", "hostfile", "nvme_path", "supported_precisions")
    )
    if a.method_version != b.method_version:
        yield f"method of measurement {a.method_version} against {b.method_version}"
    sizes = [_effective(row) for row in (before, after)]
    if None not in sizes and sizes[0] != sizes[1]:
        yield f"samples per step {sizes[0]} against {sizes[1]}"


def _effective(row: StrategyResult) -> int | None:
    """Sequences per optimizer step of the whole job, as the engine read them back."""
    for run in row.successes:
        if run.micro_batch_size and run.grad_accum and run.data_parallel_size:
            return run.micro_batch_size * run.grad_accum * run.data_parallel_size
    return None


def _field_differences(a: Any, b: Any, leave_out: Sequence[str] = ()) -> Iterator[str]:
    for entry in fields(a):
        left, right = getattr(a, entry.name), getattr(b, entry.name)
        if left != right and entry.name not in leave_out:
            shown = (str(left), str(right)) if max(len(str(left)), len(str(right))) < 40 else ("one", "another")
            yield f"{entry.name} {shown[0]} against {shown[1]}"


def _changes(before: StrategyResult, after: StrategyResult) -> Iterator[str]:
    """Everything that may explain a change: steps, launch, optimizer, each key of the configuration."""
    a, b = before.summaries[-1].record, after.summaries[-1].record
    work_a, work_b = a.trial.workload, b.trial.workload
    for name in ("num_steps", "warmup_steps"):
        if getattr(work_a, name) != getattr(work_b, name):
            yield f"{name} {getattr(work_a, name)} against {getattr(work_b, name)}"
    if a.launch != b.launch:
        yield f"launch {a.launch or ABSENT} against {b.launch or ABSENT}"
    yield from _config_changes("", a.trial.ds_config, b.trial.ds_config)
    if a.ranks and b.ranks:
        if a.ranks[0].optimizer_class != b.ranks[0].optimizer_class:
            yield f"optimizer {a.ranks[0].optimizer_class} against {b.ranks[0].optimizer_class}"
        asked = {line.split()[0] for line in _config_changes("", a.trial.ds_config, b.trial.ds_config)}
        for line in _config_changes("", a.ranks[0].resolved_config, b.ranks[0].resolved_config):
            if line.split()[0] not in asked:
                yield f"{line} (as DeepSpeed resolved it)"


def _config_changes(path: str, a: Any, b: Any) -> Iterator[str]:
    """``zero_optimization.overlap_comm true against false``, key by key."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _config_changes(f"{path}.{key}" if path else str(key), a.get(key), b.get(key))
    elif a != b:
        yield f"{path} {_value(a)} against {_value(b)}"


def _value(value: Any) -> str:
    if value is None:
        return ABSENT
    return str(value).lower() if isinstance(value, bool) else str(value)


def lines(found: Versus) -> Iterator[str]:
    """The whole comparison as text."""
    width = max((len(pair.label) for pair in found.pairs), default=0)
    for pair in found.pairs:
        yield f"{pair.label:<{width}}  {_numbers(pair)}"
        for why in pair.obstacles:
            yield f"{'':<{width}}    not comparable: {why}"
        for change in pair.changes:
            yield f"{'':<{width}}    changed: {change}"
    yield ""
    for heading, differences in (
        ("hardware differs, so no ratio is given", found.hardware),
        ("versions differ", found.software),
        ("other differences", found.settings),
    ):
        if differences:
            yield f"{heading}: {'; '.join(differences)}"
    if found.unknown:
        yield "a result does not tell its environment: hardware and versions are not compared"
    elif not (found.hardware or found.software or found.settings):
        yield "same hardware, versions and settings"


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
    verdict = "" if interval.distinguishable else ", inside the noise"
    return f"(95 % interval {interval.low:.2f} to {interval.high:.2f}{verdict})"


def _memory(name: str, before: int | None, after: int | None) -> list[str]:
    if before is None or after is None:
        return []
    sign = "+" if after >= before else "-"
    return [f"{name} memory {units.format_bytes(after)} ({sign}{units.format_bytes(abs(after - before))})"]


def show_versus(before: Path, after: Path) -> int:
    """Prints both results side by side. Raises UsageError; returns 0."""
    found = versus(load.load(before), load.load(after))
    for line in lines(found):
        console.print_text(line)
    return 0
