"""Stands in for ``ds_bench.worker.preload``: a server without torch, whose ranks measure nothing or train forever.

Run as a program, it kills the server during, between and at the start of trials, and prints how each trial ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

from ds_bench.records.rank_files import HeartbeatWriter, rank_file, read_beat
from ds_bench.records.schema import TrialRecord

GPU_FILES: list[str] = []
MISSING: list[str] = []


def run(folder: Path, *, rank: int, local_rank: int, world_size: int) -> int:
    """A rank: beats once, then sleeps if the trial is called endless, else writes its file."""
    from tests.support import fakes

    HeartbeatWriter(folder, rank).beat("step", 1)
    if folder.name.startswith("endless"):
        time.sleep(1000)
    trial = fakes.trial(on=fakes.placement(num_gpus=world_size))
    rank_file(folder, rank).write_text(json.dumps(fakes.measured_file(fakes.measurement(trial, rank=rank))))
    return 0


def _processes(word: bytes) -> list[int]:
    from ds_bench.system import processes

    return [pid for pid in processes.descendants() if word in Path(f"/proc/{pid}/cmdline").read_bytes()]


def main(base: Path) -> None:
    from ds_bench.launch import Limits, warm_launcher
    from ds_bench.system import processes
    from tests.support import fakes

    warm_launcher._PRELOAD = "warm_stub"
    loads = base / "loads"
    loads.write_text("2")
    variables = {"DS_ACCELERATOR": "cpu", "DEATHS_WHILE_LOADING": str(loads)}
    launcher = warm_launcher.WarmLauncher(variables, Limits(kill_grace_seconds=1))
    refused = launcher.prepare()
    assert refused is not None
    assert refused.startswith("the preloaded server did not start (")
    loads.write_text("1")
    assert launcher.prepare() is None, "it is started again once"

    told: list[str] = []

    def launch(name: str, during: Callable[[], None] | None = None) -> TrialRecord:
        folder = base / name
        folder.mkdir()
        before = processes.descendants() - set(_processes(b"multiprocessing"))

        def act() -> None:
            while any(read_beat(folder, rank) is None for rank in range(2)):
                time.sleep(0.01)
            assert during is not None
            during()

        thread = threading.Thread(target=act, daemon=True)
        if during is not None:
            thread.start()
        record = launcher.launch(fakes.trial(on=fakes.placement(num_gpus=2)), folder, lambda _progress: None)
        assert processes.descendants() - set(_processes(b"multiprocessing")) <= before, "a process is left"
        told.append(record.outcome.status)
        return record

    def kill(word: bytes) -> None:
        # The server before its forks, whose process ids may be smaller, since they wrap around.
        victims = sorted(_processes(word), key=lambda pid: pid != launcher._server_pid)
        processes.send_signal(victims, signal.SIGKILL)
        while any(map(processes.is_alive, victims)):
            time.sleep(0.01)

    launch("first")
    launch("endless_1", lambda: kill(b"forkserver"))
    launch("endless_2", lambda: kill(b"multiprocessing"))
    launch("after")
    kill(b"multiprocessing")
    launch("killed_between")
    start = warm_launcher.WarmLauncher._start
    victims = iter([b"forkserver", b"forkserver", b"resource_tracker", b"forkserver", b"forkserver", b"forkserver"])

    def dying(self: warm_launcher.WarmLauncher, *arguments: object) -> object:
        kill(next(victims))
        return start(self, *arguments)  # type: ignore[arg-type]

    warm_launcher.WarmLauncher._start = dying  # type: ignore[assignment]
    launch("killed_as_it_is_asked")
    given_up = launch("killed_whenever_it_is_asked")
    print(json.dumps([*told, given_up.outcome.error]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
else:
    if (loads := Path(os.environ.get("DEATHS_WHILE_LOADING", os.devnull))).is_file():
        left = int(loads.read_text())
        loads.write_text(str(max(0, left - 1)))
        if left:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.modules["ds_bench.worker.preload"] = sys.modules[__name__]
    worker = types.ModuleType("ds_bench.worker.rank")
    worker.run = run  # type: ignore[attr-defined]
    sys.modules["ds_bench.worker.rank"] = worker
