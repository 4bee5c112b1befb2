"""The parts of a step add up to it, timed on stand-ins whose every call takes the seconds that a test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.comm.comm
import pytest
import torch

from ds_bench.records.rank_files import HeartbeatWriter
from ds_bench.records.schema import CommunicationOperation, OffloadTimes
from ds_bench.worker import operation_timers, training_loop
from ds_bench.worker.operation_timers import CommunicationTimer, DiskUse, OffloadTimer, TimedHandle, operation_bytes
from tests.support.batches import batches


class Clock:
    """Seconds that stand-ins advance."""

    now = 0.0

    def take(self, seconds: float) -> int:
        self.now += seconds
        return 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (training_loop, operation_timers):
        monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    return clock


class Disk:
    """A handle of the async_io op: starting takes a second, waiting four."""

    def __init__(self, clock: Clock) -> None:
        self.async_pread = self.async_pwrite = lambda _buffer, _path, _offset: clock.take(1)
        self.wait = lambda: clock.take(4)


class Engine:
    """Two micro-batches a step. Forward computes 1 s and gathers for 2 s; the optimizer step computes 3 s and is 5 s
    with the disk."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.module = torch.nn.Linear(2, 2)
        handle = Disk(clock)
        gradients = SimpleNamespace(aio_handle=handle)
        self.swapper = SimpleNamespace(read_aio_handle=handle, gradient_swapper=gradients, aio_class=Disk, buffers=[])
        self.optimizer = SimpleNamespace(optimizer_swapper=self.swapper)
        self.gradient_accumulation_steps = self.zero_optimization_stage = lambda: 2
        self.backward = lambda _loss: clock.take(5)

    def __call__(self, **_batch: torch.Tensor) -> SimpleNamespace:
        self.clock.take(1)
        deepspeed.comm.comm.cdb.all_gather(torch.zeros(2))
        return SimpleNamespace(loss=torch.tensor(1.0))

    def step(self) -> None:
        self.clock.take(3)
        self.swapper.read_aio_handle.async_pread(torch.zeros(2), "", 0)
        self.swapper.gradient_swapper.aio_handle.wait()


class Loader:
    """Micro-batches; a step waits 6 s for each."""

    wait_seconds = 0.0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> training_loop.Batch:
        self.clock.take(6)
        self.wait_seconds += 6
        return batches()[0]


@pytest.mark.parametrize("communicates", [False, True])
def test_the_parts_of_a_step_add_up_to_it(
    communicates: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Waiting for the disk is not a part of the phase that it happens in; nor is communication, when it is timed."""
    engine = Engine(clock)
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", SimpleNamespace(all_gather=lambda _: clock.take(2)))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: clock.take(100))
    trainer = training_loop.Trainer(engine, batches(), "cpu", HeartbeatWriter(tmp_path, 0), loaded=Loader(clock))
    handle = engine.swapper.read_aio_handle
    parts = {"forward": 2 * 3, "backward": 2 * 5, "step": 2 * 3, "transfer": 2 * 5, "data_wait": 2 * 6}
    if communicates:
        measured = training_loop.measure_communication(trainer)
        assert measured["step_parts"] == {**parts, "forward": 2 * 1, "communication": 2 * 2}
        (operation,) = measured["communication"]
        assert (operation["name"], operation["count"], operation["seconds"]) == ("all_gather", 2, 4)
    else:
        times = {"disk_wait_seconds": 2 * 5, "disk_busy_seconds": 2 * 5, "disk_read_bytes": 2 * 8}
        assert training_loop.measure_phases(trainer) == {
            "phase_seconds": {"forward": 2 * 3, "backward": 2 * 5, "step": 2 * 8},
            "step_parts": parts,
            # Swapping is seen through every handle.
            "offload": {**asdict(OffloadTimes()), **times, "disk_written_bytes": 0},
        }
    # Ranks begin together, before anything is timed.
    assert clock.now == 100 * communicates + 2 * sum(parts.values())
    assert engine.swapper.read_aio_handle is engine.swapper.gradient_swapper.aio_handle is handle


def test_the_disk_is_busy_from_the_first_operation_to_the_end_of_waiting(clock: Clock) -> None:
    """Computing between start and wait is not waiting; two handles at work together are busy once."""
    use = DiskUse()
    reads, writes = (TimedHandle(Disk(clock), use) for _ in range(2))
    reads.async_pread(torch.zeros(3), "a", 0)
    writes.async_pwrite(torch.zeros(4), "b", 0)
    clock.take(10)
    reads.wait()
    writes.wait()
    writes.wait()  # with nothing to wait for
    assert (use.read_bytes, use.written_bytes) == (12, 16)
    assert use.busy_seconds == 1 + 1 + 10 + 4 + 4
    assert use.wait_seconds == 1 + 1 + 4 + 4 + 4


def test_only_copies_between_devices_are_timed_and_methods_come_back() -> None:
    synchronized = []
    methods = dict(vars(torch.Tensor))
    engine: Any = SimpleNamespace(optimizer=SimpleNamespace(), module=torch.nn.Linear(2, 2))
    with OffloadTimer(engine, lambda: synchronized.append(1)) as timer:
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


class Backend:
    """Gathers at once, and counts how often its work was waited for."""

    def __init__(self) -> None:
        self.waits: list[None] = []
        self.work = SimpleNamespace(wait=lambda: self.waits.append(None))

    def all_gather_into_tensor(self, _output: torch.Tensor, _input: torch.Tensor, **_: Any) -> SimpleNamespace:
        return self.work

    def all_gather_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        for output, part in zip(outputs, inputs, strict=True):
            self.all_gather_into_tensor(output, part)

    def barrier(self) -> None:
        raise RuntimeError("a rank was lost")


def test_every_operation_is_waited_for_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that DeepSpeed starts next to the training, and those that its own logger does not see."""
    backend = Backend()
    methods = dict(vars(backend))
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", backend)
    part, whole = torch.zeros(4), torch.zeros(8)
    with CommunicationTimer(lambda: None) as timer:
        assert deepspeed.comm.comm.cdb.all_gather_into_tensor(whole, part, async_op=True) is backend.work
        assert len(backend.waits) == 1
        backend.all_gather_coalesced([whole, whole], [part, part])
        with pytest.raises(RuntimeError):
            backend.barrier()
    assert vars(backend) == methods

    def reduce(change: Callable[[torch.Tensor], object]) -> tuple[CommunicationOperation, ...]:
        """The operations where a reduction among the ranks changes this rank's numbers so."""
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda values, _: change(values))
        return timer.operations(2, torch.device("cpu"))

    # Another rank took a quarter of the time for each call.
    largest, other = reduce(lambda values: values.is_floating_point() and values.div_(4))
    assert (largest.name, largest.count, largest.bytes) == ("all_gather_coalesced", 0.5, 32)
    assert (other.name, other.count, other.bytes) == ("all_gather_into_tensor", 0.5, 16)
    assert largest.seconds + other.seconds == pytest.approx(timer.seconds / 2)
    assert largest.wait_seconds == pytest.approx(largest.seconds * 3 / 4)
    assert operation_bytes("all_reduce", [whole]) == 2 * whole.nbytes  # a reduce-scatter and an all-gather
    # Another rank made one call more.
    assert [each.wait_seconds for each in reduce(lambda values: values.copy_(torch.tensor([3, -2])))] == [None, None]
