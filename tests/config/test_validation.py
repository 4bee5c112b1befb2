"""A row that would not train as its configuration says is refused, or says so in a caveat."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ds_bench.config import deepspeed_config, validation
from ds_bench.config.rules import RULES, Case
from ds_bench.config.spec import Configuration, Placement, Requirements, Workload
from ds_bench.config.strategies import REFERENCES
from ds_bench.errors import UsageError
from ds_bench.system import host_resources
from tests.support import fakes
from tests.support.deepspeed_configs import EVERY_CONFIGURATION, complete
from tests.support.lint_cases import CASES, RANKS

CUDA = Placement(accelerator="cuda", num_gpus=2, nvme_path="/mnt/nvme")
VOLTA = replace(CUDA, supported_precisions=("fp16", "fp32"))
CPU = fakes.placement()
TWO_NODES = replace(CUDA, hosts=(("a", 1), ("b", 1)))
ON, DEVICE = {"enabled": True}, {"device": "cpu"}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def refused_by(row: Configuration, on: Placement = CUDA, **changes: Any) -> str | None:
    """Name of the rule that refuses a row."""
    config = deepspeed_config.overlay(deepspeed_config.base_config(row, 4), changes)
    reason = validation.unsupported_reason(replace(row, deepspeed_config=config), on)
    case = Case(config=config, placement=on)
    name = next((rule.name for rule in RULES if rule.row in ("refusal", "ignored") and rule.when(case)), None)
    assert reason == next((rule.row_text(case) for rule in RULES if rule.name == name), None)
    return name


def caveats_of(row: Configuration, on: Placement = CPU, of: Workload | None = None, **changes: Any) -> list[str | None]:
    """Names of the rules that the caveats of a row come from."""
    config = complete(deepspeed_config.overlay(deepspeed_config.base_config(row, 4), changes))
    work = of or fakes.workload()
    texts = validation.ineffective_settings(replace(row, deepspeed_config=config), work, on)
    case = Case(config=config, workload=work, placement=on)
    names = {rule.row_text(case): rule.name for rule in RULES if rule.row == "caveat" and rule.when(case)}
    return [names.get(text) for text in texts]


def test_what_the_catalogue_offers_is_neither_refused_nor_ineffective(subtests: pytest.Subtests) -> None:
    for row in EVERY_CONFIGURATION:
        with subtests.test(row.name):
            assert refused_by(row) is None
            assert caveats_of(row) == []


def test_a_row_says_what_check_says_of_its_configuration(subtests: pytest.Subtests) -> None:
    rules = {rule.name: rule for rule in RULES if rule.row and not rule.versions}
    assert Counter(rule.row for rule in rules.values()) == {"refusal": 15, "ignored": 7, "caveat": 12}
    for name, change in CASES:
        if name in rules:
            on = replace(CUDA, num_gpus=RANKS.get(name, 2), nvme_path=None if "folder" in name else "/mnt/nvme")
            with subtests.test(name):
                if rules[name].row == "caveat":
                    assert caveats_of(fakes.zero(0), on, **change) == [name]
                else:
                    assert refused_by(fakes.zero(0), on, **change) == name


def test_machine_and_workload_decide_whether_a_row_is_refused_or_has_a_caveat(subtests: pytest.Subtests) -> None:
    offload, offload_2, stage_1 = fakes.offload("cpu_optimizer"), fakes.offload("cpu_optimizer", 2), fakes.zero(1)
    for row, on, changes, rule in (
        # On GPUs DeepSpeed's CPU Adam asserts that its parameters are in host memory.
        (fakes.offload("cpu_optimizer", 0), CPU, {}, None),
        # torch's optimizers run on tensors in host memory; Lion is a CUDA kernel only if it is not offloaded.
        (offload, CUDA, {"optimizer": {"type": "SGD"}}, None),
        (stage_1, CPU, {"optimizer": {"type": "Lion"}}, "lion-on-cpu"),
        (offload, CPU, {"optimizer": {"type": "Lion"}}, None),
        (offload_2, CUDA, zero(offload_optimizer={"device": "nvme"}), "nvme-below-stage-3"),
        (stage_1, VOLTA, {"bf16": ON}, "bf16-unsupported"),
        (stage_1, VOLTA, {"fp16": ON}, None),
        (stage_1, CPU, {"compile": {"deepcompile": True}}, "deepcompile-without-cuda"),
        (stage_1, CUDA, {"compile": {"deepcompile": True}}, None),
        (offload, CPU, zero(zero_quantized_weights=True), "qwz-without-cuda"),
        (offload, CPU, zero(zero_quantized_gradients=True), "qgz-without-cuda"),
        (offload, CPU, zero(offload_optimizer={"super_offload": True}), "superoffload-without-cuda"),
        (offload, CUDA, zero(zero_quantized_weights=True, offload_optimizer={"super_offload": True}), None),
        (offload_2, CPU, zero(zenflow={}), "zenflow-trains-other-weights"),
        (offload_2, CUDA, zero(zenflow={}), None),
        (offload, CUDA, zero(zenflow={}), "zenflow-trains-other-weights"),
        *(
            (stage_1, CUDA, {block: ON}, f"{block.replace('_', '-')}-in-a-row")
            for block in ("expert_parallel", "hybrid_engine", "autotuning", "data_efficiency")
        ),
        (stage_1, CUDA, {"expert_parallel": {"enabled": False}, "sequence_parallel_size": 1}, None),
    ):
        with subtests.test(row=row.name, on=on.accelerator, changes=changes):
            assert refused_by(row, on, **changes) == rule
    split = {"sub_group_size": 10**6, "offload_optimizer": {"ratio": 0.5}}
    factory = fakes.workload(model_source="factory")
    assert caveats_of(offload, CPU, **zero(**split)) == []
    assert caveats_of(fakes.zero(3), TWO_NODES, **zero(zero_quantized_gradients=True)) == []
    assert caveats_of(offload, CPU, factory, activation_checkpointing={}) == []
    limit = "limit-without-page-locked-memory"
    assert caveats_of(offload, replace(CUDA, cpu_memory_limit_bytes=1)) == [limit]
    assert caveats_of(offload, replace(CPU, cpu_memory_limit_bytes=1)) == []


def test_requirements_are_checked_against_the_placement() -> None:
    for needs, flag in (
        (Requirements(accelerator="cpu"), "--accelerator cpu"),
        (Requirements(min_ranks=3), "--num-gpus 3"),
        (Requirements(min_nodes=2), "--hostfile"),
    ):
        row = replace(fakes.zero(3), requires=needs)
        assert flag in (validation.unsupported_reason(row, CUDA) or "")
        enough = replace(TWO_NODES, accelerator="cpu", num_gpus=4)
        assert validation.unsupported_reason(row, enough) is None
    assert validation.unsupported_reason(replace(fakes.zero(1), refusal="no type"), CUDA) == "no type"


def refuses(on: Placement, block: dict[str, Any] | None = None, **changes: Any) -> bool:
    row = Configuration(name="x", label="X", deepspeed_config=block or {})
    return validation.unsupported_workload_reason(row, fakes.workload(**changes), on) is not None


def test_a_step_that_cannot_be_computed_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packages: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in packages else None)
    installable, on_gpus = ("flash_attn", "liger_kernel"), {"data_pin_memory": True, "data_workers": 1}
    for changes, on, installed, refused in (
        ({"attention": "eager", "loss": "chunked"}, CPU, (), False),
        ({"attention": "flash_attention_2", "loss": "liger", "pass_type": "forward"}, CUDA, installable, False),
        ({"attention": "flex_attention", "loss": "tiled", "precision": "bf16", **on_gpus}, CUDA, (), False),
        ({"attention": "eager", "model_source": "factory"}, CUDA, (), True),
        ({"attention": "flash_attention_2"}, CPU, installable, True),
        ({"attention": "flash_attention_2"}, CUDA, (), True),
        ({"attention": "flash_attention_2", "precision": "fp32"}, CUDA, installable, True),
        ({"attention": "flex_attention"}, CPU, (), True),
        ({"loss": "liger"}, CUDA, (), True),
        ({"loss": "tiled", "precision": "fp16"}, CUDA, (), True),
        (on_gpus, CPU, (), True),
        ({"data_prefetch": 4}, CUDA, (), True),
        ({"pass_type": "forward", "compile": "torch"}, CUDA, (), True),
    ):
        packages = set(installed)
        assert refuses(on, **changes) is refused, changes


def test_groups_of_ranks_that_cannot_be_made_are_refused() -> None:
    four, llama = replace(CUDA, num_gpus=4), {"model_type": "llama"}
    for tensor, sequence, changes, refused in (
        (4, 1, llama, False),
        (2, 1, {}, True),  # AutoTP does not split GPT-2
        (2, 1, {**llama, "loss": "tiled"}, True),
        (3, 1, llama, True),
        (2, 2, llama, True),
        (1, 4, {}, False),
        (1, 4, {"model_config": {"n_head": 6}}, True),
        (1, 2, {"model_config": {"n_head": 6}}, False),
        (1, 4, {"seq_length": 30}, True),
        (1, 4, {"seq_length": 4}, True),  # one token each
        (1, 2, {"attention": "eager"}, True),
        (1, 2, {"pass_type": "forward"}, True),
    ):
        block = {"tensor_parallel": {"autotp_size": tensor}, "sequence_parallel_size": sequence}
        assert refuses(four, block, **changes) is refused, (tensor, sequence, changes)


def test_ranks_are_bound_where_there_are_cores_and_numa_nodes_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    for binding, nodes, ranks, refused in (
        ("cores", [[0, 1]], 2, False),
        ("cores", [[0, 1]], 3, True),
        ("numa", [[0, 1]], 2, True),
        ("numa", [[0], [1]], 2, False),
    ):
        monkeypatch.setattr(host_resources, "numa_cpus", lambda nodes=nodes: nodes)
        assert refuses(fakes.placement(num_gpus=ranks), cpu_binding=binding) is refused


def test_a_key_that_would_be_ignored_or_refused_is_an_error_with_its_remedy(subtests: pytest.Subtests) -> None:
    for config, key, remedy in (
        ({"gradient_cliping": 1}, "gradient_cliping", "did you mean gradient_clipping?"),
        ({"bfloat16": {}}, "bfloat16", "rename it to bf16"),
        (
            {"_comment": "x"},
            "_comment",
            "remove it, or write it after //, which DeepSpeed accepts but the Trainer and Accelerate reject",
        ),
        ({"amp": {}}, "amp", "use bf16, fp16 or torch_autocast"),
        (zero(overlap_com=True), "zero_optimization.overlap_com", "did you mean overlap_comm?"),
        ({"bf16": True}, "'bf16'", "set a key inside it, like bf16.KEY=VALUE"),
    ):
        with subtests.test(key), pytest.raises(UsageError) as raised:
            validation.check_keys(config)
        assert (raised.value.problem[: len(key)], raised.value.remedy) == (key, remedy)
    validation.check_keys({"gradient_clipping": 0.5, "timers": {"throughput": ON}})


def reference(name: str, **changes: Any) -> Configuration:
    row = fakes.reference(name)
    config = deepspeed_config.overlay(deepspeed_config.base_config(row, 4, 2), changes)
    config = deepspeed_config.complete_config(config, fakes.workload(), CUDA, torch_adam=False, largest_parameter=None)
    return replace(row, deepspeed_config=config)


def test_fsdp2_on_the_cpu_needs_a_newer_torch_than_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for version in ("2.6.0+cu124", "2.7.1", None):
        monkeypatch.setattr(validation, "installed_version", lambda _package, version=version: version)
        found.append([validation.unsupported_reason(reference(name), CPU) for name in ("ddp", "fsdp2")])
    assert found[0][0] is None
    assert "needs torch 2.7" in (found[0][1] or "")
    assert found[1:] == [[None, None], [None, None]]
    monkeypatch.setattr(validation, "installed_version", lambda _package: "2.6.0")
    assert validation.unsupported_reason(reference("fsdp2"), CUDA) is None


def test_a_reference_row_is_refused_if_it_would_train_differently(subtests: pytest.Subtests) -> None:
    for name in REFERENCES:
        assert validation.unsupported_reason(reference(name), CUDA) is None
        assert validation.ineffective_settings(reference(name), fakes.workload(), CUDA) == []
    for changes, named in (
        (zero(offload_optimizer=DEVICE), "offload"),
        ({"bf16": {"enabled": False}, "fp16": ON}, "--precision bf16"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        ({"optimizer": {"type": "Lion"}}, "Lion"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler"),
        ({"torch_autocast": ON}, "torch_autocast"),
    ):
        with subtests.test(changes=changes):
            assert named in (validation.unsupported_reason(reference("fsdp2", **changes), CUDA) or "")
    row = reference("ddp", zero_optimization={"overlap_comm": False})
    (text,) = validation.ineffective_settings(row, fakes.workload(), CUDA)
    assert "zero_optimization.overlap_comm" in text
