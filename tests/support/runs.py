"""Successful runs, with the ranks that a test gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ds_bench.analysis.row import Run, make_run
from ds_bench.records.schema import RankMeasurement, TrialRecord
from tests.support import fakes

CUDA = fakes.placement(accelerator="cuda", num_gpus=1)


def record_of(*ranks: RankMeasurement, **changes: Any) -> TrialRecord:
    """A success with these ranks, whatever the trial says."""
    trial = fakes.trial(on=replace(CUDA, num_gpus=len(ranks)), **changes)
    numbered = tuple(replace(rank, rank=number, world_size=len(ranks)) for number, rank in enumerate(ranks))
    return replace(fakes.success(trial), ranks=numbered)


def run_of(*ranks: RankMeasurement, **changes: Any) -> Run:
    return make_run(record_of(*ranks, **changes), None, None)


def seen(**changes: Any) -> RankMeasurement:
    return fakes.measurement(fakes.trial(on=CUDA), **changes)
