"""A launcher that also watches the GPUs: free memory before a trial, and clocks in its measured window.

Clocks are read while a GPU works, since an idle GPU lowers them. Memory is read before, since a process that
was killed may hold GPU memory for seconds after it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..config.caveats import Caveat, CaveatKind
from ..config.spec import Placement, Trial
from ..records.schema import TrialRecord
from ..system import gpu_state, signals
from ..system.host_memory import available_host_bytes
from ..units import format_bytes
from . import Launcher, Progress, ProgressCallback
from .host_connections import HostError, Hosts

_TOLERANCE_BYTES = 256 * 2**20
"""Normal variation of free GPU memory; a larger loss means that a process holds some."""
_HOST_TOLERANCE_BYTES = 2 * 2**30
"""The same for host memory, which other programs use too."""
_POLL_SECONDS = 0.2
_READ_SECONDS = 5.0


class GpuMonitoringLauncher:
    """Launches trials through ``launcher``; waits at most ``wait_seconds`` for memory that an earlier trial held.

    Adds to each record the bytes that were free when it began, and a caveat for each GPU throttled in the middle of
    its steps.
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
        free_bytes = self._wait_for(lambda: self._read_free_bytes(trial.placement), expected - _TOLERANCE_BYTES)
        if free_bytes is None or free_bytes >= expected - _TOLERANCE_BYTES:
            self._expected_free_bytes[count] = max(free_bytes or 0, expected)
        elif not signals.interrupt_requested():  # else the launcher below ends the trial at once, and records it
            self._expected_free_bytes[count] = free_bytes  # another program has it: the next trial does not wait
            less = format_bytes(expected - free_bytes)
            caveats.append(f"{less} less of the card was free than when an earlier trial began")
        middle = trial.workload.warmup_steps + trial.workload.num_steps // 2
        clocks_read = False

        def listen_and_read_clocks(progress: Progress) -> None:
            nonlocal clocks_read
            # Not ==: the monitor polls a few times a second and misses shorter steps.
            if progress.step >= middle and not clocks_read:
                clocks_read = True
                for name, gpu in self._read_gpus(trial.placement).items():
                    if faults := gpu_state.throttle_faults(gpu):
                        reasons = ", ".join(faults)
                        caveats.append(Caveat(CaveatKind.CLOCKS_THROTTLED, {"gpu": name, "reasons": reasons}))
            listen(progress)

        record = self._launcher.launch(trial, folder, listen_and_read_clocks)
        return replace(record, caveats=(*record.caveats, *caveats), gpu_free_start_bytes=free_bytes)

    def _wait_for(self, read: Callable[[], int | None], enough_bytes: int) -> int | None:
        """Read free memory until it is enough, for at most ``wait_seconds`` or until the user interrupts."""
        deadline = time.monotonic() + self._wait_seconds
        while True:
            free_bytes = read()
            is_enough = free_bytes is None or free_bytes >= enough_bytes
            if is_enough or signals.interrupt_requested() or time.monotonic() >= deadline:
                return free_bytes
            time.sleep(_POLL_SECONDS)

    def _read_free_bytes(self, placement: Placement) -> int | None:
        """Free bytes of the GPU that has the least; None if unknown."""
        facts = [(gpu.memory_total_bytes, gpu.memory_used_bytes) for gpu in self._read_gpus(placement).values()]
        return min((total - used for total, used in facts if total is not None and used is not None), default=None)

    def _read_gpus(self, placement: Placement) -> dict[int | str, gpu_state.GpuFacts]:
        """Index, or ``INDEX of HOST`` on several hosts → GPU that the trial uses; empty if a host is silent."""
        if self._hosts is None:
            used = self._indices[: placement.num_gpus]
            return {gpu.index: gpu for gpu in self._read().gpus if gpu.index in used}
        try:
            answers = self._hosts.request_all(
                "gpus", timeout_seconds=_READ_SECONDS, kind=tuple[gpu_state.GpuFacts, ...]
            )
        except HostError:
            return {}
        return {
            f"{visible[slot].index} of {host}": visible[slot]
            for host, visible in answers.items()
            for slot in placement.slots_of(host)
            if slot < len(visible)
        }
