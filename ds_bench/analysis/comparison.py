"""Pools the runs of each row, and compares every row with a baseline row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..config import strategies
from ..config.caveat_texts import Caveat, CaveatKind, has_kind, note
from ..config.deepspeed_config import sequence_parallel_size, tensor_parallel_size
from ..config.spec import Configuration, Trial
from ..errors import UsageError
from ..records.schema import TrialRecord, measured_values
from ..system.environment import Environment, comparability_differences
from ..system.gpu_state import throttle_faults
from ..system.host_resources import is_wsl
from ..units import BYTES_PER_GB, format_items, format_names
from . import trial_caveats
from .comparability import group_repeats, incomparable_facts, unique_labels
from .intervals import (
    FEWEST_RUNS,
    RatioInterval,
    RowRatios,
    RunMean,
    geometric_mean,
    mean_interval,
    ratio_interval,
    sample_std,
)
from .loss_parity import with_loss_caveats

if TYPE_CHECKING:
    from .row import Run

_SHORT_WINDOW_SECONDS = 2.0
"""Duration of the measured window below which clocks and single pauses change a mean noticeably."""


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One row: a configuration with its repeats. Figures are for the whole job unless noted; None if not measured."""

    key: str
    """``identity.row_key`` of its first trial. If runs of one trial are not comparable (different GPUs or versions),
    the keys of the later rows end in ``-2``, ``-3`` and so on (``comparability.group_repeats``)."""
    label: str
    """Short text for tables, unique within the comparison."""
    configuration: Configuration
    runs: tuple[Run, ...]
    """All runs, failed ones included, in order."""
    tokens_per_second: float | None = None
    """Geometric mean of the successful runs' means; for a script without token ids, in :attr:`rate_unit`."""
    mean_step_seconds: float | None = None
    """Geometric mean of the successful runs' means."""
    step_seconds_std: float | None = None
    """Sample standard deviation of the runs' means; of the run's steps if there is only one run."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval of ``tokens_per_second``; None with fewer than three successful runs."""
    is_baseline: bool = False
    """Whether ratios refer to this row."""
    ratio: float | None = None
    """``tokens_per_second`` divided by the baseline's; None if the rows are not comparable."""
    ratio_interval: RatioInterval | None = None
    """Confidence interval of ``ratio`` (``intervals.RowRatios``); None if either row has fewer than three successful
    runs."""
    tokens_per_second_per_gb: float | None = None
    """Tokens/s per GB (2**30) of peak device memory of the fullest rank; None on the CPU accelerator."""
    gpu_peak_bytes: int | None = None
    """Peak allocated on the fullest rank, the highest of the runs."""
    gpu_fraction: float | None = None
    """Peak reserved as a fraction of the GPU's memory, the highest of the runs."""
    host_peak_bytes: int | None = None
    """Peak resident memory of a node's ranks, the highest of the runs."""
    predicted_over_measured: float | None = None
    """Predicted divided by measured memory, median of the runs."""
    caveats: tuple[Caveat, ...] = ()
    """Caveats of the row and of all its runs, each once."""
    differences: tuple[str, ...] = ()
    """Why this row is not comparable with the baseline; empty if it is."""
    ratios: RowRatios | None = field(default=None, compare=False, repr=False)
    """Ratios between the rows that are comparable with the baseline, one object for all; None if this row is not."""

    @cached_property
    def successes(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.row.success)

    @property
    def nearest_to_mean(self) -> list[Run]:
        """Successful runs, ordered by how close their throughput is to the row's.

        A chart or text that shows a single run uses the first of these that has the data, so that all of them show
        the same run.
        """
        mean = self.tokens_per_second or 0.0
        return sorted(self.successes, key=lambda run: abs((run.row.rate or 0.0) - mean))

    @property
    def representative(self) -> Run:
        """Its first run that succeeded; if none did, its first run."""
        return (self.successes or self.runs)[0]

    @property
    def last_run(self) -> Run:
        """Its last run that succeeded; if none did, its last run."""
        return (self.successes or self.runs)[-1]

    @property
    def trial(self) -> Trial:
        """The trial of its first run; the other runs repeat it."""
        return self.runs[0].trial

    @property
    def on_cpu(self) -> bool:
        """Whether it ran on the CPU accelerator."""
        return self.trial.placement.accelerator == "cpu"

    @property
    def succeeded(self) -> bool:
        """Whether at least one run succeeded."""
        return bool(self.successes)

    @property
    def optimizer(self) -> str | None:
        """Class of the optimizer that was used; None if no run succeeded."""
        return next((run.row.optimizer for run in self.successes if run.row.optimizer), None)

    @property
    def fills_memory(self) -> bool:
        """Whether its micro-batch or sequence is the largest that trains, not a given one."""
        return self.trial.workload.fills_memory

    @property
    def longest_seq_length(self) -> int | None:
        """Length in tokens of the longest sequence that trains; None if it was not searched for."""
        workload = self.trial.workload
        return workload.seq_length if workload.seq_policy == "longest" else None

    @property
    def rate_unit(self) -> str:
        """``Row.rate_unit`` of its runs."""
        return next((run.row.rate_unit for run in self.successes), "tokens/s")

    @property
    def samples_per_second(self) -> float | None:
        """Geometric mean of the runs' means, for rows whose samples have no length in tokens, or one different from the
        workload's (a factory that makes its own batches); None for other rows.
        """
        if self.rate_unit == "samples/s":
            return self.tokens_per_second
        if self.tokens_per_second is None or not has_kind(self.caveats, CaveatKind.OWN_BATCHES):
            return None
        return self.tokens_per_second / self.trial.workload.seq_length

    @property
    def leaves_room(self) -> bool:
        """Whether it uses at most ``NEAR_CAPACITY`` of the GPU, as far as is known, or fills the GPU on purpose."""
        return self.fills_memory or (self.gpu_fraction or 0.0) <= trial_caveats.NEAR_CAPACITY

    @property
    def invalid_reason(self) -> str | None:
        """The caveat that disqualifies its figures; None for a valid row."""
        return next((caveat.text for caveat in self.caveats if caveat.kind.disqualifies), None)

    @property
    def valid(self) -> bool:
        """Whether it trained, and as requested."""
        return self.succeeded and self.invalid_reason is None

    def measured(self, column: str) -> list[Any]:
        """The values of a column in the successful runs that measured it."""
        return measured_values([run.row for run in self.successes], column)

    def largest_in_phase(self, phase: str, name: str) -> int | None:
        """The largest ``name``, a field of ``NodePhaseMemory``, of a phase in any successful run."""
        memory = [run.phase_memory[phase] for run in self.successes if phase in run.phase_memory]
        return max(measured_values(memory, name), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rows in order of appearance, compared with one of them."""

    rows: tuple[ComparisonRow, ...]
    baseline: ComparisonRow | None = None
    """The row that ratios refer to: the requested one, else the first valid one, else the first with numbers. None if
    the requested row, or every row, has no numbers."""
    pareto_device: tuple[str, ...] = ()
    """Keys of rows for which no other row is better in throughput or device memory and at least equal in the other.
    Rows that are disqualified or not comparable take no part."""
    pareto_host: tuple[str, ...] = ()
    """The same for throughput and host memory; empty if there are GPUs and no row offloads anything."""
    caveats: tuple[Caveat, ...] = ()
    """Caveats of the whole comparison: CPU accelerator, one GPU, too few repeats, environment."""
    device_capacity_bytes: int | None = None
    """Memory of the smallest GPU, real or emulated; None on the CPU accelerator."""
    host_capacity_bytes: int | None = None
    """Memory of the smallest host, or of its cgroup if that is less; None if no environment is known."""

    @property
    def accelerator(self) -> str | None:
        """``cuda`` or ``cpu``, if every row ran there; None without rows, or if rows of both are compared."""
        found = {row.trial.placement.accelerator for row in self.rows}
        return found.pop() if len(found) == 1 else None

    def row(self, key: str) -> ComparisonRow:
        """The row with that key. Raises KeyError."""
        return {row.key: row for row in self.rows}[key]


def rows_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the rows for JSON and CSV, with the caveats found by comparing the runs' losses."""
    return [run.row.values() for run in with_loss_caveats(runs)]


def pooled_rows(runs: Sequence[Run]) -> list[ComparisonRow]:
    """Group the runs into rows with unique labels, without ratios between them."""
    groups = group_repeats(runs)
    labels = unique_labels([next((run for run in group if run.row.success), group[0]) for group in groups.values()])
    return [_row(key, label, group) for (key, group), label in zip(groups.items(), labels, strict=True)]


def compare(
    runs: Sequence[Run], relative_to: str | None = None, *, environments: Sequence[Environment] = ()
) -> Comparison:
    """Group the runs into rows and compare every row with the baseline row.

    The baseline is ``relative_to`` (a strategy's name, a row's label or ``zeroN``), or without it the first valid row,
    else the first with numbers. If the requested baseline has no numbers there are no ratios, and the first valid row,
    else the first with numbers, decides which rows are comparable. ``environments``: of the runs, in order. Raises
    UsageError if no row has the requested name.
    """
    # Rows of several results are compared here for the first time; caveats already found within one result are not
    # repeated.
    rows = pooled_rows(with_loss_caveats(runs))
    # chosen: the row that ratios should refer to. reference: the row that decides which rows are comparable; the
    # same row unless chosen has no numbers.
    requested = next(iter(rows if relative_to is None else rows_called(rows, relative_to)), None)
    if requested is None and rows:
        choices = ", ".join(dict.fromkeys(row.configuration.name for row in rows))
        raise UsageError(f"--relative-to {relative_to}: no such row", remedy=f"choose from {choices}")
    chosen = _first_valid_row(rows, requested) if relative_to is None else requested
    reference = chosen if chosen is None or chosen.succeeded else _first_valid_row(rows, chosen)
    baseline = chosen if chosen is not None and chosen.succeeded else None
    compared = tuple(_relative_to_baseline(rows, baseline, reference))
    measured = [row for row in compared if row.succeeded]
    # Host memory has a Pareto front only if a row offloads something, or if there is no other memory.
    uses_host_memory = any(row.configuration.layout[1:] != ("none", "none") for row in measured)
    # If no row has GPU memory, all ran on the CPU accelerator.
    on_host = uses_host_memory or all(row.gpu_peak_bytes is None for row in measured)
    return Comparison(
        rows=compared,
        # Take the copy in compared, which has ratios, not chosen itself.
        baseline=next((row for row in compared if row.is_baseline), None),
        pareto_device=_pareto_front([(row, row.gpu_peak_bytes) for row in compared]),
        pareto_host=_pareto_front([(row, row.host_peak_bytes) for row in compared]) if on_host else (),
        caveats=(
            *comparison_caveats([row.runs for row in rows], environments),
            *_baseline_caveats(requested, chosen, rows),
        ),
        device_capacity_bytes=device_capacity_bytes(runs, environments),
        host_capacity_bytes=host_capacity_bytes(environments),
    )


def _row(key: str, label: str, runs: Sequence[Run]) -> ComparisonRow:
    """The row by itself, without ratios."""
    measured = [run.row for run in runs if run.row.success]

    def values(name: str, scale: float = 1) -> list[Any]:
        """The figures of the runs, multiplied by ``scale``."""
        return [value * scale for value in measured_values(measured, name)]

    def max_bytes(name: str) -> int | None:
        sizes = values(name)
        return round(max(sizes) * BYTES_PER_GB) if sizes else None

    rates, step_seconds = values("rate"), values("avg_step_time_ms", 1 / 1000)
    rate, gpu_peak_bytes = geometric_mean(rates), max_bytes("gpu_peak_gb")
    predictions = values("predicted_over_measured")
    return ComparisonRow(
        key=key,
        label=label,
        configuration=runs[0].trial.configuration,
        runs=tuple(runs),
        tokens_per_second=rate,
        mean_step_seconds=geometric_mean(step_seconds),
        step_seconds_std=sample_std(step_seconds)
        if len(step_seconds) > 1
        else next(iter(values("std_step_time_ms", 1 / 1000)), None),
        interval=mean_interval(rates),
        tokens_per_second_per_gb=rate / (gpu_peak_bytes / BYTES_PER_GB)
        if rate is not None and gpu_peak_bytes and values("throughput_tokens_per_sec")
        else None,
        gpu_peak_bytes=gpu_peak_bytes,
        gpu_fraction=max(values("gpu_percent", 1 / 100), default=None),
        host_peak_bytes=max_bytes("cpu_used_gb"),
        predicted_over_measured=statistics.median(predictions) if predictions else None,
        caveats=_row_caveats(runs, rates),
    )


_WORST_BY = {CaveatKind.CPU_BUSY: "other", CaveatKind.CPU_QUOTA: "fraction", CaveatKind.OUTLIERS: "count"}
"""Kind of caveat → the value that decides which run is worst."""


def _row_caveats(runs: Sequence[Run], rates: Sequence[float]) -> tuple[Caveat, ...]:
    """Caveats of the runs, then of the row, each once.

    A busy CPU, a CPU quota and slow steps are each reported for the worst run, since the text quotes its figures.
    """
    found = [(run, caveat) for run in runs for caveat in run.caveats]
    worst = [
        max((pair for pair in found if pair[1].kind is kind), key=lambda pair: pair[1].values[figure], default=None)
        for kind, figure in _WORST_BY.items()
    ]
    caveats = [caveat for run, caveat in found if caveat.kind not in _WORST_BY or (run, caveat) in worst]
    failed = sum(not run.row.success for run in runs)
    if 0 < failed < len(runs):
        caveats.append(note(f"{failed} of {len(runs)} runs failed"))
    _, *others = dict.fromkeys(run.trial.configuration.name for run in runs)
    if others:
        text = f"the same configuration also ran as {', '.join(others)}; all of them form one row"
        caveats.append(note(text))
    unstable = trial_caveats.unstable_between_runs(rates)
    return tuple(dict.fromkeys([*caveats, *([unstable] if unstable else [])]))


def rows_called(rows: Sequence[ComparisonRow], text: str) -> list[ComparisonRow]:
    """Return the rows with exactly this label, name or key, else those that the user may have meant; empty if none."""
    exact = [row for row in rows if text in (row.label, row.key, row.configuration.name)]
    return exact or [row for row in rows if strategies.matches(row.configuration, text)]


def _first_valid_row(rows: Sequence[ComparisonRow], first: ComparisonRow | None) -> ComparisonRow | None:
    """``first`` if it is valid, else the first valid row, else the first with numbers, else ``first``."""
    in_order = [*([] if first is None else [first]), *rows]
    return max(in_order, key=lambda row: (row.valid, row.succeeded), default=None)  # max: the first of equals


def _relative_to_baseline(
    rows: Sequence[ComparisonRow], baseline: ComparisonRow | None, reference: ComparisonRow | None
) -> Iterator[ComparisonRow]:
    """The rows with ratios to the baseline or the facts that forbid them; without a baseline, with ``ratios`` alone."""
    if reference is None:
        return
    first = reference.representative
    forbidden = {row.key: tuple(each.text for each in incomparable_facts(first, row.representative)) for row in rows}
    # Rows that are not comparable take no part: the noise is estimated from all rows together.
    ratios = RowRatios(
        _means([row for row in rows if not forbidden[row.key]]), None if baseline is None else baseline.key
    )
    for row in rows:
        if forbidden[row.key]:
            yield replace(row, differences=forbidden[row.key])
        elif baseline is None:
            yield replace(row, ratios=ratios)
        else:
            rate, baseline_rate = row.tokens_per_second, baseline.tokens_per_second
            yield replace(
                row,
                is_baseline=row.key == baseline.key,
                ratios=ratios,
                ratio=rate / baseline_rate if rate is not None and baseline_rate else None,
                ratio_interval=_mark_if_too_wide(ratios.between(row.key, baseline.key), row),
            )


def _means(rows: Sequence[ComparisonRow]) -> dict[str, list[RunMean]]:
    """The successful runs of every row, each with its position among all of them by start time.

    ``started_at`` has a resolution of one second; runs that start in the same second are ordered by round and by
    position in the round. If times and positions are unknown, the runs of one round share a position.
    """

    def round_of(run: Run) -> int:
        return run.trial.repeat if run.round is None else run.round

    def start_of(run: Run) -> tuple[str, int, int]:
        return run.row.started_at or "", round_of(run), run.trial.round_position or 0

    starts = sorted({start_of(run) for row in rows for run in row.successes})
    positions = {start: position for position, start in enumerate(starts)}
    return {
        row.key: [
            RunMean(mean=run.row.rate, round=round_of(run), position=positions[start_of(run)])
            for run in row.successes
            if run.row.rate is not None
        ]
        for row in rows
    }


def ratio_between(row: ComparisonRow, other: ComparisonRow) -> RatioInterval | None:
    """Return the throughput of ``row`` divided by the throughput of ``other``, with its confidence interval.

    For two rows of one comparison all runs of the comparison are used, at a level that is corrected for the number of
    rows (``intervals.RowRatios.between``); for rows of two comparisons, their own runs, at 95 %. None if either
    row has fewer than three successful runs, or if both are the same row. Rows of one comparison must be comparable.
    """
    if row.ratios is not None and row.ratios is other.ratios:
        return _mark_if_too_wide(row.ratios.between(row.key, other.key), row)
    return _mark_if_too_wide(ratio_interval(row.measured("rate"), other.measured("rate")), row)


def _mark_if_too_wide(interval: RatioInterval | None, row: ComparisonRow) -> RatioInterval | None:
    """The interval, marked on the CPU accelerator if it is too wide to decide anything."""
    return interval.on_shared_processor if interval is not None and row.on_cpu else interval


def _pareto_front(rows: Sequence[tuple[ComparisonRow, int | None]]) -> tuple[str, ...]:
    """Keys of rows for which no other is better in one of throughput and memory and at least equal in the other.

    In order of appearance; equal rows all count.
    """
    points = [
        (-row.tokens_per_second, memory_bytes, row.key)
        for row, memory_bytes in rows
        if row.tokens_per_second is not None and memory_bytes is not None and row.valid and not row.differences
    ]
    front, least_bytes = set(), math.inf
    for _, members in groupby(sorted(points), key=lambda point: point[0]):  # fastest first
        group = list(members)
        # From the fastest on: a row belongs to the front if it needs less memory than every faster one.
        if group[0][1] < least_bytes:
            least_bytes = group[0][1]
            front |= {key for _, memory_bytes, key in group if memory_bytes == least_bytes}
    return tuple(key for _, _, key in points if key in front)


def _baseline_caveats(
    requested: ComparisonRow | None, chosen: ComparisonRow | None, rows: Sequence[ComparisonRow]
) -> list[Caveat]:
    """Caveats about the baseline row; none if no row has numbers."""
    if requested is None or chosen is None or not any(row.succeeded for row in rows):
        return []
    if not chosen.succeeded:
        return [note(f"no ratios, because {chosen.label} has no numbers; choose another row with --relative-to")]
    if requested.key != chosen.key:
        why = requested.invalid_reason or requested.runs[0].outcome.status
        return [note(f"ratios are relative to {chosen.label}, because {requested.label} has no usable result: {why}")]
    if not chosen.valid:
        return [note(f"ratios are relative to {chosen.label}, whose own result is in doubt")]
    return []


# ------------------------------------------------------------------ the comparison as a whole


def comparison_caveats(rows: Sequence[Sequence[Run]], environments: Sequence[Environment]) -> list[Caveat]:
    """Return the caveats of the whole comparison, each once. ``rows``: the runs of each row."""
    placements = [run.trial.placement for row in rows for run in row]
    caveats = list(_run_caveats(rows))
    for environment in environments[1:]:
        if differences := comparability_differences(environments[0], environment):
            caveats.append(Caveat(CaveatKind.ENVIRONMENT_DIFFERS, {"differences": "; ".join(differences)}))
    caveats += _apart_caveats(rows)
    hosts = [host for environment in environments for host in (environment, *environment.hosts)]
    if any(each.accelerator == "cuda" for each in placements) and any(is_wsl(host.kernel) for host in hosts):
        caveats.append(Caveat(CaveatKind.WSL))
    for environment in environments:
        for number, host in enumerate(environment.hosts_of_ranks):
            slots = {slot for each in placements for slot in each.slots_of_node(number)}
            where = f" on {host.hostname}" if environment.hosts else ""
            for gpu in (gpu for slot, gpu in enumerate(host.gpus) if slot in slots):
                name = f"GPU {gpu.index}{where}"
                if gpu.other_processes:
                    processes = len(gpu.other_processes)
                    caveats.append(Caveat(CaveatKind.OTHER_PROCESS, {"gpu": name, "processes": processes}))
                if reasons := throttle_faults(gpu):
                    caveats.append(Caveat(CaveatKind.THROTTLED_BEFORE, {"gpu": name, "reasons": ", ".join(reasons)}))
            if host.swap_used_bytes:
                name = f"the host {host.hostname}" if where else "the host"
                caveats.append(Caveat(CaveatKind.SWAP_USED, {"host": name, "swapped": host.swap_used_bytes}))
    return list(dict.fromkeys(caveats))


def _run_caveats(rows: Sequence[Sequence[Run]]) -> Iterator[Caveat]:
    """Caveats about the accelerator, the number of ranks, the length of the window and the number of runs."""
    runs = [run for row in rows for run in row]
    if any(run.row.accelerator == "cpu" for run in runs):
        yield Caveat(CaveatKind.CPU_ACCELERATOR)
    # ZeRO also partitions among the ranks of a sequence-parallel group (utils/groups.py).
    partitions = [
        run.row.data_parallel_size * sequence_parallel_size(run.trial.ds_config)
        if run.row.data_parallel_size
        else run.row.num_gpus
        for run in runs
        if run.row.stage > 0 and tensor_parallel_size(run.trial.ds_config) == 1
    ]
    if 1 in partitions:
        yield Caveat(CaveatKind.ONE_GPU)
    # Only for GPUs: the caveat is about their clocks.
    on_gpus = [run.row for run in runs if run.trial.placement.accelerator == "cuda"]
    windows = [row.avg_step_time_ms / 1000 * row.num_steps for row in on_gpus if row.avg_step_time_ms is not None]
    if windows and min(windows) < _SHORT_WINDOW_SECONDS:
        yield Caveat(CaveatKind.SHORT_WINDOW, {"seconds": min(windows)})
    counts = [count for row in rows if (count := sum(run.row.success for run in row))]
    few = sum(count < FEWEST_RUNS for count in counts)
    # Without a second row there is no difference to test.
    if len(counts) > 1 and few:
        yield Caveat(CaveatKind.TOO_FEW_REPEATS, {"few": few, "rows": len(counts), "needed": FEWEST_RUNS})


def _apart_caveats(rows: Sequence[Sequence[Run]]) -> Iterator[Caveat]:
    """Yield a caveat if no single run has every row: ratios then include differences between runs or hosts."""
    trained = [successes for row in rows if (successes := [run for run in row if run.row.success])]
    labels: dict[str | None, dict[int, str]] = {}
    hosts: dict[str | None, str] = {}
    for number, row in enumerate(trained):
        for run in row:
            labels.setdefault(run.row.run_id, {})[number] = run.trial.configuration.label
            hosts[run.row.run_id] = run.environment.hostname if run.environment else ""
    # Nothing to say if one run has every row, or if a result does not name its run.
    if None in labels or max(map(len, labels.values()), default=0) == len(trained):
        return
    texts = [
        f"{format_names(own.values(), 3)} in {run_id}" + (f" on {hosts[run_id]}" if hosts[run_id] else "")
        for run_id, own in list(labels.items())[:4]
    ]
    if len(labels) > 4:
        texts.append(f"and {format_items(len(labels) - 4, 'more run')}")
    where = "on different hosts" if len({*filter(None, hosts.values())}) > 1 else "in different runs"
    yield Caveat(CaveatKind.MEASURED_APART, {"where": where, "runs": "; ".join(texts)})


def device_capacity_bytes(runs: Sequence[Run], environments: Sequence[Environment]) -> int | None:
    """Memory of the smallest GPU, real or emulated, that a rank reported.

    If no rank did, the smallest in the environments. None on the CPU accelerator.
    """
    on_gpus = [run for run in runs if run.row.accelerator == "cuda"]
    read = [run.stored for run in on_gpus if isinstance(run.stored, TrialRecord)]
    sizes = [rank.gpu_total_bytes for record in read for rank in record.ranks]
    # For a run whose record was not read, assume that all cards are alike.
    others = [run.row.gpu_total_gb for run in on_gpus if not isinstance(run.stored, TrialRecord)]
    sizes += [round(size * BYTES_PER_GB) for size in others if size]
    if on_gpus and not any(sizes):
        sizes = [
            gpu.memory_total_bytes
            for environment in environments
            for host in environment.hosts_of_ranks
            for gpu in host.gpus
        ]
    limits = [run.trial.placement.gpu_memory_limit_bytes for run in on_gpus]
    return min((size for size in [*sizes, *limits] if size), default=None)


def host_capacity_bytes(environments: Sequence[Environment]) -> int | None:
    """Memory of the smallest host, or of its cgroup if that is less; None if no environment is known."""
    hosts = [host for environment in environments for host in environment.hosts_of_ranks]
    sizes = [(each.host_memory_bytes, each.cgroup_memory_limit_bytes) for each in hosts]
    return min((size for pair in sizes for size in pair if size), default=None)
