"""Warm launch: the ranks of each trial are forked from one server that has loaded everything.

The server is the forkserver of the standard library's ``multiprocessing``, with ``worker.preload`` in its preload list.
It must never use a GPU, or its forks could not; a probe checks this before the first trial.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from ..config.spec import Placement, Trial
from ..errors import UsageError
from ..records.schema import CRASHED, Outcome, TrialRecord
from ..system import gpu_state, processes
from . import Launcher, ProgressCallback
from .gpu_monitor import GpuMonitoringLauncher
from .host_connections import Hosts
from .leader import lead_forked_ranks
from .rank_environment import thread_variables
from .remote_trial import RemoteTrial
from .scratch import temporary_folder
from .trial import DeepSpeedLauncher, Leader, run_trial
from .trial_watcher import Limits

_PRELOAD = "ds_bench.worker.preload"
_MAX_STARTS = 3
"""Attempts at a trial if the server dies before the trial has begun."""

_forwarded_to: dict[int | None, Mapping[str, str]] = {}
"""Process id of a server → the variables from ``--env`` that it was started with."""


class _ServerDiedError(Exception):
    """The server ended before it had forked a trial's leader."""


class WarmLauncher:
    """Launches trials on a single node. ``environment`` is set for the life of the server; libraries read it once.

    A server that was killed is started and probed again before the next trial. If that fails, ``otherwise`` launches
    the trial, which gets a caveat; without ``otherwise`` the trial is Crashed.
    """

    def __init__(self, environment: Mapping[str, str], limits: Limits, otherwise: Launcher | None = None) -> None:
        self._environment = _with_parent(environment)
        self._limits = limits
        self._otherwise = otherwise
        self._context = multiprocessing.get_context("forkserver")
        self._server_pid: int | None = None
        # multiprocessing replaces a killed helper process, with a warning meant for developers.
        warnings.filterwarnings("ignore", "resource_tracker: process died unexpectedly", UserWarning)

    def prepare(self, timeout_seconds: float = 300.0) -> str | None:
        """Start the server, and once more if it dies while loading.

        Return None if ranks can be forked from it, otherwise why not.
        """
        earlier = processes.descendants() - {_server()._forkserver_pid}
        try:
            try:
                return self._probe_server(timeout_seconds)
            except (EOFError, OSError):
                _forget_server()
                return self._probe_server(timeout_seconds)
        except (EOFError, OSError) as error:
            return f"the preloaded server did not start ({type(error).__name__})"
        except BaseException:
            # An interrupted start must not leave a server that is still loading.
            processes.end_tree(None, earlier=earlier, grace_seconds=1.0)
            _forget_server()
            raise

    def _probe_server(self, timeout_seconds: float) -> str | None:
        result_file = Path(temporary_folder()) / "probe.json"
        # The answer of an earlier server must not count.
        result_file.unlink(missing_ok=True)
        start_server(self._environment)
        with _set_variables(self._environment), _without_main():  # in case it has to be started again here
            probe = self._context.Process(target=_write_probe_result, args=(str(result_file),), daemon=True)
            probe.start()
        probe.join(timeout_seconds)
        if probe.is_alive():
            probe.kill()
            return f"the preloaded server did not answer within {timeout_seconds:.0f} s"
        if not result_file.exists():
            return f"the preloaded server failed (exit code {probe.exitcode})"
        result = json.loads(result_file.read_text())
        self._server_pid = result["server"]
        return None if result["reason"] is None else str(result["reason"])

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:
        """See ``Launcher``."""
        reason = "it died every time it was started"
        own = _forwarded(self._environment, trial.placement)
        for _ in range(_MAX_STARTS):
            # Before the trial begins, because ending a trial spares processes that ran before it.
            _ensure_tracker()
            if self._server_is_alive() and _forwarded_to.get(self._server_pid, own) != own:
                # An earlier run in this process started it with different --env variables, which libraries have read.
                _forget_server()
                self._server_pid = None
            forbidden = None if self._server_is_alive() else self.prepare()
            if forbidden is not None:
                reason = forbidden
                if self._server_is_alive():  # and will not become safe
                    break
                continue
            _forwarded_to[self._server_pid] = own
            try:
                return run_trial(
                    trial,
                    folder,
                    listen,
                    limits=self._limits,
                    environment={**thread_variables(trial.placement, os.environ), **own},
                    start=self._start,
                    launch="warm",
                    server_is_alive=self._server_is_alive,
                )
            except _ServerDiedError:
                for file in folder.iterdir():  # left by a leader that was forked before the server died
                    file.unlink()
        reason = f"the preloaded server cannot be forked: {reason}"
        if self._otherwise is not None:
            record = self._otherwise.launch(trial, folder, listen)
            return replace(record, caveats=(*record.caveats, f"cold launch: {reason}"))
        outcome = Outcome(status=CRASHED, error=reason, details=reason)
        return TrialRecord(trial=trial, outcome=outcome, launch="warm", caveats=trial.caveats)

    def _server_is_alive(self) -> bool:
        pid = self._server_pid
        # If it was killed together with its ranks, it may be the last to disappear.
        return pid is not None and processes.is_alive(pid) and not processes.is_ending(pid)

    def _start(self, trial: Trial, folder: Path, _remote: RemoteTrial | None) -> Leader:
        # No daemon: multiprocessing lets neither a daemon nor the ranks forked from one start processes.
        process = self._context.Process(target=lead_forked_ranks, args=(folder, trial.placement.num_gpus), daemon=False)
        try:
            # Without a server multiprocessing would start one here, unprobed and as part of the trial.
            if self._server_is_alive():
                with _without_main():
                    process.start()
        except (EOFError, OSError) as error:
            raise _ServerDiedError from error
        if not self._server_is_alive():
            raise _ServerDiedError

        def wait(seconds: float) -> bool:
            process.join(seconds)
            return not process.is_alive()

        return Leader(process.pid or 0, wait)


def start_server(environment: Mapping[str, str], placement: Placement | None = None) -> None:
    """Start the server unless it is running. It loads in the background; :meth:`WarmLauncher.prepare` waits for it.

    ``environment``: as for :class:`WarmLauncher`. ``placement``: of the trials. Raises OSError if it cannot be started.
    """
    server = _server()
    earlier = server._forkserver_pid
    _ensure_tracker()
    server.set_forkserver_preload([__name__, _PRELOAD])
    with contextlib.ExitStack() as stack:
        stack.enter_context(_set_variables(_with_parent(environment)))
        with contextlib.suppress(ValueError):  # not in the main thread
            # The server inherits SIG_IGN. Ctrl-C reaches all processes of a terminal, and this one ends the server.
            stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
        server.ensure_running()
    if placement is not None and server._forkserver_pid != earlier:
        _forwarded_to[server._forkserver_pid] = _forwarded(environment, placement)


def _forwarded(environment: Mapping[str, str], placement: Placement) -> dict[str, str]:
    return {name: environment[name] for name in placement.forwarded_variables if name in environment}


def _with_parent(environment: Mapping[str, str]) -> dict[str, str]:
    """Add this process's id: the server notices if its parent died too early for ``die_with_parent`` (preload.py)."""
    return {**environment, "DS_BENCH_PARENT": str(os.getpid())}


def _server() -> Any:
    return importlib.import_module("multiprocessing.forkserver")._forkserver


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep processes started in this context from running the user's program again.

    multiprocessing imports the file of ``__main__`` in each process (multiprocessing/spawn.py, get_preparation_data). A
    program without the guard ``if __name__ == "__main__"`` would start its run again there.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    hidden = {name: main[name] for name in main.keys() & {"__file__", "__spec__"}}
    main.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        main.update(hidden)


def _ensure_tracker() -> None:
    """Start multiprocessing's helper process, which removes the semaphores of killed ranks, with its warnings off."""
    with _set_variables({"PYTHONWARNINGS": "ignore::UserWarning"}):
        resource_tracker.ensure_running()


@contextlib.contextmanager
def _set_variables(environment: Mapping[str, str]) -> Iterator[None]:
    before = os.environ.copy()
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in environment:
            os.environ.pop(name, None)
        os.environ.update(before)


def _forget_server() -> None:
    """Make the standard library start its server again.

    It checks its server with waitpid, which raises from then on if the dead server was reaped elsewhere, as happens to
    orphans at the end of a trial (multiprocessing/forkserver.py, ensure_running).
    """
    server = _server()
    with contextlib.suppress(OSError, TypeError):
        os.close(server._forkserver_alive_fd)
    server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None


def _write_probe_result(result_file: str) -> None:
    """Write why ranks cannot be forked from the server, or None. Runs in a process forked from it."""
    reason = None
    is_preloaded = _PRELOAD in sys.modules
    preload = importlib.import_module(_PRELOAD)
    gpu_files = getattr(preload, "GPU_FILES", None)
    missing = getattr(preload, "MISSING", [])
    if not is_preloaded:
        reason = "it did not preload anything"
    elif gpu_files:
        reason = f"it holds {', '.join(gpu_files)} open after preloading"
    elif getattr(preload, "CUDA_INITIALIZED", False):
        reason = "the CUDA driver was initialized in it"
    elif {"torch", "deepspeed", "ds_bench.worker.measure"} & set(missing):
        reason = f"it could not import {', '.join(missing)}"
    # torch marks the children of a process that used CUDA and denies it to them (torch/cuda/__init__.py).
    elif os.environ.get("DS_ACCELERATOR") != "cpu" and importlib.import_module("torch").cuda._is_in_bad_fork():
        reason = "CUDA was initialized in it"
    Path(result_file).write_text(json.dumps({"reason": reason, "server": os.getppid()}))


def forks_ranks(placement: Placement, trials: Sequence[Trial]) -> bool:
    """Return whether the ranks of these trials may be forked from a preloaded server."""
    is_script = any(trial.workload.script is not None for trial in trials)
    return placement.launcher != "deepspeed" and not is_script and not all(trial.not_launched for trial in trials)


def choose_launcher(
    requested: str,
    placement: Placement,
    variables: Mapping[str, str],
    limits: Limits,
    trials: Sequence[Trial],
    gpu_indices: tuple[int, ...],
    say: Callable[[str], None],
    hosts: Hosts | None = None,
) -> tuple[Launcher, str | None]:
    """Return the launcher for these trials, and a note if ``auto`` falls back to cold launch.

    ``requested``: ``auto``, ``warm`` or ``deepspeed``. ``gpu_indices``: NVML's indices of the visible GPUs. ``hosts``:
    those of a multi-host placement. Raises UsageError if ``warm`` is requested and not safe.
    """
    on_gpus = placement.accelerator == "cuda"
    devices = gpu_indices if on_gpus else None
    launcher: Launcher = DeepSpeedLauncher(variables, limits, device_indices=devices, hosts=hosts)
    note = None
    if forks_ranks(placement, trials):
        warm = WarmLauncher(variables, limits, otherwise=None if requested == "warm" else launcher)
        say("loading torch, DeepSpeed and Transformers once for all trials …")
        reason = warm.prepare()
        if reason is None:
            launcher = warm
        elif requested == "warm":
            raise UsageError(f"--launcher warm is not safe here: {reason}", remedy="use --launcher deepspeed")
        else:
            note = f"cold launch: the preloaded server cannot be forked: {reason}"
    if on_gpus:
        launcher = GpuMonitoringLauncher(launcher, gpu_state.read_gpus, gpu_indices, hosts=hosts)
    return launcher, note
