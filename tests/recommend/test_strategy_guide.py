"""Advice for a user's own model and number of GPUs, with numbers by hand."""

from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from ds_bench.config.spec import Configuration
from ds_bench.recommend.strategy_guide import advice_lines
from tests.support import fakes

ZERO, OFFLOAD = fakes.zero, fakes.offload


EVERY_STRATEGY = [
    *map(ZERO, range(4)),
    *map(OFFLOAD, ("cpu_optimizer", "cpu_full", "nvme")),
    OFFLOAD("cpu_optimizer", stage=2),
    *map(fakes.reference, ("ddp", "fsdp2")),
    # No strategy keeps only the parameters on the disk; a configuration file may.
    Configuration(
        name="mine",
        label="mine",
        deepspeed_config={"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
    ),
]


@pytest.mark.parametrize(("num_gpus", "grad_accum"), [(4, 1), (4, 3), (1, 1)])
def test_savings_and_costs_by_hand(num_gpus: int, grad_accum: int, snapshot: SnapshotAssertion) -> None:
    """For 2^30 elements. 12 bytes each are 12 GB of optimizer states; a quarter stays on each of 4 GPUs: 9 GB saved.

    At stage 0 each GPU sends 2 × 2 GB × 3/4 = 3 GB, above three times, 4.5 GB; with 3 micro-batches stage 2 sends 6 + 1
    model sizes, 10.5 GB, and stage 3 nine, 13.5 GB. A rank's share is 0.5 GB: down and up 1 GB, with parameters on the
    host 1.5 GB. FSDP2 gathers 2 GB of bf16 weights twice per micro-batch and reduces once; DDP reduces 4 GB of fp32.
    """
    options: Any = {"parameters": 2**30, "num_gpus": num_gpus, "grad_accum": grad_accum, "precision": "bf16"}
    lines = [line for strategy in EVERY_STRATEGY for line in advice_lines(strategy, **options)]
    assert "\n".join(line for line in lines if "when: " not in line) == snapshot
