"""The measured steps of a rank: warm-up, losses, times, and what is reported of each while it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_bench.records.rank_files import HeartbeatWriter, read_beat
from ds_bench.records.step_series import StepFileReader
from ds_bench.worker import training_loop
from ds_bench.worker.steps import StepClock, StepRecorder
from tests.support.batches import batches


class FakeEngine:
    """Counts calls like an engine with two micro-batches a step; its loss is the number of the forward pass."""

    def __init__(self, skipped: int = 0, scales: bool = False) -> None:
        self.calls: list[str] = []
        self.skipped_steps = skipped
        self._scales = scales
        self.optimizer = None

    def get_global_grad_norm(self) -> torch.Tensor:
        return torch.tensor(float(self.calls.count("step")))

    def gradient_accumulation_steps(self) -> int:
        return 2

    def fp16_enabled(self) -> bool:
        return self._scales

    def dynamic_loss_scale(self) -> bool:
        return self._scales

    def __call__(self, **_batch: torch.Tensor) -> SimpleNamespace:
        self.calls.append("forward")
        return SimpleNamespace(loss=torch.tensor(float(self.calls.count("forward"))))

    def backward(self, _loss: torch.Tensor) -> None:
        self.calls.append("backward")

    def step(self) -> None:
        self.calls.append("step")


def trainer(tmp_path: Path, engine: FakeEngine) -> training_loop.Trainer:
    return training_loop.Trainer(engine, batches(), "cpu", HeartbeatWriter(tmp_path, 0))


@pytest.mark.parametrize(
    ("graphs", "done", "least", "further"),
    [
        ([1, 1], 1, 0, 1),  # nothing was compiled in the step after those that were asked for
        ([1, 2, 2], 1, 0, 2),
        ([1] * 9, 1, 8, 7),  # DeepCompile compiles again later on
        (list(range(99)), 1, 0, 16),  # never over: measured all the same, and a note says so
    ],
)
def test_a_compiled_model_is_warmed_up_until_a_step_compiles_nothing(
    graphs: list[int], done: int, least: int, further: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    subject = trainer(tmp_path, engine)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: None)
    monkeypatch.setattr(training_loop, "compiled_graphs", lambda: graphs[engine.calls.count("step") // 2])
    assert training_loop.warm_up_compiled(subject, done, least) == []
    engine.is_compiled = True  # type: ignore[attr-defined]
    assert len(training_loop.warm_up_compiled(subject, done, least)) == further


def test_a_step_is_every_micro_batch_and_its_loss_their_mean(tmp_path: Path) -> None:
    engine = FakeEngine()
    subject = trainer(tmp_path, engine)
    subject.time_steps(1)
    assert engine.calls == ["forward", "backward", "step"] * 2
    assert subject.losses() == [1.5]
    beat = read_beat(tmp_path, 0)
    assert beat is not None
    assert (beat.phase, beat.step) == ("step", 1)
    subject._losses = [[torch.tensor(float("nan"))], [torch.tensor(float("inf"))], [torch.tensor(2.0)]]
    assert subject.losses() == [None, None, 2.0]


def test_the_loss_is_found_in_what_models_return() -> None:
    for output in (SimpleNamespace(loss=torch.tensor(1.0)), (torch.tensor(1.0), 2), torch.tensor(1.0)):
        assert float(training_loop.loss_of(output)) == 1.0
    with pytest.raises(TypeError, match="without a loss"):
        training_loop.loss_of("text")


def test_the_window_holds_the_steps_and_warm_up_lies_before_it(tmp_path: Path) -> None:
    subject, samples = trainer(tmp_path, FakeEngine()), training_loop.Samples()
    samples.warmup_step_seconds = training_loop.warm_up(subject, 2)
    training_loop.measure(subject, 3, lambda: None, samples)
    assert (len(samples.warmup_step_seconds), len(samples.step_seconds), len(samples.losses)) == (2, 3, 5)
    assert samples.grad_norms == [2.0, 4.0, 6.0, 8.0, 10.0]  # of each step, as the engine has it at its end
    assert samples.window_seconds >= sum(samples.step_seconds) > 0


def test_what_is_called_in_the_warm_up_is_called_between_two_steps(tmp_path: Path) -> None:
    engine = FakeEngine()
    subject = trainer(tmp_path, engine)
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: seen.append((name, engine.calls.count("step") // 2))

    after = [(1, note("first")), (0, note("start")), (3, note("stop")), (9, note("never"))]
    assert len(training_loop.warm_up(subject, 4, after)) == 4
    assert seen == [("start", 0), ("first", 1), ("stop", 3)]


def test_skipped_steps_of_the_window_are_counted_and_those_of_the_warm_up_are_not(tmp_path: Path) -> None:
    engine = FakeEngine()
    subject, samples, real_step = trainer(tmp_path, engine), training_loop.Samples(), engine.step

    def step() -> None:
        real_step()
        # Two micro-batches a step: both steps of the warm-up and the second of the window are skipped.
        engine.skipped_steps += engine.calls.count("step") in (2, 4, 8)

    engine.step = step  # type: ignore[method-assign]
    training_loop.warm_up(subject, 2)
    training_loop.measure(subject, 3, lambda: None, samples)
    assert (subject.skipped, samples.skipped_steps) == (3, 1)


def test_warm_up_goes_on_while_fp16_skips_every_step(tmp_path: Path) -> None:
    engine = FakeEngine(scales=True)
    real_step = engine.step

    def skipping_step() -> None:
        real_step()
        if engine.calls.count("step") % 2 == 0 and engine.calls.count("step") <= 10:
            engine.skipped_steps += 1

    engine.step = skipping_step  # type: ignore[method-assign]
    assert len(training_loop.warm_up(trainer(tmp_path, engine), 2)) == 6
    assert len(training_loop.warm_up(trainer(tmp_path, FakeEngine(skipped=2)), 2)) == 2, "bf16 has no loss scale"


def test_cuda_step_times_are_of_device_events_and_synchronise_only_when_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def elapsed_time(self, _other: object) -> float:
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    clock = StepClock("cuda")
    for _ in range(3):
        clock.mark()
    assert log == ["record"] * 3
    assert clock.seconds() == [0.25, 0.25]
    assert log[-1] == "synchronize"


def test_the_steps_that_are_reported_are_those_of_the_record(tmp_path: Path) -> None:
    subject = trainer(tmp_path, FakeEngine())
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
