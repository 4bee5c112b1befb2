"""The verdict on a result that is compared with its baseline: passed, a regression, or not comparable.

A change counts as a regression if it is beyond the entry's tolerance and, where three runs or more on both sides
allow a test, larger than the noise between runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import units
from ..analysis.intervals import RatioInterval, ratio_interval
from ..errors import UsageError
from ..records.schema import INTERRUPTED, SKIPPED
from ..system.environment import comparable
from . import store
from .result import BenchmarkResult
from .store import DEFAULT_TOLERANCE, BaselineEntry

DEFAULT_PATH = Path("baselines.json")
_ANY_RISE, _ANY_FALL = 100.0, 0.9995
"""Rise of memory and fall of throughput, as fractions of the baseline, beyond which a number says nothing more."""
_ROUNDING = 1e-9
"""Relative: what is computed to lie at the limit exactly is not beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineComparison:
    """The verdict on one result."""

    name: str
    passed: bool | None
    """False: a regression. None: not comparable, neither passed nor a regression."""
    message: str
    """One line: the figures and why."""
    baseline: BaselineEntry | None = None
    """None if no baseline has that name: the result has passed, and the message says so."""
    throughput_ratio: float | None = None
    """Tokens/s divided by the baseline's."""
    memory_ratio: float | None = None
    """Peak memory divided by the baseline's."""
    regressions: tuple[str, ...] = ()
    """Any of ``throughput``, ``memory``, ``status`` (it no longer runs, or a caveat disqualifies its figures) and
    ``missing`` (the result has no such row)."""
    unmatched: bool = False
    """The row trained and no baseline has its name, so that nothing guards it. False for a row that failed."""
    noisy: bool = False
    """Passed, but the runs vary so much that a regression beyond the tolerance would not be detected."""

    @property
    def comparable(self) -> bool:
        """Whether hardware, versions and workload allow a verdict."""
        return self.passed is not None

    @property
    def failed(self) -> bool:
        """Whether it is a regression."""
        return self.passed is False


def save_baseline(entry: BaselineEntry, path: Path | str = DEFAULT_PATH) -> None:
    """Writes the entry, replacing one of the same name; unknown keys of that entry are kept. Raises UsageError."""
    store.edit(
        Path(path), lambda entries: {**entries, entry.name: _with_unknown_keys(entries.get(entry.name, {}), entry)}
    )


def save_results(
    results: Iterable[BenchmarkResult], path: Path | str = DEFAULT_PATH, tolerance: float | None = None
) -> list[BaselineEntry]:
    """Saves all results in one write. ``tolerance``: None keeps that of an existing entry, 0.05 for a new one."""
    saved: list[BaselineEntry] = []

    def change(entries: store.Entries) -> store.Entries:
        changed = dict(entries)
        for result in results:
            before = changed.get(result.name)
            entry = BaselineEntry.of(result, _tolerance(result.name, before, tolerance, path))
            changed[result.name] = _with_unknown_keys(before or {}, entry)
            saved.append(entry)
        return changed

    store.edit(Path(path), change)
    return saved


def _tolerance(name: str, before: dict[str, object] | None, asked: float | None, path: Path | str) -> float:
    if asked is not None:
        return asked
    return DEFAULT_TOLERANCE if before is None else _entry(name, before, path).tolerance


def _with_unknown_keys(before: dict[str, object], entry: BaselineEntry) -> dict[str, object]:
    return {**entry.to_dict(), **{key: value for key, value in before.items() if key not in BaselineEntry.KEYS}}


def load_baseline(name: str, path: Path | str = DEFAULT_PATH) -> BaselineEntry | None:
    """The entry of that name; None if the entry or the file does not exist. Raises UsageError if it is invalid."""
    entries = store.read(Path(path)) or {}
    return _entry(name, entries[name], path) if name in entries else None


def missing_baselines(results: Sequence[BenchmarkResult], path: Path | str = DEFAULT_PATH) -> list[BaselineEntry]:
    """Entries of the file that are expected beside these results and are not among them.

    An entry is expected beside a result if both are of one saved run (``BaselineEntry.run_id``) or, where the file has
    no run names, of one script and one workload. A limit set by hand is never expected. Raises UsageError if the file
    is invalid.
    """
    entries = [_entry(name, data, path) for name, data in (store.read(Path(path)) or {}).items()]
    names = {result.name for result in results}
    runs = {entry.run_id for entry in entries if entry.name in names and entry.run_id}
    workloads = [_common_workload(result.workload) for result in results if result.workload]
    return [
        entry
        for entry in entries
        if entry.name not in names
        and (
            entry.run_id in runs
            or (entry.run_id is None and entry.workload and _common_workload(entry.workload) in workloads)
        )
    ]


def _common_workload(workload: Mapping[str, Any]) -> tuple[object, ...]:
    """What the rows of one result have in common: the script, the workload and the number of ranks."""
    shared = ("model", "batch_size", "seq_length", "grad_accum", "precision", "activation_checkpointing", "num_gpus")
    by_stage = workload.get("strategy") == f"zero{workload.get('stage')}"
    return (by_stage, *(workload.get(key) for key in shared))


def _entry(name: str, data: dict[str, object], path: Path | str) -> BaselineEntry:
    try:
        return BaselineEntry.from_dict({**data, "name": name})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: baseline {name!r}: {error}", remedy="correct it, or save it anew") from None


def compare_to_baseline(
    result: BenchmarkResult, baseline: BaselineEntry | None = None, *, path: Path | str = DEFAULT_PATH
) -> BaselineComparison:
    """Compares a result with a baseline. ``baseline``: None takes the entry of the result's name from ``path``.

    Raises UsageError if the file is invalid.
    """
    baseline = load_baseline(result.name, path) if baseline is None else baseline
    if baseline is None:
        ended = f"; {_unusable(result)}" if _unusable(result) else ""
        return BaselineComparison(
            name=result.name, passed=True, message=f"no baseline of this name{ended}", unmatched=not ended
        )
    differences = [*_incomparable_reasons(result, baseline)]
    if differences:
        text = f"not comparable with the baseline: {'; '.join(differences)}"
        return BaselineComparison(name=result.name, passed=None, message=text, baseline=baseline)
    return _failed_verdict(result, baseline) if _unusable(result) else _verdict(result, baseline)


def _unusable(result: BenchmarkResult) -> str | None:
    """Why the result has no usable figures: it failed, or a caveat disqualifies them. None if they are usable."""
    if not result.succeeded:
        return f"it ended with {result.status}{f': {result.error}' if result.error else ''}"
    return f"its figures are not to be used: {'; '.join(result.doubts)}" if result.doubts else None


def _incomparable_reasons(result: BenchmarkResult, baseline: BaselineEntry) -> Iterator[str]:
    """Differences of hardware, versions and workload; workload fields are compared if both sides have them."""
    if result.status in (INTERRUPTED, SKIPPED):
        yield f"it ended with {result.status}"
    if not baseline.set_by_hand:
        if result.environment is None or baseline.environment is None:
            silent = "result" if result.environment is None else "baseline"
            yield f"the {silent} does not tell its hardware and versions"
        else:
            yield from comparable(result.environment, baseline.environment)
    for key, ours in {**result.workload, "memory": result.memory}.items():
        theirs = baseline.memory if key == "memory" else baseline.workload.get(key)
        if key != "ds_config" and None not in (ours, theirs) and ours != theirs:
            yield f"{key} {ours} against {theirs}"
    if result.succeeded and not compare_metrics(result, baseline):
        yield "no figure is known on both sides"


def _failed_verdict(result: BenchmarkResult, baseline: BaselineEntry) -> BaselineComparison:
    """A regression whatever the figures: the baseline trained, this result did not."""
    text = f"regression: {_unusable(result)}; the baseline ran"
    return BaselineComparison(name=result.name, passed=False, message=text, baseline=baseline, regressions=("status",))


def _verdict(result: BenchmarkResult, baseline: BaselineEntry) -> BaselineComparison:
    metrics = compare_metrics(result, baseline)
    regressions = tuple(metric.kind for metric in metrics if metric.regressed(baseline.tolerance))
    ratios = {metric.kind: metric.ratio for metric in metrics}
    noisy = [metric for metric in metrics if metric.noisy(baseline.tolerance)] if not regressions else []
    parts = [
        metric.text(baseline.tolerance) + _undetectable_change(metric if metric in noisy else None)
        for metric in metrics
    ]
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


def _undetectable_change(noisy: MetricComparison | None) -> str:
    """The smallest change that a noisy figure would show, as text; empty for one that is not noisy."""
    if noisy is None or noisy.undetectable_change is None:
        return ""
    if noisy.undetectable_change > (_ANY_RISE if noisy.more_is_worse else _ANY_FALL):
        return ", cannot see any change"
    return f", cannot see changes below {units.format_percent(noisy.undetectable_change)}"


def _remarks(result: BenchmarkResult, baseline: BaselineEntry, metrics: Sequence[MetricComparison]) -> Iterator[str]:
    """Remarks that do not change the verdict."""
    if any(metric.interval is None for metric in metrics):
        varied = max((each for each in (result.step_variation, baseline.step_variation) if each), default=None)
        guide = f" (steps vary by {units.format_percent(varied)}, a rough guide only)" if varied else ""
        yield f"not tested against noise: fewer than three runs on a side{guide}"
    configs = result.workload.get("ds_config"), baseline.workload.get("ds_config")
    if None not in configs and configs[0] != configs[1]:
        yield "the DeepSpeed configuration is not the baseline's"
    if result.failed_runs:
        yield f"{result.failed_runs} run(s) failed"


# ------------------------------------------------------------------ throughput and memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricComparison:
    """One metric of a result and of its baseline."""

    kind: str
    label: str
    value: float
    base: float
    more_is_worse: bool
    interval: RatioInterval | None
    """None below three runs on either side."""
    show: Callable[[float], str]

    @property
    def ratio(self) -> float:
        return self.value / self.base

    @property
    def worse(self) -> bool:
        return self.value > self.base if self.more_is_worse else self.value < self.base

    def beyond(self, tolerance: float) -> bool:
        """Whether the change for the worse is larger than ``tolerance``, a fraction; at the limit itself it is not."""
        if self.more_is_worse:
            return self.value > self.base * (1 + tolerance) * (1 + _ROUNDING)
        return self.value < self.base * (1 - tolerance) * (1 - _ROUNDING)

    @property
    def above_noise(self) -> bool:
        """Whether the change for the worse is larger than the noise between runs; True if that cannot be tested."""
        if self.interval is None:
            return True
        if self.interval.too_wide:
            return False
        return self.interval.low > 1 if self.more_is_worse else self.interval.high < 1

    def regressed(self, tolerance: float) -> bool:
        return self.beyond(tolerance) and self.above_noise

    @property
    def undetectable_change(self) -> float | None:
        """The largest change for the worse, as a fraction, that the noise would hide; None where not tested."""
        if self.interval is None:
            return None
        centre, low, high = self.interval.ratio, self.interval.low, self.interval.high
        if self.more_is_worse:
            return centre / low - 1 if low > 0 else math.inf
        return 1 - centre / high

    def noisy(self, tolerance: float) -> bool:
        """Whether the noise would hide a regression beyond the tolerance that the interval does not rule out."""
        if self.interval is None or self.undetectable_change is None or self.regressed(tolerance):
            return False
        worst = self.interval.high - 1 if self.more_is_worse else 1 - self.interval.low
        return min(self.undetectable_change, worst) > tolerance + _ROUNDING

    def text(self, tolerance: float) -> str:
        """``tokens/s 940 against 1,000 (-6.0 %), beyond the tolerance of 5.0 %``."""
        where = "beyond" if self.beyond(tolerance) else "within" if self.worse else None
        judged = f"{where} the tolerance of {units.format_percent(tolerance)}" if where else "no worse"
        change = f"{self.label} {self.show(self.value)} against {self.show(self.base)} ({_signed(self.ratio)})"
        return f"{change}, {judged}{self._noise(where == 'beyond')}"

    def _noise(self, beyond: bool) -> str:
        if self.interval is None:
            return ""
        span = f"95 % interval {_signed(self.interval.low)} to {_signed(self.interval.high)}"
        if self.interval.distinguishable or self.interval.low == self.interval.high:
            return f" ({span})"
        return f"{' but' if beyond else ' and'} inside the noise ({span})"


def _signed(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def _ratio_interval(
    result: BenchmarkResult, runs: Sequence[float], runs_before: Sequence[float]
) -> RatioInterval | None:
    """The interval of the ratio; marked ``too_wide`` where it is, for a result of the CPU accelerator."""
    interval = ratio_interval(runs, runs_before)
    return interval.on_shared_processor if interval is not None and result.memory == "host" else interval


def compare_metrics(result: BenchmarkResult, baseline: BaselineEntry) -> list[MetricComparison]:
    """Throughput and peak memory, where both sides have them."""
    memory = {"gpu": "peak GPU memory", "host": "peak CPU memory", None: "peak memory"}
    metrics = []
    rate, rate_before = result.throughput_tokens_per_sec, baseline.throughput_tokens_per_sec
    if rate is not None and rate_before is not None:
        metrics.append(
            MetricComparison(
                kind="throughput", label="tokens/s", value=rate, base=rate_before, more_is_worse=False,
                interval=_ratio_interval(result, result.tokens_per_sec_runs, baseline.tokens_per_sec_runs),
                show=units.format_count,
            )
        )  # fmt: skip
    peak, peak_before = result.peak_memory_mb, baseline.peak_memory_mb
    if peak is not None and peak_before is not None:
        metrics.append(
            MetricComparison(
                kind="memory", label=memory[result.memory], value=peak, base=peak_before, more_is_worse=True,
                interval=_ratio_interval(result, result.peak_memory_mb_runs, baseline.peak_memory_mb_runs),
                show=lambda count_mb: units.format_bytes(count_mb * units.BYTES_PER_MB),
            )
        )  # fmt: skip
    return metrics
