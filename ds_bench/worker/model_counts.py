"""Counts of a model from its modules, as Transformers builds them on the meta device: shapes without memory.

The counts of built-in models are kept in ``models/counts.json``, which ``scripts/make_model_counts.py`` writes, so that
no command needs torch for them. A local or Hub model is counted when it is looked up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ARCHITECTURES = (
    "gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "phi3",
    "deepseek_v2", "gpt_oss",
)  # fmt: skip
"""Architectures, as Transformers calls them, whose modules that multiply a token are known."""


def build_without_memory(config: Any, *, trust_remote_code: bool = False) -> Any:
    """The causal language model of a Transformers config, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def count_model(model: Any) -> dict[str, Any] | None:
    """The counted fields of ``models.presets.ModelFacts`` of a causal language model of Transformers.

    None for an architecture that is not among :data:`ARCHITECTURES`, with cross-attention, which a causal language
    model has no use for, and for code that came with the model: its modules may be others than those that are known.
    """
    config = model.config
    if not type(model).__module__.startswith("transformers.models."):
        return None
    if config.model_type not in ARCHITECTURES or getattr(config, "add_cross_attention", False):
        return None
    sizes = [parameter.numel() for parameter in model.parameters()]  # which yields a shared tensor once
    return {
        "parameters": sum(sizes),
        "matmul_parameters": _multiplied_weights(model),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "attention_heads": config.num_attention_heads,
        "head_dim": _head_dim(config),
        "vocabulary_size": config.vocab_size,
        "max_positions": getattr(config, "max_position_embeddings", None),
        "largest_parameter": max(sizes),
        "tied_embeddings": config.tie_word_embeddings,
    }


def _multiplied_weights(model: Any) -> int:
    """Elements of the weights that one token is multiplied with, found by the kind of module that holds them."""
    from transformers.pytorch_utils import Conv1D

    total = 0
    for module in model.modules():
        kind = type(module).__name__
        if isinstance(module, (nn.Linear, Conv1D)) or kind.endswith(("TopKRouter", "TopkRouter")):
            total += module.weight.numel()
        elif kind.endswith("Experts"):
            # The experts of a layer are two fused tensors, and a token is multiplied with some of them.
            weights = module.gate_up_proj.numel() + module.down_proj.numel()
            total += weights * model.config.num_experts_per_tok // module.num_experts
    return total


def _head_dim(config: Any) -> int:
    if hasattr(config, "v_head_dim"):
        # Queries are multiplied with keys of another width than the values: the mean has the FLOPs of both.
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) // 2
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
