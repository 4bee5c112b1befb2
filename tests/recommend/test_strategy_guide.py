"""Advice for a user's own model and number of GPUs: numbers by hand, and the five patterns."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.config.spec import Configuration
from ds_bench.prediction.model_states import model_states
from ds_bench.recommend import strategy_guide
from ds_bench.recommend.strategy_guide import ObservedRows, advise, rule_of_thumb
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


# ------------------------------------------------------------------ the five patterns


def said(fraction: float | None = None, stage: int | None = 0, *, num_gpus: int = 4, **more: Any) -> str:
    """Of a fastest row at that stage. ``short``: stages out of memory, ``trained``: stages that fit, ``offloads``:
    those that failed."""
    seen = ObservedRows(
        fastest_stage=stage,
        fraction=fraction,
        trained_stages=frozenset(more.pop("trained", [] if stage is None else [stage])),
        out_of_memory_stages=frozenset(more.pop("short", [])),
        full_stages=frozenset(more.pop("full", [])),
        failed_offloads=frozenset(more.pop("offloads", [])),
    )
    return rule_of_thumb(seen, num_gpus=num_gpus, **more) or "nothing"


def test_what_fits_comfortably_stays_at_stage_0_or_1() -> None:
    assert said(0.1) == "ZeRO-0 fits comfortably (10.0 % of the card): stage 0 or 1 is enough"
    assert said(0.599).startswith("ZeRO-0 fits comfortably")
    assert "fits comfortably" not in said(0.6)


def test_where_only_stage_2_trained_and_is_comfortable_no_lower_stage_is_called_enough() -> None:
    """Stages 0 and 1 ran out of memory, stage 2 takes 55 % of the card."""
    assert said(0.55, 2, short=[0, 1]) == (
        "ZeRO-2 fits comfortably (55.0 % of the card): stage 2 is enough; stages 0 and 1 ran out of memory"
    )


def test_a_comfortable_stage_1_says_nothing_of_a_stage_0_that_ran_out() -> None:
    assert said(0.4, 1, short=[0]).endswith("stage 1 is enough; stage 0 ran out of memory")
    assert said(0.4, 1, trained=[0, 1]).endswith("stage 1 is enough")


def test_between_comfortable_and_barely_there_is_no_pattern() -> None:
    assert said(0.7) == "nothing"


def test_what_barely_fits_goes_to_stage_2(subtests: pytest.Subtests) -> None:
    for fraction in (0.8, 0.9, 0.95):
        with subtests.test(fraction=fraction):
            assert said(fraction).startswith("ZeRO-0 barely fits")
            assert said(fraction).endswith("stage 2")


def test_a_card_about_to_run_out_is_said_of_a_row_and_not_sent_to_a_stage_as_full() -> None:
    assert said(0.96) == "ZeRO-0 is about to run out of memory (96.0 % of the card): stage 2"
    assert said(0.96, full=[2]).endswith(": stage 3")


def test_what_barely_fits_at_stage_2_is_not_sent_to_stage_2() -> None:
    assert said(0.9, 2).endswith(": stage 3")
    assert said(0.9, 2, short=[3]).endswith(": offload, cpu_optimizer first")
    assert said(0.9, 3).endswith(": offload, cpu_optimizer first")


def test_out_of_memory_at_stage_2_goes_to_stage_3_or_offload() -> None:
    assert said(stage=None, short=[2]) == "stage 2 ran out of memory: stage 3, or offload"
    assert said(0.9, 3, short=[0, 1, 2]) == "stage 2 ran out of memory: stage 3, or offload"
    assert "offload, cpu_optimizer first" in said(stage=None, short=[3])


def test_critical_speed_is_the_lowest_stage_that_fits() -> None:
    assert said(0.9, goal="speed") == "speed is critical: the lowest stage that fits"
    assert said(0.9, 2, goal="speed", short=[0, 1]) == "speed is critical: the lowest stage that fits"


def test_critical_speed_does_not_contradict_a_higher_stage_that_was_measured_to_be_faster() -> None:
    assert said(0.9, 2, goal="speed", trained=[0, 2]) == "speed is critical: stage 2, the fastest measured"


def test_critical_memory_is_stage_3_with_the_offloads_that_have_not_failed() -> None:
    start = "memory is critical: stage 3 with offload, "
    assert said(0.1, goal="memory") == f"{start}cpu_optimizer first, then cpu_full and nvme"
    assert said(0.1, goal="memory", offloads=["cpu_optimizer"]) == f"{start}cpu_full first, then nvme"
    assert said(0.1, goal="memory", offloads=["cpu_optimizer", "cpu_full", "nvme"]) == "nothing"


def test_one_gpu_is_never_sent_to_a_higher_stage() -> None:
    for situation in (said(0.9, num_gpus=1), said(0.1, num_gpus=1), said(stage=None, short=[2], num_gpus=1)):
        assert "on one GPU stages 1 to 3 partition nothing" in situation
        assert "stage 2:" not in situation
        assert "stage 3, or" not in situation
    assert "cpu_optimizer" in said(0.9, num_gpus=1)
    assert "cpu_optimizer" not in said(0.9, num_gpus=1, offloads=["cpu_optimizer"])


def test_an_out_of_memory_at_a_low_stage_does_not_hide_how_full_the_others_are() -> None:
    """Stage 0 ran out where stage 1 fits: what counts is how full that is."""
    assert said(0.4, 1, short=[0]).startswith("ZeRO-1 fits comfortably")


def test_nothing_known_is_nothing_said() -> None:
    assert said(stage=None) == "nothing"
    assert said(None, 0) == "nothing"


stages = st.frozensets(st.integers(0, 3))


@settings(deadline=None)
@given(trained=stages, short=stages, fraction=st.floats(0.01, 1), cards=st.sampled_from([1, 4]), data=st.data())
def test_no_stage_that_ran_out_of_memory_is_ever_suggested(
    trained: frozenset[int], short: frozenset[int], fraction: float, cards: int, data: st.DataObject
) -> None:
    short -= trained
    fastest = data.draw(st.sampled_from(sorted(trained))) if trained else None
    goal = data.draw(st.sampled_from(["speed", "balanced"]))
    text = said(fraction, fastest, trained=trained, short=short, num_gpus=cards, goal=goal)
    suggested = re.sub(r"\(.*?\)|stages? [0-3](?:, [0-3])*(?: and [0-3])* ran out of memory", "", text)
    for named in re.findall(r"stages? ([0-3])(?: or ([0-3]))?", suggested):
        assert not {int(stage) for stage in named if stage} & short, text
