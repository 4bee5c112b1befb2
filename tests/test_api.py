"""The functions of ``import ds_bench``; real runs through them are in ``integration/test_python_programs.py``."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import ds_bench
from ds_bench import api
from ds_bench.analysis.row import COLUMNS
from ds_bench.cli import commands
from ds_bench.config.spec import Trial
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.fakes import FakeLauncher
from tests.support.scripted_run import ScriptedRun

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results/reference/cpu_2cores_2026-11-21/zero_comparison_20261121_154122.json"
SMALL: dict[str, Any] = {"model": "tiny", "seq_length": 16, "num_steps": 4, "warmup_steps": 1, "accelerator": "cpu"}


PAGE = ROOT / "docs" / "ci_and_python.md"


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedRun:
    """A machine without processes, where the run is in this process too."""
    machine = ScriptedRun(tmp_path, monkeypatch)

    def run_here(arguments: list[str], progress: bool) -> dict[str, Any]:
        return api.run_arguments([*arguments, "--output-dir", str(machine.output)], quiet=not progress)

    monkeypatch.setattr(api, "_run_in_process", run_here)
    return machine


def test_importing_the_package_loads_nothing_and_it_has_its_names() -> None:
    program = (
        "import sys; before = set(sys.modules); import ds_bench;"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith(('ds_bench.', 'pandas', 'torch'))),"
        "set(ds_bench.__all__) <= set(dir(ds_bench)), callable(ds_bench.run))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[] True True\n"
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        ds_bench.runs  # noqa: B018


def test_a_run_prints_nothing_and_returns_rows_that_are_in_its_folder(
    scripted: ScriptedRun, capfd: pytest.CaptureFixture[str]
) -> None:
    scripted.launcher = FakeLauncher(by_strategy={"zero2": "OOM"})
    result = ds_bench.run(**SMALL, stages=[0, 2])
    assert capfd.readouterr() == ("", "")
    assert [(t.configuration.name, t.workload.num_steps) for t in scripted.launcher.launched] == [
        ("zero0", 4),
        ("zero2", 4),
    ]
    frame = result.to_dataframe()
    assert list(frame["success"]) == [True, False]
    assert result.folder is not None
    assert result.folder.parent == scripted.output / "runs"
    stored = json.loads((result.folder / "recommendation.json").read_text())
    assert stored == json.loads(json.dumps(result.recommendation.to_dict()))
    assert result.comparison.rows[1].label == "ZeRO-2"
    assert repr(result) == "<ds_bench.Result: 2 rows, recommended: ZeRO-0>"
    assert "OOM" in str(result)


def test_keywords_replace_values_of_a_recipe_in_a_file_or_a_dict(scripted: ScriptedRun, tmp_path: Path) -> None:
    recipe = {"model": {"name": "tiny"}, "training": {"seq_len": 8, "activation_checkpointing": True}, "axes": {}}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    own = {"mine.v2": {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.25}}
    for given in (recipe, path, str(path)):
        scripted.launcher = FakeLauncher()
        ds_bench.run(
            given,
            seq_length=[16, 32],
            activation_checkpointing=False,
            global_batch_size=None,
            stages=3,
            configurations={"inline": own},
            axes={"overlap_comm": [False]},
            accelerator="cpu",
            optimizer={"type": "Adam", "params": {"lr": 0.5}},
        )
        trials = scripted.launcher.launched
        assert {t.workload.seq_length for t in trials} == {16, 32}
        assert {t.configuration.name.partition("+")[0] for t in trials} == {"zero3", "mine.v2"}
        assert not any(t.workload.activation_checkpointing for t in trials)
        assert trials[0].ds_config["optimizer"]["params"]["lr"] == 0.5


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"batch_sizes": 2}, "no keyword batch_sizes. Did you mean batch_size?"),
    ({"seq_len": 2}, "no keyword seq_len. Did you mean seq_length?"),
    ({"stages": [7]}, "Invalid value for --stages: 7. Choose from 0, 1, 2, 3"),
    ({"training": {"seq_lenn": 2}}, "unknown key training.seq_lenn. Did you mean training.seq_len?"),
    ({"training": {"seq_len": {1, 2}}}, "training.seq_len is {1, 2}"),
    ({"resume": "no-such-folder"}, "no run.json there"),
    ({"relative_to": "zero9"}, "no such row"),
]


def test_what_cannot_be_run_is_an_exception_with_its_remedy(scripted: ScriptedRun) -> None:
    for keywords, message in REFUSED:
        with pytest.raises(ds_bench.UsageError) as refused:
            ds_bench.run(**{**SMALL, **keywords})
        assert message in str(refused.value)
        assert refused.value.remedy
    assert not scripted.launcher.launched


def test_an_interrupted_run_keeps_its_rows_and_says_how_to_go_on_or_to_load_the_result(scripted: ScriptedRun) -> None:
    def succeed_and_interrupt(trial: Trial) -> TrialRecord:
        os.kill(os.getpid(), signal.SIGINT)
        return fakes.success(trial)

    scripted.launcher = FakeLauncher("Success", "Interrupted")
    with pytest.raises(KeyboardInterrupt, match=r"continue with ds_bench\.run\(resume='(.*)'\)") as interrupted:
        ds_bench.run(**SMALL, stages=[0, 1])
    folder = str(interrupted.value).split("'")[1]
    scripted.launcher = FakeLauncher(succeed_and_interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"^every trial had finished: ds_bench\.load\('(.*)'\)$"):
        ds_bench.run(resume=folder)
    assert [t.configuration.name for t in scripted.launcher.launched] == ["zero1"]
    assert list(ds_bench.run(resume=folder).to_dataframe()["strategy"]) == ["zero0", "zero1"]


def test_a_problem_of_the_machine_is_in_the_notes_of_the_exception(
    scripted: ScriptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_bench.doctor import checks as doctor
    from ds_bench.doctor.findings import problem

    monkeypatch.setattr(doctor, "run_plan_checks", lambda *_, **__: [problem("ninja", "is missing", "install it")])
    with pytest.raises(ds_bench.PreflightError, match="not ready") as refused:
        ds_bench.run(**SMALL)
    assert [line.split() for line in refused.value.__notes__] == ["problem ninja is missing → install it".split()]


def test_a_sweep_has_a_report_for_each_point(scripted: ScriptedRun) -> None:
    result = ds_bench.run(**{**SMALL, "seq_length": [8, 16]}, stages=0)
    assert [len(report.comparison.rows) for report in result.reports] == [1, 1]
    with pytest.raises(ds_bench.UsageError, match=r"2 comparisons.*result\.reports"):
        result.recommendation  # noqa: B018
    assert len(result.to_dataframe()) == 2


def test_a_data_frame_is_the_file_with_one_type_per_column(tmp_path: Path) -> None:
    rows = json.loads(REFERENCE.read_text())
    frame = ds_bench.load(REFERENCE).to_dataframe()
    assert list(frame.columns) == list(COLUMNS)
    stored = {row["trial_id"]: row for row in rows}
    assert len(frame) == len(rows)
    for _, row in frame.iterrows():
        same = stored[row["trial_id"]]
        assert row["throughput_tokens_per_sec"] == pytest.approx(same["throughput_tokens_per_sec"])
        assert (row["stage"], row["success"], row["strategy"]) == (same["stage"], True, same["strategy"])
        assert row["started_at"] == pd.Timestamp(same["started_at"])
    failed = ds_bench.load(fakes.write_run(tmp_path, [fakes.failure()]).folder)
    assert (failed.to_dataframe().dtypes == frame.dtypes).all()


def test_html_of_a_result_and_of_a_plan_executes_nothing(scripted: ScriptedRun, tmp_path: Path) -> None:
    markup = "<img src=x onerror=alert(1)>\x1b[31m"
    trial = fakes.trial(of=fakes.workload(model=markup))
    folder = fakes.write_run(tmp_path, [fakes.failure(trial, error=markup)]).folder
    shown = ds_bench.load(folder)._repr_html_()
    assert "<img" not in shown
    assert "\x1b" not in shown
    assert html.escape("<img src=x") in shown
    planned = ds_bench.plan(model="tiny")._repr_html_()
    assert planned.count("<tr>") == 8
    assert set(re.findall(r"<(\w+)", shown + planned)) == {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}


def test_a_plan_has_the_rows_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ds_bench.plan(
        model="gpt2", gpu="8GB", num_gpus=4, strategies=["zero2", "cpu_full"], max_batch=True, min_gpus=False
    )
    line = "plan --model gpt2 --gpu 8GB --num-gpus 4 --strategies zero2 cpu_full --max-batch"
    assert commands.main(line.split()) == 0
    assert str(plan) == capsys.readouterr().out.rstrip()
    assert [(row.strategy, row.stage, row.verdict) for row in plan.rows] == [
        ("zero2", 2, "fits"),
        ("cpu_full", 3, "fits"),
    ]
    assert repr(plan) == "<ds_bench.Plan: 2 of 2 rows fit, 0 tight>"
    frame = plan.to_dataframe()
    assert list(frame["gpu_gb"]) == [row.gpu_bytes / 2**30 for row in plan.rows]
    assert frame["max_batch"].dtype == "Int64"
    assert plan.answer.startswith("4 × 8 GB:")
    with pytest.raises(ds_bench.UsageError, match="--num-gpus"):
        ds_bench.plan(num_gpus=0)
    with pytest.raises(ds_bench.UsageError, match="has no keyword axes"):
        ds_bench.plan(axes={"overlap_comm": [True]})  # type: ignore[call-arg]
    (file := tmp_path / "tp.json").write_text(
        '{"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}'
    )
    with pytest.raises(ds_bench.UsageError, match="do not cover AutoTP"):
        ds_bench.plan(num_gpus=2, configs=[str(file)])


def test_the_examples_of_the_page_run(scripted: ScriptedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, as a reader would type them; their assertions hold."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8").partition("\n## Python\n")[2], re.DOTALL
    )
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 4
    assert scripted.launcher.launched
