"""A rank started by a launcher, or by hand for debugging: ``python -m ds_bench.worker TRIAL_FOLDER``.

The launcher's RANK, LOCAL_RANK and WORLD_SIZE say which rank, or the variables of Open MPI, MPICH, Intel MPI or Slurm;
without any it is rank 0 of 1. A failure is in the rank's file, and its message on standard error too.

On several hosts there is no argument: DS_BENCH_TRIAL names the trial's private folder on the host. The rank
is then a child of this process, which adds to ``exits.jsonl`` how it ended, as the leader does on one host.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from ..records.rank_files import TRIAL_VARIABLE, append_exit, find_host_folder, rank_file
from ..system.processes import die_with_leader, die_with_parent
from .rank import run

_RANK_VARIABLES = {
    "RANK": ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "LOCAL_RANK": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "WORLD_SIZE": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"),
}
"""Variable that DeepSpeed reads → those that launchers set, first match wins."""


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, LOCAL_RANK and WORLD_SIZE, each where a launcher has set one of its names for it."""
    found = {name: [environ[each] for each in names if each in environ] for name, names in _RANK_VARIABLES.items()}
    return {name: values[0] for name, values in found.items() if values}


def main() -> int:
    die_with_parent()
    trial = os.environ.get(TRIAL_VARIABLE)
    if len(sys.argv) == 1 and trial is not None:
        # Before RANK is read: launchers set other names, and DeepSpeed and the lines below read these.
        os.environ.update(rank_variables(os.environ))
        folder = find_host_folder(trial)
        # Here, before torch is imported: its threads and a use of CUDA would not survive the fork.
        watch_rank(folder, int(os.environ.get("RANK", "0")))
    else:
        die_with_leader()
        folder = Path(sys.argv[-1])
    rank = int(os.environ.get("RANK", "0"))
    standard_error = os.dup(2)  # the rank sends its own to a log
    code = run(
        folder,
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    if code != 0:
        failure = json.loads(rank_file(folder, rank).read_text(encoding="utf-8"))["failure"]
        os.write(standard_error, f"rank {rank}: {failure['error_class']}: {failure['message']}\n".encode())
    return code


def watch_rank(folder: Path, rank: int) -> None:
    """Goes on as the rank in a child process; the parent notes the child's end, ends the same way and never returns."""
    pid = os.fork()
    if pid == 0:
        # The child of a fork does not inherit the request (prctl(2), PR_SET_PDEATHSIG).
        die_with_parent()
        return
    # Only after the fork, which would not copy the thread that this starts.
    die_with_leader()
    _, status = os.waitpid(pid, 0)
    append_exit(folder, rank, pid, status)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # so that the launcher sees the same end
        with contextlib.suppress(OSError, ValueError):
            # Refused for SIGKILL, which needs no handler to be removed.
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # After a signal this is reached only where the signal did not end the process.
    os._exit(code if code >= 0 else 1)


if __name__ == "__main__":
    code = main()
    # Libraries' exit handlers have been seen to abort the process after its work was done, which would make the
    # launcher end the other ranks.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
