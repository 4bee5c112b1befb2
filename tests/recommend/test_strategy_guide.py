"""Advice for a user's own model and number of GPUs: numbers by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.config.spec import Configuration
from ds_bench.prediction.model_states import model_states
from ds_bench.recommend import strategy_guide
from ds_bench.recommend.strategy_guide import advise
from tests.support import fakes

GB = 2**30
BILLION = 2**30
"""Elements, so that two bytes each are 2 GB."""
EVERY = [
    *(fakes.zero(stage) for stage in range(4)),
    *map(fakes.offload, ("cpu_optimizer", "cpu_full", "nvme")),
    *map(fakes.reference, ("ddp", "fsdp2")),
]


def of(strategy: Configuration, num_gpus: int = 4, **changes: int) -> strategy_guide.StrategyAdvice:
    return advise(strategy, parameters=BILLION, num_gpus=num_gpus, precision="bf16", **changes)


def test_every_strategy_says_when_to_use_it_when_not_what_moves_and_what_it_costs(subtests: pytest.Subtests) -> None:
    for strategy in EVERY:
        with subtests.test(strategy.name):
            found = of(strategy)
            texts = (found.use_when, found.avoid_when, found.moves, found.cost, found.saving)
            assert all(texts)
            assert all("\n" not in text for text in texts)
            assert len(strategy_guide.advice_lines(found)) == 6


def test_stage_1_saves_the_optimizer_states_of_the_other_gpus() -> None:
    """12 bytes × 2^30 elements are 12 GB of optimizer states; a quarter stays on each of 4 GPUs: 9 GB saved."""
    assert of(fakes.zero(1)).saving_bytes == 9 * GB
    assert of(fakes.zero(1)).saving.startswith("9.00 GB on each of 4 GPUs")


def test_what_fsdp2_and_ddp_send_follows_what_they_reduce() -> None:
    """2 GB of bf16 weights: FSDP2 gathers them twice per micro-batch and reduces once; DDP reduces 4 GB of fp32."""
    assert of(fakes.reference("fsdp2"), grad_accum=4).cost.startswith("≈ 13.50 GB")
    assert of(fakes.reference("ddp"), grad_accum=4).cost.startswith("≈ 6.00 GB")


def test_what_lies_where_is_told_of_the_offload_that_a_file_asks_for() -> None:
    """No strategy has parameters alone on the disk."""
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    found = of(Configuration(name="mine", label="mine", deepspeed_config=config))
    assert found.moves.startswith("optimizer states stay on the GPUs; parameters live on the disk")


def test_offloading_everything_leaves_no_model_states_on_the_device() -> None:
    found = of(fakes.offload("cpu_full"))
    assert found.device_bytes == 0
    assert found.host_bytes > 0
    assert found.saving_bytes == of(fakes.zero(0)).device_bytes


def test_nvme_keeps_neither_device_nor_host_full() -> None:
    found = of(fakes.offload("nvme"))
    assert found.device_bytes == 0
    assert found.nvme_bytes >= 12 * GB // 4


def test_on_one_gpu_the_stages_save_nothing_and_the_number_says_so(subtests: pytest.Subtests) -> None:
    for stage in (1, 2, 3):
        with subtests.test(stage=stage):
            found = of(fakes.zero(stage), num_gpus=1)
            assert found.saving_bytes <= 0
            assert found.saving.startswith("nothing")
            assert "on one GPU" in found.saving
            assert "GB" in found.saving


def test_traffic_of_the_stages_by_hand() -> None:
    """2 GB of parameters on 4 GPUs: at stage 0 each sends 2 × 2 GB × 3/4 = 3 GB, above three times, 4.5 GB."""

    def sent(row: Configuration) -> str:
        return of(row).cost.split(" through")[0]

    assert [sent(fakes.zero(stage)) for stage in range(4)] == ["≈ 3.00 GB", "≈ 4.50 GB", "≈ 4.50 GB", "≈ 4.50 GB"]
    block = {"stage": 2, "use_multi_rank_bucket_allreduce": False}
    scattered = replace(fakes.zero(2), deepspeed_config={"zero_optimization": block})
    limits = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), BILLION)
    kept = replace(fakes.zero(3), deepspeed_config={"zero_optimization": {"stage": 3, **limits}})
    assert (sent(scattered), sent(kept)) == ("≈ 3.00 GB", "≈ 3.00 GB")


def test_accumulation_multiplies_what_stages_2_and_3_send_and_not_what_0_and_1_do() -> None:
    """With 3 micro-batches: stage 2 sends 6 + 1 model sizes, 7 × 2 × 3/4 = 10.5 GB; stage 3 nine, 13.5 GB."""
    assert [of(fakes.zero(stage), grad_accum=3).cost.split(" through")[0] for stage in range(4)] == [
        "≈ 3.00 GB",
        "≈ 4.50 GB",
        "≈ 10.50 GB",
        "≈ 13.50 GB",
    ]


def test_one_gpu_sends_nothing() -> None:
    assert "through" not in of(fakes.zero(3), num_gpus=1).cost
    assert "no traffic" in of(fakes.zero(0), num_gpus=1).cost


def test_the_links_to_the_host_by_hand() -> None:
    """A rank's share of 2 GB on 4 GPUs is 0.5 GB: down and up 1 GB; with parameters on the host down, up, up 1.5 GB."""
    assert "≥ 1.00 GB between GPU and host" in of(fakes.offload("cpu_optimizer")).cost
    assert "≥ 1.50 GB between GPU and host" in of(fakes.offload("cpu_full")).cost


def test_what_nvme_reads_and_writes_by_hand() -> None:
    """12 GB of optimizer states, a quarter per rank, read and written: 6 GB."""
    assert "6.00 GB of optimizer states read and written" in of(fakes.offload("nvme")).cost


def test_offload_at_a_lower_stage_says_what_that_stage_does() -> None:
    assert "parameters stay whole" in of(fakes.offload("cpu_optimizer", stage=2)).moves
    assert "parameters stay whole" not in of(fakes.offload("cpu_optimizer", stage=3)).moves


@settings(deadline=None)
@given(st.integers(1, 10**12), st.integers(1, 4096), st.sampled_from(EVERY), st.sampled_from(["bf16", "fp16", "fp32"]))
def test_the_saving_is_the_difference_to_stage_0_whatever_the_size(
    parameters: int, num_gpus: int, strategy: Configuration, precision: str
) -> None:
    found = advise(strategy, parameters=parameters, num_gpus=num_gpus, precision=precision)  # type: ignore[arg-type]
    whole = model_states(parameters, num_gpus, fakes.zero(0), precision)  # type: ignore[arg-type]
    assert found.saving_bytes + found.device_bytes == sum(whole["gpu"].values())
    assert min(found.device_bytes, found.host_bytes, found.nvme_bytes) >= 0
