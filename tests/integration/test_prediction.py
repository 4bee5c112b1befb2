"""Predicted against measured, by training: every strategy on one, two and three CPU ranks, several architectures.

What a run's ledger counts must be what was predicted, cell by cell within 1 %, activations within 5 %. At stage 1 the
ledger looks into backward when half of the gradients are there, so that cell is bounded from both sides instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config.spec import Configuration, Trial, Workload
from ds_bench.models.presets import ModelFacts
from ds_bench.prediction import model_profile, what_if
from ds_bench.prediction.memory import predict
from ds_bench.prediction.model_profile import ModelProfile, request_for
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
}
BUCKET = 100_000
"""Elements: so that the buckets are seen and do not drown the rest."""


@pytest.fixture(scope="module")
def profiles() -> dict[str, ModelProfile]:
    facts = {name: _facts(name) for name in ARCHITECTURES}
    answers = model_profile.measure_profiles([request_for(each, 16, accelerator="cpu") for each in facts.values()])
    return {
        name: ModelProfile.from_answer(name, each.layers, each.tied_embeddings, answer)
        for (name, each), answer in zip(facts.items(), answers, strict=True)
    }


def _facts(name: str) -> ModelFacts:
    model_type, config = ARCHITECTURES[name]
    return facts_from_config(name, model_type, config)


def _trial(
    name: str, strategy: Configuration, ranks: int, changes: Mapping[str, Any] | None = None, **work: Any
) -> Trial:
    model_type, config = ARCHITECTURES[name]
    workload = Workload(
        **{
            "model": name,
            "model_source": "preset",
            "model_type": model_type,
            "model_config": config,
            "batch_size": 2,
            "seq_length": 16,
            "num_steps": 1,
            "warmup_steps": 1,
            **work,
        }
    )
    zero_changes = {
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "stage3_param_persistence_threshold": 5000,
        **((changes or {}).get("zero_optimization") or {}),
    }
    rest = {key: value for key, value in (changes or {}).items() if key != "zero_optimization"}
    return make_trial(
        strategy,
        workload=workload,
        changes={
            **rest,
            **({"zero_optimization": zero_changes} if strategy.stage and not strategy.is_reference else {}),
        },
        largest_parameter=_facts(name).largest_parameter,
        num_gpus=ranks,
        **({"nvme_path": "/replaced-by-the-trial's-own"} if strategy.uses_nvme else {}),
    )


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "cpu_optimizer-2", "cpu_optimizer-3", "cpu_full"])
def test_every_part_of_a_rank_is_as_large_as_was_predicted(
    strategy: str, ranks: int, profiles: dict[str, ModelProfile], launch: Launch
) -> None:
    """How parts are padded, and how much of the model a rank holds, depends on the number of ranks."""
    trial = _trial("llama", STRATEGIES[strategy], ranks)
    check(trial, profiles["llama"], launch(trial))


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "cpu_optimizer-1"])
def test_whole_gradients_are_as_many_as_was_predicted(
    strategy: str, profiles: dict[str, ModelProfile], launch: Launch
) -> None:
    """Every rank holds all of them below stage 2; how optimizer states are split is the same there as at stage 2."""
    trial = _trial("llama", STRATEGIES[strategy], 2)
    check(trial, profiles["llama"], launch(trial))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("gpt2", "zero3"),  # biases and norms, a tied embedding
        ("gpt2-dropout", "zero2"),
        ("mixtral", "zero2"),  # experts: by far the most tensors
        ("mixtral", "cpu_optimizer-2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gpt2", "zero0"),
                ("gpt2", "cpu_optimizer-2"),
                ("gpt2", "cpu_optimizer-3"),
                ("llama-tied", "zero1"),
                ("llama-tied", "zero2"),
                ("llama-tied", "cpu_full"),
                ("mixtral", "zero1"),
                ("mixtral", "zero3"),
                ("mixtral", "cpu_optimizer-3"),
            )
        ),
    ],
)
def test_every_architecture_holds_what_was_predicted(
    name: str, strategy: str, profiles: dict[str, ModelProfile], launch: Launch
) -> None:
    trial = _trial(name, STRATEGIES[strategy], 2)
    check(trial, profiles[name], launch(trial))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), [("gemma2", 2), ("phi", 3), ("gpt_neox", 2), ("falcon", 3)])
def test_a_family_without_arithmetic_of_ours_holds_what_was_predicted(
    name: str, stage: int, launch: Launch, tmp_path: Path
) -> None:
    """From its folder, as Transformers writes and builds it, with its own dropout."""
    from transformers import AutoConfig

    folder = tmp_path / name
    AutoConfig.for_model(name, **FAMILIES[name]).save_pretrained(folder)
    profile = model_profile.measure_profile(str(folder), "path", 16, accelerator="cpu")
    workload = Workload(
        model=str(folder),
        model_source="local",
        model_config={"path": str(folder)},
        batch_size=2,
        seq_length=16,
        num_steps=1,
        warmup_steps=1,
    )
    buckets = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    trial = make_trial(
        zero(stage),
        workload=workload,
        changes={"zero_optimization": {**buckets, "stage3_param_persistence_threshold": 5000}},
        largest_parameter=max(profile.tensors),
        num_gpus=1,
    )
    check(trial, profile, launch(trial))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_named_change_saves_what_was_predicted(stage: int, profiles: dict[str, ModelProfile], launch: Launch) -> None:
    """The ledger of a run with smaller buffers has as much less."""
    defaults = {"reduce_bucket_size": 500_000_000, "stage3_param_persistence_threshold": 100_000}
    plain = _trial("llama", zero(stage), 2, {"zero_optimization": defaults})
    planned = what_if.PlannedTrial(
        profile=profiles["llama"],
        workload=plain.workload,
        placement=plain.placement,
        configuration=plain.configuration,
        hidden_size=_LLAMA["hidden_size"],
        torch_adam=True,
    )
    (saving,) = (each for each in what_if.savings(planned) if each.name != "activation checkpointing")
    changes = {path.removeprefix("zero_optimization."): value for path, value in saving.changes.items()}
    records = [launch(plain), launch(_trial("llama", zero(stage), 2, {"zero_optimization": {**defaults, **changes}}))]
    before, after = (sum(sum(rank.ledger["cpu"].values()) for rank in record.ranks) for record in records)
    assert before - after == pytest.approx(saving.host_bytes, rel=0.01)


@pytest.mark.nvme
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("swapped", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", 2), ("swapped", 1), ("swapped", 3))),
    ],
)
def test_nvme_holds_what_was_predicted_on_disk_and_in_memory(
    name: str, ranks: int, profiles: dict[str, ModelProfile], launch: Launch, tmp_path: Path
) -> None:
    trial = _trial(name, offload("nvme"), ranks)
    trial = _with_nvme_path(trial, tmp_path)
    check(trial, profiles[name], launch(trial))


def _with_nvme_path(trial: Trial, path: Path) -> Trial:
    from dataclasses import replace

    from ds_bench.config import deepspeed_config

    placement = replace(trial.placement, nvme_path=str(path))
    return replace(trial, placement=placement, ds_config=deepspeed_config.with_swap_folder(trial.ds_config, str(path)))


@pytest.mark.parametrize(
    ("strategy", "work"),
    [
        ("ddp", {"precision": "fp32"}),
        ("fsdp2", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("ddp", {"precision": "fp32", "grad_accum": 2}),
                ("ddp", {"precision": "fp32", "activation_checkpointing": True}),
                ("fsdp2", {"precision": "fp32"}),
                ("fsdp2", {"grad_accum": 2}),
                ("fsdp2", {"activation_checkpointing": True}),
            )
        ),
    ],
)
def test_reference_engines_hold_what_was_predicted(
    strategy: str, work: dict[str, Any], profiles: dict[str, ModelProfile], launch: Launch
) -> None:
    trial = _trial("gpt2", STRATEGIES[strategy], 2, **work)
    check(trial, profiles["gpt2"], launch(trial))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero0", "zero2", "zero3"])
def test_fp32_holds_what_was_predicted(strategy: str, profiles: dict[str, ModelProfile], launch: Launch) -> None:
    trial = _trial("llama", STRATEGIES[strategy], 2, precision="fp32")
    check(trial, profiles["llama"], launch(trial))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "cpu_optimizer-2"])
def test_accumulated_micro_batches_hold_what_was_predicted(
    strategy: str, profiles: dict[str, ModelProfile], launch: Launch
) -> None:
    trial = _trial("llama", STRATEGIES[strategy], 2, grad_accum=3)
    check(trial, profiles["llama"], launch(trial))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "cpu_optimizer-3"])
def test_fp32_accumulation_holds_what_was_predicted(
    strategy: str, profiles: dict[str, ModelProfile], launch: Launch
) -> None:
    trial = _trial("llama", STRATEGIES[strategy], 2, {"data_types": {"grad_accum_dtype": "fp32"}})
    check(trial, profiles["llama"], launch(trial))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "zero_changes"),
    [
        ("zero2", {"overlap_comm": True}),
        ("zero3", {"sub_group_size": 30_000}),
        ("cpu_optimizer-3", {"sub_group_size": 30_000, "offload_optimizer": {"ratio": 0.5}}),
    ],
)
def test_settings_change_what_was_predicted(
    strategy: str, zero_changes: dict[str, Any], profiles: dict[str, ModelProfile], launch: Launch
) -> None:
    trial = _trial("llama", STRATEGIES[strategy], 2, {"zero_optimization": zero_changes})
    check(trial, profiles["llama"], launch(trial))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_checkpointed_activations_are_those_of_the_saved_tensor_hook(
    name: str, profiles: dict[str, ModelProfile], launch: Launch
) -> None:
    trial = _trial(name, zero(2), 2, activation_checkpointing=True, batch_size=3)
    check(trial, profiles[name], launch(trial))


def _with_variant(name: str, trial: Trial, profiles: dict[str, ModelProfile]) -> ModelProfile:
    """The profile with the activations that the trial's attention, loss or autocast keeps."""
    variant = model_profile.variant_of(trial.workload, trial.ds_config, trial.configuration.engine)
    other = model_profile.find_profile(_facts(name), 16, accelerator="cpu", variant=variant)
    return replace(profiles[name], variants={variant: other})


@pytest.mark.slow
def test_deepspeeds_autocast_holds_what_was_predicted(profiles: dict[str, ModelProfile], launch: Launch) -> None:
    trial = _trial("llama", zero(2), 2, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    check(trial, _with_variant("llama", trial, profiles), launch(trial))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gpt2-dropout", "llama"])
@pytest.mark.parametrize("work", [{}, {"activation_checkpointing": True}, {"grad_accum": 2}], ids=str)
def test_autocast_holds_what_was_predicted(
    work: dict[str, Any], name: str, profiles: dict[str, ModelProfile], launch: Launch
) -> None:
    trial = _trial(name, STRATEGIES["ddp"], 2, **work)
    check(trial, _with_variant(name, trial, profiles), launch(trial))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize(
    "work", [{"loss": "chunked"}, {"loss": "tiled"}, {"attention": "eager"}, {"tiled_mlp": True}], ids=str
)
def test_another_loss_or_attention_holds_what_was_predicted(
    work: dict[str, Any], strategy: str, profiles: dict[str, ModelProfile], launch: Launch
) -> None:
    trial = _trial("llama", STRATEGIES[strategy], 2, **work)
    usual = _with_variant("llama", trial, profiles)
    assert predict(usual, trial.workload, trial.placement, trial.ds_config).unknown is None
    check(trial, usual, launch(trial))
