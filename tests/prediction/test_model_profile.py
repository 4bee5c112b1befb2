"""Activations by measurement without memory: exact at depths and sizes that were not measured, and for every preset."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils
from transformers.integrations import moe

from ds_bench.errors import UsageError
from ds_bench.models.presets import preset_names
from ds_bench.prediction import model_profile
from ds_bench.prediction.model_profile import ModelProfile, find_profile, measure_profile, request_for
from ds_bench.worker import library_versions, measure_activations
from ds_bench.worker.ledger import count_activations
from ds_bench.worker.model import enable_checkpointing
from tests.support.built_models import facts_from_config
from tests.support.fakes import preset
from tests.support.model_families import FAMILIES
from tests.support.real_trials import SUPPORT

GPT2_WITH_DROPOUT = {
    "vocab_size": 503, "n_positions": 256, "n_embd": 48, "n_layer": 4, "n_head": 4, "tie_word_embeddings": True,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT2_WITH_DROPOUT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {
        "vocab_size": 509, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
WHOLE = {"accelerator": "cpu", "sequences": [16, 32, 48], "precisions": ["bf16"]}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # Transformers renames gradient_checkpointing_enable


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """Measurements of most models of this file by one child process, by model."""
    pytest.importorskip("peft")
    with_dropout = facts_from_config("gpt2", "gpt2", GPT2_WITH_DROPOUT)
    requests = {
        **{name: request_for(facts_from_config(name, name, config), 64) for name, config in SMALL.items()},
        "dropout on CUDA": request_for(with_dropout, 64, accelerator="cuda"),
        "dropout of 0": request_for(with_dropout, 64, dropout=0.0),
        **{f"factory {name}": {**WHOLE, "factory": f"factories:{name}"} for name in ("gpt2", "lora", "vit")},
    }
    bf16 = [{**request, "precisions": ["bf16"]} for request in requests.values()]
    return dict(zip(requests, model_profile.measure_profiles(bf16, 500, {"PYTHONPATH": str(SUPPORT)}), strict=True))


@pytest.fixture(scope="module")
def profiles(answers: dict[str, dict[str, Any]]) -> dict[str, ModelProfile]:
    """Two small architectures, measured at one and two layers."""
    facts = [facts_from_config(name, name, config) for name, config in SMALL.items()]
    return {
        each.name: ModelProfile.from_answer(each.name, each.layers, each.tied_embeddings, answers[each.name])
        for each in facts
    }


def build(model_type: str, **config: Any) -> Any:
    made = AutoConfig.for_model(model_type, **config)
    made.use_cache = False
    return AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).train()


def kept_bytes(model: Any, batch: int, length: int) -> int:
    """Bytes that a real forward pass on the CPU keeps, by the hook of a run's ledger."""
    ids = torch.randint(0, 500, (batch, length))
    return count_activations(lambda: model(input_ids=ids, labels=ids).loss, list(model.parameters()))[1]["cpu"]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_bytes_are_exact_at_depths_and_sizes_not_measured(
    name: str, checkpointed: bool, profiles: dict[str, ModelProfile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved bytes against a real forward pass; the peak against forward and backward of four layers with every live
    tensor counted, where tokens outweigh gradients."""
    model = build(name, **{**SMALL[name], "n_layer" if name == "gpt2" else "num_hidden_layers": 6})
    for module, function in ((masking_utils, "find_packed_sequence_indices"), (moe, "_can_use_grouped_mm")):
        monkeypatch.setattr(module, function, getattr(module, function))  # restored for the tests that follow
    library_versions.adapt_transformers()
    request = {"model_type": name, "config": SMALL[name]}
    fake = measure_activations.build_fake_model(request, torch.bfloat16, layers=4)[0]
    found = profiles[name].activations_in("bf16")
    assert found is not None
    kept = found.plain
    if checkpointed:
        assert found.checkpointed is not None
        kept = found.checkpointed
        enable_checkpointing(model)
        enable_checkpointing(fake)
    assert kept.bytes(6, 3, 80) == kept_bytes(model, 3, 80)
    with next(fake.parameters()).fake_mode, measure_activations.LiveBytes() as live:
        fake(**measure_activations.make_fake_tokens(24, 200)).loss.backward()
    loss = found.loss.bytes(4, 24, 200) - found.plain.bytes(4, 24, 200)
    assert kept.bytes(4, 24, 200) + loss == pytest.approx(live.peak, rel=0.02)


def test_tensors_are_the_models_in_order_and_a_tied_head_counts_once(profiles: dict[str, ModelProfile]) -> None:
    for name, profile in profiles.items():
        assert profile.tensors == tuple(each.numel() for each in build(name, **SMALL[name]).parameters())


def test_every_preset_is_in_the_shipped_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a preset started a process"))
    monkeypatch.setattr(model_profile, "cached_answer", lambda _key: None)
    for name in preset_names():
        profile = find_profile(preset(name), 4096)
        assert profile.parameters == preset(name).parameters, name
        for precision in ("bf16", "fp16", "fp32"):
            measured = profile.activations_in(precision)
            plain, checkpointed = (p.bytes(profile.layers, 1, 512) for p in (measured.plain, measured.checkpointed))
            assert 0 < checkpointed < plain < measured.loss.bytes(profile.layers, 1, 512), (name, precision)


def test_sliding_window_adds_a_mask_from_its_length_on() -> None:
    facts = preset("mistralai/Mistral-7B-v0.1")
    short, long = (find_profile(facts, length).activations_in("bf16").plain for length in (4095, 4096))
    assert not any("ss" in term for term in short.per_layer | short.fixed)
    assert long.bytes(32, 1, 8192) > short.bytes(32, 1, 8192) + 8192**2


def test_measured_profile_is_cached_and_an_error_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], profiles: dict[str, ModelProfile]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    replies = [[answers["gpt2"]], [{"error": "ValueError: no such thing"}]]
    monkeypatch.setattr(model_profile, "measure_profiles", lambda *_, **__: replies.pop(0))
    facts, deeper = (facts_from_config("gpt2", "gpt2", {**SMALL["gpt2"], "n_layer": depth}) for depth in (4, 9))
    width, vocabulary = facts.attention_heads * facts.head_dim, facts.vocabulary_size
    expected = replace(profiles["gpt2"], attention_width=width, vocabulary_size=vocabulary)
    assert find_profile(facts, 64) == expected
    assert find_profile(deeper, 128).layers == 9  # depth and length do not make another architecture
    with pytest.raises(UsageError, match=r"^the activations of mine cannot be measured: ValueError: no such thing"):
        find_profile(facts_from_config("mine", "gpt2", {**SMALL["gpt2"], "n_embd": 96}), 64)


def test_answers_of_other_code_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model_profile.cache_answer("key", {"answer": 1})
    assert model_profile.cached_answer("key") == {"answer": 1}
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "trace_allocations.py"))
    monkeypatch.setattr(model_profile, "_code_version", model_profile._code_version.__wrapped__)
    assert model_profile.cached_answer("key") is None


@pytest.mark.slow
def test_any_family_that_transformers_builds_is_counted_from_its_folder(tmp_path: Path) -> None:
    """Against a real forward pass on the CPU, at a depth, batch and length that were not measured."""
    for name, config in FAMILIES.items():
        AutoConfig.for_model(name, **config).save_pretrained(tmp_path / name)
    answers = model_profile.measure_profiles([{**WHOLE, "path": str(tmp_path / name)} for name in FAMILIES], 500)
    for (name, config), answer in zip(FAMILIES.items(), answers, strict=True):
        assert "error" not in answer, (name, answer["error"])
        profile, model = ModelProfile.from_answer(name, 0, False, answer), build(name, **config)
        assert profile.tensors == tuple(parameter.numel() for parameter in model.parameters()), name
        found = profile.activations_in("bf16")
        assert found is not None
        for counted in (found.plain, found.checkpointed):
            assert counted is not None
            assert counted.bytes(profile.layers, 3, 40) == pytest.approx(kept_bytes(model, 3, 40), rel=0.001), name
            enable_checkpointing(model)


def test_dropout_on_cuda_keeps_masks_of_one_byte_and_no_scores(answers: dict[str, Any]) -> None:
    """Behind the attention, behind the MLP and behind the embedding; tests/integration measures the CPU's."""
    cuda, none = (
        ModelProfile.from_answer("gpt2", 4, True, answers[f"dropout {case}"]).activations["bf16"].plain
        for case in ("on CUDA", "of 0")
    )
    assert cuda.bytes(4, 3, 80) - none.bytes(4, 3, 80) == (2 * 4 + 1) * 3 * 80 * 48


OWN_MODEL = """
import torch
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16).requires_grad_(False)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.dropout = torch.nn.Dropout(0.1)
    def forward(self, pixels):
        x = self.first(pixels)
        for block in self.blocks:
            x = self.dropout(torch.relu(block(x)))
        return x.pow(2).mean()
def batch(samples, _length, generator):
    return {'pixels': torch.rand(samples, 8, generator=generator)}
def make(): return Own(), batch
"""


def test_factory_with_its_own_batches_and_frozen_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)  # where a user's factory lies
    profile = measure_profile("own_model:make", "factory", 64, accelerator="cpu")
    assert profile.unknown is None
    assert (profile.layers, profile.parameters, profile.frozen_parameters) == (4, 4 * (256 + 16), 8 * 16 + 16)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_model  # type: ignore[import-not-found]

    model = own_model.make()[0].to(torch.bfloat16)
    pixels = torch.rand(7, 8).to(torch.bfloat16)
    _, tiers = count_activations(lambda: model(pixels), list(model.parameters()))
    found = profile.activations["bf16"]
    assert (found.plain.bytes(4, 7, 64), found.checkpointed) == (tiers["cpu"], None)


def test_factories_whose_code_ties_converts_or_draws_weights_are_counted(answers: dict[str, Any]) -> None:
    gpt2, lora, vit = (
        ModelProfile.from_answer(name, 1, False, answers[f"factory {name}"]) for name in ("gpt2", "lora", "vit")
    )
    assert gpt2.tied_embeddings
    assert gpt2.parameters == 1000 * 32 + 64 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    assert lora.frozen_parameters == gpt2.parameters  # its adapters convert weights while they are built
    assert lora.parameters == 2 * 4 * (32 + 3 * 32)
    assert [profile.unknown for profile in (gpt2, lora, vit)] == [None] * 3  # vit draws from a truncated normal


def test_child_that_hangs_is_ended_and_its_output_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    child.write_text('#!/bin/sh\necho \'{"partial": {"tensors": 1}}\'\nexec sleep 60\n')
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    first, second = model_profile.measure_profiles([{}, {}], timeout_seconds=4)
    assert first == {"tensors": 1, "error": "the measuring process took more than 4 s"}
    assert second == {"error": "the measuring process took more than 4 s"}
