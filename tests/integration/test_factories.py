"""The models of docs/models.md under real DeepSpeed, DDP and FSDP2: predicted, labelled, and trained alike by all."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ds_bench.config.spec import Configuration, Trial, Workload
from ds_bench.models.lookup import ResolvedModel
from ds_bench.prediction import trial_predictions
from ds_bench.prediction.model_profile import ModelProfile, variant_of
from tests.support import fakes
from tests.support.ledger_checks import check
from tests.support.real_trials import ROOT, SUPPORT, Launch, make_trial

pytestmark = pytest.mark.deepspeed

FROZEN = ("lora", "classifier")
ROWS: dict[str, Configuration] = {
    **{f"zero{stage}": fakes.zero(stage) for stage in range(4)},
    **{f"cpu_optimizer-{stage}": fakes.offload("cpu_optimizer", stage) for stage in (1, 2, 3)},
    "cpu_full": fakes.offload("cpu_full"),
    **{name: fakes.reference(name) for name in ("ddp", "fsdp2")},
}
BUCKETS = {
    "reduce_bucket_size": 20_000,
    "allgather_bucket_size": 20_000,
    "stage3_param_persistence_threshold": 1000,
}


def _workload(example: str, **changes: Any) -> Workload:
    given = {"batch_size": 2, "seq_length": 16, "num_steps": 2, "warmup_steps": 1, **changes}
    return Workload(model=f"documented_models:build_{example}", model_source="factory", **given)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "rows", "work"),
    [
        ("lora", ("zero1", "cpu_optimizer-2", "fsdp2"), {}),
        ("lora", ("zero1", "zero3"), {"activation_checkpointing": True}),
        ("bert", ("zero1", "cpu_full"), {}),
        ("classifier", ("zero1", "cpu_optimizer-3", "ddp"), {}),
        ("t5", ("zero1", "zero3"), {}),
        ("vit", ("zero1", "zero0"), {}),
    ],
)
def test_a_documented_factory_is_predicted_labelled_and_trained_alike(
    example: str, rows: tuple[str, ...], work: dict[str, Any], launch: Launch
) -> None:
    workload = _workload(example, **work)
    trials = {name: _trial(ROWS[name], workload) for name in rows}
    profile = _profile(workload, list(trials.values()))
    records = {name: launch(trial) for name, trial in trials.items()}
    assert records["zero1"].outcome.success, records["zero1"].outcome
    reference = records["zero1"].ranks[0]
    for name, record in records.items():
        check(trials[name], profile, record)
        for rank in record.ranks:
            assert rank.trainable_parameter_count == profile.parameters
            assert rank.parameter_count == profile.parameters + profile.frozen_parameters
            assert rank.frozen_weights_changed is (False if example in FROZEN else None)
            assert rank.forward_backward_flops == reference.forward_backward_flops
            assert bool(rank.recomputed_flops) is workload.activation_checkpointing
            assert bool(rank.notes) is (example in ("t5", "vit"))  # whose samples are not sequences of that length
        assert record.ranks[0].losses == pytest.approx(reference.losses, rel=0.02), name
