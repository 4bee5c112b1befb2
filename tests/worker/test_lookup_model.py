"""Counts of a model from its modules, against counts by hand."""

from __future__ import annotations

import json
import runpy
from typing import Any

import pytest

from ds_bench.models import presets
from ds_bench.worker.lookup_model import count_model
from tests.support.built_models import build, facts_from_config
from tests.support.model_families import FAMILIES
from tests.support.real_trials import ROOT

Counted = tuple[int, int, int]
"""Parameters, those that multiply a token, elements of the largest tensor."""

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
VARIANTS: dict[str, tuple[str, dict[str, Any], Counted]] = {
    "gpt2 untied": ("gpt2", {**SMALL_GPT2, "tie_word_embeddings": False}, (46368, 39936, 4096)),
    "opt with narrow embeddings and norms behind (as opt-350m)": (
        "opt",
        {**SMALL_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        (31864, 28672, 2304),
    ),
    "opt without norm weights (as Galactica)": (
        "opt",
        {**SMALL_OPT, "layer_norm_elementwise_affine": False},
        (31992, 29184, 3072),
    ),
    "llama with all biases": ("llama", {**SMALL_LLAMA, "attention_bias": True, "mlp_bias": True}, (39488, 35328, 3072)),
    "llama that does not mention key-value heads": (
        "llama",
        {key: value for key, value in SMALL_LLAMA.items() if key != "num_key_value_heads"},
        (41696, 38400, 3072),
    ),
    "qwen3 with attention bias": (
        "qwen3",
        {**SMALL_LLAMA, "head_dim": 16, "attention_bias": True},
        (48416, 44544, 3072),
    ),
    "gemma3 untied": (
        "gemma3_text",
        {**SMALL_LLAMA, "head_dim": 16, "tie_word_embeddings": False},
        (48128, 44544, 3072),
    ),
    "phi3 without key-value heads": (
        "phi3",
        {**{key: value for key, value in SMALL_LLAMA.items() if key != "num_key_value_heads"}, "pad_token_id": 0},
        (41696, 38400, 5120),
    ),
    "deepseek_v2 with a latent for queries and no dense layer": ("deepseek_v2", SMALL_DEEPSEEK, (67916, 50688, 7680)),
    "deepseek_v2 with dense layers and all biases": (
        "deepseek_v2",
        {**SMALL_DEEPSEEK, "first_k_dense_replace": 2, "attention_bias": True, "mlp_bias": True},
        (51428, 42688, 7680),
    ),
    "mixtral with three of five experts": (
        "mixtral",
        {**SMALL_LLAMA, "num_local_experts": 5, "num_experts_per_tok": 3},
        (131264, 81888, 25600),
    ),
}
"""Model type, config, and what is counted by adding up the tensors that the architecture has."""


def test_variants_of_a_family_count_as_their_tensors_add_up(subtests: pytest.Subtests) -> None:
    for name, (model_type, config, counted) in VARIANTS.items():
        with subtests.test(name):
            facts = facts_from_config("variant", model_type, config)
            assert (facts.parameters, facts.matmul_parameters, facts.largest_parameter) == counted


def test_the_file_of_counts_is_what_the_script_writes(subtests: pytest.Subtests) -> None:
    counted = json.loads(runpy.run_path(str(ROOT / "scripts" / "make_model_counts.py"))["counts_text"]())
    kept = json.loads((ROOT / "ds_bench" / "models" / "counts.json").read_text(encoding="utf-8"))
    assert list(kept) == list(counted) == list(presets.preset_names())
    for name, counts in counted.items():
        with subtests.test(name):
            assert kept[name] == counts, "run scripts/make_model_counts.py"


def test_code_of_a_model_and_unknown_modules_are_not_counted() -> None:
    """Its experts may be modules of another kind, of which all would count."""
    model = build("llama", SMALL_LLAMA)
    assert count_model(model) is not None
    type_of_code = type("LlamaForCausalLM", (type(model),), {"__module__": "transformers_modules.mine"})
    model.__class__ = type_of_code
    assert count_model(model) is None
    assert count_model(build("gpt_neox", FAMILIES["gpt_neox"])) is None
    assert count_model(build("gpt2", {**SMALL_GPT2, "add_cross_attention": True})) is None
