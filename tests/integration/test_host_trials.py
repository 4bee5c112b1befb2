"""Trials on several hosts, through their agents: what comes back, how a lost host ends one, what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ds_bench.config.spec import Inspection
from ds_bench.launch import rank_environment
from ds_bench.launch import trial as cold
from ds_bench.launch.host_agent import find_trial_processes
from ds_bench.launch.host_connections import Hosts
from ds_bench.records.rank_files import Assignment, read_beat
from ds_bench.records.schema import TrialRecord
from tests.support.local_agents import local_agents, make_hosts_trial
from tests.support.real_trials import SHORT, SUPPORT

RANK = """
import os, sys, time
from pathlib import Path
from ds_bench.records.rank_files import HeartbeatWriter
folder = Path(sys.argv[-1])
HeartbeatWriter(folder, int(sys.argv[1])).beat("step", 3)
(folder / f"rank{sys.argv[1]}.log").write_text("a" * 3_000_000)
time.sleep(600)
"""
"""A rank that hangs at once, without the seconds that torch takes."""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    with Hosts(["a", "b"], local_agents(tmp_path)) as both:
        both.connect()
        yield both
    assert [path.name for name in "ab" for path in (tmp_path / name).iterdir()] == []


def launch(
    hosts: Hosts, folder: Path, fault: str = "fine", stall_timeout_seconds: float = 60, **more: object
) -> TrialRecord:
    trial = make_hosts_trial(fault=fault)
    trial = replace(trial, inspection=Inspection(**more))  # type: ignore[arg-type]
    folder.mkdir(parents=True)
    variables = rank_environment.rank_environment(trial.placement, os.environ)
    limits = replace(SHORT, exit_grace_seconds=10, kill_grace_seconds=1, stall_timeout_seconds=stall_timeout_seconds)
    return cold.DeepSpeedLauncher(variables, limits, hosts=hosts).launch(trial, folder, lambda _progress: None)


@pytest.fixture
def ranks_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "node_command", lambda _place, number, _master: [sys.executable, "-c", RANK, str(number)])


def when_it_steps(folder: Path, act: Callable[[], None]) -> None:
    """Calls ``act`` in a process of its own once both ranks have taken a step and some of their logs has arrived."""

    def steps(rank: int) -> bool:
        beat, log = read_beat(folder, rank), folder / f"rank{rank}.log"
        return beat is not None and beat.step >= 1 and log.exists() and log.stat().st_size > 0

    if os.fork() == 0:
        try:
            deadline = time.monotonic() + 60  # the process outlives a test that fails before the first step
            while not (steps(0) and steps(1)) and time.monotonic() < deadline:
                time.sleep(0.1)
            act()
        finally:
            os._exit(0)


def marked(folder: Path) -> set[int]:
    return find_trial_processes(Assignment.load(folder).scratch_id)


@pytest.mark.usefixtures("ranks_that_hang")
def test_a_lost_host_is_a_timeout_that_names_it_and_the_next_trial_connects_again(hosts: Hosts, tmp_path: Path) -> None:
    for number, why in ((1, "b: the connection ended"), (2, "a: the connection ended")):
        folder = tmp_path / "run" / "trials" / f"t{number}"
        (agent,) = [each._process for each in hosts.connections if each.name == why[0]]
        assert agent is not None
        when_it_steps(folder, lambda pid=agent.pid: os.kill(pid, signal.SIGKILL))  # type: ignore[misc]
        record = launch(hosts, folder)
        assert record.outcome.status == "Timeout"
        assert record.outcome.error == f"host {why}"
        assert record.caveats == (f"a process may be left on a host: {why}",)
        assert (folder / "rank0.log").stat().st_size > 0
    hosts.reconnect(30.0)  # which proves it
    assert marked(folder) == set()


def test_a_host_that_cannot_be_reached_fails_the_trial_in_one_line(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.connections[1].close()
    refusal = [sys.executable, "-c", "import sys; sys.exit('ssh: connect to host b port 22: No route to host')"]
    monkeypatch.setattr(hosts, "_command_of", lambda _name: refusal)
    record = launch(hosts, tmp_path / "run" / "trials" / "t1", stall_timeout_seconds=1)
    assert record.outcome.status == "Timeout"
    assert record.outcome.error == "host b: ssh: connect to host b port 22: No route to host"
    assert marked(tmp_path / "run" / "trials" / "t1") == set()


def test_a_host_on_which_a_trial_cannot_begin_is_no_lost_host(hosts: Hosts, tmp_path: Path) -> None:
    record = launch(hosts, tmp_path / "run" / "trials" / "t1", checkpoint=True, checkpoint_path="/proc")
    assert record.outcome.status == "Crashed"
    assert (record.outcome.error or "").startswith("host a: FileNotFoundError: ")
    assert all(connection.problem is None for connection in hosts.connections)


@pytest.mark.parametrize("cut", ["end of input", pytest.param("silence", marks=pytest.mark.slow)])
def test_an_agent_that_hears_nothing_more_ends_the_trial_on_its_host(tmp_path: Path, cut: str) -> None:
    trial = make_hosts_trial()
    assignment = Assignment(trial=trial, rendezvous=None, scratch_id="123456789")
    values = {
        "trial": "123456789",
        "folder": "trials/t1",
        "assignment": {**_fields(assignment), "trial": trial.to_dict()},
        "config": {},
        "master": ["127.0.0.1", 1],
        "variables": {},
    }
    # A large profile, which nobody receives any more, does not keep the agent from its end.
    rank = RANK.replace("time.sleep", '(folder / "large").touch(); os.truncate(folder / "large", 2**37); time.sleep')
    requests = [{"request": "begin", **values}, {"request": "launch", "command": [sys.executable, "-c", rank, "0"]}]
    with subprocess.Popen(
        local_agents(tmp_path)("a"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        for number, request in enumerate(requests):
            agent.stdin.write(json.dumps({"id": number, **request}) + "\n")
        agent.stdin.flush()
        while not (line := agent.stdout.readline()).startswith('{"file": "rank0.beat"'):
            assert "error" not in json.loads(line), line
        assert find_trial_processes("123456789")
        began = time.monotonic()
        if cut == "end of input":
            agent.stdin.close()
        while agent.stdout.readline():
            pass
        assert agent.wait(60) == 0
    assert find_trial_processes("123456789") == set()
    assert list((tmp_path / "a").iterdir()) == []
    assert time.monotonic() - began < 60


def _fields(assignment: Assignment) -> dict[str, object]:
    return {name: getattr(assignment, name) for name in Assignment.__slots__}
