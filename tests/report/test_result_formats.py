"""Results in the formats of other tools, read back by those tools."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pandas as pd
import pytest

from ds_bench.analysis import load_results
from ds_bench.cli import commands
from ds_bench.config.options import TRACKERS
from ds_bench.records.step_series import STEPS_FILE
from ds_bench.report.result_formats import data_frame, tracked_runs
from ds_bench.system import environment
from tests.support import fakes


def test_report_writes_the_rows_of_the_file_in_three_forms(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    pytest.importorskip("pyarrow")
    store = fakes.write_run(tmp_path, [fakes.success(), fakes.failure(fakes.trial(fakes.zero(3)))])
    rows = json.loads(store.json_path.read_text())
    assert len(rows) == 2

    assert commands.main(["report", str(store.json_path), "--format", "json"]) == 0
    printed = json.loads(capsysbinary.readouterr().out)
    for row, stored in zip(printed, rows, strict=True):  # what the file lacks is computed where the model is known
        known = {name: value for name, value in stored.items() if value is not None}
        assert {name: row[name] for name in known} == known
        assert row["recommendation"]["choice"] == "ZeRO-0"
    assert commands.main(["report", str(store.json_path), "--format", "csv"]) == 0
    (header, *cells) = csv.reader(io.StringIO(capsysbinary.readouterr().out.decode()))
    assert (header, len(cells)) == ([name for name in rows[0] if name != "caveat_list"], 2)
    assert commands.main(["report", str(store.json_path), "--format", "parquet"]) == 0
    piped = pd.read_parquet(io.BytesIO(capsysbinary.readouterr().out))
    for form, read in (("json", pd.read_json), ("csv", pd.read_csv), ("parquet", pd.read_parquet)):
        path = tmp_path / f"rows.{form}"
        assert commands.main(["report", str(store.json_path), "--format", form, "--output", str(path)]) == 0
        assert list(read(path)["strategy"]) == ["zero0", "zero3"]
    pd.testing.assert_frame_equal(piped, pd.read_parquet(tmp_path / "rows.parquet"))
    pd.testing.assert_frame_equal(piped, data_frame(printed), check_dtype=False)


def test_rows_that_cannot_be_written_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(fakes.write_run(tmp_path, [fakes.success()]).folder)
    missing = (*TRACKERS, "pyarrow")
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name in missing else name)
    for flags, words in (
        (["--format", "csv", "--output", str(tmp_path)], "is a folder"),
        (["--format", "csv", "--output", str(tmp_path / "none" / "rows.csv")], "Make it first"),
        (["--output", str(tmp_path / "rows.csv")], "Add --format, one of json, csv, parquet"),
        (["--format", "parquet"], 'pip install "ds-compare[parquet]"'),
        (["--to", TRACKERS[0]], f"--to {TRACKERS[0]}: the package {TRACKERS[0]} is not installed"),
    ):
        assert commands.main(["report", run, *flags]) == 2
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)
        assert words in shown.err
    # As is --monitor, before a run begins.
    flags = ["run", "--model", "tiny", "--monitor", "tensorboard", "--output-dir", str(tmp_path / "out")]
    assert commands.main(flags) == 2
    assert "--monitor tensorboard: the package tensorboard is not installed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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
    for _ in range(2):  # copied again, a trial has its steps once
        assert commands.main(["report", str(run), "--to", "tensorboard"]) == 0
        look = "tensorboard: 3 runs in tensorboard; look at them: tensorboard --logdir tensorboard"
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
