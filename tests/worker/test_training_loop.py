"""The rank's own parts that need torch but no DeepSpeed process."""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_bench.config.spec import Placement
from ds_bench.launch import rank_environment
from ds_bench.records.rank_files import HeartbeatWriter, read_beat
from ds_bench.worker import ledger, memory, training_loop
from ds_bench.worker import model as build
from ds_bench.worker.failure import kind_of, rank_failure
from ds_bench.worker.resolved_config import plain


def real_host_refusal() -> BaseException:
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("an exabyte was allocated")


NCCL_CALLOC = torch.distributed.DistBackendError(
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2049, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nFailed to CUDA calloc async 608 bytes"
)
KINDS = [
    (NCCL_CALLOC, "device_oom"),
    (RuntimeError("Triton Error [CUDA]: out of memory"), "device_oom"),
    (RuntimeError("ncclUnhandledCudaError\nLast error:\nFailed to CUDA host alloc 1048576 bytes"), "host_oom"),
    (RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed."), "peer_lost"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), "device_oom"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device_oom"),
    (RuntimeError("CUDA error: out of memory"), "device_oom"),
    (MemoryError(), "host_oom"),
    (real_host_refusal(), "host_oom"),
    (RuntimeError("std::bad_alloc"), "host_oom"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "host_oom"),
    (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
    (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3"), "peer_lost"),
    (torch.distributed.DistBackendError("NCCL error in: x.cpp:1, remote process exited"), "peer_lost"),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "other"),
    (KeyError("out of order"), "other"),
]


def test_a_failure_of_pydantic_names_the_field_and_the_reason() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    with pytest.raises(ValueError, match="overlap_com") as caught:
        DeepSpeedZeroConfig(stage=1, overlap_com=True)
    message = rank_failure(caught.value, rank=0, phase="init", step=None).message
    assert message.startswith("1 validation error for DeepSpeedZeroConfig: overlap_com: Extra inputs are not permitted")


def test_a_bare_assert_is_told_by_its_source_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_check.py").write_text("def check(size):\n    assert size % 2 == 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(AssertionError) as caught:
        importlib.import_module("own_check").check(3)
    message = rank_failure(caught.value, rank=0, phase="init", step=None).message
    assert message == f"assert size % 2 == 0 ({tmp_path}/own_check.py:2)"


@pytest.mark.parametrize(("error", "kind"), KINDS, ids=lambda value: str(value)[:30])
def test_an_exception_is_of_the_kind_its_text_and_class_say(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


def test_bytes_asked_and_free_are_read_from_an_out_of_memory_error() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.65 GiB of which 512.00 MiB "
        "is free. Including non-PyTorch memory, this process has 22.00 GiB memory in use."
    )
    failure = rank_failure(torch.OutOfMemoryError(text), rank=1, phase="backward", step=7)
    assert (failure.requested_bytes, failure.free_bytes) == (int(1.5 * 2**30), 512 * 2**20)
    assert (failure.rank, failure.phase, failure.step) == (1, "backward", 7)


NO_HANDLE = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize(("free", "kind"), [(100 * 2**20, "device_oom"), (40 * 2**30, "other"), (None, "other")])
def test_a_cublas_handle_that_cannot_be_made_is_a_lack_of_memory_where_little_is_free(
    free: int | None, kind: str
) -> None:
    failure = rank_failure(NO_HANDLE, rank=0, phase="forward", step=0, device_free_bytes=free)
    assert (failure.kind, failure.free_bytes) == (kind, free)


def test_what_a_text_says_was_free_goes_before_what_was_free_once_it_was_caught() -> None:
    text = "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has 23.65 GiB of which 512.00 MiB is free."
    failure = rank_failure(torch.OutOfMemoryError(text), rank=0, phase="step", step=1, device_free_bytes=2**40)
    assert failure.free_bytes == 512 * 2**20


def test_nccl_names_the_bytes_it_could_not_get() -> None:
    assert rank_failure(NCCL_CALLOC, rank=0, phase="init", step=None).requested_bytes == 608


def test_bytes_are_unknown_where_the_text_names_none() -> None:
    failure = rank_failure(RuntimeError("CUDA error: out of memory"), rank=0, phase="step", step=None)
    assert (failure.requested_bytes, failure.free_bytes) == (None, None)


def test_weights_depend_on_seed_and_name_and_not_on_the_order_of_building() -> None:
    a = torch.nn.ModuleDict({"x": torch.nn.Linear(8, 8), "y": torch.nn.Linear(8, 8)})
    b = torch.nn.ModuleDict({"y": torch.nn.Linear(8, 8), "x": torch.nn.Linear(8, 8)})
    for model in (a, b):
        build.redraw_weights(model, seed=3)
    assert torch.equal(a["x"].weight, b["x"].weight)
    assert not torch.equal(a["x"].weight, a["y"].weight)


def test_every_parameter_that_is_drawn_anew_is_a_sign_of_life() -> None:
    beats: list[None] = []
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
    build.redraw_weights(model, seed=3, alive=lambda: beats.append(None))
    assert len(beats) == 6


def test_no_collective_ends_before_the_trials_own_limits(tmp_path: Path) -> None:
    """In a process group that DeepSpeed makes for itself too; torch's own default for NCCL is 10 minutes."""
    program = f"""
import os
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
import torch.distributed
from types import SimpleNamespace
from ds_bench.worker import measure
measure._meet(SimpleNamespace(rendezvous="file://{tmp_path}/meet", collective_timeout_seconds=7320.0), "cpu")
groups = torch.distributed.distributed_c10d
import deepspeed.comm
for group in (None, deepspeed.comm.new_group([0])):
    backend = (group or groups._get_default_group())._get_backend(torch.device("cpu"))
    print(backend.options._timeout.total_seconds(), flush=True)
print(groups._get_default_timeout("nccl").total_seconds())
"""
    variables = rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ, None)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=False)
    assert done.stdout.split()[-3:] == ["7320.0"] * 3, done.stderr


def test_a_dropout_is_set_in_configurations_modules_and_the_values_that_functions_get() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    def built(dropout: float | None, **own: float) -> torch.nn.Module:
        config = AutoConfig.for_model(
            "opt", vocab_size=16, hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=2, **own
        )
        if dropout is not None:
            build._set_config_dropouts(config, dropout)
        return AutoModelForCausalLM.from_config(config)

    assert build.greatest_dropout(built(None)) == 0.1
    assert build.greatest_dropout(built(None, attention_dropout=0.3)) == 0.3
    assert build.greatest_dropout(built(0.0, layerdrop=0.5)) == 0.0
    model = torch.nn.ModuleList([built(None), torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2)])
    build.set_dropouts(model, 0.25)
    assert {value for _, _, value in build._dropouts(model)} == {0.25}
    assert model[1].dropout1.p == model[1].self_attn.dropout == 0.25
    assert build.greatest_dropout(torch.nn.Linear(2, 2)) == 0.0


def test_shared_parameters_are_counted_once() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4, bias=False), "b": torch.nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    assert sum(build.parameter_sizes(model)) == 16


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, torch.float32),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"fp16": {"enabled": True}}, torch.float16),
        ({"bf16": {"enabled": False}}, torch.float32),
    ],
)
def test_parameters_have_the_format_that_the_configuration_says(config: dict[str, Any], dtype: torch.dtype) -> None:
    assert build.training_dtype(config) is dtype


def batches(make_batch: build.MakeBatch | None = None, **changes: Any) -> list[training_loop.Batch]:
    arguments: dict[str, Any] = {
        "batch_size": 3,
        "seq_length": 5,
        "seed": 1,
        "rank": 0,
        "count": 4,
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
    }
    return training_loop.make_batches(make_batch or training_loop.random_tokens(11), **{**arguments, **changes})


def test_data_is_the_same_for_one_rank_and_seed_and_other_for_another_rank() -> None:
    ids = [batch["input_ids"] for batch in batches()]
    again = [batch["input_ids"] for batch in batches()]
    assert all(torch.equal(x, y) for x, y in zip(ids, again, strict=True))
    assert not torch.equal(ids[0], batches(rank=1)[0]["input_ids"])
    assert not torch.equal(ids[0], ids[1])


def test_tokens_lie_inside_the_vocabulary_and_labels_are_the_same_ids() -> None:
    for batch in batches():
        assert batch["input_ids"].shape == (3, 5)
        assert int(batch["input_ids"].min()) >= 0
        assert int(batch["input_ids"].max()) < 11
        assert batch["labels"] is batch["input_ids"]


def test_batches_of_a_factorys_own_are_cast_differ_by_rank_and_are_not_more_than_fit() -> None:
    def images(batch_size: int, _seq_length: int, generator: torch.Generator) -> training_loop.Batch:
        return {"pixels": torch.randn(batch_size, 2**23, generator=generator), "labels": torch.arange(batch_size)}

    made, other = batches(images, count=64), batches(images, count=1, rank=1)
    assert len(made) == 6  # 48 MB each in bf16: 256 MB are passed with the sixth
    assert (made[0]["pixels"].dtype, made[0]["labels"].dtype) == (torch.bfloat16, torch.int64)
    assert not torch.equal(made[0]["pixels"], other[0]["pixels"])


def test_what_is_no_batch_of_so_many_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensor of 3 samples"):
        batches(lambda *_asked: {"x": torch.zeros(2, 3)})
    with pytest.raises(TypeError, match="dict of tensors"):
        batches(lambda *_asked: torch.zeros(3, 3))  # type: ignore[arg-type, return-value]


class FakeEngine:
    """Counts calls like an engine with two micro-batches a step; its loss is the number of the forward pass."""

    def __init__(self, skipped: int = 0, scales: bool = False) -> None:
        self.calls: list[str] = []
        self.skipped_steps = skipped
        self._scales = scales

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
    assert samples.window_seconds >= sum(samples.step_seconds) > 0


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
    trainer(tmp_path, FakeEngine()).timed(3)
    beat = read_beat(tmp_path, 0)
    assert beat is not None
    assert (beat.phase, beat.step) == ("step", 3)


@pytest.mark.parametrize("output", [SimpleNamespace(loss=torch.tensor(1.0)), (torch.tensor(1.0), 2), torch.tensor(1.0)])
def test_the_loss_is_found_in_what_models_return(output: object) -> None:
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
    assert memory.device_init_peak("cpu") is None


def test_the_high_water_mark_sees_a_peak_between_two_looks() -> None:
    assert memory.reset_host_peak()
    before = memory.status_bytes("VmHWM")
    block = torch.ones(200 * 2**20, dtype=torch.uint8)
    del block
    after = memory.status_bytes("VmHWM")
    assert before is not None
    assert after is not None
    assert after - before > 150 * 2**20


def test_a_storage_is_counted_once_however_many_tensors_show_it() -> None:
    count = ledger.StorageCounter()
    base = torch.zeros(1000)
    count.claim("parameters", [base, base[10:20], base.view(10, 100)])
    count.claim("other", [base[5:]])
    assert count.ledger == {"cpu": {"parameters": 4000}}


def test_activations_are_what_autograd_saves_without_the_parameters() -> None:
    layer = torch.nn.Linear(10, 10, bias=False)
    data = torch.randn(7, 10)
    result, tiers = ledger.with_activations(lambda: (layer(data).exp() * 2).sum(), layer.parameters())
    assert result.requires_grad
    assert tiers == {"cpu": data.nbytes + 7 * 10 * 4}  # the input of the product and the result of exp


def test_the_peak_of_two_ledgers_is_taken_cell_by_cell() -> None:
    assert ledger.peak_of({"cpu": {"a": 1, "b": 5}}, {"cpu": {"a": 3}, "gpu": {"c": 2}}) == {
        "cpu": {"a": 3, "b": 5},
        "gpu": {"c": 2},
    }


def test_swap_files_are_counted_by_rank_and_category(tmp_path: Path) -> None:
    for path, size in {
        "zero_stage_3/optimizer/rank0/1.tensor.swp": 100,
        "zero_stage_3/bfloat16params/rank0/0_param.tensor.swp": 10,
        "zero_stage_3/optimizer/rank1/1.tensor.swp": 7,
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
    assert ledger.swapped_bytes(str(tmp_path), 0) == {"optimizer_states": 100, "parameters": 10}
    assert ledger.swapped_bytes(None, 0) == {}


def test_a_resolved_configuration_is_plain_json_whatever_is_in_it() -> None:
    values = {"a": math.inf, "b": {1: torch.bfloat16}, "c": (1, None, True), "d": {3.5}}
    assert json.loads(json.dumps(plain(values), allow_nan=False)) == {
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

    assert plain(Config()) == {"enabled": False, "inner": "<object object>"}
    assert " at 0x" not in str(plain({"x": [Config(), object(), len, lambda: 1]}))
    loop = Config()
    loop.inner = loop
    assert " at 0x" not in str(plain(loop))
