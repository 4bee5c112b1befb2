"""Variables of the processes of a trial."""

from __future__ import annotations

import pytest

from ds_bench.launch.rank_environment import cuda_environment
from ds_bench.system.gpu_state import GpuFacts, GpuInventory

CARDS = GpuInventory(gpus=tuple(GpuFacts(index=index, uuid=f"GPU-{index}aaa") for index in range(4)))


@pytest.mark.parametrize(
    ("selection", "numbers"),
    [
        ("0,", "0"),
        (" 0, 1", "0,1"),
        ("2,GPU-0aaa", "2"),
        ("GPU-3aaa,GPU-1aaa", "3,1"),
        ("1,-1,2", "1"),
    ],
)
def test_every_way_to_select_gpus_becomes_numbers(selection: str, numbers: str) -> None:
    """DeepSpeed calls int() on each part between commas (accelerator/cuda_accelerator.py)."""
    assert cuda_environment({"CUDA_VISIBLE_DEVICES": selection}, CARDS)["CUDA_VISIBLE_DEVICES"] == numbers


def test_without_nvml_or_a_selection_nothing_is_selected() -> None:
    for environ, cards in (({}, CARDS), ({"CUDA_VISIBLE_DEVICES": "1"}, GpuInventory())):
        assert "CUDA_VISIBLE_DEVICES" not in cuda_environment(environ, cards)
