"""Compares the predicted memory of a trial with the tensors that it really had."""

from __future__ import annotations

import pytest

from ds_bench.config.spec import Trial
from ds_bench.prediction.model_profile import ModelProfile
from ds_bench.prediction.predicted_memory import predict
from ds_bench.records.schema import SUCCESS, TrialRecord


def _fullest(record: TrialRecord) -> dict[tuple[str, str], int]:
    cells: dict[tuple[str, str], int] = {}
    for rank in record.ranks:
        for tier, row in rank.ledger.items():
            for category, size in row.items():
                cells[tier, category] = max(size, cells.get((tier, category), 0))
    return {cell: size for cell, size in cells.items() if cell[1] != "other"}


_STEP_COUNTERS = 1024
"""Bytes that DeepSpeed and torch hold in single numbers, such as the step count of each tensor."""


def check(trial: Trial, profile: ModelProfile, record: TrialRecord) -> None:
    assert record.outcome.status == SUCCESS, record.outcome.details
    engine = trial.configuration.engine
    prediction = predict(profile, trial.workload, trial.placement, trial.ds_config, engine=engine)
    predicted = {(tier, name): size for tier, row in prediction.ledger.items() for name, size in row.items()}
    measured = _fullest(record)
    tolerance = {cell: 0.05 if cell[1] == "activations" else 0.01 for cell in predicted}
    wrong = {
        cell: (predicted.get(cell, 0), measured.get(cell, 0))
        for cell in predicted.keys() | measured.keys()
        if measured.get(cell, 0)
        != pytest.approx(predicted.get(cell, 0), rel=tolerance.get(cell, 0.01), abs=_STEP_COUNTERS)
    }
    assert wrong == {}, f"cell: (predicted, measured): {wrong}"
    for rank in record.ranks:
        kept = {(tier, name): size for tier, row in rank.ledger_after_step.items() for name, size in row.items()}
        assert ("cpu", "parameters") in kept
        assert ("cpu", "activations") not in kept
        assert all(size <= rank.ledger[tier][name] for (tier, name), size in kept.items())
