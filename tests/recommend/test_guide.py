"""Advice for a user's own model and number of GPUs, numbers by hand; and rules of thumb that never name what failed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.config.spec import Configuration
from ds_bench.prediction.model_states import model_states
from ds_bench.recommend.guide import ObservedRows, StrategyAdvice, advice_lines, advise, rule_of_thumb
from tests.support import fakes
from tests.support.recommendations import answer, out_of_memory, row

GB = 2**30
BILLION = 2**30
"""Elements, so that two bytes each are 2 GB."""
EVERY = [
    *(fakes.zero(stage) for stage in range(4)),
    *map(fakes.offload, ("cpu_optimizer", "cpu_full", "nvme")),
    *map(fakes.reference, ("ddp", "fsdp2")),
]


def of(strategy: Configuration, num_gpus: int = 4, **changes: int) -> StrategyAdvice:
    return advise(strategy, parameters=BILLION, num_gpus=num_gpus, precision="bf16", **changes)


def test_every_strategy_has_a_text_for_every_question() -> None:
    for strategy in EVERY:
        found = of(strategy)
        assert all((found.use_when, found.avoid_when, found.moves, found.cost, found.saving))
        assert len(advice_lines(found)) == 6


def test_what_strategies_save_and_cost_by_hand() -> None:
    """12 bytes × 2^30 elements are 12 GB of optimizer states; a quarter stays on each of 4 GPUs: 9 GB saved.

    FSDP2 gathers 2 GB of bf16 weights twice per micro-batch and reduces once; DDP reduces 4 GB of fp32. At stage 0 each
    GPU sends 2 × 2 GB × 3/4 = 3 GB, above three times, 4.5 GB; with 3 micro-batches stage 2 sends 6 + 1 model sizes,
    10.5 GB, and stage 3 nine, 13.5 GB. A rank's share is 0.5 GB: down and up 1 GB, with parameters on the host 1.5 GB.
    """
    assert of(fakes.zero(1)).saving_bytes == 9 * GB
    assert of(fakes.zero(1)).saving.startswith("9.00 GB on each of 4 GPUs")
    assert of(fakes.reference("fsdp2"), grad_accum=4).cost.startswith("≈ 13.50 GB")
    assert of(fakes.reference("ddp"), grad_accum=4).cost.startswith("≈ 6.00 GB")
    for accumulation, sent in ((1, (3, 4.5, 4.5, 4.5)), (3, (3, 4.5, 10.5, 13.5))):
        costs = [of(fakes.zero(stage), grad_accum=accumulation).cost.split(" through")[0] for stage in range(4)]
        assert costs == [f"≈ {each:.2f} GB" for each in sent]
    block = {"stage": 2, "use_multi_rank_bucket_allreduce": False}
    scattered = replace(fakes.zero(2), deepspeed_config={"zero_optimization": block})
    limits = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), BILLION)
    kept = replace(fakes.zero(3), deepspeed_config={"zero_optimization": {"stage": 3, **limits}})
    assert [of(each).cost.split(" through")[0] for each in (scattered, kept)] == ["≈ 3.00 GB", "≈ 3.00 GB"]
    assert "≥ 1.00 GB between GPU and host" in of(fakes.offload("cpu_optimizer")).cost
    assert "≥ 1.50 GB between GPU and host" in of(fakes.offload("cpu_full")).cost
    assert "6.00 GB of optimizer states read and written" in of(fakes.offload("nvme")).cost
    assert "no traffic" in of(fakes.zero(3), num_gpus=1).cost


def test_what_lies_where() -> None:
    full, nvme = of(fakes.offload("cpu_full")), of(fakes.offload("nvme"))
    assert (full.device_bytes, full.saving_bytes) == (0, of(fakes.zero(0)).device_bytes)
    assert full.host_bytes > 0
    assert nvme.device_bytes == 0
    assert nvme.nvme_bytes >= 12 * GB // 4
    # No strategy has parameters alone on the disk.
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    mine = of(Configuration(name="mine", label="mine", deepspeed_config=config))
    assert mine.moves.startswith("optimizer states stay on the GPUs; parameters live on the disk")
    assert "parameters stay whole" in of(fakes.offload("cpu_optimizer", stage=2)).moves
    assert "parameters stay whole" not in of(fakes.offload("cpu_optimizer", stage=3)).moves


def test_on_one_gpu_the_stages_save_nothing_and_the_number_says_so() -> None:
    for found in (of(fakes.zero(stage), num_gpus=1) for stage in (1, 2, 3)):
        assert found.saving_bytes <= 0
        assert re.match(r"nothing.* on one GPU.* GB", found.saving)


@settings(deadline=None)
@given(st.integers(1, 10**12), st.integers(1, 4096), st.sampled_from(EVERY), st.sampled_from(["bf16", "fp16", "fp32"]))
def test_the_saving_is_the_difference_to_stage_0_whatever_the_size(
    parameters: int, num_gpus: int, strategy: Configuration, precision: str
) -> None:
    found = advise(strategy, parameters=parameters, num_gpus=num_gpus, precision=precision)  # type: ignore[arg-type]
    whole = model_states(parameters, num_gpus, fakes.zero(0), precision)  # type: ignore[arg-type]
    assert found.saving_bytes + found.device_bytes == sum(whole["gpu"].values())
    assert min(found.device_bytes, found.host_bytes, found.nvme_bytes) >= 0


# ------------------------------------------------------------------ rules of thumb


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


def test_rules_of_thumb(subtests: pytest.Subtests) -> None:
    comfortable, enough = (
        "ZeRO-0 fits comfortably",
        "ZeRO-0 fits comfortably (10.0 % of the card): stage 0 or 1 is enough",
    )
    first = "offload, cpu_optimizer first"
    speed, memory = "speed is critical: ", "memory is critical: stage 3 with offload, "
    every = ["cpu_optimizer", "cpu_full", "nvme"]
    for start, end, found in (
        (enough, enough, said(0.1)),
        (comfortable, "is enough", said(0.599)),
        ("nothing", "nothing", said(0.6)),
        ("ZeRO-2 fits", "stage 2 is enough; stages 0 and 1 ran out of memory", said(0.55, 2, short=[0, 1])),
        ("ZeRO-1 fits", "stage 1 is enough; stage 0 ran out of memory", said(0.4, 1, short=[0])),
        ("ZeRO-1 fits", ": stage 1 is enough", said(0.4, 1, trained=[0, 1])),
        ("nothing", "nothing", said(0.79)),
        ("ZeRO-0 barely fits", ": stage 2", said(0.8)),
        ("ZeRO-0 barely fits", ": stage 2", said(0.95)),
        ("ZeRO-0 is about to run out of memory (96.0 %", ": stage 2", said(0.96)),
        ("ZeRO-0 is about", ": stage 3", said(0.96, full=[2])),
        ("ZeRO-2 barely", ": stage 3", said(0.9, 2)),
        ("ZeRO-2 barely", f": {first}", said(0.9, 2, short=[3])),
        ("ZeRO-3 barely", f": {first}", said(0.9, 3)),
        ("stage 2 ran out of memory", ": stage 3, or offload", said(stage=None, short=[2])),
        ("stage 2 ran out of memory", ": stage 3, or offload", said(0.9, 3, short=[0, 1, 2])),
        ("stage 3 ran out of memory", f": {first}", said(stage=None, short=[3])),
        (speed, "the lowest stage that fits", said(0.9, goal="speed")),
        (speed, "the lowest stage that fits", said(0.9, 2, goal="speed", short=[0, 1])),
        (speed, "stage 2, the lowest that is tied with the fastest", said(0.9, 2, goal="speed", trained=[0, 2])),
        (memory, "cpu_optimizer first, then cpu_full and nvme", said(0.1, goal="memory")),
        (memory, "cpu_full first, then nvme", said(0.1, goal="memory", offloads=every[:1])),
        ("nothing", "nothing", said(0.1, goal="memory", offloads=every)),
        ("ZeRO-0 barely", "partition nothing)", said(0.9, num_gpus=1)),
        (
            "stage 2 ran",
            f"{first} (on one GPU stages 1 to 3 partition nothing)",
            said(stage=None, short=[2], num_gpus=1),
        ),
        ("nothing", "nothing", said(stage=None)),
        ("nothing", "nothing", said(None, 0)),
    ):
        with subtests.test(start=start, end=end):
            assert found.startswith(start)
            assert found.endswith(end)
    assert "cpu_optimizer" in said(0.9, num_gpus=1)
    assert "cpu_optimizer" not in said(0.9, num_gpus=1, offloads=["cpu_optimizer"])


def test_the_rule_speaks_of_the_fastest_sound_row_without_offload(subtests: pytest.Subtests) -> None:
    zero, cards = fakes.zero, {"cards": 2}
    wrong = row(zero(1), 8, 9000, cards=2, losses=(None,) * 12)
    short = [out_of_memory(zero(stage), 2) for stage in (0, 1)]
    for records, goal, rule in (
        ([row(zero(0), 70, 1000, **cards), row(zero(2), 30, 990, **cards)], "balanced", "ZeRO-0 barely fits (87.5 %"),
        ([row(zero(0), 70, 1000, **cards), wrong], "balanced", "ZeRO-0 barely fits (87.5 %"),
        ([row(fakes.offload("none"), 20, 1000), row(fakes.offload("cpu_full"), 10, 500)], "balanced", "ZeRO-3 fits"),
        ([*short, row(zero(2), 44, 1000, **cards)], "balanced", "ZeRO-2 fits comfortably (55.0 %"),
        # Stage 3 leads stage 2 by 1 %, which is no difference.
        ([row(zero(each), 30, speed, **cards) for each, speed in ((0, 800), (2, 1000), (3, 1010))], "speed", "speed"),
    ):
        with subtests.test(rule):
            (said_of_it,) = [each for each in answer(*records, goal=goal).next_steps if each.startswith(rule)]
            assert goal != "speed" or "stage 2, the lowest" in said_of_it


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
