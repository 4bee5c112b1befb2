"""The model and its data: weights by seed and name, dropout, number formats, batches."""

from __future__ import annotations

import pytest
import torch

from ds_bench.worker import model as build
from ds_bench.worker import training_loop
from tests.support.batches import batches


def test_weights_depend_on_seed_and_name_and_not_on_the_order_of_building() -> None:
    a = torch.nn.ModuleDict({"x": torch.nn.Linear(8, 8), "y": torch.nn.Linear(8, 8)})
    b = torch.nn.ModuleDict({"y": torch.nn.Linear(8, 8), "x": torch.nn.Linear(8, 8)})
    for model in (a, b):
        build.reinitialise_weights(model, seed=3)
    assert torch.equal(a["x"].weight, b["x"].weight)
    assert not torch.equal(a["x"].weight, a["y"].weight)


def test_every_parameter_that_is_drawn_anew_is_a_sign_of_life() -> None:
    beats: list[None] = []
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
    build.reinitialise_weights(model, seed=3, report_progress=lambda: beats.append(None))
    assert len(beats) == 6


def test_a_dropout_is_set_in_configurations_modules_and_the_values_that_functions_get() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    def built(dropout: float | None, **own: float) -> torch.nn.Module:
        config = AutoConfig.for_model(
            "opt", vocab_size=16, hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=2, **own
        )
        if dropout is not None:
            build._set_config_dropouts(config, dropout)
        return AutoModelForCausalLM.from_config(config)

    assert build.greatest_dropout(built(None)) == 0.1
    assert build.greatest_dropout(built(None, attention_dropout=0.3)) == 0.3
    assert build.greatest_dropout(built(0.0, layerdrop=0.5)) == 0.0
    model = torch.nn.ModuleList([built(None), torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2)])
    build.set_dropouts(model, 0.25)
    assert {value for _, _, value in build.find_dropouts(model)} == {0.25}
    assert model[1].dropout1.p == model[1].self_attn.dropout == 0.25
    assert build.greatest_dropout(torch.nn.Linear(2, 2)) == 0.0


def test_shared_parameters_are_counted_once() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4, bias=False), "b": torch.nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    assert sum(build.parameter_sizes(model)) == 16


def test_parameters_have_the_format_that_the_configuration_says(subtests: pytest.Subtests) -> None:
    for config, dtype in (
        ({}, torch.float32),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"fp16": {"enabled": True}}, torch.float16),
        ({"bf16": {"enabled": False}}, torch.float32),
    ):
        with subtests.test(config=config, dtype=dtype):
            assert build.training_dtype(config) is dtype


def test_data_is_the_same_for_one_rank_and_seed_and_other_for_another_rank() -> None:
    ids = [batch["input_ids"] for batch in batches()]
    again = [batch["input_ids"] for batch in batches()]
    assert all(torch.equal(x, y) for x, y in zip(ids, again, strict=True))
    assert not torch.equal(ids[0], batches(rank=1)[0]["input_ids"])
    assert not torch.equal(ids[0], ids[1])


def test_tokens_lie_inside_the_vocabulary_and_labels_are_the_same_ids() -> None:
    for batch in batches():
        assert batch["input_ids"].shape == (3, 5)
        assert int(batch["input_ids"].min()) >= 0
        assert int(batch["input_ids"].max()) < 11
        assert batch["labels"] is batch["input_ids"]


def test_batches_of_a_factorys_own_are_cast_differ_by_rank_and_are_not_more_than_fit() -> None:
    def images(batch_size: int, _seq_length: int, generator: torch.Generator) -> training_loop.Batch:
        return {"pixels": torch.randn(batch_size, 2**23, generator=generator), "labels": torch.arange(batch_size)}

    made, other = batches(images, count=64), batches(images, count=1, rank=1)
    assert len(made) == 6  # 48 MB each in bf16: 256 MB are passed with the sixth
    assert (made[0]["pixels"].dtype, made[0]["labels"].dtype) == (torch.bfloat16, torch.int64)
    assert not torch.equal(made[0]["pixels"], other[0]["pixels"])


def test_what_is_no_batch_of_so_many_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensor of 3 samples"):
        batches(lambda *_asked: {"x": torch.zeros(2, 3)})
    with pytest.raises(TypeError, match="dict of tensors"):
        batches(lambda *_asked: torch.zeros(3, 3))  # type: ignore[arg-type, return-value]
