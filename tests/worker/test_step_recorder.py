"""What a rank reports of its steps: the same as its record holds, without waiting for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds_bench.records.rank_files import HeartbeatWriter
from ds_bench.records.step_series import StepFileReader
from ds_bench.worker import training_loop
from ds_bench.worker.step_clock import StepClock
from ds_bench.worker.step_recorder import StepRecorder
from tests.support.batches import batches
from tests.worker.test_training_loop import FakeEngine


def test_the_steps_that_are_reported_are_those_of_the_record(tmp_path: Path) -> None:
    subject = training_loop.Trainer(FakeEngine(), batches(), "cpu", HeartbeatWriter(tmp_path, 0))
    subject.recorder = StepRecorder(tmp_path, 0, "cpu", grad_accum=2, tokens_per_step=64)
    samples = training_loop.Samples(warmup_step_seconds=training_loop.warm_up(subject, 2))
    training_loop.measure(subject, 3, lambda: None, samples)
    steps = [step for _, step in StepFileReader(tmp_path, 0).new_samples()]
    assert [step.measured for step in steps] == [False] * 2 + [True] * 3
    assert [step.seconds for step in steps] == [*samples.warmup_step_seconds, *samples.step_seconds]
    assert [step.loss for step in steps] == samples.losses
    assert all((step.host_resident_bytes or 0) > 2**20 and step.gpu_peak_bytes is None for step in steps)


def test_a_step_that_the_device_has_not_finished_is_reported_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = 0
    monkeypatch.setattr(StepClock, "has_passed", lambda _clock, mark: mark <= finished)
    recorder, reader, clock = StepRecorder(tmp_path, 0, "cpu", 1, 64), StepFileReader(tmp_path, 0), StepClock("cpu")
    clock.mark()
    for number in range(3):
        recorder.take_losses([torch.tensor(float(number))])
        clock.mark()
        recorder.end_step(clock, measured=True)
        assert list(reader.new_samples()) == []
    finished = 2
    recorder.report()
    assert [(number, step.loss) for number, step in reader.new_samples()] == [(0, 0.0), (1, 1.0)]
