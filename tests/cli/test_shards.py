"""Shards of a recipe or a script: what each runs, and how results are read together, with and without all of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from ds_bench.cli import commands
from ds_bench.cli.report import build_reports
from ds_bench.config.caveat_texts import CaveatKind
from tests.support.fakes import FakeLauncher
from tests.support.scripted_run import Run, ScriptedRun

RECIPE = """
model: {name: tiny}
training: {seq_len: [8, 16, 32], local_batch_size: 2, steps: 4, warmup_steps: 1}
configurations: {stages: [0, 1, 2]}
launch: {accelerator: cpu}
"""
ONE_POINT = RECIPE.replace("[8, 16, 32]", "16")


def folders(scripted: ScriptedRun) -> list[Path]:
    return sorted((scripted.output / "runs").iterdir(), key=lambda folder: folder.name[-10:])


def test_shards_have_every_trial_once_with_the_numbers_of_the_plan_and_are_read_as_the_whole(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if one was interrupted: it is resumed alone."""
    assert run(RECIPE, "--repeats", "2", "--output-dir", str(scripted.output / "whole")) == 0
    whole = {t.trial_id for t in scripted.launcher.launched}
    shutil.rmtree(scripted.output / "whole")
    assert run(RECIPE, "--repeats", "2", "--shard", "1/2") == 0
    launched = scripted.launcher.launched
    assert {t.workload.seq_length for t in launched} == {8}  # one whole point, the other shard has two
    assert run(RECIPE, "--repeats", "2", "--shard", "2/2", script=FakeLauncher("Success", "Interrupted")) == 130
    launched = [*launched, scripted.launcher.launched[0]]
    first, second = folders(scripted)
    scripted.launcher = FakeLauncher()
    assert commands.main(["run", "--resume", str(second)]) == 0
    assert commands.main(["run", "--resume", str(second), "--shard", "1/2"]) == 2
    shown = capsys.readouterr().err
    assert "is shard 2/2, not shard 1/2. Leave --shard out" in shown
    assert f"report {scripted.output / 'runs'}/*of2" in shown
    identities = [t.trial_id for t in (*launched, *scripted.launcher.launched)]
    assert (len(identities), set(identities)) == (18, whole)
    assert re.fullmatch(r"comparison_\d{8}_\d{6}_shard1of2", first.name)
    assert (scripted.output / f"{second.name}.json").is_file()
    reports = build_reports([first, second])
    assert [report.comparison.rows[0].runs[0].trial.workload.seq_length for report in reports] == [8, 16, 32]
    assert all(len(row.runs) == 2 for report in reports for row in report.comparison.rows)
    assert not any(c.kind is CaveatKind.MEASURED_APART for report in reports for c in report.comparison.caveats)


def test_rows_of_one_point_are_split_among_more_shards_and_the_table_says_so(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(ONE_POINT, "--shard", "2/2") == 0
    assert scripted.trials == [(16, "zero1", 0), (16, "zero2", 0)]
    note = "shard 2/2 has 2 of the 3 rows: it recommends only among these, and report reads all shards together"
    assert f"note: {note}" in capsys.readouterr().err
    assert note in json.loads((folders(scripted)[0] / "run.json").read_text())["notes"]
    assert run(ONE_POINT, "--shard", "1/2") == 0
    (report,) = build_reports(folders(scripted))
    assert [row.label for row in report.comparison.rows] == ["ZeRO-0", "ZeRO-1", "ZeRO-2"]
    (caveat,) = (c for c in report.comparison.caveats if c.kind is CaveatKind.MEASURED_APART)
    first, second = (folder.name for folder in folders(scripted))
    host = report.environments[0].hostname
    assert caveat.text == (
        f"rows were measured in different runs: ZeRO-0 in {first} on {host}; ZeRO-1, ZeRO-2 in {second} on {host}"
    )


def test_a_script_runs_a_shard_of_its_rows(scripted: ScriptedRun) -> None:
    assert scripted.run("--stages", "0", "1", "2", "--shard", "1/2", script=FakeLauncher("Interrupted")) == 130
    assert scripted.resume() == 0
    assert [t.configuration.name for t in scripted.launcher.launched] == ["zero0"]


def test_a_shard_that_died_before_its_first_trial_is_left_out(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for shard in ("1/2", "2/2"):
        assert run(RECIPE, "--shard", shard) == 0
    first, second = folders(scripted)
    (first / "records.jsonl").unlink()
    capsys.readouterr()
    assert commands.main(["report", str(first), str(second)]) == 0
    assert capsys.readouterr().err == f"note: {first} has no records.jsonl: no trial had finished: left out\n"
    assert commands.main(["report", str(first)]) == 2


def test_a_shard_that_the_plan_does_not_have_is_refused(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, flags, message in (
        (RECIPE, ["--shard", "4/3"], "4/3: in I/N, I must be between 1 and N"),
        (RECIPE + "output: {csv: all.csv}", ["--shard", "1/3"], "output.csv with --shard: each shard would replace"),
        (ONE_POINT, ["--shard", "1/2", "--batch-size", "auto", "--common-batch"], "more shards (2) than points (1)"),
    ):
        assert run(text, *flags) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not scripted.launcher.launched
