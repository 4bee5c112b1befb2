"""Computes the MLP of each layer for one part of the tokens after the other, and again in the backward pass.

So only its input is kept, and temporaries are of one part: for long sequences (DeepSpeed's TiledMLP,
runtime/sequence_parallel/ulysses_sp.py).
"""

from __future__ import annotations

import types
from typing import Any

import torch

MIN_TILES = 4
"""Parts of a micro-batch at least; more where a sequence is longer than the hidden size, as DeepSpeed's example has
them."""


def count_tiles(seq_length: int, hidden_size: int) -> int:
    """Number of parts of a sequence."""
    return max(MIN_TILES, -(-seq_length // hidden_size))


def install_tiled_mlp(model: torch.nn.Module) -> None:
    """Replaces the forward pass of every MLP of a Transformers model. Raises TypeError where there is none."""
    blocks = [module for module in model.modules() if type(module).__name__.endswith("MLP")]
    if not blocks:
        raise TypeError(f"{type(model).__name__} has no module whose class is named as an MLP")
    for block in blocks:
        # An attribute of the object: the class keeps its own forward pass, by which the parts are computed.
        block.forward = types.MethodType(_tiled_forward, block)


def _tiled_forward(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    # Equal in all ranks, whose sequences have one length: else ranks of stage 3 would wait for each other for ever.
    tiles = count_tiles(hidden.shape[-2], hidden.shape[-1])
    # The parameters: DeepSpeed takes their gradients only with the last part (ds_grad_is_ready).
    output: torch.Tensor = TiledMLP.apply(_forward_of_tile, block, hidden, tiles, list(block.parameters()))
    return output


def _forward_of_tile(block: Any, tile: torch.Tensor) -> Any:
    return type(block).forward(block, tile.contiguous())  # GPT-2 views it as a matrix
