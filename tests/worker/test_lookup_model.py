"""Counts of a model from its modules, against counts by hand."""

from __future__ import annotations

import json
import runpy
from typing import Any

from ds_bench.models import presets
from ds_bench.worker.lookup_model import count_model
from tests.support.built_models import build
from tests.support.model_families import FAMILIES
from tests.support.real_trials import ROOT

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 80, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
LATENT = {
    **LLAMA, "num_key_value_heads": 4, "moe_intermediate_size": 24, "kv_lora_rank": 16, "q_lora_rank": 20,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 5, "n_shared_experts": 2,
    "num_experts_per_tok": 3,
}  # fmt: skip
NARROW = {**SIZES, "ffn_dim": 72, "max_position_embeddings": 64, "word_embed_proj_dim": 16}
EXPERTS = {**LLAMA, "num_local_experts": 5, "num_experts_per_tok": 3}
VARIANTS: tuple[tuple[str, dict[str, Any], tuple[int, int, int]], ...] = (
    ("gpt2", {**GPT2, "tie_word_embeddings": False}, (46368, 39936, 4096)),
    ("opt", {**NARROW, "do_layer_norm_before": False}, (31864, 28672, 2304)),
    ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}, (39488, 35328, 3072)),
    ("gemma3_text", {**LLAMA, "head_dim": 16}, (45056, 44544, 3072)),
    ("deepseek_v2", LATENT, (67916, 50688, 7680)),
    ("mixtral", EXPERTS, (131264, 81888, 25600)),
)
"""Model type, config, and by hand: parameters, those that multiply a token, elements of the largest tensor."""


def test_variants_of_a_family_count_as_their_tensors_add_up() -> None:
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    for model_type, config, by_hand in VARIANTS:
        counts = count_model(build(model_type, {**config, **ends}))
        assert counts is not None
        assert (counts["parameters"], counts["matmul_parameters"], counts["largest_parameter"]) == by_hand, model_type


def test_the_file_of_counts_is_what_the_script_writes() -> None:
    """Of every built-in model, and so of every architecture as it is published."""
    counted = json.loads(runpy.run_path(str(ROOT / "scripts" / "make_model_counts.py"))["counts_text"]())
    kept = json.loads((ROOT / "ds_bench" / "models" / "counts.json").read_text(encoding="utf-8"))
    assert list(kept) == list(counted) == list(presets.preset_names())
    assert kept == counted, "run scripts/make_model_counts.py"


def test_code_of_a_model_and_unknown_modules_are_not_counted() -> None:
    """Its experts may be modules of another kind, and all of them would count."""
    model = build("llama", LLAMA)
    model.__class__ = type("LlamaForCausalLM", (type(model),), {"__module__": "transformers_modules.mine"})
    assert count_model(model) is None
    assert count_model(build("gpt_neox", FAMILIES["gpt_neox"])) is None
    assert count_model(build("gpt2", {**GPT2, "add_cross_attention": True})) is None
