"""Watching a trial whose clock and leader are fake: who ends it, when, and who is told."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ds_bench.launch import monitor as module
from ds_bench.launch.monitor import Ending, Limits, Progress, watch
from ds_bench.records.json_files import append_line
from ds_bench.records.rank_files import HeartbeatWriter, RankExit
from ds_bench.system import processes
from tests.support import fakes

LIMITS = Limits(timeout_seconds=100, stall_timeout_seconds=20, failure_grace_seconds=5, exit_grace_seconds=10)
PAIR = fakes.trial(on=fakes.placement(num_gpus=2))


class World:
    """A folder, a clock that moves when somebody waits, and what happens in it at which second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        self.start = self.now
        self.heard: list[Progress] = []
        self.killed: list[tuple[int, int]] = []
        self._events: list[tuple[float, Callable[[], object]]] = []
        self._writers: dict[int, HeartbeatWriter] = {}
        self._leader_ends = float("inf")

    # the clock, in place of the module's ``time``
    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    # what happens
    def at(self, second: float, event: Callable[[], object]) -> None:
        self._events.append((self.start + second, event))

    def leader_ends(self, second: float) -> None:
        self._leader_ends = self.start + second

    def beat(self, rank: int, phase: str = "step", step: int | None = None, last: float | None = None) -> None:
        writer = self._writers.get(rank) or self._writers.setdefault(rank, HeartbeatWriter(self.folder, rank))
        writer.beat(phase, step, last)

    def beats_forever(self, *ranks: int) -> None:
        for second in range(1, 400):
            for rank in ranks:
                self.at(second, lambda rank=rank, second=second: self.beat(rank, "step", second))

    def measured(self, rank: int) -> None:
        seen = fakes.measurement(PAIR, rank=rank)
        self._write(rank, json.dumps(fakes.measured_file(seen), indent=1))

    def failed(self, rank: int) -> None:
        self._write(rank, json.dumps(fakes.failed_file(fakes.rank_failure(rank=rank)), indent=1))

    def _write(self, rank: int, text: str) -> None:
        (self.folder / f"rank{rank}.json").write_text(text)

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

    def run(self, world_size: int = 2, limits: Limits = LIMITS) -> tuple[Ending, float | None, float]:
        """How it ended, the seconds until the first warm-up step, and the seconds it took."""
        ending, start_seconds = watch(self.folder, world_size, limits, self.wait_leader, self.heard.append)
        return ending, start_seconds, self.now - self.start


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module.processes, "descendants", lambda: {os.getpid()})
    monkeypatch.setattr(os, "kill", lambda pid, number: made.killed.append((pid, number)))
    return made


# ------------------------------------------------------------------ the good end


def test_a_leader_that_ends_ends_the_watch_at_once(world: World) -> None:
    world.leader_ends(3)
    ending, _, took = world.run()
    assert ending == "ended"
    assert took < 3.5


def test_a_leader_that_ends_without_any_file_is_no_judgement_of_ours(world: World) -> None:
    """What it means is decided by the files, in ``outcome``."""
    world.at(1, lambda: world.failed(0))
    world.leader_ends(2)
    assert world.run()[0] == "ended"


def test_ranks_that_wrote_their_files_are_given_time_to_end(world: World) -> None:
    world.at(1, lambda: [world.measured(0), world.measured(1)])
    world.leader_ends(9)
    assert world.run()[0] == "ended"


def test_ranks_that_wrote_their_files_and_do_not_end_hang_at_exit(world: World) -> None:
    world.at(1, lambda: [world.measured(0), world.measured(1)])
    ending, _, took = world.run()
    assert ending == "hung_at_exit"
    assert 11 <= took < 12


def test_the_grace_at_exit_grows_with_the_memory_that_is_to_be_given_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 GB of page-locked memory the driver takes tens of seconds to give back."""
    huge = processes.Activity(resident_bytes=100 * 10**9, disk_bytes=0)
    monkeypatch.setattr(processes, "read_activity", lambda _pids: huge)
    world.at(1, lambda: [world.measured(0), world.measured(1)])
    ending, _, took = world.run(limits=replace(LIMITS, stall_timeout_seconds=60))
    assert ending == "hung_at_exit"
    assert 41 <= took < 42


def test_the_grace_at_exit_counts_from_the_last_file(world: World) -> None:
    world.at(1, lambda: world.measured(0))
    world.at(8, lambda: world.measured(1))
    ending, _, took = world.run()
    assert ending == "hung_at_exit"
    assert took >= 18


# ------------------------------------------------------------------ a rank that failed


def test_a_rank_that_reports_a_failure_gives_the_others_a_grace_and_no_more(world: World) -> None:
    world.beats_forever(0)
    world.at(2, lambda: world.failed(1))
    ending, _, took = world.run()
    assert ending == "rank_failed"
    assert 7 <= took < 8


def test_a_rank_that_died_without_a_file_is_a_failed_rank(world: World) -> None:
    world.beats_forever(0)
    world.at(2, lambda: world.exited(1, code=1))
    assert world.run()[0] == "rank_failed"


def test_a_rank_that_ended_with_0_but_without_a_file_is_a_failed_rank_too(world: World) -> None:
    world.beats_forever(0)
    world.at(2, lambda: world.exited(1, code=0))
    assert world.run()[0] == "rank_failed"


def test_a_rank_that_finished_before_the_others_is_no_failure(world: World) -> None:
    world.beats_forever(1)
    world.at(2, lambda: [world.measured(0), world.exited(0)])
    world.leader_ends(30)
    assert world.run()[0] == "ended"


def test_an_exit_of_a_launcher_that_hides_its_ranks_is_no_failed_rank(world: World) -> None:
    world.beats_forever(0, 1)
    world.at(2, lambda: world.exited(None, code=1))
    world.leader_ends(30)
    assert world.run()[0] == "ended"


def test_all_ranks_failing_at_once_end_the_trial_without_its_timeout(world: World) -> None:
    world.at(2, lambda: [world.failed(0), world.failed(1)])
    assert world.run()[2] < 15


def test_the_word_failure_deep_inside_a_good_file_is_no_failure(world: World) -> None:
    world.beats_forever(1)
    seen = fakes.measurement(PAIR, notes=('a "failure" was avoided',))
    world.at(2, lambda: world._write(0, json.dumps(fakes.measured_file(seen), indent=1)))
    world.leader_ends(15)
    assert world.run()[0] == "ended"


# ------------------------------------------------------------------ clocks


def test_a_trial_over_its_time_is_ended_though_it_lives(world: World) -> None:
    world.beats_forever(0, 1)
    ending, _, took = world.run()
    assert ending == "timeout"
    assert 100 <= took < 103


def test_a_trial_without_a_sign_of_life_from_the_start_is_stalled(world: World) -> None:
    ending, _, took = world.run()
    assert ending == "stalled"
    assert 20 <= took < 23


def test_a_trial_that_goes_quiet_is_stalled_counting_from_its_last_sign(world: World) -> None:
    for second in range(1, 30):
        world.at(second, lambda second=second: world.beat(0, "step", second))
    ending, _, took = world.run()
    assert ending == "stalled"
    assert 49 <= took < 52


def test_one_living_rank_keeps_a_trial_from_being_stalled(world: World) -> None:
    """The others wait for it in a collective."""
    world.at(1, lambda: world.beat(1, "forward", 0))
    world.beats_forever(0)
    world.leader_ends(60)
    assert world.run()[0] == "ended"


def test_a_beat_file_that_is_written_anew_without_news_is_a_sign_of_life(world: World) -> None:
    """A long import beats with the same phase and step; the time in it differs."""
    for second in range(1, 60, 5):
        world.at(second, lambda: world.beat(0, "import"))
    world.leader_ends(60)
    assert world.run(1)[0] == "ended"


SILENT = {
    # one step each 0.05 s; the process never beats
    "allocates": "kept.append(bytearray(b'1') * (8 * 2**20))",
    "allocates and frees": "kept[:] = [] if len(kept) > 24 else [*kept, bytearray(b'1') * (12 * 2**20)]",
    "writes": "file.write(b'1' * (8 * 2**20)); file.flush(); os.fsync(file.fileno())",
    "spins": "",
}


def counts_writes(folder: Path) -> bool:
    before = processes.read_activity([os.getpid()]).disk_bytes
    with (folder / "probe").open("wb") as file:
        file.write(b"1" * 2**20)
        file.flush()
        os.fsync(file.fileno())
    return processes.read_activity([os.getpid()]).disk_bytes >= before + 2**20


@pytest.mark.parametrize("does", SILENT)
def test_silent_ranks_live_while_they_fill_memory_or_move_bytes_but_not_by_spinning(does: str, tmp_path: Path) -> None:
    if does == "writes" and not counts_writes(tmp_path):
        pytest.skip("the file system of temporary folders is in memory, or its I/O is not counted")
    program = f"""
import os, time
kept, file = [], open({str(tmp_path / "written")!r}, "wb")
start = time.monotonic()
while time.monotonic() - start < 3:
    {SILENT[does]}
    until = time.monotonic() + 0.05
    while time.monotonic() < until: pass
"""
    child = subprocess.Popen([sys.executable, "-c", program])
    limits = Limits(timeout_seconds=60, stall_timeout_seconds=1.2)

    def wait(seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        return child.poll() is not None

    try:
        ending, _ = watch(tmp_path, 1, limits, wait, lambda _progress: None)
    finally:
        child.kill()
        child.wait()
    assert ending == ("stalled" if does == "spins" else "ended")


def test_a_rank_that_has_done_a_step_lives_by_its_beats_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = itertools.count(step=2**30)
    growing = lambda _pids: processes.Activity(resident_bytes=next(grown), disk_bytes=0)  # noqa: E731
    monkeypatch.setattr(module.processes, "read_activity", growing)
    world.at(40, lambda: world.beat(0, "forward", 1))
    ending, _, took = world.run(1)
    assert ending == "stalled"
    assert 60 <= took < 63


@pytest.mark.parametrize("how", ["stalled", "timeout"])
def test_before_a_hung_trial_is_ended_every_rank_of_ours_dumps_its_stacks(world: World, how: str) -> None:
    if how == "timeout":
        world.beats_forever(0, 1)
    else:
        world.at(1, lambda: [world.beat(0), world.beat(1)])
    assert world.run()[0] == how
    assert world.killed == [(os.getpid(), signal.SIGUSR2)] * 2


def test_a_process_that_is_not_ours_is_never_signalled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on another node writes its own process id, which here may be anybody's."""
    monkeypatch.setattr(module.processes, "descendants", set)
    world.at(1, lambda: world.beat(0))
    world.run(1)
    assert world.killed == []


@pytest.mark.parametrize("how", ["rank_failed", "hung_at_exit", "ended"])
def test_a_trial_that_ended_otherwise_dumps_no_stacks(world: World, how: str) -> None:
    world.at(1, lambda: world.beat(0))
    if how == "ended":
        world.leader_ends(2)
    else:
        world.at(2, lambda: world.failed(0) if how == "rank_failed" else world.measured(0))
    world.run(2 if how == "rank_failed" else 1)
    assert world.killed == []


# ------------------------------------------------------------------ what is told


def test_progress_is_the_slowest_ranks(world: World) -> None:
    world.at(1, lambda: [world.beat(0, "step", 5, 0.25), world.beat(1, "backward", 4, 0.5)])
    world.leader_ends(2)
    world.run()
    last = world.heard[-1]
    assert (last.phase, last.step, last.last_step_seconds) == ("backward", 4, 0.5)
    assert last.elapsed_seconds == pytest.approx(2, abs=0.3)


def test_nothing_is_told_before_a_rank_says_hello(world: World) -> None:
    world.leader_ends(5)
    world.run()
    assert world.heard == []


def test_the_start_ends_when_the_last_rank_begins_to_warm_up(world: World) -> None:
    world.at(1, lambda: [world.beat(0, "import"), world.beat(1, "import")])
    world.at(3, lambda: world.beat(0, "warmup", 0))
    world.at(7, lambda: world.beat(1, "warmup", 0))
    world.leader_ends(20)
    assert world.run()[1] == pytest.approx(7, abs=0.3)


def test_a_trial_that_never_trained_has_no_start_time(world: World) -> None:
    world.at(1, lambda: [world.beat(0, "warmup", 0), world.beat(1, "init")])
    world.leader_ends(5)
    assert world.run()[1] is None


def test_a_torn_beat_is_no_beat(world: World) -> None:
    world.at(1, lambda: (world.folder / "rank0.beat").write_bytes(b"\x01" * 20))
    assert world.run(1)[0] == "stalled"
    assert world.heard == []


def test_a_trial_is_looked_at_often_enough_to_end_soon_and_rarely_enough_to_cost_nothing(world: World) -> None:
    waits: list[float] = []
    counter = itertools.count()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return next(counter) >= 10

    watch(world.folder, 1, LIMITS, wait, world.heard.append)
    assert set(waits) == {0.2}
