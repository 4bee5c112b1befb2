"""The DeepSpeed configuration: batch keys that agree, defaults written out, NVMe buffers that fit, changes merged."""

from __future__ import annotations

import copy
import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.config import deepspeed_config, recipe_file, strategies, validation
from ds_bench.config.deepspeed_config import base_config, overlay, with_optimizer
from ds_bench.config.spec import BATCH_KEYS
from ds_bench.errors import UsageError
from tests.support import fakes
from tests.support.deepspeed_configs import EVERY_CONFIGURATION, complete

few = st.integers(1, 512)


def batch(config: dict[str, Any]) -> tuple[int, ...]:
    return tuple(config[key] for key in BATCH_KEYS)


def completed(name: str, stage: int = 3, **changes: Any) -> dict[str, Any]:
    return complete(overlay(base_config(fakes.offload(name, stage), 4), changes))


@given(micro=few, accum=few, gpus=st.integers(1, 64))
def test_the_total_batch_is_micro_batch_times_accumulation_times_gpus(micro: int, accum: int, gpus: int) -> None:
    base, on = base_config(fakes.zero(2), micro, accum), fakes.placement(num_gpus=gpus)
    assert batch(base) == (micro * accum, micro, accum)
    config = complete(base, on=on)
    assert batch(config) == (micro * accum * gpus, micro, accum)
    assert complete(config, on=on) == config
    del base["gradient_accumulation_steps"], base["train_batch_size"]
    assert batch(complete(base, on=on)) == (micro * gpus, micro, 1)


def test_ranks_that_share_a_sequence_count_once_and_a_wrong_batch_is_refused() -> None:
    config = {**base_config(fakes.zero(2), 4), "sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}}
    assert batch(complete(config, on=fakes.placement(num_gpus=4))) == (8, 4, 1)
    for key, value in (("train_batch_size", 17), *product(BATCH_KEYS[1:], (0, "4", True))):
        with pytest.raises(UsageError, match=key):
            complete({**base_config(fakes.zero(0), 4, 2), key: value}, on=fakes.placement(num_gpus=2))


def test_the_catalogue_writes_out_what_deepspeed_changed_between_versions(subtests: pytest.Subtests) -> None:
    for row in EVERY_CONFIGURATION:
        with subtests.test(row.name):
            strategy = strategies.named_strategy(row.name, row.stage)
            assert row.layout == (strategy.stage, strategy.offload_optimizer, strategy.offload_param)
            config = complete(base_config(row, 4))
            assert json.loads(json.dumps(config, allow_nan=False)) == config
            validation.check_keys(config)
            zero = config["zero_optimization"]
            assert config["gradient_clipping"] == 1.0
            assert zero.get("overlap_comm") is (None if row.stage == 0 else row.stage == 3)
            assert all(zero[key]["pin_memory"] for key in ("offload_optimizer", "offload_param") if key in zero)
            # DeepSpeed neither prints nor synchronizes inside the measured steps.
            assert (config["wall_clock_breakdown"], config["timers"]["throughput"]["enabled"]) == (False, False)
            assert config["steps_per_print"] > 10**9
    assert deepspeed_config.zero_block(fakes.zero(0)) == {"stage": 0}


def test_completing_keeps_what_the_user_set_and_its_input() -> None:
    changes = {
        "zero_optimization": {"reduce_bucket_size": 123, "offload_param": {"buffer_size": 77}},
        "gradient_clipping": 0.25,
        "timers": {"throughput": {"enabled": True}},
        "aio": {"queue_depth": 99},
    }
    base = overlay(base_config(fakes.offload("nvme"), 4), changes)
    before = copy.deepcopy(base)
    config = complete(base)
    assert base == before
    assert overlay(config, changes) == config
    assert config["aio"] == {"queue_depth": 99}


def test_the_precision_is_filled_in_only_where_the_config_leaves_it_open() -> None:
    for block, precision, expected in (
        ({}, "fp16", {"fp16": {"enabled": True}}),
        ({}, "fp32", {}),
        ({"fp16": {"enabled": True}}, "bf16", {"fp16": {"enabled": True}}),
        ({"torch_autocast": {}}, "bf16", {"torch_autocast": {}}),
    ):
        config = complete({**base_config(fakes.zero(2), 4), **block}, of=fakes.workload(precision=precision))
        assert {key: config[key] for key in ("bf16", "fp16", "torch_autocast") if key in config} == expected


def test_torch_adam_is_used_only_where_deepspeeds_own_does_not_build_and_nothing_is_offloaded() -> None:
    """Offloaded, torch's AdamW is far slower than DeepSpeed's, and not what the row says."""
    own_builds = complete(base_config(fakes.zero(1), 4), torch_adam=False)
    chosen = completed("none", 1, optimizer={"params": {"torch_adam": False}})
    configs = (own_builds, completed("none", 1), completed("cpu_optimizer"), chosen)
    assert [config["optimizer"]["params"].get("torch_adam") for config in configs] == [None, True, None, False]
    with pytest.raises(UsageError, match="has no optimizer"):
        completed("none", optimizer=None)


def test_another_optimizer_has_its_own_parameters_and_the_users_learning_rate() -> None:
    base = overlay(base_config(fakes.zero(1), 4), {"optimizer": {"params": {"lr": 0.5}}})
    blocks = {name: with_optimizer(base, name)["optimizer"]["params"] for name in ("SGD", "Lion", "Adam")}
    few_params = {"lr": 0.5, "weight_decay": 0.01}
    adam = {**few_params, "betas": [0.9, 0.999], "eps": 1e-8, "adam_w_mode": False}
    assert blocks == {"SGD": few_params, "Lion": few_params, "Adam": adam}
    untested = {name: complete(with_optimizer(base, name)).get("zero_allow_untested_optimizer") for name in blocks}
    assert untested == {"SGD": True, "Lion": None, "Adam": None}
    for config in ({}, {"optimizer": None}, {"optimizer": "AdamW"}, {"optimizer": {"params": None}}):
        assert with_optimizer(config, "Adagrad")["optimizer"]["type"] == "Adagrad"


def test_nvme_offload_moves_every_parameter_to_a_private_folder() -> None:
    sizes = {}
    for elements in (1, 2**20, 2**20 + 1):
        sized = complete(base_config(fakes.offload("nvme"), 4), largest_parameter=elements)
        sizes[elements] = sized["zero_optimization"]["offload_param"]["buffer_size"]
    assert sizes == {1: 2**20, 2**20: 2**20, 2**20 + 1: 2**21}
    config = complete(base_config(fakes.offload("nvme"), 4), largest_parameter=None)
    zero = config["zero_optimization"]
    assert "buffer_size" not in zero["offload_param"]  # no guess for a model of unknown sizes
    assert zero["offload_param"]["max_in_cpu"] == 0  # the default keeps the first billion
    assert zero["stage3_prefetch_bucket_size"] == zero["stage3_max_reuse_distance"] == 0
    assert zero["offload_optimizer"]["buffer_count"] >= 4  # parameter, two moments, gradient
    private = deepspeed_config.with_swap_folder(config, "/mnt/nvme/mine")
    assert json.dumps(private) == json.dumps(config).replace('"/mnt/nvme"', '"/mnt/nvme/mine"')
    assert json.dumps(config).count('"/mnt/nvme"') == 2
    other = completed("cpu_full")
    assert "aio" not in other
    assert deepspeed_config.with_swap_folder(other, "/x") == other
    configs = [{"zero_optimization": block} for block in (None, {}, {"offload_param": {"device": "none"}})]
    assert {deepspeed_config.offload_device(config, "offload_param") for config in configs} == {None}


scalars = st.one_of(st.integers(), st.booleans(), st.text(max_size=3))
configs = st.recursive(scalars, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8)
objects = st.dictionaries(st.sampled_from("abc"), configs, max_size=3)


@given(config=objects, changes=objects)
def test_an_overlay_is_idempotent_and_leaves_its_inputs(config: dict[str, Any], changes: dict[str, Any]) -> None:
    before = copy.deepcopy((config, changes))
    once = overlay(config, changes)
    assert overlay(once, changes) == once
    assert overlay(config, {}) == config
    for value in once.values():
        if isinstance(value, dict):
            value["written"] = "later"
    assert (config, changes) == before


def test_a_null_removes_a_key_and_a_changed_batch_its_total() -> None:
    assert overlay({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": None}, "d": None}) == {"a": {"c": 2}}
    assert overlay({"a": 1}, {"aio": {"block_size": None}, "a": {"x": None}}) == {"aio": {}, "a": {}}
    assert deepspeed_config.merge({"a": {"b": 1}}, {"a": {"c": None}}) == {"a": {"b": 1, "c": None}}
    base = {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    steps = {"gradient_accumulation_steps": 4}
    assert deepspeed_config.apply_changes(base, steps) == steps
    assert deepspeed_config.apply_changes(base, steps, {"train_batch_size": 16}) == {"train_batch_size": 16, **steps}
    assert deepspeed_config.apply_changes(base, {"x": 1}) == {**base, "x": 1}


def test_a_setting_is_json_or_else_text() -> None:
    for text, value in {
        "a.b=false": {"a": {"b": False}},
        "a=null": {"a": None},
        'a={"b": [1, 2]}': {"a": {"b": [1, 2]}},
        "a=AdamW": {"a": "AdamW"},
        'a="12"': {"a": "12"},
        "a=": {"a": ""},
        "a=b=c": {"a": "b=c"},
    }.items():
        assert json.dumps(deepspeed_config.parse_set(text)) == json.dumps(value)  # 1 and True are equal to Python
    for text in ("a", "=1", "a..b=1", f"{'a.' * 3000}a=1", f"a={'[' * 3000}"):
        with pytest.raises(UsageError, match=r"--set|levels") as caught:
            deepspeed_config.parse_set(text)
        assert len(str(caught.value)) < 200
    with pytest.raises(UsageError, match=r"is not key\.path=value"):
        recipe_file.parse_setting(f"{'a.' * 3000}a=1")
