"""Model states by hand for every stage and offload, how often they are sent, and the laws that hold for any size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.config.spec import Configuration
from ds_bench.prediction.inputs import times_sent
from ds_bench.prediction.model_states import flat_elements, model_states, partition_elements
from tests.support import fakes
from tests.support.fakes import offload, reference, zero

PARAMETERS, RANKS = st.integers(1, 10**12), st.integers(1, 512)


def states(parameters: int, gradients: int, optimizer_states: int) -> dict[str, int]:
    return {"parameters": parameters, "gradients": gradients, "optimizer_states": optimizer_states}


def test_bytes_per_rank_by_hand(subtests: pytest.Subtests) -> None:
    """16 bit: 2 + 2 + 12 bytes per parameter; fp32: 4 + 4 + 8, and 4 more for the copy that stages 1 to 3 keep."""
    cpu = offload("cpu_optimizer", 2)
    cases: list[tuple[str, int, int, Configuration, str, dict[str, Any]]] = [
        ("stage 0", 1000, 1, zero(0), "bf16", {"gpu": states(2000, 2000, 12_000)}),
        ("fp32 without a second copy", 1000, 1, zero(0), "fp32", {"gpu": states(4000, 4000, 8000)}),
        ("fp32 with a second copy", 1000, 2, zero(2), "fp32", {"gpu": states(4000, 2000, 6000)}),
        ("stage 1 keeps every gradient", 1200, 3, zero(1), "bf16", {"gpu": states(2400, 2400, 4800)}),
        # The next multiple of twice 3 ranks is 1002; a third of it is 334.
        ("padding of flat parameters", 1001, 3, zero(2), "bf16", {"gpu": states(2004, 668, 4008)}),
        ("stage 3", 900, 3, zero(3), "bf16", {"gpu": states(600, 600, 3600)}),
        ("stage 3, fp32", 900, 3, zero(3), "fp32", {"gpu": states(1200, 1200, 3600)}),
        ("fp32 gradient on the host", 1200, 2, cpu, "bf16",
         {"gpu": {"parameters": 2400}, "cpu": {"gradients": 2400, "optimizer_states": 7200}}),
        ("all on NVMe but accumulated gradients", 1200, 2, offload("nvme"), "bf16",
         {"cpu": {"gradients": 1200}, "nvme": states(1200, 2400, 7200)}),
        ("stage 2 treats NVMe as the CPU", 1200, 2, offload("nvme", 2), "bf16",
         {"gpu": {"parameters": 2400}, "cpu": {"gradients": 2400, "optimizer_states": 7200}}),
        ("DDP, fp32 in every precision", 900, 3, reference("ddp"), "bf16", {"gpu": states(3600, 3600, 7200)}),
        ("FSDP2, fp32 in every precision", 900, 3, reference("fsdp2"), "bf16", {"gpu": states(1200, 1200, 2400)}),
    ]  # fmt: skip
    for name, parameters, ranks, strategy, precision, expected in cases:
        with subtests.test(name):
            assert model_states(parameters, ranks, strategy, precision) == expected  # type: ignore[arg-type]
    # Stage 3 pads every tensor by itself. On 4 ranks: 5 → 2, 8 → 2, 1 → 1.
    assert partition_elements([5, 8, 1], 4) == 5


@given(PARAMETERS, RANKS)
def test_laws_of_partitioning(parameters: int, ranks: int) -> None:
    padded = flat_elements(parameters, ranks)
    assert parameters <= padded < parameters + 2 * ranks
    assert padded % (2 * ranks) == 0
    # Without padding a higher stage never holds more.
    whole = 2 * ranks * parameters
    totals = [sum(model_states(whole, ranks, zero(stage), "bf16")["gpu"].values()) for stage in (1, 2, 3)]
    assert totals == sorted(totals, reverse=True)
    # All ranks together hold every state once.
    for stage in (1, 2, 3):
        held = ranks * model_states(parameters, ranks, zero(stage), "bf16")["gpu"]["optimizer_states"]
        assert 12 * parameters <= held < 12 * (parameters + 2 * ranks)


@pytest.mark.parametrize("name", ["cpu_optimizer", "cpu_full", "nvme"])
@given(PARAMETERS, RANKS)
def test_offload_moves_states_from_the_gpu_and_loses_none(name: str, parameters: int, ranks: int) -> None:
    at_home, away = (model_states(parameters, ranks, each, "bf16") for each in (zero(3), offload(name)))
    assert sum(away.get("gpu", {}).values()) < sum(at_home["gpu"].values())
    assert sum(row.get("optimizer_states", 0) for row in away.values()) == at_home["gpu"]["optimizer_states"]


PARAMETERS = 2_000_000_000
"""More than stage 3 keeps gathered (1e9)."""


def with_zero(stage: int, **keys: Any) -> Configuration:
    made = fakes.zero(stage)
    config = dict(made.deepspeed_config)
    return replace(made, deepspeed_config={**config, "zero_optimization": {**config["zero_optimization"], **keys}})


def test_parameters_and_gradients_are_sent_as_often_as_in_the_paper_and_deepspeed(subtests: pytest.Subtests) -> None:
    for configuration, grad_accum, expected in (
        (fakes.zero(0), 1, (0, 2)),
        (with_zero(1, use_multi_rank_bucket_allreduce=False), 1, (0, 2)),
        (with_zero(2, use_multi_rank_bucket_allreduce=False), 1, (0, 2)),
        (fakes.zero(1), 1, (0, 3)),  # buckets are all-reduced
        (fakes.zero(2), 1, (0, 3)),
        (fakes.zero(3), 1, (2, 1)),
        (fakes.zero(1), 4, (0, 3)),
        (fakes.zero(2), 4, (0, 9)),  # gradients of every micro-batch
        (fakes.zero(3), 4, (8, 4)),
        (with_zero(3, stage3_max_live_parameters=10**10, stage3_max_reuse_distance=10**10), 1, (1, 1)),
        (with_zero(3, stage3_max_live_parameters=10**10), 1, (2, 1)),  # the reuse distance is smaller than the model
        (fakes.reference("ddp"), 1, (0, 2)),
        (fakes.reference("fsdp2"), 1, (2, 1)),
    ):
        with subtests.test(configuration=configuration.name, grad_accum=grad_accum):
            assert times_sent(configuration, PARAMETERS, grad_accum) == expected
