"""The rows of files: what they train, their caveats, and what "auto" becomes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config import automatic_values, validation
from ds_bench.config.automatic_values import TrainingFacts
from ds_bench.config.configuration_file_rows import FileRowMaker, batch_of_file
from ds_bench.config.configuration_files import ConfigurationFile, read_configuration_file
from ds_bench.config.deepspeed_config import nested, paths_of_auto
from ds_bench.config.spec import BATCH_KEYS, Configuration, Placement
from ds_bench.errors import UsageError
from tests.support.shared_files import shared_files

FACTS = TrainingFacts(num_gpus=2, batch_size=4, precision="bf16", hidden_size=128, training_steps=4)
ON = {"enabled": True}
ACCELERATE = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16"}


def file_of(folder: Path, content: Any) -> ConfigurationFile:
    path = folder / "mine.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return read_configuration_file(path)


def row_of(folder: Path, content: Any, *, keep_batch: bool = False, **facts: Any) -> Configuration:
    maker = FileRowMaker(facts=replace(FACTS, **facts), keep_batch=keep_batch)
    return maker.make(file_of(folder, content), 4)


def test_a_row_has_what_its_file_says_and_the_batch_of_the_flags(tmp_path: Path) -> None:
    content: dict[str, Any] = {
        "train_batch_size": 64,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}},
    }
    row = row_of(tmp_path, content)
    assert row == Configuration(
        name="mine",
        label="mine",
        source="file",
        deepspeed_config={
            "bf16": ON,
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
            "zero_optimization": content["zero_optimization"] | {"reduce_bucket_size": 128 * 128},
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
        },
        file_text=json.dumps(content),
        resolved_values={
            "optimizer.params.lr": 5e-5,
            "bf16.enabled": True,
            "zero_optimization.reduce_bucket_size": 128 * 128,
        },
    )


def test_old_spellings_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    zero = {"stage": 2, "cpu_offload": True, "max_live_parameters": 5}
    config = row_of(tmp_path, {"zero_optimization": zero, "bfloat16": {"enabled": "true"}}).deepspeed_config
    offload = {"device": "cpu"}
    assert config["zero_optimization"] == {"stage": 2, "offload_optimizer": offload, "stage3_max_live_parameters": 5}
    assert config["bf16"] == ON
    for zero_block in (True, {"stage": True}, {"stage": 1.0}):
        assert row_of(tmp_path, {"zero_optimization": zero_block, "fp16": {}}).stage == 1


def test_the_precision_is_the_files_and_never_silently_fp32(tmp_path: Path) -> None:
    for content, changed, caveats in (
        ({"fp16": ON}, "fp16", 0),
        ({"bf16": {"enabled": False}}, "fp32", 1),
        ({"bfloat16": {"enabled": False}, "fp16": {"enabled": "auto"}}, "fp32", 1),
        ({"fp16": {"enabled": "auto"}}, None, 0),
        ({"steps_per_print": 1}, None, 1),
    ):
        row = row_of(tmp_path, {**content, "optimizer": {"type": "Adam"}})
        assert (row.workload_changes.get("precision"), len(row.caveats)) == (changed, caveats), content
    row = row_of(tmp_path, {**ACCELERATE, "mixed_precision": "no", "deepspeed_config": {"zero_stage": 2}})
    assert row.deepspeed_config["bf16"] == {"enabled": False}
    assert len(row.caveats) == 2  # the other is its optimizer


def test_what_deepspeed_ignores_and_what_reaches_beyond_the_row_is_left_out_and_named_in_one_note(
    tmp_path: Path,
) -> None:
    """Files that DeepSpeed trains: nothing in them is a reason not to run them."""
    blocks = {"hybrid_engine": ON, "autotuning": ON, "data_efficiency": ON, "pipeline": {"stages": 2}}
    blocks |= {"tensorboard": {**ON, "output_path": "/elsewhere"}, "wandb": {**ON, "project": "x"}}
    profiler = {"flops_profiler": {"enabled": True, "output_file": "/elsewhere/f"}}
    zero = {"stage": 0, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    common = {"bf16": ON, "optimizer": optimizer}
    content = {**common, **blocks, **profiler, "csv_monitor": {}, "zero_optimization": zero, "gradient_cliping": 1}
    row = row_of(tmp_path, content)
    assert row.deepspeed_config == {
        **common,
        "zero_optimization": {"stage": 0},
        "flops_profiler": ON,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
    }
    (note,) = row.caveats
    unknown = "gradient_cliping (did you mean gradient_clipping?)"
    left_out = (*blocks, "offload_optimizer", "offload_param", "flops_profiler.output_file", unknown)
    assert [name for name in left_out if name not in str(note)] == []
    assert validation.unsupported_reason(row, Placement(accelerator="cuda")) is None
    nvme = {"device": "nvme", "nvme_path": "/elsewhere", "pin_memory": True}
    for stage, device in ((2, "cpu"), (3, "nvme")):
        zero = {"stage": stage, "offload_optimizer": nvme}
        row = row_of(tmp_path, {"bf16": ON, "optimizer": {"type": "AdamW"}, "zero_optimization": zero})
        assert row.deepspeed_config["zero_optimization"]["offload_optimizer"] == {"device": device, "pin_memory": True}
        assert len(row.caveats) == (stage == 2)


def test_kept_batch_keys_are_completed_as_deepspeed_does(tmp_path: Path) -> None:
    """Ranks that share a sequence count once, but tensor-parallel ranks do not (runtime/config.py)."""
    for keys, batch in (
        ((32, None, None), (16, 1)),
        ((32, 2, None), (2, 8)),
        ((None, 2, None), (2, 1)),
        ((None, 2, "auto"), (2, 3)),
        ((4, 4, None, {"sequence_parallel_size": 2}), (4, 1)),
        ((8, 4, None, {"tensor_parallel": {"autotp_size": 2}}), (4, 1)),
        ((8, 4, 1, {"sequence_parallel_size": 2}), None),
        ((3, None, None), None),
    ):
        given = {key: value for key, value in zip(BATCH_KEYS, keys, strict=False) if value is not None}
        content = {"fp16": {}, **given, **(keys[3] if len(keys) > 3 else {})}  # type: ignore[dict-item]
        if batch is not None:
            assert batch_of_file(file_of(tmp_path, content), 2, 4, 3) == batch, keys
        else:
            assert row_of(tmp_path, content, keep_batch=True).refusal is not None


def test_what_deepspeed_refuses_is_a_row_with_the_reason(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for content, named in (
        ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}, "offload_param.device"),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {}}}, "cpu_offload"),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "hidden_size"),
        ({"bf16": {}, "optimizer": {"params": {}}}, "optimizer has no type"),
        ({"steps_per_print": "auto"}, "steps_per_print"),
    ):
        with subtests.test(named):
            row = row_of(tmp_path, content, hidden_size=None)
            assert named in (row.refusal or "")
            assert row.stage == (3 if "offload_param" in named else 0)


def test_a_trainers_arguments_and_accelerates_flags_decide_what_the_configuration_leaves_open(tmp_path: Path) -> None:
    content = {
        "deepspeed": {"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}},
        "fp16": True,
        "learning_rate": 3e-4,
        "gradient_checkpointing": True,
        "per_device_train_batch_size": 8,
    }
    row = row_of(tmp_path, content)
    assert row.deepspeed_config["optimizer"]["params"]["lr"] == 3e-4
    assert row.workload_changes == {"precision": "fp16", "activation_checkpointing": True}
    assert row_of(tmp_path, content, keep_batch=True).workload_changes["batch_size"] == 8
    for stage, flag, changes in ((3, False, {"zero_init": False}), (3, True, {}), (2, False, {}), (3, None, {})):
        block = {"zero_stage": stage, "zero3_init_flag": flag}
        assert row_of(tmp_path, {**ACCELERATE, "deepspeed_config": block}).workload_changes == changes


# "auto", compared with the installed Transformers


ALL_AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto"),
        **dict.fromkeys(("stage3_param_persistence_threshold", "stage3_max_live_parameters"), "auto"),
    },
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping", *BATCH_KEYS[:2]), "auto"),
}
STAGE_2 = {**ALL_AUTO, "zero_optimization": {**ALL_AUTO["zero_optimization"], "stage": 2}}
ODD = {"zero_optimization": None, "scheduler": {"type": "WarmupLR"}, "optimizer": {"params": None}, "bf16": {}}
TUNED = {"learning_rate": 2e-4, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1}
TUNED |= {"max_grad_norm": 0.5, "warmup_steps": 0.3}


def facts(precision: Any = "bf16", num_gpus: int = 4, **changes: Any) -> TrainingFacts:
    values = {"batch_size": 3, "grad_accum": 2, "num_gpus": num_gpus, "hidden_size": 768, "training_steps": 25}
    return TrainingFacts(precision=precision, **{**values, **changes})


def ask_trainer(cases: list[tuple[dict[str, Any], TrainingFacts]]) -> list[dict[str, Any]]:
    """Return each configuration as the installed Trainer completes it."""
    asked = []
    for config, case in cases:
        arguments = {"per_device_train_batch_size": case.batch_size, "gradient_accumulation_steps": case.grad_accum}
        formats = {name: case.precision == name for name in ("bf16", "fp16")}
        asked.append(
            {
                "config": config,
                "arguments": {**arguments, **case.arguments},
                "facts": {"world_size": case.num_gpus, **formats},
                "model_config": {} if case.hidden_size is None else {"hidden_size": case.hidden_size},
                "training_steps": case.training_steps,
            }
        )
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "trainer_values.py")]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=300, check=True)
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def test_auto_becomes_what_the_trainer_makes_of_it() -> None:
    configs = [dict(read_configuration_file(path).config) for path in shared_files("real_configs", "*.json")]
    assert len(configs) >= 72
    without = facts(hidden_size=None)
    cases = [
        (ALL_AUTO, facts("fp16", num_gpus=1)),
        (ALL_AUTO, facts("fp32", arguments={"warmup_steps": 7})),
        (ALL_AUTO, facts(arguments=TUNED)),
        (STAGE_2, facts(hidden_size=1001)),
        *((config, case) for config in configs for case in (facts(), facts("fp32", arguments=TUNED))),
    ]
    *answers, refused = ask_trainer([*cases, (ALL_AUTO, without)])
    for (config, case), answer in zip(cases, answers, strict=True):
        assert automatic_values.fill_in(config, case)[0] == answer
    assert "hidden_size" in refused["error"]
    with pytest.raises(UsageError, match="hidden_size"):
        automatic_values.resolve(ALL_AUTO, without)


def test_nothing_is_left_of_auto_and_every_value_is_recorded() -> None:
    config, values = automatic_values.resolve(STAGE_2, facts())
    assert not list(paths_of_auto(config))
    assert values.keys() == set(paths_of_auto(STAGE_2))
    assert [path for path, value in values.items() if value is None][-1].endswith(".stage3_max_live_parameters")
    assert automatic_values.resolve(ODD, facts())[0] == ODD
    for path in ("steps_per_print", "optimizer.params.momentum", "aio.block_size"):
        with pytest.raises(UsageError, match=path):
            automatic_values.resolve(nested(path, "auto"), facts())
    # "auto" for the other 16-bit format alone never means fp32.
    assert automatic_values.resolve({"bf16": {"enabled": "auto"}}, facts("fp16"))[0]["fp16"] == ON
