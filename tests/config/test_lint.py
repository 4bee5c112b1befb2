"""What check finds in a configuration: each rule by a configuration that it applies to, and remedies that fit."""

from __future__ import annotations

from typing import Any

import pytest

from ds_bench.config import deepspeed_config, deepspeed_keys, lint, rules
from ds_bench.config.lint import Finding
from ds_bench.config.rules import Case, ModelSize
from ds_bench.config.spec import BATCH_KEYS
from tests.support.lint_cases import CASES, CLEAN, CPU, NVME, RANKS, WARMUP, ZENFLOW, optimizer, zero

GPT2 = ModelSize(name="gpt2", parameters=124_439_808, largest_parameter=38_597_376)
BESIDE = {
    "deepcompile-at-stage-0": {"deepcompile"},
    "bf16-optimizer-states-at-stage-0": {"bf16-master-weights-and-grads-at-stage-0"},
    "aio-text": {"text-as-number"},
}
"""Rules that apply wherever another one does."""


def check(config: dict[str, Any], **known: Any) -> list[Finding]:
    return lint.check_config({**CLEAN, **config}, **known)


def names(config: dict[str, Any], **known: Any) -> set[str]:
    return {finding.rule for finding in check(config, **known)}


def test_each_rule_applies_to_its_configuration_and_no_other_rule_does(subtests: pytest.Subtests) -> None:
    for rule, change in CASES:
        with subtests.test(rule):
            found = lint.check_config(deepspeed_config.overlay(CLEAN, change), num_gpus=RANKS.get(rule))
            assert {finding.rule for finding in found} == {rule, *BESIDE.get(rule, set())}
            assert all(finding.reason and finding.remedy and ".py" in finding.source for finding in found)
    cases = {rule for rule, _ in CASES} | {"bf16-on-an-older-gpu"}
    assert {rule.name for rule in rules.RULES if rule.level and not rule.versions} <= cases


def test_some_rules_hold_in_some_versions_only() -> None:
    """Wrong training is reported for the versions that have it: below, at and above the ends of each range."""
    accumulated, muon = {"gradient_accumulation_steps": 4}, optimizer("Muon")
    for rule, change, versions in (
        ("zero2-accumulation-7718", {**zero(2), **accumulated}, {"0.17.5": 0, "0.17.6": 1, "0.18.2": 1, "0.18.3": 0}),
        ("zero2-accumulation-7718", {**zero(1), **accumulated}, {"0.18.2": 0}),
        (
            "zero2-shared-module-8224",
            {**zero(2), "bf16": {"enabled": True}},
            {"0.18.2": 0, "0.18.3": 1, "0.19.3": 1, "0.19.4": 0},
        ),
        ("gradients-divided-twice", {**zero(0), **accumulated}, {"0.18.2": 0, "0.18.3": 1, "0.19.5": 1, "0.19.6": 0}),
        (
            "bf16-stage-1-in-fp32-7985",
            {**zero(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            {"0.18.2": 0, "0.18.3": 1, "0.18.9": 1, "0.19.0": 0},
        ),
        ("gradients-divided-twice", {**zero(3), **accumulated}, {"0.18.9": 0}),
        ("muon-updates-8463", {**zero(2, offload_optimizer=CPU), **muon}, {"0.19.7": 1, "0.19.8": 0}),
        ("stage-0-is-partitioned", {**zero(0), "bf16": {"enabled": True}}, {"0.17.5": 1, "0.17.6": 0}),
        (
            "stage-0-in-bf16-7837",
            {**zero(0), "bf16": {"enabled": True}},
            {"0.17.5": 0, "0.17.6": 1, "0.18.5": 1, "0.18.6": 0},
        ),
    ):
        config = deepspeed_config.overlay(CLEAN, change)
        (known,) = (each for each in rules.RULES if each.name == rule)
        found = {version: known.applies(Case(config=config, deepspeed_version=version)) for version in versions}
        assert found == versions, rule


def test_each_version_has_its_keys_and_defaults() -> None:
    later = {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "torch_autocast": {"enabled": True}}
    later |= zero(2, offload_optimizer=CPU, zenflow={"topk_ratio": 0.1, "update_interval": 4})
    known = {"amp": {"enabled": False}, "fp16": {"hysteresis": 4}, **optimizer("OneBitAdam")}
    found = {}
    for version in ("0.16", "0.17.1", "0.17", "0.18.2", "0.18", "0.19.6", "0.19"):
        with deepspeed_keys.use_version(version):
            unread = rules.keys_read_later({**later, **known})
            assert rules.without_later_keys({**later, **known}).keys() == {*later, *known} - unread.keys()
            # A rule about a key that is not read does not apply.
            errors = {
                name
                for name in names(optimizer("AdamW") | later)
                if name.startswith(("bf16-", "zenflow-", "unset-overflow"))
            }
            found[version] = unread, errors, sorted(names(known) & {"removed-key", "removed-optimizer", "unknown-key"})
    states, zenflow, autocast = "bf16.bf16_optimizer_states", "zero_optimization.zenflow", "torch_autocast"
    overflow, removed = "unset-overflow-check", ["removed-key", "removed-optimizer"]  # its key came with 0.17
    wrong = {overflow, "bf16-states-without-master-weights"}
    assert found == {
        "0.16": ({states: "0.18.3", zenflow: "0.17.5", autocast: "0.17.2"}, set(), []),
        "0.17.1": ({states: "0.18.3", zenflow: "0.17.5", autocast: "0.17.2"}, {overflow}, []),
        "0.17": ({states: "0.18.3"}, {overflow}, []),
        "0.18.2": ({states: "0.18.3"}, {overflow}, []),
        "0.18": ({}, wrong, []),
        "0.19.6": ({}, wrong, []),  # 0.19.7 removed the features
        "0.19": ({}, wrong, removed),
    }


def test_nothing_is_found_in_a_configuration_that_leaves_nothing_open() -> None:
    config = {
        "bf16": {"enabled": True, "check_grad_overflow": True},
        **zero(3, overlap_comm=True, offload_optimizer=CPU, offload_param=CPU, reduce_bucket_size=5e8),
        **optimizer("AdamW", lr=1e-4, betas=[0.9, 0.999], torch_adam=True),
        **WARMUP,
    }
    assert check(config, compute_capability=(8, 0)) == []
    assert names(config, compute_capability=(7, 5)) == {"bf16-on-an-older-gpu"}


def test_a_remedy_fits_the_key(subtests: pytest.Subtests) -> None:
    for config, level, remedy in (
        ({"offload_optimizer": {"device": "cpu"}}, "warning", "it belongs inside zero_optimization"),
        ({"log": {"steps_per_print": 10}}, "warning", "its steps_per_print belongs at the top level"),
        ({"comms_config": {}}, "warning", "did you mean comms_logger?"),
        ({"gradient-clipping": 1.0}, "warning", "did you mean gradient_clipping?"),
        ({"model-parallel-size": 1}, "warning", "remove it"),
        ({"fp16": {"fp16": True}}, "error", "did you mean enabled?"),
        ({"zero_optimization": {"zero_optimization": {}}}, "error", "put its keys into zero_optimization itself"),
        ({"model": {"fp16": {}, "bf16": {}}}, "warning", "its fp16, bf16 belong at the top level"),
        ({"zero_optimization": {"stage": 1, "disable_allgather": True}}, "hint", None),
        ({"bf16": {"initial_scale_power": 16}}, "error", "remove it; it is a key of fp16"),
        ({"compile": {"backend": "inductor"}}, "error", "give it to engine.compile()"),
        (zero(2, cpu_offload=True), "warning", 'write "offload_optimizer": {"device": "cpu"}'),
        (zero(2, cpu_offload=False), "warning", "remove it"),
        (zero(3, gradient_clipping=1.0), "error", "it belongs at the top level"),
        ({"zero_optimization": {"stage": [0, 1]}}, "error", "give 0, 1, 2 or 3"),
        ({"train_micro_batch_size_per_gpu": "SIZE"}, "error", "give a number"),
        (optimizer("sdg"), "error", "did you mean SGD?"),
        (optimizer("AdamW", lrr=1), "error", "did you mean lr?"),
    ):
        with subtests.test(remedy, config=config):
            assert [each.remedy for each in check(config) if each.level == level] == ([remedy] if remedy else [])
    (strangers,) = check({f"another program's key {number}": 1 for number in range(40)})
    assert "40 top-level keys" in strangers.reason
    for secret in (123456789, ["hf_abcdefghijklmnopqrstuvwxyz"]):
        (finding,) = check({"comet": {"api_key": secret}})
        assert "<redacted>" in finding.reason
        assert str(secret) not in finding.reason


def test_the_batch_keys_must_fit_the_number_of_gpus() -> None:
    for batch, num_gpus, refused in (
        ((32, 4, 1), 8, False),
        ((32, 4, 1), 4, True),
        ((32, 4, 3), None, True),
        ((32, None, None), 5, True),
        ((32, "auto", 3), 5, False),
    ):
        config = dict(zip(BATCH_KEYS, batch, strict=True))
        assert ("batch-size" in names(config, num_gpus=num_gpus)) is refused, (batch, num_gpus)
    shared = dict(zip(BATCH_KEYS, (16, 4, 1), strict=True)) | {"sequence_parallel_size": 2}
    assert "batch-size" not in names(shared, num_gpus=8)


def test_buffers_are_compared_with_the_model() -> None:
    found = {finding.rule: finding for finding in check(zero(3), model=GPT2)}
    assert found.keys() == {"bucket-larger-than-model", "model-stays-gathered"}
    assert found["bucket-larger-than-model"].remedy == "set it to 120000000 or less"
    assert check(zero(3, reduce_bucket_size=10**6, stage3_max_live_parameters=10**6), model=GPT2) == []
    assert names(zero(2), model=GPT2) == {"bucket-larger-than-model"}
    assert check(zero(0), model=GPT2) == []
    alone = names(zero(3), model=GPT2, num_gpus=1), names(zero(3, offload_param=CPU), model=GPT2, num_gpus=1)
    assert ["model-stays-gathered" in each for each in alone] == [False, True]
    buffer = zero(3, offload_param={**NVME, "max_in_cpu": 0, "buffer_size": 10**7})
    assert "swap-buffer-too-small" in names(buffer, model=GPT2, num_gpus=2)
    assert "swap-buffer-too-small" not in names(buffer, model=GPT2, num_gpus=4)
    split = zero(3, sub_group_size=10**7, offload_optimizer={**CPU, "ratio": 0.5})
    assert check(split) == []
    assert "ratio-with-one-sub-group" in names(split, model=GPT2, num_gpus=16)


def test_an_auto_is_explained_unless_deepspeed_knows_it() -> None:
    both = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    (finding,) = check(both)
    assert " and trains in fp32" in finding.reason
    assert "fp32" not in check({**both, "bf16": {"enabled": True, "check_grad_overflow": True}})[0].reason
    known = {"data_types": {"keep_in_fp32_modules": "auto"}}
    known |= zero(2, offload_optimizer=CPU, zenflow={**ZENFLOW, "auto_ratio": 0.5, "update_interval": 2})
    assert not [name for name in names(known) if "automatic" in name]
