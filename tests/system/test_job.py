"""Which process of a job runs the comparison, and what of the job's variables is left for the ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_bench.errors import UsageError
from ds_bench.system.job import rank_of_process, take_over_job, tasks_of_nodes

SRUN = {
    "SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "node[1-4]", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_LAUNCHER_PORT": "40955", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_GTIDS": "0,1", "SLURM_CPU_BIND": "quiet,none", "SLURM_CPU_BIND_TYPE": "none", "SLURM_CONF": "/slurm.conf",
    "SLURM_SRUN_COMM_PORT": "40955", "SLURM_UMASK": "0022", "SLURM_TASK_PID": "28", "PMI_RANK": "1", "PMI_SIZE": "2",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "1",
    "OMPI_MCA_orte_num_nodes": "1", "OMPI_MCA_ess": "^singleton", "OMPI_MCA_btl": "self,tcp", "OMPI_ARGV": "x",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
}  # fmt: skip


def test_the_rank_is_that_of_the_program_that_started_the_process_last(subtests: pytest.Subtests) -> None:
    for environ, rank in (
        ({}, 0),
        ({"RANK": "3", "LOCAL_RANK": "0"}, 3),
        ({"LOCAL_RANK": "1"}, 1),
        ({"RANK": ""}, 0),
        (SRUN, 1),
        (MPIRUN, 1),
        ({**SRUN, "SLURM_PROCID": "5", "RANK": "0"}, 0),  # torchrun started by srun
        ({"SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, 0),  # a batch script
        ({"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "1"}, 0),  # salloc's interactive step
    ):
        with subtests.test(environ=environ, rank=rank):
            assert rank_of_process(environ) == rank


def test_only_the_number_of_processes_is_left_and_what_the_user_set(subtests: pytest.Subtests) -> None:
    for environ, left in (
        (
            SRUN,
            {
                "WORLD_SIZE": "2", "SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CONF": "/slurm.conf",
                "SLURM_TASKS_PER_NODE": "1(x2)",
            },
        ),
        (MPIRUN, {"WORLD_SIZE": "2", "OMPI_MCA_btl": "self,tcp", "OMPI_ALLOW_RUN_AS_ROOT": "1"}),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "PMI_SIZE": "1"}, {}),
        ({"SLURM_JOB_ID": "3", "SLURM_NTASKS": "8"}, {"SLURM_JOB_ID": "3"}),
        ({"WORLD_SIZE": "4"}, {}),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            {"WORLD_SIZE": "4"},
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "DS_BENCH_SECRET": "x"}, {}),  # all GPUs of each pod
        ({"RANK": "0", "WORLD_SIZE": "16", "PET_NNODES": "2"}, {"WORLD_SIZE": "16", "PET_NNODES": "2"}),
        (
            {
                "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
                "OMP_NUM_THREADS": "1",
            },
            {"WORLD_SIZE": "2"},
        ),
        (
            {
                "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
                "OMP_NUM_THREADS": "4",
            },
            {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "4"},
        ),
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}),
        ({"OMPI_MCA_ess": "x"}, {"OMPI_MCA_ess": "x"}),  # of a user who is about to call mpirun
    ):  # fmt: skip
        with subtests.test(environ=environ, left=left):
            allowed = os.sched_getaffinity(0)
            variables = dict(environ)
            take_over_job(variables)
            assert variables == left
            os.sched_setaffinity(0, allowed)


def test_processes_on_several_nodes_are_refused_unless_the_hosts_are_known(subtests: pytest.Subtests) -> None:
    for environ, remedy in (
        (
            {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "without mpirun, with --hostfile FILE",
        ),
        ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "without torchrun, with --hostfile FILE"),
        ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_SIZE": "8"}, "without deepspeed, with --hostfile FILE"),
    ):
        with subtests.test(environ=environ, remedy=remedy):
            with pytest.raises(UsageError, match=f"on several nodes.*{remedy}"):
                take_over_job(dict(environ))
            allowed = os.sched_getaffinity(0)
            take_over_job(dict(environ), has_hosts=True)
            take_over_job({**environ, "SLURM_JOB_ID": "1"})
            os.sched_setaffinity(0, allowed)


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]"}


# ------------------------------------------------------------------ the nodes of a Slurm job


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-3]" ] && echo "node1 node2 node3"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("scontrol")
def test_every_node_has_its_tasks() -> None:
    for tasks, counts in (("", [1, 1, 1]), ("2(x3)", [2, 2, 2]), ("8,2(x2)", [8, 2, 2]), ("4", [1, 1, 1])):
        names = {**JOB, "SLURM_TASKS_PER_NODE": tasks}
        assert tasks_of_nodes(names) == dict(zip(["node1", "node2", "node3"], counts, strict=True))
    assert tasks_of_nodes({}) == tasks_of_nodes({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node7"}) == {}


def test_without_scontrol_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match=r"nodes node\[1-3\].*put scontrol and srun on PATH"):
        tasks_of_nodes(JOB)


def test_what_scontrol_says_when_it_fails_is_told(scontrol: None, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'scontrol: error: no controller' >&2; exit 1\n")
    with pytest.raises(UsageError, match=r"names: scontrol: error: no controller \(see whether sinfo answers, or"):
        tasks_of_nodes(JOB)
