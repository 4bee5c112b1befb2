"""The folder for checkpoints: a missing one and one without room are refused in one line before anything runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_bench.config.spec import Inspection, Trial
from ds_bench.doctor.checkpoint_folder import check_folder
from ds_bench.errors import PreflightError
from ds_bench.models.presets import find_preset
from ds_bench.prediction.model_profile import ModelProfile, find_profile
from tests.support import fakes

TINY = find_preset("tiny")


@pytest.fixture
def profile() -> ModelProfile:
    assert TINY is not None
    return find_profile(TINY, 32, accelerator="cpu")


def trial(path: Path, name: str = "cpu_optimizer") -> Trial:
    asked = Inspection(checkpoint=True, checkpoint_path=str(path))
    return fakes.trial(fakes.offload(name), on=fakes.placement(nvme_path="/d"), inspection=asked)


@pytest.mark.parametrize(("name", "each"), [("cpu_optimizer", 14), ("nvme", 26)])
def test_a_disk_without_room_is_refused_with_the_bytes_that_are_needed(
    name: str, each: int, profile: ModelProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = each * profile.parameters
    later = trial(tmp_path / "made" / "later", name)
    for free in (need - 1, need):
        monkeypatch.setattr(shutil, "disk_usage", lambda _path, free=free: SimpleNamespace(free=free))
        if free == need:
            check_folder(None, [profile], [later])
            continue
        with pytest.raises(PreflightError, match=f"{each} bytes of each") as refused:
            check_folder(None, [profile], [later])
        assert "--checkpoint-path" in refused.value.remedy
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))
    check_folder(None, [], [later])  # a model of unknown size


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="is not a folder"):
        check_folder(str(tmp_path / "missing"), [], [trial(tmp_path)])


def test_another_disk_makes_no_other_trial(tmp_path: Path) -> None:
    here = trial(tmp_path)
    there = replace(here, inspection=replace(here.inspection, checkpoint_path="/elsewhere"))
    assert here.key == there.key != replace(here, inspection=Inspection()).key
