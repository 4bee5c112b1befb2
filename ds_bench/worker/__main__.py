"""A rank started by a launcher, or by hand for debugging: ``python -m ds_bench.worker TRIAL_FOLDER``.

The launcher's RANK, LOCAL_RANK and WORLD_SIZE say which rank; without them it is rank 0 of 1. A failure is in the
rank's file, and its message on standard error too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ..records.rank_files import rank_file
from ..system.processes import die_with_leader, die_with_parent
from .rank import run


def main() -> int:
    die_with_parent()
    die_with_leader()
    folder, rank = Path(sys.argv[-1]), int(os.environ.get("RANK", "0"))
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


if __name__ == "__main__":
    code = main()
    # Libraries' exit handlers have been seen to abort the process after its work was done, which would make the
    # launcher end the other ranks.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
