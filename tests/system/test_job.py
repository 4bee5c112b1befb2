"""Processes of a job: which runs the comparison, what it leaves for the ranks, which connections it accepts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path

import pytest

from ds_bench import api
from ds_bench.errors import PreflightError, UsageError
from ds_bench.system import job
from ds_bench.system.job import LaunchedNodes, find_nodes, rank_of_process, take_over_job, tasks_of_nodes

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
    "SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "node[1-4]", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]-ib,x", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
    "SLURM_STEP_LAUNCHER_PORT": "40955", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_NTASKS": "5", "SLURM_NPROCS": "5", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GTIDS": "0,1",
    "SLURM_CPU_BIND": "quiet,none", "SLURM_CONF": "/slurm.conf", "SLURM_SRUN_COMM_PORT": "40955",
    "SLURM_UMASK": "0022", "SLURM_TASK_PID": "28", "PMI_RANK": "1", "PMI_SIZE": "5",
}  # fmt: skip
LEFT_OF_SRUN = {
    "WORLD_SIZE": "5", "SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "gpu[07-08,11]-ib,x", "SLURM_CONF": "/slurm.conf",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "1",
    "OMPI_MCA_orte_num_nodes": "1", "OMPI_MCA_ess": "^singleton", "OMPI_MCA_btl": "self,tcp", "OMPI_ARGV": "x",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
}  # fmt: skip
HYDRA = {
    "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "8",
}  # fmt: skip


def test_rank_is_that_of_the_program_that_started_the_process_last() -> None:
    for environ, rank in (
        ({}, 0),
        ({"RANK": "3", "LOCAL_RANK": "0"}, 3),
        ({"LOCAL_RANK": "1"}, 1),
        ({"RANK": ""}, 0),
        (SRUN, 1),
        (MPIRUN, 1),
        (HYDRA, 1),
        ({**SRUN, "SLURM_PROCID": "5", "RANK": "0"}, 0),  # torchrun started by srun
        ({"SLURM_JOB_ID": "3", "SLURM_PROCID": "1", "SLURM_NTASKS": "8"}, 0),  # a batch script
        ({"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "1"}, 0),  # salloc's interactive step
    ):
        assert rank_of_process(environ) == rank, environ


ONE_NODE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
LEFT: tuple[tuple[dict[str, str], dict[str, str]], ...] = (
    (SRUN, LEFT_OF_SRUN),
    (MPIRUN, {"WORLD_SIZE": "2", "OMPI_MCA_btl": "self,tcp", "OMPI_ALLOW_RUN_AS_ROOT": "1"}),
    (HYDRA, {"WORLD_SIZE": "2"}),
    ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "PMI_SIZE": "1"}, {}),
    ({"SLURM_JOB_ID": "3", "SLURM_NTASKS": "8"}, {"SLURM_JOB_ID": "3"}),
    ({"WORLD_SIZE": "4"}, {}),
    ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "1"}, {"WORLD_SIZE": "4"}),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "DS_BENCH_SECRET": "x"}, {}),  # all GPUs of each pod
    ({"RANK": "0", "WORLD_SIZE": "16", "PET_NNODES": "2"}, {"WORLD_SIZE": "16", "PET_NNODES": "2"}),
    # torchrun's own choice of threads goes, the user's stays.
    ({**ONE_NODE, "OMP_NUM_THREADS": "1"}, {"WORLD_SIZE": "2"}),
    ({**ONE_NODE, "OMP_NUM_THREADS": "4"}, {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "4"}),
    ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}),
    ({"OMPI_MCA_ess": "x"}, {"OMPI_MCA_ess": "x"}),  # of a user who is about to call mpirun
)


@pytest.fixture
def affinity() -> Iterator[None]:
    """Undoes what ``take_over_job`` does to the processors of a process of mpirun."""
    allowed = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, allowed)


@pytest.mark.usefixtures("affinity")
def test_only_the_number_of_processes_is_left_and_what_the_user_set() -> None:
    for environ, left in LEFT:
        variables = dict(environ)
        take_over_job(variables)
        assert variables == left, environ


@pytest.mark.usefixtures("affinity")
def test_process_that_mpi_bound_to_a_core_gets_the_cores_of_its_launcher() -> None:
    for environ in (MPIRUN, HYDRA):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        take_over_job(dict(environ))
        assert os.sched_getaffinity(0) == os.sched_getaffinity(os.getppid()), environ


@pytest.mark.usefixtures("affinity")
def test_processes_on_several_nodes_are_refused_unless_the_hosts_are_known() -> None:
    for environ, launcher in (
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun"),
        ({**HYDRA, "MPI_LOCALNRANKS": "1"}, "mpiexec"),
        ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_SIZE": "8"}, "deepspeed"),
    ):
        with pytest.raises(UsageError, match=f"on several nodes.*without {launcher}, with --hostfile FILE"):
            take_over_job(dict(environ))
        take_over_job(dict(environ), has_hosts=True)
        take_over_job({**environ, "SLURM_JOB_ID": "1"})


# ------------------------------------------------------------------ the nodes of a Slurm job


def test_every_node_of_a_slurm_job_has_its_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]"}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"nodes node\[1-3\].*Put scontrol and srun on PATH"):
        tasks_of_nodes(in_job)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'scontrol: error: no controller' >&2; exit 1\n")
    scontrol.chmod(0o755)
    with pytest.raises(UsageError, match=r"names: scontrol: error: no controller\. Check that sinfo answers, or"):
        tasks_of_nodes(in_job)
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-3]" ] && echo "node1 node2 node3"\n')
    for tasks, counts in (("", [1, 1, 1]), ("2(x3)", [2, 2, 2]), ("8,2(x2)", [8, 2, 2]), ("4", [1, 1, 1])):
        nodes = tasks_of_nodes({**in_job, "SLURM_TASKS_PER_NODE": tasks})
        assert nodes == dict(zip(["node1", "node2", "node3"], counts, strict=True))
    assert tasks_of_nodes({}) == tasks_of_nodes({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node7"}) == {}


# ------------------------------------------------------------------ nodes on which an engine has started the command


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchedNodes]:
    """Two nodes, as the second sees them; the first listens at a free port of this machine."""
    monkeypatch.setenv("PATH", "/nowhere")  # neither srun nor scontrol
    found = find_nodes(TORCHRUN)
    assert found is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    yield replace(found, address="127.0.0.1", port=port)
    job._connected_nodes.clear()
    job._addresses.clear()


@pytest.mark.usefixtures("nodes")
def test_every_engine_tells_the_nodes() -> None:
    for environ, launcher, port, facts, first in (  # facts: number, count, ranks here, ranks
        (TORCHRUN, "torchrun", 29401, (1, 2, 2, 4), True),
        (DEEPSPEED, "deepspeed", 29400, (1, 3, 1, 6), True),
        (PYTORCH_JOB, "job", 29400, (1, 2, 1, 2), True),
        ({**PYTORCH_JOB, "WORLD_SIZE": "16", "PET_NNODES": "2"}, "job", 29400, (1, 2, 8, 16), True),
        (SRUN, "srun", 29500, (2, 3, 2, 5), False),
        ({**SRUN, **TORCHRUN}, "torchrun", 29401, (1, 2, 2, 4), True),
    ):
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
    for environ, said in (
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({**PYTORCH_JOB, "LOCAL_RANK": "0"}, "not LOCAL_WORLD_SIZE: the nodes are not known"),
    ):
        with pytest.raises(UsageError, match=said):
            find_nodes(environ)


def test_only_with_both_srun_and_scontrol_the_nodes_are_slurms(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, is_slurms in ((("srun", "scontrol"), True), (("srun",), False), (("scontrol",), False)):
        monkeypatch.setattr(job.shutil, "which", lambda name, there=there: name if name in there else None)
        assert (find_nodes(SRUN) is None) is is_slurms


@pytest.mark.usefixtures("nodes")
def test_secret_is_rdzv_id_or_the_jobs_and_without_one_nothing_is_reached() -> None:
    found = [find_nodes(environ) for environ in (TORCHRUN, PYTORCH_JOB)]
    assert [each.secret for each in found if each] == ["id of the job", "s"]
    for environ, said in (
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, "DS_BENCH_SECRET.*--rdzv-id"),
        (DEEPSPEED, "DS_BENCH_SECRET"),
    ):
        open_nodes = find_nodes(environ)
        assert open_nodes is not None
        for use in (job.connect_nodes, lambda each: job.join_first_node(each, [], {})):
            with pytest.raises(PreflightError, match=said):
                use(open_nodes)
    assert job.ranks_of_hosts() == {}


def test_node_becomes_an_agent_once_it_is_accepted(nodes: LaunchedNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[bytes] = []

    def become(agent: object, connection: Connection, _environ: object) -> None:
        with socket.socket(fileno=connection.fileno()) as stream:
            became.extend([stream.recv(100), stream.recv(100)])
            stream.detach()

    monkeypatch.setattr(job, "_replace_process", become)
    names = iter(["node-b", "node-a"])
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    other = threading.Thread(target=job.join_first_node, args=(nodes, ["agent"], {}))
    other.start()
    job.connect_nodes(nodes)
    assert (job.ranks_of_hosts(), job.master_address()) == ({"node-a": 2, "node-b": 2}, "127.0.0.1")
    with job.accept_nodes()["node-b"] as connection:
        connection.sendall(b"first of the agent\n")
    other.join(60)
    assert became[:1] == [b"first of the agent\n"], "nothing that is for the agent may be read before"
    assert became[1:] == [b""], "closing the connection ends the agent"


def greet(connection: Connection, key: bytes, **changes: object) -> None:
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(json.dumps({"host": "node-b", "node": 1, "ranks": 2, **changes}).encode())


STRANGERS: dict[str, Callable[[Connection, bytes], object]] = {
    "another secret": lambda other, _key: greet(other, b"ds_benchanother"),
    "no secret": lambda other, _key: greet(other, b"ds_bench"),
    "no proof": lambda other, _key: other.send_bytes(b'{"host": "node-b", "node": 1, "ranks": 2}'),
    "another protocol": lambda other, _key: os.write(other.fileno(), b"GET / HTTP/1.1\r\n\r\n"),
    "a large message": lambda other, _key: os.write(other.fileno(), b"\x7f\xff\xff\xff" + b"x" * 10_000),
    "an option as its name": lambda other, key: greet(other, key, host="-oProxyCommand=x"),
    "the number of the first node": lambda other, key: greet(other, key, node=0),
    "a number beyond the nodes": lambda other, key: greet(other, key, node=2),
    "too many ranks": lambda other, key: greet(other, key, ranks=10**6),
    "silence": lambda _other, _key: None,
}


@pytest.mark.parametrize("who", STRANGERS)
def test_stranger_is_dropped(nodes: LaunchedNodes, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_GREETING_SECONDS", 1)
    found: dict[int, job._Node] = {}
    with socket.create_server(("127.0.0.1", 0)) as server, Client(server.getsockname()) as other:
        thread = threading.Thread(target=job._receive_node, args=(nodes, server.accept()[0], found))
        thread.start()
        with contextlib.suppress(Exception):  # it is dropped before it has sent all
            STRANGERS[who](other, nodes.key)
        thread.join(60)
        assert not thread.is_alive()
    assert found == {}


def test_node_that_does_not_come_and_a_first_node_that_is_another_program_are_one_line(
    nodes: LaunchedNodes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("WAIT_SECONDS", 3.0), ("_QUIET_SECONDS", 0.0), ("_RETRY_SECONDS", 0.05)):
        monkeypatch.setattr(job, name, seconds)
    missing = r"node 1 of torchrun did not connect .*only this machine can reach.* --hostfile"
    with pytest.raises(PreflightError, match=missing):
        job.connect_nodes(nodes)
    assert "waiting at 127.0.0.1 port" in capfd.readouterr().err
    with pytest.raises(PreflightError, match=r"the first node does not answer at .*: Connection refused"):
        job.join_first_node(nodes, [], {})
    with job._listen(nodes) as listener:
        false = threading.Thread(target=_challenge, args=(listener,))
        false.start()
        with pytest.raises(PreflightError, match="or has a different secret"):
            job.join_first_node(nodes, ["false"], {})
        false.join(60)
    for address, said in (("192.0.2.77", "Cannot assign requested address"), ("no.host.invalid", "not known")):
        with pytest.raises(PreflightError, match=f"cannot listen .*{said}.*MASTER_ADDR"):
            job.connect_nodes(replace(nodes, address=address))


def _challenge(listener: socket.socket) -> None:
    with Connection(listener.accept()[0].detach()) as connection, contextlib.suppress(AuthenticationError):
        deliver_challenge(connection, b"of somebody else")


@pytest.mark.usefixtures("nodes")
def test_dry_run_assumes_the_nodes_and_a_program_of_python_does_not_connect_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = find_nodes(DEEPSPEED)
    assert found is not None
    job.assume_nodes(found)
    assert list(job.ranks_of_hosts().values()) == [1, 3, 2]
    for name, value in {**TORCHRUN, "RANK": "0", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    answer = api.run_arguments(["--model", "tiny"], quiet=True)
    assert "on several nodes" in answer["error"]["problem"]
