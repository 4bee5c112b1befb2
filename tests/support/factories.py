"""A user's own models, given as ``--model-factory factories:NAME``: small, of several kinds, with plain weights."""

from __future__ import annotations

from typing import Any

import torch

Batch = dict[str, torch.Tensor]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def gpt2() -> Any:
    """The plain constructor, which Transformers does not prepare for partitioning."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, n_embd=32, n_layer=2, n_head=2))


def lora() -> Any:
    """Adapters that train on top of frozen weights."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], task_type="CAUSAL_LM"))


def vit() -> Any:
    """Images and no vocabulary."""
    from transformers import ViTConfig, ViTForImageClassification

    def make_batch(batch_size: int, _seq_length: int, generator: torch.Generator) -> Batch:
        pixels = torch.randn(batch_size, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 10, (batch_size,), generator=generator)}

    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=10, **SMALL)), make_batch
