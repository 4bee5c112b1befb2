"""Other ways to compute the loss: the same loss and the same gradients, with less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_bench.worker import replaced_layers
from ds_bench.worker.ledger import count_activations
from ds_bench.worker.training_loop import loss_of

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {**SIZES, "ffn_dim": 64, "dropout": 0.0},
    "llama": {**SIZES, "intermediate_size": 64, "tie_word_embeddings": False},
}


def build(family: str, way: str = "model") -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=2048, use_cache=False, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config).train()
    if way == "mlp":
        replaced_layers.install_tiled_mlp(model)
    else:
        replaced_layers.install_loss(model, way)  # type: ignore[arg-type]
    return model


def train_once(model: Any, scale: float = 1.0) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients by name, and bytes kept for the backward pass."""
    ids = torch.randint(0, 2048, (3, 50), generator=torch.Generator().manual_seed(1))
    loss, kept = count_activations(lambda: loss_of(model(input_ids=ids, labels=ids)), list(model.parameters()))
    (loss * scale).backward()
    return float(loss.detach()), {name: each.grad / scale for name, each in model.named_parameters()}, kept["cpu"]


@pytest.mark.deepspeed
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_model(family: str) -> None:
    """Scaled as by accumulation steps or a loss scale; with weights that are also the embedding, and without."""
    usual, gradients, kept = train_once(build(family))
    for way in ("chunked", "tiled", "mlp") if family != "opt" else ("chunked", "tiled"):
        model = build(family, way)
        other, other_gradients, other_kept = train_once(model, 0.25)
        assert other == pytest.approx(usual, rel=1e-5)
        assert other_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-4, atol=1e-7)
        if way == "mlp":
            assert other_kept < kept - 2 * 3 * 50 * 4 * 64  # of two layers, one tensor of the inner width at least
        with torch.no_grad():
            ids = torch.randint(0, 2048, (1, 5))
            expected = float(loss_of(build(family)(input_ids=ids, labels=ids)))
            assert float(loss_of(model(input_ids=ids, labels=ids))) == pytest.approx(expected, rel=1e-5)


def test_parts_are_many_and_small() -> None:
    assert [replaced_layers.count_tiles(tokens) for tokens in (100, 8 * 2048, 8 * 2048 + 1)] == [8, 8, 9]
    assert [replaced_layers.count_mlp_tiles(length, 4096) for length in (512, 4 * 4096, 4 * 4096 + 1)] == [4, 4, 5]


def test_a_model_whose_loss_would_change_is_refused() -> None:
    model = build("llama")
    model.config.logits_scaling = 8.0
    with pytest.raises(TypeError, match="logits_scaling changes the logits"):
        replaced_layers.install_loss(model, "tiled")
    with pytest.raises(TypeError, match="Linear cannot be replaced: no output layer"):
        replaced_layers.install_loss(torch.nn.Linear(2, 2), "tiled")
    with pytest.raises(TypeError, match="OPTForCausalLM has no module whose class name ends in MLP"):
        build("opt", "mlp")
