"""Activations by measurement without memory: exact at depths and sizes that were not measured, and for every preset."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ds_bench.errors import UsageError
from ds_bench.models.presets import preset_names
from ds_bench.prediction import model_profile
from ds_bench.prediction.model_profile import ModelProfile, Polynomial, find_profile, measure_profile, request_for
from tests.support.built_models import facts_from_config
from tests.support.fakes import preset
from tests.support.marked_processes import MARK, STARTS_PROCESSES, find_marked
from tests.support.model_families import FAMILIES
from tests.support.real_trials import SUPPORT

GPT2: dict[str, Any] = {
    "vocab_size": 503, "n_positions": 256, "n_embd": 48, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "vocab_size": 509, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {"gpt2": GPT2, "llama": LLAMA}


WHOLE = {"accelerator": "cpu", "sequences": [16, 32, 48], "precisions": ["bf16"]}
GPT2_WITH_DROPOUT = {key: value for key, value in GPT2.items() if "pdrop" not in key}


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """Measurements of most models of this file by one child process, by model."""
    pytest.importorskip("peft")
    with_dropout = facts_from_config("gpt2", "gpt2", GPT2_WITH_DROPOUT)
    requests = {
        **{name: request_for(facts_from_config(name, name, config), 64) for name, config in SMALL.items()},
        "dropout on the CPU": request_for(with_dropout, 64, accelerator="cpu"),
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


def test_polynomial_by_hand() -> None:
    # 3 layers, b = 2, s = 5: fixed 7 + 10·(2·5) = 107; a layer 1·5 + 2·(2·5²) = 105.
    polynomial = Polynomial(fixed={"1": 7, "bs": 10}, per_layer={"s": 1, "bss": 2})
    assert polynomial.bytes(3, 2, 5) == 107 + 3 * 105


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Transformers renames gradient_checkpointing_enable
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_bytes_are_exact_at_depths_and_sizes_not_measured(
    name: str, checkpointed: bool, profiles: dict[str, ModelProfile]
) -> None:
    """Saved bytes against a real forward pass on the CPU, with the hook of a run's ledger; the peak against forward and
    backward of four layers with every live tensor counted, where tokens outweigh gradients."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    from ds_bench.worker import measure_activations as worker
    from ds_bench.worker.ledger import count_activations
    from ds_bench.worker.model import enable_checkpointing

    depth = {"n_layer" if name == "gpt2" else "num_hidden_layers": 6, "use_cache": False}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **{**SMALL[name], **depth}), dtype=torch.bfloat16
    ).train()
    worker._adapt_transformers()
    fake = worker.build_fake_model({"model_type": name, "config": SMALL[name]}, torch.bfloat16, layers=4)[0]
    if checkpointed:
        enable_checkpointing(model)
        enable_checkpointing(fake)
    ids = torch.randint(0, 500, (3, 80))
    _, tiers = count_activations(lambda: model(input_ids=ids, labels=ids).loss, list(model.parameters()))
    found = profiles[name].activations_in("bf16")
    assert found is not None
    kept = found.checkpointed if checkpointed else found.plain
    assert kept is not None
    assert kept.bytes(6, 3, 80) == tiers["cpu"]
    with next(fake.parameters()).fake_mode, worker.LiveBytes() as live:
        fake(**worker.make_fake_tokens(24, 200)).loss.backward()
    loss = found.loss.bytes(4, 24, 200) - found.plain.bytes(4, 24, 200)
    assert kept.bytes(4, 24, 200) + loss == pytest.approx(live.peak, rel=0.02)


@pytest.mark.parametrize("name", SMALL)
def test_tensors_are_the_models_in_order_and_a_tied_head_counts_once(
    name: str, profiles: dict[str, ModelProfile]
) -> None:
    profile, facts = profiles[name], facts_from_config(name, name, SMALL[name])
    assert profile.parameters == sum(profile.tensors) == facts.parameters
    assert max(profile.tensors) == facts.largest_parameter
    assert profile.tensors[0] == facts.vocabulary_size * facts.hidden_size
    assert (profile.tensors[-1] == facts.vocabulary_size * facts.hidden_size) is not facts.tied_embeddings


def test_every_preset_is_in_the_shipped_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a preset started a process")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(model_profile, "_cached", lambda _key: None)
    for name in preset_names():
        profile = find_profile(preset(name), 4096)
        assert profile.parameters == preset(name).parameters, name
        for precision in ("bf16", "fp16", "fp32"):
            measured = profile.activations_in(precision)
            plain, checkpointed = (p.bytes(profile.layers, 1, 512) for p in (measured.plain, measured.checkpointed))
            assert 0 < checkpointed < plain < measured.loss.bytes(profile.layers, 1, 512), (name, precision)


def test_loss_takes_its_logits_about_three_times_in_fp32() -> None:
    """Log-softmax and both of its gradients, 4 bytes each; only the first is saved."""
    found = find_profile(preset("meta-llama/Llama-3.1-8B"), 1024).activations_in("bf16")
    extra = found.loss.bytes(32, 2, 1024) - found.plain.bytes(32, 2, 1024)
    assert extra / (2 * 1024 * 128_256) == pytest.approx(8, rel=0.02)


def test_sliding_window_adds_a_mask_from_its_length_on() -> None:
    facts = preset("mistralai/Mistral-7B-v0.1")
    short, long = (find_profile(facts, length).activations_in("bf16").plain for length in (4095, 4096))
    assert not any("ss" in term for term in short.per_layer | short.fixed)
    assert long.bytes(32, 1, 8192) > short.bytes(32, 1, 8192) + 8192**2


def test_measured_profile_is_cached_and_an_error_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], profiles: dict[str, ModelProfile]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def answer(requests: list[Any], **_options: object) -> list[Any]:
        asked.extend(requests)
        return [answers["gpt2"]]

    facts = facts_from_config("gpt2", "gpt2", GPT2)
    monkeypatch.setattr(model_profile, "measure_profiles", answer)
    deeper = facts_from_config("gpt2", "gpt2", {**GPT2, "n_layer": 9})
    assert find_profile(facts, 64) == profiles["gpt2"]
    assert find_profile(deeper, 128).layers == 9  # depth and length do not make another architecture
    assert len(asked) == 1
    monkeypatch.setattr(model_profile, "measure_profiles", lambda *_, **__: [{"error": "ValueError: no such thing"}])
    with pytest.raises(UsageError, match=r"^the activations of mine cannot be measured: ValueError: no such thing"):
        find_profile(facts_from_config("mine", "gpt2", {**GPT2, "n_embd": 96}), 64)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Transformers renames gradient_checkpointing_enable
@pytest.mark.slow
def test_any_family_that_transformers_builds_is_counted_from_its_folder(tmp_path: Path) -> None:
    """Against a real forward pass on the CPU, at a depth, batch and length that were not measured."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    from ds_bench.worker.ledger import count_activations

    for name, config in FAMILIES.items():
        AutoConfig.for_model(name, **config).save_pretrained(tmp_path / name)
    answers = model_profile.measure_profiles([{**WHOLE, "path": str(tmp_path / name)} for name in FAMILIES], 500)
    for (name, config), answer in zip(FAMILIES.items(), answers, strict=True):
        assert "error" not in answer, (name, answer["error"])
        profile = ModelProfile.from_answer(name, 0, False, answer)
        built = AutoConfig.for_model(name, **config)
        built.use_cache = False
        model = AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16).train()
        assert profile.tensors == tuple(parameter.numel() for parameter in model.parameters()), name
        found = profile.activations_in("bf16")
        assert found is not None
        ids = torch.randint(0, 500, (3, 40))
        for counted in (found.plain, found.checkpointed):
            _, tiers = count_activations(lambda: model(input_ids=ids, labels=ids).loss, list(model.parameters()))  # noqa: B023
            assert counted is not None
            assert counted.bytes(profile.layers, 3, 40) == pytest.approx(tiers["cpu"], rel=0.001), name
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_dropout_is_counted_as_the_accelerator_keeps_it(answers: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    from ds_bench.worker.ledger import count_activations

    cpu, cuda, none = (
        ModelProfile.from_answer("gpt2", 4, True, answers[f"dropout {case}"]).activations_in("bf16")
        for case in ("on the CPU", "on CUDA", "of 0")
    )
    assert cpu is not None
    assert cuda is not None
    assert none is not None
    config = AutoConfig.for_model("gpt2", **GPT2_WITH_DROPOUT, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.randint(0, 500, (3, 80))
    _, tiers = count_activations(lambda: model.train()(input_ids=ids, labels=ids).loss, list(model.parameters()))
    assert cpu.plain.bytes(4, 3, 80) == tiers["cpu"]
    # A mask of one byte behind the attention, behind the MLP and behind the embedding; no scores.
    masks = cuda.plain.bytes(4, 3, 80) - none.plain.bytes(4, 3, 80)
    assert masks == (2 * 4 + 1) * 3 * 80 * 48


def test_factory_with_its_own_batches_and_frozen_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from ds_bench.worker.ledger import count_activations

    (tmp_path / "own_model.py").write_text(
        "import torch\n"
        "class Own(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first = torch.nn.Linear(8, 16).requires_grad_(False)\n"
        "        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))\n"
        "        self.dropout = torch.nn.Dropout(0.1)\n"
        "    def forward(self, pixels):\n"
        "        x = self.first(pixels)\n"
        "        for block in self.blocks:\n"
        "            x = self.dropout(torch.relu(block(x)))\n"
        "        return x.pow(2).mean()\n"
        "def batch(samples, _length, generator):\n"
        "    return {'pixels': torch.rand(samples, 8, generator=generator)}\n"
        "def make(): return Own(), batch\n"
    )
    monkeypatch.chdir(tmp_path)  # where a user's factory lies
    profile = measure_profile("own_model:make", "factory", 64, accelerator="cpu")
    assert profile.unknown is None
    assert (profile.layers, profile.parameters, profile.frozen_parameters) == (4, 4 * (256 + 16), 8 * 16 + 16)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_model  # type: ignore[import-not-found]

    model, batch = own_model.make()
    model = model.to(torch.bfloat16)
    pixels = batch(7, 64, torch.Generator())["pixels"].to(torch.bfloat16)
    _, tiers = count_activations(lambda: model(pixels), list(model.parameters()))
    found = profile.activations_in("bf16")
    assert found is not None
    assert found.checkpointed is None
    assert found.plain.bytes(4, 7, 64) == tiers["cpu"]


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
    first, second = model_profile.measure_profiles([{}, {}], timeout_seconds=1)
    assert first == {"tensors": 1, "error": "the measuring process took more than 1 s"}
    assert second == {"error": "the measuring process took more than 1 s"}


def test_processes_that_a_factory_starts_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "starter.py").write_text(
        f"{STARTS_PROCESSES}import torch\ndef make():\n    start()\n    return torch.nn.Linear(3, 5)\n"
    )
    start = time.monotonic()
    profile = measure_profile("starter:make", "factory", 64, environment={"PYTHONPATH": str(tmp_path)})
    assert profile.tensors == (15, 5)
    assert time.monotonic() - start < 200  # the time limit is 240 s, and a busy machine is slow
    assert find_marked(str(tmp_path)) == set()
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["starter.py"]
