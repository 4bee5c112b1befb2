"""What a loaded checkpoint is checked by: norms of optimizer states, and weights that have changed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_bench.worker import checkpoint


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
