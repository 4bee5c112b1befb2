"""The verbs as a user types them: what they print, write and exit with, from results on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fakes
import pytest

from ds_bench.__main__ import main
from ds_bench.record import TrialRecord

GPUS = fakes.placement(accelerator="cuda", num_gpus=2)
MEMORY = {0: 40, 1: 30, 2: 20, 3: 10}


def run_of(stages: tuple[int, ...] = (0, 1, 2, 3), *, slower: float = 0.0, **changes: Any) -> list[TrialRecord]:
    """Stage n takes 0.1 + 0.02·n seconds a step, and ``slower`` more."""
    made = []
    for number, stage in enumerate(stages):
        trial = fakes.trial(fakes.zero(stage), on=GPUS, trial_id=f"{number:02d}_zero{stage}", **changes)
        peak = MEMORY[stage] * fakes.GB
        made.append(
            fakes.success(
                trial,
                step_seconds=(0.1 + 0.02 * stage + slower,) * 10,
                gpu_peak_bytes=peak,
                gpu_peak_reserved_bytes=peak,
            )
        )
    return made


@pytest.fixture
def result(tmp_path: Path) -> Path:
    return fakes.write_run(tmp_path / "results", run_of(), arguments=["--model", "tiny", "--num-gpus", "2"]).folder


def test_report_shows_the_table_and_the_recommendation_again(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(result)]) == 0
    out = capsys.readouterr().out
    assert "ZeRO-3" in out
    assert "not tested" in out
    assert "Recommendation (balanced): ZeRO-0" in out


def test_report_takes_the_goal_and_the_row_that_ratios_refer_to(
    result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(result), "--goal", "memory", "--relative-to", "zero3"]) == 0
    out = capsys.readouterr().out
    assert "Recommendation (memory): ZeRO-3" in out
    assert "1.60x" in out  # stage 0 against stage 3: 0.16 s / 0.10 s


def test_the_markdown_block_has_table_set_up_command_and_versions(
    result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(result), "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "| Strategy |" in out
    assert "python zero_stage_comparison.py --model tiny --num-gpus 2" in out
    assert "torch 2.13.0" in out
    assert "AMD EPYC 9654" in out


def test_several_files_of_one_workload_are_taken_together_as_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(fakes.write_run(tmp_path / f"r{i}", run_of((0, 3), slower=i / 1e3)).folder) for i in range(3)]
    assert main(["report", *folders]) == 0
    out = capsys.readouterr().out
    assert out.count("ZeRO-3 ") >= 1
    assert "[0.6" in out  # 0.10 / 0.16 with an interval
    assert "not tested" not in out


def test_two_models_stand_side_by_side_in_tables_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = fakes.write_run(tmp_path / "a", run_of((0,))).folder
    other = fakes.write_run(tmp_path / "b", run_of((0,), of=fakes.workload(model="gpt2"))).folder
    assert main(["report", str(one), str(other)]) == 0
    out = capsys.readouterr().out
    assert "tiny · bf16" in out
    assert "gpt2 · bf16" in out
    assert out.count("Recommendation (balanced)") == 2


def test_the_same_run_given_twice_counts_once(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(result), str(result), str(result)]) == 0
    assert "not tested" in capsys.readouterr().out


def test_report_writes_a_page_and_pictures(result: Path, tmp_path: Path) -> None:
    page, plots = tmp_path / "report.html", tmp_path / "plots"
    assert main(["report", str(result), "--html", str(page), "--plots", str(plots)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>")
    assert "ZeRO-3" in text
    assert {path.suffix for path in plots.iterdir()} == {".png", ".svg"}


def test_report_exports_a_row_by_name(result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(result), "--export", "zero2"]) == 0
    config = json.loads((tmp_path / "ds_config_zero2" / "ds_config.json").read_text(encoding="utf-8"))
    assert config["zero_optimization"]["stage"] == 2


def test_compare_puts_two_results_beside_each_other(
    result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = fakes.environment(packages={"torch": "2.14.0", "deepspeed": "0.19.8", "transformers": "5.23.0"})
    other = fakes.write_run(tmp_path / "later", run_of(), on=newer).folder
    assert main(["compare", str(result), str(other)]) == 0
    out = capsys.readouterr().out
    assert "1.00x" in out
    assert "versions differ: torch 2.13.0 against 2.14.0" in out


def test_a_baseline_is_kept_and_a_regression_exits_3(
    result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baselines = tmp_path / "baselines.json"
    assert main(["baseline", "save", str(result), "--baselines", str(baselines)]) == 0
    assert main(["baseline", "check", str(result), "--baselines", str(baselines)]) == 0
    slower = [
        fakes.success(entry.trial, step_seconds=(0.5,) * 10, gpu_peak_bytes=entry.ranks[0].gpu_peak_bytes)
        for entry in run_of()
    ]
    worse = fakes.write_run(tmp_path / "worse", slower).folder
    capsys.readouterr()
    assert main(["baseline", "check", str(worse), "--baselines", str(baselines), "--json"]) == 3
    verdicts = json.loads(capsys.readouterr().out)
    assert all(entry["failed"] for entry in verdicts["entries"])


BAD_INPUT = [
    (["report", "absent.json"], ["absent.json"]),
    (["report", "{notes}"], ["notes.txt"]),
    (["report", "{csv}"], [".csv", ".json"]),
    (["report", "{empty}"], ["empty.json"]),
    (["report", "{result}", "--html", "/nowhere/at/all.html"], ["--html", "/nowhere/at"]),
    (["report", "{result}", "--html", "{result}"], ["--html", "folder"]),
    (["report", "{result}", "--plots", "{notes}"], ["--plots", "notes.txt"]),
    (["report", "{result}", "--export", "zero9"], ["--export zero9", "zero0, zero1, zero2, zero3"]),
    (["report", "{result}", "--relative-to", "zero9"], ["zero9"]),
    (["report", "{result}", "--goal", "fun"], ["--goal", "balanced"]),
    (["compare", "{result}", "absent"], ["absent"]),
    (["baseline", "check", "{result}", "--baselines", "{notes}"], ["notes.txt"]),
    (["baseline", "save", "{result}", "--tolerance", "2"], ["--tolerance", "'2'"]),
    (["advice", "--model", "gpt9"], ["gpt9", "gpt2"]),
    (["frobnicate"], ["frobnicate"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_INPUT, ids=lambda value: " ".join(value)[:50])
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], words: list[str], result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("no JSON at all")
    (tmp_path / "empty.json").write_text("[]")
    (csv,) = result.parent.parent.glob("*.csv")
    names = {"notes": tmp_path / "notes.txt", "empty": tmp_path / "empty.json", "result": result, "csv": csv}
    capsys.readouterr()
    assert main([text.format(**names) for text in arguments]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.strip().splitlines()) == 1, captured.err
    assert all(word in captured.err for word in words), captured.err


def test_advice_tells_each_strategy_with_the_models_own_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advice", "--model", "gpt2", "--num-gpus", "4"]) == 0
    out = capsys.readouterr().out
    assert out.count("use when:") == 7
    assert "ZeRO-3" in out
