"""Models of a user's own under real DeepSpeed: the same training at every stage and with every offload."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_bench.config.spec import Configuration, Workload
from ds_bench.launch import Limits
from ds_bench.launch.warm import WarmLauncher
from ds_bench.records.schema import RankMeasurement
from tests.support import fakes
from tests.support.real_trials import SHORT, make_trial

pytestmark = pytest.mark.deepspeed

STAGE_0, STAGE_3, OFFLOAD = fakes.zero(0), fakes.zero(3), fakes.offload("cpu_full")
TRAINED: dict[str, tuple[Configuration, ...]] = {
    "gpt2": (STAGE_0, fakes.zero(1), fakes.zero(2), STAGE_3, OFFLOAD),
    "lora": (STAGE_0, STAGE_3, OFFLOAD),
    "bert": (STAGE_0, STAGE_3),
    "t5": (STAGE_0, STAGE_3),
    "vit": (STAGE_0, STAGE_3),
}
FIRST_LOSS = {"gpt2": math.log(1000), "lora": math.log(1000), "bert": math.log(1000), "vit": math.log(10)}
"""Of a model that has learnt nothing. T5's own weights start far from it."""


@pytest.mark.parametrize("name", ["lora", *(pytest.param(n, marks=pytest.mark.slow) for n in TRAINED if n != "lora")])
def test_a_factorys_model_trains_alike_at_every_stage(
    name: str, server: Callable[[Limits], WarmLauncher], tmp_path: Path
) -> None:
    workload = Workload(
        model=f"factories:{name}", model_source="factory", batch_size=2, seq_length=16, num_steps=3, warmup_steps=1,
        precision="fp32",
    )  # fmt: skip
    ranks: list[tuple[RankMeasurement, ...]] = []
    for strategy in TRAINED[name]:
        folder = tmp_path / strategy.name
        folder.mkdir()
        record = server(SHORT).launch(make_trial(strategy, workload=workload), folder, lambda _progress: None)
        assert record.outcome.success, record.outcome.details
        ranks.append(record.ranks)
    first = ranks[0]
    assert first[0].losses != first[1].losses  # ranks see different data, the same in every row
    if name in FIRST_LOSS:
        assert first[0].losses[0] == pytest.approx(FIRST_LOSS[name], rel=0.15)
    for row in ranks[1:]:
        assert row[0].parameter_count == first[0].parameter_count
        for rank, reference in zip(row, first, strict=True):
            assert rank.losses == pytest.approx(reference.losses, rel=1e-3)
    assert bool(first[0].notes) is (name in ("t5", "vit"))
