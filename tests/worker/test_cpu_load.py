"""Processors that others use as well: how ranks wait, how many threads they get, and what makes a row no result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ds_bench.analysis import comparison
from ds_bench.analysis.row import make_run
from ds_bench.config.caveats import CPU_KINDS, Caveat
from ds_bench.config.spec import Placement
from ds_bench.launch import rank_environment
from ds_bench.system import host_memory
from ds_bench.worker.cpu_load import CpuReading, load_between, own_cpu_seconds
from tests.support import fakes
from tests.support.cgroups import place, write
from tests.support.real_trials import Launch

CPUS = frozenset(os.sched_getaffinity(0))
TWO_RANKS = Placement(accelerator="cpu", num_gpus=2)
THREE_MS_BETWEEN_PARALLEL_REGIONS = """
import json, time, torch
values = torch.ones(2**20)
for _ in range(20): values.add_(1.0)
process, main = time.process_time(), time.thread_time()
for _ in range(100):
    values.add_(1.0)
    end = time.perf_counter() + 0.003
    while time.perf_counter() < end: pass
main = time.thread_time() - main
print(json.dumps([main, time.process_time() - process - main]))
"""


def test_idle_threads_of_a_cpu_rank_do_not_spin() -> None:
    """Measured here: 0.06 of the main thread's time with the variable, 1.03 without it (torch's wheel has libgomp)."""
    variables = rank_environment.rank_environment(TWO_RANKS, {}) | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", THREE_MS_BETWEEN_PARALLEL_REGIONS]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=120)
    main, others = json.loads(done.stdout)
    assert others < 0.3 * main


def test_threads_follow_the_cpu_quota_and_the_user(tmp_path: Path) -> None:
    assert rank_environment.rank_environment(TWO_RANKS, {})["OMP_WAIT_POLICY"] == "passive"
    for said in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert "OMP_WAIT_POLICY" not in rank_environment.rank_environment(TWO_RANKS, {said: "1"})

    def threads(quota: str, ranks: int) -> int:
        place(tmp_path, "0::/job")
        write(tmp_path / "sys/fs/cgroup/job/cpu.max", quota)
        on = Placement(accelerator="cpu", num_gpus=ranks)
        return int(rank_environment.rank_environment(on, {}, tmp_path)["OMP_NUM_THREADS"])

    assert threads("max 100000", 1) == len(CPUS)
    assert threads("100000 100000", 1) == 1
    assert threads("50000 100000", 2) == 1
    assert "OMP_NUM_THREADS" not in rank_environment.rank_environment(TWO_RANKS, {"OMP_NUM_THREADS": "5"}, tmp_path)


def test_busy_time_is_of_the_named_processors_with_what_a_hypervisor_withheld(tmp_path: Path) -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    lines = ["cpu  9 9 9 9 9 9 9 9 9 9", "cpu0 1 2 4 800 900 8 16 32 5 5", "cpu1 100 0 0 0 0 0 0 0 0 0", "intr 5"]
    write(tmp_path / "proc/stat", "\n".join(lines))
    assert host_memory.busy_cpu_seconds({0}, tmp_path) == pytest.approx(63 * tick)
    assert host_memory.busy_cpu_seconds({0, 1}, tmp_path) == pytest.approx(163 * tick)
    assert host_memory.busy_cpu_seconds({0, 7}, tmp_path) is None
    assert host_memory.busy_cpu_seconds({0}, tmp_path / "absent") is None


def test_throttled_periods_are_of_the_cgroup_with_the_quota(tmp_path: Path) -> None:
    place(tmp_path, "0::/job/step")
    write(tmp_path / "sys/fs/cgroup/job/step/cpu.stat", "nr_periods 5\nnr_throttled 5")
    assert host_memory.cgroup_cpu_periods(tmp_path) is None
    write(tmp_path / "sys/fs/cgroup/job/cpu.max", "150000 100000")
    write(tmp_path / "sys/fs/cgroup/job/cpu.stat", "usage_usec 9\nnr_periods 100\nnr_throttled 40\nthrottled_usec 7")
    assert host_memory.cgroup_cpu_periods(tmp_path) == (100, 40)
    assert host_memory.usable_cores(tmp_path) == min(1.5, len(CPUS))


def test_the_time_of_children_and_of_the_programs_above_is_our_own() -> None:
    before = own_cpu_seconds(CPUS)
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True, timeout=60)
    assert own_cpu_seconds(CPUS) - before >= 0.45


SECONDS_APART = """
import os, sys, time
from ds_bench.worker.cpu_load import own_cpu_seconds

theirs, ours = ({int(cpu)} for cpu in sys.argv[1:])
if os.fork() == 0:
    os.sched_setaffinity(0, theirs)
    while time.process_time() < 0.6: pass
    sys.exit(sys.stdin.read())
end = time.monotonic() + 60
while (apart := own_cpu_seconds(theirs) - own_cpu_seconds(ours)) < 0.5 and time.monotonic() < end:
    time.sleep(0.05)
print(apart)
"""


@pytest.mark.skipif(len(CPUS) < 2, reason="one processor")
def test_the_time_of_a_rank_that_is_bound_elsewhere_is_not_spent_on_our_processors() -> None:
    command = [sys.executable, "-c", SECONDS_APART, *(str(cpu) for cpu in sorted(CPUS)[:2])]
    # In a session of its own, as a trial is: that of the tests may be 0, which also holds the kernel's threads of
    # each processor.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as program:
        assert program.stdout is not None
        apart = float(program.stdout.readline())
        program.communicate()
    assert apart >= 0.5


def reading(at: float, *, busy: float | None, own: float, periods: tuple[int, int] | None = None) -> CpuReading:
    return CpuReading(monotonic_seconds=at, cpus=CPUS, busy_seconds=busy, own_seconds=own, periods=periods)


def test_other_programs_use_what_is_busy_and_not_our_own() -> None:
    found = load_between(reading(10, busy=100, own=50, periods=(10, 1)), reading(14, busy=107, own=53, periods=(50, 3)))
    assert (found["cpu_own_cores"], found["cpu_other_cores"]) == (0.75, 1.0)
    assert found["cpu_throttled_fraction"] == pytest.approx(0.05)
    assert load_between(reading(0, busy=1, own=1), reading(9, busy=1, own=5))["cpu_other_cores"] == 0.0
    assert "cpu_other_cores" not in load_between(reading(0, busy=1, own=1), reading(0.1, busy=2, own=1))
    assert "cpu_other_cores" not in load_between(reading(0, busy=None, own=1), reading(9, busy=None, own=1))


def busy(accelerator: str = "cpu", **changes: object) -> list[Caveat]:
    on = Placement(accelerator=accelerator, num_gpus=2)  # type: ignore[arg-type]
    values = {"cpu_cores": 2.0, "cpu_threads": 1, "cpu_own_cores": 1.2, "cpu_other_cores": 0.0, **changes}
    caveats = make_run(fakes.success(fakes.trial(on=on), **values), None, None).caveats
    return [caveat for caveat in caveats if caveat.kind in CPU_KINDS]


def test_a_row_that_shared_its_processors_is_no_result() -> None:
    assert busy(cpu_other_cores=0.4) == []
    (caveat,) = busy(cpu_other_cores=0.8)
    assert caveat.disqualifying
    assert "other programs used 0.8 of 2 cores" in caveat.text
    assert busy(cpu_cores=64.0, cpu_threads=32, cpu_other_cores=3.0) == []
    assert busy(cpu_cores=64.0, cpu_threads=32, cpu_other_cores=6.0)
    assert busy(cpu_cores=64.0, cpu_threads=4, cpu_other_cores=40.0) == []  # there was room for all
    assert busy("cuda", cpu_cores=16.0, cpu_threads=8, cpu_own_cores=2.0, cpu_other_cores=6.0) == []
    assert busy("cuda", cpu_cores=16.0, cpu_threads=8, cpu_own_cores=12.0, cpu_other_cores=6.0)
    assert busy(cpu_other_cores=None, cpu_own_cores=None) == []


def test_the_processors_of_every_bound_rank_must_be_free() -> None:
    record = fakes.success(fakes.trial(on=Placement(accelerator="cpu", num_gpus=2)), cpu_cores=4.0, cpu_threads=2)
    found = []
    # Two threads of four processors: with 1.5 others there is room for all.
    for other in (2.5, 1.5):
        ranks = [
            replace(rank, cpus_allowed=cpus, cpu_own_cores=2.0, cpu_other_cores=cores)
            for rank, cpus, cores in zip(record.ranks, ((0, 1, 2, 3), (4, 5, 6, 7)), (0.0, other), strict=True)
        ]
        caveats = make_run(replace(record, ranks=ranks), None, None).caveats
        found.append([caveat.text for caveat in caveats if caveat.kind in CPU_KINDS])
    assert found == [["the CPU was busy: other programs used 2.5 of 4 cores while this row ran"], []]


def test_several_busy_runs_of_a_row_are_one_caveat_with_the_busiest() -> None:
    values = {"cpu_cores": 2.0, "cpu_threads": 2}
    runs = [
        fakes.success(fakes.trial(repeat=repeat), **values, cpu_other_cores=other)
        for repeat, other in enumerate((0.9, 1.4, 1.1))
    ]
    (row,) = comparison.compare([make_run(run) for run in runs]).rows
    assert [caveat.text for caveat in row.caveats if caveat.kind in CPU_KINDS] == [
        "the CPU was busy: other programs used 1.4 of 2 cores while this row ran"
    ]


def test_a_row_that_a_quota_stopped_is_no_result() -> None:
    assert busy(cpu_throttled_fraction=0.05) == []
    (caveat,) = busy(cpu_throttled_fraction=0.31)
    assert caveat.disqualifying
    assert "31 % of its periods" in caveat.text


@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_a_trial_beside_busy_programs_is_no_result(launch: Launch) -> None:
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command, start_new_session=True) for _ in CPUS]
    try:
        record = launch(fault="on_this_machine_as_it_is", num_steps=20)
    finally:
        for program in others:
            program.kill()
            program.wait()
    assert record.outcome.success, record.outcome
    caveats = make_run(record).caveats
    assert [caveat.disqualifying for caveat in caveats if caveat.kind in CPU_KINDS] == [True]
    assert [(rank.omp_wait_policy, rank.cpu_threads) for rank in record.ranks] == [
        ("passive", max(1, len(CPUS) // 2))
    ] * 2
