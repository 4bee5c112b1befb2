"""Time and bytes of CPU Adam, of swapping and of copies, of stand-ins for DeepSpeed's objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_bench.worker import offload_times
from ds_bench.worker.offload_times import DiskUse, OffloadTimer, TimedHandle


class Clock:
    """Seconds that a test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(offload_times.time, "perf_counter", lambda: self.now)


class Disk:
    """A handle of the async_io op: starting takes a second, waiting five."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def async_pread(self, _buffer: torch.Tensor, _path: str, _offset: int) -> int:
        self.clock.now += 1
        return 0

    async_pwrite = async_pread

    def wait(self) -> int:
        self.clock.now += 5
        return 2

    def is_pinned(self, _buffer: torch.Tensor) -> bool:
        return True


def test_the_disk_is_busy_from_the_first_operation_to_the_end_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing between start and wait is no waiting; two handles at work together are busy once."""
    clock, use = Clock(monkeypatch), DiskUse()
    reads, writes = (TimedHandle(Disk(clock), use) for _ in range(2))
    assert reads.async_pread(torch.zeros(3), "a", 0) == 0
    assert writes.async_pwrite(torch.zeros(4), "b", 0) == 0
    clock.now += 10
    assert reads.wait() == 2
    writes.wait()
    writes.wait()  # with nothing to wait for
    assert (use.read_bytes, use.written_bytes) == (12, 16)
    assert use.busy_seconds == 1 + 1 + 10 + 5 + 5
    assert use.wait_seconds == 1 + 1 + 5 + 5 + 5
    assert reads.is_pinned(torch.zeros(1))


def engine(**optimizer: Any) -> Any:
    return SimpleNamespace(optimizer=SimpleNamespace(**optimizer), module=torch.nn.Linear(2, 2))


def test_copies_between_devices_alone_are_timed_and_methods_come_back() -> None:
    synchronized = []
    methods = dict(vars(torch.Tensor))
    with OffloadTimer(engine(), lambda: synchronized.append(1)) as timer:
        weight = torch.zeros(4)
        weight.to(torch.bfloat16)
        weight.copy_(torch.ones(4))
        weight.cpu()
        assert timer.copy_seconds == 0
        assert not synchronized
        on_device = weight.to("meta")
        on_device.copy_(weight)
        weight.to(on_device)
    assert len(synchronized) == 2 * 3
    assert timer.copy_seconds > 0
    assert dict(vars(torch.Tensor)) == methods


def test_swapping_is_seen_through_every_handle_and_handles_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    handle, gradients = Disk(clock), SimpleNamespace()
    gradients.aio_handle = handle
    swapper = SimpleNamespace(read_aio_handle=handle, gradient_swapper=gradients, aio_class=Disk, buffers=[])
    with OffloadTimer(engine(optimizer_swapper=swapper)) as timer:
        swapper.read_aio_handle.async_pread(torch.zeros(2), "a", 0)
        gradients.aio_handle.async_pwrite(torch.zeros(1), "b", 0)
    assert swapper.read_aio_handle is handle
    assert gradients.aio_handle is handle
    times = timer.times(2)
    assert (times.disk_read_bytes, times.disk_written_bytes) == (4, 2)
    assert times.disk_busy_seconds == 1  # two seconds in two steps; what was under way ends with the timer
    assert times.cpu_adam_seconds is None
