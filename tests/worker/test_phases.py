"""The parts of a step add up to it, of an engine whose every call takes the seconds that a test says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.comm.comm
import pytest
import torch

from ds_bench.records.rank_files import HeartbeatWriter
from ds_bench.worker import communication, offload_times, phases, training_loop
from ds_bench.worker.communication import CommunicationTimer, operation_bytes, summarise_calls
from tests.support.batches import batches


class Engine:
    """Two micro-batches a step. Forward computes 1 s and gathers for 2 s; the optimizer step computes 3 s and waits 4 s
    for the disk."""

    def __init__(self) -> None:
        self.now = 0.0
        self.module = torch.nn.Linear(2, 2)
        gradients = SimpleNamespace()
        self.optimizer = SimpleNamespace(optimizer_swapper=SimpleNamespace(aio_handle=self, gradient_swapper=gradients))

    def pass_time(self, seconds: float) -> int:
        self.now += seconds
        return 0

    def gradient_accumulation_steps(self) -> int:
        return 2

    def zero_optimization_stage(self) -> int:
        return 2

    def __call__(self, **_batch: torch.Tensor) -> SimpleNamespace:
        self.pass_time(1)
        deepspeed.comm.comm.cdb.all_gather(torch.zeros(2))
        return SimpleNamespace(loss=torch.tensor(1.0))

    def backward(self, _loss: torch.Tensor) -> None:
        self.pass_time(5)

    def step(self) -> None:
        self.pass_time(3)
        self.optimizer.optimizer_swapper.aio_handle.async_pread(torch.zeros(2), "", 0)
        self.optimizer.optimizer_swapper.aio_handle.wait()

    def async_pread(self, *_: Any) -> int:
        return self.pass_time(0)

    def wait(self) -> int:
        return self.pass_time(4)


class Loader:
    """Micro-batches for which a step waits 6 s each."""

    wait_seconds = 0.0

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> training_loop.Batch:
        self.engine.pass_time(6)
        self.wait_seconds += 6
        return batches()[0]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> training_loop.Trainer:
    engine = Engine()
    for module in (training_loop, phases, offload_times, communication):
        monkeypatch.setattr(module.time, "perf_counter", lambda: engine.now)
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", SimpleNamespace(all_gather=lambda _: engine.pass_time(2)))
    monkeypatch.setattr(communication, "_fastest_of_ranks", lambda _seconds, _device: None)
    monkeypatch.setattr(phases.torch.distributed, "barrier", lambda: engine.pass_time(100))
    return training_loop.Trainer(engine, batches(), "cpu", HeartbeatWriter(tmp_path, 0), loaded=Loader(engine))


def test_what_swapping_waits_for_is_no_part_of_the_phase_it_is_in(trainer: training_loop.Trainer) -> None:
    measured = phases.measure_phases(trainer)
    assert measured["phase_seconds"] == {"forward": 2 * 3, "backward": 2 * 5, "step": 2 * 7}
    parts = {"forward": 2 * 3, "backward": 2 * 5, "step": 2 * 3, "transfer": 2 * 4, "data_wait": 2 * 6}
    assert measured["step_parts"] == parts
    assert measured["offload"]["disk_wait_seconds"] == 2 * 4


def test_communication_is_a_part_of_its_own(trainer: training_loop.Trainer) -> None:
    measured = phases.measure_communication(trainer)
    parts = {"forward": 2, "backward": 10, "step": 6, "communication": 4, "transfer": 8, "data_wait": 12}
    assert measured["step_parts"] == parts
    assert trainer.engine.now == 100 + 2 * sum(parts.values()), "ranks begin together, before anything is timed"
    (operation,) = measured["communication"]
    assert (operation["name"], operation["count"], operation["seconds"]) == ("all_gather", 2, 4)


class Work:
    waited = 0

    def wait(self) -> None:
        self.waited += 1


class Backend:
    def __init__(self) -> None:
        self.work = Work()

    def all_gather_into_tensor(self, _output: torch.Tensor, _input: torch.Tensor, **_: Any) -> Work:
        return self.work

    def all_gather_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], **_: Any) -> None:
        for output, part in zip(outputs, inputs, strict=True):
            self.all_gather_into_tensor(output, part)

    def barrier(self) -> None:
        raise RuntimeError("a rank was lost")


def test_every_operation_is_waited_for_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that DeepSpeed starts beside the training, and those that its own logger does not see."""
    backend = Backend()
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", backend)
    part, whole = torch.zeros(4), torch.zeros(8)
    with CommunicationTimer(lambda: None) as timer:
        assert deepspeed.comm.comm.cdb.all_gather_into_tensor(whole, part, async_op=True) is backend.work
        assert backend.work.waited == 1
        backend.all_gather_coalesced([whole, whole], [part, part])
        with pytest.raises(RuntimeError):
            backend.barrier()
    assert vars(backend) == {"work": backend.work}
    monkeypatch.setattr(communication, "_fastest_of_ranks", lambda seconds, _device: [each / 2 for each in seconds])
    largest, other = timer.operations(2, torch.device("cpu"))
    assert (largest.name, largest.count, largest.bytes) == ("all_gather_coalesced", 0.5, 32)
    assert (other.name, other.count, other.bytes) == ("all_gather_into_tensor", 0.5, 16)
    assert largest.seconds + other.seconds == pytest.approx(timer.seconds / 2)
    assert largest.wait_seconds == pytest.approx(largest.seconds / 2)


def test_the_bytes_of_an_operation_are_those_of_the_whole_tensor() -> None:
    part, whole = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)
    assert operation_bytes("reduce_scatter_tensor", [part, whole, None]) == 12
    assert operation_bytes("all_gather", [[part, part], part]) == 12
    assert operation_bytes("all_reduce", [whole]) == 24  # a reduce-scatter and an all-gather
    assert operation_bytes("broadcast_object_list", [["text"], 0]) == 0


def test_waiting_is_not_known_where_ranks_made_different_calls() -> None:
    calls = [communication._Call("all_reduce", 8, 0.5)]
    (operation,) = summarise_calls(calls, None, 1)
    assert operation.wait_seconds is None
    assert operation.seconds == 0.5
