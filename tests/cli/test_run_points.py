"""Sweeps over more than model and training: ranks, the optimizer, DeepSpeed's values, the data; and token files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from ds_bench.analysis import load_results
from ds_bench.baselines.result import baseline_name
from ds_bench.cli import commands
from ds_bench.cli.report import build_reports
from ds_bench.config.identity import work_key
from tests.support.fakes import FakeLauncher
from tests.support.scripted_run import Run, ScriptedRun

SMALL = """
model: {name: tiny}
training: {seq_len: 16, local_batch_size: 2, steps: 4, warmup_steps: 1}
configurations: {stages: [0, 2]}
launch: {accelerator: cpu}
"""


RANKS_AND_RATES = SMALL.replace("accelerator: cpu", "accelerator: cpu, num_gpus: [1, 2]") + (
    "optimizer: {params: {lr: [1e-4, 1e-3], betas: [0.9, 0.95]}}\n"
)


def test_points_may_differ_in_ranks_and_in_the_optimizer_and_are_reported_apart(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(RANKS_AND_RATES) == 0
    launched = scripted.launcher.launched
    made = [
        (trial.placement.num_gpus, trial.ds_config["optimizer"]["params"]["lr"], trial.configuration.name)
        for trial in launched
    ]
    assert made == [(n, lr, name) for n in (1, 2) for lr in (1e-4, 1e-3) for name in ("zero0", "zero2")]
    assert {trial.ds_config["train_batch_size"] for trial in launched} == {2, 4}
    assert {tuple(trial.ds_config["optimizer"]["params"]["betas"]) for trial in launched} == {(0.9, 0.95)}
    assert len({work_key(trial) for trial in launched}) == 8
    shown = capsys.readouterr().out
    assert "4 points · tiny" in shown
    assert "1 CPU rank · lr 0.0001: " in shown
    flat = scripted.output / f"{scripted.folder.name}.json"
    for source in (scripted.folder, flat):
        reports = build_reports([source])
        assert [len(report.comparison.rows) for report in reports] == [2] * 4
        assert len({report.title for report in reports}) == 4
        assert all(row.label in ("ZeRO-0", "ZeRO-2") for report in reports for row in report.comparison.rows)
    names = {baseline_name(summary) for summary in load_results.load(flat).runs}
    assert "tiny/zero2/batch2-seq16-2ranks-lr_0.001" in names
    assert len(names) == 8
    (scripted.folder / "run.json").unlink()
    (scripted.folder / "records.jsonl").unlink()
    assert len(build_reports([flat])) == 4  # from the columns alone


def test_a_sweep_of_ranks_is_resumed_and_planned_with_the_memory_of_each_point(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(RANKS_AND_RATES, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 points × 2 rows = 8 trials")
    assert lines[3].startswith("num_gpus 1, lr 0.0001")
    assert run(RANKS_AND_RATES, script=FakeLauncher(*["Success"] * 5, "Interrupted")) == 130
    scripted.launcher = FakeLauncher()
    assert commands.main(["run", "--resume", str(scripted.folder)]) == 0
    assert len(scripted.launcher.launched) == 3
    assert len(scripted.rows()) == 8


def test_any_value_of_every_deepspeed_configuration_may_be_swept_in_the_matrix(run: Run, scripted: ScriptedRun) -> None:
    matrix = (
        "optimizer.params.betas: [[0.9, 0.95], [0.9, 0.99]], configurations.deepspeed.gradient_clipping: [0.5, 1.0]"
    )
    included = "{optimizer.type: Adagrad, launch.num_gpus: 2, configurations.deepspeed.gradient_clipping: 2.0}"
    assert run(SMALL + f"sweep: {{matrix: {{{matrix}}}, include: [{included}]}}", "--stages", "0") == 0
    made = [(t.ds_config["optimizer"], t.ds_config["gradient_clipping"]) for t in scripted.launcher.launched]
    assert [(o["params"].get("betas"), clip) for o, clip in made[:4]] == [
        ([0.9, second], clip) for second in (0.95, 0.99) for clip in (0.5, 1.0)
    ]
    assert (made[4][0]["type"], made[4][1]) == ("Adagrad", 2.0)


# ------------------------------------------------------------------ files of token ids


def write_ids(path: Path, count: int = 4096, largest: int = 999) -> Path:
    ids = numpy.arange(count, dtype="<u2") % largest
    ids[count // 2] = largest
    ids.tofile(path)
    return path


WITH_FILE = SMALL + "dataset: {path: my ids.uint16, seq_len: 16}\ndataloader: {workers: [0, 2]}\n"


def test_a_recipe_names_a_file_beside_it_and_its_loader(
    run: Run, scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_ids(tmp_path / "my ids.uint16")
    assert run(WITH_FILE.replace("seq_len: 16, local", "local")) == 0
    works = [trial.workload for trial in scripted.launcher.launched]
    assert [work.data_workers for work in works] == [0, 0, 2, 2]
    assert {(work.data_path, work.data_dtype, work.data_tokens, work.seq_length) for work in works} == {
        (str(path), "uint16", 4096, 16)
    }
    assert "data my ids.uint16" in capsys.readouterr().out
    assert {row["data_file"] for row in scripted.rows()} == {str(path)}


def test_a_changed_file_is_another_trial_and_is_not_resumed(
    run: Run, scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_ids(tmp_path / "my ids.uint16")
    assert run(WITH_FILE, script=FakeLauncher("Interrupted")) == 130
    write_ids(path, largest=998)
    capsys.readouterr()
    scripted.launcher = FakeLauncher()
    for dry in ([], ["--dry-run"]):
        assert commands.main(["run", "--resume", str(scripted.folder), *dry]) == 2
        assert f"the file {path} has changed since the run began (put it back as it was" in capsys.readouterr().err
    write_ids(path)
    assert commands.main(["run", "--resume", str(scripted.folder)]) == 0
    assert len(scripted.launcher.launched) == 4


REFUSED = {
    "dataset: {path: ids.uint16}\nmodel: {name: tiny}": "holds the id 2000",
    "dataset: {path: ids.uint16, vocab_size: 100}": "the id 2000 (token 2,048), beyond the 100 ids of dataset.voc",
    "dataset: {path: ids.uint16}\nmodel: {name: gpt2}\ntraining: {seq_len: 1024, steps: [1, 2]}": "",
    "dataset: {path: short.uint16}": "8 tokens, fewer than one sequence of 256 (give a longer file",
    "dataset: {path: ids.bin}": "its name does not say how long its ids are",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_file_that_cannot_be_trained_on_is_refused_before_anything_starts(
    text: str, run: Run, scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ids.uint16", "ids.bin"):
        write_ids(tmp_path / name, largest=2000)
    write_ids(tmp_path / "short.uint16", 8, 9)
    own = text if "model:" in text else f"{text}\nmodel: {{name: tiny}}"
    own += "\nlaunch: {accelerator: cpu}"
    if not REFUSED[text]:
        assert run(own, "--dry-run") == 0
        return
    assert run(own) == 2
    error = capsys.readouterr().err
    assert REFUSED[text] in error
    assert error.count("\n") == 1
    assert not scripted.output.exists()


def test_a_script_takes_a_file_and_goes_on_from_another_folder(
    scripted: ScriptedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_ids(tmp_path / "ids.bin")
    Path("mine.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    flags = ["--data", "ids.bin", "--data-dtype", "uint16", "--configs", "mine.json", "--relative-to", "mine"]
    assert scripted.run(*flags, script=FakeLauncher("Interrupted")) == 130
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert scripted.resume("--dry-run") == 0
    assert scripted.resume() == 0
    (trial,) = scripted.launcher.launched
    assert (trial.workload.data_path, trial.configuration.name) == (str(tmp_path / "ids.bin"), "mine")
    assert trial.workload.data_workers == 0
