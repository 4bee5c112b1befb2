"""Tests of ``config.configuration_file_rows``: what a row of a file trains, and what its reader is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config import validation
from ds_bench.config.automatic_values import TrainingFacts
from ds_bench.config.configuration_file_rows import FileRowMaker, batch_of_file
from ds_bench.config.configuration_files import ConfigurationFile, read_configuration_file
from ds_bench.config.spec import BATCH_KEYS, Configuration, Placement
from ds_bench.errors import UsageError


def file_of(folder: Path, content: Any, name: str = "mine.json") -> ConfigurationFile:
    path = folder / name
    path.write_text(json.dumps(content), encoding="utf-8")
    return read_configuration_file(path)


FACTS = TrainingFacts(num_gpus=2, batch_size=4, precision="bf16", hidden_size=128, training_steps=4)


def maker(*, keep_batch: bool = False, **facts: Any) -> FileRowMaker:
    return FileRowMaker(facts=replace(FACTS, **facts), keep_batch=keep_batch)


def row_of(folder: Path, content: Any, **changes: Any) -> Configuration:
    return maker(**changes).make(file_of(folder, content), 4)


def test_a_row_has_what_its_file_says_and_the_batch_of_the_flags(tmp_path: Path) -> None:
    content = {
        "train_batch_size": 64,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}},
    }
    row = row_of(tmp_path, content)
    assert (row.name, row.source, row.stage, row.offload_optimizer) == ("mine", "file", 3, "cpu")
    assert row.deepspeed_config["train_micro_batch_size_per_gpu"] == 4
    assert "train_batch_size" not in row.deepspeed_config
    assert row.deepspeed_config["scheduler"]["params"]["warmup_num_steps"] == 1
    assert row.resolved_values["zero_optimization.reduce_bucket_size"] == 128 * 128
    assert json.loads(row.file_text or "") == content
    assert not row.workload_changes
    assert not row.caveats
    assert row.refusal is None


def test_old_spellings_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    zero = {"stage": 2, "cpu_offload": True, "max_live_parameters": 5}
    row = row_of(tmp_path, {"zero_optimization": zero, "bfloat16": {"enabled": "true"}})
    assert row.deepspeed_config["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "stage3_max_live_parameters": 5,
    }
    assert row.deepspeed_config["bf16"] == {"enabled": True}
    assert row_of(tmp_path, {"zero_optimization": True, "fp16": {}}).stage == 1
    assert [row_of(tmp_path, {"zero_optimization": {"stage": stage}}).stage for stage in (True, 2.0)] == [1, 2]


@pytest.mark.parametrize(
    ("content", "precision", "told"),
    [
        ({"fp16": {"enabled": True}}, "fp16", ()),
        ({"bf16": {"enabled": False}}, "fp32", ("its file enables neither bf16 nor fp16: trained in fp32",)),
        (
            {"bfloat16": {"enabled": False}, "fp16": {"enabled": "auto"}},
            "fp32",
            ("its file enables neither bf16 nor fp16: trained in fp32",),
        ),
        ({"fp16": {"enabled": "auto"}}, None, ()),
        ({"steps_per_print": 1}, None, ("its file names no precision: trained in bf16, not in DeepSpeed's fp32",)),
    ],
)
def test_the_precision_is_the_files_and_never_silently_fp32(
    tmp_path: Path, content: dict[str, Any], precision: str | None, told: tuple[str, ...]
) -> None:
    row = row_of(tmp_path, {**content, "optimizer": {"type": "Adam"}})
    assert row.workload_changes.get("precision") == precision
    assert row.caveats == told


def test_unknown_keys_and_an_absent_optimizer_are_caveats_of_the_row(tmp_path: Path) -> None:
    row = row_of(tmp_path, {"bf16": {"enabled": True}, "gradient_cliping": 1, "log": {"steps": 1}})
    assert row.caveats == (
        "left out of the copy that runs: gradient_cliping (did you mean gradient_clipping?), log, "
        "which DeepSpeed does not know",
        "its file has no optimizer: AdamW of learning rate 0.0001",
    )
    assert row.deepspeed_config.keys() & {"gradient_cliping", "log"} == set()


def test_what_deepspeed_ignores_is_left_out_and_named_in_one_note(tmp_path: Path) -> None:
    """Files that DeepSpeed trains: nothing in them is a reason not to run them."""
    content = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "hybrid_engine": {"enabled": True},
        "autotuning": {"enabled": True},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True}},
        "pipeline": {"stages": 2},
        "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "typo": 1,
    }
    row = row_of(tmp_path, content)
    assert row.deepspeed_config.keys() == {"bf16", "optimizer", "zero_optimization", *BATCH_KEYS[1:]}
    assert row.deepspeed_config["zero_optimization"] == {"stage": 0}
    (note,) = row.caveats
    left_out = ("typo", "offload_optimizer", "offload_param", "hybrid_engine", "autotuning", "data_efficiency")
    assert [name for name in (*left_out, "pipeline") if name not in note] == []
    for placement in (Placement(accelerator="cpu"), Placement(accelerator="cuda")):
        assert validation.unsupported_reason(row, placement) is None


def test_a_disk_below_stage_3_is_the_host_memory_that_deepspeed_uses_instead(tmp_path: Path) -> None:
    block = {"device": "nvme", "nvme_path": "/disk", "pin_memory": True}
    content = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    row = row_of(tmp_path, {**content, "zero_optimization": {"stage": 2, "offload_optimizer": block}})
    assert (row.offload_optimizer, row.uses_nvme) == ("cpu", False)
    assert row.deepspeed_config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert row.caveats == (
        "left out of the copy that runs: zero_optimization.offload_optimizer.device "
        "(stage 2 with NVMe runs as CPU offload in DeepSpeed)",
    )


def test_a_file_names_no_folder_and_sends_nothing(tmp_path: Path) -> None:
    block = {"device": "nvme", "nvme_path": "/elsewhere"}
    content = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_optimizer": block, "offload_param": block},
        "tensorboard": {"enabled": True, "output_path": "/elsewhere"},
        "csv_monitor": {"enabled": False, "output_path": "/elsewhere"},
        "wandb": {"enabled": True, "project": "x"},
        "flops_profiler": {"enabled": True, "output_file": "/elsewhere/f"},
    }
    row = row_of(tmp_path, content)
    assert "/elsewhere" not in json.dumps(row.deepspeed_config)
    (note,) = row.caveats
    assert [name for name in ("tensorboard", "wandb", "flops_profiler.output_file") if name not in note] == []


def test_a_trainers_arguments_decide_what_its_configuration_leaves_open(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("keys", "batch"),
    [
        ({"train_batch_size": 32}, (16, 1)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, (2, 8)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, (4, 4)),
        ({"train_micro_batch_size_per_gpu": 2}, (2, 1)),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": 4}, (4, 4)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}, (4, 4)),
        ({"train_batch_size": 3}, None),
        ({"train_batch_size": "many"}, None),
    ],
)
def test_kept_batch_keys_are_completed_as_deepspeed_does(
    tmp_path: Path, keys: dict[str, Any], batch: tuple[int, int] | None
) -> None:
    file = file_of(tmp_path, {"fp16": {}, **keys})
    if batch is None:
        with pytest.raises(UsageError):
            batch_of_file(file, 2, 4, 1)
        assert maker(keep_batch=True).make(file, 4).refusal is not None
    else:
        assert batch_of_file(file, 2, 4, 1) == batch


def test_accumulation_that_a_file_leaves_out_is_1_and_an_automatic_one_that_of_the_flags(tmp_path: Path) -> None:
    alone = {"train_micro_batch_size_per_gpu": 2}
    automatic = {**alone, "gradient_accumulation_steps": "auto"}
    assert [batch_of_file(file_of(tmp_path, keys), 2, 4, 3) for keys in (alone, automatic, {"fp16": {}})] == [
        (2, 1),
        (2, 3),
        (4, 3),
    ]


def test_ranks_that_share_a_sequence_count_once_in_the_batch_of_a_file(tmp_path: Path) -> None:
    """DeepSpeed divides the number of ranks by sequence_parallel_size (runtime/config.py), not by autotp_size."""
    keys = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "sequence_parallel_size": 2}
    assert batch_of_file(file_of(tmp_path, keys), 2, 1, 1) == (4, 1)
    with pytest.raises(UsageError, match="is not 4 × 1 × 1 data-parallel ranks"):
        batch_of_file(file_of(tmp_path, {**keys, "train_batch_size": 8, "gradient_accumulation_steps": 1}), 2, 1, 1)
    split = {**keys, "sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 2}, "train_batch_size": 8}
    assert batch_of_file(file_of(tmp_path, split), 2, 1, 1) == (4, 1)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"zero_optimization": {"stage": [0, 1]}}, "stage: DeepSpeed refuses [0, 1]"),
        ({"zero_optimization": {"stage": 5}}, "stage: DeepSpeed refuses 5"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "mics_shard_size"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}, 'device: DeepSpeed refuses "disk"'),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {}}},
            "old name of offload_optimizer together",
        ),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "hidden_size"),
        ({"fp16": None}, "fp16: DeepSpeed refuses null"),
        ({"bf16": {"enable": True}}, "bf16.enable"),
        ({"bf16": {}, "curriculum_learning": {"enabled": True}}, "curriculum_learning"),
        ({"bf16": {}, "optimizer": {"params": {}}}, "optimizer has no type"),
        ({"steps_per_print": "auto"}, "steps_per_print"),
        ({"fp16": {"enabled": True, "min_loss_scale": 1e-10}}, "min_loss_scale: DeepSpeed refuses 1e-10"),
        ({"bf16": {}, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, "use the top-level key"),
    ],
)
def test_what_deepspeed_refuses_is_a_row_with_the_reason(tmp_path: Path, content: dict[str, Any], told: str) -> None:
    row = row_of(tmp_path, content, hidden_size=None)
    assert told in (row.refusal or "")
    assert row.stage in (0, 3)


@pytest.mark.parametrize(
    ("stage", "flag", "changes"), [(3, False, {"zero_init": False}), (3, True, {}), (2, False, {}), (3, None, {})]
)
def test_a_model_is_built_as_accelerates_flag_says_where_that_matters(
    stage: int, flag: bool | None, changes: dict[str, bool], tmp_path: Path
) -> None:
    block = {"zero_stage": stage, **({} if flag is None else {"zero3_init_flag": flag})}
    content = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": block}
    file = file_of(tmp_path, content, "accelerate.yaml")
    assert file.kind == "accelerate"
    assert dict(maker().make(file, 4).workload_changes) == changes


def test_a_file_that_asks_for_no_mixed_precision_trains_in_fp32_and_says_so(tmp_path: Path) -> None:
    content = {"distributed_type": "DEEPSPEED", "mixed_precision": "no", "deepspeed_config": {"zero_stage": 2}}
    row = maker().make(file_of(tmp_path, content, "accelerate.yaml"), 2)
    assert row.deepspeed_config["bf16"] == {"enabled": False}
    assert "its file asks for no mixed precision: trained in fp32" in row.caveats
