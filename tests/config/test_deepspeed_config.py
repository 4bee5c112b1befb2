"""The DeepSpeed configuration: batch keys that agree, defaults written out, NVMe buffers that fit."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.config import deepspeed_config, strategies, validation
from ds_bench.config.spec import Configuration
from ds_bench.errors import UsageError
from tests.support import fakes
from tests.support.deepspeed_configs import EVERY_CONFIGURATION, complete
from tests.support.real_trials import ROOT

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
few = st.integers(1, 512)


def batch(config: dict[str, Any]) -> tuple[int, int, int]:
    total, micro, accum = (config[key] for key in BATCH)
    return total, micro, accum


@given(stage=st.integers(0, 3), micro=few, accum=few)
def test_at_one_gpu_the_total_batch_is_micro_batch_times_accumulation(stage: int, micro: int, accum: int) -> None:
    base = deepspeed_config.base_config(strategies.ZERO_STAGES[stage], micro, accum)
    assert batch(base) == (micro * accum, micro, accum)
    assert batch(complete(base)) == (micro * accum, micro, accum)


@given(micro=few, accum=few, gpus=st.integers(1, 64))
def test_at_n_gpus_the_total_batch_is_n_times_that(micro: int, accum: int, gpus: int) -> None:
    config = complete(deepspeed_config.base_config(fakes.zero(2), micro, accum), on=fakes.placement(num_gpus=gpus))
    assert batch(config) == (micro * accum * gpus, micro, accum)


@given(micro=few, accum=few, gpus=st.integers(1, 8))
def test_completing_twice_changes_nothing_more(micro: int, accum: int, gpus: int) -> None:
    on = fakes.placement(num_gpus=gpus)
    once = complete(deepspeed_config.base_config(fakes.zero(3), micro, accum), on=on)
    assert complete(once, on=on) == once


def test_a_total_that_fits_neither_one_gpu_nor_all_is_refused() -> None:
    config = {**deepspeed_config.base_config(fakes.zero(0), 4, 2), "train_batch_size": 17}
    with pytest.raises(UsageError, match=r"train_batch_size 17 .* 4 × 2 × 2 GPUs \(leave train_batch_size out"):
        complete(config, on=fakes.placement(num_gpus=2))


def test_a_batch_that_is_no_whole_number_is_refused(subtests: pytest.Subtests) -> None:
    for wrong, key in product((0, -1, 2.0, "4", "auto", None, True), BATCH[1:]):
        with subtests.test(key=key, wrong=wrong):
            config = {**deepspeed_config.base_config(fakes.zero(0), 1, 1), key: wrong}
            with pytest.raises(UsageError, match="both must be whole numbers of 1 or more"):
                complete(config)


def test_a_config_without_accumulation_accumulates_nothing() -> None:
    config = deepspeed_config.base_config(fakes.zero(0), 4)
    del config["gradient_accumulation_steps"]
    assert batch(complete(config)) == (4, 4, 1)


@pytest.fixture
def zero_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    return _script("zero_stage_comparison", monkeypatch)


@pytest.fixture
def offload_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    return _script("offload_comparison", monkeypatch)


def _script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_zero_script_holds_a_config_function_by_stage(zero_script: Any, stage: int) -> None:
    config = zero_script.create_deepspeed_config(stage, 8)
    assert config["zero_optimization"]["stage"] == stage
    assert batch(config) == (8, 8, 1)
    assert batch(zero_script.create_deepspeed_config(stage, 8, 4)) == (32, 8, 4)
    assert batch(zero_script.create_deepspeed_config(stage, batch_size=8, grad_accum=4)) == (32, 8, 4)


@pytest.mark.parametrize("name", strategies.OFFLOAD_NAMES)
def test_the_offload_script_holds_a_config_function_by_strategy(offload_script: Any, name: str) -> None:
    strategy = fakes.offload(name)
    config = offload_script.create_deepspeed_config(strategy, 2)
    assert deepspeed_config.offload_device(config, "offload_optimizer") == (
        None if name == "none" else config_device(strategy)
    )
    assert batch(config) == (2, 2, 1)


def config_device(strategy: Configuration) -> str:
    return str(strategy.offload_optimizer)


@pytest.mark.parametrize("script", ["zero_stage_comparison.py", "offload_comparison.py"])
def test_the_config_function_stands_near_the_top_of_the_script(script: str) -> None:
    lines = (ROOT / script).read_text(encoding="utf-8").splitlines()
    assert next(n for n, line in enumerate(lines, 1) if line.startswith("def create_deepspeed_config(")) <= 20


def test_what_a_user_edits_into_the_config_is_kept_by_completing_it() -> None:
    config = deepspeed_config.base_config(fakes.zero(3), 4)
    config["zero_optimization"]["reduce_bucket_size"] = 123
    config["gradient_clipping"] = 0.25
    config["timers"] = {"throughput": {"enabled": True}}
    config["steps_per_print"] = 7
    config["wall_clock_breakdown"] = True
    completed = complete(config)
    assert {key: completed[key] for key in config if key != "optimizer"} == {
        key: value for key, value in config.items() if key != "optimizer"
    }


def test_every_default_that_changed_between_versions_is_written_out(subtests: pytest.Subtests) -> None:
    for strategy in EVERY_CONFIGURATION:
        with subtests.test(strategy.name):
            config = deepspeed_config.base_config(strategy, 4)
            zero = config["zero_optimization"]
            assert config["gradient_clipping"] == 1.0
            if strategy.stage >= 1:
                assert zero["overlap_comm"] is (strategy.stage == 3)
            for key in ("offload_optimizer", "offload_param"):
                assert key not in zero or zero[key]["pin_memory"] is True


def test_a_block_says_what_its_strategy_is(subtests: pytest.Subtests) -> None:
    for strategy in EVERY_CONFIGURATION:
        with subtests.test(strategy.name):
            config = deepspeed_config.base_config(strategy, 4)
            catalogued = strategies.find_strategy(strategy.name, strategy.stage)
            assert catalogued is not None
            assert replace(strategy, deepspeed_config=config).layout == (
                catalogued.stage,
                catalogued.offload_optimizer,
                catalogued.offload_param,
            )


def test_a_config_is_json_and_has_only_keys_that_deepspeed_reads(subtests: pytest.Subtests) -> None:
    for strategy in EVERY_CONFIGURATION:
        with subtests.test(strategy.name):
            completed = complete(deepspeed_config.base_config(strategy, 4))
            assert json.loads(json.dumps(completed, allow_nan=False)) == completed
            validation.check_keys(completed)


def test_stage_0_carries_no_settings_of_a_partition_that_is_none() -> None:
    assert deepspeed_config.zero_block(fakes.zero(0)) == {"stage": 0}


def test_deepspeed_neither_prints_nor_synchronises_inside_the_measured_steps() -> None:
    config = complete(deepspeed_config.base_config(fakes.zero(2), 4))
    assert config["wall_clock_breakdown"] is False
    assert config["timers"]["throughput"]["enabled"] is False
    assert config["steps_per_print"] > 10**9


def test_the_precision_is_filled_in_where_the_config_leaves_it_open(subtests: pytest.Subtests) -> None:
    for precision, expected in (
        ("bf16", {"bf16": {"enabled": True}}),
        ("fp16", {"fp16": {"enabled": True}}),
        ("fp32", {}),
    ):
        with subtests.test(precision):
            config = complete(deepspeed_config.base_config(fakes.zero(2), 4), of=fakes.workload(precision=precision))
            assert {key: config[key] for key in ("bf16", "fp16") if key in config} == expected


def test_a_precision_the_user_wrote_is_left_alone(subtests: pytest.Subtests) -> None:
    for block in ({"fp16": {"enabled": True}}, {"bf16": {"enabled": False}}, {"torch_autocast": {}}):
        with subtests.test(block=block):
            config = complete({**deepspeed_config.base_config(fakes.zero(2), 4), **block})
            assert {key: config[key] for key in ("bf16", "fp16", "torch_autocast") if key in config} == block


def test_completing_leaves_its_input_as_it_was() -> None:
    base = deepspeed_config.base_config(fakes.offload("nvme"), 4)
    before = copy.deepcopy(base)
    complete(base, of=fakes.workload(precision="fp16"))
    assert base == before


def test_torch_adam_is_used_where_deepspeeds_own_cannot_be_built() -> None:
    assert complete(deepspeed_config.base_config(fakes.zero(1), 4))["optimizer"]["params"]["torch_adam"] is True


def test_torch_adam_is_never_used_where_the_optimizer_is_offloaded() -> None:
    """DeepSpeed would run torch's AdamW on the CPU: far slower than its own, and not what the row says."""
    params = complete(deepspeed_config.base_config(fakes.offload("cpu_optimizer"), 4))["optimizer"]["params"]
    assert "torch_adam" not in params


def test_deepspeeds_fused_adam_is_used_where_it_builds() -> None:
    config = complete(deepspeed_config.base_config(fakes.zero(1), 4), torch_adam=False)
    assert "torch_adam" not in config["optimizer"]["params"]


def test_a_choice_of_torch_adam_by_the_user_stands() -> None:
    config = deepspeed_config.base_config(fakes.zero(1), 4)
    config["optimizer"]["params"]["torch_adam"] = False
    assert complete(config)["optimizer"]["params"]["torch_adam"] is False


def test_a_config_without_optimizer_is_refused_with_the_remedy() -> None:
    config = deepspeed_config.base_config(fakes.zero(1), 4)
    del config["optimizer"]
    with pytest.raises(UsageError, match=r"has no optimizer \(keep its 'optimizer' block\)"):
        complete(config)


def test_another_optimizer_takes_no_parameter_that_it_does_not_know() -> None:
    config = deepspeed_config.with_optimizer(deepspeed_config.base_config(fakes.zero(1), 4), "SGD")
    assert config["optimizer"] == {"type": "SGD", "params": {"lr": 1e-4, "weight_decay": 0.01}}
    assert complete(config)["zero_allow_untested_optimizer"] is True


def test_another_optimizer_keeps_the_users_learning_rate() -> None:
    config = deepspeed_config.base_config(fakes.zero(1), 4)
    config["optimizer"]["params"]["lr"] = 0.5
    assert deepspeed_config.with_optimizer(config, "Lion")["optimizer"]["params"]["lr"] == 0.5


def test_another_optimizer_can_be_had_where_the_user_took_the_block_out() -> None:
    config = deepspeed_config.base_config(fakes.zero(1), 4)
    del config["optimizer"]
    assert deepspeed_config.with_optimizer(config, "Adagrad")["optimizer"]["type"] == "Adagrad"


def test_adam_is_adam_and_not_adamw_under_another_name() -> None:
    config = deepspeed_config.with_optimizer(deepspeed_config.base_config(fakes.zero(1), 4), "Adam")
    assert config["optimizer"]["params"]["adam_w_mode"] is False
    assert "adam_w_mode" not in deepspeed_config.with_optimizer(config, "AdamW")["optimizer"]["params"]


@given(elements=st.integers(1, 2**34))
def test_a_parameter_buffer_holds_the_largest_parameter_and_not_much_more(elements: int) -> None:
    config = complete(deepspeed_config.base_config(fakes.offload("nvme"), 4), largest_parameter=elements)
    size = config["zero_optimization"]["offload_param"]["buffer_size"]
    assert elements <= size < elements + 2**20
    assert size % 2**20 == 0


def test_no_buffer_is_guessed_for_a_model_of_unknown_sizes() -> None:
    config = complete(deepspeed_config.base_config(fakes.offload("nvme"), 4), largest_parameter=None)
    assert "buffer_size" not in config["zero_optimization"]["offload_param"]


def test_nvme_moves_every_parameter_and_does_not_keep_the_first_billion() -> None:
    zero = complete(deepspeed_config.base_config(fakes.offload("nvme"), 4))["zero_optimization"]
    assert zero["offload_param"]["max_in_cpu"] == 0
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == "/mnt/nvme"
    assert zero["offload_optimizer"]["buffer_count"] >= 4  # parameter, two moments, gradient


def test_what_the_user_set_for_nvme_stands() -> None:
    config = deepspeed_config.base_config(fakes.offload("nvme"), 4)
    config["zero_optimization"]["offload_param"]["buffer_size"] = 77
    config["aio"] = {"queue_depth": 99}
    completed = complete(config)
    assert completed["zero_optimization"]["offload_param"]["buffer_size"] == 77
    assert completed["aio"] == {"queue_depth": 99}


def test_without_nvme_nothing_of_it_is_in_the_config(subtests: pytest.Subtests) -> None:
    for name in ("none", "cpu_optimizer", "cpu_full"):
        with subtests.test(name):
            completed = complete(deepspeed_config.base_config(fakes.offload(name), 4))
            assert "aio" not in completed
            assert "nvme" not in json.dumps(completed)


def test_a_private_swap_folder_replaces_every_nvme_path_and_nothing_else() -> None:
    config = complete(deepspeed_config.base_config(fakes.offload("nvme"), 4))
    private = deepspeed_config.with_swap_folder(config, "/mnt/nvme/mine")
    assert json.dumps(private) == json.dumps(config).replace('"/mnt/nvme"', '"/mnt/nvme/mine"')
    assert "mine" not in json.dumps(config)


def test_a_config_without_nvme_gets_no_swap_folder() -> None:
    config = complete(deepspeed_config.base_config(fakes.offload("cpu_full"), 4))
    assert deepspeed_config.with_swap_folder(config, "/x") == config


def test_no_device_is_none_however_it_is_written(subtests: pytest.Subtests) -> None:
    for config in (
        {},
        {"zero_optimization": None},
        {"zero_optimization": {"offload_param": None}},
        {"zero_optimization": {"offload_param": {"device": "none"}}},
        {"zero_optimization": {"offload_param": {}}},
    ):
        with subtests.test(config=config):
            assert deepspeed_config.offload_device(config, "offload_param") is None
