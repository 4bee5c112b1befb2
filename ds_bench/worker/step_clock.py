"""Times steps, and with ``--monitor`` reports the loss, memory and time of each while a rank trains.

Nothing waits for the device between steps: on CUDA, events mark the ends of steps. The losses of a step are copied to
page-locked memory on the stream and read once the device has passed the mark that ends the step, usually one step
later. Reports go to a memory-mapped file that the parent reads (``records.step_files``).
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..records.step_files import StepFileWriter, StepSample

_MAX_PENDING = 64
"""Maximum number of steps whose losses wait to be read; if the host runs further ahead, losses are left out."""


class StepClock:
    """Marks between steps: device events on CUDA, so that timing adds no synchronization; else the host's clock.

    Without ``synchronized`` the host's clock is used on CUDA too, which is wrong there (``Workload.synchronized``).
    """

    def __init__(self, accelerator: str, *, synchronized: bool = True) -> None:
        self._cuda = accelerator == "cuda" and synchronized
        self.marks: list[Any] = []
        """From the beginning of the first step; the last mark ends the last step."""

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def has_passed(self, mark: int) -> bool:
        """Return whether the device has reached a mark, without waiting for it."""
        return bool(self.marks[mark].query()) if self._cuda else True

    def seconds_before(self, mark: int) -> float:
        """Return the seconds from the previous mark to this one, which the device must have reached."""
        a, b = self.marks[mark - 1], self.marks[mark]
        return float(a.elapsed_time(b)) / 1000.0 if self._cuda else float(b - a)

    def seconds(self) -> list[float]:
        """Return the seconds from each mark to the next; on CUDA synchronize the device first."""
        if self._cuda:
            torch.cuda.synchronize()
        return [self.seconds_before(mark) for mark in range(1, len(self.marks))]


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step that the device may not have finished."""

    clock: StepClock
    mark: int
    """The mark of ``clock`` that ends the step."""
    losses: torch.Tensor | list[float]
    """Of the micro-batches; a tensor on the host, complete once the device has passed the mark. Empty if not taken."""
    time: float
    measured: bool
    memory: dict[str, int | None]


class StepRecorder:
    """Reports the steps of one rank. Creating one raises OSError if the disk has no room for its file."""

    def __init__(self, folder: Path, rank: int, accelerator: str, grad_accum: int, tokens_per_step: int) -> None:
        self._file = StepFileWriter(folder, rank, tokens_per_step)
        self._cuda = accelerator == "cuda"
        self._pending: deque[_PendingStep] = deque()
        self._losses: torch.Tensor | list[float] = []
        self._slots = torch.zeros(_MAX_PENDING, grad_accum, pin_memory=True) if self._cuda else torch.zeros(0)
        self._next_slot = 0
        # Kept open, so that each step takes one system call.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def take_losses(self, losses: Sequence[torch.Tensor]) -> None:
        """Take the losses of a step's micro-batches, before the mark that ends the step."""
        self._losses = []
        if any(loss.numel() != 1 for loss in losses) or len(self._pending) >= _MAX_PENDING:
            return
        if not self._cuda:
            self._losses = [loss.item() for loss in losses]
            return
        self._losses = places = self._slots[self._next_slot]
        # There are as many slots as steps that may wait, so a slot is reused only after its step has been reported.
        self._next_slot = (self._next_slot + 1) % _MAX_PENDING
        for place, loss in zip(places, losses, strict=True):
            place.copy_(loss.reshape(()), non_blocking=True)

    def end_step(self, clock: StepClock, measured: bool) -> None:
        """Note the step that the clock's last mark ends, and report the steps that the device has finished."""
        now = time.time()
        memory: dict[str, int | None] = {
            "host_resident_bytes": int(os.pread(self._statm, 128, 0).split()[1]) * self._page_bytes
        }
        if self._cuda:
            statistics = torch.cuda.memory_stats_as_nested_dict()  # host-side counters; the flat dict takes longer
            allocated, reserved = statistics["allocated_bytes"]["all"], statistics["reserved_bytes"]["all"]
            memory["gpu_allocated_bytes"], memory["gpu_reserved_bytes"] = allocated["current"], reserved["current"]
            memory["gpu_peak_bytes"] = allocated["peak"]
        self._pending.append(_PendingStep(clock, len(clock.marks) - 1, self._losses, now, measured, memory))
        self.report()

    def report(self) -> None:
        """Report the steps that the device has finished."""
        while self._pending and (step := self._pending[0]).clock.has_passed(step.mark):
            self._pending.popleft()
            losses = step.losses if isinstance(step.losses, list) else step.losses.tolist()
            loss = sum(losses) / len(losses) if losses else math.nan
            self._file.add(
                StepSample(
                    measured=step.measured,
                    time=step.time,
                    seconds=step.clock.seconds_before(step.mark),
                    loss=loss if math.isfinite(loss) else None,
                    **step.memory,
                )
            )
