"""The request: impossible values are refused, JSON keeps everything, and the work key misses nothing."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import product

import pytest

from ds_bench.config.identity import work_key
from ds_bench.config.spec import Configuration, Placement, Trial, Workload
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
    with pytest.raises(InvalidValueError, match="colour"):
        json_files.build(Trial, {**stored, "colour": "red"})


def test_a_trial_is_named_like_a_folder(subtests: pytest.Subtests) -> None:
    for name in ("", "..", "/tmp/elsewhere", "a/b"):
        with subtests.test(name), pytest.raises(ValueError, match="trial_id"):
            replace(fakes.trial(), trial_id=name)


def test_stage_and_devices_are_those_of_the_deepspeed_configuration() -> None:
    for stage, optimizer, param, nvme in (
        (3, "cpu", "nvme", True),
        (2, "nvme", "none", True),
        (1, "cpu", "none", False),
    ):
        block = {"stage": stage, "offload_optimizer": {"device": optimizer}, "offload_param": {"device": param}}
        row = Configuration(name="mine", label="mine.json", deepspeed_config={"zero_optimization": block})
        assert row.layout == (stage, optimizer, param)
        assert (row.offloads_optimizer, row.offloads, row.uses_nvme) == (True, True, nvme)
    plain = replace(row, deepspeed_config={})
    assert (plain.layout, plain.offloads_optimizer, plain.uses_nvme) == ((0, "none", "none"), False, False)
    common = fakes.workload()
    changed = replace(row, workload_changes={"batch_size": 9, "activation_checkpointing": True}).applied_to(common)
    assert changed == replace(common, batch_size=9, activation_checkpointing=True)


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


def test_the_key_follows_everything_that_decides_the_measurement_and_nothing_else() -> None:
    trial = everything()
    keys = [work_key(each) for each in [trial, *_variants()]]
    assert len(set(keys)) == len(keys)
    elsewhere = {"hosts": (("c", 2), ("d", 2)), "include": None, "master_addr": None, "master_port": None}
    turned = dict(reversed(list(trial.ds_config.items())))
    assert list(turned) != list(trial.ds_config)
    for same in (
        replace(trial, trial_id="07_nvme", caveats=(), unsupported=None),
        replace(trial, placement=replace(trial.placement, **elsewhere)),
        replace(trial, ds_config=turned),
    ):
        assert work_key(same) == work_key(trial)
    # So that a new field of the workload cannot be forgotten here.
    names = [field.name for field in fields(Workload)]
    workloads = [variant.workload for variant in _variants()]
    changed = {name for each in workloads for name in names if getattr(each, name) != getattr(trial.workload, name)}
    assert changed == set(names)


def test_credentials_are_in_nothing_that_is_stored_and_decide_nothing() -> None:
    def with_token(token: str) -> Trial:
        config = {**fakes.trial().ds_config, "wandb": {"enabled": True, "token": token}}
        return replace(fakes.trial(replace(fakes.zero(1), deepspeed_config=config)), ds_config=config)

    one, other = (with_token(f"hf_secret{number}") for number in range(2))
    assert "hf_secret" not in json.dumps(one.to_dict())
    assert work_key(one) == work_key(other)
