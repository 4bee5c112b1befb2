"""The table of axes agrees with DeepSpeed's keys, the workload and itself."""

from __future__ import annotations

from dataclasses import fields

import pytest

from ds_bench.config import axis_rows, deepspeed_keys, validation
from ds_bench.config.axes import AXES, CHANGES, Axis, RowFacts
from ds_bench.config.deepspeed_config import base_config, overlay, paths_of
from ds_bench.config.spec import Strategy, Workload

ROW = RowFacts(
    stage=3, offload_optimizer="nvme", offload_param="cpu", grad_accum=4, ranks=4, hidden_size=64, parameters=10**6
)
FULL = Strategy(name="s", label="S", stage=3, offload_optimizer="nvme", offload_param="cpu")


def sample_texts(axis: Axis) -> list[str]:
    """Every named value, and the least number and one above it."""
    numbers = [] if axis.numbers is None else [f"{axis.numbers.least:g}", f"{axis.numbers.most / 2:g}"]
    return [*axis.values, *(numbers if axis.name != "hpz" else ["1", "2"])]


def test_an_axis_sets_what_it_says_and_deepspeed_knows_it(subtests: pytest.Subtests) -> None:
    for axis in AXES.values():
        with subtests.test(axis.name):
            facts = (
                ROW
                if not axis.name.startswith("optimizer")
                else RowFacts(stage=3, offload_optimizer=None, offload_param=None, grad_accum=1, ranks=4)
            )
            names = {each.name for each in fields(Workload)}
            settings = [
                axis_rows.setting_of(axis_rows.read_values(axis.name, [text]), facts) for text in sample_texts(axis)
            ]
            assert len(settings) > 1
            assert len({repr(setting) for setting in settings}) == len(settings), "two values set the same"
            for setting in settings:
                config = overlay(base_config(FULL, 1), setting.config)
                validation.check_keys(config)
                paths = {path for path, _ in paths_of(setting.config)}
                assert all(any(path == key or path.startswith(f"{key}.") for key in axis.keys) for path in paths), paths
                assert setting.workload.keys() == set(axis.fields) or (not setting.workload and axis.settings)
                assert setting.workload.keys() <= names
                assert setting.variables.keys() == set(axis.variables)


def test_the_texts_of_an_axis_are_complete(subtests: pytest.Subtests) -> None:
    for axis in AXES.values():
        with subtests.test(axis.name):
            assert axis.changes
            assert set(axis.changes) <= CHANGES.keys()
            assert axis.default
            assert axis.source
            assert not axis.meaning.endswith(".")
            assert not axis.cuda_only or axis.default in axis.values
            for key in axis.keys:
                block, _, name = key.rpartition(".")
                assert name in deepspeed_keys.keys_of(block)
