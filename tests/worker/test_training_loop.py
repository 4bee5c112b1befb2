"""The measured steps of a rank: warm-up, losses, times, and what is reported of each while it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_bench.records.rank_files import HeartbeatWriter, read_beat
from ds_bench.records.step_files import StepFileReader
from ds_bench.worker import training_loop
from ds_bench.worker.step_clock import StepClock, StepRecorder
from tests.support.batches import batches

STEP = ["forward", "backward", "step"] * 2


class Engine:
    """Counts calls like an engine with two micro-batches a step; its loss is the number of the forward pass."""

    def __init__(self, skips: Callable[[int], bool] = lambda _step: False, scales: bool = False) -> None:
        """``skips``: whether the optimizer skips the step of this number, from 1."""
        self.calls: list[str] = []
        self.skipped_steps = 0
        self.optimizer, self.is_compiled = None, False
        self._skips = skips
        self.gradient_accumulation_steps = lambda: 2
        self.get_global_grad_norm = lambda: torch.tensor(float(self.steps))
        self.fp16_enabled = self.dynamic_loss_scale = lambda: scales
        self.eval, self.train = lambda: self.calls.append("eval"), lambda: self.calls.append("train")
        self.backward = lambda _loss: self.calls.append("backward")

    @property
    def steps(self) -> int:
        return self.calls.count("step") // 2

    def __call__(self, **_batch: torch.Tensor) -> SimpleNamespace:
        self.calls.append("forward")
        return SimpleNamespace(loss=torch.tensor(float(self.calls.count("forward"))))

    def step(self) -> None:
        self.calls.append("step")
        self.skipped_steps += self.calls.count("step") % 2 == 0 and self._skips(self.steps)


Make = Callable[[Engine], training_loop.Trainer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda engine: training_loop.Trainer(engine, batches(), "cpu", HeartbeatWriter(tmp_path, 0))


@pytest.mark.parametrize(
    ("graphs", "least", "further"),
    [
        ([1, 1], 0, 1),  # nothing was compiled in the step after the requested one
        ([1, 2, 2], 0, 2),
        ([1] * 9, 8, 7),  # DeepCompile compiles again later on
        (list(range(99)), 0, 16),  # never over: measured all the same, and a note says so
    ],
)
def test_a_compiled_model_is_warmed_up_until_a_step_compiles_nothing(
    graphs: list[int], least: int, further: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    subject = make(engine)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: None)
    monkeypatch.setattr(training_loop, "compiled_graphs", lambda: graphs[engine.steps])
    assert training_loop.warm_up_compiled(subject, 1, least) == []
    engine.is_compiled = True
    assert len(training_loop.warm_up_compiled(subject, 1, least)) == further


def test_a_step_is_every_micro_batch_and_its_loss_their_mean(make: Make, tmp_path: Path) -> None:
    engine = Engine()
    subject = make(engine)
    subject.time_steps(1)
    assert (engine.calls, subject.losses()) == (STEP, [1.5])
    beat = read_beat(tmp_path, 0)
    assert beat is not None
    assert (beat.phase, beat.step) == ("step", 1)
    assert training_loop.finite_values([float("nan"), torch.tensor(float("inf")), 2.0, None]) == [None, None, 2.0, None]


def test_the_loss_is_found_in_what_models_return() -> None:
    for output in (SimpleNamespace(loss=torch.tensor(1.0)), (torch.tensor(1.0), 2), torch.tensor(1.0)):
        assert float(training_loop.loss_of(output)) == 1.0
    with pytest.raises(TypeError, match="without a loss"):
        training_loop.loss_of("text")


def test_the_window_is_what_follows_the_warm_up_and_reports_are_those_of_the_record(make: Make, tmp_path: Path) -> None:
    """Both steps of the warm-up and the second of the window are skipped."""
    subject = make(Engine(skips=lambda step: step in (1, 2, 4)))
    subject.recorder = StepRecorder(tmp_path, 0, "cpu", grad_accum=2, tokens_per_step=64)
    warmup_seconds = training_loop.warm_up(subject, 2)
    window = training_loop.measure_window(subject, 3, lambda: None)
    assert (len(warmup_seconds), len(window["step_seconds"]), len(window["losses"])) == (2, 3, 5)
    assert window["grad_norms"] == [1.0, 2.0, 3.0, 4.0, 5.0]  # of each step, as the engine has it at its end
    assert window["window_seconds"] >= sum(window["step_seconds"]) > 0
    assert (subject.skipped, window["skipped_steps"]) == (3, 1)
    steps = [step for _, step in StepFileReader(tmp_path, 0).new_samples()]
    assert [step.measured for step in steps] == [False] * 2 + [True] * 3
    assert [step.seconds for step in steps] == [*warmup_seconds, *window["step_seconds"]]
    assert [step.loss for step in steps] == window["losses"]
    assert all((step.host_resident_bytes or 0) > 2**20 and step.gpu_peak_bytes is None for step in steps)


def test_calls_in_the_warm_up_happen_between_two_steps(make: Make) -> None:
    engine, seen = Engine(), list[tuple[str, int]]()

    def note(name: str) -> Callable[[], None]:
        return lambda: seen.append((name, engine.steps))

    after = [(1, note("first")), (0, note("start")), (3, note("stop")), (9, note("never"))]
    assert len(training_loop.warm_up(make(engine), 4, after)) == 4
    assert seen == [("start", 0), ("first", 1), ("stop", 3)]


def test_warm_up_goes_on_while_fp16_skips_every_step(make: Make) -> None:
    assert len(training_loop.warm_up(make(Engine(skips=lambda step: step <= 5, scales=True)), 2)) == 6
    assert len(training_loop.warm_up(make(Engine(skips=lambda _: True)), 2)) == 2, "bf16 has no loss scale"


def test_the_device_is_waited_for_at_both_ends_of_the_window(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    monkeypatch.setattr(training_loop, "synchronize", lambda _accelerator: engine.calls.append("synchronize"))
    training_loop.measure_window(make(engine), 1, lambda: engine.calls.append("barrier"))
    assert engine.calls == ["barrier", "synchronize", *STEP, "synchronize"]


def test_the_repeated_loss_is_taken_without_dropout_and_without_training(make: Make) -> None:
    engine = Engine()
    assert training_loop.repeated_loss(make(engine)) == 1.0
    assert engine.calls == ["eval", "forward", "train"]


def test_cuda_step_times_are_of_device_events_and_synchronize_only_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    event = SimpleNamespace(record=lambda: log.append("record"), elapsed_time=lambda _other: 250.0)  # milliseconds
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event if enable_timing else None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    clock = StepClock("cuda")
    for _ in range(3):
        clock.mark()
    assert log == ["record"] * 3
    assert clock.seconds() == [0.25, 0.25]
    assert log[-1] == "synchronize"


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
