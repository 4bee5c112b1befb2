"""Nodes of a launcher: how its variables are read, and which connections are accepted."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge

import pytest

from ds_bench import api
from ds_bench.errors import PreflightError, UsageError
from ds_bench.system import launched_nodes
from ds_bench.system.launched_nodes import LaunchedNodes, find_nodes

MASTER = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29400"}
TORCHRUN = {
    **MASTER, "RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "id of the job",
}  # fmt: skip
DEEPSPEED = {
    **MASTER, "RANK": "1", "LOCAL_RANK": "0", "CROSS_RANK": "1", "CROSS_SIZE": "3", "LOCAL_SIZE": "1",
    "WORLD_SIZE": "6",
}  # fmt: skip
PYTORCH_JOB = {**MASTER, "RANK": "1", "WORLD_SIZE": "2", "DS_BENCH_SECRET": "s"}
SRUN = {
    "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "2", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]-ib,x", "SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", "/nowhere")  # neither srun nor scontrol
    yield
    launched_nodes._connected_nodes.clear()
    launched_nodes._addresses.clear()


@pytest.fixture
def nodes() -> LaunchedNodes:
    """Of two nodes, as the second sees them; the first listens at a free port of this machine."""
    found = find_nodes(TORCHRUN)
    assert found is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        return replace(found, address="127.0.0.1", port=free.getsockname()[1])


def test_every_engine_tells_the_nodes(subtests: pytest.Subtests) -> None:
    for environ, launcher, port, facts, first in (  # facts: number, count, ranks here, ranks
        (TORCHRUN, "torchrun", 29401, (1, 2, 2, 4), True),
        (DEEPSPEED, "deepspeed", 29400, (1, 3, 1, 6), True),
        (PYTORCH_JOB, "job", 29400, (1, 2, 1, 2), True),
        ({**PYTORCH_JOB, "WORLD_SIZE": "16", "PET_NNODES": "2"}, "job", 29400, (1, 2, 8, 16), True),
        (SRUN, "srun", 29500, (2, 3, 2, 5), False),
        ({**SRUN, **TORCHRUN}, "torchrun", 29401, (1, 2, 2, 4), True),
    ):
        with subtests.test(launcher=launcher, environ=environ):
            found = find_nodes(environ)
            assert found is not None
            assert (found.launcher, found.port, found.is_first_of_node) == (launcher, port, first)
            assert (found.number, found.count, found.ranks_here, found.ranks) == facts
            assert found.address == ("gpu07-ib" if environ == SRUN else "192.0.2.1")
    for environ in (
        {}, {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, {**TORCHRUN, "GROUP_WORLD_SIZE": "1"},
        {**PYTORCH_JOB, "WORLD_SIZE": "1", "RANK": "0"}, {**SRUN, "SLURM_STEP_NUM_NODES": "1"},
        {**SRUN, "SLURM_STEP_ID": "4294967291"},
    ):  # fmt: skip
        assert find_nodes(environ) is None, environ


def test_nodes_that_the_variables_leave_open_are_refused() -> None:
    for environ, said in (
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({**PYTORCH_JOB, "LOCAL_RANK": "0"}, "not LOCAL_WORLD_SIZE: the nodes are not known"),
    ):
        with pytest.raises(UsageError, match=said):
            find_nodes(environ)


def test_only_with_both_srun_and_scontrol_the_nodes_are_slurms(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, is_slurms in ((("srun", "scontrol"), True), (("srun",), False), (("scontrol",), False)):
        monkeypatch.setattr(launched_nodes.shutil, "which", lambda name, there=there: name if name in there else None)
        assert (find_nodes(SRUN) is None) is is_slurms


def test_a_secret_is_rdzv_id_or_the_jobs_and_without_one_nothing_is_reached() -> None:
    found = [find_nodes(environ) for environ in (TORCHRUN, PYTORCH_JOB)]
    assert [each.secret for each in found if each] == ["id of the job", "s"]
    for environ, said in (
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, "export DS_BENCH_SECRET=.*or give torchrun --rdzv-id"),
        (DEEPSPEED, r"export DS_BENCH_SECRET=.*on every node\)$"),
    ):
        nodes = find_nodes(environ)
        assert nodes is not None
        for use in (launched_nodes.connect_nodes, lambda each: launched_nodes.join_first_node(each, [], {})):
            with pytest.raises(PreflightError, match=said):
                use(nodes)
    assert launched_nodes.ranks_of_hosts() == {}


def test_a_node_becomes_an_agent_once_it_is_accepted(nodes: LaunchedNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[bytes] = []

    def become(agent: object, connection: Connection, _environ: object) -> None:
        with socket.socket(fileno=connection.fileno()) as stream:
            became.extend([stream.recv(100), stream.recv(100)])
            stream.detach()

    monkeypatch.setattr(launched_nodes, "_replace_process", become)
    names = iter(["node-b", "node-a"])
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    other = threading.Thread(target=launched_nodes.join_first_node, args=(nodes, ["agent"], {}))
    other.start()
    launched_nodes.connect_nodes(nodes)
    assert launched_nodes.ranks_of_hosts() == {"node-a": 2, "node-b": 2}
    assert launched_nodes.master_address() == "127.0.0.1"
    with launched_nodes.accept_nodes()["node-b"] as connection:
        connection.sendall(b"first of the agent\n")
    other.join(10)
    assert became[:1] == [b"first of the agent\n"], "nothing that is for the agent may be read before"
    assert became[1:] == [b""], "closing the connection ends the agent"


def greet(connection: Connection, key: bytes, greeting: bytes) -> None:
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(greeting)


def valid(**changes: object) -> bytes:
    return launched_nodes.json.dumps({"host": "node-b", "node": 1, "ranks": 2, **changes}).encode()


@pytest.mark.parametrize(
    "act",
    [
        lambda other, _key: greet(other, b"ds_benchanother", valid()),
        lambda other, _key: other.send_bytes(valid()),
        lambda other, _key: launched_nodes.os.write(other.fileno(), b"GET / HTTP/1.1\r\n\r\n"),
        lambda other, _key: launched_nodes.os.write(other.fileno(), b"\x7f\xff\xff\xff" + b"x" * 10_000),
        lambda other, key: greet(other, key, valid(host="-oProxyCommand=x")),
        lambda other, key: greet(other, key, valid(node=0)),
        lambda other, key: greet(other, key, valid(node=2)),
        lambda other, key: greet(other, key, valid(ranks=10**6)),
        lambda other, key: greet(other, key, b"[" * 1000),
        lambda _other, _key: None,
    ],
)
def test_a_stranger_is_dropped(
    nodes: LaunchedNodes, act: Callable[[Connection, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched_nodes, "_GREETING_SECONDS", 1)
    found: dict[int, launched_nodes._Node] = {}
    with socket.create_server(("127.0.0.1", 0)) as server, Client(server.getsockname()) as other:
        thread = threading.Thread(target=launched_nodes._receive_node, args=(nodes, server.accept()[0], found))
        thread.start()
        with contextlib.suppress(Exception):  # it is dropped before it has sent all
            act(other, nodes.key)
        thread.join(10)
        assert not thread.is_alive()
    assert found == {}


def test_a_node_that_does_not_come_and_a_first_node_that_is_another_program_are_one_line(
    nodes: LaunchedNodes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launched_nodes, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(launched_nodes, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(launched_nodes, "_RETRY_SECONDS", 0.05)
    with pytest.raises(
        PreflightError, match=r"node 1 of torchrun did not connect .*only this machine reaches.* --hostfile"
    ):
        launched_nodes.connect_nodes(nodes)
    assert "waiting at 127.0.0.1 port" in capfd.readouterr().err
    with pytest.raises(PreflightError, match=r"the first node does not answer at .*: Connection refused"):
        launched_nodes.join_first_node(nodes, [], {})
    assert "waiting for the first node" in capfd.readouterr().err
    with launched_nodes._listen(nodes) as listener:
        false = threading.Thread(target=lambda: _challenge(listener))
        false.start()
        with pytest.raises(PreflightError, match="is not the comparison of this job, or has another secret"):
            launched_nodes.join_first_node(nodes, ["false"], {})
        false.join(10)
    for address, said in (("192.0.2.77", "Cannot assign requested address"), ("no.host.invalid", "not known")):
        with pytest.raises(PreflightError, match=f"cannot listen .*{said}.*MASTER_ADDR"):
            launched_nodes.connect_nodes(replace(nodes, address=address))


def _challenge(listener: socket.socket) -> None:
    with Connection(listener.accept()[0].detach()) as connection, contextlib.suppress(AuthenticationError):
        deliver_challenge(connection, b"of somebody else")


def test_a_dry_run_assumes_the_nodes() -> None:
    found = find_nodes(DEEPSPEED)
    assert found is not None
    launched_nodes.assume_nodes(found)
    assert list(launched_nodes.ranks_of_hosts().values()) == [1, 3, 2]


def test_a_program_of_python_does_not_connect_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "RANK": "0", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    answer = api.run_arguments(["--model", "tiny"], quiet=True)
    assert "on several nodes" in answer["error"]["problem"]
