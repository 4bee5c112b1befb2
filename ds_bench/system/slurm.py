"""The nodes of the Slurm job that this process is part of."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from ..errors import UsageError

_TASKS = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
_SECONDS = 30.0


def tasks_of_nodes(environ: Mapping[str, str]) -> dict[str, int]:
    """Node → number of tasks that Slurm has for it, in the order of the job; empty outside of jobs and on one node.

    Raises UsageError if Slurm does not tell the names.
    """
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    # The list of a single node has neither brackets nor commas.
    if "SLURM_JOB_ID" not in environ or not re.search(r"[\[,]", nodes):
        return {}
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        of_scontrol = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
        said = " ".join((of_scontrol or str(error)).split())[:400]
        mend = "put scontrol and srun on PATH" if isinstance(error, FileNotFoundError) else "see whether sinfo answers"
        raise UsageError(
            f"this is a Slurm job of the nodes {nodes}, but scontrol does not tell their names: {said}",
            remedy=f"{mend}, or start one process on one node: srun --nodes=1 --ntasks=1",
        ) from None
    names = done.stdout.split()
    counts: list[int] = []
    for tasks, times in _TASKS.findall(environ.get("SLURM_TASKS_PER_NODE", "")):  # such as 2(x3),1
        counts += [int(tasks)] * int(times or 1)
    if len(counts) != len(names):
        counts = [1] * len(names)
    return dict(zip(names, counts, strict=True)) if len(names) > 1 else {}
