"""The measured steps of a rank: micro-batches, warm-up, losses, times and what the device reports."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_bench.config.spec import Placement
from ds_bench.launch import rank_environment
from ds_bench.records.rank_files import HeartbeatWriter, read_beat
from ds_bench.worker import memory, training_loop
from ds_bench.worker.resolved_config import to_json_value
from tests.support.batches import batches


def test_no_collective_ends_before_the_trials_own_limits(tmp_path: Path) -> None:
    """In a process group that DeepSpeed makes for itself too; torch's own default for NCCL is 10 minutes."""
    program = f"""
import os
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
import torch.distributed
from types import SimpleNamespace
from ds_bench.worker.rendezvous import connect_ranks
assignment = SimpleNamespace(rendezvous="file://{tmp_path}/meet", collective_timeout_seconds=7320.0)
connect_ranks(assignment, "cpu")
groups = torch.distributed.distributed_c10d
import deepspeed.comm
for group in (None, deepspeed.comm.new_group([0])):
    backend = (group or groups._get_default_group())._get_backend(torch.device("cpu"))
    print(backend.options._timeout.total_seconds(), flush=True)
print(groups._get_default_timeout("nccl").total_seconds())
"""
    variables = rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=False)
    assert done.stdout.split()[-3:] == ["7320.0"] * 3, done.stderr


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


def test_a_step_is_every_micro_batch_forward_and_backward_and_its_loss_their_mean(tmp_path: Path) -> None:
    engine = FakeEngine()
    subject = trainer(tmp_path, engine)
    subject.step()
    assert engine.calls == ["forward", "backward", "step"] * 2
    assert subject.losses() == [1.5]


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


def test_bf16_does_not_wait_for_a_loss_scale(tmp_path: Path) -> None:
    assert len(training_loop.warm_up(trainer(tmp_path, FakeEngine(skipped=2)), 2)) == 2


def test_a_loss_that_is_not_finite_is_none(tmp_path: Path) -> None:
    subject = trainer(tmp_path, FakeEngine())
    subject._losses = [[torch.tensor(float("nan"))], [torch.tensor(float("inf"))], [torch.tensor(2.0)]]
    assert subject.losses() == [None, None, 2.0]


def test_a_beat_tells_phase_and_step(tmp_path: Path) -> None:
    trainer(tmp_path, FakeEngine()).time_steps(3)
    beat = read_beat(tmp_path, 0)
    assert beat is not None
    assert (beat.phase, beat.step) == ("step", 3)


def test_the_loss_is_found_in_what_models_return(subtests: pytest.Subtests) -> None:
    for output in (SimpleNamespace(loss=torch.tensor(1.0)), (torch.tensor(1.0), 2), torch.tensor(1.0)):
        with subtests.test(output=output):
            assert float(training_loop.loss_of(output)) == 1.0


def test_a_model_without_a_loss_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="without a loss"):
        training_loop.loss_of("text")


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
    clock = training_loop.StepClock("cuda")
    for _ in range(3):
        clock.mark()
    assert log == ["record"] * 3
    assert clock.seconds() == [0.25, 0.25]
    assert log[-1] == "synchronize"


def test_gpu_fields_come_from_the_allocator_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 5})
    for name, value in {
        "max_memory_allocated": 40,
        "max_memory_reserved": 50,
        "memory_allocated": 20,
        "memory_reserved": 45,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    facts = memory.device_facts("cuda", retries_before=3, limit_bytes=60)
    assert facts == {
        "gpu_total_bytes": 60,
        "gpu_peak_bytes": 40,
        "gpu_peak_reserved_bytes": 50,
        "gpu_allocated_bytes": 20,
        "gpu_reserved_bytes": 45,
        "gpu_device_used_bytes": 70,
        "gpu_alloc_retries": 2,
    }


def test_without_a_gpu_no_field_of_one_is_made_up() -> None:
    assert memory.device_facts("cpu", 0, None) == {}


def measured_phases() -> memory.PhaseMeter:
    """200 MB are taken in ``build`` and freed in ``initialize``; 100 MB come and go within ``first_step``."""
    meter = memory.PhaseMeter("cpu")
    meter.end("import")
    block = torch.ones(200 * 2**20, dtype=torch.uint8)
    meter.end("build")
    del block
    meter.end("initialize")
    torch.ones(100 * 2**20, dtype=torch.uint8)
    meter.end("first_step")
    meter.end("steady")
    return meter


def test_the_high_water_mark_of_each_phase_sees_what_came_and_went_within_it() -> None:
    meter = measured_phases()
    assert meter.can_reset
    peak = {phase: (sizes["host_peak_bytes"] or 0) // 2**20 for phase, sizes in meter.phases.items()}
    end = {phase: (sizes["host_end_bytes"] or 0) // 2**20 for phase, sizes in meter.phases.items()}
    assert end["build"] - end["import"] > 150
    assert peak["initialize"] - end["initialize"] > 150
    assert peak["first_step"] - end["first_step"] > 75
    assert peak["steady"] - end["steady"] < 50
    assert meter.highest("host_peak_bytes", *meter.phases) == max(
        sizes["host_peak_bytes"] or 0 for sizes in meter.phases.values()
    )
    for sizes in meter.phases.values():
        assert 0 < (sizes["host_end_pss_bytes"] or 0) <= (sizes["host_end_bytes"] or 0) + 2**20


def test_without_a_reset_only_a_peak_above_all_before_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.reset_host_peak()
    monkeypatch.setattr(memory, "reset_host_peak", lambda: False)
    meter = measured_phases()
    assert not meter.can_reset
    known = [phase for phase, sizes in meter.phases.items() if sizes["host_peak_bytes"] is not None]
    assert known == ["import", "build"]


def test_a_resolved_configuration_is_plain_json_whatever_is_in_it() -> None:
    values = {"a": math.inf, "b": {1: torch.bfloat16}, "c": (1, None, True), "d": {3.5}}
    assert json.loads(json.dumps(to_json_value(values), allow_nan=False)) == {
        "a": "inf",
        "b": {"1": "torch.bfloat16"},
        "c": [1, None, True],
        "d": [3.5],
    }


def test_an_object_of_deepspeeds_own_is_told_by_its_fields_and_never_by_its_address() -> None:
    class Config:
        def __init__(self) -> None:
            self.enabled = False
            self.inner = object()

    assert to_json_value(Config()) == {"enabled": False, "inner": "<object object>"}
    assert " at 0x" not in str(to_json_value({"x": [Config(), object(), len, lambda: 1]}))
    loop = Config()
    loop.inner = loop
    assert " at 0x" not in str(to_json_value(loop))
