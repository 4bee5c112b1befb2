"""``python -m ds_bench.model_size``: sizes and passes as rows, the files of every run, tables in every report."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from ds_bench.cli import commands
from ds_bench.config.spec import Trial
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.fakes import FakeLauncher
from tests.support.scripted_run import ScriptedRun

PASSES = ("--pass-type", "forward", "forward_backward", "train")
SHORT = ("--context-length", "16", "--device", "cpu")


def run(scripted: ScriptedRun, *flags: str, script: FakeLauncher | None = None) -> int:
    scripted.launcher = script or FakeLauncher()
    return commands.main(["model-size", *SHORT, "--output-dir", str(scripted.output), *flags])


def successful_trial(trial: Trial) -> TrialRecord:
    """Steps vary by 2 % of their mean for forward, by 20 % for forward and backward; training runs out of memory."""
    if trial.workload.pass_type == "train":
        return fakes.failure(trial, "OOM")
    spread = 0.02 if trial.workload.pass_type == "forward" else 0.2
    deviation = 0.1 * spread / 2**0.5  # a sample of two has a standard deviation of √2 times that
    steps = [0.1 - deviation, 0.1 + deviation]
    return fakes.success(trial, step_seconds=steps, window_seconds=0.2)


def test_every_size_and_pass_is_a_trial_of_its_own_and_a_row_of_every_table(
    scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = FakeLauncher(by_strategy={"zero0": successful_trial})
    assert (
        run(scripted, "--model-sizes", "small,medium", *PASSES, "--output", str(tmp_path / "o.csv"), script=script) == 0
    )
    launched = [(trial.workload.model, trial.workload.pass_type) for trial in scripted.launcher.launched]
    passes = ("forward", "forward_backward", "train")
    assert sorted(launched) == sorted((f"size-{size}", each) for size in ("small", "medium") for each in passes)
    assert {trial.placement.num_gpus for trial in scripted.launcher.launched} == {1}

    printed = capsys.readouterr().out
    shown = re.findall(r"^size-\w+ +(forward \+ backward|forward|training step) ", printed, re.MULTILINE)
    assert shown == ["forward", "forward + backward", "training step"] * 2
    rows = list(csv.DictReader((tmp_path / "o.csv").read_text().splitlines()))
    assert [(row["model"], row["pass_type"], row["success"]) for row in rows[:3]] == [
        ("size-small", "forward", "True"),
        ("size-small", "forward_backward", "True"),
        ("size-small", "train", "False"),
    ]
    assert [float(row["step_time_cv_percent"]) for row in rows[:2]] == pytest.approx([2, 20])
    assert re.search(r"size-small +forward +100\.0 +0\.10000 +2\.00 +2\.00 % +stable +640 ", printed)
    assert re.search(r"size-small +forward \+ backward +100\.0 +0\.10000 +20\.0 +20\.00 % +unstable +640 ", printed)
    # A forward pass is a third of forward and backward, and so are the FLOPs that TFLOP/s are computed from.
    assert int(rows[1]["model_flops_per_token"]) == 3 * int(rows[0]["model_flops_per_token"])

    page = tmp_path / "page.html"
    assert commands.main(["report", str(scripted.folder), "--html", str(page)]) == 0
    assert capsys.readouterr().out.strip() == printed.strip()
    flat = next(scripted.output.glob("comparison_*.json"))
    assert commands.main(["report", str(flat), "--markdown"]) == 0
    for text in (capsys.readouterr().out, page.read_text()):
        assert "Passes of 2 models" in text
        assert "forward + backward" in text
        assert "so no configuration can be recommended" in text  # no configuration is recommended by them


def test_times_without_synchronization_are_labeled_wherever_they_are_shown(
    scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "wrong.csv"
    assert run(scripted, "--model-size", "small", "--no-sync", "--warmup-steps", "0", "--output", str(output)) == 0
    assert [trial.workload.synchronized for trial in scripted.launcher.launched] == [False]
    (row,) = csv.DictReader(output.read_text().splitlines())
    assert row["synchronized"] == "False"
    assert "not synchronized (wrong on purpose)" in row["caveats"]
    flat = next(scripted.output.glob("comparison_*.json"))
    for result, flags in ((scripted.folder, ["--markdown"]), (scripted.folder, ["--verbose"]), (flat, ["--markdown"])):
        assert commands.main(["report", str(result), *flags]) == 0
        assert "NOT SYNCHRONIZED (wrong on purpose) · no warm-up · 10 steps" in capsys.readouterr().out


def test_a_mistake_is_one_line_and_starts_nothing(
    scripted: ScriptedRun, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for line, problem in (
        ("--model-size tiny", "Invalid value for --model-size: 'tiny'. Choose from small, medium, large, xl, 2.7B"),
        ("--model-sizes small 2.7b", "Did you mean '2.7B'?"),
        ("--model-size small --model-sizes xl", "not allowed with argument"),
        (
            "--pass-type backward",
            "Invalid value for --pass-type: 'backward'. Choose from forward, forward_backward, train",
        ),
        ("--context-length 4096", "beyond the 2048 positions of size-small"),
        ("--output no/such/folder/o.csv", "the rows cannot be written to no/such/folder/o.csv"),
        ("--output .", "Is a directory"),
    ):
        with subtests.test(line):
            assert run(scripted, *line.split()) == 2
            error = capsys.readouterr().err
            assert problem in error
            assert error.count("\n") == 1
    assert not scripted.launcher.launched


def test_only_rows_without_zero_time_the_passes_of_the_model_alone(scripted: ScriptedRun) -> None:
    passes = ("--set", "training.pass_type=forward", "--accelerator", "cpu", "--seq-length", "16", "--quiet")
    rows = ("--stages", "0", "2", "--strategies", "ddp")
    scripted.launcher = FakeLauncher()
    assert commands.main(["run", "--model", "tiny", *passes, *rows, "--output-dir", str(scripted.output)]) == 0
    assert [trial.configuration.name for trial in scripted.launcher.launched] == ["zero0"]
    reasons = {row["strategy"]: row["error"] for row in scripted.rows() if not row["success"]}
    assert set(reasons) == {"zero2", "ddp"}
    assert all("time it at stage 0" in reason for reason in reasons.values())
