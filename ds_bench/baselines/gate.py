"""Compares results with baselines: a result passes, is a regression, or is not comparable. Saves baselines too.

A change is a regression if it is larger than the entry's tolerance and, if both sides have the three runs that a test
needs, larger than the noise between runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .. import units
from ..analysis.intervals import RatioInterval, ratio_interval
from ..errors import UsageError
from ..records.schema import INTERRUPTED, SKIPPED
from ..system.environment import comparability_differences
from . import store
from .result import BenchmarkResult
from .store import DEFAULT_TOLERANCE, BaselineEntry

DEFAULT_PATH = Path("baselines.json")
_MAX_SHOWN_RISE, _MAX_SHOWN_FALL = 100.0, 0.9995
"""Rise in memory and fall in throughput, as fractions of the baseline, above which no number is shown."""
_LOWEST_EXCUSED_RATIO = 0.5
"""Lowest throughput, as a fraction of the baseline, that other programs on the same processors excuse."""
_ROUNDING = 1e-9
"""Relative rounding error of a computed limit, so that a value at the limit does not exceed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineComparison:
    """The verdict on one result."""

    name: str
    passed: bool | None
    """False: a regression. None: not comparable, neither passed nor a regression."""
    message: str
    """One line: the figures and the reason."""
    baseline: BaselineEntry | None = None
    """None if no baseline has that name; the result then passes with a message."""
    throughput_ratio: float | None = None
    """Tokens/s (samples/s if the result has no tokens) divided by the baseline's."""
    memory_ratio: float | None = None
    """Peak memory divided by the baseline's."""
    regressions: tuple[str, ...] = ()
    """Any of ``throughput``, ``memory``, ``status`` (the row no longer trains, or a caveat disqualifies its figures)
    and ``missing`` (the row is gone)."""
    unmatched: bool = False
    """The row has usable figures, but no baseline has its name, so nothing guards it."""
    noisy: bool = False
    """The result passed, but noise could hide a regression beyond the tolerance."""

    @property
    def comparable(self) -> bool:
        """Whether hardware, versions and workload allow a verdict."""
        return self.passed is not None

    @property
    def failed(self) -> bool:
        """Whether it is a regression."""
        return self.passed is False


def save_baseline(entry: BaselineEntry, path: Path | str = DEFAULT_PATH) -> None:
    """Write the entry, replacing one of the same name but keeping its unknown keys. Raises UsageError."""
    store.edit(
        Path(path), lambda entries: {**entries, entry.name: _with_unknown_keys(entries.get(entry.name, {}), entry)}
    )


def save_results(
    results: Iterable[BenchmarkResult], path: Path | str = DEFAULT_PATH, tolerance: float | None = None
) -> list[BaselineEntry]:
    """Save all results in one write. ``tolerance``: None keeps an existing entry's and gives a new one 0.05.

    Raises UsageError, or ValueError if a result did not succeed or the tolerance is invalid.
    """
    saved: list[BaselineEntry] = []

    def change(entries: store.Entries) -> store.Entries:
        changed = dict(entries)
        for result in results:
            before = changed.get(result.name, {})
            new_tolerance = tolerance
            if new_tolerance is None:
                new_tolerance = _entry(result.name, before, path).tolerance if before else DEFAULT_TOLERANCE
            saved.append(BaselineEntry.of(result, new_tolerance))
            changed[result.name] = _with_unknown_keys(before, saved[-1])
        return changed

    store.edit(Path(path), change)
    return saved


def _with_unknown_keys(before: Mapping[str, object], entry: BaselineEntry) -> dict[str, object]:
    known = {each.name for each in fields(BaselineEntry)}
    return {**entry.to_dict(), **{key: value for key, value in before.items() if key not in known}}


def load_baseline(name: str, path: Path | str = DEFAULT_PATH) -> BaselineEntry | None:
    """Return the entry of that name; None if it or the file does not exist. Raises UsageError if it is invalid."""
    entries = store.read(Path(path)) or {}
    return _entry(name, entries[name], path) if name in entries else None


def missing_baselines(results: Sequence[BenchmarkResult], path: Path | str = DEFAULT_PATH) -> list[BaselineEntry]:
    """Return the file's entries that should have a result here but have none.

    An entry should have a result if another entry of the same saved run (``BaselineEntry.run_id``) has one or, without
    a run id, if a result has the same workload and kind of row, by stage or by offload. A limit set by hand needs no
    result. Raises UsageError if the file is invalid.
    """
    entries = [_entry(name, data, path) for name, data in (store.read(Path(path)) or {}).items()]
    names = {result.name for result in results}
    runs = {entry.run_id for entry in entries if entry.name in names and entry.run_id}

    def shared(workload: Mapping[str, Any]) -> tuple[object, ...]:
        keys = ("model", "batch_size", "seq_length", "grad_accum", "precision", "activation_checkpointing", "num_gpus")
        # Rows chosen by stage are called zeroN, unlike those of offload strategies.
        by_stage = workload.get("strategy") == f"zero{workload.get('stage')}"
        return (by_stage, *(workload.get(key) for key in keys))

    workloads = [shared(result.workload) for result in results if result.workload]
    return [
        entry
        for entry in entries
        if entry.name not in names
        and (entry.run_id in runs or (entry.run_id is None and entry.workload and shared(entry.workload) in workloads))
    ]


def _entry(name: str, data: Mapping[str, object], path: Path | str) -> BaselineEntry:
    try:
        return BaselineEntry.from_dict({**data, "name": name})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: baseline {name!r}: {error}", remedy="correct it, or save it again") from None


def compare_to_baseline(
    result: BenchmarkResult, baseline: BaselineEntry | None = None, *, path: Path | str = DEFAULT_PATH
) -> BaselineComparison:
    """Compare a result with a baseline. ``baseline``: None reads the entry with the result's name from ``path``.

    Raises UsageError if the file is invalid.
    """
    baseline = load_baseline(result.name, path) if baseline is None else baseline
    unusable = None
    if not result.succeeded:
        unusable = f"it ended with {result.status}{f': {result.error}' if result.error else ''}"
    elif result.doubts:
        unusable = f"its figures must not be used: {'; '.join(result.doubts)}"
    if baseline is None:
        text = "; ".join(filter(None, ["no baseline of this name", unusable]))
        return BaselineComparison(name=result.name, passed=True, message=text, unmatched=not unusable)
    # Before the status: a failure on another machine or with other versions is not a regression of the code.
    reasons = list(_incomparable_reasons(result, baseline))
    if reasons:
        text = f"not comparable with the baseline: {'; '.join(reasons)}"
        return BaselineComparison(name=result.name, passed=None, message=text, baseline=baseline)
    if unusable:
        text = f"regression: {unusable}; the baseline succeeded"
        return BaselineComparison(
            name=result.name, passed=False, message=text, baseline=baseline, regressions=("status",)
        )
    metrics, tolerance = _compare_metrics(result, baseline), baseline.tolerance
    regressed = [metric for metric in metrics if metric.regressed(tolerance)]
    # Other programs on the same processors slow any code down, but hardly ever to less than half its speed.
    excused = [
        metric
        for metric in regressed
        if result.disturbances and not metric.more_is_worse and metric.ratio >= _LOWEST_EXCUSED_RATIO
    ]
    regressions = tuple(metric.kind for metric in regressed if metric not in excused)
    ratios = {metric.kind: metric.ratio for metric in metrics}
    noisy = [] if regressions else [metric for metric in metrics if metric in excused or metric.noisy(tolerance)]
    excuse = ", which other programs on the processors may have caused"
    remarks = [excuse if each in excused else each.noise_text if each in noisy else "" for each in metrics]
    parts = [metric.text(tolerance) + remark for metric, remark in zip(metrics, remarks, strict=True)]
    parts += _remarks(result, baseline, metrics)
    return BaselineComparison(
        name=result.name,
        passed=not regressions,
        message=f"{'regression' if regressions else 'passed'}: {'; '.join(parts)}",
        baseline=baseline,
        throughput_ratio=ratios.get("throughput"),
        memory_ratio=ratios.get("memory"),
        regressions=regressions,
        noisy=bool(noisy),
    )


def _incomparable_reasons(result: BenchmarkResult, baseline: BaselineEntry) -> Iterator[str]:
    """Yield why a result cannot be compared: it was interrupted or skipped, has no figure in common with the
    baseline, or differs in hardware, versions or a workload field that both sides have."""
    # An interrupted or skipped row says nothing about the code.
    if result.status in (INTERRUPTED, SKIPPED):
        yield f"it ended with {result.status}"
    if not baseline.set_by_hand:
        if result.environment is None or baseline.environment is None:
            side = "result" if result.environment is None else "baseline"
            yield f"the {side} does not name its hardware and versions"
        else:
            yield from comparability_differences(result.environment, baseline.environment)
    for key, ours in {**result.workload, "memory": result.memory}.items():
        theirs = baseline.memory if key == "memory" else baseline.workload.get(key)
        # A different DeepSpeed configuration may be the change under test, so it is only a remark.
        if key != "ds_config" and None not in (ours, theirs) and ours != theirs:
            yield f"{key} {ours} vs {theirs}"
    if result.succeeded and not _compare_metrics(result, baseline):
        yield "the two sides have no figure in common"


def _remarks(result: BenchmarkResult, baseline: BaselineEntry, metrics: Sequence[_MetricComparison]) -> Iterator[str]:
    """Yield remarks that do not change the verdict."""
    if any(metric.interval is None for metric in metrics):
        variation = max(result.step_variation or 0.0, baseline.step_variation or 0.0)
        guide = f" (steps vary by {units.format_percent(variation)}, a rough guide only)" if variation else ""
        yield f"not tested against noise: fewer than three runs on at least one side{guide}"
    configs = result.workload.get("ds_config"), baseline.workload.get("ds_config")
    if None not in configs and configs[0] != configs[1]:
        yield "the DeepSpeed configuration is not the baseline's"
    yield from result.disturbances
    if result.failed_runs:
        yield f"{units.format_items(result.failed_runs, 'run')} failed"


# ------------------------------------------------------------------ throughput and memory


@dataclass(frozen=True, slots=True, kw_only=True)
class _MetricComparison:
    """Throughput or peak memory of a result and of its baseline."""

    kind: str
    """``throughput`` or ``memory``."""
    label: str
    value: float
    baseline: float
    interval: RatioInterval | None
    """Interval of ``ratio``; None if either side has fewer than three runs."""
    format: Callable[[float], str]
    """Text of a value with its unit."""

    @property
    def ratio(self) -> float:
        return self.value / self.baseline

    @property
    def more_is_worse(self) -> bool:
        return self.kind == "memory"

    def exceeds(self, tolerance: float) -> bool:
        """Whether the change for the worse is larger than ``tolerance``, a fraction of the baseline."""
        if self.more_is_worse:
            return self.value > self.baseline * (1 + tolerance) * (1 + _ROUNDING)
        return self.value < self.baseline * (1 - tolerance) * (1 - _ROUNDING)

    def regressed(self, tolerance: float) -> bool:
        """Whether the change for the worse exceeds the tolerance and, if tested, the noise between runs."""
        if not self.exceeds(tolerance) or self.interval is None:
            return self.exceeds(tolerance)
        above_noise = self.interval.low > 1 if self.more_is_worse else self.interval.high < 1
        return above_noise and not self.interval.too_wide

    @property
    def undetectable_change(self) -> float | None:
        """The largest change for the worse, as a fraction, that noise would hide; None if not tested."""
        if self.interval is None:
            return None
        # On a log scale, the interval is equally wide at any ratio: it excludes 1 beyond these factors.
        center, low, high = self.interval.ratio, self.interval.low, self.interval.high
        if self.more_is_worse:
            return center / low - 1 if low > 0 else math.inf
        return 1 - center / high

    def noisy(self, tolerance: float) -> bool:
        """Whether the interval allows a regression beyond the tolerance that would go undetected."""
        if self.interval is None or self.undetectable_change is None or self.regressed(tolerance):
            return False
        worst = self.interval.high - 1 if self.more_is_worse else 1 - self.interval.low
        return min(self.undetectable_change, worst) > tolerance + _ROUNDING

    @property
    def noise_text(self) -> str:
        """The smallest change that would be detected, as text; empty if not tested."""
        change = self.undetectable_change
        if change is None:
            return ""
        if change > (_MAX_SHOWN_RISE if self.more_is_worse else _MAX_SHOWN_FALL):
            return ", too noisy to detect any change"
        return f", too noisy to detect changes below {units.format_percent(change)}"

    def text(self, tolerance: float) -> str:
        """``tokens/s 940 against 1,000 (-6.0 %), beyond the tolerance of 5.0 %``, then the interval if there is one."""
        worse = self.value > self.baseline if self.more_is_worse else self.value < self.baseline
        exceeds, verdict = self.exceeds(tolerance), "no worse"
        if exceeds or worse:
            verdict = f"{'beyond' if exceeds else 'within'} the tolerance of {units.format_percent(tolerance)}"
        values = f"{self.format(self.value)} against {self.format(self.baseline)}"
        text = f"{self.label} {values} ({_format_change(self.ratio)}), {verdict}"
        if self.interval is None:
            return text
        ends = f"(95 % interval {_format_change(self.interval.low)} to {_format_change(self.interval.high)})"
        if self.interval.too_wide:
            return f"{text}{', but' if exceeds else ', and'} the interval is too wide to decide anything {ends}"
        # An interval of zero width comes from equal runs, which have no noise.
        if self.interval.distinguishable or self.interval.low == self.interval.high:
            return f"{text} {ends}"
        return f"{text}{' but' if exceeds else ' and'} within the noise {ends}"


def _format_change(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def _compare_metrics(result: BenchmarkResult, baseline: BaselineEntry) -> list[_MetricComparison]:
    """Compare throughput and peak memory, if both sides have them."""

    def format_mb(count: float) -> str:
        return units.format_bytes(count * units.BYTES_PER_MB)

    throughput: tuple[str, str, str, Callable[[float], str]]
    throughput = ("tokens/s", "throughput_tokens_per_sec", "tokens_per_sec_runs", units.format_count)
    if result.throughput_tokens_per_sec is None:  # a script whose batches hold no token ids
        throughput = ("samples/s", "samples_per_sec", "samples_per_sec_runs", units.format_significant)
    memory = {"gpu": "peak GPU memory", "host": "peak CPU memory", None: "peak memory"}[result.memory]
    metrics = []
    for kind, label, name, runs_name, format_value in (
        ("throughput", *throughput),
        ("memory", memory, "peak_memory_mb", "peak_memory_mb_runs", format_mb),
    ):
        value, baseline_value = getattr(result, name), getattr(baseline, name)
        if value is None or baseline_value is None:
            continue
        interval = ratio_interval(getattr(result, runs_name), getattr(baseline, runs_name))
        # Only the CPU accelerator, whose ranks share processors, has results in host memory.
        if interval is not None and result.memory == "host":
            interval = interval.on_shared_processor
        metrics.append(
            _MetricComparison(
                kind=kind, label=label, value=value, baseline=baseline_value, interval=interval, format=format_value
            )
        )
    return metrics
