"""The five rules of thumb, and that none suggests what has failed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.recommend.rules_of_thumb import ObservedRows, rule_of_thumb


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
    found = said(0.9, 2, goal="speed", trained=[0, 2])
    assert found == "speed is critical: stage 2, the lowest that cannot be told from the fastest"


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
