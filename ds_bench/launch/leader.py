"""The leader of a trial: first process of the trial's session, parent of its ranks or its launcher.

It starts them, writes a line for each that ends, and ends when all have ended. If the program that started the trial
dies, it kills every process of the trial and removes its scratch files, so that nothing is left on the GPU or the disk.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..records.rank_files import LEADER_LOG, Assignment, append_exit
from ..system import processes
from .scratch import remove_scratch


def start_leader(
    folder: Path, command: Sequence[str], environment: Mapping[str, str], working_folder: Path
) -> subprocess.Popen[bytes]:
    """Cold launch, in the program that starts the trial: run a command in ``working_folder`` as the child of a leader.

    ``environment``: all variables of the leader and the command.
    """
    with (folder / LEADER_LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ds_bench.launch.leader", str(folder), json.dumps(command), str(working_folder)],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )


def lead_forked_ranks(folder: Path, world_size: int) -> None:
    """Warm launch, in a process forked from the preloaded server: fork the ranks and wait. Never returns."""
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about a fork even if a BLAS thread is idle
    # In a session of its own, so that the run finds all ranks (processes.end_tree).
    os.setsid()
    _become_leader(folder)
    ranks: dict[int, int | None] = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                # A fork inherits handlers: SIGTERM must end a rank, not make it act as the leader.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                # Again in each rank: a fork does not inherit it (prctl(2), PR_SET_PDEATHSIG).
                processes.die_with_parent()
                run_rank = importlib.import_module("ds_bench.worker.rank").run
                code = run_rank(folder, rank=rank, local_rank=rank, world_size=world_size)
            finally:
                os._exit(code)  # a forked rank must not run the server's exit handlers
        ranks[pid] = rank
    wait_for_children(folder, ranks)
    os._exit(0)


def lead_command(folder: Path, command: list[str], working_folder: Path) -> int:
    """Cold launch: run a launcher's command and wait. Return the exit code."""
    _become_leader(folder)
    environment = {**os.environ, processes.LEADER_VARIABLE: str(os.getpid())}
    child = subprocess.Popen(
        command,
        # With several nodes the launcher puts its working folder first on PYTHONPATH (launcher/runner.py): if that were
        # the user's folder, a random.py in it would run in every rank.
        cwd=working_folder,
        stdin=subprocess.DEVNULL,
        env=environment,
        preexec_fn=processes.die_with_parent,
    )
    wait_for_children(folder, {child.pid: None})
    return 0


def _become_leader(folder: Path) -> None:
    try:
        processes.redirect_streams(folder / LEADER_LOG)
    except OSError:  # the folder was removed, or its disk is full: the parent finds out, and says so
        os._exit(1)
    processes.adopt_orphans()
    # Before the handler, which compares against it; the handler is set before die_with_parent requests the signal.
    parent = os.getppid()

    def on_terminate(_number: int, _frame: object) -> None:
        # The parent ends a trial by signalling its processes, and cleans up. Once it is dead, the leader must do both.
        if os.getppid() != parent:
            try:
                processes.end_led(os.getpid())
                remove_scratch(Assignment.load(folder))
            finally:
                os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_terminate)
    # Not SIGKILL: the leader has to end the ranks and remove files first.
    processes.die_with_parent(signal.SIGTERM)


def wait_for_children(folder: Path, children: Mapping[int, int | None]) -> None:
    """Wait until all ``children`` (process id → rank) have ended, and collect adopted orphans meanwhile."""
    waiting = dict(children)
    with contextlib.suppress(ChildProcessError):
        while waiting:
            # Any child: adopted orphans would stay zombies otherwise.
            pid, status = os.waitpid(-1, 0)
            if pid in waiting:
                append_exit(folder, waiting.pop(pid), pid, status)


if __name__ == "__main__":
    sys.exit(lead_command(Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])))
