"""Tests of ``config.automatic_values`` against Transformers itself, in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config import automatic_values
from ds_bench.config.automatic_values import TrainingFacts
from ds_bench.config.configuration_files import read_configuration_file
from ds_bench.errors import UsageError
from ds_bench.models.presets import find_preset
from tests.support.shared_files import shared_files

ALL_AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
STAGE_2 = {**ALL_AUTO, "zero_optimization": {**ALL_AUTO["zero_optimization"], "stage": 2}}
LITERAL = {
    "zero_optimization": {"stage": 1},
    "train_batch_size": 32,
    "optimizer": {"type": "Lion", "params": {"lr": 1}},
}
ODD = {"zero_optimization": None, "scheduler": {"type": "WarmupLR"}, "optimizer": {"params": None}, "bf16": {}}

TUNED = {
    "learning_rate": 2e-4,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "warmup_steps": 0.3,
}


def facts(precision: Any = "bf16", num_gpus: int = 4, **changes: Any) -> TrainingFacts:
    values = {"batch_size": 3, "grad_accum": 2, "num_gpus": num_gpus, "hidden_size": 768, "training_steps": 25}
    return TrainingFacts(precision=precision, **{**values, **changes})


def ask_trainer(cases: list[tuple[dict[str, Any], TrainingFacts]]) -> list[dict[str, Any]]:
    """What the installed Trainer makes of each configuration."""
    asked = [
        {
            "config": config,
            "arguments": {
                "per_device_train_batch_size": case.batch_size,
                "gradient_accumulation_steps": case.grad_accum,
                **case.arguments,
            },
            "facts": {
                "world_size": case.num_gpus,
                "bf16": case.precision == "bf16",
                "fp16": case.precision == "fp16",
            },
            "model_config": {} if case.hidden_size is None else {"hidden_size": case.hidden_size},
            "training_steps": case.training_steps,
        }
        for config, case in cases
    ]
    child = Path(__file__).parents[1] / "support" / "trainer_values.py"
    done = subprocess.run(
        [sys.executable, str(child)], input=json.dumps(asked), capture_output=True, text=True, timeout=300, check=True
    )
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def test_auto_becomes_what_the_trainer_makes_of_it_which_asks_for_a_hidden_size() -> None:
    without = facts(hidden_size=None)
    cases = [
        (ALL_AUTO, facts()),
        (ALL_AUTO, facts("fp16", num_gpus=1)),
        (ALL_AUTO, facts("fp32", arguments={"warmup_steps": 7})),
        (ALL_AUTO, facts(arguments=TUNED)),
        (STAGE_2, facts(hidden_size=1001)),
        (LITERAL, facts()),
    ]
    *answers, refused = ask_trainer([*cases, (ALL_AUTO, without)])
    for (config, case), answer in zip(cases, answers, strict=True):
        assert automatic_values.fill_in(config, case).config == answer
    assert "hidden_size" in refused["error"]
    with pytest.raises(UsageError, match="hidden_size"):
        automatic_values.resolve(ALL_AUTO, without)
    automatic_values.resolve(LITERAL, without)


def test_auto_of_real_files_becomes_what_the_trainer_makes_of_it() -> None:
    configs = []
    for path in shared_files("real_configs", "*.json"):
        configs.append(dict(read_configuration_file(path).config))
    assert len(configs) >= 72
    cases = [(config, case) for config in configs for case in (facts(), facts("fp32", arguments=TUNED))]
    for (config, case), answer in zip(cases, ask_trainer(cases), strict=True):
        assert automatic_values.fill_in(config, case).config == answer


def test_nothing_is_left_of_auto_and_every_value_is_told() -> None:
    resolution = automatic_values.resolve(STAGE_2, facts())
    assert not list(automatic_values.paths_of_auto(resolution.config))
    told = {*resolution.values, *resolution.left_to_deepspeed}
    assert told == set(automatic_values.paths_of_auto(STAGE_2))
    assert resolution.left_to_deepspeed[-1] == "zero_optimization.stage3_max_live_parameters"
    assert automatic_values.resolve(ODD, facts()).config == ODD


def test_an_auto_that_nothing_fills_in_is_refused(subtests: pytest.Subtests) -> None:
    for path in ("steps_per_print", "optimizer.params.momentum", "aio.block_size"):
        with subtests.test(path):
            *blocks, key = path.split(".")
            config: dict[str, Any] = {key: "auto"}
            for block in reversed(blocks):
                config = {block: config}
            with pytest.raises(UsageError, match=path):
                automatic_values.resolve(config, facts())


def test_auto_never_means_fp32_silently(subtests: pytest.Subtests) -> None:
    for written, precision, trained in (
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "bf16", {"bf16"}),
        ({"fp16": {"enabled": "auto"}}, "bf16", {"bf16"}),
        ({"bf16": {"enabled": "auto"}}, "fp16", {"fp16"}),
        ({"fp16": {"enabled": "auto"}}, "fp32", set()),
        ({"fp16": {"enabled": False}}, "bf16", set()),
    ):
        with subtests.test(written=written, precision=precision, trained=trained):
            config = automatic_values.resolve(written, facts(precision)).config
            assert {name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")} == trained


def test_presets_know_the_hidden_size_that_the_trainer_uses() -> None:
    names = ["tiny", "facebook/opt-350m", "mistralai/Mixtral-8x7B-v0.1"]
    presets = [preset for name in names if (preset := find_preset(name)) is not None]
    code = """
import json, sys
from transformers import AutoConfig
from ds_bench.worker.lookup_model import hidden_size
print(json.dumps([hidden_size(AutoConfig.for_model(kind, **config)) for kind, config in json.load(sys.stdin)]))
"""
    asked = json.dumps([[preset.model_type, dict(preset.config)] for preset in presets])
    done = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [preset.hidden_size for preset in presets]
