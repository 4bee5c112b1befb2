"""DDP and FSDP2 train what DeepSpeed trains: real ranks, one workload, each engine compared with ZeRO-2."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis.loss_parity import with_loss_caveats
from ds_bench.analysis.row import Run, make_run
from ds_bench.config.caveats import LOSS_KINDS
from ds_bench.config.spec import Configuration, Workload
from ds_bench.launch import Limits
from ds_bench.launch.warm_launcher import WarmLauncher
from ds_bench.records.schema import SUCCESS, TrialRecord
from tests.support import fakes
from tests.support.real_trials import SHORT, make_trial

pytestmark = pytest.mark.deepspeed

DDP, FSDP2 = fakes.reference("ddp"), fakes.reference("fsdp2")

Train = Callable[[Configuration, Workload], TrialRecord]


@pytest.fixture
def train(server: Callable[[Limits], WarmLauncher], tmp_path: Path) -> Train:
    def go(row: Configuration, workload: Workload) -> TrialRecord:
        folder = tmp_path / f"{row.name}_{workload.model.replace(':', '_')}"
        folder.mkdir()
        record = server(SHORT).launch(make_trial(row, workload=workload), folder, lambda _progress: None)
        assert record.outcome.status == SUCCESS, record.outcome.details
        return record

    return go


def rows_of(train: Train, workload: Workload) -> dict[str, Run]:
    """ZeRO-2 and both engines by name, with the caveats about their losses."""
    records = [train(row, workload) for row in (fakes.zero(2), DDP, FSDP2)]
    runs = with_loss_caveats([make_run(record) for record in records])
    return {each.trial.configuration.name: each for each in runs}


def loss_caveats(rows: dict[str, Run]) -> list[str]:
    return [each.text for row in rows.values() for each in row.caveats if each.kind in LOSS_KINDS]


def test_the_engines_train_what_deepspeed_trains(train: Train) -> None:
    """In fp32, where nothing but the order of sums differs; accumulated, with recomputed activations and dropout."""
    workload = fakes.workload(
        batch_size=2, seq_length=32, num_steps=4, precision="fp32", grad_accum=2, activation_checkpointing=True
    )
    rows = rows_of(train, replace(workload, dropout=0.1))
    assert loss_caveats(rows) == []
    for name in ("ddp", "fsdp2"):
        run, zero = rows[name], rows["zero2"]
        assert run.losses == pytest.approx(zero.losses, rel=1e-6)
        assert run.row.repeated_loss == pytest.approx(zero.row.repeated_loss, rel=1e-5)
        distance = math.dist(run.weight_change or (), zero.weight_change or ())
        assert distance < 1e-3 * (zero.row.weight_change_norm or 0.0)
        assert run.ranks[0].optimizer_settings == zero.ranks[0].optimizer_settings
        assert (run.row.batch_size, run.row.grad_accum, run.row.data_parallel_size) == (2, 2, 2)


@pytest.mark.slow
def test_in_bf16_only_rounding_differs(train: Train) -> None:
    changes: dict[str, Any] = {"grad_accum": 2, "activation_checkpointing": True}
    rows = rows_of(train, fakes.workload(batch_size=2, seq_length=32, num_steps=10, **changes))
    assert loss_caveats(rows) == []


def test_a_model_of_the_users_own_factory_keeps_its_weights(train: Train) -> None:
    """Adapters on frozen weights with a tied head."""
    workload = Workload(
        model="factories:lora",
        model_source="factory",
        batch_size=2,
        seq_length=8,
        num_steps=2,
        warmup_steps=1,
        precision="fp32",
        dropout=0.0,
    )
    rows = rows_of(train, workload)
    assert loss_caveats(rows) == []
    for name in ("ddp", "fsdp2"):
        assert rows[name].losses == pytest.approx(rows["zero2"].losses, rel=1e-5)
