"""Connections to the agents of hosts, which are children of the test here, and the trial that they take part in."""

from __future__ import annotations

import base64
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ds_bench.config import strategies
from ds_bench.config.spec import Placement
from ds_bench.launch import host_agent, host_connections, remote_trial
from ds_bench.launch.host_agent import HostEnd, find_trial_processes
from ds_bench.launch.host_connections import HostConnection, HostError, HostLostError, Hosts, agent_words
from ds_bench.launch.message_stream import code_digest
from ds_bench.launch.ops import OpState
from ds_bench.launch.rank_environment import forwarded_variables
from ds_bench.launch.remote_trial import FileReceiver, RemoteTrial
from ds_bench.records import json_files, rank_files
from ds_bench.records.rank_files import TRIAL_VARIABLE, Assignment, HeartbeatWriter
from ds_bench.system import processes
from ds_bench.system.device_locks import DeviceLocks
from ds_bench.system.environment import Environment, read_environment
from tests.support.local_agents import make_hosts_trial


def local_agent(_host: str) -> list[str]:
    return agent_words()


def lose(run: Hosts) -> None:
    """Kill the agent of the first host, and wait until the run has noticed."""
    (lost, *_) = run.connections
    assert lost._process is not None
    lost._process.kill()
    while lost.problem is None:
        time.sleep(0.05)


def test_agents_on_two_hosts_report_their_environments_and_ops_and_leave_nothing() -> None:
    row = strategies.make_configuration(strategies.ZERO_STAGES[1])
    with Hosts(["a", "b"], local_agent) as both:
        both.connect()
        environments = both.request_all("environment", kind=Environment)
        assert [environments[name].packages for name in "ab"] == [read_environment().packages] * 2
        place = Placement(accelerator="cpu")
        states = both.request_all("build_ops", kind=dict[str, OpState], placement=place, configurations=[row])
        assert all(state.ready for each in states.values() for state in each.values())
        with pytest.raises(HostError, match="a: KeyError"):
            both.connections[0].request("nonsense")
        agents = [connection._process for connection in both.connections]
    assert [agent and agent.returncode for agent in agents] == [0, 0]


def test_hosts_are_locked_in_the_order_of_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two runs with two hostfiles could each hold what the other waits for."""
    locked: list[list[str]] = []
    for machines in ({"a": "node1", "b": "node2"}, {"192.0.2.1": "node2", "192.0.2.2": "node1"}):
        run, order = Hosts(list(machines), local_agent), list[str]()
        for connection in run.connections:
            connection.hostname = machines[connection.name]

        def lock(connection: HostConnection, *_: object, order: list[str] = order) -> DeviceLocks:
            order.append(connection.hostname)
            return DeviceLocks()

        monkeypatch.setattr(run, "_lock", lock)
        run.lock_devices(Placement(accelerator="cpu"), pytest.fail)
        locked.append(order)
    assert locked == [["node1", "node2"]] * 2


def test_a_run_holds_the_devices_of_each_host_until_it_ends_also_after_a_host_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_connections, "_REQUEST_SECONDS", 5.0)
    placement = Placement(accelerator="cpu", num_gpus=3, hosts=(("b", 2), ("a", 1)), include="b:1,3@a:0")

    def agent(host: str) -> list[str]:  # each host has locks of its own
        return ["env", f"DS_BENCH_LOCK_DIR={tmp_path / host}", *agent_words()]

    def held() -> list[int]:
        locks = [next((tmp_path / name).glob("ds_bench_lock_processors_*")) for name in "ab"]
        return [subprocess.run(["flock", "--nonblock", lock, "true"], check=False).returncode for lock in locks]

    said: list[str] = []
    waiting = "waiting: another run is using the CPU …"
    with Hosts(["b", "a"], agent) as first, Hosts(["a", "b"], agent) as second:
        first.connect()
        second.connect()
        assert not first.lock_devices(placement, said.append).waited
        assert held() == [1, 1]
        lose(first)
        first.reconnect(60.0)
        assert held() == [1, 1]

        def end_first(text: str) -> None:
            said.append(text)
            first.__exit__(None, None, None)

        assert second.lock_devices(placement, end_first).waited
        assert said == [f"a: {waiting}"]
        assert held() == [1, 1]
        with Hosts(["b", "a"], agent) as third:
            third.connect()
            third._locked = placement, said.append
            lose(third)
            with pytest.raises(HostLostError, match=r"^b: took longer than 5 s to answer$"):
                third.reconnect(0.0)
            assert said[1:] == [f"b: {waiting}"], "another run has taken its devices"
    assert held() == [0, 0]


def test_host_that_cannot_be_used_is_named_in_one_line() -> None:
    old = [sys.executable, "-c", 'print(\'Welcome!\\n{"agent": "0.0.1"}\', flush=True); input()']
    refused = [sys.executable, "-c", "import sys; sys.exit('b: Permission denied (publickey).')"]
    commands = {"old": old, "refused": refused}
    with Hosts(list(commands), commands.__getitem__) as both:
        assert list(map(str, both.connect())) == [
            f"old: its ds_bench code (0.0.1) differs from this host's ({code_digest()})",
            "refused: b: Permission denied (publickey).",
        ]


def test_words_of_the_remote_command_reach_the_login_shell_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/a b/'$(touch x)'; python")
    monkeypatch.setenv("PYTHONPATH", "/x\n;`y`")
    *ssh, remote = host_connections.command_on_host("ssh -p 2222 {host}", "node-1.cluster", agent_words())
    assert ssh[-3:] == ["-p", "2222", "node-1.cluster"]
    assert shlex.split(remote) == agent_words()
    other = host_connections.command_on_host("/bin/enter 'a b' --on={host}", "node-1", ["a b", "c"])
    assert other == ["/bin/enter", "a b", "--on=node-1", "a b", "c"]
    # ssh is given no name that it could take for something else.
    for name in ("-oProxyCommand=touch x", "a b", "a;b", "a\nb", "", "$(x)", "-l", "a@b"):
        with pytest.raises(ValueError, match="is not a host name"):
            host_connections.command_on_host("ssh {host}", name, ["true"])


def test_agent_that_a_launcher_has_started_is_not_started_again() -> None:
    own, other = socket.socketpair()
    with own, other, Hosts(["a"], pytest.fail, connected={"a": own}) as one:
        agent = subprocess.Popen(agent_words(), stdin=other, stdout=other)
        other.close()
        one.connect()
        assert one.connections[0].request("environment", kind=Environment).packages == read_environment().packages
        agent.kill()
        agent.wait()
        while one.connections[0].problem is None:
            time.sleep(0.05)
        with pytest.raises(HostLostError, match="a: the connection ended; the launcher"):
            one.reconnect(60.0)


def test_slots_of_a_host_are_those_included_and_gpus_that_a_launcher_has_chosen_stay_chosen() -> None:
    place = Placement(accelerator="cuda", num_gpus=3, hosts=(("a", 1), ("b", 2)), include="b:1,3@a:0")
    assert [place.slots_of(name) for name in "abc"] == [[0], [1, 3], []]
    assert replace(place, include=None).slots_of("b") == [0, 1]
    environ = {"CUDA_VISIBLE_DEVICES": "2,3", "OTHER": "1"}
    assert host_agent.chosen_devices(place, environ) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    for other in (replace(place, hostfile="h"), replace(place, accelerator="cpu")):
        assert host_agent.chosen_devices(other, environ) == {}


# ------------------------------------------------------------------ agents that hang or send anything else

MADE_UP_AGENT = """
import json, sys, threading, time
def say(text):
    print(text, flush=True)
def ping():
    while True:
        time.sleep(0.2)
        say('{"ping": true}')
def send_files(number):
    for _ in range(16):
        time.sleep(0.25)
        say('{"file": "large"}')
    say(json.dumps({"id": number, "result": 5}))
say(json.dumps({"agent": DIGEST, "hostname": "x"}))
threading.Thread(target=ping, daemon=True).start()
for line in sys.stdin:
    if "request" in line:
        number = json.loads(line)["id"]
        ANSWER
"""


def made_up_hosts(names: str, answer: str) -> Hosts:
    """Hosts whose agents ping, and answer a request by a line of Python."""
    program = MADE_UP_AGENT.replace("DIGEST", repr(code_digest())).replace("ANSWER", answer)
    return Hosts(list(names), lambda _name: [sys.executable, "-c", program])


@pytest.mark.parametrize(
    "answer",
    [
        repr('{"file": "rank0.log"}'),
        repr('{"id": [1], "result": 1}'),
        repr('{"file": "x", "start": 1e400, "data": "", "whole": 0}'),
        "json.dumps({'id': number, 'result': None})",
        "json.dumps({'id': number, 'result': {'left': 1, 'oom_killed': False, 'disk_full': False}})",
    ],
)
def test_host_that_has_sent_a_message_that_cannot_be_read_is_lost(answer: str, tmp_path: Path) -> None:
    with made_up_hosts("a", f"say({answer})") as one:
        one.connect()
        (connection,) = one.connections
        connection.listen = FileReceiver(tmp_path, 0, range(1)).receive
        with pytest.raises(HostLostError, match=r"^a: it sent a message that cannot be read$"):
            connection.request("end", kind=HostEnd, trial="77")
        assert connection.problem is not None


def test_host_that_hangs_at_the_end_of_a_trial_is_lost_though_it_pings_and_one_that_sends_files_is_not() -> None:
    with made_up_hosts("a", "pass") as hanging, made_up_hosts("b", "send_files(number)") as sending:
        hanging.connect()
        sending.connect()
        (a,), (b,) = hanging.connections, sending.connections
        began = time.monotonic()
        futures = a.send_request("end"), b.send_request("end")
        with pytest.raises(HostLostError, match=r"^a: did nothing for 3 s$"):
            a.result_while_active(futures[0], 3.0, began)
        assert a.problem == "did nothing for 3 s"  # so that the next trial connects again
        assert b.result_while_active(futures[1], 3.0, began) == 5


def test_many_hosts_that_do_not_answer_are_waited_for_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_trial, "_ACTIVITY_SECONDS", 3.0)
    trial = make_hosts_trial()
    place = replace(trial.placement, num_gpus=4, hosts=tuple((name, 1) for name in "abcd"))
    with made_up_hosts("abcd", "pass") as four:
        four.connect()
        assignment = Assignment(trial=replace(trial, placement=place), rendezvous=None, scratch_id="1")
        remote = RemoteTrial(four, tmp_path, assignment)
        began = time.monotonic()
        assert remote.read_activity() is None
        assert time.monotonic() - began < 2 * 3


# ------------------------------------------------------------------ processes and files of a trial

# A rank that starts a process without any variable, and that one another one; and an orphan in the rank's session.
RANK = """
import subprocess, sys
inner = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", inner], env={}, stdout=subprocess.PIPE, text=True)
orphan = subprocess.check_output(["/bin/sh", "-c", "sleep 60 >/dev/null & echo $!"], env={}, text=True)
print(child.pid, child.stdout.readline().strip(), orphan, flush=True)
sys.stdin.read()
"""


def test_children_without_the_trials_variable_and_orphans_belong_to_the_trial() -> None:
    mark = str(time.time_ns())
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command, variables = [sys.executable, "-c", RANK], {**os.environ, TRIAL_VARIABLE: mark}
    rank = subprocess.Popen(command, env=variables, start_new_session=True, **pipes)  # type: ignore[call-overload]
    with rank, rank.stdout:
        started = {rank.pid, *map(int, rank.stdout.readline().split())}
        found = find_trial_processes(mark)
        processes.end_processes(lambda: {pid for pid in started if processes.is_alive(pid)})
    assert (len(started), found) == (4, started)


def test_files_of_another_host_stay_within_the_folder_of_the_trial(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "target")
    part = {"start": 0, "data": "eA==", "whole": False, "last": True}
    names = ["../x", "/x", "a/../../x", "", ".x", "a//x", "link", "a\nb", "a/b/c/d/e"]
    for name in [*names, "trial.json", "ds_config.json", "rank0.json", "rank3.log", "rank03.beat/x"]:
        receiver = FileReceiver(folder, 1, range(1, 3))
        receiver.receive({"file": name, **part})
        assert receiver.problem is not None, name
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "trial"]
    receiver = FileReceiver(tmp_path, 1, range(2, 4))
    for name in ("core.python 3.1234", "trace,0.json", "rank2.json", "profiles/torch_rank3.json"):
        receiver.receive({"file": name, **part, "whole": True})
    assert receiver.problem == "a file from another host was left out because of its name 'core.python 3.1234'"
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == ["rank2.json", "torch_rank3.json"], "the others"


def test_times_of_another_host_become_those_of_this_ones_clock(tmp_path: Path) -> None:
    """Else a rank whose host's clock is behind would always have failed first."""
    theirs, here = tmp_path / "theirs", tmp_path / "here"
    theirs.mkdir()
    here.mkdir()
    rank_files.append_exit(theirs, 1, 77, 9)
    rank_files.append_exit(theirs, None, 78, 0)
    json_files.write_json(theirs / "rank1.json", {"failure": {"rank": 1, "time": 5000.0, "message": "x"}})
    HeartbeatWriter(theirs, 1).beat("step", 3)
    receiver = FileReceiver(here, 1, range(1, 2))
    receiver.clock_ahead_seconds = 3600.0
    for path in theirs.iterdir():
        data = base64.b64encode(path.read_bytes()).decode()
        receiver.receive({"file": path.name, "start": 0, "data": data, "whole": path.suffix != ".jsonl", "last": True})

    def times(folder: Path) -> Iterator[float]:
        beat = rank_files.read_beat(folder, 1)
        assert beat is not None
        yield from (beat.time, *(each.time for each in rank_files.read_exits(folder)))

    assert [round(old - new, 3) for old, new in zip(times(theirs), times(here), strict=True)] == [3600.0] * 3
    assert [(each.rank, each.signal) for each in rank_files.read_exits(here)] == [(1, 9), (None, None)]
    assert json.loads((here / "rank1.json").read_text())["failure"] == {"rank": 1, "time": 1400.0, "message": "x"}


def test_host_whose_ranks_all_ended_without_their_files_is_noticed(tmp_path: Path) -> None:
    assignment = Assignment(trial=make_hosts_trial(), rendezvous=None, scratch_id="1")
    remote = RemoteTrial(Hosts(["a", "b"], local_agent), tmp_path, assignment)
    assert not remote.ended_without_file([])
    remote._receivers[1].receive({"leader_ended": True})
    assert [remote.ended_without_file(written) for written in ([], [0], [1], [0, 1])] == [True, True, False, False]


def test_variables_are_forwarded_by_prefix_and_by_name_but_no_credential_unasked() -> None:
    environ = {"NCCL_DEBUG": "INFO", "UCX_TLS": "tcp", "HF_HOME": "/hf", "HF_TOKEN": "hf_x", "OTHER": "1", "MINE": "2"}
    assert forwarded_variables(environ, ["MINE"]).keys() == {"NCCL_DEBUG", "UCX_TLS", "HF_HOME", "MINE"}
    assert forwarded_variables(environ, ["HF_TOKEN", "GONE"])["HF_TOKEN"] == "hf_x"
