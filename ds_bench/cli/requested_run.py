"""A run that another program asks for (``ds_bench.run``), in a process of its own.

That program may hold threads, signal handlers, child processes and GPU memory, which a run must not touch. It writes a
request to standard input: the arguments of the command ``run``, its process id, and whether to tell what happens on
standard error. The answer is one line of JSON on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DsBenchError, UsageError
from ..system import job, launched_nodes, processes, terminal
from .commands import build_parser
from .run import run_command


def main() -> int:
    """Reads the request, runs it and writes the answer. Returns 0."""
    # The request ends with the end of file, so the other program closes its side after it.
    request = json.load(sys.stdin)
    # SIGTERM rather than SIGKILL: on it a run ends its ranks and saves its rows.
    processes.die_with_parent(signal.SIGTERM)
    if os.getppid() != request["parent"]:  # it ended before this line
        return 0
    answer = run_arguments(request["arguments"], quiet=not request["progress"])
    # The program that asked may be gone by now; the rows are in the run's folder.
    with contextlib.suppress(BrokenPipeError):
        terminal.print_json(json.dumps(answer))
        sys.stdout.flush()
    return 0


def run_arguments(arguments: Sequence[str], *, quiet: bool) -> dict[str, Any]:
    """Runs the command ``run`` without its report.

    Returns its exit ``code`` and the run's ``folder``, or the ``error`` that it raised.
    """
    folders: list[Path] = []
    try:
        # Each process of a launcher would call ds_bench.run, and each would start a comparison of its own.
        if job.rank_of_process(os.environ) != 0 or launched_nodes.find_nodes(os.environ) is not None:
            raise UsageError(
                "ds_bench.run was called by a launcher's rank other than the first, or on several nodes",
                remedy="start this program without a launcher: a run starts its ranks itself",
            )
        values = build_parser().parse_args(["run", *arguments])
        values.quiet = quiet
        # Standard output is for the answer alone.
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            answer: dict[str, Any] = {"code": run_command(values, folders.append)}
    except DsBenchError as error:
        lines = getattr(error, "__notes__", [])
        kind = type(error).__name__
        answer = {"error": {"kind": kind, "problem": error.problem, "remedy": error.remedy, "notes": lines}}
    except OSError as error:  # such as a full disk; what was written before stays
        answer = {"error": {"kind": "DsBenchError", "problem": str(error), "remedy": "", "notes": []}}
    except KeyboardInterrupt:
        answer = {"code": 130}
    return {**answer, "folder": str(folders[0].absolute()) if folders else None}


if __name__ == "__main__":
    sys.exit(main())
