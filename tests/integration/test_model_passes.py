"""Passes without training, with real ranks: each holds what it needs, as predicted, and changes no weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds_bench.config.spec import PASS_TYPES, Trial
from ds_bench.launch import Limits
from ds_bench.launch.warm_launcher import WarmLauncher
from ds_bench.prediction.model_profile import find_profile
from ds_bench.prediction.predicted_memory import predict
from ds_bench.records.schema import SUCCESS, RankMeasurement
from tests.support import fakes
from tests.support.fakes import preset
from tests.support.real_trials import SHORT, make_trial

pytestmark = pytest.mark.deepspeed


def test_each_pass_holds_what_it_needs_and_only_training_changes_weights(
    server: Callable[[Limits], WarmLauncher], tmp_path: Path
) -> None:
    tiny = preset("tiny")
    profile = find_profile(tiny, 32, accelerator="cpu")
    ranks: dict[str, RankMeasurement] = {}
    for pass_type in PASS_TYPES:
        work = fakes.workload(batch_size=2, seq_length=32, num_steps=3, grad_accum=2, pass_type=pass_type)
        trial: Trial = make_trial(fakes.zero(0), workload=work, num_gpus=1)
        folder = tmp_path / pass_type
        folder.mkdir()
        record = server(SHORT).launch(trial, folder, lambda _progress: None)
        assert record.outcome.status == SUCCESS, record.outcome.details
        (ranks[pass_type],) = record.ranks
        if pass_type == "train":  # whose prediction other tests check
            continue
        predicted = predict(profile, work, trial.placement, trial.ds_config).ledger["cpu"]
        counted = {name: size for name, size in ranks[pass_type].ledger["cpu"].items() if name != "other"}
        assert sum(predicted.values()) == pytest.approx(sum(counted.values()), rel=0.02), (predicted, counted)
    forward, both, train = (ranks[each] for each in PASS_TYPES)
    assert set(forward.ledger["cpu"]) - {"other"} == {"parameters", "activations"}
    assert set(both.ledger["cpu"]) - {"other"} == {"parameters", "activations", "gradients"}
    assert "optimizer_states" in train.ledger["cpu"]
    assert (set(forward.phase_seconds), set(both.phase_seconds)) == ({"forward"}, {"forward", "backward"})
    assert (forward.weight_change, both.weight_change) == (None, None)
    assert train.weight_change is not None
    assert (forward.optimizer_class, both.optimizer_class) == ("none", "none")
    assert forward.losses[0] == both.losses[0] == train.losses[0]  # the same model on the same batch
