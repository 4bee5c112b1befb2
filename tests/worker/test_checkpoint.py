"""Norms of optimizer states, by which a loaded checkpoint is checked."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def test_norms_of_the_states_are_exact_and_take_no_copy_of_a_state() -> None:
    """A copy of a whole state in float64 runs out of memory on a card that training has filled."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from ds_bench.worker import checkpoint

    largest = 0

    class LargestResult(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.linalg_vector_norm.default:  # which copies its argument
                largest = max(largest, args[0].numel())
            elif isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                largest = max(largest, result.numel())
            return result

    elements = 3 * 2**22 + 5
    with LargestResult():
        assert checkpoint._norm(torch.full((elements,), 0.1)) == pytest.approx(0.1 * math.sqrt(elements), rel=1e-7)
    assert largest <= 2**22
