"""The formulas of stage 3 against DeepSpeed's own code, which does the same with tensors."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import stage3

from ds_bench.prediction.inputs import MemoryInputs, ZeroSettings
from ds_bench.prediction.model_profile import ModelProfile
from ds_bench.prediction.stage_3 import ledger_by_phase

PARTS = (20, 12, 3, 12, 3, 20)
"""Elements of each tensor; one rank holds all of them."""


class Groups(stage3.DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]  # deepspeed has no types
    """DeepSpeed's sub-groups of ``PARTS`` on one rank, with parameters on NVMe: nothing is moved or trained."""

    def __init__(self, sub_group_size: int, max_in_cpu: int) -> None:
        parameters = [
            SimpleNamespace(
                ds_id=number, ds_tensor=None, ds_numel=part, partition_numel=lambda part=part: part, nvme_swapper=self
            )
            for number, part in enumerate(PARTS)
        ]
        self.trainable_param_groups = [{"params": parameters}]
        self.sub_group_size, self.max_params_in_cpu = sub_group_size, max_in_cpu
        self.offload_param = self.params_in_nvme_and_cpu = True
        self.use_muon = self.zenflow = False
        self.dtype = torch.bfloat16
        self.sub_group_to_group_id: dict[int, int] = {}
        self.written_back: list[int] = []
        for name in (
            "fp16_groups", "fp16_partitioned_groups", "fp16_partitioned_groups_flat", "groups_padding",
            "fp16_partitioned_groups_flat_numel", "fp16_partitioned_groups_flat_id", "sub_group_process_groups",
            "sub_group_partition_counts", "param_groups_fp16_flat_cpu_memory",
        ):  # fmt: skip
            setattr(self, name, [])
        self._create_fp16_partitions_with_defragmentation(self.trainable_param_groups)

    def _assert_same_partition_group(self, *_: Any) -> None: ...
    def _get_param_partition_group(self, *_: Any) -> None: ...
    def _move_to_flat_buffer(self, *_: Any, **__: Any) -> None: ...

    def reserve_partitioned_swap_space(self, sizes: list[int]) -> None:
        self.written_back = sizes


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(barrier=lambda: None, get_world_size=lambda **_: 1, get_rank=lambda *_: 1)
    monkeypatch.setattr(stage3, "dist", alone)


@pytest.mark.parametrize("limit", [0, 19, 20, 43, 47, 69, 70, 1000])
@pytest.mark.parametrize("sub_group_size", [1, 20, 30, 1000])
def test_the_groups_that_stay_in_memory_are_those_of_deepspeed(sub_group_size: int, limit: int) -> None:
    """After the first group that does not fit none does: with 20, 27 and 23 elements and room for 43 only the first."""
    own = Groups(sub_group_size, limit)
    pairs = zip(own.fp16_groups, own.fp16_partitioned_groups_flat, strict=True)
    on_disk = sum(each.partition_numel() for group, flat in pairs if flat is None for each in group)
    settings = replace(
        ZeroSettings.from_config({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}),
        sub_group_elements=sub_group_size,
        max_in_cpu_elements=limit,
        param_buffers=0,
        reduce_bucket_elements=0,
        # Every tensor is swapped, without padding.
        swap_threshold_bytes=2,
        swap_alignment_bytes=2,
    )
    profile = ModelProfile(
        name="toy", layers=1, before=PARTS, layer=(), after=(), tied_embeddings=False, activations={}
    )
    inputs = MemoryInputs(
        profile=profile, precision="bf16", data_parallel_size=1, grad_accum=1, accelerator="cuda", settings=settings
    )
    ledger = ledger_by_phase(inputs)["forward"]
    assert ledger.get("nvme", {}).get("parameters", 0) == 2 * on_disk
    assert ledger["cpu"]["parameters"] == 2 * sum(flat.numel() for flat in own.param_groups_fp16_flat_cpu_memory)
    assert ledger["cpu"].get("deepspeed_buffers", 0) == 2 * sum(own.written_back)
