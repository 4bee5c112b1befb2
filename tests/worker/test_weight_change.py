"""What training, or loading a checkpoint, has changed: sketches, frozen weights, norms of optimizer states."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_bench.worker import checkpoint, weight_change
from ds_bench.worker.weight_change import FrozenWeights, WeightChange, early_window, sketch

HEARTBEAT: Any = SimpleNamespace(phase="warmup", beat=lambda _phase: None)
RISING = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}


@pytest.mark.parametrize(
    ("config", "warmup_steps", "window"),
    [
        ({}, 0, range(0)),
        ({}, 2, range(2)),
        ({}, 100, range(5)),
        (RISING, 20, range(10, 15)),
        (RISING, 12, range(7, 12)),  # as late as the warm-up of the trial allows
        (RISING, 5, range(5)),
        ({"scheduler": {"type": "WarmupLR"}}, 20, range(15, 20)),  # DeepSpeed's default is 1000 steps
    ],
)
def test_the_early_window_begins_after_the_learning_rate_has_risen(
    config: dict[str, Any], warmup_steps: int, window: range
) -> None:
    assert early_window(config, warmup_steps) == window


def test_only_what_changes_within_the_window_is_in_its_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.zeros(3)
    monkeypatch.setattr(weight_change, "read_fragments", lambda _engine: iter([("a", 0, weights)]))
    for window in (range(2), range(1, 3)):
        weights.zero_()
        change = WeightChange(None, HEARTBEAT)
        calls = dict(change.watch(window, lambda: 0))
        for done in range(4):
            calls.get(done, lambda: None)()
            weights[done % 3] += 10.0**done
        taken = torch.tensor([10.0**done if done in window else 0.0 for done in range(3)])
        expected = sketch(iter([("a", 0, taken)]))
        assert change.early_window["weight_change"] == pytest.approx(expected.tolist())
        assert (change.early_window["first_step"], change.early_window["steps"]) == (window.start, 2)
        assert change.since_start() != change.early_window["weight_change"]


def test_weights_that_have_become_nan_have_no_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.zeros(3)
    monkeypatch.setattr(weight_change, "read_fragments", lambda _engine: iter([("a", 0, weights)]))
    change = WeightChange(None, HEARTBEAT)
    weights[1] = math.nan
    assert change.since_start() is None


def test_a_sketch_is_of_the_tensors_and_not_of_how_ranks_hold_them() -> None:
    values = torch.randn(700_000, generator=torch.Generator().manual_seed(1))
    whole = sketch(iter([("a", 0, values), ("b", 0, values[:5])]))
    parts = [("a", 0, values[:13]), ("a", 13, values[13:300_001]), ("a", 300_001, values[300_001:])]
    split = sum(sketch(iter([part])) for part in reversed([*parts, ("b", 0, values[:5])]))
    assert torch.allclose(whole, split, rtol=0, atol=1e-9)
    norm = float(torch.cat([values, values[:5]]).norm())
    assert float(whole.norm()) == pytest.approx(norm, rel=0.3)
    other = sketch(iter([("c", 0, values), ("b", 0, values[:5])]))
    assert abs(float(whole @ other)) < 0.3 * norm**2


def test_a_change_too_slow_to_read_is_given_up_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_change, "read_fragments", lambda _engine: iter([("a", 0, torch.ones(10))]))
    change = WeightChange(None, HEARTBEAT)
    assert change.since_start() == [0.0] * weight_change.DIMENSIONS
    monkeypatch.setattr(weight_change, "MAX_SECONDS", -1.0)
    assert change.since_start() is None
    assert "took longer" in (change.note or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_one_changed_value_of_a_frozen_weight_is_seen_and_none_of_a_trained_one(dtype: torch.dtype) -> None:
    module = torch.nn.Linear(1, 4, bias=False)
    engine = SimpleNamespace(module=module)
    assert FrozenWeights(engine, HEARTBEAT).have_changed() is None
    module.frozen = torch.nn.Parameter(torch.arange(12).view(3, 4).to(dtype), requires_grad=False)
    weights = FrozenWeights(engine, HEARTBEAT)
    module.weight.data += 1
    assert weights.have_changed() is False
    module.frozen.data[2, 3] += 1
    assert weights.have_changed() is True


def test_norms_of_the_states_are_exact_and_take_no_copy_of_a_state() -> None:
    """A copy of a whole state in float64 runs out of memory on a card that training has filled."""
    largest = 0

    class LargestResult(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.linalg_vector_norm.default:  # which copies its argument
                largest = max(largest, args[0].numel())
            elif isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                largest = max(largest, result.numel())
            return result

    elements = 3 * 2**22 + 5
    with LargestResult():  # type: ignore[no-untyped-call]
        assert checkpoint._norm(torch.full((elements,), 0.1)) == pytest.approx(0.1 * math.sqrt(elements), rel=1e-7)
    assert largest <= 2**22


def test_after_the_step_that_changes_the_weights_the_phase_is_inspect_again() -> None:
    """Otherwise a failure in loading would be reported as one of the step."""
    phases, module = list[str](), torch.nn.Linear(2, 2)
    before = module.weight.detach().clone()
    trainer: Any = SimpleNamespace(
        step=lambda: phases.append("step"),
        heartbeat=SimpleNamespace(beat=phases.append),
        engine=SimpleNamespace(module=module),
    )
    checkpoint._change_weights(trainer)
    assert phases == ["step", "inspect"]
    assert torch.equal(module.weight, before / 2)
