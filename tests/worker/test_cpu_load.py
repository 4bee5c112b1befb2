"""Processors that others use as well: how ranks wait, how many threads they get, and when a row is disqualified."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis import comparison
from ds_bench.analysis.row import make_run
from ds_bench.config.caveat_texts import CPU_KINDS, Caveat
from ds_bench.config.spec import Placement
from ds_bench.launch.rank_environment import rank_environment
from ds_bench.records.schema import TrialRecord
from ds_bench.system import host_resources
from ds_bench.worker.cpu_load import CpuReading, load_between
from tests.support import fakes
from tests.support.cgroups import place, write

CPUS = frozenset(os.sched_getaffinity(0))
TWO_RANKS = Placement(accelerator="cpu", num_gpus=2)


def test_threads_follow_the_cpu_quota_and_the_user(tmp_path: Path) -> None:
    assert rank_environment(TWO_RANKS, {})["OMP_WAIT_POLICY"] == "passive"
    for own in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert "OMP_WAIT_POLICY" not in rank_environment(TWO_RANKS, {own: "1"})
    assert "OMP_NUM_THREADS" not in rank_environment(TWO_RANKS, {"OMP_NUM_THREADS": "5"}, tmp_path)
    place(tmp_path, "0::/job")
    full, half = len(CPUS), max(1, len(CPUS) // 2)
    for quota, ranks, threads in (("max 100000", 1, full), ("max 100000", 2, half), ("50000 100000", 2, 1)):
        write(tmp_path / "sys/fs/cgroup/job/cpu.max", quota)
        found = rank_environment(Placement(accelerator="cpu", num_gpus=ranks), {}, tmp_path)
        assert found["OMP_NUM_THREADS"] == str(threads)


def test_busy_and_throttled_time_are_of_our_processors_and_the_cgroup_with_the_quota(tmp_path: Path) -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    lines = ["cpu  9 9 9 9 9 9 9 9 9 9", "cpu0 1 2 4 800 900 8 16 32 5 5", "cpu1 100 0 0 0 0 0 0 0 0 0", "intr 5"]
    write(tmp_path / "proc/stat", "\n".join(lines))
    assert host_resources.busy_cpu_seconds({0, 1}, tmp_path) == pytest.approx(163 * tick)  # with what a hypervisor took
    assert host_resources.busy_cpu_seconds({0, 7}, tmp_path) is None
    place(tmp_path, "0::/job/step")
    write(tmp_path / "sys/fs/cgroup/job/step/cpu.stat", "nr_periods 5\nnr_throttled 5")
    assert host_resources.cgroup_cpu_periods(tmp_path) is None
    write(tmp_path / "sys/fs/cgroup/job/cpu.max", "150000 100000")
    write(tmp_path / "sys/fs/cgroup/job/cpu.stat", "usage_usec 9\nnr_periods 100\nnr_throttled 40\nthrottled_usec 7")
    assert host_resources.cgroup_cpu_periods(tmp_path) == (100, 40)
    assert host_resources.usable_cores(tmp_path) == min(1.5, len(CPUS))


OWN_SECONDS = """
import os, subprocess, sys, time
from ds_bench.system.host_resources import busy_cpu_seconds
from ds_bench.worker.cpu_load import own_cpu_seconds

theirs, ours = ({int(cpu)} for cpu in sys.argv[1:])
burn = [sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"]
before, busy = own_cpu_seconds(ours), busy_cpu_seconds({*theirs, *ours})
subprocess.run(burn)
ended = own_cpu_seconds(ours) - before
if os.fork() == 0:
    os.sched_setaffinity(0, theirs)
    while time.process_time() < 0.6: pass
    sys.exit(sys.stdin.read())
end = time.monotonic() + 60
while (apart := own_cpu_seconds(theirs) - own_cpu_seconds(ours)) < 0.5 and time.monotonic() < end:
    time.sleep(0.05)
print(ended, apart, busy_cpu_seconds({*theirs, *ours}) - busy)
"""


@pytest.mark.skipif(len(CPUS) < 2, reason="one processor")
def test_the_time_of_ended_children_is_our_own_and_not_that_of_ranks_bound_to_other_processors() -> None:
    command = [sys.executable, "-c", OWN_SECONDS, *(str(cpu) for cpu in sorted(CPUS)[:2])]
    # In a session of its own, as a trial is: the tests' session may be 0, which also has the kernel's threads of each
    # processor.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as program:
        assert program.stdout is not None
        ended, apart, busy = map(float, program.stdout.readline().split())
        program.communicate()
    assert ended >= 0.45
    assert apart >= 0.5
    assert busy >= ended + 0.45, "the kernel counts both, in the same unit"


def test_other_programs_use_what_is_busy_and_not_our_own() -> None:
    def load(seconds: float, busy: float | None, own: float, throttled: int = 0) -> dict[str, Any]:
        start = CpuReading(monotonic_seconds=10, busy_seconds=busy and 100, own_seconds=50, periods=(10, 1))
        end = replace(start, monotonic_seconds=10 + seconds, own_seconds=50 + own, periods=(50, 1 + throttled))
        return load_between(start, replace(end, busy_seconds=busy and 100 + busy))

    found = load(4, 7, 3, throttled=2)
    assert (found["cpu_other_cores"], found["cpu_own_cores"], found["cpu_throttled_fraction"]) == (1.0, 0.75, 0.05)
    assert load(9, 1e-9, 4)["cpu_other_cores"] == 0.0
    assert "cpu_other_cores" not in load(0.1, 1, 0)
    assert "cpu_other_cores" not in load(9, None, 0)


def cpu_caveats(record: TrialRecord) -> list[Caveat]:
    return [caveat for caveat in make_run(record).caveats if caveat.kind in CPU_KINDS]


BIG = {"cpu_cores": 64.0, "cpu_threads": 32}
CARD = {"accelerator": "cuda", "cpu_cores": 16.0, "cpu_threads": 8, "cpu_other_cores": 6.0}


@pytest.mark.parametrize(
    ("values", "is_busy"),
    [
        ({"cpu_other_cores": 0.4}, False),
        ({"cpu_other_cores": 0.8}, True),
        ({"cpu_other_cores": None, "cpu_own_cores": None}, False),
        ({**BIG, "cpu_other_cores": 3.0}, False),
        ({**BIG, "cpu_other_cores": 6.0}, True),
        ({**BIG, "cpu_threads": 4, "cpu_other_cores": 40.0}, False),  # there was room for all
        ({**CARD, "cpu_own_cores": 2.0}, False),
        ({**CARD, "cpu_own_cores": 12.0}, True),
        ({"cpu_throttled_fraction": 0.05}, False),
        ({"cpu_throttled_fraction": 0.31}, True),
    ],
)
def test_a_row_that_shared_its_processors_or_was_throttled_is_disqualified(
    values: dict[str, Any], is_busy: bool
) -> None:
    usual = {"accelerator": "cpu", "cpu_cores": 2.0, "cpu_threads": 1, "cpu_own_cores": 1.2, "cpu_other_cores": 0.0}
    measured = {**usual, **values}
    on = Placement(accelerator=measured.pop("accelerator"), num_gpus=2)
    found = cpu_caveats(fakes.success(fakes.trial(on=on), **measured))
    assert [caveat.kind.disqualifies for caveat in found] == [True] * is_busy


def test_the_processors_of_every_bound_rank_must_be_free() -> None:
    record = fakes.success(fakes.trial(on=TWO_RANKS), cpu_cores=4.0, cpu_threads=2)
    for other, is_busy in ((2.5, True), (1.5, False)):  # two threads of four processors: there is room for 1.5 others
        ranks = [
            replace(rank, cpus_allowed=cpus, cpu_own_cores=2.0, cpu_other_cores=cores)
            for rank, cpus, cores in zip(record.ranks, ((0, 1, 2, 3), (4, 5, 6, 7)), (0.0, other), strict=True)
        ]
        assert bool(cpu_caveats(replace(record, ranks=ranks))) is is_busy


def test_several_busy_runs_of_a_row_are_one_caveat_with_the_busiest() -> None:
    runs = [
        make_run(fakes.success(fakes.trial(repeat=repeat), cpu_cores=2.0, cpu_threads=2, cpu_other_cores=other))
        for repeat, other in enumerate((0.9, 1.4, 1.1))
    ]
    (row,) = comparison.compare(runs).rows
    assert [caveat.values["other"] for caveat in row.caveats if caveat.kind in CPU_KINDS] == [1.4]
