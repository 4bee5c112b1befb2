"""Warm launch: the ranks of each trial are forked from one server that has loaded everything.

The server is the ``multiprocessing`` forkserver of the standard library with ``worker.preload`` in its preload list. It
must never use a GPU, which its forks could then not use: a probe proves that before the first trial.

On GPUs, whichever launcher runs the trials, another one reads clocks and free memory: see `GpuMonitoringLauncher`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from ..config.caveats import Caveat, CaveatKind
from ..config.spec import Placement, Trial
from ..errors import UsageError
from ..records.schema import CRASHED, GpuWindow, Outcome, TrialRecord
from ..system import gpu_state, processes
from ..system.host_memory import available_host_bytes
from ..units import format_bytes
from . import Launcher, Progress, ProgressCallback
from .host_connections import HostError, Hosts
from .leader import lead_forked_ranks
from .rank_environment import thread_variables
from .remote_trial import RemoteTrial
from .scratch import temporary_folder
from .trial import DeepSpeedLauncher, Leader, run_trial
from .trial_watcher import Limits

_PRELOAD = "ds_bench.worker.preload"
_MAX_STARTS = 3
"""How often a trial is started if the server dies before the trial has begun."""


_forwarded_to: dict[int | None, Mapping[str, str]] = {}
"""Process id of a server of this process → the variables of ``--env`` that it was started with."""


class _ServerDiedError(Exception):
    """The server ended before it had forked a trial's leader."""


class WarmLauncher:
    """Launches trials on a single node. ``environment`` is set for the life of the server; libraries read it once.

    A server that was killed is started and probed again before the next trial. If that fails, trials go through
    ``otherwise``, with a caveat; without it they are Crashed.
    """

    def __init__(self, environment: Mapping[str, str], limits: Limits, otherwise: Launcher | None = None) -> None:
        # The server ends itself if this process died before it could ask to die with it (worker/preload.py).
        self._environment = {**environment, "DS_BENCH_PARENT": str(os.getpid())}
        self._limits = limits
        self._otherwise = otherwise
        self._context = multiprocessing.get_context("forkserver")
        self._server_pid: int | None = None
        # multiprocessing replaces its helper process where it finds it killed, with a warning meant for developers.
        warnings.filterwarnings("ignore", "resource_tracker: process died unexpectedly", UserWarning)

    def prepare(self, timeout_seconds: float = 300.0) -> str | None:
        """Start the server, a second time if it dies while it loads.

        Return None if ranks can be forked from it, else the reason why not.
        """
        earlier = processes.descendants()
        try:
            try:
                return self._probe_server(timeout_seconds)
            except (EOFError, OSError):
                _forget_server()
                return self._probe_server(timeout_seconds)
        except (EOFError, OSError) as error:
            return f"the preloaded server did not start ({type(error).__name__})"
        except BaseException:
            # An interrupted start must not leave a server that goes on loading.
            processes.end_tree(None, earlier=earlier, grace_seconds=1.0)
            raise

    def _probe_server(self, timeout_seconds: float) -> str | None:
        _ensure_tracker()
        self._context.set_forkserver_preload([__name__, _PRELOAD])
        result_file = Path(temporary_folder()) / "probe.json"
        # The answer of an earlier server does not count.
        result_file.unlink(missing_ok=True)
        with _set_variables(self._environment):  # the server inherits them
            probe = self._context.Process(target=_write_probe_result, args=(str(result_file),), daemon=True)
            with _without_main():
                probe.start()
        probe.join(timeout_seconds)
        if probe.is_alive():
            probe.kill()
            return f"the preloaded server did not answer in {timeout_seconds:.0f} s"
        if not result_file.exists():
            return f"the preloaded server failed (exit code {probe.exitcode})"
        result = json.loads(result_file.read_text())
        self._server_pid = result["server"]
        return None if result["reason"] is None else str(result["reason"])

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:
        """See ``Launcher``."""
        reason = "it died as often as it was started"
        own = {
            name: self._environment[name] for name in trial.placement.forwarded_variables if name in self._environment
        }
        for _ in range(_MAX_STARTS):
            # Before the trial, not in it: ending a trial spares what ran before it.
            _ensure_tracker()
            if self._server_is_alive() and _forwarded_to.get(self._server_pid, own) != own:
                # An earlier run of this process started it with other variables of --env, which libraries have read.
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
                for file in folder.iterdir():  # of a leader that was forked before the server died
                    file.unlink()
        reason = f"the preloaded server cannot be forked: {reason}"
        if self._otherwise is not None:
            record = self._otherwise.launch(trial, folder, listen)
            return replace(record, caveats=(*record.caveats, f"cold launch: {reason}"))
        outcome = Outcome(status=CRASHED, error=reason, details=reason)
        return TrialRecord(trial=trial, outcome=outcome, launch="warm", caveats=trial.caveats)

    def _server_is_alive(self) -> bool:
        pid = self._server_pid
        # Killed together with its ranks, it may be the last to be gone.
        return pid is not None and processes.is_alive(pid) and not processes.is_ending(pid)

    def _start(self, trial: Trial, folder: Path, _remote: RemoteTrial | None) -> Leader:
        # No daemon: multiprocessing lets neither a daemon nor the ranks forked from one start processes.
        process = self._context.Process(target=lead_forked_ranks, args=(folder, trial.placement.num_gpus), daemon=False)
        try:
            # Without a server multiprocessing would start one here: not probed, and as a part of the trial.
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


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Within this context a started process does not run the user's program again.

    multiprocessing imports the file of ``__main__`` in each process (multiprocessing/spawn.py, get_preparation_data). A
    program without the guard ``if __name__ == "__main__"`` would start its run anew there.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    hidden = {name: main[name] for name in main.keys() & {"__file__", "__spec__"}}
    main.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        main.update(hidden)


def _ensure_tracker() -> None:
    """Start multiprocessing's helper process, which removes the semaphores of killed ranks, without its warning."""
    with _set_variables({"PYTHONWARNINGS": "ignore::UserWarning"}):
        resource_tracker.ensure_running()


@contextlib.contextmanager
def _set_variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Set these variables within this context."""
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

    It asks by waitpid whether its server lives, and raises from then on if the dead server was collected elsewhere, as
    the end of a trial does with the orphans that it adopts (multiprocessing/forkserver.py, ensure_running).
    """
    server: Any = importlib.import_module("multiprocessing.forkserver")._forkserver
    with contextlib.suppress(OSError, TypeError):
        os.close(server._forkserver_alive_fd)
    server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None


def _write_probe_result(result_file: str) -> None:
    """Write why no rank can be forked from the server, or None. Runs in a process forked from it."""
    reason = None
    is_preloaded = _PRELOAD in sys.modules
    preload = importlib.import_module(_PRELOAD)
    gpu_files = getattr(preload, "GPU_FILES", None)
    missing = getattr(preload, "MISSING", [])
    if not is_preloaded:
        reason = "it did not preload anything"
    elif gpu_files:
        reason = f"it holds {', '.join(gpu_files)} open after preloading"
    elif getattr(preload, "CUDA_INITIALISED", False):
        reason = "the CUDA driver was initialised in it"
    elif {"torch", "deepspeed", "ds_bench.worker.measure"} & set(missing):
        reason = f"it could not import {', '.join(missing)}"
    # torch marks the children of a process that has used CUDA, and refuses it to them (torch/cuda/__init__.py).
    elif os.environ.get("DS_ACCELERATOR") != "cpu" and importlib.import_module("torch").cuda._is_in_bad_fork():
        reason = "CUDA was initialised in it"
    Path(result_file).write_text(json.dumps({"reason": reason, "server": os.getppid()}))


# ------------------------------------------------------------------ GPUs

_TOLERANCE_BYTES = 256 * 2**20
"""Normal variation of free GPU memory; a larger loss means that a process holds some."""
_HOST_TOLERANCE_BYTES = 2 * 2**30
"""The same for host memory, which other programs use too."""
_POLL_SECONDS = 0.2
_READ_SECONDS = 5.0
_SAMPLE_SECONDS = 1.0
"""Time between two readings of the GPUs, and the shortest time over which energy gives a mean power."""

_Gpu = tuple[int, str | None]
"""NVML's index, and the host on several hosts."""
_Sample = tuple[float, dict[_Gpu, gpu_state.GpuFacts]]
"""Monotonic time in seconds, and the GPUs of the trial."""


def _summarise(gpu: _Gpu, samples: Sequence[_Sample]) -> GpuWindow:
    """Return what one GPU did between the first and the last sample."""
    seen = [(at, gpus[gpu]) for at, gpus in samples if gpu in gpus]
    clocks = [facts.sm_clock_mhz for _, facts in seen if facts.sm_clock_mhz is not None]
    temperatures = [facts.temperature_celsius for _, facts in seen if facts.temperature_celsius is not None]
    energies = [(at, facts.energy_joules) for at, facts in seen if facts.energy_joules is not None]
    elapsed = energies[-1][0] - energies[0][0] if energies else 0.0
    return GpuWindow(
        index=gpu[0],
        host=gpu[1],
        samples=len(seen),
        mean_sm_clock_mhz=statistics.fmean(clocks) if clocks else None,
        max_temperature_celsius=max(temperatures, default=None),
        mean_power_watts=(energies[-1][1] - energies[0][1]) / elapsed if elapsed >= _SAMPLE_SECONDS else None,
        throttled_by=tuple(dict.fromkeys(fault for _, facts in seen for fault in gpu_state.throttle_faults(facts))),
    )


class GpuMonitoringLauncher:
    """Launches trials through ``launcher``; waits at most ``wait_seconds`` for memory that an earlier trial held.

    Adds to each record the bytes that were free when it began, what the GPUs did in the measured steps, and a caveat
    for each GPU that was throttled in them.
    """

    def __init__(
        self,
        launcher: Launcher,
        read: Callable[[], gpu_state.GpuInventory],
        indices: tuple[int, ...],
        *,
        hosts: Hosts | None = None,
        wait_seconds: float = 30.0,
        read_host_bytes: Callable[[], int | None] = available_host_bytes,
    ) -> None:
        """``read``: reads every GPU of this host. ``indices``: NVML's indices of the GPUs that trials use. ``hosts``:
        several hosts, whose agents read the GPUs. ``read_host_bytes``: reads the free memory of this host.
        """
        self._hosts = hosts
        self._launcher, self._read, self._indices, self._wait_seconds = launcher, read, indices, wait_seconds
        self._read_host_bytes, self._expected_host_bytes = read_host_bytes, 0
        self._expected_free_bytes: dict[int, int] = {}
        """Number of GPUs → the most that was free so far before a trial on that many."""

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:
        """See :class:`Launcher`."""
        # An offload row holds host memory, page-locked, for a while after its end.
        available = self._wait_for(self._read_host_bytes, self._expected_host_bytes - _HOST_TOLERANCE_BYTES)
        self._expected_host_bytes = (available or 0) if trial.configuration.offloads else 0
        count, caveats = trial.placement.num_gpus, list[str | Caveat]()
        expected = self._expected_free_bytes.get(count, 0)

        def read_free_bytes() -> int | None:
            # Of the GPU that has the least.
            facts = [
                (gpu.memory_total_bytes, gpu.memory_used_bytes) for gpu in self._read_gpus(trial.placement).values()
            ]
            return min((total - used for total, used in facts if total is not None and used is not None), default=None)

        free_bytes = self._wait_for(read_free_bytes, expected - _TOLERANCE_BYTES)
        if free_bytes is None or free_bytes >= expected - _TOLERANCE_BYTES:
            self._expected_free_bytes[count] = max(free_bytes or 0, expected)
        elif not processes.interrupt_requested():  # else the launcher below ends the trial at once, and records it
            self._expected_free_bytes[count] = free_bytes  # another program has it: the next trial does not wait
            less = format_bytes(expected - free_bytes)
            caveats.append(f"{less} less of the card was free than when an earlier trial began")
        first, last = trial.workload.warmup_steps, trial.workload.warmup_steps + trial.workload.num_steps
        samples: list[_Sample] = []
        middle_read = False

        def listen_and_sample(progress: Progress) -> None:
            nonlocal middle_read
            # The middle is read too, as a short window may have no second sample.
            is_middle = progress.step >= (first + last) // 2 and not middle_read
            # A host that is silent would hold this process up for seconds each time.
            is_due = not samples or (samples[-1][1] and time.monotonic() - samples[-1][0] >= _SAMPLE_SECONDS)
            if first <= progress.step < last and (is_due or is_middle):
                middle_read |= is_middle
                samples.append((time.monotonic(), self._read_gpus(trial.placement)))
            listen(progress)

        record = self._launcher.launch(trial, folder, listen_and_sample)
        windows = tuple(_summarise(gpu, samples) for gpu in dict.fromkeys(gpu for _, gpus in samples for gpu in gpus))
        for each in windows:
            if each.throttled_by:
                values = {"gpu": each.name, "reasons": ", ".join(each.throttled_by)}
                caveats.append(Caveat(CaveatKind.CLOCKS_THROTTLED, values))
        found = (*record.caveats, *caveats)
        return replace(record, caveats=found, gpu_free_start_bytes=free_bytes, gpu_windows=windows)

    def _wait_for(self, read: Callable[[], int | None], enough_bytes: int) -> int | None:
        """Read free memory until it is enough, for at most ``wait_seconds`` or until the user interrupts."""
        deadline = time.monotonic() + self._wait_seconds
        while True:
            free_bytes = read()
            is_enough = free_bytes is None or free_bytes >= enough_bytes
            if is_enough or processes.interrupt_requested() or time.monotonic() >= deadline:
                return free_bytes
            time.sleep(_POLL_SECONDS)

    def _read_gpus(self, placement: Placement) -> dict[_Gpu, gpu_state.GpuFacts]:
        """Return the GPUs that the trial uses; none if a host is silent."""
        if self._hosts is None:
            used = self._indices[: placement.num_gpus]
            return {(gpu.index, None): gpu for gpu in self._read().gpus if gpu.index in used}
        try:
            answers = self._hosts.request_all(
                "gpus", timeout_seconds=_READ_SECONDS, kind=tuple[gpu_state.GpuFacts, ...]
            )
        except HostError:
            return {}
        return {
            (visible[slot].index, host): visible[slot]
            for host, visible in answers.items()
            for slot in placement.slots_of(host)
            if slot < len(visible)
        }


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
    for a placement on several. Raises UsageError if ``warm`` is requested and not safe.
    """
    on_gpus = placement.accelerator == "cuda"
    devices = gpu_indices if on_gpus else None
    launcher: Launcher = DeepSpeedLauncher(variables, limits, device_indices=devices, hosts=hosts)
    note = None
    is_script = any(trial.workload.script is not None for trial in trials)
    if placement.launcher != "deepspeed" and not is_script and not all(trial.not_launched for trial in trials):
        warm = WarmLauncher(variables, limits, otherwise=None if requested == "warm" else launcher)
        say("loading torch, DeepSpeed and Transformers once, for every trial …")
        reason = warm.prepare()
        if reason is None:
            launcher = warm
        elif requested == "warm":
            raise UsageError(f"--launcher warm is not safe here: {reason}", remedy="use --launcher deepspeed")
        else:
            note = f"cold launch: the preloaded server cannot be forked: {reason}"
    if on_gpus:
        launcher = GpuMonitoringLauncher(
            launcher, gpu_state.read_gpus, gpu_indices, hosts=hosts
        )  # a sweep has several counts
    return launcher, note
