"""Pure: from summaries of trials to a Comparison, one StrategyResult per configuration."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from ..config import strategies
from ..config.spec import Strategy
from ..errors import UsageError
from ..system.environment import Environment
from ..units import BYTES_PER_GB
from . import trial_caveats
from .caveats import Caveat, CaveatKind, note
from .comparability import group_repeats, incomparable_fields
from .comparison_caveats import comparison_caveats, device_capacity_bytes, host_capacity_bytes
from .intervals import RatioInterval, RowRatios, Run, geometric_mean, mean_interval, ratio_interval, sample_std
from .loss_parity import with_loss_caveats
from .row_labels import unique_labels
from .summary import Summary
from .trial_caveats import measured_values


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """One configuration, its repeats taken together. Whole job unless said otherwise; None where not measured."""

    key: str
    """The hash of the trial with repeat 0. Where runs of one trial do not compare with each other (another card, other
    versions), the later rows have ``-2``, ``-3`` … behind it (``comparability.group_repeats``)."""
    label: str
    """Short text for tables, unique within the comparison."""
    strategy: Strategy
    summaries: tuple[Summary, ...]
    """Every run, failed ones included, in order."""
    tokens_per_second: float | None = None
    """Geometric mean of the successful runs' means."""
    step_seconds: float | None = None
    """Geometric mean of the successful runs' means."""
    step_seconds_spread: float | None = None
    """Standard deviation between runs where there are two or more, else between the steps of the one."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the geometric mean tokens/s, R >= 3 successful runs."""
    ratio: float | None = None
    """Of ``tokens_per_second`` to the baseline's. None where the rows do not compare."""
    ratio_interval: RatioInterval | None = None
    """Of that ratio (``inference.RowRatios``); None below three runs on either side ("not tested")."""
    tokens_per_second_per_gb: float | None = None
    """Tokens/s per GB (2**30) of peak device memory of the fullest rank; None on the CPU accelerator."""
    gpu_peak_bytes: int | None = None
    """The worst run's peak allocated on the worst rank."""
    gpu_fraction: float | None = None
    """The worst run's peak reserved as a fraction of the card."""
    host_peak_bytes: int | None = None
    """The worst run's peak resident memory of a node's ranks."""
    predicted_over_measured: float | None = None
    """Median over runs of the predicted memory to the measured."""
    gpu_difference_bytes: int | None = None
    """Peak device memory less the baseline's."""
    host_difference_bytes: int | None = None
    caveats: tuple[Caveat, ...] = ()
    """Of all its runs, each once."""
    differences: tuple[str, ...] = ()
    """Why this row does not compare with the baseline; empty where it does."""
    ratios: RowRatios | None = field(default=None, compare=False, repr=False)
    """Between this row and the others that compare with it; shared by them. None where it does not compare."""

    @property
    def successes(self) -> tuple[Summary, ...]:
        return tuple(summary for summary in self.summaries if summary.record.outcome.success)

    @property
    def succeeded(self) -> bool:
        """At least one run did."""
        return bool(self.successes)

    @property
    def optimizer(self) -> str | None:
        """The class that really stepped; None where no run succeeded."""
        return next((run.record.ranks[0].optimizer_class for run in self.successes if run.record.ranks), None)

    @property
    def at_largest_batch(self) -> bool:
        """Its micro-batch is the largest with which it trains, and not one that was given."""
        return self.summaries[0].record.trial.workload.batch_policy == "largest"

    @property
    def leaves_room(self) -> bool:
        """Uses no more than ``NEAR_CAPACITY`` of the card, or what it uses is not known, or was chosen to fill it."""
        return self.at_largest_batch or (self.gpu_fraction or 0.0) <= trial_caveats.NEAR_CAPACITY

    @property
    def disqualification(self) -> str | None:
        """Why its numbers are no result, though it has some; None for a sound row."""
        return next((caveat.text for caveat in self.caveats if caveat.disqualifying), None)

    @property
    def sound(self) -> bool:
        """It trained, and did what was asked."""
        return self.succeeded and self.disqualification is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows in order of appearance, against one of them."""

    results: tuple[StrategyResult, ...]
    baseline: StrategyResult | None = None
    """The row that ratios refer to: the one asked for, else the first sound one, or where none is the first that has
    numbers. None where the row asked for, or every row, has no numbers."""
    pareto_device: tuple[str, ...] = ()
    """Keys of rows that no other row beats in both throughput and device memory. Rows that are disqualified or do not
    compare take no part."""
    pareto_host: tuple[str, ...] = ()
    """The same for (throughput, host memory); empty where no row keeps anything off the device and there is one."""
    caveats: tuple[Caveat, ...] = ()
    """Of the comparison as a whole: CPU accelerator, one GPU, too few repeats, environment."""
    device_capacity_bytes: int | None = None
    """Memory of the smallest card, real or emulated; None on the CPU accelerator."""
    host_capacity_bytes: int | None = None
    """Memory of the host or of the cgroup, whichever is less, where the environment is known."""

    def result(self, key: str) -> StrategyResult:
        """The row of that key. Raises KeyError."""
        return next((row for row in self.results if row.key == key), None) or _no_row(key)


def _no_row(key: str) -> StrategyResult:
    raise KeyError(key)


def build(
    summaries: Sequence[Summary], relative_to: str | None = None, *, environments: Sequence[Environment] = ()
) -> Comparison:
    """Every repeat to its row, and every row against the first, or against ``relative_to``.

    A first row that failed or is disqualified gives way to the first sound one, or where none is sound to the first
    that has numbers. ``relative_to``: a strategy's name, a row's label, or ``zeroN``. Raises UsageError where no row is
    called that. ``environments``: of the runs, in order. Where the row asked for has no numbers there are no ratios,
    and rows are held against the first that has for what forbids comparing them.
    """
    groups = group_repeats(with_loss_caveats(summaries))
    labels = unique_labels([_spokesman(group).record for group in groups.values()])
    rows = [_row(key, label, group) for (key, group), label in zip(groups.items(), labels, strict=True)]
    asked = _asked(rows, relative_to)
    chosen = _first_good(rows, asked) if relative_to is None else asked
    reference = chosen if chosen is None or chosen.succeeded else _first_good(rows, chosen)
    baseline = reference if chosen is not None and chosen.succeeded else None
    results = tuple(_related(rows, baseline, reference))
    return Comparison(
        results=results,
        baseline=next((row for row in results if baseline is not None and row.key == baseline.key), None),
        pareto_device=_front([(row, row.gpu_peak_bytes) for row in results]),
        pareto_host=_front([(row, row.host_peak_bytes) for row in results]) if _host_matters(results) else (),
        caveats=(*comparison_caveats(list(groups.values()), environments), *_of_baseline(asked, chosen, rows)),
        device_capacity_bytes=device_capacity_bytes([each.record for each in summaries], environments),
        host_capacity_bytes=host_capacity_bytes(environments),
    )


def _spokesman(group: Sequence[Summary]) -> Summary:
    """The run that stands for its row: the first that was measured."""
    return next((summary for summary in group if summary.record.outcome.success), group[0])


def _row(key: str, label: str, group: Sequence[Summary]) -> StrategyResult:
    """The row by itself, before it is held against another."""
    good = [summary for summary in group if summary.record.outcome.success]
    tokens, steps = measured_values(good, "tokens_per_second"), measured_values(good, "step_seconds")
    speed, peak = geometric_mean(tokens), _most(good, "gpu_peak_bytes")
    return StrategyResult(
        key=key,
        label=label,
        strategy=group[0].record.trial.strategy,
        summaries=tuple(group),
        tokens_per_second=speed,
        step_seconds=geometric_mean(steps),
        step_seconds_spread=sample_std(steps) if len(steps) > 1 else next((run.step_seconds_std for run in good), None),
        interval=mean_interval(tokens),
        tokens_per_second_per_gb=speed / (peak / BYTES_PER_GB) if speed is not None and peak else None,
        gpu_peak_bytes=peak,
        gpu_fraction=_most(good, "gpu_fraction"),
        host_peak_bytes=_most(good, "host_peak_bytes"),
        predicted_over_measured=_median(measured_values(good, "predicted_over_measured")),
        caveats=_row_caveats(group, tokens),
    )


def _row_caveats(group: Sequence[Summary], means: Sequence[float]) -> tuple[Caveat, ...]:
    failed = sum(not run.record.outcome.success for run in group)
    counted = [note(f"{failed} of {len(group)} runs failed")] if 0 < failed < len(group) else []
    _, *others = dict.fromkeys(run.record.trial.strategy.label for run in group)
    if others:
        counted.append(note(f"the same configuration also ran as {', '.join(others)}: one row, not {len(others) + 1}"))
    varied = trial_caveats.unstable_between_runs(means)
    found = [*_of_runs(group), *counted, *([varied] if varied else [])]
    return tuple(dict.fromkeys(found))


def _of_runs(group: Sequence[Summary]) -> Iterator[Caveat]:
    """The runs' own caveats; that the CPU was busy once, as in the run in which it was busiest."""
    busy = [
        (max(measured_values(run.record.ranks, "cpu_other_cores"), default=0.0), caveat)
        for run in group
        for caveat in run.caveats
        if caveat.kind is CaveatKind.CPU_BUSY
    ]
    _, worst = max(busy, key=lambda pair: pair[0], default=(0.0, None))
    for run in group:
        yield from (caveat for caveat in run.caveats if caveat.kind is not CaveatKind.CPU_BUSY or caveat == worst)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _most(group: Sequence[Summary], name: str) -> Any:
    return max(measured_values(group, name), default=None)


def _asked(rows: Sequence[StrategyResult], relative_to: str | None) -> StrategyResult | None:
    if relative_to is None or not rows:
        return next(iter(rows), None)
    exact = (row for row in rows if relative_to in (row.label, row.key))
    found = next(exact, None) or next((row for row in rows if strategies.matches(row.strategy, relative_to)), None)
    if found is None:
        choices = ", ".join(dict.fromkeys(row.strategy.name for row in rows))
        raise UsageError(f"--relative-to {relative_to}: no row is called that", remedy=f"one of {choices}")
    return found


def _first_good(rows: Sequence[StrategyResult], first: StrategyResult | None) -> StrategyResult | None:
    """``first`` where it is sound, else the first row that is; without one the first with numbers, ``first`` first."""
    in_order = [*([] if first is None else [first]), *rows]
    sound, measured = ([row for row in in_order if getattr(row, kind)] for kind in ("sound", "succeeded"))
    return next(iter([*sound, *measured, *in_order]), None)


def _related(
    rows: Sequence[StrategyResult], baseline: StrategyResult | None, reference: StrategyResult | None
) -> Iterator[StrategyResult]:
    """Every row held against the baseline; without one, only against what forbids comparing it."""
    if reference is None:
        return
    first = _spokesman(reference.summaries).record
    forbidden = {row.key: tuple(incomparable_fields(first, _spokesman(row.summaries).record)) for row in rows}
    alike = [row for row in rows if not forbidden[row.key]]
    ratios = RowRatios(_runs(alike), None if baseline is None else baseline.key)
    for row in rows:
        if forbidden[row.key]:
            yield replace(row, differences=forbidden[row.key])
            continue
        row = replace(row, ratios=ratios)
        yield row if baseline is None else _against(row, baseline, ratios)


def _against(row: StrategyResult, baseline: StrategyResult, ratios: RowRatios) -> StrategyResult:
    return replace(
        row,
        ratio=_quotient(row.tokens_per_second, baseline.tokens_per_second),
        ratio_interval=_judged(ratios.between(row.key, baseline.key), row),
        gpu_difference_bytes=_less(row.gpu_peak_bytes, baseline.gpu_peak_bytes),
        host_difference_bytes=_less(row.host_peak_bytes, baseline.host_peak_bytes),
    )


def _runs(rows: Sequence[StrategyResult]) -> dict[str, list[Run]]:
    """Every row's successful runs, each at its place in the order in which all of them were started.

    ``started_at`` has seconds, so runs of one second go by round and by their place in it; where neither is told, as in
    results of earlier versions, they share a place.
    """
    moments = {}
    for run in (run for row in rows for run in row.successes):
        trial = run.record.trial
        moments[id(run)] = run.record.started_at or "", _round(run), trial.round_position or 0
    places = {moment: place for place, moment in enumerate(sorted(set(moments.values())))}
    return {
        row.key: [
            Run(mean=run.tokens_per_second, round=_round(run), place=places[moments[id(run)]])
            for run in row.successes
            if run.tokens_per_second is not None
        ]
        for row in rows
    }


def _round(run: Summary) -> int:
    return run.record.trial.repeat if run.round is None else run.round


def ratio_between(row: StrategyResult, other: StrategyResult) -> RatioInterval | None:
    """The ratio of the throughput of ``row`` to that of ``other`` with its interval.

    Rows of one comparison are told apart by all its runs, each held to the level that keeps false differences among all
    rows to 5 % (``inference.RowRatios.between``); rows of two comparisons by their own runs alone, at 95 %. None below
    three successful runs of either row, for a row and itself, and where rows of one comparison do not compare.
    """
    if row.ratios is not None and row.ratios is other.ratios:
        return _judged(row.ratios.between(row.key, other.key), row)
    ours, theirs = (measured_values(each.successes, "tokens_per_second") for each in (row, other))
    return _judged(ratio_interval(ours, theirs), row)


def _judged(interval: RatioInterval | None, row: StrategyResult) -> RatioInterval | None:
    return interval.on_shared_processor if interval is not None and _on_cpu(row) else interval


def _on_cpu(row: StrategyResult) -> bool:
    return row.summaries[0].record.trial.placement.accelerator == "cpu"


def _quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _less(a: int | None, b: int | None) -> int | None:
    return a - b if a is not None and b is not None else None


def _front(rows: Sequence[tuple[StrategyResult, int | None]]) -> tuple[str, ...]:
    """Keys of rows that none beats in both throughput and memory, in order of appearance; equals stay together."""
    points = [
        (-row.tokens_per_second, memory, row.key)
        for row, memory in rows
        if row.tokens_per_second is not None and memory is not None and row.sound and not row.differences
    ]
    kept, least = set(), math.inf
    for _, members in groupby(sorted(points), key=lambda point: point[0]):  # fastest first
        group = list(members)
        if group[0][1] < least:
            least = group[0][1]
            kept |= {key for _, memory, key in group if memory == least}
    return tuple(key for _, _, key in points if key in kept)


def _host_matters(rows: Sequence[StrategyResult]) -> bool:
    """Something lives in host memory, or nothing else does."""
    measured = [row for row in rows if row.succeeded]
    offloads = any(row.strategy.offloads_optimizer or row.strategy.offload_param != "none" for row in measured)
    return offloads or all(row.gpu_peak_bytes is None for row in measured)


def _of_baseline(
    asked: StrategyResult | None, chosen: StrategyResult | None, rows: Sequence[StrategyResult]
) -> list[Caveat]:
    """What a reader must know of the row that ratios refer to; nothing where no row has numbers."""
    if asked is None or chosen is None or not any(row.succeeded for row in rows):
        return []
    if not chosen.succeeded:
        return [note(f"{chosen.label} has no numbers to be relative to: no ratios; --relative-to takes another row")]
    if asked.key != chosen.key:
        why = asked.disqualification or asked.summaries[0].record.outcome.status
        return [note(f"ratios are relative to {chosen.label}, as {asked.label} is no result: {why}")]
    if not chosen.sound:
        return [note(f"ratios are relative to {chosen.label}, which is no result itself: {chosen.disqualification}")]
    return []
