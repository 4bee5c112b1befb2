"""A result as JSON, CSV and Parquet, read back by pandas."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pandas as pd
import pytest

from ds_bench.cli import commands
from ds_bench.config.options import TRACKERS
from ds_bench.report.data_frames import data_frame
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
        (["--format", "csv", "--output", str(tmp_path / "none" / "rows.csv")], "Create it first"),
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
