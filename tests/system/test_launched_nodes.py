"""Nodes of a launcher: what the launcher tells their processes, and which connections are accepted."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ds_bench.cli import requested_run
from ds_bench.errors import PreflightError
from ds_bench.system import launched_nodes

TORCHRUN = {
    "RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "1", "LOCAL_RANK": "0", "CROSS_RANK": "1", "CROSS_SIZE": "3", "LOCAL_SIZE": "1", "WORLD_SIZE": "4",
    "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_nodes() -> Iterator[None]:
    yield
    launched_nodes._connected_nodes.clear()
    launched_nodes._addresses.clear()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[launched_nodes.LaunchedNodes]:
    """Of two nodes; the first listens at a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(launched_nodes, "_listen", lambda _nodes, _deadline: listener)
        found = launched_nodes.find_nodes({**TORCHRUN, "TORCHELASTIC_RUN_ID": "id of the job"})
        assert found is not None
        yield replace(found, address="127.0.0.1", port=listener.getsockname()[1])


def test_the_nodes_are_those_of_the_launcher_outside_of_slurm() -> None:
    of_torchrun, of_deepspeed = launched_nodes.find_nodes(TORCHRUN), launched_nodes.find_nodes(DEEPSPEED)
    assert of_torchrun is not None
    assert of_deepspeed is not None
    assert (of_torchrun.port, of_torchrun.run_id, of_torchrun.number) == (29401, "", 1)
    assert (of_deepspeed.port, of_deepspeed.count, of_deepspeed.is_first_of_node) == (29500, 3, True)
    for changes in ({"SLURM_JOB_ID": "1"}, {"LOCAL_WORLD_SIZE": "4"}, {"GROUP_WORLD_SIZE": "1"}, {"MASTER_PORT": ""}):
        assert launched_nodes.find_nodes(TORCHRUN | changes) is None
    assert launched_nodes.find_nodes({}) is None


def test_a_node_becomes_an_agent_once_it_is_accepted(
    nodes: launched_nodes.LaunchedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[bytes] = []

    def become(_agent: object, connection: socket.socket, _environ: object) -> None:
        became.append(connection.recv(100))

    monkeypatch.setattr(launched_nodes, "_replace_process", become)
    other = threading.Thread(target=launched_nodes.join_first_node, args=(nodes, ["agent"], {}))
    monkeypatch.setattr(socket, "gethostname", lambda: "node-b")
    other.start()
    monkeypatch.setattr(launched_nodes, "_keep_own", lambda _nodes: None)
    launched_nodes.connect_nodes(nodes)
    assert launched_nodes.ranks_of_hosts() == {"node-b": 2}
    connection = launched_nodes.accept_nodes()["node-b"]
    connection.sendall(b"first of the agent\n")
    other.join(10)
    assert became == [b"first of the agent\n"], "nothing that is for the agent may be read before"
    connection.close()


def with_proof(nodes: launched_nodes.LaunchedNodes, challenge: str, **changes: object) -> bytes:
    values = {"host": "node-b", "node": 1, "ranks": 2, **changes}
    proof = nodes.proof("node", challenge, "own", *values.values())
    return json.dumps({**values, "challenge": "own", "proof": proof}).encode() + b"\n"


@pytest.mark.parametrize(
    "answer",
    [
        lambda nodes, challenge: with_proof(replace(nodes, run_id="another"), challenge),
        lambda nodes, _challenge: with_proof(nodes, "of another connection"),
        lambda nodes, challenge: with_proof(nodes, challenge).replace(b"node-b", b"node-c"),
        lambda nodes, challenge: with_proof(nodes, challenge, host="-oProxyCommand=x"),
        lambda nodes, challenge: with_proof(nodes, challenge, node=0),
        lambda nodes, challenge: with_proof(nodes, challenge, ranks=10**6),
        lambda _nodes, _challenge: b"[" * 1020 + b"\n",
        lambda _nodes, _challenge: b"GET / HTTP/1.1\r\n\r\n",
        lambda _nodes, _challenge: b"x" * 100_000,
    ],
)
def test_whoever_greets_wrongly_is_dropped(
    nodes: launched_nodes.LaunchedNodes, answer: Callable[[launched_nodes.LaunchedNodes, str], bytes]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as other:
        found: dict[int, launched_nodes._ConnectedNode] = {}
        thread = threading.Thread(target=launched_nodes._receive_node, args=(nodes, server.accept()[0], found))
        thread.start()
        challenge = json.loads(other.recv(1000))["ds_bench_challenge"]
        other.sendall(answer(nodes, challenge))
        thread.join(10)
        assert found == {}
        with contextlib.suppress(ConnectionResetError):
            assert other.recv(1) == b""


def test_a_node_that_does_not_come_and_a_first_node_that_is_another_program_are_one_line(
    nodes: launched_nodes.LaunchedNodes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launched_nodes, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(launched_nodes, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(launched_nodes, "_RETRY_SECONDS", 0.05)
    with pytest.raises(PreflightError, match=r"node 1 of torchrun did not connect to 127\.0\.0\.1 port .* --hostfile"):
        launched_nodes.connect_nodes(nodes)
    assert "waiting at 127.0.0.1 port" in capfd.readouterr().err
    with pytest.raises(PreflightError, match=r"the first node does not answer at .*: Connection refused"):
        launched_nodes.join_first_node(nodes, [], {})
    assert "waiting for the first node" in capfd.readouterr().err


def test_what_accepts_a_node_must_know_the_id_too(nodes: launched_nodes.LaunchedNodes) -> None:
    false = threading.Thread(target=_accept_falsely, args=(launched_nodes._listen(nodes, 0.0),))
    false.start()
    with pytest.raises(PreflightError, match="is not the comparison of this job"):
        launched_nodes.join_first_node(nodes, ["false"], {})
    false.join(10)


def _accept_falsely(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b'{"ds_bench_challenge": "x"}\n')
        connection.recv(1000)
        connection.sendall(b'{"proof": "x"}\n')


def test_nothing_listens_but_at_the_address_of_the_first_node(subtests: pytest.Subtests) -> None:
    for address, said in (
        ("127.0.0.1", "is 127.0.0.1 here, for this machine alone"),
        ("192.0.2.77", "Cannot assign requested address"),
        ("no.host.invalid", "the first node's address no.host.invalid"),
    ):
        with subtests.test(address):
            found = launched_nodes.find_nodes({**TORCHRUN, "MASTER_ADDR": address})
            assert found is not None
            with pytest.raises(PreflightError, match=f"{said}.*--master-addr"):
                launched_nodes.connect_nodes(found)
            assert launched_nodes.ranks_of_hosts() == {}
            assert launched_nodes.master_address() is None


def test_a_dry_run_assumes_the_nodes() -> None:
    found = launched_nodes.find_nodes(DEEPSPEED | {"WORLD_SIZE": "6"})
    assert found is not None
    launched_nodes.assume_nodes(found)
    assert list(launched_nodes.ranks_of_hosts().values()) == [1, 3, 2]


def test_a_program_of_python_does_not_connect_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "RANK": "0", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    answer = requested_run.run_arguments(["--model", "tiny"], quiet=True)
    assert "on several nodes" in answer["error"]["problem"]
