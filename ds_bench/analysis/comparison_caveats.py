"""Caveats of the whole comparison, not of one row, and the memory of its machines.

They report the state of the machine, too few repeats, a single GPU, the CPU accelerator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..config.caveats import Caveat, CaveatKind
from ..config.deepspeed_config import sequence_parallel_size, tensor_parallel_size
from ..records.schema import TrialRecord
from ..system.environment import Environment, comparability_differences
from ..system.gpus import throttle_faults
from ..units import BYTES_PER_GB, format_names
from .intervals import FEWEST_RUNS

if TYPE_CHECKING:
    from .row import Run

_SHORT_WINDOW_SECONDS = 2.0
"""Duration of the measured window below which clocks and single pauses change a mean noticeably."""


def comparison_caveats(rows: Sequence[Sequence[Run]], environments: Sequence[Environment]) -> list[Caveat]:
    """Caveats of the whole comparison, each once. ``rows``: the runs of each row."""
    runs = [run for row in rows for run in row]
    placements = [run.trial.placement for run in runs]
    caveats = [*_placement_caveats(runs), *_window_caveats(runs), *_repeat_caveats(rows)]
    for environment in environments[1:]:
        if differences := comparability_differences(environments[0], environment):
            caveats.append(Caveat(CaveatKind.ENVIRONMENT_DIFFERS, {"differences": "; ".join(differences)}))
    caveats += _apart_caveats(rows)
    for environment in environments:
        for number, host in enumerate(environment.hosts or (environment,)):
            slots = {slot for each in placements for slot in each.slots_of_node(number)}
            caveats += _machine_caveats(host, slots, f" on {host.hostname}" if environment.hosts else "")
    return list(dict.fromkeys(caveats))


def _apart_caveats(rows: Sequence[Sequence[Run]]) -> Iterator[Caveat]:
    """Where no run has every row, ratios also hold what changed from one run, or one host, to another."""
    trained = [row for row in rows if any(each.row.success for each in row)]
    summaries = [(number, each) for number, row in enumerate(trained) for each in row if each.row.success]
    labels: dict[str | None, dict[int, str]] = {}
    hosts: dict[str | None, str] = {}
    for number, summary in summaries:
        labels.setdefault(summary.row.run_id, {})[number] = summary.trial.configuration.label
        hosts[summary.row.run_id] = summary.environment.hostname if summary.environment else ""
    # One run has every row, so that ratios within it hold nothing else; or a result does not tell its run.
    if None in labels or max(map(len, labels.values()), default=0) == len(trained):
        return
    texts = []
    for run, own in list(labels.items())[:4]:
        texts.append(f"{format_names(own.values(), 3)} in {run}" + (f" on {hosts[run]}" if hosts[run] else ""))
    more = f"; and {len(labels) - 4} more runs" if len(labels) > 4 else ""
    where = "on different hosts" if len(set(hosts.values())) > 1 else "in different runs"
    yield Caveat(CaveatKind.MEASURED_APART, {"where": where, "runs": f"{'; '.join(texts)}{more}"})


def _placement_caveats(runs: Sequence[Run]) -> Iterator[Caveat]:
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


def _window_caveats(summaries: Iterable[Run]) -> Iterator[Caveat]:
    # Of GPUs alone, whose clock moves under load.
    window_seconds = min(
        (
            summary.row.avg_step_time_ms / 1000 * summary.row.num_steps
            for summary in summaries
            if summary.row.avg_step_time_ms is not None and summary.trial.placement.accelerator == "cuda"
        ),
        default=_SHORT_WINDOW_SECONDS,
    )
    if window_seconds < _SHORT_WINDOW_SECONDS:
        yield Caveat(CaveatKind.SHORT_WINDOW, {"seconds": window_seconds})


def _repeat_caveats(rows: Sequence[Sequence[Run]]) -> Iterator[Caveat]:
    """Nothing unless two rows have numbers: without a second row there is no difference to test."""
    counts = [count for row in rows if (count := sum(summary.row.success for summary in row))]
    few = sum(count < FEWEST_RUNS for count in counts)
    if len(counts) < 2 or not few:
        return
    yield Caveat(CaveatKind.TOO_FEW_REPEATS, {"few": few, "rows": len(counts), "needed": FEWEST_RUNS})


def _machine_caveats(environment: Environment, slots: Collection[int], where: str) -> Iterator[Caveat]:
    """State of the host and of the GPUs in these slots, which are those that the job used.

    ``where``: `` on HOST`` for one of several hosts.
    """
    for gpu in (gpu for slot, gpu in enumerate(environment.gpus) if slot in slots):
        if gpu.other_processes:
            processes = len(gpu.other_processes)
            yield Caveat(CaveatKind.OTHER_PROCESS, {"gpu": f"GPU {gpu.index}{where}", "processes": processes})
        if reasons := throttle_faults(gpu):
            texts = ", ".join(reasons)
            yield Caveat(CaveatKind.THROTTLED_BEFORE, {"gpu": f"GPU {gpu.index}{where}", "reasons": texts})
    if environment.swap_used_bytes:
        host = f"the host {environment.hostname}" if where else "the host"
        yield Caveat(CaveatKind.SWAP_USED, {"host": host, "swapped": environment.swap_used_bytes})


def device_capacity_bytes(runs: Sequence[Run], environments: Sequence[Environment]) -> int | None:
    """Memory of the smallest GPU, real or emulated, that a rank reported; if no rank did, of the environments.

    None on the CPU accelerator.
    """
    on_gpus = [run for run in runs if run.row.accelerator == "cuda"]
    read = [run.stored for run in on_gpus if isinstance(run.stored, TrialRecord)]
    sizes = [rank.gpu_total_bytes for record in read for rank in record.ranks]
    # Of a record that was not read, all cards are alike.
    others = [run.row.gpu_total_gb for run in on_gpus if not isinstance(run.stored, TrialRecord)]
    sizes += [round(size * BYTES_PER_GB) for size in others if size]
    if on_gpus and not any(sizes):
        sizes = [
            gpu.memory_total_bytes
            for environment in environments
            for host in environment.hosts or (environment,)
            for gpu in host.gpus
        ]
    limits = [run.trial.placement.gpu_memory_limit_bytes for run in on_gpus]
    return min((size for size in [*sizes, *limits] if size), default=None)


def host_capacity_bytes(environments: Sequence[Environment]) -> int | None:
    """Memory of the host or of its cgroup, whichever is less; None if no environment is known."""
    sizes = [(each.host_memory_bytes, each.cgroup_memory_limit_bytes) for each in environments]
    return min((size for pair in sizes for size in pair if size), default=None)
