"""A result exported for TensorBoard, read back by TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_bench.analysis import load_results
from ds_bench.cli import commands
from ds_bench.records.step_files import STEPS_FILE
from ds_bench.report.tensorboard_export import tracked_runs
from tests.support import fakes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two trained trials, the second one monitored, and one that ran out of memory."""
    zero = [fakes.trial(fakes.zero(stage)) for stage in (0, 1, 2)]
    records = [fakes.success(zero[0]), fakes.success(zero[1]), fakes.failure(zero[2])]
    store = fakes.write_run(tmp_path / "out", records)
    line = {"step": 0, "phase": "measured", "time": 1e9, "seconds": 0.5, "tokens_per_second": 99.0, "loss": 3.5}
    for name in ("00_zero1", "00_zero1_attempt2"):  # it was run again
        folder = store.folder / "trials" / name
        folder.mkdir(parents=True)
        (folder / STEPS_FILE).write_text(json.dumps(line | {"host_resident_bytes": 2**30}) + "\n")
        line["loss"] = 2.5
    return store.folder


def test_tensorboard_shows_every_trial(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    interrupted = fakes.write_run(tmp_path / "other", []).folder  # it has no trials and is left out
    for others in ([], [str(interrupted)]):  # copied again, a trial has its steps once
        assert commands.main(["report", str(run), *others, "--to", "tensorboard"]) == 0
        look = "TensorBoard: 3 runs in tensorboard. To view: tensorboard --logdir tensorboard"
        assert look in capsys.readouterr().err
    folders = tmp_path / "tensorboard" / run.name
    events = event_accumulator.EventAccumulator(str(folders / "00_zero0")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(12))
    assert events.Scalars("loss")[11].value == pytest.approx(6.89)
    assert events.Scalars("throughput_tokens_per_sec")[11].value == pytest.approx(4 * 128 / 0.1)
    (summary,) = events.Scalars("summary/throughput_tokens_per_sec")
    assert (summary.step, summary.value) == (11, pytest.approx(5120))
    assert b"zero0" in events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    monitored = event_accumulator.EventAccumulator(str(folders / "00_zero1")).Reload()
    assert [(event.step, event.value) for event in monitored.Scalars("cpu_used_gb")] == [(0, 1.0)]
    assert [event.value for event in monitored.Scalars("loss")] == [2.5]
    failed = event_accumulator.EventAccumulator(str(folders / "00_zero2")).Reload()
    assert "loss" not in failed.Tags()["scalars"]


def test_flat_files_that_do_not_name_their_run_are_groups_of_their_own(tmp_path: Path) -> None:
    """Trials of both files have the same names; in one group they would overwrite each other."""
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for number, file in enumerate(files):
        trial = fakes.trial(fakes.zero(1))
        store = fakes.write_run(tmp_path / file.stem, [fakes.success(trial, step_seconds=[0.1 + number] * 10)])
        rows = [{**row, "run_id": None} for row in json.loads(store.json_path.read_text())]
        file.write_text(json.dumps(rows))
    assert [*tracked_runs([load_results.load(file) for file in files])] == [
        ("before", "00_zero1"),
        ("after", "00_zero1"),
    ]


def test_a_trial_of_two_results_is_written_once_and_with_its_steps(run: Path) -> None:
    flat = run.parent.parent / "copied.json"
    flat.write_bytes(next(run.parent.parent.glob("*comparison_*.json")).read_bytes())
    for paths in ([run, flat], [flat, run]):
        found = tracked_runs([load_results.load(path) for path in paths])
        assert [*found] == [(run.name, f"00_zero{stage}") for stage in (0, 1, 2)]
        assert found[run.name, "00_zero0"][1]


def test_trials_whose_names_differ_only_in_other_characters_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    trials = [fakes.trial(fakes.zero(1), trial_id=name) for name in ("00_a b", "00_a-b")]
    run = fakes.write_run(tmp_path / "out", [*map(fakes.success, trials)]).folder
    for _ in range(2):
        assert commands.main(["report", str(run), "--to", "tensorboard"]) == 0
    assert [len([*folder.iterdir()]) for folder in (tmp_path / "tensorboard" / run.name).iterdir()] == [1, 1]
