"""A trial that cannot begin leaves nothing behind; what its ranks are told."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ds_bench.launch import Limits, trial
from ds_bench.records.rank_files import Assignment
from tests.support import fakes


@pytest.mark.parametrize("missing", ["the folder of the trial", "the folder of its checkpoint"])
def test_a_trial_whose_first_files_cannot_be_written_leaves_no_scratch(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, disk, temporary = tmp_path / "trial", tmp_path / "disk", tmp_path / "temporary"
    for path in (folder, disk, temporary):
        path.mkdir()
    (folder if missing == "the folder of the trial" else disk).rmdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    asked = fakes.trial()
    asked = replace(asked, inspection=replace(asked.inspection, checkpoint=True, checkpoint_path=str(disk)))
    with pytest.raises(FileNotFoundError):
        trial.run_trial(asked, folder, print, limits=Limits(), environment={}, start=_start_nothing, launch="deepspeed")
    assert [path for path in tmp_path.rglob("*") if path.name.startswith("ds_bench_")] == []


def _start_nothing(*_: object) -> trial.Leader:
    raise AssertionError("no rank starts without the trial's files")


def test_a_variable_of_the_row_goes_before_that_of_all_rows(tmp_path: Path) -> None:
    asked = fakes.trial(replace(fakes.zero(1), variables={"OF_ROW": "1"}))
    told: list[Assignment] = []

    def start(_trial: object, folder: Path, _remote: object) -> trial.Leader:
        told.append(Assignment.load(folder))
        raise KeyboardInterrupt

    given = {"OF_ROW": "0", "OF_ALL": "0"}
    trial.run_trial(asked, tmp_path, print, limits=Limits(), environment=given, start=start, launch="deepspeed")
    assert told[0].environment == {"OF_ROW": "1", "OF_ALL": "0"}
