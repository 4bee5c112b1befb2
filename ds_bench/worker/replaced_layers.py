"""Replaces the loss or the MLPs of a causal language model with code that computes the same result in less memory.

A Transformers model converts its logits to fp32 and keeps their log-softmax for the backward pass, which makes two more
tensors of that size: 12 bytes for each token and each word of the vocabulary, more than everything else for long
sequences. All variants give the same loss except for rounding. A tiled MLP is computed for one part of the
tokens after another, and again in the backward pass, so that only its input is kept (DeepSpeed's TiledMLP,
runtime/sequence_parallel).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ..config.spec import LossName

_IGNORED = -100
"""Target of a position without a next token."""
MIN_TILES = 8
"""Minimum number of parts of a micro-batch whose logits are computed one after another."""
MAX_TILE_TOKENS = 2048
"""Maximum number of tokens in such a part; a larger micro-batch has more parts."""
_OTHER_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_router_logits")
"""Settings of models whose loss is computed from something other than what the output layer returns."""

MIN_MLP_TILES = 4
"""Minimum number of parts of a sequence in a tiled MLP; a sequence longer than four times the hidden size has more, as
in DeepSpeed's example."""

ComputeLoss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""(output layer, hidden states of tokens, token that follows each) → mean loss over the tokens that have a next one."""


def install_loss(model: Any, name: LossName) -> None:
    """Make a causal language model of Transformers compute its loss in a different way; ``model`` changes nothing.

    Raises TypeError or ValueError for a model whose loss would change.
    """
    if name == "chunked":
        from deepspeed.runtime.chunked_cross_entropy import install_chunked_causal_lm_loss

        install_chunked_causal_lm_loss(model)
    elif name == "tiled":
        tiled: Any = _TiledLoss.apply
        _replace_head(model, lambda head, hidden, targets: tiled(hidden, head.weight, head.bias, targets))
    elif name == "liger":
        # Computes logits and gradients for one part of the tokens at a time.
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

        compute = LigerFusedLinearCrossEntropyLoss(ignore_index=_IGNORED)
        _replace_head(model, lambda head, hidden, targets: compute(head.weight, hidden, targets, head.bias))


def _replace_head(model: Any, compute_loss: ComputeLoss) -> None:
    """Make the output layer return the loss in place of logits, and the model return it too.

    The loss is computed inside the call of the output layer, because at stage 3 its weight is whole only there.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise TypeError(f"the loss of {type(model).__name__} cannot be replaced: no output layer was found")
    for name in _OTHER_LOGITS:
        if getattr(model.config, name, None):
            raise TypeError(f"the loss of {type(model).__name__} cannot be replaced: its {name} changes the logits")

    def head_forward(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return compute_loss(head, hidden.flatten(0, 1), targets.flatten())

    def model_forward(
        input_ids: torch.Tensor, labels: torch.Tensor, shift_labels: torch.Tensor | None = None, **inputs: Any
    ) -> torch.Tensor:
        hidden = model.base_model(input_ids=input_ids, **inputs)[0]
        # The last token has no next one. Ranks that share a sequence pass shift_labels: the token after their part is
        # on another rank.
        targets = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED) if shift_labels is None else shift_labels
        loss: torch.Tensor = head(hidden, targets)
        return loss

    head.forward, model.forward = head_forward, model_forward


def count_tiles(tokens: int) -> int:
    """Number of parts of a micro-batch with this number of tokens."""
    return max(MIN_TILES, -(-tokens // MAX_TILE_TOKENS))


class _TiledLoss(torch.autograd.Function):
    """DeepSpeed's TiledFusedLogitsLoss (runtime/sequence_parallel/ulysses_sp.py), for a linear output layer.

    It computes gradients in the forward pass, before the loss scale and the accumulation steps are known, and when
    ZeRO must not yet take the gradient of a weight that is also the embedding. They are therefore kept here, as in
    Liger, and scaled and passed on in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor) -> Any:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

        # Counted over the whole micro-batch: parts with different numbers of ignored targets must not weigh the same in
        # the mean.
        count = (targets != _IGNORED).sum()
        trained = any(ctx.needs_input_grad)
        # Detached: gradients end at these tensors, and call no ZeRO hook before the model's backward pass.
        inputs: list[Any] = [
            each if each is None else each.detach().requires_grad_(trained) for each in (hidden, weight, bias)
        ]

        def loss_of_tile(_head: None, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = functional.linear(hidden, *inputs[1:]).float()
            return functional.cross_entropy(logits, targets, ignore_index=_IGNORED, reduction="sum") / count

        tiles = count_tiles(len(targets))
        # Hooks that count or move tensors saved for the model's backward pass must not see those saved here.
        own_hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.set_grad_enabled(trained), own_hooks:
            loss = TiledFusedLogitsLoss.apply(
                loss_of_tile, None, inputs[0][None], targets[None], None, tiles, [], "sum"
            )
            if trained:
                loss.backward()
        ctx.save_for_backward(*(each if each is None else each.grad for each in inputs))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(each if each is None else each * gradients[0].to(each.dtype) for each in ctx.saved_tensors), None


def count_mlp_tiles(seq_length: int, hidden_size: int) -> int:
    """Number of parts of a sequence."""
    return max(MIN_MLP_TILES, -(-seq_length // hidden_size))


def install_tiled_mlp(model: torch.nn.Module) -> None:
    """Replace the forward pass of every MLP of a Transformers model. Raises TypeError if the model has no MLP."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def forward_of_tile(block: Any, tile: torch.Tensor) -> Any:
        # The class keeps its own forward pass.
        return type(block).forward(block, tile.contiguous())  # GPT-2 views it as a matrix

    def tiled_forward(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        # The same on all ranks, whose sequences are equally long; otherwise ranks would deadlock at stage 3.
        tiles = count_mlp_tiles(hidden.shape[-2], hidden.shape[-1])
        # The parameters are passed too: DeepSpeed takes their gradients only with the last part (ds_grad_is_ready).
        output: torch.Tensor = TiledMLP.apply(forward_of_tile, block, hidden, tiles, list(block.parameters()))
        return output

    blocks = [module for module in model.modules() if type(module).__name__.endswith("MLP")]
    if not blocks:
        raise TypeError(f"{type(model).__name__} has no module whose class name ends in MLP")
    for block in blocks:
        block.forward = types.MethodType(tiled_forward, block)
