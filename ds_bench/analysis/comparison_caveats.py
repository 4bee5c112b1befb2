"""Pure: what holds for a comparison as a whole and a reader must know before any of its rows, and how much memory
there was.

Each caveat is of a kind that no single row can have: of the machine, of the number of runs, of what the number of GPUs
lets a comparison show at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..records.schema import TrialRecord
from ..system.environment import Environment, comparable
from ..system.gpus import GpuFacts, throttle_faults
from ..units import format_bytes
from .caveats import Caveat, CaveatKind, typed
from .intervals import FEWEST_RUNS
from .summary import Summary

_SHORT_WINDOW_SECONDS = 2.0


def whole_caveats(rows: Sequence[Sequence[Summary]], environments: Sequence[Environment]) -> list[Caveat]:
    """Of all rows together, each a sequence of its runs; each caveat once."""
    records = [summary.record for row in rows for summary in row]
    found = [*_of_placement(records), *_of_windows(records), *_of_repeats(rows), *_of_environments(environments)]
    cards = max((_cards_used(record) for record in records), default=0)
    for environment in environments:
        found += _of_machine(environment, cards)
    return list(dict.fromkeys(found))


def _of_placement(records: Sequence[TrialRecord]) -> Iterator[Caveat]:
    if any(record.trial.placement.accelerator == "cpu" for record in records):
        yield typed(CaveatKind.CPU_ACCELERATOR, "CPU accelerator: these figures say nothing about GPUs")
    if any(record.trial.strategy.stage > 0 and _partitions(record) == 1 for record in records):
        text = "one GPU or rank: stages 1 to 3 have nobody to partition with, so they save no model states"
        yield typed(CaveatKind.ONE_GPU, text)


def _of_windows(records: Sequence[TrialRecord]) -> Iterator[Caveat]:
    on_cards = [record for record in records if record.trial.placement.accelerator == "cuda"]
    windows = [_window_seconds(record) for record in on_cards if record.ranks]
    if windows and min(windows) < _SHORT_WINDOW_SECONDS:
        text = (
            f"the shortest measured window is {min(windows):.2f} s: below {_SHORT_WINDOW_SECONDS:.0f} s the clock of a "
            "card under load still moves, and one pause of the host weighs much"
        )
        yield typed(CaveatKind.SHORT_WINDOW, text)


def _window_seconds(record: TrialRecord) -> float:
    """Of all measured steps on the slowest rank; a record that was read from a flat row holds one mean step."""
    slowest = max(record.ranks, key=lambda rank: rank.window_seconds)
    return slowest.window_seconds / len(slowest.step_seconds) * record.trial.workload.num_steps


def _partitions(record: TrialRecord) -> int:
    return record.ranks[0].data_parallel_size if record.ranks else record.trial.placement.num_gpus


def _cards_used(record: TrialRecord) -> int:
    placement = record.trial.placement
    return placement.num_gpus if placement.accelerator == "cuda" else 0


def _of_repeats(rows: Sequence[Sequence[Summary]]) -> Iterator[Caveat]:
    """Only where two rows have numbers, so that there is a difference that might be tested."""
    runs = [count for row in rows if (count := sum(summary.record.outcome.success for summary in row))]
    few = sum(count < FEWEST_RUNS for count in runs)
    if len(runs) < 2 or not few:
        return
    which = "the rows have" if few == len(runs) else f"{few} of {len(runs)} rows have"
    text = f"{which} fewer than {FEWEST_RUNS} successful runs: differences from run to run are not tested"
    yield typed(CaveatKind.TOO_FEW_REPEATS, text)


def _of_environments(environments: Sequence[Environment]) -> Iterator[Caveat]:
    for other in environments[1:]:
        if found := comparable(environments[0], other):
            yield typed(CaveatKind.ENVIRONMENT_DIFFERS, f"environments differ: {'; '.join(found)}")


def _of_machine(environment: Environment, cards: int) -> Iterator[Caveat]:
    """``cards``: how many the job used, the first of those that were visible."""
    for gpu in environment.gpus[:cards]:
        yield from _of_card(gpu)
    if environment.swap_used_bytes:
        text = f"the host has {format_bytes(environment.swap_used_bytes)} swapped out"
        yield typed(CaveatKind.SWAP_USED, text)


def _of_card(gpu: GpuFacts) -> Iterator[Caveat]:
    if gpu.other_processes:
        text = f"GPU {gpu.index} is also used by {len(gpu.other_processes)} other process(es): numbers suffer"
        yield typed(CaveatKind.OTHER_PROCESS, text)
    if reasons := throttle_faults(gpu):
        text = f"GPU {gpu.index} was held back before the first trial: {', '.join(reasons)}"
        yield typed(CaveatKind.CLOCKS_THROTTLED, text)


def device_capacity_bytes(records: Sequence[TrialRecord], environments: Sequence[Environment]) -> int | None:
    """Memory of the smallest card, real or emulated, that ranks saw; where none got that far, of the environments'.

    None on the CPU accelerator.
    """
    on_cards = [record for record in records if record.trial.placement.accelerator == "cuda"]
    seen = [rank.gpu_total_bytes for record in on_cards for rank in record.ranks]
    if on_cards and not any(seen):
        seen = [gpu.memory_total_bytes for environment in environments for gpu in environment.gpus]
    limits = [record.trial.placement.gpu_memory_limit_bytes for record in on_cards]
    return min((size for size in [*seen, *limits] if size), default=None)


def host_capacity_bytes(environments: Sequence[Environment]) -> int | None:
    """Memory of the host or of the cgroup, whichever is less; None where no environment tells."""
    sizes = [(facts.host_memory_bytes, facts.cgroup_memory_limit_bytes) for facts in environments]
    return min((size for pair in sizes for size in pair if size), default=None)
