"""The clock that times steps without waiting for the device."""

from __future__ import annotations

import time
from typing import Any

import torch


class StepClock:
    """Marks between steps: device events on CUDA, so that timing adds no synchronisation; else the clock.

    With ``synchronized`` False the clock on CUDA too, which is wrong there (``Workload.synchronized``).
    """

    def __init__(self, accelerator: str, *, synchronized: bool = True) -> None:
        self._cuda = accelerator == "cuda" and synchronized
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    @property
    def last_mark(self) -> int:
        """Number of the last mark, from 0."""
        return len(self._marks) - 1

    def has_passed(self, mark: int) -> bool:
        """Whether the device has reached a mark; does not wait for it."""
        return bool(self._marks[mark].query()) if self._cuda else True

    def seconds_before(self, mark: int) -> float:
        """Seconds from the mark before to this one, which the device has reached."""
        a, b = self._marks[mark - 1], self._marks[mark]
        return float(a.elapsed_time(b)) / 1000.0 if self._cuda else float(b - a)

    def seconds(self) -> list[float]:
        """Seconds from each mark to the next; synchronises the device first on CUDA."""
        if self._cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000.0 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
