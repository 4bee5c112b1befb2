"""Predicted against measured, by training: pairs of strategy, ranks, architecture and settings on CPU ranks.

The ledger of a run must agree with the prediction, cell by cell within 1 %, activations within 5 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config.spec import Configuration, Trial, Workload
from ds_bench.models.presets import ModelFacts
from ds_bench.prediction import model_profile
from ds_bench.prediction.model_profile import ModelProfile, request_for
from ds_bench.prediction.predicted_memory import predict
from tests.support.built_models import facts_from_config
from tests.support.fakes import offload, reference, zero
from tests.support.ledger_checks import check
from tests.support.model_families import FAMILIES
from tests.support.real_trials import Launch, make_trial

pytestmark = pytest.mark.deepspeed

_LLAMA = {
    "vocab_size": 509,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
_GPT2 = {
    "vocab_size": 503,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
    "tie_word_embeddings": True,
}
# In the middle of backward the gradient of an attention matrix is computed, 1.5 % of all: the ledger must not keep it.
_MIXTRAL = {
    **_LLAMA,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    # Its own dropout, 0.1: masks, and on the CPU the scores of attention.
    "gpt2-dropout": ("gpt2", {key: value for key, value in _GPT2.items() if "pdrop" not in key}),
    "llama": ("llama", {**_LLAMA, "tie_word_embeddings": False}),
    "llama-tied": ("llama", {**_LLAMA, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {**_MIXTRAL, "tie_word_embeddings": False}),
    # Large enough for its tensors to be swapped, which smaller than 1 MiB are not. Untied, DeepSpeed 0.19.8 dies of
    # "already assigned swap buffer".
    "swapped": (
        "llama",
        {**_LLAMA, "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "tie_word_embeddings": True},
    ),
}
STRATEGIES: dict[str, Configuration] = {
    **{f"zero{stage}": zero(stage) for stage in range(4)},
    **{f"cpu_optimizer-{stage}": offload("cpu_optimizer", stage) for stage in (1, 2, 3)},
    "cpu_full": offload("cpu_full"),
    "ddp": reference("ddp"),
    "fsdp2": reference("fsdp2"),
    "nvme": offload("nvme"),
}
BUCKETS = {
    "reduce_bucket_size": 100_000,
    "allgather_bucket_size": 100_000,
    "stage3_param_persistence_threshold": 5000,
}
"""Elements: so that the buckets are seen and do not drown the rest."""


FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
SUB_GROUPS = {"zero_optimization": {"sub_group_size": 30_000}}
LARGER_THAN_BUCKET = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 5000}}
Case = tuple[str, str, int, dict[str, Any], dict[str, Any]]
"""Architecture, strategy, ranks, changes of the workload and of DeepSpeed's configuration."""
# How parts are padded, and how much of the model a rank holds, depends on the number of ranks.
CASES: tuple[Case, ...] = (
    ("gpt2-dropout", "zero2", 1, {}, {}),
    ("gpt2", "zero3", 3, {}, {}),  # biases and norms, a tied embedding
    ("gpt2", "fsdp2", 3, {"precision": "fp32", "activation_checkpointing": True}, {}),
    ("llama", "ddp", 2, {"activation_checkpointing": True}, {}),
    ("llama", "zero2", 3, {}, {}),
    ("llama", "zero1", 2, {"loss": "tiled", "grad_accum": 3}, {}),
    ("llama", "zero3", 2, {"attention": "eager", "tiled_mlp": True, "loss": "chunked"}, {}),
    ("llama-tied", "cpu_full", 3, {"activation_checkpointing": True, "batch_size": 3}, {}),
    ("mixtral", "cpu_optimizer-2", 2, {"grad_accum": 3}, {}),  # experts: by far the most tensors
    ("mixtral", "zero3", 2, {"activation_checkpointing": True}, SUB_GROUPS),
    ("swapped", "nvme", 2, {}, {}),
    ("llama", "cpu_optimizer-1", 3, {}, LARGER_THAN_BUCKET),
    ("llama", "cpu_optimizer-3", 1, {}, FP32_ACCUMULATION),
)


def _facts(name: str) -> ModelFacts:
    model_type, config = ARCHITECTURES[name]
    return facts_from_config(name, model_type, config)


def _trial(case: Case, disk: str) -> Trial:
    name, strategy, ranks, work, changes = case
    model_type, config = ARCHITECTURES[name]
    model = {"model": name, "model_source": "preset", "model_type": model_type, "model_config": config}
    sizes = {"batch_size": 2, "seq_length": 16, "num_steps": 1, "warmup_steps": 1}
    row = STRATEGIES[strategy]
    if row.stage and not row.is_reference:
        changes = {**changes, "zero_optimization": {**BUCKETS, **changes.get("zero_optimization", {})}}
    return make_trial(
        row,
        workload=Workload(**{**model, **sizes, **work}),  # type: ignore[arg-type]
        changes=changes,
        largest_parameter=_facts(name).largest_parameter,
        num_gpus=ranks,
        **({"nvme_path": disk} if row.uses_nvme else {}),
    )


def _variant(trial: Trial) -> model_profile.Variant:
    return model_profile.variant_of(trial.workload, trial.ds_config, trial.configuration.engine)


@pytest.fixture(scope="module")
def profiles() -> Mapping[tuple[str, model_profile.Variant], ModelProfile]:
    """Of every architecture, with each variant that a case has, measured by one process."""
    asked = {(case[0], _variant(_trial(case, "/nvme"))) for case in CASES}
    wanted = sorted(asked | {(name, model_profile.USUAL) for name in ARCHITECTURES}, key=str)
    requests = [request_for(_facts(name), 16, accelerator="cpu", variant=variant) for name, variant in wanted]
    answers = model_profile.measure_profiles(requests)
    facts = {name: _facts(name) for name in ARCHITECTURES}
    return {
        (name, variant): ModelProfile.from_answer(name, facts[name].layers, facts[name].tied_embeddings, answer)
        for (name, variant), answer in zip(wanted, answers, strict=True)
    }


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.nvme] * (case[1] == "nvme"), id=str(case)) for case in CASES]
)
def test_a_rank_holds_what_was_predicted(
    case: Case,
    profiles: Mapping[tuple[str, model_profile.Variant], ModelProfile],
    launch: Launch,
    tmp_path: Path,
) -> None:
    trial = _trial(case, str(tmp_path))
    variant = _variant(trial)
    profile = profiles[case[0], model_profile.USUAL]
    if variant != model_profile.USUAL:  # activations that the trial's attention, loss or autocast keeps
        profile = replace(profile, variants={variant: profiles[case[0], variant]})
    assert predict(profile, trial.workload, trial.placement, trial.ds_config).unknown is None
    check(trial, profile, launch(trial))


@pytest.mark.slow
def test_a_family_without_arithmetic_of_ours_holds_what_was_predicted(launch: Launch, tmp_path: Path) -> None:
    """From its folder, as Transformers writes and builds it; layers of two kinds."""
    from transformers import AutoConfig

    AutoConfig.for_model("gemma2", **FAMILIES["gemma2"]).save_pretrained(tmp_path / "gemma2")
    path = str(tmp_path / "gemma2")
    profile = model_profile.measure_profile(path, "path", 16, accelerator="cpu")
    sizes = {"batch_size": 2, "seq_length": 16, "num_steps": 1, "warmup_steps": 1}
    workload = Workload(model=path, model_source="local", model_config={"path": path}, **sizes)  # type: ignore[arg-type]
    trial = make_trial(
        zero(2),
        workload=workload,
        changes={"zero_optimization": BUCKETS},
        largest_parameter=max(profile.tensors),
        num_gpus=1,
    )
    check(trial, profile, launch(trial))
