"""FLOPs counted on what runs, against the formula for a model that is trained whole."""

from __future__ import annotations

from typing import Any

import pytest

from ds_bench.analysis.flops import model_flops_per_token
from tests.support.fakes import preset

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TOKENS = 2 * 16


def _count(model: Any) -> Any:
    from ds_bench.worker.flop_count import FlopCount

    ids = torch.arange(TOKENS).view(2, 16)
    with FlopCount() as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    return counted


def _tiny() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = preset("tiny")
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(facts.model_type, **facts.config)).eval()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_a_model_that_is_trained_whole_counts_what_the_formula_says() -> None:
    facts = preset("tiny")
    expected = model_flops_per_token(facts, 16) * TOKENS
    counted = _count(_tiny())
    assert (counted.model_flops, counted.recomputed_flops) == (expected, 0)
    checkpointed = _tiny().train()
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    counted = _count(checkpointed)
    head = 2 * 1000 * 128 * TOKENS  # is not recomputed
    assert (counted.model_flops, counted.recomputed_flops) == (expected, expected // 3 - head)


def test_frozen_weights_count_no_gradients() -> None:
    facts = preset("tiny")
    products, head = facts.matmul_parameters * TOKENS, 1000 * 128 * TOKENS
    attention = model_flops_per_token(facts, 16) * TOKENS - 6 * products
    first, last = _tiny().requires_grad_(False), _tiny().requires_grad_(False)
    first.transformer.wpe.requires_grad_(True)  # gradients pass through all layers to it
    last.transformer.ln_f.requires_grad_(True)  # through the output layer alone
    assert _count(first).model_flops == 4 * products + attention
    assert _count(last).model_flops == 2 * products + 2 * head + attention // 3


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_linear_layers_of_stage_3_that_checkpointing_recomputes_are_not_counted_as_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their forward pass records nothing, not even where it is run again."""
    linear = pytest.importorskip("deepspeed.runtime.zero.linear")
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(torch.nn.functional, "linear", linear.zero3_linear_wrap)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    plain, again = (LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).train() for _ in range(2))
    again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    counted, recounted = _count(plain), _count(again)
    assert counted.recomputed_flops == 0 < recounted.recomputed_flops
    assert counted.model_flops == recounted.model_flops


def test_attention_with_fewer_key_heads_counts_as_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11's formula refuses it, with the kernel that gets the key heads as they are."""
    from torch.utils import flop_counter
    from transformers import LlamaConfig, LlamaForCausalLM

    from ds_bench.worker import flop_count

    def as_of_torch_2_11(query: Any, key: Any, value: Any) -> int:
        if not query[0] == key[0] == value[0] or not query[1] == key[1] == value[1]:
            raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")
        return 0

    for module in (flop_counter, flop_count):
        monkeypatch.setattr(module, "sdpa_flop_count", as_of_torch_2_11, raising=False)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    counts = {}
    for key_heads in (2, 4):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=100, num_key_value_heads=key_heads, **sizes))
        products = sum(
            weight.numel() for name, weight in model.named_parameters() if "embed" not in name and weight.ndim == 2
        )
        counts[key_heads] = _count(model).model_flops - 6 * products * TOKENS
    assert counts[2] == counts[4] == 3 * 4 * 2 * 16 * 16 * 32  # forward and backward of two products
