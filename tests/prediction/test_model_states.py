"""Model states by formula: worked by hand, and the laws that every stage keeps. Real runs: test_prediction_real."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.config.spec import PRECISIONS, Precision
from ds_bench.prediction.model_states import flat_elements, model_states, partition_elements
from tests.support.fakes import offload, reference, zero

PARAMETERS = st.integers(1, 10**12)
RANKS = st.integers(1, 1024)


def test_bf16_without_zero_takes_16_bytes_per_parameter() -> None:
    # 1000 parameters: 2000 weights, 2000 gradients, 4000 master + 8000 moments.
    assert model_states(1000, 4, zero(0), "bf16") == {
        "gpu": {"parameters": 2000, "gradients": 2000, "optimizer_states": 12000}
    }


def test_fp32_without_zero_has_no_second_copy_of_the_weights() -> None:
    assert model_states(1000, 1, zero(0), "fp32")["gpu"]["optimizer_states"] == 8000


def test_fp32_with_zero_clones_the_master() -> None:
    # 1000 parameters on 2 ranks: 500 × (4 master + 8 moments).
    for stage in (1, 2, 3):
        assert model_states(1000, 2, zero(stage), "fp32")["gpu"]["optimizer_states"] == 6000


def test_stages_1_and_2_pad_the_flat_parameters_to_twice_the_ranks() -> None:
    # 1001 parameters on 3 ranks: the next multiple of 6 is 1002; a third of it is 334.
    ledger = model_states(1001, 3, zero(2), "bf16")["gpu"]
    assert ledger == {"parameters": 2 * 1002, "gradients": 2 * 334, "optimizer_states": 12 * 334}


def test_stage_1_keeps_every_gradient_until_the_last_is_there() -> None:
    assert model_states(1200, 3, zero(1), "bf16")["gpu"]["gradients"] == 2400


def test_stage_3_splits_the_parameters_too() -> None:
    ledger = model_states(900, 3, zero(3), "bf16")["gpu"]
    assert ledger == {"parameters": 600, "gradients": 600, "optimizer_states": 3600}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_torchs_engines_keep_everything_in_fp32_and_no_second_copy(precision: Precision) -> None:
    assert model_states(900, 3, reference("ddp"), precision)["gpu"] == {
        "parameters": 3600,
        "gradients": 3600,
        "optimizer_states": 7200,
    }
    assert sum(model_states(900, 3, reference("fsdp2"), precision)["gpu"].values()) == 16 * 300


def test_stage_3_pads_every_tensor_by_itself() -> None:
    # On 4 ranks: 5 → 2, 8 → 2, 1 → 1.
    assert partition_elements([5, 8, 1], 4) == 5


def test_the_optimizer_on_the_host_keeps_an_fp32_gradient_there() -> None:
    ledger = model_states(1200, 2, offload("cpu_optimizer", 2), "bf16")
    assert ledger == {"gpu": {"parameters": 2400}, "cpu": {"gradients": 2400, "optimizer_states": 7200}}


def test_stage_3_with_everything_on_nvme_leaves_only_the_accumulated_gradients_in_memory() -> None:
    ledger = model_states(1200, 2, offload("nvme"), "bf16")
    assert ledger["cpu"] == {"gradients": 1200}
    assert ledger["nvme"] == {"parameters": 1200, "gradients": 2400, "optimizer_states": 7200}


def test_stage_2_treats_nvme_as_the_cpu() -> None:
    assert "nvme" not in model_states(1200, 2, offload("nvme", 2), "bf16")


@given(PARAMETERS, RANKS)
def test_padding_of_the_flat_parameters_is_less_than_two_elements_per_rank(parameters: int, ranks: int) -> None:
    padded = flat_elements(parameters, ranks)
    assert parameters <= padded < parameters + 2 * ranks
    assert padded % (2 * ranks) == 0


@given(PARAMETERS, RANKS, st.sampled_from(PRECISIONS))
def test_where_nothing_needs_padding_a_higher_stage_never_holds_more(
    parameters: int, ranks: int, precision: Precision
) -> None:
    whole = 2 * ranks * parameters
    totals = [sum(model_states(whole, ranks, zero(stage), precision)["gpu"].values()) for stage in (1, 2, 3)]
    assert totals == sorted(totals, reverse=True)


@given(st.integers(2, 10**12), st.integers(1, 512), st.sampled_from([zero(1), zero(2), zero(3)]))
def test_all_ranks_together_hold_every_state_once(parameters: int, ranks: int, strategy: object) -> None:
    held = ranks * model_states(parameters, ranks, strategy, "bf16")["gpu"]["optimizer_states"]  # type: ignore[arg-type]
    assert 12 * parameters <= held < 12 * (parameters + 2 * ranks)


@pytest.mark.parametrize("name", ["cpu_optimizer", "cpu_full", "nvme"])
@given(PARAMETERS, RANKS)
def test_offload_takes_bytes_from_the_gpu_and_loses_none(name: str, parameters: int, ranks: int) -> None:
    at_home, away = (
        model_states(parameters, ranks, zero(3), "bf16"),
        model_states(parameters, ranks, offload(name), "bf16"),
    )
    assert sum(away.get("gpu", {}).values()) < sum(at_home["gpu"].values())
    states = sum(row.get("optimizer_states", 0) for row in away.values())
    assert states == at_home["gpu"]["optimizer_states"]
