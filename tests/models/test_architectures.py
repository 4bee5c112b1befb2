"""Tensors by formula: name for name and size for size those that Transformers builds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ds_bench.errors import UsageError
from ds_bench.models import presets
from ds_bench.models.architectures import families, read_architecture
from ds_bench.prediction.formula_profile import formula_profile, with_loss
from ds_bench.prediction.model_profile import find_profile

PUBLIC: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "support" / "public_configs.json").read_text(encoding="utf-8")
)
"""Name on the Hub → what the ``config.json`` there says of the sizes."""


def built_tensors(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    import torch
    import transformers

    model_type = config["model_type"]
    as_config = transformers.AutoConfig.for_model(**config)
    builder: Any = transformers.AutoModelForCausalLM
    if model_type in ("t5", "mt5", "bart", "mbart"):
        builder = transformers.AutoModelForSeq2SeqLM
    elif hasattr(as_config, "vision_config"):
        builder = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        return [(name, tuple(each.shape)) for name, each in builder.from_config(as_config).named_parameters()]


def test_every_tensor_of_public_models_is_the_built_one() -> None:
    assert {config["model_type"] for config in PUBLIC.values()} == set(families())
    differing = {}
    for name, config in PUBLIC.items():
        found = [(each.name, each.shape) for each in read_architecture(name, config).tensors]
        expected = built_tensors(config)
        if found != expected:
            differing[name] = sorted(set(found) ^ set(expected))[:4]
    assert not differing


def test_keys_that_a_config_leaves_out_have_the_defaults_of_transformers() -> None:
    for model_type in ("llama", "qwen2_5_vl", "llava", "t5", "gpt2", "qwen3_moe", "bart"):
        config = {"model_type": model_type}
        found = read_architecture(model_type, config)
        assert [(each.name, each.shape) for each in found.tensors] == built_tensors(config)


def test_facts_and_profiles_of_presets_follow_from_their_configs() -> None:
    """Counted and measured numbers of the package against formulas: counts exactly, activations of the usual families
    within 3.5 % in 16 bit, of latent attention, a partly windowed one and ``tiny`` within 8 %."""
    counted, expected, off = {}, {}, {}
    for name in presets.preset_names():
        preset = presets.find_preset(name)
        assert preset is not None
        found = read_architecture(name, {**preset.config, "model_type": preset.model_type})
        names = [field.name for field in fields(preset) if field.name != "config"]
        counted[name] = [getattr(found.facts, each) for each in names]
        expected[name] = [getattr(preset, each) for each in names]
        by_formula = formula_profile(found)
        measured = find_profile(preset, 512)
        assert by_formula.tensors == measured.tensors
        known, real = by_formula.activations["bf16"], measured.activations["bf16"]
        limit = 0.08 if preset.model_type in ("deepseek_v2", "gemma2") or name == "tiny" else 0.035
        for kind in ("plain", "loss", "checkpointed"):
            size = (preset.layers, 4, 2048)
            ratio = getattr(known, kind).bytes(*size) / getattr(real, kind).bytes(*size)
            if abs(ratio - 1) > limit:
                off[name, kind] = ratio
    assert counted == expected
    assert not off


def test_other_losses_take_the_bytes_that_were_counted_on_a_model() -> None:
    """Llama-2-7B in bf16, counted by the measuring process: kept per model and token, and at the peak."""
    llama = presets.find_preset("meta-llama/Llama-2-7b-hf")
    assert llama is not None
    usual = find_profile(llama, 512)
    found = {}
    for name in ("tiled", "chunked"):
        bf16 = with_loss(usual, llama, name).activations["bf16"]
        peaks = [bf16.loss.fixed, *([bf16.loss_limit.fixed] if bf16.loss_limit else [])]
        found[name] = [(each["1"], each["bs"]) for each in (bf16.plain.fixed, *peaks)]
    counted = {
        "tiled": [(262_144_000, 32_780), (262_144_046, 88_980), (1_048_576_014, 40_980)],
        "chunked": [(8, 96_793), (262_144_008, 168_972)],
    }
    for name, pairs in counted.items():
        for pair, expected in zip(found[name], pairs, strict=True):
            assert pair == pytest.approx(expected, rel=1e-3, abs=50)


def test_active_parameters_leave_out_the_experts_that_a_token_skips() -> None:
    """The makers publish 12.9 B of Mixtral 8x7B, 37 B of DeepSeek-V3 and 3.3 B of Qwen3-30B-A3B; embeddings count."""
    mixtral = presets.find_preset("mistralai/Mixtral-8x7B-v0.1")
    assert mixtral is not None
    active = {
        "mixtral": read_architecture("m", {**mixtral.config, "model_type": "mixtral"}).active_parameters,
        **{name: read_architecture(name, PUBLIC[name]).active_parameters for name in PUBLIC if "deepseek-ai" in name},
        "qwen": read_architecture("q", PUBLIC["Qwen/Qwen3-30B-A3B"]).active_parameters,
    }
    assert {name: round(count / 1e9, 1) for name, count in active.items()} == {
        "mixtral": 12.9, "deepseek-ai/DeepSeek-V2-Lite": 2.7, "deepseek-ai/DeepSeek-V3": 37.6, "qwen": 3.4,
    }  # fmt: skip


def test_image_tokens_are_those_of_the_image_processors() -> None:
    """LLaVA-1.5: 576 of 336 pixels; Gemma 3: 256; Qwen2.5-VL one for 28 x 28 pixels, Qwen3-VL one for 32 x 32."""
    tokens = {name: found for name, config in PUBLIC.items() if (found := read_architecture(name, config)).image}
    assert {name.partition("/")[2]: each.image_tokens(1024, 768) for name, each in tokens.items()} == {
        "Qwen2-VL-2B-Instruct": 999, "Qwen2.5-VL-7B-Instruct": 999, "Qwen3-VL-8B-Instruct": 768,
        "Qwen3-VL-30B-A3B-Instruct": 768, "llava-1.5-7b-hf": 576, "llava-v1.6-mistral-7b-hf": 576,
        "gemma-3-4b-pt": 256, "paligemma-3b-pt-224": 256,
    }  # fmt: skip
    assert tokens["Qwen/Qwen2.5-VL-7B-Instruct"].patches(999) == 4 * 999
    assert tokens["google/gemma-3-4b-pt"].patches(512) == 2 * 64 * 64


def test_unknown_configurations_are_refused_with_a_remedy() -> None:
    opt = PUBLIC["facebook/opt-2.7b"]
    refused: dict[str, dict[str, Any]] = {
        "x has the model type 'mamba'": {"model_type": "mamba"},
        "word_embed_proj_dim to 512": {**opt, "word_embed_proj_dim": 512},
        "text_config has the model type 'mamba'": {"model_type": "llava", "text_config": {"model_type": "mamba"}},
        "a value that cannot be used": {"model_type": "llama", "hidden_size": "wide"},
    }
    for text, config in refused.items():
        with pytest.raises(UsageError, match=text) as caught:
            read_architecture("x", config)
        assert caught.value.remedy


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from ds_bench.cli.commands import main
sys.exit(main(sys.argv[1:]))
"""


def test_plan_reads_configs_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    """A folder, a file, and the Hub's cache, each of another family; what is unknown is one line with a remedy."""

    def plan(model: str, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_TORCH, "plan", "--model", model, "--json", "--strategies", "zero3"]
        return subprocess.run([*command, *flags], capture_output=True, text=True, check=False)

    chosen = ("Qwen/Qwen2.5-VL-7B-Instruct", "deepseek-ai/DeepSeek-V3", "google-t5/t5-large")
    needs = {}
    for name in chosen:
        file = tmp_path / name.partition("/")[2] / "config.json"
        file.parent.mkdir()
        file.write_text(json.dumps(PUBLIC[name]))
        of_folder, of_file = plan(str(file.parent)), plan(str(file))
        assert of_folder.stdout == of_file.stdout, of_folder.stderr
        needs[name] = json.loads(of_folder.stdout)[0]["gpu_bytes"]
    assert needs[chosen[1]]["optimizer_states"] == 12 * 671_026_404_352
    (tmp_path / "other.json").write_text('{"model_type": "mamba"}')
    for arguments, problem in {
        (str(tmp_path / "other.json"),): "the model type 'mamba', for which ds_bench has no formulas",
        ("nothing",): "Unknown model 'nothing': ",
        (str(tmp_path / "t5-large"), "--image-tokens", "9"): "reads no images",
        (str(tmp_path / "Qwen2.5-VL-7B-Instruct"), "--image-size", "1280", "--seq-length", "1024"): "no room for 2116",
    }.items():
        done = plan(*arguments)
        assert (done.returncode, problem in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr
