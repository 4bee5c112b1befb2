"""The catalogue: names people type, stages that are meant, labels that tell rows apart."""

from __future__ import annotations

import pytest

from ds_bench.config.strategies import OFFLOAD_NAMES, ZERO_STAGES, matches, offload_strategy
from tests.support import fakes


def test_the_zero_script_knows_stages_0_to_3_in_order() -> None:
    assert [(key, strategy.stage, strategy.name) for key, strategy in ZERO_STAGES.items()] == [
        (0, 0, "zero0"),
        (1, 1, "zero1"),
        (2, 2, "zero2"),
        (3, 3, "zero3"),
    ]


def test_no_zero_stage_offloads_anything() -> None:
    assert {(s.offload_optimizer, s.offload_param) for s in ZERO_STAGES.values()} == {("none", "none")}


def test_the_offload_strategies_and_their_order() -> None:
    assert OFFLOAD_NAMES == ("none", "cpu_optimizer", "cpu_full", "nvme")


def test_an_offload_strategy_moves_what_its_name_says(subtests: pytest.Subtests) -> None:
    for name, optimizer, param in (
        ("none", "none", "none"),
        ("cpu_optimizer", "cpu", "none"),
        ("cpu_full", "cpu", "cpu"),
        ("nvme", "nvme", "nvme"),
    ):
        with subtests.test(name):
            strategy = offload_strategy(name)
            assert (strategy.offload_optimizer, strategy.offload_param) == (optimizer, param)


def test_offload_is_at_stage_3_unless_asked() -> None:
    assert {offload_strategy(name).stage for name in OFFLOAD_NAMES} == {3}
    assert offload_strategy("cpu_optimizer", 1).stage == 1


def test_a_label_names_the_stage() -> None:
    assert offload_strategy("cpu_optimizer", 2).label == "ZeRO-2 + CPU optimizer"
    assert offload_strategy("none").label == "ZeRO-3"


def test_no_two_rows_of_a_comparison_share_a_label_or_a_name() -> None:
    for strategies in (list(ZERO_STAGES.values()), [offload_strategy(name) for name in OFFLOAD_NAMES]):
        assert len({strategy.label for strategy in strategies}) == len({s.name for s in strategies}) == len(strategies)


def test_an_unknown_offload_is_no_strategy() -> None:
    with pytest.raises(KeyError):
        offload_strategy("gpu")


def test_a_strategy_is_meant_by_its_name_its_label_or_its_stage(subtests: pytest.Subtests) -> None:
    for strategy, name, meant in (
        (fakes.zero(3), "zero3", True),
        (fakes.offload("cpu_optimizer"), "cpu_optimizer", True),
        (fakes.offload("cpu_optimizer"), "cpu-optimizer", True),
        (fakes.offload("cpu_optimizer"), "zero3", False),
        (fakes.offload("none"), "none", True),
        (fakes.offload("none"), "stage 3", True),
        (fakes.zero(3), "3", True),
        (fakes.zero(3), "", False),
    ):
        with subtests.test(name):
            assert matches(strategy, name) is meant
