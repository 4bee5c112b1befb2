"""Watching a trial whose clock and leader are fake: who ends it and when, its progress, and the lines of its steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.launch import trial_watcher as module
from ds_bench.launch.trial_watcher import Ending, Limits, Progress, watch
from ds_bench.records.json_files import append_line, write_json
from ds_bench.records.rank_files import HeartbeatWriter, RankExit
from ds_bench.system import processes
from tests.support import fakes

LIMITS = Limits(timeout_seconds=100, stall_timeout_seconds=20, failure_grace_seconds=5, exit_grace_seconds=10)
PAIR = fakes.trial(on=fakes.placement(num_gpus=2))


class World:
    """A folder, a clock that moves when somebody waits, and what happens in it at which second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = self.start = 1000.0
        self.heard: list[Progress] = []
        self.killed: list[tuple[int, int]] = []
        self._events: list[tuple[float, Callable[[], object]]] = []
        self.writers: dict[int, HeartbeatWriter] = {}
        self._leader_ends = float("inf")

    # the clock, in place of the module's ``time``
    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    # what happens
    def at(self, second: float, *events: Callable[[], object]) -> None:
        self._events += [(self.start + second, event) for event in events]

    def leader_ends(self, second: float) -> None:
        self._leader_ends = self.start + second

    def beat(self, rank: int, phase: str = "step", step: int | None = None, last: float | None = None) -> None:
        writer = self.writers.get(rank) or self.writers.setdefault(rank, HeartbeatWriter(self.folder, rank))
        writer.beat(phase, step, last)

    def keeps_beating(self, *ranks: int) -> None:
        for second in range(1, 400):
            for rank in ranks:
                self.at(second, lambda rank=rank, second=second: self.beat(rank, "step", second))

    def measured(self, *ranks: int, notes: tuple[str, ...] = ()) -> None:
        for rank in ranks:
            seen = fakes.measurement(PAIR, rank=rank, notes=notes)
            write_json(self.folder / f"rank{rank}.json", fakes.measured_file(seen))

    def failed(self, *ranks: int) -> None:
        for rank in ranks:
            write_json(self.folder / f"rank{rank}.json", fakes.failed_file(fakes.rank_failure(rank=rank)))

    def exited(self, rank: int | None, code: int = 0) -> None:
        line = RankExit(rank=rank, pid=1, code=code, signal=None, time=1.0)
        append_line(self.folder / "exits.jsonl", asdict(line))

    def wait_leader(self, seconds: float) -> bool:
        assert 0 < seconds <= 1, "a longer wait would be late to notice"
        self.now += seconds
        due = [event for event in self._events if event[0] <= self.now]
        self._events = [event for event in self._events if event[0] > self.now]
        for _, event in due:
            event()
        assert self.now < self.start + 1000, "the watch never ended"
        return self.now >= self._leader_ends

    def run(
        self, world_size: int = 2, limits: Limits = LIMITS, hosts: Any = None
    ) -> tuple[Ending, float | None, float]:
        """How it ended, the seconds until the first warm-up step, and the seconds it took."""
        ending, start_seconds = watch(self.folder, world_size, limits, self.wait_leader, self.heard.append, hosts)
        return ending, start_seconds, self.now - self.start


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module.processes, "descendants", lambda: {os.getpid()})
    monkeypatch.setattr(os, "kill", lambda pid, number: made.killed.append((pid, number)))
    return made


# ------------------------------------------------------------------ who ends a trial, and when

Events = Callable[[World], object]


def living(*ranks: int, second: float, event: Events, leader_ends: float | None = None) -> Events:
    """Ranks that beat without end, an event, and perhaps the end of the leader."""

    def act(world: World) -> None:
        world.keeps_beating(*ranks)
        world.at(second, lambda: event(world))
        if leader_ends is not None:
            world.leader_ends(leader_ends)

    return act


ENDINGS: dict[str, tuple[Events, Ending, float]] = {
    "the leader ends": (lambda w: w.leader_ends(3), "ended", 3),
    "a leader that ends after a failure is judged by the files": (
        living(second=1, event=lambda w: w.failed(0), leader_ends=2), "ended", 2),
    "ranks that wrote their files get time to end": (
        living(second=1, event=lambda w: w.measured(0, 1), leader_ends=9), "ended", 9),
    "ranks that wrote their files and do not end": (
        living(second=1, event=lambda w: w.measured(0, 1)), "hung_at_exit", 11),
    "the grace counts from the last file": (
        lambda w: [w.at(1, lambda: w.measured(0)), w.at(8, lambda: w.measured(1))], "hung_at_exit", 18),
    "a failure gives the others a grace": (living(0, second=2, event=lambda w: w.failed(1)), "rank_failed", 7),
    "all ranks fail": (living(second=2, event=lambda w: w.failed(0, 1)), "hung_at_exit", 12),
    "a rank dies": (living(0, second=2, event=lambda w: w.exited(1, code=1)), "rank_failed", 7),
    "a rank ends with 0 and no file": (living(0, second=2, event=lambda w: w.exited(1)), "rank_failed", 7),
    "a rank finishes first": (
        living(1, second=2, event=lambda w: [w.measured(0), w.exited(0)], leader_ends=30), "ended", 30),
    "a launcher that hides its ranks ends": (
        living(0, 1, second=2, event=lambda w: w.exited(None, code=1), leader_ends=30), "ended", 30),
    "the word failure in a good file": (
        living(1, second=2, event=lambda w: w.measured(0, notes=('a "failure"',)), leader_ends=15), "ended", 15),
    "over its time though it lives": (lambda w: w.keeps_beating(0, 1), "timeout", 100),
    "no sign of life": (lambda w: w.heard, "stalled", 20),
    "quiet after a while": (
        lambda w: [w.at(s, lambda s=s: w.beat(0, "step", s)) for s in range(1, 30)], "stalled", 49),
    "the others wait for one living rank": (
        living(0, second=1, event=lambda w: w.beat(1, "forward", 0), leader_ends=60), "ended", 60),
    "a long import beats without news": (
        lambda w: [*(w.at(s, lambda: w.beat(0, "import")) for s in range(1, 60, 5)), w.leader_ends(60)], "ended", 60),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDINGS)
def test_who_ends_a_trial_and_when(world: World, case: str) -> None:
    act, expected, seconds = ENDINGS[case]
    act(world)
    ending, _, took = world.run()
    assert ending == expected
    assert seconds <= took < seconds + 3
    # Only a hung trial dumps its stacks.
    hung = len(world.writers) if ending in ("timeout", "stalled") else 0
    assert world.killed == [(os.getpid(), signal.SIGUSR2)] * hung


def test_process_that_is_not_ours_is_never_signaled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on another node writes its own process id, which here may be anybody's."""
    monkeypatch.setattr(module.processes, "descendants", set)
    world.at(1, lambda: world.beat(0))
    assert world.run(1)[0] == "stalled"
    assert world.killed == []


def test_host_whose_ranks_have_all_ended_or_that_is_lost_ends_the_trial(world: World) -> None:
    class Hosts:
        any_lost = False
        ended = False

        def ended_without_file(self, written: Collection[int]) -> bool:
            return self.ended and 1 not in written

        def read_activity(self) -> processes.Activity | None:
            return None

        def request_stacks(self) -> None: ...

    hosts = Hosts()
    world.keeps_beating(0)
    world.at(2, lambda: setattr(hosts, "ended", True))
    ending, _, took = world.run(hosts=hosts)
    assert (ending, 7 <= took < 8) == ("rank_failed", True), "not at the timeout"
    hosts.any_lost, hosts.ended = True, False
    assert world.run(hosts=hosts)[0] == "host_lost"


def activity(mib: float = 0, disk_mib: float = 0) -> processes.Activity:
    return processes.Activity(resident_bytes=int(mib * 2**20), disk_bytes=int(disk_mib * 2**20))


@pytest.mark.parametrize("step", [-1, 3])
@pytest.mark.parametrize(
    ("of_second", "expected"),
    [
        (lambda second: activity(mib=8 * second), "ended"),
        (lambda second: activity(disk_mib=8 * second), "ended"),
        (lambda second: activity(mib=24 * (second // 5 % 2)), "ended"),  # freed, and grown again
        (lambda second: activity(mib=second // 5), "stalled"),  # a log, or caches
        (lambda _second: activity(mib=900), "stalled"),
    ],
)
def test_silent_ranks_live_while_they_fill_memory_or_move_bytes(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    of_second: Callable[[float], processes.Activity],
    expected: Ending,
    step: int,
) -> None:
    monkeypatch.setattr(processes, "read_activity", lambda _pids: of_second(world.now - world.start))
    world.at(0, lambda: world.beat(0, "forward", step))
    world.leader_ends(60)
    ending, _, took = world.run(1)
    assert (ending, ending == "ended" or took < 22) == (expected, True)


def test_large_memory_takes_time_to_be_given_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "read_activity", lambda _pids: activity(mib=100_000))
    world.at(1, lambda: world.measured(0, 1))
    ending, _, took = world.run(limits=replace(LIMITS, stall_timeout_seconds=60))
    assert (ending, 42 <= took < 43) == ("hung_at_exit", True), "tens of seconds for 105 GB"


# ------------------------------------------------------------------ progress


def test_progress_is_the_slowest_ranks_and_begins_with_the_first_hello(world: World) -> None:
    world.at(1, lambda: world.beat(0, "step", 5, 0.25), lambda: world.beat(1, "backward", 4, 0.5))
    world.leader_ends(2)
    world.run()
    last = world.heard[-1]
    assert (last.phase, last.step, last.last_step_seconds) == ("backward", 4, 0.5)
    assert [round(each.elapsed_seconds) for each in (world.heard[0], last)] == [1, 2]


def test_start_ends_when_the_last_rank_begins_to_warm_up_if_it_does(world: World) -> None:
    world.at(3, lambda: world.beat(0, "warmup", 0), lambda: world.beat(1, "import"))
    world.leader_ends(5)
    assert world.run()[1] is None
    world.start = world.now
    world.at(7, lambda: world.beat(1, "warmup", 0))
    world.leader_ends(15)
    assert world.run()[1] == pytest.approx(7, abs=0.3)
