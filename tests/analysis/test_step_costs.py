"""Rates of CPU Adam and of the disk, and the verdict on the disk, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ds_bench.analysis.step_costs import step_costs, step_parts
from ds_bench.records.schema import CommunicationOperation, OffloadTimes, RankMeasurement
from tests.support.runs import record_of, seen

PHASES = {"forward": 1.0, "backward": 2.0, "step": 7.0}


def swapping(wait: float, busy: float | None = None, **changes: Any) -> RankMeasurement:
    """A rank whose step of 10 s reads 60 and writes 30 bytes."""
    times = OffloadTimes(
        disk_read_bytes=60, disk_written_bytes=30, disk_wait_seconds=wait, disk_busy_seconds=busy or wait
    )
    parts = {**PHASES, "step": 7.0 - wait, "transfer": wait}
    return seen(phase_seconds=PHASES, offload=times, step_parts=parts, **changes)


def test_the_disk_must_move_its_bytes_in_the_time_that_all_else_leaves(subtests: pytest.Subtests) -> None:
    for ranks, needed, measured, bound in (
        # Two ranks on one disk move 180 bytes; the slower waits 4 of 10 s, so that 6 s are left.
        ([swapping(4.0), swapping(4.0)], 180 / 6, 180 / 4, False),
        ([swapping(6.0), swapping(4.0)], 180 / 6, 180 / 6, True),
        # It was busy all along, and a step waited for it half a second.
        ([swapping(0.5, busy=9.8)], 90 / 9.5, 90 / 9.8, False),
        # The node whose disk is slowest relative to its need counts.
        ([swapping(2.0, hostname="a"), swapping(6.0, hostname="b")], 90 / 4, 90 / 6, True),
    ):
        with subtests.test(needed=needed, measured=measured):
            costs = step_costs(record_of(*ranks))
            speeds = costs["disk_needed_bytes_per_second"], costs["disk_measured_bytes_per_second"]
            assert (*speeds, costs["disk_bound"]) == (needed, measured, bound)


def test_cpu_adam_of_all_ranks_of_a_node_over_the_slowest() -> None:
    ranks = [seen(offload=OffloadTimes(cpu_adam_seconds=each, cpu_adam_bytes=100)) for each in (2.0, 4.0)]
    assert step_costs(record_of(*ranks))["cpu_adam_bytes_per_second"] == 200 / 4


def test_communication_is_that_of_the_slowest_rank() -> None:
    def rank(seconds: float, wait: float | None) -> RankMeasurement:
        operation = CommunicationOperation(name="all_reduce", count=2, bytes=50, seconds=seconds, wait_seconds=wait)
        return seen(communication=(operation, operation), step_parts={**PHASES, "communication": 2 * seconds})

    costs = step_costs(record_of(rank(0.5, 0.0), rank(1.5, 1.0)))
    found = [costs[f"communication_{name}"] for name in ("seconds", "wait_seconds", "bytes")]
    assert found == [3.0, 2.0, 100]
    assert step_costs(record_of(rank(0.5, None)))["communication_wait_seconds"] is None
    assert set(step_costs(record_of(seen())).values()) == {None}


def test_parts_are_the_phases_if_no_more_is_known() -> None:
    assert step_parts([seen(phase_seconds=PHASES)]) == PHASES
    assert list(step_parts([swapping(4.0)])) == ["forward", "backward", "step", "transfer"]
