"""Presets and how models are counted: from their modules, by hand, and against published sizes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from ds_bench.models import presets
from ds_bench.models.presets import find_preset, preset_names, short_names, similar_presets
from ds_bench.worker.lookup_model import count_model
from tests.support.built_models import build
from tests.support.fakes import preset
from tests.support.model_families import FAMILIES
from tests.support.real_trials import ROOT

PUBLISHED_PARAMETERS = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "facebook/opt-125m": 125_239_296, "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320, "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248, "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400, "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624, "Qwen/Qwen3-235B-A22B": 235_093_634_560, "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984, "google/gemma-2-27b": 27_227_128_320, "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952, "microsoft/phi-4": 14_659_507_200,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224, "openai/gpt-oss-20b": 20_914_757_184,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096, "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-1.5B": 1_543_714_304, "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512, "Qwen/Qwen2.5-14B": 14_770_033_664, "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648, "Qwen/Qwen3-8B": 8_190_735_360, "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264, "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
}  # fmt: skip
"""Totals of the weight files on the Hub: they check the presets themselves, which a model built from them cannot."""


def test_counts_by_hand() -> None:
    """Tiny, per layer: 128·384+384, 128·128+128, 128·512+512, 512·128+128 and two norms of 2·128 = 198,272. Outside:
    1000·128 embedding (tied), 256·128 positions, 2·128 last norm. A token is multiplied with twelve hidden² per layer
    and the head."""
    assert preset("tiny").parameters == 2 * 198_272 + 128_000 + 32_768 + 256 == 557_568
    assert preset("tiny").matmul_parameters == 2 * 12 * 128**2 + 1000 * 128 == 521_216


def test_published_sizes() -> None:
    """Gemma 3: embedding and the rest, in millions (technical report, table 1)."""
    assert {name: preset(name).parameters for name in PUBLISHED_PARAMETERS} == PUBLISHED_PARAMETERS
    for name, embedding, rest in (("4b", 675, 3_209), ("12b", 1_012, 10_759), ("27b", 1_416, 25_600)):
        facts = preset(f"gemma-3-{name}-text")
        assert facts.vocabulary_size * facts.hidden_size / 1e6 == pytest.approx(embedding, rel=0.01)
        assert facts.parameters / 1e6 == pytest.approx(embedding + rest, rel=0.002)


def test_only_a_whole_name_in_any_case_finds_a_preset() -> None:
    names = preset_names()
    assert names[0] == "tiny"
    assert len({name.casefold() for name in names}) == len(names)
    assert preset("META-LLAMA/llama-3.1-8b").name == "meta-llama/Llama-3.1-8B"
    others = ("", "gpt", "gpt2 ", "Llama-3.1", "mistral-7b", "openai-community/gpt2", "./gpt2")
    assert [name for name in others if find_preset(name)] == []
    # Another caller's change does not reach the next one.
    config = preset("meta-llama/Llama-3.1-8B").config
    assert isinstance(config, dict)
    config["rope_parameters"]["rope_theta"] = 1.0
    assert preset("meta-llama/Llama-3.1-8B").config["rope_parameters"]["rope_theta"] == 500_000.0


def test_short_name_finds_its_preset_unless_a_folder_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant = {
        "llama-2-7b": "meta-llama/Llama-2-7b-hf",
        "Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
        "mistral-7b-v0.1": "mistralai/Mistral-7B-v0.1",
        "gemma-3-1b": "google/gemma-3-1b-pt",
        "Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-7B",
        "meta-llama/Meta-Llama-3-8B-Instruct": "meta-llama/Llama-3.1-8B",
        "mistralai/Mistral-7B-Instruct-v0.3": "mistralai/Mistral-7B-v0.3",
    }
    assert {short: preset(short).name for short in meant} == meant
    shorter = short_names()
    assert set(shorter) == {name for name in preset_names() if "/" in name}
    assert {preset(short).name for short in shorter.values()} == set(shorter)
    monkeypatch.chdir(tmp_path)
    for name in ("llama-2-7b", "Qwen2.5-7B-Instruct", "gpt2"):
        (tmp_path / name).mkdir()
    # What another organization tuned may have other shapes; the Hub knows.
    others = ("llama-2-7b", "Qwen2.5-7B-Instruct", "unsloth/Qwen2.5-7B-Instruct", "Llama-3-9B")
    assert [name for name in others if find_preset(name)] == []
    assert preset("gpt2").name == "gpt2"


def test_misspelled_name_is_answered_with_similar_presets() -> None:
    meant = {
        "Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
        "gpt-2": "gpt2",
        "facebook/opt-6.7B-instruct": "facebook/opt-6.7b",
        "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    }
    assert {typed: similar_presets(typed)[0] for typed in meant} == meant
    assert similar_presets("zzzzzzzz") == similar_presets("") == []


def test_presets_train_with_the_dropout_of_their_family() -> None:
    from transformers import AutoConfig

    for name in preset_names():
        facts = preset(name)
        family = AutoConfig.for_model(facts.model_type)
        own = {key: value for key, value in facts.config.items() if "drop" in key and not name.startswith("size-")}
        assert own == {key: getattr(family, key) for key in own}, name
    assert AutoConfig.for_model("gpt2", **preset("tiny").config).resid_pdrop == 0.1


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
    kept = json.loads((ROOT / "ds_bench" / "models" / "preset_counts.json").read_text(encoding="utf-8"))
    assert list(kept) == list(counted) == list(presets.preset_names())
    assert kept == counted, "run scripts/make_model_counts.py"


def test_code_of_a_model_and_unknown_modules_are_not_counted() -> None:
    """Its experts may be modules of another kind, and all of them would count."""
    model = build("llama", LLAMA)
    model.__class__ = type("LlamaForCausalLM", (type(model),), {"__module__": "transformers_modules.mine"})
    assert count_model(model) is None
    assert count_model(build("gpt_neox", FAMILIES["gpt_neox"])) is None
    assert count_model(build("gpt2", {**GPT2, "add_cross_attention": True})) is None
