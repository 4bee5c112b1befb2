"""A trial that cannot begin leaves nothing behind."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ds_bench.launch import Limits, trial
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
