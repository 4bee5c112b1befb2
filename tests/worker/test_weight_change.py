"""The early window of a trial, and frozen weights that were trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


class _Heartbeat:
    phase = "warmup"

    def beat(self, _phase: str) -> None:
        pass


def test_the_early_window_is_the_same_for_every_length_and_begins_after_the_learning_rate_has_risen() -> None:
    from ds_bench.worker.weight_change import early_window

    rising = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    assert [early_window({}, steps) for steps in (5, 20, 100)] == [range(5)] * 3
    assert early_window({}, 2) == range(2)
    assert not early_window({}, 0)
    assert early_window(rising, 20) == range(10, 15)
    assert early_window(rising, 12) == range(7, 12), "as late as the warm-up of the trial allows"
    assert early_window(rising, 5) == range(5)
    assert early_window({"scheduler": {"type": "WarmupLR"}}, 20) == range(15, 20), "DeepSpeed's default is 1000 steps"


def test_only_what_changes_within_the_window_is_in_its_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_bench.worker import weight_change

    weights = torch.zeros(3)
    monkeypatch.setattr(weight_change, "read_fragments", lambda _engine: iter([("a", 0, weights)]))
    for window in (range(2), range(1, 3)):
        weights.zero_()
        change = weight_change.WeightChange(None, _Heartbeat())  # type: ignore[arg-type]
        calls = dict(change.watch(window, lambda: 0))
        for done in range(4):
            calls.get(done, lambda: None)()
            weights[done % 3] += 10.0**done
        taken = torch.tensor([10.0**done if done in window else 0.0 for done in range(3)])
        expected = weight_change.sketch(iter([("a", 0, taken)]))
        assert change.early_window["weight_change"] == pytest.approx(expected.tolist())
        assert (change.early_window["first_step"], change.early_window["steps"]) == (window.start, 2)
        assert change.since_start() != change.early_window["weight_change"]


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
