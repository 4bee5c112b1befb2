"""Advice for a user's own model and number of GPUs, with numbers by hand, and rules of thumb."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.config.spec import Configuration
from ds_bench.prediction.model_states import model_states
from ds_bench.recommend.guide import ObservedStages, StrategyAdvice, advise, rule_of_thumb
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


def test_savings_and_costs_by_hand() -> None:
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
    assert "≥ 1.00 GB between GPU and host" in of(fakes.offload("cpu_optimizer")).cost
    assert "≥ 1.50 GB between GPU and host" in of(fakes.offload("cpu_full")).cost
    assert "6.00 GB of optimizer states read and written" in of(fakes.offload("nvme")).cost
    assert "no traffic" in of(fakes.zero(3), num_gpus=1).cost


def test_offloaded_states_are_named_where_they_live() -> None:
    full, nvme = of(fakes.offload("cpu_full")), of(fakes.offload("nvme"))
    assert (full.bytes_by_tier["gpu"], full.saving_bytes) == (0, of(fakes.zero(0)).bytes_by_tier["gpu"])
    assert full.bytes_by_tier["cpu"] > 0
    assert nvme.bytes_by_tier["gpu"] == 0
    assert nvme.bytes_by_tier["nvme"] >= 12 * GB // 4
    # No strategy keeps only the parameters on the disk; a configuration file may.
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    mine = of(Configuration(name="mine", label="mine", deepspeed_config=config))
    assert mine.moves.startswith("optimizer states stay on the GPUs; parameters live on the disk")
    assert "parameters stay whole" in of(fakes.offload("cpu_optimizer", stage=2)).moves
    assert "parameters stay whole" not in of(fakes.offload("cpu_optimizer", stage=3)).moves


@settings(deadline=None)
@given(st.integers(1, 10**12), st.integers(1, 4096), st.sampled_from(EVERY), st.sampled_from(["bf16", "fp16", "fp32"]))
def test_saving_is_the_difference_to_stage_0(
    parameters: int, num_gpus: int, strategy: Configuration, precision: str
) -> None:
    found = advise(strategy, parameters=parameters, num_gpus=num_gpus, precision=precision)  # type: ignore[arg-type]
    whole = model_states(parameters, num_gpus, fakes.zero(0), precision)  # type: ignore[arg-type]
    assert found.saving_bytes + found.bytes_by_tier["gpu"] == sum(whole["gpu"].values())
    assert min(found.bytes_by_tier.values()) >= 0
    assert all(found.lines)
    if num_gpus == 1 and not strategy.offloads_optimizer:
        assert found.saving_bytes <= 0
        assert re.match(r"nothing.* on one GPU", found.saving) or strategy.stage == 0


# ------------------------------------------------------------------ rules of thumb


def rule(fraction: float | None = None, fastest: int | None = 0, *, num_gpus: int = 4, **more: Any) -> str:
    """The rule if only the fastest row, at that stage, has trained."""
    goal = more.pop("goal", "balanced")
    more.setdefault("trained", [] if fastest is None else [fastest])
    stages = ObservedStages(fastest=fastest, fraction=fraction, **{name: frozenset(more[name]) for name in more})
    return rule_of_thumb(stages, goal=goal, num_gpus=num_gpus) or "nothing"


def test_rules_of_thumb(subtests: pytest.Subtests) -> None:
    first, none = "offload, cpu_optimizer first", ("nothing", "nothing")
    speed, memory = "speed is critical: ", "memory is critical: stage 3 with offload, "
    every = ["cpu_optimizer", "cpu_full", "nvme"]
    for (start, end), found in (
        (("ZeRO-0 fits comfortably (10.0 % of the card)", ": stage 0 or 1 is enough"), rule(0.1)),
        (("ZeRO-0 fits", "is enough"), rule(0.599)),
        (none, rule(0.6)),
        (none, rule(0.79)),
        (none, rule(fastest=None)),
        (none, rule(None, 0)),
        (("ZeRO-2 fits", "2 is enough; stages 0 and 1 ran out of memory"), rule(0.5, 2, out_of_memory=[0, 1])),
        (("ZeRO-1 fits", "stage 1 is enough; stage 0 ran out of memory"), rule(0.4, 1, out_of_memory=[0])),
        (("ZeRO-1 fits", ": stage 1 is enough"), rule(0.4, 1, trained=[0, 1])),
        (("ZeRO-0 barely fits", ": stage 2"), rule(0.8)),
        (("ZeRO-0 barely fits", ": stage 2"), rule(0.95)),
        (("ZeRO-0 is about to run out of memory (96.0 %", ": stage 2"), rule(0.96)),
        (("ZeRO-0 is about", ": stage 3"), rule(0.96, full=[2])),
        (("ZeRO-2 barely", ": stage 3"), rule(0.9, 2)),
        (("ZeRO-2 barely", f": {first}"), rule(0.9, 2, out_of_memory=[3])),
        (("ZeRO-3 barely", f": {first}"), rule(0.9, 3)),
        (("stage 2 ran out of memory", ": stage 3, or offload"), rule(fastest=None, out_of_memory=[2])),
        (("stage 2 ran out of memory", ": stage 3, or offload"), rule(0.9, 3, out_of_memory=[0, 1, 2])),
        (("stage 3 ran out of memory", f": {first}"), rule(fastest=None, out_of_memory=[3])),
        ((speed, "the lowest stage that fits"), rule(0.9, 2, goal="speed", out_of_memory=[0, 1])),
        ((speed, "stage 2, the lowest that is tied with the fastest"), rule(0.9, 2, goal="speed", trained=[0, 2])),
        ((memory, "cpu_optimizer first, then cpu_full and nvme"), rule(0.1, goal="memory")),
        ((memory, "cpu_full first, then nvme"), rule(0.1, goal="memory", failed_offloads=every[:1])),
        (none, rule(0.1, goal="memory", failed_offloads=every)),
        (("ZeRO-0 barely", "or cpu_optimizer (on one GPU stages 1 to 3 partition nothing)"), rule(0.9, num_gpus=1)),
        (("ZeRO-0 barely", "or cpu_full (on one GPU stages 1 to 3 partition nothing)"),
         rule(0.9, num_gpus=1, failed_offloads=every[:1])),
        (("stage 2 ran", f"{first} (on one GPU stages 1 to 3 partition nothing)"),
         rule(fastest=None, out_of_memory=[2], num_gpus=1)),
    ):  # fmt: skip
        with subtests.test(start=start, end=end):
            assert found.startswith(start)
            assert found.endswith(end)


def test_rule_is_about_the_fastest_sound_row_without_offload(subtests: pytest.Subtests) -> None:
    zero, cards = fakes.zero, {"cards": 2}
    wrong = row(zero(1), 8, 9000, cards=2, losses=(None,) * 12)
    short = [out_of_memory(zero(stage), 2) for stage in (0, 1)]
    for records, goal, start in (
        ([row(zero(0), 70, 1000, **cards), row(zero(2), 30, 990, **cards), wrong], "balanced", "ZeRO-0 barely fits (8"),
        ([row(fakes.offload("none"), 20, 1000), row(fakes.offload("cpu_full"), 10, 500)], "balanced", "ZeRO-3 fits"),
        ([*short, row(zero(2), 44, 1000, **cards)], "balanced", "ZeRO-2 fits comfortably (55.0 %"),
        # The fastest is too full to use.
        ([row(zero(each), gb, speed, **cards) for each, gb, speed in ((1, 30, 900), (2, 30, 1200), (3, 78, 1500))],
         "speed", "speed is critical: stage 2"),
        # Stage 3 leads stage 2 by 1 %, which is no difference.
        ([row(zero(each), 30, speed, **cards) for each, speed in ((0, 800), (2, 1000), (3, 1010))], "speed",
         "speed is critical: stage 2"),
    ):  # fmt: skip
        with subtests.test(start):
            assert [step.kind for step in answer(*records, goal=goal).next_steps if str(step).startswith(start)] == [
                "rule"
            ]


stages = st.frozensets(st.integers(0, 3))


@settings(deadline=None)
@given(trained=stages, short=stages, fraction=st.floats(0.01, 1), cards=st.sampled_from([1, 4]), data=st.data())
def test_stage_that_ran_out_of_memory_is_never_suggested(
    trained: frozenset[int], short: frozenset[int], fraction: float, cards: int, data: st.DataObject
) -> None:
    short -= trained
    fastest = data.draw(st.sampled_from(sorted(trained))) if trained else None
    goal = data.draw(st.sampled_from(["speed", "balanced"]))
    text = rule(fraction, fastest, trained=trained, out_of_memory=short, num_gpus=cards, goal=goal)
    suggested = re.sub(r"\(.*?\)|stages? [0-3](?:, [0-3])*(?: and [0-3])* ran out of memory", "", text)
    for named in re.findall(r"stages? ([0-3])(?: or ([0-3]))?", suggested):
        assert not {int(stage) for stage in named if stage} & short, text
