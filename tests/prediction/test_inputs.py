"""How often an optimizer step sends parameters and gradients, against the ZeRO paper and DeepSpeed 0.19.8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_bench.config.spec import Configuration
from ds_bench.prediction.inputs import times_sent
from tests.support import fakes

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
