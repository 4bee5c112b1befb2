"""The catalogue of strategies, and which row a user's text names."""

from __future__ import annotations

import pytest

from ds_bench.config.strategies import CATALOGUE, OFFLOAD_NAMES, ZERO_STAGES, matches, named_strategy, offload_strategy
from tests.support import fakes


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
    assert named_strategy("cpu_optimizer", 2).label == "ZeRO-2 + CPU optimizer"
    assert [named_strategy(name, 1).stage for name in ("zero2", "zero2_offload", "fsdp2", "nvme")] == [2, 2, 3, 1]
    with pytest.raises(KeyError):
        offload_strategy("gpu")


def test_a_row_is_named_by_its_name_its_label_or_its_stage() -> None:
    for row, names in (
        (fakes.zero(3), {"zero3": True, "ZeRO-3": True, "3": True, "stage 3": True, "zero2": False, "": False}),
        (fakes.offload("cpu_optimizer"), {"cpu_optimizer": True, "cpu-optimizer": True, "zero3": False, "3": False}),
        (fakes.offload("none"), {"none": True, "stage 3": True}),
        # A stage never names a reference engine.
        (fakes.reference("fsdp2"), {"zero3": False, "3": False, "stage 3": False, "FSDP2": True}),
    ):
        assert {name: matches(row, name) for name in names} == names, row.name
