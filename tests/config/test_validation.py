"""What DeepSpeed would silently not do, or ignore, is refused with the remedy."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import Any

import pytest

from ds_bench.config import deepspeed_config, validation
from ds_bench.config.spec import Configuration, Placement, Requirements, Strategy, Workload
from ds_bench.config.strategies import make_configuration
from ds_bench.errors import UsageError
from ds_bench.system import host_memory
from tests.support import fakes
from tests.support.deepspeed_configs import EVERY_CONFIGURATION, complete

CUDA = Placement(accelerator="cuda", num_gpus=1, nvme_path="/mnt/nvme")


def refusal(strategy: Configuration, on: Placement = CUDA, **changes: Any) -> str | None:
    config = deepspeed_config.overlay(deepspeed_config.base_config(strategy, 4), changes)
    return validation.unsupported_reason(replace(strategy, deepspeed_config=config), on)


def workload_refusal(workload: Workload, placement: Placement, config: dict[str, Any] | None = None) -> str | None:
    row = Configuration(name="x", label="X", deepspeed_config=config or {})
    return validation.unsupported_workload_reason(row, workload, placement)


def test_what_the_catalogue_offers_at_its_own_stage_is_not_refused(subtests: pytest.Subtests) -> None:
    for strategy in EVERY_CONFIGURATION:
        with subtests.test(strategy.name):
            assert refusal(strategy) is None


def test_stage_0_offloads_its_optimizer_on_the_cpu_accelerator_alone() -> None:
    """On GPUs DeepSpeed's CPU Adam asserts that its parameters are in host memory."""
    row = fakes.offload("cpu_optimizer", 0)
    assert "stops in its first step" in (refusal(row) or "")
    assert refusal(row, fakes.placement()) is None


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_are_offloaded_at_stage_3_only(stage: int) -> None:
    assert "parameters are offloaded at stage 3 only" in (refusal(fakes.offload("cpu_full", stage)) or "")


@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_on_nvme_below_stage_3_is_refused_since_it_would_run_on_the_cpu(stage: int) -> None:
    strategy = make_configuration(Strategy(name="x", label="X", stage=stage, offload_optimizer="nvme"))
    assert "runs as CPU offload" in (refusal(strategy) or "")


def test_nvme_without_a_folder_is_refused_with_the_flag_that_gives_one() -> None:
    assert "--nvme-path" in (refusal(fakes.offload("nvme"), Placement(accelerator="cuda")) or "")


def test_the_cpu_optimizer_is_allowed_at_every_stage_above_0(subtests: pytest.Subtests) -> None:
    for stage in (1, 2, 3):
        with subtests.test(stage=stage):
            assert refusal(fakes.offload("cpu_optimizer", stage)) is None


def test_every_optimizer_but_lamb_can_be_offloaded(subtests: pytest.Subtests) -> None:
    """torch's run on the tensors in host memory; Lamb is a CUDA kernel alone."""
    for name in ("Adam", "AdamW", "Adagrad", "Lion", "SGD", "Muon", "RMSprop"):
        with subtests.test(name):
            assert refusal(fakes.offload("cpu_optimizer"), optimizer={"type": name}) is None
    assert "no CPU version" in (refusal(fakes.offload("cpu_optimizer"), optimizer={"type": "Lamb"}) or "")


def test_lion_needs_a_gpu_or_the_cpu_op() -> None:
    cpu = fakes.placement()
    assert "FusedLion" in (refusal(fakes.zero(1), cpu, optimizer={"type": "Lion"}) or "")
    assert refusal(fakes.offload("cpu_optimizer"), cpu, optimizer={"type": "Lion"}) is None


def test_two_precisions_at_once_are_refused() -> None:
    assert "both" in (refusal(fakes.zero(1), bf16={"enabled": True}, fp16={"enabled": True}) or "")
    assert refusal(fakes.zero(1), bf16={"enabled": True}, fp16={"enabled": False}) is None


def test_a_precision_this_device_lacks_is_refused_with_the_remedy() -> None:
    volta = Placement(accelerator="cuda", supported_precisions=("fp16", "fp32"))
    assert "bf16 is not supported on this cuda device" in (refusal(fakes.zero(1), volta, bf16={"enabled": True}) or "")
    assert refusal(fakes.zero(1), volta, fp16={"enabled": True}) is None


def test_deepcompile_runs_on_cuda_alone() -> None:
    block = {"compile": {"deepcompile": True}}
    assert "DeepCompile runs on CUDA alone" in (refusal(fakes.zero(1), fakes.placement(), **block) or "")
    assert refusal(fakes.zero(1), CUDA, **block) is None
    for stage, said in ((0, True), (3, False)):
        config = deepspeed_config.base_config(fakes.zero(stage), 4) | block
        row = replace(fakes.zero(stage), deepspeed_config=config)
        caveats = validation.ineffective_settings(row, fakes.workload(), CUDA)
        assert any("instead of DeepCompile" in each for each in caveats) is said


def test_what_needs_cuda_is_refused_on_cpu_ranks_whoever_asks_for_it(subtests: pytest.Subtests) -> None:
    """Of a file or a flag as of the axes qwz, qgz and superoffload."""
    for key, said in (
        ("zero_quantized_weights", "the op that quantises exists for CUDA alone"),
        ("zero_quantized_gradients", "the op that quantises exists for CUDA alone"),
        ("offload_optimizer.super_offload", "its optimizer refuses the CPU accelerator"),
    ):
        change = deepspeed_config.nested(f"zero_optimization.{key}", True)
        with subtests.test(key):
            assert said in (refusal(fakes.offload("cpu_optimizer"), fakes.placement(), **change) or "")
            assert refusal(fakes.offload("cpu_optimizer"), CUDA, **change) is None


def test_a_way_to_compute_a_step_that_does_not_run_here_is_refused(subtests: pytest.Subtests) -> None:
    for changes, accelerator, said in (
        ({"attention": "flash_attention_2"}, "cpu", "runs on GPUs alone; use sdpa"),
        ({"attention": "flash_attention_2", "precision": "fp32"}, "cuda", "computes in 16 bit alone; use"),
        ({"attention": "flex_attention"}, "cpu", "trains on GPUs alone; use sdpa"),
        ({"attention": "eager", "model_source": "factory"}, "cuda", "chooses its attention itself, not eager"),
        ({"data_pin_memory": True, "data_workers": 1}, "cpu", "pins no memory"),
        ({"data_prefetch": 4}, "cuda", "are of a data loader; add data_workers"),
        ({"loss": "liger"}, "cpu", "runs on GPUs alone; use chunked or tiled"),
        ({"loss": "tiled", "precision": "fp16"}, "cuda", "which fp16 needs; use --precision bf16"),
    ):
        with subtests.test(changes=changes, accelerator=accelerator):
            placement = Placement(accelerator=accelerator)
            assert said in (workload_refusal(fakes.workload(**changes), placement) or "")
            assert workload_refusal(fakes.workload(attention="eager", loss="chunked"), placement) is None


def test_groups_of_ranks_that_cannot_be_made_are_refused(subtests: pytest.Subtests) -> None:
    for block, changes, said in (
        ({"tensor_parallel": {"autotp_size": 2}}, {}, "does not know how to split gpt2"),
        ({"tensor_parallel": {"autotp_size": 2}}, {"model_type": "llama", "loss": "tiled"}, "use loss model"),
        ({"tensor_parallel": {"autotp_size": 3}}, {"model_type": "llama"}, "does not divide the 4 ranks"),
        ({"sequence_parallel_size": 4}, {"model_config": {"n_head": 6}}, "does not divide the 6 attention heads"),
        ({"sequence_parallel_size": 4}, {"seq_length": 30}, "use a multiple of 4"),
        ({"sequence_parallel_size": 4}, {"seq_length": 4}, "into two tokens or more each"),
        ({"sequence_parallel_size": 2}, {"attention": "eager"}, "does not split eager attention"),
        ({"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}}, {"model_type": "llama"}, "keep one"),
        ({"sequence_parallel_size": 4}, {}, None),
        ({"tensor_parallel": {"autotp_size": 4}}, {"model_type": "llama"}, None),
    ):
        with subtests.test(block=block, changes=changes):
            work, placement = fakes.workload(**changes), Placement(accelerator="cuda", num_gpus=4)
            found = workload_refusal(work, placement, block)
            assert said in (found or "") if said else found is None


def test_ranks_are_bound_where_there_are_cores_and_numa_nodes_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    for binding, nodes, ranks, said in (
        ("cores", [[0, 1]], 2, None),
        ("cores", [[0, 1]], 3, "3 ranks cannot be bound to 2 cores"),
        ("numa", [[0, 1]], 2, "this machine has one NUMA node; use cpu_binding cores"),
        ("numa", [[0], [1]], 2, None),
    ):
        monkeypatch.setattr(host_memory, "numa_cpus", lambda nodes=nodes: nodes)
        found = workload_refusal(fakes.workload(cpu_binding=binding), fakes.placement(num_gpus=ranks))
        assert said in (found or "") if said else found is None


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, package in (({"loss": "liger"}, "liger_kernel"), ({"attention": "flash_attention_2"}, "flash_attn")):
        for spec, refused in ((None, True), (object(), False)):
            monkeypatch.setattr(importlib.util, "find_spec", lambda _name, spec=spec: spec)
            said = workload_refusal(fakes.workload(**changes), CUDA)
            assert said is None if not refused else f"needs the package {package}" in (said or "")


def test_a_refusal_ends_with_what_to_do(subtests: pytest.Subtests) -> None:
    for name, stage in (("cpu_full", 2), ("nvme", 1), ("cpu_optimizer", 0)):
        with subtests.test(name):
            assert "; use" in (refusal(fakes.offload(name, stage)) or "")


def test_a_block_that_would_do_nothing_here_is_refused_with_the_remedy(subtests: pytest.Subtests) -> None:
    for block in (
        {"expert_parallel": {"enabled": True}},
        {"hybrid_engine": {"enabled": True}},
        {"autotuning": {"enabled": True}},
        {"data_efficiency": {"enabled": True}},
        {"pipeline": {}},
    ):
        with subtests.test(block=block):
            assert "remove" in (refusal(fakes.zero(3), **block) or "")


def test_a_block_that_is_switched_off_is_not_refused(subtests: pytest.Subtests) -> None:
    for block in (
        {},
        {"compile": {"deepcompile": False}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"sequence_parallel_size": 1},
        {"expert_parallel": {"enabled": False}},
        {"autotuning": None},
    ):
        with subtests.test(block=block):
            assert refusal(fakes.zero(3), **block) is None


def test_what_a_configuration_requires_is_asked_of_the_placement(subtests: pytest.Subtests) -> None:
    for needs, named in (
        (Requirements(accelerator="cpu"), "--accelerator cpu"),
        (Requirements(min_ranks=2), "--num-gpus 2"),
        (Requirements(min_nodes=2), "--hostfile"),
    ):
        with subtests.test(needs=needs, named=named):
            row = replace(fakes.zero(3), requires=needs)
            assert named in (refusal(row) or "")
            assert refusal(row, Placement(accelerator="cpu", num_gpus=2, hosts=(("a", 1), ("b", 1)))) is None


def inactive(
    strategy: Configuration, on: Placement | None = None, of: Workload | None = None, **changes: Any
) -> list[str]:
    config = complete(deepspeed_config.overlay(deepspeed_config.base_config(strategy, 4), changes))
    completed = replace(strategy, deepspeed_config=config)
    return validation.ineffective_settings(completed, of or fakes.workload(), on or fakes.placement())


def test_nothing_in_the_catalogue_is_inactive_or_slows_what_is_measured(subtests: pytest.Subtests) -> None:
    for strategy in EVERY_CONFIGURATION:
        with subtests.test(strategy.name):
            assert inactive(strategy) == []


def test_what_changes_nothing_or_slows_the_steps_is_said_beside_the_row(subtests: pytest.Subtests) -> None:
    for changes, said in (
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, "ratio below 1 has no effect"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients has no effect"),
        ({"activation_checkpointing": {}}, "use --activation-checkpointing"),
        ({"comms_logger": {"enabled": False}}, "makes every collective synchronous"),
        ({"wall_clock_breakdown": True}, "synchronises the device"),
        ({"flops_profiler": {"enabled": True}}, "instruments a step"),
        ({"timers": {"throughput": {"enabled": True}}}, "the throughput timer"),
        ({"aio": {"thread_count": 4}}, "intra_op_parallelism"),
    ):
        with subtests.test(changes=changes):
            found = inactive(fakes.offload("cpu_optimizer"), **changes)
            assert len(found) == 1
            assert said in found[0]


def test_super_offload_below_stage_3_is_said_and_at_stage_3_is_not() -> None:
    changes = {"zero_optimization": {"offload_optimizer": {"super_offload": True}}}
    assert any("super_offload" in each for each in inactive(fakes.offload("cpu_optimizer", 2), **changes))
    assert inactive(fakes.offload("cpu_optimizer", 3), **changes) == []


def test_what_has_an_effect_after_all_is_not_said() -> None:
    split = {"zero_optimization": {"sub_group_size": 10**6, "offload_optimizer": {"ratio": 0.5}}}
    assert inactive(fakes.offload("cpu_optimizer"), **split) == []
    quantized = {"zero_optimization": {"zero_quantized_gradients": True}}
    assert inactive(fakes.zero(3), fakes.placement(hosts=(("a", 1), ("b", 1))), **quantized) == []
    own = fakes.workload(model="my.models:build", model_source="factory", model_type=None, model_config={})
    assert inactive(fakes.zero(3), of=own, activation_checkpointing={}) == []


def test_a_misspelt_key_is_refused_with_its_neighbour(subtests: pytest.Subtests) -> None:
    for typed, meant in (
        ("gradient_cliping", "gradient_clipping"),
        ("zero_optimisation", "zero_optimization"),
        ("bfloat16", "bf16"),
    ):
        with (
            subtests.test(typed),
            pytest.raises(UsageError, match=f"unknown top-level key '{typed}'.*did you mean '{meant}'"),
        ):
            validation.check_keys({typed: 1})


def test_a_key_like_none_is_refused_without_a_guess() -> None:
    with pytest.raises(UsageError, match="DeepSpeed would ignore it silently; remove it"):
        validation.check_keys({"qqqqq": 1})


def test_a_block_that_is_no_object_is_refused_with_the_way_to_write_it(subtests: pytest.Subtests) -> None:
    for key, value in (("bf16", True), ("optimizer", "SGD"), ("zero_optimization", 3)):
        with (
            subtests.test(key),
            pytest.raises(UsageError, match=f"'{key}' in the DeepSpeed config is .*, not an object .*{key}.KEY=VALUE"),
        ):
            validation.check_keys({key: value})
