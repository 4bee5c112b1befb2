"""FLOPs counted on what runs, against the formula for a model that is trained whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from transformers import AutoConfig, AutoModelForCausalLM

from ds_bench.analysis.flops import model_flops_per_token
from ds_bench.worker import flop_count
from tests.support.fakes import preset

TOKENS = 2 * 16
TINY = preset("tiny")
LLAMA = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


def count(model: Any) -> tuple[int, int]:
    """FLOPs of the model, and those recomputed."""
    ids = torch.arange(TOKENS).view(2, 16)
    with flop_count.FlopCount() as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    return counted.model_flops, counted.recomputed_flops


def build(model_type: str = TINY.model_type, *, reentrant: bool | None = None, **config: Any) -> Any:
    """``reentrant``: the way of activation checkpointing; None for a model without it."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(config or TINY.config)))
    if reentrant is None:
        return model.eval()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model.train()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("at_stage_3", [False, True])
def test_a_model_that_is_trained_whole_counts_what_the_formula_says(
    at_stage_3: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers of stage 3 record nothing in their forward pass, not even where it is run again."""
    if at_stage_3:
        monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    expected = model_flops_per_token(TINY, 16) * TOKENS
    assert count(build()) == (expected, 0)
    head = 2 * 1000 * 128 * TOKENS  # is not recomputed
    for reentrant in (False, True):
        assert count(build(reentrant=reentrant)) == (expected, expected // 3 - head)
    # GPT-2 has hardly any linear layer.
    plain, again = (count(build("llama", reentrant=way, num_hidden_layers=2, **LLAMA)) for way in (None, False))
    assert plain[1] == 0 < again[1]
    assert plain[0] == again[0]


def test_frozen_weights_count_no_gradients() -> None:
    products, head = TINY.matmul_parameters * TOKENS, 1000 * 128 * TOKENS
    attention = model_flops_per_token(TINY, 16) * TOKENS - 6 * products
    first, last = (build().requires_grad_(False) for _ in range(2))
    first.transformer.wpe.requires_grad_(True)  # gradients pass through all layers to it
    last.transformer.ln_f.requires_grad_(True)  # only through the output layer
    assert count(first) == (4 * products + attention, 0)
    assert count(last) == (2 * products + 2 * head + attention // 3, 0)


def test_attention_with_fewer_key_heads_counts_as_with_all_of_them() -> None:
    """torch's own formula refuses it before 2.12, with the kernel that gets the key heads as they are."""
    for key_heads in (2, 4):
        model = build("llama", num_hidden_layers=1, num_key_value_heads=key_heads, **LLAMA)
        weights = dict(model.named_parameters()).items()
        products = sum(weight.numel() for name, weight in weights if "embed" not in name and weight.ndim == 2)
        # Forward and backward of two products.
        assert count(model) == (6 * products * TOKENS + 3 * 4 * 2 * 16 * 16 * 32, 0)
