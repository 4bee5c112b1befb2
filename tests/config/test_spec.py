"""What is asked: refused when impossible, whole after a round trip, and named by a key that misses nothing."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ds_bench.config.identity import work_key
from ds_bench.config.spec import Configuration, Placement, Strategy, Trial, Workload
from ds_bench.config.strategies import make_configuration
from ds_bench.records import json_files
from ds_bench.records.json_files import InvalidValueError
from tests.support import fakes


def test_impossible_values_are_refused_by_the_name_of_their_field(subtests: pytest.Subtests) -> None:
    for name, value in (
        *product(("batch_size", "seq_length", "grad_accum", "num_steps", "vocab_size"), (0, -1)),
        *(("warmup_steps", -1), ("model", ""), ("dropout", 1.0), ("attention", "flash")),
    ):
        with subtests.test(name, value=value), pytest.raises(ValueError, match=f"{name} is {value!r}: must"):
            fakes.workload(**{name: value})
    assert fakes.workload(warmup_steps=0).warmup_steps == 0
    with pytest.raises(ValueError, match="num_gpus is 0"):
        Placement(accelerator="cpu", num_gpus=0)


def test_a_stored_name_that_a_field_does_not_have_is_refused(subtests: pytest.Subtests) -> None:
    stored = everything().to_dict()
    for part, name in (("workload", "precision"), ("workload", "loss"), ("placement", "accelerator")):
        with subtests.test(name), pytest.raises(InvalidValueError, match=name):
            json_files.build(Trial, {**stored, part: {**stored[part], name: "fp8"}})


@pytest.mark.parametrize("name", ["", "..", "/tmp/elsewhere", "a/b"])
def test_a_trial_is_named_like_a_folder_and_leads_nowhere_else(name: str) -> None:
    with pytest.raises(ValueError, match="trial_id"):
        dataclasses.replace(fakes.trial(), trial_id=name)


def test_a_strategy_uses_nvme_when_either_of_the_two_lies_there(subtests: pytest.Subtests) -> None:
    for optimizer, param, uses in (("nvme", "none", True), ("cpu", "nvme", True), ("cpu", "cpu", False)):
        with subtests.test(optimizer=optimizer, param=param, uses=uses):
            strategy = Strategy(name="x", label="X", stage=3, offload_optimizer=optimizer, offload_param=param)
            assert make_configuration(strategy).uses_nvme is uses


def test_stage_and_devices_are_those_of_the_deepspeed_configuration() -> None:
    block = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}
    row = Configuration(name="mine", label="mine.json", deepspeed_config={"zero_optimization": block})
    assert row.layout == (3, "cpu", "nvme")
    assert (row.offloads_optimizer, row.uses_nvme) == (True, True)
    plain = replace(row, deepspeed_config={})
    assert (plain.layout, plain.offloads_optimizer, plain.uses_nvme) == ((0, "none", "none"), False, False)


def test_a_configuration_that_would_mislead_is_refused(subtests: pytest.Subtests) -> None:
    for changes, message in (
        ({"name": ""}, "name is ''"),
        ({"deepspeed_config": {"zero_optimization": {"stage": 4}}}, "stage is 4"),
        ({"deepspeed_config": {"zero_optimization": {"stage": True}}}, "stage is True"),
        ({"deepspeed_config": {"zero_optimization": {"offload_param": {"device": "gpu"}}}}, "offload_param.device"),
        ({"workload_changes": {"batchsize": 4}}, "workload_changes is \\['batchsize'\\]"),
    ):
        with subtests.test(changes=changes), pytest.raises(ValueError, match=message):
            Configuration(**{"name": "mine", "label": "mine", "deepspeed_config": {}, **changes})


def test_a_row_changes_the_workload_as_it_says() -> None:
    row = replace(fakes.zero(1), workload_changes={"batch_size": 9, "activation_checkpointing": True})
    common = fakes.workload()
    assert row.applied_to(common) == replace(common, batch_size=9, activation_checkpointing=True)


def everything() -> Trial:
    """A trial that uses every field."""
    return fakes.trial(
        fakes.offload("nvme"),
        on=fakes.placement(
            accelerator="cuda",
            num_gpus=4,
            launcher="deepspeed",
            hostfile="/etc/hosts.ds",
            nvme_path="/mnt/nvmé",
            cpu_memory_limit_bytes=7,
            gpu_memory_limit_bytes=8,
            supported_precisions=("fp16", "fp32"),
            hosts=(("a", 2), ("b", 2)),
            include="a:0,1@b:0,1",
            master_addr="10.0.0.1",
            master_port=29501,
            host_command="ssh {host}",
            forwarded_variables=("HTTPS_PROXY",),
        ),
        of=fakes.workload(precision="fp16", activation_checkpointing=True, grad_accum=3, seed=7),
        repeat=2,
        unsupported="no libaio",
        caveats=("a disk that is none",),
    )


def test_a_trial_survives_json_whole() -> None:
    trial = everything()
    again = json_files.parse(Trial, json.dumps(trial.to_dict()).encode())
    assert again == trial
    assert isinstance(again.caveats, tuple)
    assert isinstance(again.placement.supported_precisions, tuple)
    assert work_key(again) == work_key(trial)


def test_a_trial_with_a_field_of_another_program_is_no_trial() -> None:
    with pytest.raises(InvalidValueError, match="colour"):
        json_files.build(Trial, {**everything().to_dict(), "colour": "red"})


def _variants() -> list[Trial]:
    trial = everything()
    workloads = [
        {"batch_policy": "largest"}, {"batch_size": 5},
        {"seq_length": 129}, {"grad_accum": 4}, {"num_steps": 11}, {"warmup_steps": 3},
        {"precision": "fp32"}, {"activation_checkpointing": False}, {"seed": 8}, {"model": "gpt2"},
        {"trust_remote_code": True}, {"dropout": 0.0}, {"model_config": {"n_layer": 1}}, {"model_type": "opt"},
        {"model_source": "hub"}, {"attention": "eager"}, {"loss": "tiled"}, {"compile": "torch"},
        {"tiled_mlp": True}, {"data_workers": 0},
        {"data_pin_memory": True}, {"data_prefetch": 4}, {"cpu_binding": "cores"},
        {"zero_init": False}, {"pass_type": "forward"}, {"synchronized": False},
        {"vocab_size": 9}, {"data_path": "/ids.bin"}, {"data_dtype": "uint16"},
        {"data_tokens": 9}, {"data_digest": "a"}, {"seq_policy": "longest"},
    ]  # fmt: skip
    placements = [
        {"num_gpus": 8}, {"accelerator": "cpu"}, {"launcher": "warm"}, {"nvme_path": "/other"},
        {"cpu_memory_limit_bytes": None}, {"gpu_memory_limit_bytes": None},
        {"hosts": ()}, {"hosts": (("a", 3), ("b", 1))},
    ]  # fmt: skip
    return [
        *(replace(trial, workload=replace(trial.workload, **change)) for change in workloads),
        *(replace(trial, placement=replace(trial.placement, **change)) for change in placements),
        replace(trial, repeat=0),
        replace(trial, configuration=fakes.offload("cpu_full")),
        replace(trial, ds_config={**trial.ds_config, "gradient_clipping": 0.5}),
    ]


def test_anything_that_decides_the_measurement_changes_the_key() -> None:
    keys = [work_key(trial) for trial in [everything(), *_variants()]]
    assert len(set(keys)) == len(keys)


def test_what_does_not_decide_the_measurement_leaves_the_key() -> None:
    trial = everything()
    other = replace(trial, trial_id="07_nvme", caveats=(), unsupported=None)
    assert work_key(other) == work_key(trial)
    elsewhere = {"hosts": (("c", 2), ("d", 2)), "include": None, "master_addr": None, "master_port": None}
    assert work_key(replace(trial, placement=replace(trial.placement, **elsewhere))) == work_key(trial)


def test_the_key_does_not_depend_on_the_order_of_a_config() -> None:
    trial = everything()
    turned = dict(reversed(list(trial.ds_config.items())))
    assert list(turned) != list(trial.ds_config)
    assert work_key(replace(trial, ds_config=turned)) == work_key(trial)


def test_the_variants_above_change_every_field_of_a_workload() -> None:
    """So that a new field cannot be forgotten in the test of the key."""
    changed = {name for variant in _variants() for name in _differences(variant.workload, everything().workload)}
    assert changed == {field.name for field in dataclasses.fields(Workload)}


def _differences(a: Any, b: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(a) if getattr(a, field.name) != getattr(b, field.name)}
