"""``explain A B RESULT``: which rows are meant, in one result or several, and what is no question."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ds_bench.cli.commands import main
from tests.support import fakes

STORED_RUN = Path(__file__).resolve().parents[1] / "data/zero_run/runs/zero_20261121_093000"


def result(folder: Path, *stages: int, bucket: int | None = None) -> Path:
    """A run folder with one run of each stage."""
    trials = [fakes.trial(fakes.zero(stage), trial_id=f"{stage:02d}_zero{stage}") for stage in stages]
    if bucket is not None:
        trials = [
            replace(
                trial,
                ds_config={
                    **trial.ds_config,
                    "zero_optimization": {**trial.ds_config["zero_optimization"], "reduce_bucket_size": bucket},
                },
            )
            for trial in trials
        ]
    records = [fakes.success(trial, step_seconds=(0.1 if bucket is None else 0.2,) * 10) for trial in trials]
    return fakes.write_run(folder, records, on=fakes.environment()).folder


def test_rows_go_by_name_label_or_stage(capsys: pytest.CaptureFixture[str]) -> None:
    for a, b in (("zero0", "zero2"), ("0", "2"), ("ZeRO-0", "stage 2"), ("zero-0", "ZERO2")):
        assert main(["explain", a, b, str(STORED_RUN)]) == 0
        assert capsys.readouterr().out.startswith("ZeRO-2 compared with ZeRO-0 · tiny"), (a, b)


def test_json_holds_every_category_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "0", "2", str(STORED_RUN), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["a"]["name"], found["b"]["name"]) == ("zero0", "zero2")
    for tier in found["memory"]:
        assert tier["difference_bytes"] == sum(each["difference_bytes"] for each in tier["categories"])
    assert "zero_optimization.stage" in [key["path"] for key in found["keys"]]


def test_rows_of_two_results_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = result(tmp_path / "a", 0, 2), result(tmp_path / "b", 2, 3, bucket=5_000_000)
    assert main(["explain", "zero3", "zero0", str(one), str(other)]) == 0
    assert capsys.readouterr().out.startswith("ZeRO-0 compared with ZeRO-3")
    before, after = result(tmp_path / "c", 2), result(tmp_path / "d", 2, bucket=5_000_000)
    assert main(["explain", "zero2", "zero2", str(before), str(after)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reduce_bucket_size")]
    assert line.split()[1:3] == ["5e8", "5e6"]


def test_rows_that_are_no_pair_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for a, b in (("zero0", "zero7"), ("zero2", "2")):
        assert main(["explain", a, b, str(STORED_RUN)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"ds_bench: {b if b == 'zero7' else a}"), error
        assert error.count("\n") == 1
