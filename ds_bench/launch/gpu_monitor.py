"""Reads the GPUs for a trial: free memory before; clocks, temperature, power and throttling in its measured steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..config.caveat_texts import Caveat, CaveatKind
from ..config.spec import Placement, Trial
from ..records.schema import GpuWindow, TrialRecord
from ..system import gpu_state, processes
from ..system.host_resources import available_host_bytes
from ..units import format_bytes
from . import Launcher, Progress, ProgressCallback
from .host_connections import HostError, Hosts

_TOLERANCE_BYTES = 256 * 2**20
"""Normal variation in free GPU memory; a larger drop means that a process holds some."""
_HOST_TOLERANCE_BYTES = 2 * 2**30
"""The same for host memory, which other programs use too."""
_POLL_SECONDS = 0.2
_READ_SECONDS = 5.0
_SAMPLE_SECONDS = 1.0
"""Time between two readings of the GPUs, and the shortest time over which mean power is computed from energy."""

_Gpu = tuple[int, str | None]
"""NVML's index, and the host; None if there is only one."""
_Sample = tuple[float, dict[_Gpu, gpu_state.GpuFacts]]
"""Monotonic time in seconds, and the GPUs of the trial."""


def _summarize(gpu: _Gpu, samples: Sequence[_Sample]) -> GpuWindow:
    """Summarize one GPU from the first sample to the last."""
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
    """Launches trials through ``launcher``; waits at most ``wait_seconds`` for an earlier trial's memory to be freed.

    Adds to each record the bytes that were free when the trial began, a summary of each GPU during the measured steps,
    and a caveat for each GPU that was throttled during them.
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
        those of a multi-host run, whose agents read the GPUs. ``read_host_bytes``: reads the free memory of this host.
        """
        self._hosts = hosts
        self._launcher, self._read, self._indices, self._wait_seconds = launcher, read, indices, wait_seconds
        self._read_host_bytes, self._expected_host_bytes = read_host_bytes, 0
        self._expected_free_bytes: dict[int, int] = {}
        """Number of GPUs → the free memory expected before a trial on that many: the most seen so far, or what another
        program has left of it since."""

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:
        """See :class:`Launcher`."""
        # An offload row still holds page-locked host memory for a while after it ends.
        available = self._wait_for(self._read_host_bytes, self._expected_host_bytes - _HOST_TOLERANCE_BYTES)
        self._expected_host_bytes = (available or 0) if trial.configuration.offloads else 0
        count, caveats = trial.placement.num_gpus, list[str | Caveat]()
        expected = self._expected_free_bytes.get(count, 0)

        def read_free_bytes() -> int | None:
            # On the GPU that has the least.
            facts = [
                (gpu.memory_total_bytes, gpu.memory_used_bytes) for gpu in self._read_gpus(trial.placement).values()
            ]
            return min((total - used for total, used in facts if total is not None and used is not None), default=None)

        free_bytes = self._wait_for(read_free_bytes, expected - _TOLERANCE_BYTES)
        if free_bytes is None or free_bytes >= expected - _TOLERANCE_BYTES:
            self._expected_free_bytes[count] = max(free_bytes or 0, expected)
        elif not processes.interrupt_requested():  # if requested, the launcher below ends and records the trial
            self._expected_free_bytes[count] = free_bytes  # another program holds some: the next trial does not wait
            less = format_bytes(expected - free_bytes)
            caveats.append(f"{less} less GPU memory was free than when an earlier trial began")
        first, last = trial.workload.warmup_steps, trial.workload.warmup_steps + trial.workload.num_steps
        samples: list[_Sample] = []
        middle_read = False

        def listen_and_sample(progress: Progress) -> None:
            nonlocal middle_read
            # The middle is read too, because a short window may otherwise have no second sample.
            is_middle = progress.step >= (first + last) // 2 and not middle_read
            # A host that is silent would hold this process up for seconds each time.
            is_due = not samples or (samples[-1][1] and time.monotonic() - samples[-1][0] >= _SAMPLE_SECONDS)
            if first <= progress.step < last and (is_due or is_middle):
                middle_read |= is_middle
                samples.append((time.monotonic(), self._read_gpus(trial.placement)))
            listen(progress)

        record = self._launcher.launch(trial, folder, listen_and_sample)
        windows = tuple(_summarize(gpu, samples) for gpu in dict.fromkeys(gpu for _, gpus in samples for gpu in gpus))
        for each in windows:
            if each.throttled_by:
                values = {"gpu": each.name, "reasons": ", ".join(each.throttled_by)}
                caveats.append(Caveat(CaveatKind.CLOCKS_THROTTLED, values))
        found = (*record.caveats, *caveats)
        return replace(record, caveats=found, gpu_free_start_bytes=free_bytes, gpu_windows=windows)

    def _wait_for(self, read: Callable[[], int | None], enough_bytes: int) -> int | None:
        """Read free memory until there is enough, for at most ``wait_seconds`` or until the user interrupts."""
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
