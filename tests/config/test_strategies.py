"""The catalogue of strategies, and which row a user's text names."""

from __future__ import annotations

from ds_bench.config.strategies import CATALOGUE, OFFLOAD_NAMES, ZERO_STAGES, matches, named_strategy
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
    assert [named_strategy(name, 1).stage for name in ("zero2", "zero2_offload", "fsdp2", "nvme")] == [2, 2, 3, 1]


def test_a_row_is_named_by_its_name_its_label_or_its_stage() -> None:
    texts = ("zero3", "ZeRO-3", "3", "stage 3", "zero2", "", "cpu-optimizer", "FSDP2")
    rows = (fakes.zero(3), fakes.offload("none"), fakes.offload("cpu_optimizer"), fakes.reference("fsdp2"))
    named = {row.name: [text for text in texts if matches(row, text)] for row in rows}
    stage_3 = ["zero3", "ZeRO-3", "3", "stage 3"]
    # A stage names neither an offload strategy nor a reference engine.
    assert named == {"zero3": stage_3, "none": stage_3, "cpu_optimizer": ["cpu-optimizer"], "fsdp2": ["FSDP2"]}
