"""check and the installed DeepSpeed agree on what is refused: on public configurations, and key by key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config import automatic_values, deepspeed_config, deepspeed_keys, lint, located_json
from ds_bench.config.automatic_values import TrainingFacts
from ds_bench.config.rules import TRAINING_STARTS
from tests.support.deepspeed_starts import errors_at_start
from tests.support.lint_cases import CASES, CLEAN
from tests.support.shared_files import shared_files

_ASK = """
import json, logging, sys
out = sys.stdout; sys.stdout = sys.stderr
logging.disable(logging.CRITICAL)
from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig
comm.get_rank, comm.get_world_size = lambda *_: 0, lambda *_: 1
def refusal(config):
    try:
        DeepSpeedConfig(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
print(json.dumps([refusal(config) for config in json.load(sys.stdin)]), file=out)
"""
_SAMPLES = (None, True, 1, -1, 1.5, 5e8, "text", "5", ["text"], {})
_ONLY_0_AND_1 = ("wall_clock_breakdown", "flops_profiler.enabled", "checkpoint.parallel_write.pipeline_stage")
"""Switches that DeepSpeed reads as numbers, of which it takes no other; check takes any number for one."""
_FACTS = TrainingFacts(batch_size=1, grad_accum=1, num_gpus=1, precision="bf16", hidden_size=64, training_steps=10)


def disagreements(configs: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """What DeepSpeed on one rank refuses and check does not, or the other way round."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK],
        input=json.dumps([config for _, config in configs]),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    differing = []
    for (name, config), refusal in zip(configs, answers, strict=True):
        found = lint.check_config(config, num_gpus=1)
        errors = [each.reason for each in found if each.level == "error" and not each.stops_when]
        if bool(refusal) != bool(errors):
            differing.append(f"{name}: DeepSpeed says {refusal}, check says {errors}")
    return differing


def test_on_public_configurations_once_auto_is_filled_in() -> None:
    configs = []
    for path in shared_files("real_configs", "*.json"):
        filled = automatic_values.fill_in(located_json.parse(path.read_text(encoding="utf-8")), _FACTS).config
        filled.get("aio", {}).pop("use_gds", None)  # refused on the CPU accelerator alone
        configs.append((path.name, filled))
    assert disagreements(configs) == []


def test_key_by_key_on_values_of_every_type() -> None:
    configs = []
    for block, facts in deepspeed_keys.blocks().items():
        for key in facts["keys"]:
            path = f"{block}.{key}" if block else key
            if path == "aio.use_gds":  # refused on the CPU accelerator alone
                continue
            values = [value for value in _SAMPLES if path not in _ONLY_0_AND_1 or value not in (-1, 1.5, 5e8)]
            configs += [(f"{path} = {value!r}", _with(path, value)) for value in values]
    assert len(configs) > 3000
    assert disagreements(configs) == []


_TORCH_ADAM = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_deepspeed_stops_where_an_error_says_that_it_does_when_training_starts(tmp_path: Path) -> None:
    stopping = {}
    for rule, change in CASES:
        config = deepspeed_config.overlay(CLEAN, change)
        if any(finding.stops_when == TRAINING_STARTS for finding in lint.check_config(config)):
            stopping[rule] = {**_TORCH_ADAM, **config}
    assert len(stopping) > 14
    clean, *errors = errors_at_start([_TORCH_ADAM | CLEAN, *stopping.values()], tmp_path)
    assert clean is None
    assert [rule for rule, error in zip(stopping, errors, strict=True) if error is None] == []


def _with(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    config = {"train_batch_size": 1, **value}
    if path.startswith("zero_optimization."):
        config["zero_optimization"] = {"stage": 2, **config["zero_optimization"]}
    return config
