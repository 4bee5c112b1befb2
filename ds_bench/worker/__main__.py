"""A rank started by a launcher, or by hand for debugging: ``python -m ds_bench.worker TRIAL_FOLDER``.

The launcher's RANK, LOCAL_RANK and WORLD_SIZE say which rank it is; without them it is rank 0 of 1. A failure is
written to the rank's file, and its message to standard error too.

On several hosts, where DS_BENCH_TRIAL is set, the rank is a child of this process, which records in ``exits.jsonl`` how
the rank ended, as the leader does on one host.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from ..records.rank_files import TRIAL_VARIABLE, append_exit, rank_file
from ..system.processes import die_with_leader, die_with_parent
from .rank import run


def main() -> int:
    die_with_parent()
    folder = Path(sys.argv[-1])
    if TRIAL_VARIABLE in os.environ:
        # Before torch is imported: neither its threads nor CUDA, once initialized, would survive the fork.
        watch_rank(folder, int(os.environ.get("RANK", "0")))
    else:
        die_with_leader()
    rank = int(os.environ.get("RANK", "0"))
    standard_error = os.dup(2)  # the rank redirects its own to a log
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
    """Continue as the rank in a child process. The parent records how the child ends, and ends the same way."""
    pid = os.fork()
    if pid == 0:
        # The child of a fork does not inherit this setting (prctl(2), PR_SET_PDEATHSIG).
        die_with_parent()
        return
    # Only after the fork, which would not copy the thread that this starts.
    die_with_leader()
    _, status = os.waitpid(pid, 0)
    append_exit(folder, rank, pid, status)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # so that the launcher sees the same signal
        with contextlib.suppress(OSError, ValueError):
            # Refused for SIGKILL, which has no handler to remove.
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # After a signal this is reached only if the signal did not end the process.
    os._exit(code if code >= 0 else 1)


if __name__ == "__main__":
    code = main()
    # Libraries' exit handlers have been seen to abort the process after its work was done, which would make the
    # launcher end the other ranks.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
