"""The request and the catalogue: impossible values are refused, JSON keeps everything, the work key misses nothing."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import product

import pytest

from ds_bench.config.identity import work_key
from ds_bench.config.spec import Configuration, Inspection, Placement, Trial, Workload
from ds_bench.config.strategies import CATALOGUE, OFFLOAD_NAMES, ZERO_STAGES, matches, named_strategy
from ds_bench.records import json_files
from ds_bench.records.json_files import InvalidValueError
from tests.support import fakes


def test_impossible_values_are_refused_by_the_name_of_their_field(subtests: pytest.Subtests) -> None:
    for name, value in (
        *product(("batch_size", "seq_length", "grad_accum", "num_steps", "vocab_size"), (0,)),
        *(("warmup_steps", -1), ("model", ""), ("dropout", 1.0), ("attention", "flash")),
    ):
        with subtests.test(name, value=value), pytest.raises(ValueError, match=f"{name} is {value!r}: must"):
            fakes.workload(**{name: value})
    assert fakes.workload(warmup_steps=0).warmup_steps == 0
    with pytest.raises(ValueError, match="num_gpus is 0"):
        Placement(accelerator="cpu", num_gpus=0)
    for trial_id in ("", "..", "a/b"):
        with pytest.raises(ValueError, match="trial_id"):
            replace(fakes.trial(), trial_id=trial_id)


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
        ({"deepspeed_config": {"zero_optimization": {"stage": 4}}}, "stage is 4"),
        ({"deepspeed_config": {"zero_optimization": {"stage": True}}}, "stage is True"),
        ({"deepspeed_config": {"zero_optimization": {"offload_param": {"device": "gpu"}}}}, "offload_param.device"),
        ({"workload_changes": {"batchsize": 4}}, "workload_changes is \\['batchsize'\\]"),
    ):
        with subtests.test(changes=changes), pytest.raises(ValueError, match=message):
            Configuration(**{"name": "mine", "label": "mine", "deepspeed_config": {}, **changes})


TRIAL = fakes.trial(
    fakes.offload("nvme"),
    on=fakes.placement(
        accelerator="cuda",
        num_gpus=4,
        launcher="deepspeed",
        nvme_path="/mnt/nvmé",
        cpu_memory_limit_bytes=7,
        gpu_memory_limit_bytes=8,
        supported_precisions=("fp16", "fp32"),
        hosts=(("a", 2), ("b", 2)),
    ),
    of=fakes.workload(precision="fp16", activation_checkpointing=True, vocab_size=8),
    repeat=2,
    unsupported="no libaio",
    caveats=("a disk that is none",),
)


def test_a_trial_survives_json_whole_and_an_unknown_name_in_it_is_refused(subtests: pytest.Subtests) -> None:
    again = json_files.parse(Trial, json.dumps(TRIAL.to_dict()).encode())
    assert again == TRIAL
    assert isinstance(again.placement.supported_precisions, tuple)
    assert work_key(again) == work_key(TRIAL)
    stored = TRIAL.to_dict()
    for part, name in (("workload", "precision"), ("workload", "loss"), ("placement", "accelerator")):
        with subtests.test(name), pytest.raises(InvalidValueError, match=name):
            json_files.build(Trial, {**stored, part: {**stored[part], name: "fp8"}})
    with pytest.raises(InvalidValueError, match="color"):
        json_files.build(Trial, {**stored, "color": "red"})


def test_the_key_follows_everything_that_decides_the_measurement_and_nothing_else() -> None:
    cosmetic = {"hostfile", "include", "master_addr", "master_port", "host_command", "forwarded_variables"}
    cosmetic |= {"compute_capability"}
    deciding = [field.name for field in fields(Placement) if field.name not in cosmetic]
    different = [
        TRIAL,
        *(replace(TRIAL, workload=fakes.with_another(TRIAL.workload, field.name)) for field in fields(Workload)),
        *(replace(TRIAL, placement=fakes.with_another(TRIAL.placement, name)) for name in deciding),
        replace(TRIAL, repeat=0),
        replace(TRIAL, inspection=Inspection(checkpoint=True)),
        replace(TRIAL, configuration=fakes.offload("cpu_full")),
        replace(TRIAL, ds_config={**TRIAL.ds_config, "gradient_clipping": 0.5}),
    ]
    assert len({work_key(each) for each in different}) == len(different)
    for same in (
        replace(TRIAL, trial_id="07_nvme", caveats=(), unsupported=None),
        *(replace(TRIAL, placement=fakes.with_another(TRIAL.placement, name)) for name in cosmetic),
        replace(TRIAL, placement=replace(TRIAL.placement, hosts=(("c", 2), ("d", 2)))),
        replace(TRIAL, ds_config=dict(reversed(list(TRIAL.ds_config.items())))),
    ):
        assert work_key(same) == work_key(TRIAL)


def test_credentials_are_in_nothing_that_is_stored_and_decide_nothing() -> None:
    def with_token(token: str) -> Trial:
        config = {**fakes.trial().ds_config, "wandb": {"enabled": True, "token": token}}
        return replace(fakes.trial(replace(fakes.zero(1), deepspeed_config=config)), ds_config=config)

    one, other = (with_token(f"hf_secret{number}") for number in range(2))
    assert "hf_secret" not in json.dumps(one.to_dict())
    assert work_key(one) == work_key(other)


def test_the_catalogue_is_the_stages_and_the_offload_strategies() -> None:
    rows = {
        name: (each.label, each.stage, each.offload_optimizer, each.offload_param) for name, each in CATALOGUE.items()
    }
    assert rows == {
        **{f"zero{stage}": (f"ZeRO-{stage}", stage, "none", "none") for stage in (0, 1, 2, 3)},
        "none": ("ZeRO-3", 3, "none", "none"),
        "cpu_optimizer": ("ZeRO-3 + CPU optimizer", 3, "cpu", "none"),
        "cpu_full": ("ZeRO-3 + CPU optimizer and parameters", 3, "cpu", "cpu"),
        "nvme": ("ZeRO-3 + NVMe optimizer and parameters", 3, "nvme", "nvme"),
    }
    assert (tuple(ZERO_STAGES), OFFLOAD_NAMES) == ((0, 1, 2, 3), ("none", "cpu_optimizer", "cpu_full", "nvme"))
    assert [named_strategy(name, 1).stage for name in ("zero2", "zero2_offload", "fsdp2", "nvme")] == [2, 2, 3, 1]


def test_a_row_is_named_by_its_name_its_label_or_its_stage() -> None:
    texts = ("zero3", "ZeRO-3", "3", "stage 3", "zero2", "", "cpu-optimizer", "FSDP2")
    rows = (fakes.zero(3), fakes.offload("none"), fakes.offload("cpu_optimizer"), fakes.reference("fsdp2"))
    named = {row.name: [text for text in texts if matches(row, text)] for row in rows}
    stage_3 = ["zero3", "ZeRO-3", "3", "stage 3"]
    # A stage names neither an offload strategy nor a reference engine.
    assert named == {"zero3": stage_3, "none": stage_3, "cpu_optimizer": ["cpu-optimizer"], "fsdp2": ["FSDP2"]}
