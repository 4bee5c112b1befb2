"""The job that this process is part of, from the variables of Slurm, MPI, torchrun and others: its nodes and tasks.

If the job started several processes, one of them runs the comparison and starts the ranks itself. On one node, or if
srun can reach the other nodes, the other processes end immediately. If an engine started this command on every node
(torchrun, DeepSpeed's launcher, a PyTorchJob or Volcano job, ``srun`` inside a container), the first process listens on
MASTER_ADDR. The first process of every other node connects to it and is then replaced by the node's agent
(``launch.host_agent``), which reads requests from that connection. Both sides prove that they know the job's secret,
torchrun's ``--rdzv-id`` or DS_BENCH_SECRET, without sending it.

Sources: torchrun's environment variables, Open MPI's ``mpirun(1)``, the environment of a process that Hydra started
(``mpiexec`` of MPICH 5.0 and Intel MPI 2021.19), "Output environment variables" in ``srun(1)`` and ``sbatch(1)``.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple, NoReturn

from ..errors import PreflightError, UsageError
from ..units import format_names
from . import terminal

_TASKS = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
_SCONTROL_SECONDS = 30.0
_NO_STEP = 0xFFFFFFF0
"""Numbers from here on belong to a batch script or to salloc's shell, not to a step of srun (slurm.h)."""
_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
    # With TORCHELASTIC_USE_AGENT_STORE our ranks would wait for a store that only torchrun's ranks have.
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "DS_BENCH_SECRET",
)  # fmt: skip
_MPI_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "HYDI_", "MPI_LOCAL")
_SET_BY_USERS = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_")
_SET_BY_MPIRUN = (
    "OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_initial_wdir", "OMPI_MCA_shmem_RUNTIME",
    "OMPI_MCA_mpi_oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe",
)  # fmt: skip
_TASK_PREFIXES = (
    "SLURM_CPU_BIND", "SLURM_DISTRIBUTION", "SLURM_GTIDS", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_LOCALID",
    "SLURM_MPI_TYPE", "SLURM_NODEID", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_PMI", "SLURM_PRIO_PROCESS",
    "SLURM_PROCID", "SLURM_SRUN_COMM", "SLURM_STEP", "SLURM_TASK_PID", "SLURM_UMASK",
)  # fmt: skip
"""Prefixes of Slurm's variables for one task, and of those that srun would pass on to other tasks."""


def rank_of_process(environ: Mapping[str, str]) -> int:
    """Return the number of this process in its job; 0 if it was started on its own."""
    names = ["RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"]
    if is_task_of_slurm(environ):
        names.append("SLURM_PROCID")
    rank = next((environ[name] for name in names if environ.get(name)), "0")
    return int(rank) if rank.isdecimal() else 0


def is_task_of_slurm(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process or an ancestor; False in a batch script and in salloc's shell."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _NO_STEP


def task_counts(text: str) -> list[int]:
    """Return the number of tasks of each node from Slurm's notation: ``2(x3),1`` is 2, 2, 2, 1."""
    return [int(tasks) for tasks, times in _TASKS.findall(text) for _ in range(int(times or 1))]


def tasks_of_nodes(environ: Mapping[str, str]) -> dict[str, int]:
    """Return node → number of Slurm tasks, in the order of the job; empty outside of jobs and on one node.

    Raises UsageError if scontrol does not list the names.
    """
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    # The list of a single node has neither brackets nor commas.
    if "SLURM_JOB_ID" not in environ or not re.search(r"[\[,]", nodes):
        return {}
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SCONTROL_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        output = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
        reason = " ".join((output or str(error)).split())[:400]
        remedy = "check that sinfo answers"
        if isinstance(error, FileNotFoundError):
            remedy = "put scontrol and srun on PATH, start the command with srun on every node (docs/many_machines.md)"
        raise UsageError(
            f"this is a Slurm job on the nodes {nodes}, but scontrol does not list their names: {reason}",
            remedy=f"{remedy}, or start one process on one node: srun --nodes=1 --ntasks=1",
        ) from None
    names = done.stdout.split()
    counts = task_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    if len(counts) != len(names):
        counts = [1] * len(names)
    return dict(zip(names, counts, strict=True)) if len(names) > 1 else {}


def take_over_job(environ: MutableMapping[str, str], *, has_hosts: bool = False) -> None:
    """Make the first process of a job the one that starts the ranks.

    The number of processes becomes WORLD_SIZE, the requested number of ranks. Variables that make libraries mistake
    this process or its children for ranks or tasks are removed from ``environ``; Slurm's allocation stays. Raises
    UsageError for processes on several nodes, unless a hostfile (``has_hosts``) or Slurm names the hosts.
    """
    if not has_hosts and "SLURM_JOB_ID" not in environ:
        for total, here, what in (
            ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "torchrun"),
            ("WORLD_SIZE", "LOCAL_SIZE", "deepspeed"),
            ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun"),
            ("PMI_SIZE", "MPI_LOCALNRANKS", "mpiexec"),
        ):
            if total in environ and here in environ and environ[total] != environ[here]:
                raise UsageError(
                    f"{what} started processes on several nodes; this one cannot start ranks on the others",
                    remedy=f"start one process, without {what}, with --hostfile FILE",
                )
    launched, task = "RANK" in environ or "LOCAL_RANK" in environ, is_task_of_slurm(environ)
    size = environ.pop("WORLD_SIZE", None)
    has_local_rank = any(name in environ for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
    if launched and not has_local_rank and environ.get("PET_NNODES", size) == size:
        size = None  # one process in each pod, with all GPUs of that pod
    if not launched:
        size = environ.get("PMI_SIZE") if "MPI_LOCALNRANKS" in environ else environ.get("OMPI_COMM_WORLD_SIZE")
        if size not in (None, "1"):
            # Open MPI and Intel MPI bind each process to some of the cores; this one starts the ranks for all of them.
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
        size = size or (environ.get("SLURM_NTASKS") if task else environ.get("PMI_SIZE"))
        if task and size == environ.get("SLURM_STEP_NUM_NODES", "1"):
            size = None  # one Slurm task on a node usually has all of its GPUs
    if size:
        environ["WORLD_SIZE"] = size
    if task and "SLURM_STEP_NODELIST" in environ:  # a step may have fewer nodes than the job
        environ["SLURM_JOB_NODELIST"] = environ["SLURM_STEP_NODELIST"]
    from_torchrun = "TORCHELASTIC_RUN_ID" in environ and environ.get("LOCAL_WORLD_SIZE", "1") != "1"
    if from_torchrun and environ.get("OMP_NUM_THREADS") == "1":
        # torchrun's default for several processes on a node (torch/distributed/run.py), which makes CPU Adam slow.
        del environ["OMP_NUM_THREADS"]
    from_mpirun = "OMPI_COMM_WORLD_SIZE" in environ
    for name in list(environ):
        set_by_user = name.startswith(_SET_BY_USERS) and not (from_mpirun and name.startswith(_SET_BY_MPIRUN))
        if (
            name in _LAUNCHER_VARIABLES
            or name.startswith(_TASK_PREFIXES)
            or (name.startswith(_MPI_PREFIXES) and not set_by_user)
        ):
            del environ[name]


# ------------------------------------------------------------------ nodes where an engine has started this command

WAIT_SECONDS = 120.0
"""For the processes of all nodes to start and find each other."""
_QUIET_SECONDS = 5.0
"""After this long a line says what the process is waiting for."""
_RETRY_SECONDS = 0.5
_GREETING_SECONDS = 10
_MAX_GREETING_BYTES = 1024
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_SECRET = "DS_BENCH_SECRET"
_ACCEPTED = b"accepted"
"""The message that turns a node's process into its agent."""
_NO_RUN_ID = ("", "none")
"""torchrun's id for a run without ``--rdzv-id``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedNodes:
    """The nodes of a job, as one of its processes sees them."""

    launcher: str
    """``torchrun``, ``deepspeed``, ``srun``, or ``job`` for an engine that sets RANK and WORLD_SIZE on each node."""
    address: str
    """MASTER_ADDR: the first node's."""
    port: int
    """The first process listens here."""
    count: int
    number: int
    """Number of this process's node, from 0."""
    ranks_here: int
    ranks: int
    """On all nodes."""
    is_first_of_node: bool
    secret: str
    """Known to all processes of the job; empty if they share none."""

    @property
    def where(self) -> str:
        return f"{self.address} port {self.port}"

    @property
    def key(self) -> bytes:
        """The key that each side must prove it knows (multiprocessing's HMAC of a random challenge)."""
        return b"ds_bench" + self.secret.encode()


class _Node(NamedTuple):
    name: str
    ranks: int
    connection: Connection | None = None
    """None for this node itself, and for nodes that were not asked."""


_connected_nodes: dict[int, _Node] = {}
"""Node number → node, including this one; empty before :func:`connect_nodes`."""
_addresses: list[str] = []
"""The address where the other nodes reached this process."""


def find_nodes(environ: Mapping[str, str]) -> LaunchedNodes | None:
    """Return the nodes of a job that has several; None for any other, or if srun can reach the nodes.

    Raises UsageError if an engine's variables do not say how many processes run on this node, or where the first is.
    """
    if "SLURM_JOB_ID" in environ and shutil.which("srun") and shutil.which("scontrol"):
        return None
    launcher, texts = _launcher_and_facts(environ)
    address, port_text = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "29500")
    if launcher == "srun" and not address:
        # The first name of a list in Slurm's notation: node01 of node[01-03,7],other.
        first = re.match(r"([^,\[]*)(?:\[([0-9]+)[^\]]*\]([^,\[]*))?", environ.get("SLURM_STEP_NODELIST", ""))
        address = "".join(filter(None, first.groups() if first else ()))
    if not all(text.isdecimal() for text in (*texts, port_text)):
        return None
    number, count, ranks_here, local_rank, ranks = map(int, texts)
    if count < 2 or not 0 < ranks_here < ranks:
        return None
    if not address:
        raise UsageError(
            f"this is one of {count} processes, but MASTER_ADDR is not set", remedy="set it to the first node's address"
        )
    port, run_id = int(port_text), environ.get("TORCHELASTIC_RUN_ID", "")
    if launcher == "torchrun":  # its own store listens on MASTER_PORT
        port += 1 if port < 65535 else -1
    return LaunchedNodes(
        launcher=launcher,
        address=address,
        port=port,
        count=count,
        number=number,
        ranks_here=ranks_here,
        ranks=ranks,
        is_first_of_node=local_rank == 0,
        secret=environ.get(_SECRET) or ("" if run_id in _NO_RUN_ID else run_id),
    )


def _launcher_and_facts(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the launcher and, as strings: number of this node, nodes, ranks here, local rank, ranks."""

    def values(*names: str) -> list[str]:
        return [environ.get(name, "") for name in names]

    if "LOCAL_WORLD_SIZE" in environ:
        return "torchrun", values("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "WORLD_SIZE")
    if "CROSS_SIZE" in environ:  # launcher/launch.py of DeepSpeed
        return "deepspeed", values("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE", "LOCAL_RANK", "WORLD_SIZE")
    if is_task_of_slurm(environ):
        number, *others = values("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID", "SLURM_NTASKS")
        tasks = task_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        here = tasks[int(number)] if number.isdecimal() and int(number) < len(tasks) else ""
        return "srun", [number, others[0], str(here), *others[1:]]
    rank, size = values("RANK", "WORLD_SIZE")
    if size in ("", "1") or not rank:
        return "", [""]
    if "LOCAL_RANK" in environ and "LOCAL_SIZE" not in environ:
        raise UsageError(
            "RANK, LOCAL_RANK and WORLD_SIZE are set, but not LOCAL_WORLD_SIZE: the nodes are not known",
            remedy="start the command with torchrun, or as one process on each node without LOCAL_RANK",
        )
    # A PyTorchJob or a Volcano job starts one process in each pod. PET_* are torchrun's, for several ranks in each.
    nodes = environ.get("PET_NNODES", size)
    if not (nodes.isdecimal() and size.isdecimal() and int(nodes) and int(size) % int(nodes) == 0):
        return "", [""]
    return "job", [environ.get("PET_NODE_RANK", rank), nodes, str(int(size) // int(nodes)), "0", size]


def _require_secret(nodes: LaunchedNodes) -> None:
    """Raise PreflightError if a stranger could join the job."""
    if nodes.secret:
        return
    with contextlib.suppress(OSError, ValueError):
        if _is_loopback(str(socket.getaddrinfo(nodes.address, nodes.port, type=socket.SOCK_STREAM)[0][4][0])):
            return
    raise PreflightError(
        f"anyone who can reach {nodes.where} could join this job, because its processes share no secret",
        remedy=f"set {_SECRET} to the same random string on every node (openssl rand -hex 16 makes one)"
        + (", or give torchrun such a string as --rdzv-id" if nodes.launcher == "torchrun" else ""),
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


# ------------------------------------------------------------------ the process that runs the comparison


def ranks_of_hosts() -> dict[str, int]:
    """Return host → number of ranks from the launcher, in the order of the nodes; empty if none is connected."""
    return {node.name: node.ranks for _, node in sorted(_connected_nodes.items())}


def master_address() -> str | None:
    """Return the address where the other nodes reached this host; None if none is connected."""
    return _addresses[0] if _addresses else None


def accept_nodes() -> dict[str, socket.socket]:
    """Turn the waiting process of every other node into its agent. Return host → connection, without this host."""
    connections = {}
    for node in _connected_nodes.values():
        if node.connection is not None:
            with contextlib.suppress(OSError):  # the caller notices that the connection has ended
                node.connection.send_bytes(_ACCEPTED)
            connections[node.name] = socket.socket(fileno=os.dup(node.connection.fileno()))
            node.connection.close()  # or closing the other descriptor would not end the agent's input
    return connections


def assume_nodes(nodes: LaunchedNodes) -> None:
    """Assume what :func:`connect_nodes` would find out, without asking any node: for ``--dry-run``."""
    # Only the total of the other nodes is known, so spread it evenly.
    share, more = divmod(nodes.ranks - nodes.ranks_here, nodes.count - 1)
    _keep(
        nodes,
        {number: _Node(name=f"node-{number}", ranks=share + (number <= more)) for number in range(1, nodes.count)},
    )


def connect_nodes(nodes: LaunchedNodes) -> None:
    """Wait until every other node has connected. Raises PreflightError if one takes too long."""
    _require_secret(nodes)
    found: dict[int, _Node] = {}
    with _listen(nodes) as listener:
        listener.settimeout(_RETRY_SECONDS)
        patience = _Patience()
        while missing := [number for number in range(1, nodes.count) if number not in found]:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                # Each in its own thread, because a stranger that connects and stays silent must not hold up the nodes.
                threading.Thread(target=_receive_node, args=(nodes, connection, found), daemon=True).start()
            launcher = "this job" if nodes.launcher == "job" else nodes.launcher
            who = f"node{'s' if len(missing) > 1 else ''} {format_names(missing)} of {launcher}"
            if not patience.lasts(f"waiting at {nodes.where} for {who}"):
                only = f", which only this machine can reach ({_addresses[0]})," if _is_loopback(_addresses[0]) else ""
                raise PreflightError(
                    f"{who} did not connect to {nodes.where}{only} within {WAIT_SECONDS:.0f} s",
                    remedy="start the same command on every node and open this port between them, or start one process "
                    "with --hostfile FILE",
                )
    _keep(nodes, found)
    names = sorted(node.name for node in _connected_nodes.values())
    # From here on, results and connections are identified by host name.
    if len(set(names)) < len(names):
        raise PreflightError(
            f"several nodes have the same host name: {', '.join(names)}",
            remedy="give each machine its own host name; on one machine start one process",
        )


class _Patience:
    """Prints after a while what the process is waiting for, and gives up after the limit."""

    def __init__(self) -> None:
        self._began, self._said = time.monotonic(), False

    def lasts(self, what: str) -> bool:
        waited = time.monotonic() - self._began
        if waited > _QUIET_SECONDS and not self._said:
            self._said = True
            terminal.print_text(what, sys.stderr)
        return waited <= WAIT_SECONDS


def _keep(nodes: LaunchedNodes, others: Mapping[int, _Node]) -> None:
    _connected_nodes.clear()
    _connected_nodes.update({0: _Node(name=socket.gethostname(), ranks=nodes.ranks_here), **others})


def _listen(nodes: LaunchedNodes) -> socket.socket:
    try:
        family, _, _, _, target = socket.getaddrinfo(nodes.address, nodes.port, type=socket.SOCK_STREAM)[0]
        # Only on this address, so that the port is closed to the host's other networks.
        listener = socket.create_server((str(target[0]), nodes.port), family=family, backlog=128)
    except OSError as error:
        remedy = "set MASTER_ADDR to an address of the first node that the others can reach (torchrun and deepspeed: "
        remedy += "--master_addr; with a c10d rendezvous --local-addr)"
        if error.errno == errno.EADDRINUSE:
            remedy = "stop the program that is listening there, or give the launcher another master port"
        raise PreflightError(
            f"cannot listen for the other nodes on {nodes.where}: {error.strerror}", remedy=remedy
        ) from None
    _addresses[:] = [str(target[0])]
    return listener


def _receive_node(nodes: LaunchedNodes, accepted: socket.socket, found: dict[int, _Node]) -> None:
    """Keep the connection of a node that proves that it knows the secret, and drop any other."""
    connection = _connection(accepted)
    try:
        deliver_challenge(connection, nodes.key)
        answer_challenge(connection, nodes.key)
        greeting = json.loads(connection.recv_bytes(_MAX_GREETING_BYTES))
        name, number, ranks = greeting["host"], int(greeting["node"]), int(greeting["ranks"])
        if not (_HOST.fullmatch(name) and 0 < number < nodes.count and 0 < ranks < nodes.ranks):
            raise ValueError
        # Threads may race for one number; setdefault gives it to the first.
        node = _Node(name=name, ranks=ranks, connection=connection)
        if found.setdefault(number, node) is not node:
            raise ValueError
        _limit_silence(connection, 0)
    except Exception:  # whatever a stranger sends
        connection.close()


def _connection(connected: socket.socket) -> Connection:
    """Return a connection that the kernel ends when the other node is gone, even if nothing is sent."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connected.setblocking(True)
    connection = Connection(connected.detach())
    _limit_silence(connection, _GREETING_SECONDS)
    return connection


def _limit_silence(connection: Connection, seconds: int) -> None:
    """Make reading fail after this long without a byte; 0: never."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


# ------------------------------------------------------------------ the first process of another node


def join_first_node(nodes: LaunchedNodes, agent: Sequence[str], environ: Mapping[str, str]) -> None:
    """Connect to the first node, and become the agent of this one. ``agent``: the agent's command line.

    Returns if the comparison ended before it needed ranks. Raises PreflightError if the first node does not answer.
    """
    _require_secret(nodes)
    with _greet_first_node(nodes) as connection:
        answer = b""
        with contextlib.suppress(OSError, EOFError):
            answer = connection.recv_bytes(_MAX_GREETING_BYTES)
        if answer == _ACCEPTED:
            _replace_process(agent, connection, environ)


def _replace_process(agent: Sequence[str], connection: Connection, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process, so that the agent gets the launcher's signals and the launcher its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    # The agent reads requests from its standard input and answers on its standard output.
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    os.execvpe(agent[0], list(agent), dict(environ))


def _greet_first_node(nodes: LaunchedNodes) -> Connection:
    greeting = {"host": socket.gethostname(), "node": nodes.number, "ranks": nodes.ranks_here}
    patience = _Patience()
    while True:
        connection = None
        try:
            connection = _connection(socket.create_connection((nodes.address, nodes.port), timeout=_GREETING_SECONDS))
            answer_challenge(connection, nodes.key)
            deliver_challenge(connection, nodes.key)
            connection.send_bytes(json.dumps(greeting).encode())
            _limit_silence(connection, 0)
            return connection
        except AuthenticationError:
            raise PreflightError(
                f"the program listening on {nodes.where} is not this job's comparison, or has a different secret",
                remedy=f"give every node the same {_SECRET} or --rdzv-id, or give the job another port",
            ) from None
        except Exception as error:  # another program that sends something else may be listening there
            why = "timed out" if isinstance(error, TimeoutError) else "another program is listening there"
            why = (isinstance(error, OSError) and error.strerror) or why
            if connection is not None:
                connection.close()
        if not patience.lasts(f"waiting for the first node at {nodes.where}: {why}"):
            raise PreflightError(
                f"the first node does not answer at {nodes.where}: {why}",
                remedy="start the same command on every node and open this port between them",
            )
        time.sleep(_RETRY_SECONDS)
