"""Warm launch: the ranks of each trial are forked from one server that has loaded everything.

The server is the standard library's ``multiprocessing`` forkserver with ``worker.preload`` in its
preload list. It must never touch a GPU; a probe proves that before the first trial.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from ..config.spec import Trial
from ..records.schema import CRASHED, Outcome, TrialRecord
from ..system import processes
from . import Launcher
from .monitor import Limits, ProgressCallback
from .scratch import temporary_folder
from .trial import run_trial

_PRELOAD = "ds_bench.worker.preload"
_RANK = "ds_bench.worker.rank"


_STARTS = 3
"""How often a trial is started anew because the server died before it had begun."""


class _ServerDiedError(Exception):
    """The server went away while it was asked to fork a trial's leader."""


class WarmLauncher:
    """Single node. ``environment`` is fixed for the server's life: it is read when libraries load.

    A server that is killed is started and proven anew before the next trial. Where that fails, trials go through
    ``otherwise``, with a caveat; without one they are Crashed.
    """

    def __init__(self, environment: Mapping[str, str], limits: Limits, otherwise: Launcher | None = None) -> None:
        self._environment = {**environment, "DS_BENCH_PARENT": str(os.getpid())}
        self._limits = limits
        self._otherwise = otherwise
        self._context = multiprocessing.get_context("forkserver")
        self._server: int | None = None
        # multiprocessing replaces its helper process wherever it finds it killed, with a warning for developers.
        warnings.filterwarnings("ignore", "resource_tracker: process died unexpectedly", UserWarning)

    def prepare(self, timeout_seconds: float = 300.0) -> str | None:
        """Starts the server, once more where it dies while it loads.

        Returns None when ranks may be forked from it, else the reason why not.
        """
        earlier = processes.descendants()
        try:
            try:
                return self._probe(timeout_seconds)
            except (EOFError, OSError):
                _forget_server()
                return self._probe(timeout_seconds)
        except (EOFError, OSError) as error:
            return f"the preloaded server did not start ({type(error).__name__})"
        except BaseException:
            processes.end_tree(None, earlier=earlier, grace_seconds=1.0)
            raise

    def _probe(self, timeout_seconds: float) -> str | None:
        resource_tracker.ensure_running()
        self._context.set_forkserver_preload([_PRELOAD])
        answer = Path(temporary_folder()) / "probe.json"
        answer.unlink(missing_ok=True)
        with _variables(self._environment):
            probe = self._context.Process(target=_probe, args=(str(answer),), daemon=True)
            probe.start()
        probe.join(timeout_seconds)
        if probe.is_alive():
            probe.kill()
            return f"the preloaded server did not answer in {timeout_seconds:.0f} s"
        if not answer.exists():
            return f"the preloaded server failed (exit code {probe.exitcode})"
        told = json.loads(answer.read_text())
        self._server = told["server"]
        return None if told["reason"] is None else str(told["reason"])

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:
        """See ``Launcher``."""
        reason = "it died as often as it was started"
        for _ in range(_STARTS):
            # Before the trial, not in it: what runs before is left alone when the trial's processes are ended.
            resource_tracker.ensure_running()
            forbidden = None if self._server_lives() else self.prepare()
            if forbidden is not None:
                reason = forbidden
                if self._server_lives():  # it is there and may not be forked
                    break
                continue
            try:
                return run_trial(
                    trial,
                    folder,
                    listen,
                    limits=self._limits,
                    environment={},
                    start=self._start,
                    launch="warm",
                    server_lives=self._server_lives,
                )
            except _ServerDiedError:
                for file in folder.iterdir():  # of a leader that was forked all the same
                    file.unlink()
        return self._launch_otherwise(trial, folder, listen, f"the preloaded server may not be forked, {reason}")

    def _server_lives(self) -> bool:
        return self._server is not None and processes.is_alive(self._server)

    def _start(self, trial: Trial, folder: Path) -> _ForkedLeader:
        process = self._context.Process(target=_lead, args=(str(folder), trial.placement.num_gpus), daemon=False)
        try:
            if self._server_lives():  # else a new one would be started here, unproven and as a part of the trial
                process.start()
        except (EOFError, OSError) as error:
            raise _ServerDiedError from error
        if not self._server_lives():
            raise _ServerDiedError
        return _ForkedLeader(process)

    def _launch_otherwise(self, trial: Trial, folder: Path, listen: ProgressCallback, reason: str) -> TrialRecord:
        if self._otherwise is not None:
            found = self._otherwise.launch(trial, folder, listen)
            return replace(found, caveats=(*found.caveats, f"cold launch: {reason}"))
        outcome = Outcome(status=CRASHED, error=reason, details=reason)
        return TrialRecord(trial=trial, outcome=outcome, launch="warm", caveats=trial.caveats)


class _ForkedLeader:
    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    def wait(self, seconds: float) -> bool:
        self._process.join(seconds)
        return not self._process.is_alive()


@contextlib.contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """These variables set for a moment: a started server inherits them."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _forget_server() -> None:
    """Lets the standard library start its server anew.

    It asks by waitpid whether its server lives, and fails for good where the dead server was already collected, as the
    ending of a trial does with what it adopted (multiprocessing/forkserver.py, ``ensure_running``).
    """
    server: Any = importlib.import_module("multiprocessing.forkserver")._forkserver
    with contextlib.suppress(OSError, TypeError):
        os.close(server._forkserver_alive_fd)
    server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None


def _worker(name: str) -> object:
    return importlib.import_module(name)


def _probe(answer: str) -> None:
    """Runs in a process forked from the server: may it fork ranks?"""
    reason = None
    shared = _PRELOAD in sys.modules
    preload = _worker(_PRELOAD)
    files = getattr(preload, "GPU_FILES", None)
    missing = getattr(preload, "MISSING", [])
    if not shared:
        reason = "it did not preload anything"
    elif files:
        reason = f"it holds {', '.join(files)} open after preloading"
    elif getattr(preload, "CUDA_INITIALISED", False):
        reason = "the CUDA driver was initialised in it"
    elif "torch" in missing or "deepspeed" in missing or "ds_bench.worker.measure" in missing:
        reason = f"it could not import {', '.join(missing)}"
    elif os.environ.get("DS_ACCELERATOR") != "cpu":
        torch = _worker("torch")
        if torch.cuda._is_in_bad_fork():  # type: ignore[attr-defined]
            reason = "CUDA was initialised in it"
    Path(answer).write_text(json.dumps({"reason": reason, "server": os.getppid()}))


def _lead(folder: str, world_size: int) -> None:
    """Runs in a process forked from the server: becomes the leader of a trial."""
    from .leader import lead_forked_ranks

    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork beside an idle BLAS thread

    def run_rank(path: Path, rank: int, size: int) -> int:
        worker = _worker(_RANK)
        code: int = worker.run(path, rank=rank, local_rank=rank, world_size=size)  # type: ignore[attr-defined]
        return code

    lead_forked_ranks(Path(folder), world_size, run_rank)
