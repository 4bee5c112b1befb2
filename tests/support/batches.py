"""Batches of random tokens, as a rank makes them."""

from __future__ import annotations

from typing import Any

import torch

from ds_bench.worker import batches as worker
from ds_bench.worker.model import MakeBatch
from ds_bench.worker.training_loop import Batch


def batches(make_batch: MakeBatch | None = None, **changes: Any) -> list[Batch]:
    arguments: dict[str, Any] = {
        "batch_size": 3,
        "seq_length": 5,
        "seed": 1,
        "rank": 0,
        "count": 4,
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
    }
    return worker.make_batches(make_batch or worker.random_tokens(11), **{**arguments, **changes})
