"""The models of examples/own_models.py under DeepSpeed, DDP and FSDP2: predicted, labeled, and trained alike."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ds_bench.config.spec import Configuration, Trial, Workload
from ds_bench.config.trained_parameters import of_workload
from ds_bench.models.architectures import read_architecture
from ds_bench.models.lookup import ResolvedModel
from ds_bench.prediction import trial_predictions
from ds_bench.prediction.formula_profile import formula_profile
from ds_bench.prediction.model_profile import ModelProfile, variant_of
from tests.support import fakes
from tests.support.ledger_checks import check
from tests.support.real_trials import ROOT, SUPPORT, Launch, make_trial

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

ROWS: dict[str, Configuration] = {
    **{f"zero{stage}": fakes.zero(stage) for stage in (0, 1, 3)},
    "cpu_optimizer": fakes.offload("cpu_optimizer", 2),
    **{name: fakes.reference(name) for name in ("ddp", "fsdp2")},
}
BUCKETS = {
    "reduce_bucket_size": 20_000,
    "allgather_bucket_size": 20_000,
    "stage3_param_persistence_threshold": 1000,
}


def _trial(row: Configuration, workload: Workload) -> Trial:
    zero = {} if row.is_reference or not row.stage else {"zero_optimization": BUCKETS}
    return make_trial(row, workload=workload, changes=zero)


def _profile(workload: Workload, trials: list[Trial]) -> ModelProfile:
    found = trial_predictions.profile_model(
        ResolvedModel(name=workload.model, source="factory", config={}),
        workload.seq_length,
        "cpu",
        variants=[variant_of(each.workload, each.ds_config, each.configuration.engine) for each in trials],
        environment={"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])},
    )
    assert isinstance(found, ModelProfile), found
    assert found.unknown is None
    return found


@pytest.mark.parametrize(
    ("example", "rows", "work"),
    [
        # Frozen weights and a tied head, which stage 3 splits as they are.
        ("lora", ("zero1", "zero3", "cpu_optimizer", "fsdp2"), {"activation_checkpointing": True}),
        ("classifier", ("zero1",), {}),
        ("t5", ("zero1", "zero3"), {}),
        ("vit", ("ddp",), {}),
        ("bert", ("zero0",), {}),
    ],
)
def test_a_documented_factory_is_predicted_labeled_and_trained_alike(
    example: str, rows: tuple[str, ...], work: dict[str, Any], launch: Launch
) -> None:
    sizes = {"batch_size": 2, "seq_length": 16, "num_steps": 2, "warmup_steps": 1}
    workload = Workload(model=f"documented_models:build_{example}", model_source="factory", **{**sizes, **work})
    trials = [_trial(ROWS[name], workload) for name in rows]
    records = [launch(trial) for trial in trials]
    reference = records[0].ranks[0]
    profile = _profile(workload, trials) if len(rows) > 1 else None
    for trial, record in zip(trials, records, strict=True):
        assert record.outcome.success, record.outcome
        if profile is not None:
            check(trial, profile, record)
        for rank in record.ranks:
            if profile is not None:
                assert rank.trainable_parameter_count == profile.parameters
                assert rank.parameter_count == profile.parameters + profile.frozen_parameters
            assert rank.frozen_weights_changed is (False if example in ("lora", "classifier") else None)
            assert rank.forward_backward_flops == reference.forward_backward_flops
            assert bool(rank.recomputed_flops) is workload.activation_checkpointing
            assert bool(rank.notes) is (example in ("t5", "vit"))  # whose samples are not sequences of that length
        assert record.ranks[0].losses == pytest.approx(reference.losses, rel=0.02), trial.configuration.name


LLAMA = {
    "vocab_size": 509, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "choice"),
    [
        ("zero0", {"lora": "4"}),
        ("zero1", {"lora": "4:q_proj,v_proj"}),
        ("zero2", {"lora": "4", "freeze": "layers.0."}),
        ("zero3", {"lora": "4", "activation_checkpointing": True}),
        ("cpu_optimizer", {"freeze": "embed_tokens,mlp"}),
        ("zero3", {"freeze": "embed_tokens,layers.0."}),
    ],
)
def test_adapters_and_frozen_parameters_are_trained_as_predicted(
    row: str, choice: dict[str, Any], launch: Launch
) -> None:
    """A built-in model with adapters by flags: its ledger equals the formulas, which work without torch."""
    sizes = {"batch_size": 2, "seq_length": 16, "num_steps": 2, "warmup_steps": 1}
    workload = Workload(
        model="llama", model_source="preset", model_type="llama", model_config=LLAMA, **{**sizes, **choice}
    )
    trial = _trial({**ROWS, "zero2": fakes.zero(2)}[row], workload)
    record = launch(trial)
    architecture = read_architecture("llama", {**LLAMA, "model_type": "llama"})
    profile = formula_profile(architecture, of_workload(workload))
    check(trial, profile, record)
    for rank in record.ranks:
        assert rank.trainable_parameter_count == profile.parameters
        assert rank.parameter_count == profile.parameters + profile.frozen_parameters
        assert rank.frozen_weights_changed is False
