"""Caveats that apply to the whole comparison, not to one row, and the memory capacities it ran with.

Such caveats are the state of the machine, too few repeats, a single GPU, the CPU accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..records.schema import TrialRecord
from ..system.environment import Environment, comparable
from ..system.gpus import GpuFacts, throttle_faults
from ..units import format_bytes
from .caveats import Caveat, CaveatKind, caveat_of_kind
from .intervals import FEWEST_RUNS
from .summary import TrialSummary

_SHORT_WINDOW_SECONDS = 2.0


def comparison_caveats(rows: Sequence[Sequence[TrialSummary]], environments: Sequence[Environment]) -> list[Caveat]:
    """Caveats of the whole comparison, each once. ``rows``: the runs of each row."""
    records = [summary.record for row in rows for summary in row]
    caveats = [
        *_placement_caveats(records),
        *_window_caveats(records),
        *_repeat_caveats(rows),
        *_environment_caveats(environments),
    ]
    gpus_used = max((_gpus_used(record) for record in records), default=0)
    for environment in environments:
        caveats += _machine_caveats(environment, gpus_used)
    return list(dict.fromkeys(caveats))


def _placement_caveats(records: Sequence[TrialRecord]) -> Iterator[Caveat]:
    if any(record.trial.placement.accelerator == "cpu" for record in records):
        yield caveat_of_kind(CaveatKind.CPU_ACCELERATOR, "CPU accelerator: these figures say nothing about GPUs")
    if any(record.trial.strategy.stage > 0 and _partitions(record) == 1 for record in records):
        text = "one GPU or rank: stages 1 to 3 have nobody to partition with, so they save no model states"
        yield caveat_of_kind(CaveatKind.ONE_GPU, text)


def _window_caveats(records: Sequence[TrialRecord]) -> Iterator[Caveat]:
    on_gpus = [record for record in records if record.trial.placement.accelerator == "cuda"]
    windows = [_window_seconds(record) for record in on_gpus if record.ranks]
    if windows and min(windows) < _SHORT_WINDOW_SECONDS:
        text = (
            f"the shortest measured window is {min(windows):.2f} s: below {_SHORT_WINDOW_SECONDS:.0f} s the clock of a "
            "card under load still moves, and one pause of the host weighs much"
        )
        yield caveat_of_kind(CaveatKind.SHORT_WINDOW, text)


def _window_seconds(record: TrialRecord) -> float:
    """Duration of all measured steps on the slowest rank. A record read from a flat row has one mean step time."""
    slowest = max(record.ranks, key=lambda rank: rank.window_seconds)
    return slowest.window_seconds / len(slowest.step_seconds) * record.trial.workload.num_steps


def _partitions(record: TrialRecord) -> int:
    return record.ranks[0].data_parallel_size if record.ranks else record.trial.placement.num_gpus


def _gpus_used(record: TrialRecord) -> int:
    placement = record.trial.placement
    return placement.num_gpus if placement.accelerator == "cuda" else 0


def _repeat_caveats(rows: Sequence[Sequence[TrialSummary]]) -> Iterator[Caveat]:
    """Yields nothing unless two rows have numbers: without a second row there is no difference to test."""
    runs = [count for row in rows if (count := sum(summary.record.outcome.success for summary in row))]
    few = sum(count < FEWEST_RUNS for count in runs)
    if len(runs) < 2 or not few:
        return
    which = "the rows have" if few == len(runs) else f"{few} of {len(runs)} rows have"
    text = f"{which} fewer than {FEWEST_RUNS} successful runs: differences from run to run are not tested"
    yield caveat_of_kind(CaveatKind.TOO_FEW_REPEATS, text)


def _environment_caveats(environments: Sequence[Environment]) -> Iterator[Caveat]:
    for other in environments[1:]:
        if differences := comparable(environments[0], other):
            yield caveat_of_kind(CaveatKind.ENVIRONMENT_DIFFERS, f"environments differ: {'; '.join(differences)}")


def _machine_caveats(environment: Environment, gpus_used: int) -> Iterator[Caveat]:
    """``gpus_used``: the job used so many of the visible GPUs, the first ones."""
    for gpu in environment.gpus[:gpus_used]:
        yield from _gpu_caveats(gpu)
    if environment.swap_used_bytes:
        text = f"the host has {format_bytes(environment.swap_used_bytes)} swapped out"
        yield caveat_of_kind(CaveatKind.SWAP_USED, text)


def _gpu_caveats(gpu: GpuFacts) -> Iterator[Caveat]:
    if gpu.other_processes:
        text = f"GPU {gpu.index} is also used by {len(gpu.other_processes)} other process(es): numbers suffer"
        yield caveat_of_kind(CaveatKind.OTHER_PROCESS, text)
    if reasons := throttle_faults(gpu):
        text = f"GPU {gpu.index} was held back before the first trial: {', '.join(reasons)}"
        yield caveat_of_kind(CaveatKind.CLOCKS_THROTTLED, text)


def device_capacity_bytes(records: Sequence[TrialRecord], environments: Sequence[Environment]) -> int | None:
    """Memory of the smallest GPU, real or emulated, that a rank reported; if no rank did, of the environments.

    None on the CPU accelerator.
    """
    on_gpus = [record for record in records if record.trial.placement.accelerator == "cuda"]
    sizes = [rank.gpu_total_bytes for record in on_gpus for rank in record.ranks]
    if on_gpus and not any(sizes):
        sizes = [gpu.memory_total_bytes for environment in environments for gpu in environment.gpus]
    limits = [record.trial.placement.gpu_memory_limit_bytes for record in on_gpus]
    return min((size for size in [*sizes, *limits] if size), default=None)


def host_capacity_bytes(environments: Sequence[Environment]) -> int | None:
    """Memory of the host or of its cgroup, whichever is less; None if no environment is known."""
    sizes = [(each.host_memory_bytes, each.cgroup_memory_limit_bytes) for each in environments]
    return min((size for pair in sizes for size in pair if size), default=None)
