"""Presets and counts: by hand, against models that Transformers builds, and against the sizes their makers publish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.errors import UsageError
from ds_bench.models.presets import (
    ModelFacts,
    facts_from_config,
    find_preset,
    preset_names,
    short_names,
    similar_presets,
)
from tests.support.fakes import preset
from tests.support.real_trials import ROOT

PUBLISHED_PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "facebook/opt-125m": 125_239_296,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "microsoft/phi-4": 14_659_507_200,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "openai/gpt-oss-20b": 20_914_757_184,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
}
"""Totals of the weight files on the Hub: they check the presets themselves, which a model built from them cannot."""

SMALL_LLAMA = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SMALL_GPT2 = {
    "vocab_size": 96,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SMALL_OPT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "ffn_dim": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "do_layer_norm_before": True,
}
SMALL_DEEPSEEK = {
    **{key: value for key, value in SMALL_LLAMA.items() if key != "num_key_value_heads"},
    "moe_intermediate_size": 24,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 untied": ("gpt2", {**SMALL_GPT2, "tie_word_embeddings": False}),
    "gpt2 with an inner width of its own": ("gpt2", {**SMALL_GPT2, "n_inner": 100}),
    "opt with narrow embeddings and norms behind (as opt-350m)": (
        "opt",
        {**SMALL_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "opt without biases": ("opt", {**SMALL_OPT, "enable_bias": False}),
    "opt without norm weights (as Galactica)": ("opt", {**SMALL_OPT, "layer_norm_elementwise_affine": False}),
    "llama tied": ("llama", {**SMALL_LLAMA, "tie_word_embeddings": True}),
    "llama with all biases": ("llama", {**SMALL_LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama that does not mention key-value heads": (
        "llama",
        {key: value for key, value in SMALL_LLAMA.items() if key != "num_key_value_heads"},
    ),
    "llama with heads wider than the hidden size": ("llama", {**SMALL_LLAMA, "head_dim": 24}),
    "mistral without head_dim": ("mistral", {**SMALL_LLAMA, "head_dim": None}),
    "qwen2 tied": ("qwen2", {**SMALL_LLAMA, "tie_word_embeddings": True}),
    "qwen3 with attention bias": ("qwen3", {**SMALL_LLAMA, "head_dim": 16, "attention_bias": True}),
    "gemma2 with attention bias": ("gemma2", {**SMALL_LLAMA, "head_dim": 16, "attention_bias": True}),
    "gemma3 untied": ("gemma3_text", {**SMALL_LLAMA, "head_dim": 16, "tie_word_embeddings": False}),
    "phi3 without key-value heads": (
        "phi3",
        {**{key: value for key, value in SMALL_LLAMA.items() if key != "num_key_value_heads"}, "pad_token_id": 0},
    ),
    "deepseek_v2 with a latent for queries and no dense layer": ("deepseek_v2", SMALL_DEEPSEEK),
    "deepseek_v2 with dense layers and all biases": (
        "deepseek_v2",
        {**SMALL_DEEPSEEK, "first_k_dense_replace": 2, "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek_v2 without experts": ("deepseek_v2", {**SMALL_DEEPSEEK, "first_k_dense_replace": 9}),
    "gpt_oss without attention bias": (
        "gpt_oss",
        {**SMALL_LLAMA, "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 3, "attention_bias": False},
    ),
    "mixtral with three of five experts": (
        "mixtral",
        {**SMALL_LLAMA, "num_local_experts": 5, "num_experts_per_tok": 3},
    ),
}


@cache
def built_preset(name: str) -> Any:
    facts = preset(name)
    return build(facts.model_type, facts.config)


def build(model_type: str, config: Mapping[str, Any]) -> Any:
    """The model as Transformers builds it, on the meta device: shapes without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))


def parameter_sizes(model: Any) -> list[int]:
    return [each.numel() for each in model.parameters()]  # parameters() yields a shared tensor once


def multiplied_weights(model: Any) -> int:
    """Weights that multiply each token, found by the kind of module that holds them."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    total = 0
    for module in model.modules():
        kind = type(module).__name__
        if isinstance(module, (nn.Linear, Conv1D)) or kind.endswith(("TopKRouter", "TopkRouter")):
            total += module.weight.numel()
        elif kind.endswith("Experts"):
            weights = module.gate_up_proj.numel() + module.down_proj.numel()
            total += weights * model.config.num_experts_per_tok // module.num_experts
    return total


# Hand-worked


def test_tiny_has_the_parameters_counted_by_hand() -> None:
    # Per layer: 128·384+384, 128·128+128, 128·512+512, 512·128+128 and two norms of 2·128 = 198,272.
    # Outside: 1000·128 embedding (tied), 256·128 positions, 2·128 last norm.
    assert preset("tiny").parameters == 2 * 198_272 + 128_000 + 32_768 + 256 == 557_568


def test_tiny_multiplies_a_token_with_twelve_hidden_squared_per_layer_and_the_head() -> None:
    assert preset("tiny").matmul_parameters == 2 * 12 * 128**2 + 1000 * 128 == 521_216


def test_mixtral_counts_two_of_eight_experts_per_token_and_all_of_them_as_parameters() -> None:
    facts = preset("mistralai/Mixtral-8x7B-v0.1")
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    expert = 3 * 4096 * 14336
    assert facts.matmul_parameters == 32 * (attention + 8 * 4096 + 2 * expert) + 32000 * 4096
    assert facts.parameters - facts.matmul_parameters == 32 * 6 * expert + 32000 * 4096 + (2 * 32 + 1) * 4096


def test_the_largest_tensor_of_mixtral_is_the_fused_gate_and_up_of_all_experts() -> None:
    assert preset("mistralai/Mixtral-8x7B-v0.1").largest_parameter == 8 * (2 * 14336) * 4096


# Against models built by Transformers


def test_a_preset_counts_as_the_model_built_from_it_and_building_leaves_it_as_it_was(
    subtests: pytest.Subtests,
) -> None:
    for name in preset_names():
        with subtests.test(name):
            facts = preset(name)
            before = json.dumps(asdict(facts))
            model = built_preset(name)
            sizes = parameter_sizes(model)
            assert facts.parameters == sum(sizes)
            assert facts.largest_parameter == max(sizes)
            assert facts.matmul_parameters == multiplied_weights(model)
            assert json.dumps(asdict(facts)) == before


def test_the_shape_of_a_preset_is_that_of_the_built_config() -> None:
    for name in preset_names():
        facts, config = preset(name), built_preset(name).config
        shape = {
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "attention_heads": config.num_attention_heads,
            "head_dim": config.hidden_size // config.num_attention_heads,
            "vocabulary_size": config.vocab_size,
            "max_positions": config.max_position_embeddings,
            "tied_embeddings": config.tie_word_embeddings,
        }
        if hasattr(config, "v_head_dim"):  # of keys and values: the mean has the FLOPs of both
            shape["head_dim"] = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) // 2
        elif getattr(config, "head_dim", None):
            shape["head_dim"] = config.head_dim
        assert {field: getattr(facts, field) for field in shape} == shape, name


def test_variants_of_a_family_count_as_they_are_built(subtests: pytest.Subtests) -> None:
    for name, (model_type, config) in VARIANTS.items():
        with subtests.test(name):
            facts, model = facts_from_config("variant", model_type, config), build(model_type, config)
            sizes = parameter_sizes(model)
            assert (facts.parameters, facts.largest_parameter) == (sum(sizes), max(sizes))
            assert facts.matmul_parameters == multiplied_weights(model)


def test_the_whole_config_that_transformers_writes_counts_like_the_preset() -> None:
    for name in preset_names():
        facts = preset(name)
        written = facts_from_config(name, facts.model_type, built_preset(name).config.to_dict())
        assert replace(written, config=facts.config) == facts


def test_llama_3_1_is_built_with_its_own_rope_scaling() -> None:
    rope = built_preset("meta-llama/Llama-3.1-8B").config.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("llama3", 500_000.0, 8.0)


# Against published sizes


def test_a_preset_has_the_size_that_its_makers_publish() -> None:
    assert {name: preset(name).parameters for name in PUBLISHED_PARAMETERS} == PUBLISHED_PARAMETERS


# Laws


widths = st.integers(1, 8).map(lambda heads: 16 * heads)


@given(width=widths, layers=st.integers(1, 6))
def test_each_layer_adds_the_same_number_of_parameters(width: int, layers: int) -> None:
    def count(depth: int) -> int:
        return facts_from_config("x", "gpt2", {**SMALL_GPT2, "n_embd": width, "n_layer": depth}).parameters

    assert count(layers + 1) - count(layers) == count(2) - count(1) > 0


@given(width=widths, vocabulary=st.integers(1, 5000), family=st.sampled_from(["llama", "mistral", "qwen2"]))
def test_untying_adds_an_embedding_to_memory_and_nothing_to_the_work(width: int, vocabulary: int, family: str) -> None:
    config = {**SMALL_LLAMA, "hidden_size": width, "vocab_size": vocabulary}
    tied = facts_from_config("x", family, {**config, "tie_word_embeddings": True})
    untied = facts_from_config("x", family, {**config, "tie_word_embeddings": False})
    assert untied.parameters - tied.parameters == vocabulary * width
    assert untied.matmul_parameters == tied.matmul_parameters


@given(experts=st.integers(1, 16), active=st.integers(1, 16))
def test_more_experts_at_rest_add_parameters_but_only_router_work(experts: int, active: int) -> None:
    def facts(count: int) -> ModelFacts:
        config = {**SMALL_LLAMA, "num_local_experts": count, "num_experts_per_tok": min(active, experts)}
        return facts_from_config("x", "mixtral", config)

    router_row = SMALL_LLAMA["num_hidden_layers"] * SMALL_LLAMA["hidden_size"]
    assert facts(experts + 1).matmul_parameters - facts(experts).matmul_parameters == router_row
    assert facts(experts + 1).parameters > facts(experts).parameters + router_row


# Finding


def test_tiny_is_listed_first_and_no_name_twice() -> None:
    names = preset_names()
    assert names[0] == "tiny"
    assert len({name.casefold() for name in names}) == len(names)


def test_presets_of_a_family_stand_together() -> None:
    types = [preset(name).model_type for name in preset_names()]
    assert list(dict.fromkeys(types)) == [kind for i, kind in enumerate(types) if i == 0 or types[i - 1] != kind]


def test_a_preset_is_found_in_any_case_and_keeps_its_own_spelling() -> None:
    assert preset("META-LLAMA/llama-3.1-8b").name == "meta-llama/Llama-3.1-8B"


def test_only_a_whole_name_finds_a_preset() -> None:
    names = ("", "gpt", "gpt2 ", "Llama-3.1", "mistral-7b", "openai-community/gpt2", "./gpt2")
    assert [name for name in names if find_preset(name)] == []


def test_a_short_name_finds_its_preset_unless_a_folder_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant = {
        "llama-2-7b": "meta-llama/Llama-2-7b-hf",
        "Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
        "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
        "mistral-7b-v0.1": "mistralai/Mistral-7B-v0.1",
        "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
        "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
        "gemma-3-1b": "google/gemma-3-1b-pt",
        "phi-4": "microsoft/phi-4",
        "gpt-oss-20b": "openai/gpt-oss-20b",
        "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    }
    assert {short: preset(short).name for short in meant} == meant
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-2-7b").mkdir()
    (tmp_path / "gpt2").mkdir()
    assert find_preset("llama-2-7b") is None
    assert preset("gpt2").name == "gpt2"


def test_every_preset_of_an_organisation_has_a_short_name() -> None:
    shorter = short_names()
    assert set(shorter) == {name for name in preset_names() if "/" in name}
    assert {preset(short).name for short in shorter.values()} == set(shorter)


def test_the_text_models_of_gemma_3_have_the_published_parameters_in_millions() -> None:
    """Embedding and the rest, in millions (Gemma 3 technical report, table 1)."""
    published = {
        "gemma-3-4b-text": (675, 3_209),
        "gemma-3-12b-text": (1_012, 10_759),
        "gemma-3-27b-text": (1_416, 25_600),
    }
    for name, (embedding, rest) in published.items():
        facts = preset(name)
        assert facts.vocabulary_size * facts.hidden_size / 1e6 == pytest.approx(embedding, rel=0.01)
        assert facts.parameters / 1e6 == pytest.approx(embedding + rest, rel=0.002)


def test_a_misspelt_name_is_answered_with_what_was_meant_first() -> None:
    meant = {
        "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
        "Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
        "gpt-2": "gpt2",
        "facebook/opt-6.7B-instruct": "facebook/opt-6.7b",
        "qwen3-8b": "Qwen/Qwen3-8B",
        "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    }
    assert {typed: similar_presets(typed)[0] for typed in meant} == meant


def test_a_name_like_no_other_has_no_similar_presets() -> None:
    assert similar_presets("zzzzzzzz") == similar_presets("") == []


def test_changing_a_found_preset_does_not_change_the_next_one() -> None:
    config = preset("meta-llama/Llama-3.1-8B").config
    assert isinstance(config, dict)
    config["rope_parameters"]["rope_theta"] = 1.0
    assert preset("meta-llama/Llama-3.1-8B").config["rope_parameters"]["rope_theta"] == 500_000.0


def test_importing_the_module_loads_neither_torch_nor_the_presets() -> None:
    code = "import sys, ds_bench.models, ds_bench.analysis.flops; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "json", "difflib"} & set(result.stdout.split()) == set()


# What the user gets wrong


def test_an_unknown_family_is_a_usage_error_that_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"bert.*known types: gpt2, opt, llama"):
        facts_from_config("my-model", "bert", {})


def test_a_mistral_config_that_lacks_a_size_is_refused_by_the_name_of_the_size(subtests: pytest.Subtests) -> None:
    for key in [key for key in SMALL_LLAMA if not key.endswith("_id")]:
        with subtests.test(key):
            config = {each: value for each, value in SMALL_LLAMA.items() if each != key}
            if key == "max_position_embeddings":  # rotary positions need no table, so no count depends on it
                assert facts_from_config("m", "mistral", config).max_positions is None
                continue
            with pytest.raises(UsageError, match=key):
                facts_from_config("m", "mistral", config)


def test_a_size_that_is_no_size_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for value in (0, -1, 2.0, "32", True, None, [32]):
        with subtests.test(value=value), pytest.raises(UsageError, match="num_hidden_layers"):
            facts_from_config("m", "llama", {**SMALL_LLAMA, "num_hidden_layers": value})


def test_an_impossible_config_is_refused_with_its_reason(subtests: pytest.Subtests) -> None:
    for model_type, config, named in (
        ("gpt2", {**SMALL_GPT2, "n_head": 5}, "n_head 5 does not divide"),
        ("gpt2", {**SMALL_GPT2, "add_cross_attention": True}, "cross-attention"),
        ("llama", {**SMALL_LLAMA, "num_attention_heads": 5}, "num_attention_heads 5 does not divide"),
        ("llama", {**SMALL_LLAMA, "tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ("qwen3", SMALL_LLAMA, "lacks head_dim"),
        ("mixtral", {**SMALL_LLAMA, "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3"),
    ):
        with subtests.test(model_type=model_type, config=config, named=named), pytest.raises(UsageError, match=named):
            facts_from_config("m", model_type, config)


# Facts as data


def test_facts_can_be_members_of_a_set() -> None:
    assert len({preset("tiny"), preset("tiny"), preset("gpt2")}) == 2


def test_presets_train_with_the_dropout_of_their_family() -> None:
    from transformers import AutoConfig

    for name in preset_names():
        facts = preset(name)
        family = AutoConfig.for_model(facts.model_type)
        own = {key: value for key, value in facts.config.items() if "drop" in key and not name.startswith("size-")}
        assert own == {key: getattr(family, key) for key in own}, name
    assert AutoConfig.for_model("gpt2", **preset("tiny").config).resid_pdrop == 0.1
