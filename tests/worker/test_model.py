"""The model: weights by seed and name, dropout, number formats."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_bench.worker import model as build


def test_weights_depend_on_seed_and_name_and_not_on_the_order_of_building() -> None:
    a, b = (torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in names}) for names in ("xy", "yx"))
    beats: list[None] = []
    for model in (a, b):
        build.reinitialize_weights(model, seed=3, report_progress=lambda: beats.append(None))
    assert len(beats) == 2 * 4, "each parameter is a sign of life"
    assert torch.equal(a["x"].weight, b["x"].weight)
    assert not torch.equal(a["x"].weight, a["y"].weight)
    build.reinitialize_weights(b, seed=4)
    assert not torch.equal(a["x"].weight, b["x"].weight)


def test_a_dropout_is_set_in_configurations_modules_and_the_values_that_functions_get() -> None:
    sizes = {"vocab_size": 16, "hidden_size": 8, "ffn_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 2}

    def built(dropout: float | None, **own: float) -> torch.nn.Module:
        config = AutoConfig.for_model("opt", **sizes, **own)
        if dropout is not None:
            build._set_config_dropouts(config, dropout)
        return AutoModelForCausalLM.from_config(config)

    assert build.greatest_dropout(built(None, attention_dropout=0.3)) == 0.3
    assert build.greatest_dropout(built(0.0, layerdrop=0.5)) == 0.0
    model = torch.nn.ModuleList([built(None), torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2)])
    build.set_dropouts(model, 0.25)
    assert {value for _, _, value in build.find_dropouts(model)} == {0.25}
    assert model[1].dropout1.p == model[1].self_attn.dropout == 0.25


def test_parameters_have_the_configured_format() -> None:
    on, off = {"enabled": True}, {"enabled": False}
    for config, dtype in (
        ({}, torch.float32),
        ({"bf16": on}, torch.bfloat16),
        ({"bf16": off, "fp16": on}, torch.float16),
    ):
        assert build.training_dtype(config) is dtype, config
