"""The passes of a model alone, forward or forward and backward: no DeepSpeed, no optimizer, no gradient exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .reference_engines import ReferenceEngine


class PassEngine(ReferenceEngine):
    """Runs the passes of a ``pass_type`` other than ``train``, with the interface of a DeepSpeed engine.

    A forward pass is that of training: it keeps what a backward pass would need until the pass is over. Gradients of a
    backward pass are freed where training would update the weights. Parameters have the number format of training.
    """

    stage = 0

    def __init__(
        self, model: torch.nn.Module, config: Mapping[str, Any], device: torch.device, *, with_backward: bool
    ) -> None:
        super().__init__(model, config, device)
        self._with_backward = with_backward

    def _create_optimizer(self, config: Mapping[str, Any]) -> None:
        """Makes none: the weights never change."""

    @property
    def engine_params(self) -> Mapping[str, Any]:
        return {"with_backward": self._with_backward}

    def __call__(self, **batch: torch.Tensor) -> Any:
        return self.module(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        if self._with_backward:
            super().backward(loss)

    def step(self) -> None:
        """Ends a micro-batch; after the last of a step, frees the gradients."""
        if self._with_backward and self.at_accumulation_boundary:
            self.module.zero_grad(set_to_none=True)
        self._micro_steps += 1

    def weight_fragments(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        yield from ()
