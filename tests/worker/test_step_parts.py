"""The parts of a step add up to it, of an engine whose every call takes the seconds that a test says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.comm.comm
import pytest
import torch

from ds_bench.records.rank_files import HeartbeatWriter
from ds_bench.worker import comms_profile, communication, offload_times, step_parts, training_loop
from ds_bench.worker.reference_engines import DdpEngine
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
    for module in (training_loop, offload_times, communication):
        monkeypatch.setattr(module.time, "perf_counter", lambda: engine.now)
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", SimpleNamespace(all_gather=lambda _: engine.pass_time(2)))
    monkeypatch.setattr(communication, "_fastest_of_ranks", lambda _seconds, _device: None)
    monkeypatch.setattr(step_parts.torch.distributed, "barrier", lambda: engine.pass_time(100))
    return training_loop.Trainer(engine, batches(), "cpu", HeartbeatWriter(tmp_path, 0), loaded=Loader(engine))


def test_what_swapping_waits_for_is_no_part_of_the_phase_it_is_in(trainer: training_loop.Trainer) -> None:
    measured = step_parts.measure_phases(trainer)
    assert measured["phase_seconds"] == {"forward": 2 * 3, "backward": 2 * 5, "step": 2 * 7}
    parts = {"forward": 2 * 3, "backward": 2 * 5, "step": 2 * 3, "transfer": 2 * 4, "data_wait": 2 * 6}
    assert measured["step_parts"] == parts
    assert measured["offload"]["disk_wait_seconds"] == 2 * 4


def test_communication_is_a_part_where_it_is_profiled(trainer: training_loop.Trainer) -> None:
    measured = step_parts.measure_communication(trainer, 3)
    parts = {"forward": 2, "backward": 10, "step": 6, "communication": 4, "transfer": 8, "data_wait": 12}
    assert measured["step_parts"] == parts
    assert trainer.engine.now == 100 + 3 * sum(parts.values()), "ranks begin together, before anything is timed"
    (operation,) = measured["communication"]
    assert (operation["name"], operation["count"], operation["seconds"]) == ("all_gather", 2, 4)


def test_what_cannot_be_seen_is_said_and_its_steps_are_taken_as_they_are(trainer: training_loop.Trainer) -> None:
    """All rows of a run take equally many steps."""
    for row, note in (({"compile": {"deepcompile": True}}, "DeepCompile"), ({}, "torch's own engine")):
        if not row:
            trainer.engine = DdpEngine.__new__(DdpEngine)
        steps: Any = SimpleNamespace(trainer=trainer, trial=SimpleNamespace(ds_config=row), left=2)
        findings = comms_profile.observe(steps)
        assert note in findings.notes[0]
        assert steps.left == 2
