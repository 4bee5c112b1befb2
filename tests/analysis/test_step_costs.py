"""Rates of CPU Adam and of the disk, and the verdict on the disk, by hand."""

from __future__ import annotations

from typing import Any

from ds_bench.analysis.row import make_run
from ds_bench.analysis.step_costs import step_costs, step_parts
from ds_bench.config.caveats import CaveatKind
from ds_bench.records.schema import CommunicationOperation, OffloadTimes, RankMeasurement, TrialRecord
from tests.support import fakes
from tests.support.runs import record_of, seen

PHASES = {"forward": 1.0, "backward": 2.0, "step": 7.0}


def swapping(wait: float, busy: float | None = None, **changes: Any) -> RankMeasurement:
    """A rank whose step of 10 s reads 60 and writes 30 bytes."""
    times = OffloadTimes(
        disk_read_bytes=60, disk_written_bytes=30, disk_wait_seconds=wait, disk_busy_seconds=busy or wait
    )
    parts = {**PHASES, "step": 7.0 - wait, "transfer": wait}
    return seen(phase_seconds=PHASES, offload=times, step_parts=parts, **changes)


def test_what_the_disk_must_do_is_what_all_else_leaves_it_time_for() -> None:
    """Two ranks on one disk: 180 bytes; the slower waits 4 of 10 s, so that 6 s are left, 30 bytes a second."""
    costs = step_costs(record_of(swapping(4.0), swapping(4.0)))
    assert costs.disk_needed_bytes_per_second == 180 / 6
    assert costs.disk_measured_bytes_per_second == 180 / 4
    assert costs.disk_bound is False
    assert costs.transfer_seconds == 4.0
    slow = step_costs(record_of(swapping(6.0), swapping(4.0)))
    assert slow.disk_measured_bytes_per_second == 180 / 6
    assert slow.disk_bound is True


def test_a_disk_that_works_beside_the_training_binds_nothing() -> None:
    """It was busy all along, and a step waited for it half a second."""
    costs = step_costs(record_of(swapping(0.5, busy=9.8)))
    assert costs.disk_bound is False
    assert costs.disk_needed_bytes_per_second == 90 / 9.5


def test_the_node_whose_disk_is_slowest_beside_its_need_counts() -> None:
    costs = step_costs(record_of(swapping(2.0, hostname="a"), swapping(6.0, hostname="b")))
    assert costs.disk_measured_bytes_per_second == 90 / 6
    assert costs.disk_needed_bytes_per_second == 90 / 4


def test_a_disk_bound_row_says_so_and_what_to_do() -> None:
    trial = fakes.trial(fakes.offload("nvme"), on=fakes.placement(nvme_path="/mnt/disk"))
    moved = {
        "nvme_stored_bytes": 9,
        "nvme_read_bytes": 9,
        "nvme_written_bytes": 9,
        "ledger": {"nvme": {"parameters": 1}},
    }
    rank = swapping(6.0, **moved)
    record = TrialRecord(trial=trial, outcome=fakes.success().outcome, ranks=(rank,))
    (caveat,) = [each for each in make_run(record).caveats if each.kind is CaveatKind.DISK_BOUND]
    assert caveat.values == {"wait": 6.0, "other": 4.0}


def test_cpu_adam_of_all_ranks_of_a_node_over_the_slowest() -> None:
    ranks = [seen(offload=OffloadTimes(cpu_adam_seconds=each, cpu_adam_bytes=100)) for each in (2.0, 4.0)]
    assert step_costs(record_of(*ranks)).cpu_adam_bytes_per_second == 200 / 4


def test_communication_is_that_of_the_slowest_rank() -> None:
    def rank(seconds: float, wait: float | None) -> RankMeasurement:
        operation = CommunicationOperation(name="all_reduce", count=2, bytes=50, seconds=seconds, wait_seconds=wait)
        return seen(communication=(operation, operation), step_parts={**PHASES, "communication": 2 * seconds})

    costs = step_costs(record_of(rank(0.5, 0.0), rank(1.5, 1.0)))
    assert (costs.communication_seconds, costs.communication_wait_seconds, costs.communication_bytes) == (3.0, 2.0, 100)
    assert step_costs(record_of(rank(0.5, None))).communication_wait_seconds is None
    assert step_costs(record_of(seen())).communication_seconds is None


def test_parts_are_the_phases_where_no_more_is_known() -> None:
    assert step_parts([seen(phase_seconds=PHASES)]) == PHASES
    assert list(step_parts([swapping(4.0)])) == ["forward", "backward", "step", "transfer"]
