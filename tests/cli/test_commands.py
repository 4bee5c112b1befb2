"""The commands as a user types them: what they print, write and exit with, from results on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.cli import commands
from ds_bench.cli.commands import main
from ds_bench.config.strategies import REFERENCES, make_configuration
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.real_trials import ROOT

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
    short = capsys.readouterr().out
    assert "★ ZeRO-0" in short
    assert "ZeRO-3" in short
    assert "slower ?" in short
    assert "Recommendation" not in short
    assert main(["report", str(result), "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "not tested" in out
    assert "Recommendation (balanced): ZeRO-0" in out


def test_several_files_of_one_workload_are_taken_together_as_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(fakes.write_run(tmp_path / f"r{i}", run_of((0, 3), slower=i / 1e3)).folder) for i in range(3)]
    assert main(["report", *folders, "--verbose"]) == 0
    out = capsys.readouterr().out
    assert out.count("ZeRO-3 ") >= 1
    assert "[0.6" in out  # 0.10 / 0.16 with an interval
    assert "not tested" not in out


def two_models(folder: Path, **second: Any) -> list[str]:
    """ZeRO-0 and 3 of tiny, ZeRO-0 and 2 of gpt2. 2 x 4 x 128 tokens in 0.10, 0.16, 0.10 and 0.14 s a step."""
    one = fakes.write_run(folder / "a", run_of((0, 3))).folder
    other = fakes.write_run(folder / "b", run_of((0, 2), of=fakes.workload(model="gpt2")), **second).folder
    return [str(one), str(other)]


def test_two_models_have_tables_of_their_own_and_one_with_both_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *two_models(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("★ Use ") == 2
    assert out.rstrip().splitlines()[-5:] == [
        "Tokens/s of the whole job, models side by side (NVIDIA H100 80GB HBM3)",
        "",
        "Model  ZeRO-0  ZeRO-3  ZeRO-2",
        "tiny   10,240   6,400",
        "gpt2   10,240           7,314",
    ]


def test_models_of_two_machines_do_not_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *two_models(tmp_path, on=fakes.environment(cpu_model="Xeon"))]) == 0
    assert "side by side" not in capsys.readouterr().out


def test_side_by_side_a_figure_not_to_be_used_is_marked_and_a_failure_has_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled = fakes.success(run_of((0,))[0].trial, step_seconds=(0.1,) * 10, losses=(None,) * 12)
    failed = fakes.failure(run_of((0,), of=fakes.workload(model="gpt2"))[0].trial)
    folders = [fakes.write_run(tmp_path / name, [entry]).folder for name, entry in (("a", spoiled), ("b", failed))]
    on = fakes.write_run(tmp_path / "c", run_of((0,), of=fakes.workload(model="opt-125m"))).folder
    assert main(["report", *map(str, [*folders, on])]) == 0
    *_, first, second, third, _, last = capsys.readouterr().out.rstrip().splitlines()
    assert [line.split()[-1] for line in (first, second, third)] == ["10,240*", "OOM", "10,240"]
    assert last.strip().startswith("* Rows with * are disqualified")


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


# ------------------------------------------------------------------ as the run was asked


def asked(folder: Path, *arguments: str) -> str:
    """The run of all four stages, with these flags in its record."""
    return str(fakes.write_run(folder, run_of(), arguments=["--model", "tiny", *arguments]).folder)


def test_report_keeps_the_goal_and_the_row_that_the_run_itself_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", asked(tmp_path, "--goal", "memory", "--relative-to", "zero2"), "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "Recommendation (memory): ZeRO-3" in out
    assert "1.40x" in out  # stage 0 against stage 2: 0.14 s / 0.10 s


def test_flags_of_report_go_before_those_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = asked(tmp_path, "--goal", "memory", "--relative-to", "zero2")
    assert main(["report", folder, "--goal", "speed", "--relative-to", "3", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "Recommendation (speed): ZeRO-0" in out
    assert "1.60x" in out  # stage 0 against stage 3: 0.16 s / 0.10 s


@pytest.mark.parametrize(
    "arguments",
    [["--goal", "fun"], ["--help"], ["--no-such-flag"], ["--goal", "memory", "--num-steps", "x"]],
    ids=" ".join,
)
def test_flags_of_a_run_that_cannot_be_read_leave_the_defaults(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", asked(tmp_path, *arguments), "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "Recommendation (balanced): ZeRO-0" in out
    assert "usage:" not in out


def test_a_row_that_the_run_asked_for_and_never_reached_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "tiny", "--relative-to", "zero3"]
    folder = fakes.write_run(tmp_path, run_of((0, 1)), arguments=arguments).folder
    assert main(["report", str(folder), "--verbose"]) == 0
    assert "0.83x" in capsys.readouterr().out  # stage 1 against stage 0: 0.10 s / 0.12 s


# ------------------------------------------------------------------ pictures and configurations


def test_pictures_into_a_folder_of_the_kernels_are_one_line(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody may write there, root neither."""
    assert main(["report", str(result), "--plots", "/proc"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["zero3", "3", "ZeRO-3", "zero-3", "stage 3"])
def test_export_takes_every_name_by_which_a_row_is_called(
    name: str, result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(result), "--export", name]) == 0
    config = json.loads((tmp_path / "ds_config_zero3" / "ds_config.json").read_text(encoding="utf-8"))
    assert config["zero_optimization"]["stage"] == 3


def test_export_says_which_of_several_results_it_was_taken_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = two_models(tmp_path)
    assert main(["report", one, other, "--export", "0"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "taken from" in line]
    assert len(said) == 1
    assert said[0].startswith("--export 0: 2 rows match that name; taken from ZeRO-0 of tiny")
    assert said[0].endswith(f"({one})")


def flat_copy(result: Path, folder: Path) -> Path:
    """The run's flat JSON, without its run folder."""
    (original,) = result.parent.parent.glob("*comparison_*.json")
    copy = folder / "sent.json"
    copy.write_bytes(original.read_bytes())
    return copy


def test_a_row_that_cannot_be_exported_is_refused_before_anything_is_printed_or_written(
    result: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    monkeypatch.chdir(tmp_path)
    reference = fakes.success(fakes.trial(make_configuration(REFERENCES["ddp"]), on=GPUS))
    torch_only = fakes.write_run(tmp_path / "reference", [reference]).folder
    for folder, name, problem in (
        (result, "zero7", "--export zero7: no such row (one of zero0, zero1, zero2, zero3)"),
        (flat_copy(result, tmp_path), "zero2", "a flat JSON does not have the configuration"),
        (torch_only, "ddp", "is torch's own engine"),
    ):
        with subtests.test(name=name, of=folder.name):
            assert main(["report", str(folder), "--export", name, "--html", "page.html"]) == 2
            shown = capsys.readouterr()
            assert shown.out == ""
            assert len(shown.err.strip().splitlines()) == 1
            assert problem in shown.err
            assert not Path("page.html").exists()


def test_a_row_that_one_of_two_results_tells_whole_is_exported_from_that(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = fakes.write_run(tmp_path / "other", run_of((2,), of=fakes.workload(model="gpt2"))).folder
    assert main(["report", str(flat_copy(result, tmp_path)), str(other), "--export", "zero2"]) == 0
    config = json.loads((tmp_path / "ds_config_zero2" / "ds_config.json").read_text(encoding="utf-8"))
    assert config["optimizer"]["type"] == "AdamW"


def test_a_strategys_name_from_a_file_leads_out_of_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "x/../../escaped"
    (entry,) = run_of((2,))
    evil = replace(entry, trial=replace(entry.trial, configuration=replace(entry.trial.configuration, name=name)))
    folder = fakes.write_run(tmp_path / "results", [evil]).folder
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    assert main(["report", str(folder), "--export", name]) == 0
    assert [path.name for path in (tmp_path / "inside").iterdir()] == ["ds_config_x_.._.._escaped"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside", "results"]


def test_both_scripts_with_the_same_arguments_keep_their_own_commands(
    result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offload = [fakes.success(fakes.trial(fakes.offload("cpu_optimizer"), on=GPUS))]
    typed = ["--model", "tiny", "--num-gpus", "2"]
    other = fakes.write_run(tmp_path / "other", offload, family="offload", arguments=typed).folder
    assert main(["report", str(result), str(other), "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "python zero_stage_comparison.py --model tiny --num-gpus 2" in out
    assert "python offload_comparison.py --model tiny --num-gpus 2" in out


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


@pytest.mark.parametrize("command", ["advice", "models"])
def test_a_terminal_of_ascii_alone_is_no_error(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ds_bench", command],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_advice_takes_a_local_folder_without_asking_the_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """172,288 parameters: 1128 × 64 embeddings, two layers of 49,984, a norm of 128."""
    shape = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000, "n_positions": 128}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert main(["advice", "--model", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "172 K parameters" in out
    assert out.count("use when:") == 9


def test_every_command_says_what_it_is_for_with_an_example_and_refuses_by_its_own_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, command in commands.COMMANDS.items():
        with pytest.raises(SystemExit):
            commands.main([name, "--help"])
        text = capsys.readouterr().out
        assert f"{command.purpose[0].upper()}{command.purpose[1:]}." in text
        assert f"  python -m ds_bench {name}" in text.partition("example")[2]
    assert commands.main(["plan", "--modle", "gpt2"]) == 2
    assert commands.main(["reprot"]) == 2
    assert commands.main(["plan", "--frobnicate"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "ds_bench: unrecognized arguments: --modle gpt2 (did you mean --model? see python -m ds_bench plan --help)",
        f"ds_bench: COMMAND reprot is none of {', '.join(commands.COMMANDS)} "
        "(did you mean report? see python -m ds_bench --help)",
        "ds_bench: unrecognized arguments: --frobnicate (see python -m ds_bench plan --help)",
    ]


def test_axes_are_listed_with_what_they_set_and_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["axes", "--json"]) == 0
    (*_, first) = [axis for axis in json.loads(capsys.readouterr().out) if axis["name"] == "overlap_comm"]
    assert first["sets"]["keys"] == ["zero_optimization.overlap_comm"]
    assert first["source"]
    assert first["changes"] == ["deepspeed_buffers", "time"]
    assert commands.main(["axes", "overlap_comm"]) == 0
    text = capsys.readouterr().out
    assert "zero_optimization.overlap_comm" in text
    assert max(map(len, text.splitlines())) <= 80
    assert commands.main(["axes", "overlap"]) == 2
    assert "did you mean overlap_comm?" in capsys.readouterr().err


def test_advice_is_given_for_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    assert main(["advice", "--model", "gpt2", "--num-gpus", "4", "--configs", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "mine (stage 3)\n  use when: the partitioned parameters" in captured.out
    assert "ZeRO-1" not in captured.out
    assert "note: mine: its file has no optimizer" in captured.err
