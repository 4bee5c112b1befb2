"""The leader of a trial: first process of the trial's session, parent of its ranks or its launcher.

It starts them, writes a line for each that ends, and ends when all have. When the program that
asked for the trial dies, it kills everything of the trial and removes its scratch files, so that
nothing is left on the card or the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ..records.rank_files import EXITS_FILE, LEADER_LOG, Assignment, RankExit, append_line
from ..system import processes
from .scratch import remove_scratch


def lead_forked_ranks(folder: Path, world_size: int, run_rank: Callable[[Path, int, int], int]) -> None:
    """Warm: called in a process forked from the preloaded server. Forks the ranks; never returns."""
    os.setsid()
    _become_leader(folder)
    ranks: dict[int, int | None] = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _run_forked_rank(folder, rank, world_size, run_rank)
        ranks[pid] = rank
    _wait_for(folder, ranks)
    os._exit(0)


def _run_forked_rank(folder: Path, rank: int, world_size: int, run_rank: Callable[[Path, int, int], int]) -> None:
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        processes.die_with_parent()
        code = run_rank(folder, rank, world_size)
    finally:
        os._exit(code)  # a forked rank must not run the server's exit handlers


def lead_command(folder: Path, command: list[str]) -> int:
    """Cold: runs a launcher's command and waits. Returns its code."""
    _become_leader(folder)
    environment = {**os.environ, processes.LEADER_VARIABLE: str(os.getpid())}
    child = subprocess.Popen(
        command,
        # With several nodes the launcher puts its folder first on PYTHONPATH (launcher/runner.py): were it the user's,
        # a random.py there would run in every rank.
        cwd=folder,
        stdin=subprocess.DEVNULL,
        env=environment,
        preexec_fn=processes.die_with_parent,
    )
    _wait_for(folder, {child.pid: None})
    return 0


def _become_leader(folder: Path) -> None:
    _redirect(folder / LEADER_LOG)
    processes.adopt_orphans()
    parent = os.getppid()

    def on_terminate(_number: int, _frame: object) -> None:
        # The asker ends a trial by signalling the group; alone, the leader must clear up itself.
        if os.getppid() != parent:
            _kill_and_clean_up(folder)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_terminate)
    processes.die_with_parent(signal.SIGTERM)


def _kill_and_clean_up(folder: Path) -> None:
    """Kills what is left of the trial, removes its scratch, ends."""
    try:
        for _ in range(100):
            left = (processes.descendants() | processes.session_members(os.getsid(0))) - {os.getpid()}
            if not left:
                break
            processes.send_signal(left, signal.SIGKILL)
            processes.reap(left)
            time.sleep(0.05)
        assignment = Assignment.load(folder)
        remove_scratch(assignment)
    finally:
        os._exit(1)


def _redirect(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.close(null)


def _wait_for(folder: Path, children: dict[int, int | None]) -> None:
    """Reaps until every one of ``children`` (pid → rank) has ended; adopted orphans are reaped on the way."""
    waiting = set(children)
    while waiting:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if pid not in waiting:
            continue
        waiting.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        ended = RankExit(
            rank=children[pid],
            pid=pid,
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            time=time.time(),
        )
        with contextlib.suppress(OSError):  # a full disk must not end the ranks that still train
            append_line(folder / EXITS_FILE, asdict(ended))


if __name__ == "__main__":
    sys.exit(lead_command(Path(sys.argv[1]), json.loads(sys.argv[2])))
