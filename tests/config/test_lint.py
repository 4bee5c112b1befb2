"""What check finds in a configuration: each rule by a configuration that it applies to, and the texts that matter."""

from __future__ import annotations

from typing import Any

import pytest

from ds_bench.config import deepspeed_config, lint, rules
from ds_bench.config.lint import Finding
from ds_bench.config.rules import ModelSize
from tests.support.lint_cases import CASES, CLEAN, CPU, NVME, RANKS, WARMUP, ZENFLOW, optimizer, zero

GPT2 = ModelSize(name="gpt2", parameters=124_439_808, largest_parameter=38_597_376)


BESIDE = {
    "deepcompile-at-stage-0": {"deepcompile"},
    "bf16-optimizer-states-at-stage-0": {"bf16-master-weights-and-grads-at-stage-0"},
    "aio-text": {"text-as-number"},
}
"""Rules that apply wherever another one does."""


def check(config: dict[str, Any], **known: Any) -> list[Finding]:
    return lint.check_config(config, **known)


def test_each_rule_applies_to_its_configuration_and_no_other_rule_does(subtests: pytest.Subtests) -> None:
    for rule, change in CASES:
        with subtests.test(rule):
            config = deepspeed_config.overlay(CLEAN, change)
            found = check(config, num_gpus=RANKS.get(rule))
            assert {finding.rule for finding in found} == {rule, *BESIDE.get(rule, set())}
            assert all(finding.reason and finding.remedy and ".py" in finding.source for finding in found)


def test_every_rule_is_among_the_cases() -> None:
    of_a_machine = {"bf16-on-an-older-gpu"}
    assert {rule.name for rule in rules.RULES if rule.level} <= {rule for rule, _ in CASES} | of_a_machine


def test_bf16_is_a_warning_on_a_gpu_without_it_alone() -> None:
    config = {**CLEAN, "bf16": {"enabled": True, "check_grad_overflow": True}}
    found = {capability: check(config, compute_capability=capability) for capability in (None, (7, 5), (8, 0))}
    assert {capability: [each.rule for each in findings] for capability, findings in found.items()} == {
        None: [],
        (7, 5): ["bf16-on-an-older-gpu"],
        (8, 0): [],
    }
    assert found[7, 5][0].level == "warning"


def test_nothing_is_found_in_a_configuration_that_leaves_nothing_open() -> None:
    config = {
        **CLEAN,
        "bf16": {"enabled": True, "check_grad_overflow": True},
        **zero(3, overlap_comm=True, offload_optimizer=CPU, offload_param=CPU, reduce_bucket_size=5e8),
        **optimizer("AdamW", lr=1e-4, betas=[0.9, 0.999], torch_adam=True),
        **WARMUP,
    }
    assert check(config) == []


def test_an_ignored_key_is_told_with_the_place_where_it_belongs(subtests: pytest.Subtests) -> None:
    for key, value, remedy in (
        ("offload_optimizer", {"device": "cpu"}, "it belongs inside zero_optimization"),
        ("loss_scale", 0, "it belongs inside fp16"),
        ("log", {"steps_per_print": 10}, "its steps_per_print belongs at the top level"),
        ("comms_config", {}, "did you mean comms_logger?"),
        ("cuda_visible_devices", "0", "set the environment variable CUDA_VISIBLE_DEVICES, or start with --include"),
        ("gradient-clipping", 1.0, "did you mean gradient_clipping?"),
        ("model-parallel-size", 1, "remove it"),
    ):
        with subtests.test(key):
            (finding,) = check({**CLEAN, key: value})
            assert (finding.level, finding.path, finding.remedy) == ("warning", key, remedy)


def test_keys_of_another_program_are_told_in_one_finding() -> None:
    (finding,) = check({**CLEAN, **{f"another program's key {number}": 1 for number in range(40)}})
    assert "40 top-level keys" in finding.reason


@pytest.mark.parametrize("key", [123456789, ["hf_abcdefghijklmnopqrstuvwxyz"]])
def test_a_refused_credential_is_not_shown(key: Any) -> None:
    (finding,) = check({**CLEAN, "comet": {"api_key": key}})
    assert "<redacted>" in finding.reason
    assert "123456789" not in finding.reason
    assert "hf_" not in finding.reason


def test_an_error_has_a_remedy_that_fits_the_key(subtests: pytest.Subtests) -> None:
    for config, remedy in (
        ({"fp16": {"fp16": True}}, "did you mean enabled?"),
        ({"compile": {"backend": "inductor"}}, "give it to engine.compile()"),
        ({"zero_optimization": {"stage": 3, "gradient_clipping": 1.0}}, "it belongs at the top level"),
        ({"zero_optimization": {"stage": [0, 1]}}, "give 0, 1, 2 or 3"),
        ({"train_micro_batch_size_per_gpu": "SIZE"}, "give a number"),
    ):
        with subtests.test(config=config, remedy=remedy):
            assert [each.remedy for each in check({**CLEAN, **config}) if each.level == "error"] == [remedy]


def test_a_key_of_another_block_is_refused_with_the_name_of_that_block() -> None:
    (finding,) = [each for each in check({**CLEAN, "bf16": {"initial_scale_power": 16}}) if each.level == "error"]
    assert finding.remedy == "remove it; it is a key of fp16"


def test_the_batch_keys_must_fit_the_number_of_gpus(subtests: pytest.Subtests) -> None:
    for batch, num_gpus, said in (
        ((32, 4, 1), 8, None),
        ((32, 4, 1), 4, "32 is not train_micro_batch_size_per_gpu 4 × gradient_accumulation_steps 1 × 4 data-parallel"),
        ((32, 4, 3), None, "32 is not a multiple of train_micro_batch_size_per_gpu 4 × gradient_accumulation_steps 3,"),
        ((32, None, None), 5, "32 is not a multiple of 5 data-parallel ranks"),
        ((32, 4, None), 8, None),
        ((None, 4, 2), 8, None),
    ):
        with subtests.test(batch=batch, num_gpus=num_gpus):
            keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
            config = {**CLEAN, **dict(zip(keys, batch, strict=True))}
            found = [finding for finding in check(config, num_gpus=num_gpus) if finding.level == "error"]
            assert [said in finding.reason for finding in found if said] == ([True] if said else [])
            assert len(found) == (1 if said else 0)


def test_buffers_are_held_against_the_model() -> None:
    found = {finding.rule: finding for finding in check({**CLEAN, **zero(3)}, model=GPT2)}
    assert found.keys() == {"bucket-larger-than-model", "model-stays-gathered"}
    assert "500,000,000 is more than the 124,439,808 parameters of gpt2" in found["bucket-larger-than-model"].reason
    assert found["bucket-larger-than-model"].remedy == "set it to 120000000 or less"
    small = zero(3, reduce_bucket_size=10**6, stage3_max_live_parameters=10**6)
    assert check({**CLEAN, **small}, model=GPT2) == []


def test_a_split_by_sub_groups_has_an_effect_where_a_rank_has_several() -> None:
    split = zero(3, sub_group_size=10**7, offload_optimizer={**CPU, "ratio": 0.5})
    assert check({**CLEAN, **split}) == []
    several = {finding.rule for finding in check({**CLEAN, **split}, model=GPT2, num_gpus=16)}
    assert "ratio-with-one-sub-group" in several


def test_a_swap_buffer_must_hold_a_ranks_part_of_the_largest_tensor() -> None:
    config = {**CLEAN, **zero(3, offload_param={**NVME, "max_in_cpu": 0, "buffer_size": 10**7})}
    (finding,) = [each for each in check(config, model=GPT2, num_gpus=2) if each.level == "error"]
    assert finding.rule == "swap-buffer-too-small"
    assert not [each for each in check(config, model=GPT2, num_gpus=4) if each.level == "error"]


def test_both_16_bit_formats_left_automatic_train_in_fp32() -> None:
    config = {**CLEAN, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    (finding,) = check(config)
    assert "; it trains in fp32" in finding.reason
    assert "fp32" not in check({**config, "bf16": {"enabled": True, "check_grad_overflow": True}})[0].reason


def test_an_auto_that_deepspeed_knows_is_not_told(subtests: pytest.Subtests) -> None:
    for config in (
        {"data_types": {"keep_in_fp32_modules": "auto"}},
        {"expert_parallel": {"enabled": True, "combine_impl": "auto"}},
        zero(2, offload_optimizer=CPU, zenflow={**ZENFLOW, "auto_ratio": 0.5, "update_interval": 2}),
    ):
        with subtests.test(config=config):
            assert [finding for finding in check({**CLEAN, **config}) if "automatic" in finding.rule] == []
