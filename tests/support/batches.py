"""Batches of random tokens, as a rank makes them."""

from __future__ import annotations

from typing import Any

import torch

from ds_bench.worker import model as build
from ds_bench.worker import training_loop


def batches(make_batch: build.MakeBatch | None = None, **changes: Any) -> list[training_loop.Batch]:
    arguments: dict[str, Any] = {
        "batch_size": 3,
        "seq_length": 5,
        "seed": 1,
        "rank": 0,
        "count": 4,
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
    }
    return training_loop.make_batches(make_batch or training_loop.random_tokens(11), **{**arguments, **changes})
