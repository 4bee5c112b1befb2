"""Nodes that torchrun or DeepSpeed's launcher has started processes on, and how the first reaches the others.

The first process of all listens at MASTER_ADDR; the first process of every other node connects to it, and is then
replaced by the agent of its node (``launch.host_agent``), which reads requests from that connection. The other
processes leave.

A launcher gives its processes no common secret. Both sides prove that they know the id of torchrun's ``--rdzv-id``, of
which nothing is sent in clear; without one everybody who reaches the port may take part, as in torch's own store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import PreflightError
from ..units import format_names
from . import terminal

WAIT_SECONDS = 120.0
"""For the processes of all nodes to start and to find each other."""
_QUIET_SECONDS = 5.0
"""Time after which a line says what is waited for."""
_RETRY_SECONDS = 0.5
_GREETING_SECONDS = 10.0
_MOST_GREETING_BYTES = 1024
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_NO_RUN_ID = ("", "none")
"""torchrun's id of a run without ``--rdzv-id``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedNodes:
    """What the variables of a launcher tell one process of the nodes."""

    launcher: str
    """``torchrun`` or ``deepspeed``."""
    address: str
    """MASTER_ADDR: of the first node."""
    port: int
    """At which the first process listens."""
    count: int
    number: int
    """Of this process's node, from 0."""
    ranks_here: int
    ranks: int
    """Of all nodes."""
    is_first_of_node: bool
    run_id: str
    """torchrun's ``--rdzv-id``; empty without one."""

    @property
    def where(self) -> str:
        return f"{self.address} port {self.port}"

    def proof(self, *facts: object) -> str:
        """What only a process that knows the run's id can compute."""
        return hmac.new(self.run_id.encode(), json.dumps(facts).encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConnectedNode:
    name: str
    ranks: int
    connection: socket.socket | None
    """None for this node itself, and where no node was asked."""
    acceptance: bytes
    """Sent to make the process there the agent of its node."""


_connected_nodes: dict[int, _ConnectedNode] = {}
"""By the number of the node, this one too; empty where :func:`connect_nodes` was not called."""
_addresses: list[str] = []
"""The address at which the other nodes have reached this process."""


def find_nodes(environ: Mapping[str, str]) -> LaunchedNodes | None:
    """The nodes of a job of torchrun or DeepSpeed's launcher on several; None elsewhere, and in a job of Slurm, which
    tells the names of its nodes itself."""
    by_torchrun = "LOCAL_WORLD_SIZE" in environ
    # torchrun's names of the node's number, the number of nodes and of ranks here; DeepSpeed has others
    # (launcher/launch.py).
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if not by_torchrun:
        names = ("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE")
    texts = [environ.get(name, "") for name in (*names, "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")]
    if "SLURM_JOB_ID" in environ or "MASTER_ADDR" not in environ or not all(text.isdecimal() for text in texts):
        return None
    number, count, ranks_here, local_rank, ranks, port = map(int, texts)
    if count < 2 or not 0 < ranks_here < ranks:
        return None
    if by_torchrun:  # its own store listens at MASTER_PORT
        port += 1 if port < 65535 else -1
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    return LaunchedNodes(
        launcher="torchrun" if by_torchrun else "deepspeed",
        address=environ["MASTER_ADDR"],
        port=port,
        count=count,
        number=number,
        ranks_here=ranks_here,
        ranks=ranks,
        is_first_of_node=local_rank == 0,
        run_id="" if run_id in _NO_RUN_ID else run_id,
    )


# ------------------------------------------------------------------ the process that runs the comparison


def ranks_of_hosts() -> dict[str, int]:
    """Host → number of ranks that the launcher gave it, in the order of the nodes; empty where none is connected."""
    return {_connected_nodes[number].name: _connected_nodes[number].ranks for number in sorted(_connected_nodes)}


def master_address() -> str | None:
    """The address of this host that the other nodes have reached; None where none is connected."""
    return _addresses[0] if _addresses else None


def accept_nodes() -> dict[str, socket.socket]:
    """Makes the process of every other node the agent there. Returns host → connection to it, without this host."""
    connections = {}
    for node in _connected_nodes.values():
        if node.connection is not None:
            with contextlib.suppress(OSError):  # its connection then ends, which its user notices
                node.connection.sendall(node.acceptance)
            connections[node.name] = node.connection
    return connections


def assume_nodes(nodes: LaunchedNodes) -> None:
    """What :func:`connect_nodes` would find out, without asking any node: for ``--dry-run``."""
    # Only the sum is known of the other nodes: it is spread evenly.
    share, more = divmod(nodes.ranks - nodes.ranks_here, nodes.count - 1)
    _keep_own(nodes)
    for number in range(1, nodes.count):
        ranks = share + (number <= more)
        _connected_nodes[number] = _ConnectedNode(name=f"node-{number}", ranks=ranks, connection=None, acceptance=b"")


def connect_nodes(nodes: LaunchedNodes) -> None:
    """Waits until every other node has connected. Raises PreflightError if one has not within the limit."""
    deadline = time.monotonic() + WAIT_SECONDS
    found: dict[int, _ConnectedNode] = {}
    said = False
    with _listen(nodes, deadline) as listener:
        listener.settimeout(_RETRY_SECONDS)
        began = time.monotonic()
        while len(found) < nodes.count - 1:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                # A thread for each: another program that connects and stays silent must not hold up the nodes.
                threading.Thread(target=_receive_node, args=(nodes, connection, found), daemon=True).start()
            now = time.monotonic()
            if now - began > _QUIET_SECONDS and not said:
                said = True
                terminal.print_text(f"waiting at {nodes.where} for {_missing(nodes, found)}", sys.stderr)
            if now > deadline:
                raise PreflightError(
                    f"{_missing(nodes, found)} did not connect to {nodes.where} within {WAIT_SECONDS:.0f} s",
                    remedy="start the same command on every node and open this port between them, or start one process "
                    "with --hostfile FILE",
                )
    _keep_own(nodes)
    _connected_nodes.update(found)
    names = [node.name for node in _connected_nodes.values()]
    # Results and connections are kept by host name from here on.
    if len(set(names)) < len(names):
        raise PreflightError(
            f"the nodes call themselves {', '.join(sorted(names))}: they are one machine, or cannot be told apart",
            remedy="give each machine a host name of its own; on one machine start one process",
        )


def _keep_own(nodes: LaunchedNodes) -> None:
    _connected_nodes.clear()
    _connected_nodes[0] = _ConnectedNode(
        name=socket.gethostname(), ranks=nodes.ranks_here, connection=None, acceptance=b""
    )


def _missing(nodes: LaunchedNodes, found: Mapping[int, _ConnectedNode]) -> str:
    numbers = [number for number in range(1, nodes.count) if number not in found]
    return f"{'node' if len(numbers) == 1 else 'nodes'} {format_names(numbers)} of {nodes.launcher}"


def _listen(nodes: LaunchedNodes, deadline: float) -> socket.socket:
    """Listens at the address of the first node alone. Raises PreflightError if that cannot be done until a time."""
    flag = "--master_addr" if nodes.launcher == "deepspeed" else "--master-addr (with a c10d rendezvous --local-addr)"
    remedy = f"give {nodes.launcher} {flag} with an address of the first node that the others reach"
    try:
        family, _, _, _, target = socket.getaddrinfo(nodes.address, nodes.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise PreflightError(f"the first node's address {nodes.address}: {error.strerror}", remedy=remedy) from None
    address = str(target[0])
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise PreflightError(f"MASTER_ADDR {nodes.address} is {address} here, for this machine alone", remedy=remedy)
    while True:
        try:
            # At this address alone, so that no other network of the host reaches the port.
            listener = socket.create_server((address, nodes.port), family=family, backlog=128)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(_RETRY_SECONDS)
                continue
            if error.errno == errno.EADDRINUSE:
                remedy = "end what listens there, or give the launcher another port for its master"
            raise PreflightError(
                f"cannot listen for the other nodes at {nodes.where}: {error.strerror}", remedy=remedy
            ) from None
        _addresses[:] = [address]
        return listener


def _receive_node(nodes: LaunchedNodes, connection: socket.socket, found: dict[int, _ConnectedNode]) -> None:
    """Keeps a connection whose greeting is right, and drops any other."""
    try:
        connection.settimeout(_GREETING_SECONDS)
        challenge = secrets.token_hex(32)
        _send(connection, {"ds_bench_challenge": challenge})
        greeting = _read(connection)
        name, number, ranks = greeting["host"], greeting["node"], greeting["ranks"]
        expected = nodes.proof("node", challenge, greeting["challenge"], name, number, ranks)
        if not hmac.compare_digest(expected, greeting["proof"]) or not _is_plausible(nodes, name, number, ranks):
            raise ValueError
        connection.settimeout(None)
        _keep_alive(connection)
        acceptance = _line({"proof": nodes.proof("accepted", challenge, greeting["challenge"])})
        node = _ConnectedNode(name=name, ranks=ranks, connection=connection, acceptance=acceptance)
        # Threads may race for one number: setdefault lets the first have it.
        if found.setdefault(number, node) is not node:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        connection.close()


def _is_plausible(nodes: LaunchedNodes, name: object, number: object, ranks: object) -> bool:
    return (
        isinstance(name, str)
        and _HOST.fullmatch(name) is not None
        and type(number) is int
        and 0 < number < nodes.count
        and type(ranks) is int
        and 0 < ranks < nodes.ranks
    )


# ------------------------------------------------------------------ the first process of another node


def join_first_node(nodes: LaunchedNodes, agent: Sequence[str], environ: Mapping[str, str]) -> None:
    """Connects to the first node, and becomes the agent of this one: ``agent`` is its command line.

    Returns if the comparison ended before it needed ranks. Raises PreflightError where the first node does not answer.
    """
    connection, challenge, own_challenge = _greet_first_node(nodes)
    with connection:
        connection.settimeout(None)
        try:
            acceptance = _read(connection)
        except (OSError, ValueError):
            return
        proof = str(acceptance.get("proof"))
        if not hmac.compare_digest(nodes.proof("accepted", challenge, own_challenge).encode(), proof.encode()):
            raise PreflightError(
                f"what listens at {nodes.where} is not the comparison of this job", remedy="give it another port"
            )
        _replace_process(agent, connection, environ)


def _replace_process(agent: Sequence[str], connection: socket.socket, environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process, so that the launcher's signals reach the agent, and its exit code the launcher."""
    sys.stdout.flush()
    sys.stderr.flush()
    # The agent reads requests from its standard input and answers on its standard output.
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    os.execvpe(agent[0], list(agent), dict(environ))


def _greet_first_node(nodes: LaunchedNodes) -> tuple[socket.socket, str, str]:
    """The connection to the first node, its challenge and the own one."""
    began, said = time.monotonic(), False
    while True:
        try:
            return _greet(nodes)
        except (OSError, ValueError, KeyError) as error:
            why = error.strerror or "timed out" if isinstance(error, OSError) else "something else listens there"
        waited = time.monotonic() - began
        if waited > WAIT_SECONDS:
            raise PreflightError(
                f"the first node does not answer at {nodes.where}: {why}",
                remedy="start the same command on every node and open this port between them",
            )
        if waited > _QUIET_SECONDS and not said:
            said = True
            terminal.print_text(f"waiting for the first node at {nodes.where}: {why}", sys.stderr)
        time.sleep(_RETRY_SECONDS)


def _greet(nodes: LaunchedNodes) -> tuple[socket.socket, str, str]:
    connection = socket.create_connection((nodes.address, nodes.port), timeout=_GREETING_SECONDS)
    try:
        challenge, own = str(_read(connection)["ds_bench_challenge"]), secrets.token_hex(32)
        name = socket.gethostname()
        facts = name, nodes.number, nodes.ranks_here
        greeting = {"host": name, "node": nodes.number, "ranks": nodes.ranks_here, "challenge": own}
        _send(connection, {**greeting, "proof": nodes.proof("node", challenge, own, *facts)})
        _keep_alive(connection)
    except BaseException:
        connection.close()
        raise
    return connection, challenge, own


# ------------------------------------------------------------------ lines


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _send(connection: socket.socket, values: Mapping[str, Any]) -> None:
    connection.sendall(_line(values))


def _read(connection: socket.socket) -> dict[str, Any]:
    """One line, and no byte more: what follows is for the agent. Raises OSError, and ValueError for other data."""
    data = b""
    while not data.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(data) > _MOST_GREETING_BYTES:
            raise ValueError("no greeting")
        data += byte
    try:
        values = json.loads(data)
    except RecursionError:
        values = None
    if not isinstance(values, dict):
        raise ValueError("no greeting")
    return values


def _keep_alive(connection: socket.socket) -> None:
    """Makes the kernel end the connection to a node that is gone, while nothing is sent over it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
