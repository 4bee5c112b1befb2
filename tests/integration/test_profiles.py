"""Profiles of real trials of two ranks: measured as without them, comparable with each other, files to open."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ds_bench.analysis.loss_parity import compare_losses
from ds_bench.analysis.row import make_run
from ds_bench.config.spec import Inspection
from ds_bench.records.schema import SUCCESS, TrialRecord
from tests.support import fakes
from tests.support.real_trials import Launch, make_trial

pytestmark = pytest.mark.deepspeed

PROFILED = Inspection(profiles=("torch", "memory", "nsys"), profile_ranks=(1,))


def trained(launch: Launch, stage: int, inspection: Inspection) -> TrialRecord:
    work = fakes.workload(batch_size=2, seq_length=32, num_steps=3, warmup_steps=1)
    record = launch(replace(make_trial(fakes.zero(stage), workload=work), inspection=inspection))
    assert record.outcome.status == SUCCESS, record.outcome
    return record


@pytest.mark.slow
def test_profiled_rows_are_measured_as_others_and_compare_with_each_other(launch: Launch, tmp_path: Path) -> None:
    plain = trained(launch, 1, Inspection())
    first, third = (trained(launch, stage, PROFILED) for stage in (1, 3))
    for ranks in zip(plain.ranks, first.ranks, strict=True):
        numbers = [(rank.losses, len(rank.step_seconds), len(rank.warmup_step_seconds)) for rank in ranks]
        assert numbers[0] == numbers[1]
    runs = [make_run(record) for record in (first, third)]
    assert all(run.weight_change and run.row.repeated_loss for run in runs)
    assert compare_losses(runs) == {}
    assert compare_losses([make_run(plain), runs[0]]) == {}  # which took other further steps
    for record, folder in ((first, "trial1"), (third, "trial2")):
        assert [len(rank.profiles) for rank in record.ranks] == [0, 2]
        assert [note for rank in record.ranks for note in rank.notes if "profile" in note] == []
        trace, table, timeline, *of_memory = (
            tmp_path.parent / name for profile in record.ranks[1].profiles for name in profile.files
        )
        assert trace.parent == tmp_path / folder / "profiles"
        names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert "optimizer step" in names
        assert any(str(name).startswith("aten::") for name in names)
        assert all(path.stat().st_size > 100 for path in (table, timeline, *of_memory))
