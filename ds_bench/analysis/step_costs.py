"""Costs of a step besides the model's computation: communication, transfers, CPU Adam, the disk (docs/metrics.md).

They come from synchronized steps after the measured window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..records.schema import OffloadTimes, RankMeasurement, TrialRecord, ranks_of_nodes

PARTS = ("forward", "backward", "step", "communication", "transfer", "data_wait")
"""Parts of a step, which do not overlap."""


def step_costs(record: TrialRecord) -> dict[str, Any]:
    """Return the costs of one synchronized step of a trial with measurements; None for each that was not measured."""
    ranks = record.ranks
    parts = step_parts(ranks)
    # The same rank for time and waiting, so that waiting is part of the time.
    slowest = max(ranks, key=lambda rank: rank.step_parts.get("communication", 0.0))
    operations = slowest.communication or ()
    waits = [each.wait_seconds for each in operations if each.wait_seconds is not None]
    adam_speeds: list[float] = []
    disks: list[tuple[float, float]] = []
    for node in ranks_of_nodes(ranks).values():
        # Ranks of a node step in parallel: all their bytes in the time of the slowest.
        stepped = [rank.offload for rank in node if rank.offload is not None and rank.offload.cpu_adam_seconds]
        if stepped:
            slowest_seconds = max(times.cpu_adam_seconds or 0.0 for times in stepped)
            adam_speeds.append(sum(times.cpu_adam_bytes or 0.0 for times in stepped) / slowest_seconds)
        swapping = [(rank, rank.offload) for rank in node if rank.offload is not None and _moved_bytes(rank.offload)]
        moved = sum(_moved_bytes(times) for _, times in swapping)
        other_seconds = max((_seconds_without_disk(rank, times) for rank, times in swapping), default=0.0)
        busy_seconds = max((times.disk_busy_seconds or 0.0 for _, times in swapping), default=0.0)
        if other_seconds and busy_seconds:
            disks.append((moved / other_seconds, moved / busy_seconds))
    # The node whose disk delivers the smallest fraction of what it needs.
    needed, measured = min(disks, key=lambda speeds: speeds[1] / speeds[0], default=(None, None))
    wait = disk_wait(record)
    return {
        # On the slowest rank, including the wait for other ranks.
        "communication_seconds": parts.get("communication"),
        # A sum without one of the operations would be too small.
        "communication_wait_seconds": sum(waits) if operations and len(waits) == len(operations) else None,
        "communication_bytes": max(
            (sum(each.bytes for each in rank.communication) for rank in ranks if rank.communication is not None),
            default=None,
        ),
        "transfer_seconds": parts.get("transfer"),
        "cpu_adam_bytes_per_second": min(adam_speeds, default=None),
        # Disk speed at which other work would hide all transfers, on the node whose disk falls furthest short of it.
        "disk_needed_bytes_per_second": needed,
        "disk_measured_bytes_per_second": measured,
        # Whether the rank that waits longest for the disk spends more of a step on that than on everything else.
        "disk_bound": None if wait is None else wait[0] > wait[1],
    }


def step_parts(ranks: Sequence[RankMeasurement]) -> dict[str, float]:
    """Return the seconds of each measured part of a synchronized step, on the rank that is slowest in it. Ranks without
    parts contribute their three phases."""
    parts = [rank.step_parts or rank.phase_seconds for rank in ranks]
    measured = [part for part in PARTS if any(part in each for each in parts)]
    return {part: max(each.get(part, 0.0) for each in parts) for part in measured}


def disk_wait(record: TrialRecord) -> tuple[float, float] | None:
    """Return the seconds that a step waits for the disk, and those it spends on everything else.

    On the rank that waits longest for the disk; None if nothing was swapped. A trial is disk-bound if the first is the
    larger.
    """
    waits = [
        (rank.offload.disk_wait_seconds, _seconds_without_disk(rank, rank.offload))
        for rank in record.ranks
        if rank.offload is not None and rank.offload.disk_wait_seconds is not None and _moved_bytes(rank.offload)
    ]
    return max(waits, key=lambda wait: wait[0], default=None)


def _moved_bytes(times: OffloadTimes) -> float:
    return (times.disk_read_bytes or 0.0) + (times.disk_written_bytes or 0.0)


def _seconds_without_disk(rank: RankMeasurement, times: OffloadTimes) -> float:
    return max(0.0, sum(rank.phase_seconds.values()) - (times.disk_wait_seconds or 0.0))
