"""What torch's own engines do not do that a DeepSpeed configuration asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_bench.config import deepspeed_config, strategies, validation
from ds_bench.config.reference_engines import REFERENCES
from ds_bench.config.spec import Configuration, Placement
from tests.support import fakes

PLACE = Placement(accelerator="cuda", num_gpus=2)


def completed(name: str, **changes: Any) -> Configuration:
    row = fakes.reference(name)
    config = deepspeed_config.overlay(deepspeed_config.base_config(row, 4, 2), changes)
    config = deepspeed_config.complete_config(config, fakes.workload(), PLACE, torch_adam=False, largest_parameter=None)
    return replace(row, deepspeed_config=config)


def test_a_reference_of_the_catalogue_runs_as_it_is(subtests: pytest.Subtests) -> None:
    for name in REFERENCES:
        with subtests.test(name):
            row = completed(name)
            assert validation.unsupported_reason(row, PLACE) is None
            assert validation.ineffective_settings(row, fakes.workload(), PLACE) == []


def test_what_it_would_train_differently_makes_it_unsupported(subtests: pytest.Subtests) -> None:
    for changes, named in (
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "does not offload"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "--precision bf16"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        ({"optimizer": {"type": "Lion"}}, "Lion"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast"),
    ):
        with subtests.test(changes=changes, named=named):
            assert named in (validation.unsupported_reason(completed("fsdp2", **changes), PLACE) or "")


def test_settings_of_zero_are_said_to_be_left_out() -> None:
    row = completed("ddp", zero_optimization={"overlap_comm": False})
    (text,) = validation.ineffective_settings(row, fakes.workload(), PLACE)
    assert "zero_optimization.overlap_comm" in text
    assert validation.unsupported_reason(row, PLACE) is None


def test_a_stage_never_means_a_reference(subtests: pytest.Subtests) -> None:
    for text in ("zero3", "3", "stage 3"):
        with subtests.test(text):
            assert not strategies.matches(fakes.reference("fsdp2"), text)
            assert strategies.matches(fakes.reference("fsdp2"), "FSDP2")
