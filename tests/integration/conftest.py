"""Fixtures of tests that start whole runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from ds_bench.config.identity import work_key
from ds_bench.config.spec import Trial
from ds_bench.launch import Limits
from ds_bench.launch.warm_launcher import WarmLauncher
from ds_bench.records.schema import TrialRecord
from ds_bench.system import processes
from tests.support.real_trials import SHORT, Train


@pytest.fixture(scope="session")
def train(server: Callable[[Limits], WarmLauncher], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains a trial to its end; only once where trials differ in nothing but the name of their row."""
    records: dict[str, TrialRecord] = {}

    def go(trial: Trial) -> TrialRecord:
        assert trial.unsupported is None
        key = work_key(trial, leave_out=("name",))
        if key not in records:
            folder, before = tmp_path_factory.mktemp("trial"), processes.descendants()
            records[key] = server(SHORT).launch(trial, folder, lambda _progress: None)
            assert processes.descendants() <= before, "a process of the trial is left"
            shutil.rmtree(folder)
        record = replace(records[key], trial=trial)
        assert record.outcome.success, (trial.configuration.name, record.outcome)
        return record

    return go
