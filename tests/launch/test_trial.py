"""A trial that cannot begin leaves nothing behind; what its ranks are told."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ds_bench.config.spec import Trial
from ds_bench.launch import Limits, trial
from ds_bench.records.rank_files import Assignment
from tests.support import fakes


def run(asked: Trial, folder: Path, start: trial.Start) -> None:
    given = {"OF_ROW": "0", "OF_ALL": "0"}
    trial.run_trial(asked, folder, print, limits=Limits(), environment=given, start=start, launch="deepspeed")


@pytest.mark.parametrize("missing", ["trial", "disk"])
def test_trial_whose_first_files_cannot_be_written_leaves_no_scratch(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("trial", "disk", "temporary"):
        (tmp_path / name).mkdir()
    (tmp_path / missing).rmdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    asked = fakes.trial()
    inspection = replace(asked.inspection, checkpoint=True, checkpoint_path=str(tmp_path / "disk"))
    with pytest.raises(FileNotFoundError):
        run(replace(asked, inspection=inspection), tmp_path / "trial", lambda *_: pytest.fail("no rank may start"))
    assert [path for path in tmp_path.rglob("*") if path.name.startswith("ds_bench_")] == []


def test_variable_of_the_row_goes_before_that_of_all_rows(tmp_path: Path) -> None:
    told: list[Assignment] = []

    def start(_trial: object, folder: Path, _remote: object) -> trial.Leader:
        told.append(Assignment.load(folder))
        raise KeyboardInterrupt

    run(fakes.trial(replace(fakes.zero(1), variables={"OF_ROW": "1"})), tmp_path, start)
    assert told[0].environment == {"OF_ROW": "1", "OF_ALL": "0"}
