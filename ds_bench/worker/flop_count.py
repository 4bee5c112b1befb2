"""Counts the floating-point operations of a forward and a backward pass, from the operations that really run.

For models that no formula covers: those of unknown shape, such as a user's factory's, and those trained in part. A
frozen weight has no gradient, so its matrix product runs twice, not three times; a frozen layer before all trained ones
runs once. Matrix products, convolutions and attention are counted, with two operations for each multiply-add. The
formulas are torch's own (``torch.utils.flop_counter``), except for attention, which counts in full even under a causal
mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_aten: Any = torch.ops.aten


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Scores and their product with the values. If key and value heads are fewer, each serves several query heads.

    torch's own formula has accepted this since 2.12.
    """
    batch, heads, length, size = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (size + value.shape[-1])


_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    **{getattr(_aten, name): _attention_flops for name in _FUSED_ATTENTION},
    # Twice the forward pass: torch's table adds the scores that a fused kernel computes again.
    **{
        getattr(_aten, f"{name}_backward"): lambda _gradient, *of_forward, **_: 2 * _attention_flops(*of_forward)
        for name in _FUSED_ATTENTION
    },
}


def _is_recomputing() -> bool:
    """Whether backward is rerunning part of a forward pass, for activation checkpointing.

    Grad mode is off in backward itself and on in a forward pass that it repeats, except inside autograd functions, such
    as DeepSpeed's linear layers for stage 3: there, checkpoint's hook is on the stack (torch/utils/checkpoint.py).
    """
    if torch.is_grad_enabled():
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "unpack_hook" and frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs on this rank within its context: one or more forward passes, each with its backward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model_flops = 0
        """Without the operations that activation checkpointing recomputes."""
        self.recomputed_flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Run first: torch's formula for convolutions needs the shape of the result.
        result = function(*args, **(kwargs or {}))
        formula = _FORMULAS.get(function._overloadpacket)
        if formula is not None:
            flops = int(formula(*args, **(kwargs or {}), out_val=result))
            # The graph task's id is -1 outside a backward pass.
            if torch._C._current_graph_task_id() != -1 and _is_recomputing():
                self.recomputed_flops += flops
            else:
                self.model_flops += flops
        return result

    def facts(self) -> dict[str, int]:
        """The counts, under the names of a RankMeasurement."""
        return {"forward_backward_flops": self.model_flops, "recomputed_flops": self.recomputed_flops}
