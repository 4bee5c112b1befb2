"""Frozen weights that were trained are found out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


class _Heartbeat:
    phase = "warmup"

    def beat(self, _phase: str) -> None:
        pass


def test_one_changed_value_of_a_frozen_weight_is_seen_and_none_of_a_trained_one(subtests: pytest.Subtests) -> None:
    pytest.importorskip("deepspeed")
    from ds_bench.worker.weight_change import FrozenWeights

    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        with subtests.test(dtype=dtype):
            module = torch.nn.Module()
            module.frozen = torch.nn.Parameter(torch.arange(12).view(3, 4).to(dtype), requires_grad=False)
            module.trained = torch.nn.Parameter(torch.ones(4))
            engine: Any = SimpleNamespace(module=module)
            weights = FrozenWeights(engine, _Heartbeat())  # type: ignore[arg-type]
            module.trained.data += 1
            assert weights.have_changed() is False
            module.frozen.data[2, 3] += 1
            assert weights.have_changed() is True
            assert FrozenWeights(SimpleNamespace(module=torch.nn.Linear(2, 2)), _Heartbeat()).have_changed() is None  # type: ignore[arg-type]
