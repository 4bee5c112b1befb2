"""The job that this process is part of, if a launcher, Open MPI, MPICH or Slurm's srun started it as one of several.

One of these processes runs the comparison and starts the ranks itself; the others end at once. Sources: torchrun's
environment variables, Open MPI's ``mpirun(1)``, "Output environment variables" in ``srun(1)`` and ``sbatch(1)``.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, MutableMapping

from ..errors import UsageError

_TASKS = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
_SCONTROL_SECONDS = 30.0
_NO_STEP = 0xFFFFFFF0
"""Numbers from here on belong to a batch script or to salloc's shell, not to a step of srun (slurm.h)."""
_OF_A_LAUNCHER = (
    "RANK", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
    # With TORCHELASTIC_USE_AGENT_STORE ranks wait for a store of torchrun's, which theirs is not.
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "DS_BENCH_SECRET",
)  # fmt: skip
_OF_MPI = ("OMPI_", "PMIX_", "PMI_", "HYDI_", "MPI_LOCAL")
_SET_BY_USERS = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_")
_SET_BY_MPIRUN = (
    "OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_initial_wdir", "OMPI_MCA_shmem_RUNTIME",
    "OMPI_MCA_mpi_oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe",
)  # fmt: skip
_OF_A_TASK = (
    "SLURM_CPU_BIND", "SLURM_DISTRIBUTION", "SLURM_GTIDS", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_LOCALID",
    "SLURM_MPI_TYPE", "SLURM_NODEID", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_PMI", "SLURM_PRIO_PROCESS",
    "SLURM_PROCID", "SLURM_SRUN_COMM", "SLURM_STEP", "SLURM_TASK_PID", "SLURM_UMASK",
)  # fmt: skip
"""Prefixes of Slurm's variables for one task, and of those that srun would pass on to further tasks."""


def rank_of_process(environ: Mapping[str, str]) -> int:
    """The number of this process in its job; 0 if it was started on its own."""
    names = ["RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"]
    if is_task_of_slurm(environ):
        names.append("SLURM_PROCID")
    rank = next((environ[name] for name in names if environ.get(name)), "0")
    return int(rank) if rank.isdecimal() else 0


def is_task_of_slurm(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, or one above it; not so in a batch script or in salloc's shell."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _NO_STEP


def task_counts(text: str) -> list[int]:
    """The number of tasks of each node from Slurm's form: ``2(x3),1`` is 2, 2, 2, 1."""
    return [int(tasks) for tasks, times in _TASKS.findall(text) for _ in range(int(times or 1))]


def tasks_of_nodes(environ: Mapping[str, str]) -> dict[str, int]:
    """Node → number of tasks that Slurm has for it, in the order of the job; empty outside of jobs and on one node.

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
        of_scontrol = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
        said = " ".join((of_scontrol or str(error)).split())[:400]
        mend = "see whether sinfo answers"
        if isinstance(error, FileNotFoundError):
            mend = "put scontrol and srun on PATH, start the command by srun on every node (docs/many_nodes.md)"
        raise UsageError(
            f"this is a Slurm job of the nodes {nodes}, but scontrol does not list their names: {said}",
            remedy=f"{mend}, or start one process on one node: srun --nodes=1 --ntasks=1",
        ) from None
    names = done.stdout.split()
    counts = task_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    if len(counts) != len(names):
        counts = [1] * len(names)
    return dict(zip(names, counts, strict=True)) if len(names) > 1 else {}


def take_over_job(environ: MutableMapping[str, str], *, has_hosts: bool = False) -> None:
    """Make the first process of a job the one that starts the ranks.

    The number of processes becomes WORLD_SIZE, the requested number of ranks. Variables that make a library take this
    process, or one that it starts, for a rank or a task are removed from ``environ``; Slurm's allocation stays. Raises
    UsageError for processes on several nodes, unless a hostfile (``has_hosts``) or Slurm names the hosts.
    """
    if not has_hosts and "SLURM_JOB_ID" not in environ:
        for total, here, what in (
            ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "torchrun"),
            ("WORLD_SIZE", "LOCAL_SIZE", "deepspeed"),
            ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun"),
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
        size = None  # one process in each pod, which has all GPUs there
    if not launched:
        size = environ.get("OMPI_COMM_WORLD_SIZE")
        if size not in (None, "1"):
            # mpirun binds each process to a core or a socket of its own; this one starts the ranks of all of them.
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
        size = size or (environ.get("SLURM_NTASKS") if task else environ.get("PMI_SIZE"))
        if task and size == environ.get("SLURM_STEP_NUM_NODES", "1"):
            size = None  # one task of Slurm on a node is the usual way to have all of its GPUs
    if size:
        environ["WORLD_SIZE"] = size
    if task and "SLURM_STEP_NODELIST" in environ:  # a step may have fewer nodes than the job
        environ["SLURM_JOB_NODELIST"] = environ["SLURM_STEP_NODELIST"]
    of_torchrun = "TORCHELASTIC_RUN_ID" in environ and environ.get("LOCAL_WORLD_SIZE", "1") != "1"
    if of_torchrun and environ.get("OMP_NUM_THREADS") == "1":
        # torchrun's own choice for several processes on a node (torch/distributed/run.py), which makes CPU Adam slow.
        del environ["OMP_NUM_THREADS"]
    by_mpirun = "OMPI_COMM_WORLD_SIZE" in environ
    for name in list(environ):
        of_user = name.startswith(_SET_BY_USERS) and not (by_mpirun and name.startswith(_SET_BY_MPIRUN))
        if name in _OF_A_LAUNCHER or name.startswith(_OF_A_TASK) or (name.startswith(_OF_MPI) and not of_user):
            del environ[name]
