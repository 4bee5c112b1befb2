"""Small models of families whose parameters the product counts from the model itself."""

from __future__ import annotations

from typing import Any

_FAMILY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {**_FAMILY, "num_key_value_heads": 2, "head_dim": 16},
    "gemma2": {**_FAMILY, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 32},
    "phi": {**_FAMILY, "resid_pdrop": 0.1},
    "phi3": {**_FAMILY, "num_key_value_heads": 2},
    "gpt_neox": {**_FAMILY, "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "falcon": {**_FAMILY, "new_decoder_architecture": False},
    "mamba": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 8},
}
"""Families without formulas of ours: layers of two kinds (gemma2), dropout (phi, gpt_neox), no attention (mamba)."""
