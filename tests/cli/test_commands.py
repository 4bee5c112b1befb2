"""The commands as a user types them: what they print, write and exit with, from results on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ds_bench.cli import commands
from ds_bench.cli.commands import main
from ds_bench.cli.report import build_reports
from ds_bench.config.strategies import REFERENCES, make_configuration
from ds_bench.records.schema import TrialRecord
from tests.support import fakes

GPUS = fakes.placement(accelerator="cuda", num_gpus=2)
MEMORY = {0: 40, 1: 30, 2: 20, 3: 10}


def run_of(stages: tuple[int, ...] = (0, 1, 2, 3), *, slower: float = 0.0, **changes: Any) -> list[TrialRecord]:
    """Stage n takes 0.1 + 0.02·n seconds a step, plus ``slower``."""
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


def two_models(folder: Path, **second: Any) -> list[str]:
    """ZeRO-0 and 3 of tiny, ZeRO-0 and 2 of gpt2. 2 x 4 x 128 tokens in 0.10, 0.16, 0.10 and 0.14 s a step."""
    one = fakes.write_run(folder / "a", run_of((0, 3))).folder
    other = fakes.write_run(folder / "b", run_of((0, 2), of=fakes.workload(model="gpt2")), **second).folder
    return [str(one), str(other)]


def test_report_without_a_result_shows_the_run_that_was_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert "no run in results/runs. Give a run folder" in capsys.readouterr().err
    earlier = fakes.write_run(tmp_path / "results", run_of((0, 3))).folder
    later = fakes.write_run(tmp_path / "results", run_of((1, 2))).folder
    os.utime(earlier / "records.jsonl", (9e8, 9e8))
    os.utime(later / "records.jsonl", (1e9, 1e9))
    assert main(["report"]) == 0
    assert "★ ZeRO-1" in capsys.readouterr().out
    assert main(["explain", "zero1", "zero2"]) == 0
    assert main(["explain", "result.json", "zero2"]) == 2
    assert "result.json is not a row. Give the two rows first" in capsys.readouterr().err
    os.utime(earlier / "records.jsonl", (2e9, 2e9))  # it was resumed
    assert main(["report"]) == 0
    assert "★ ZeRO-0" in capsys.readouterr().out


def test_two_models_have_tables_of_their_own_and_one_with_both_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *two_models(tmp_path / "apart", on=fakes.environment(cpu_model="Xeon"))]) == 0
    assert "side by side" not in capsys.readouterr().out
    assert main(["report", *two_models(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("★ Use ") == 2
    assert out.rstrip().splitlines()[-5:] == [
        "Tokens/s of the whole job, side by side (NVIDIA H100 80GB HBM3)",
        "",
        "Workload  ZeRO-0  ZeRO-3  ZeRO-2",
        "tiny      10,240   6,400",
        "gpt2      10,240           7,314",
    ]


def test_side_by_side_a_figure_not_to_be_used_is_marked_and_a_failure_has_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled = fakes.success(run_of((0,))[0].trial, step_seconds=(0.1,) * 10, losses=(None,) * 12)
    failed = fakes.failure(run_of((0,), of=fakes.workload(model="gpt2"))[0].trial)
    folders = [fakes.write_run(tmp_path / name, [entry]).folder for name, entry in (("a", spoiled), ("b", failed))]
    assert main(["report", *map(str, folders)]) == 0
    *_, first, second, _, last = capsys.readouterr().out.rstrip().splitlines()
    assert [line.split()[-1] for line in (first, second)] == ["10,240*", "OOM"]
    assert last.strip().startswith("* Rows with * are in doubt or disqualified")


GOAL_AND_ROW = ["--goal", "memory", "--relative-to", "zero2"]


@pytest.mark.parametrize(
    ("stages", "of_run", "of_report", "goal", "ratio"),
    [
        # 0.10, 0.12, 0.14 and 0.16 s a step
        ((0, 1, 2, 3), GOAL_AND_ROW, [], "(memory): Use ZeRO-3", "1.40x"),
        ((0, 1, 2, 3), GOAL_AND_ROW, ["--goal", "speed", "--relative-to", "3"], "(speed): Use ZeRO-0", "1.60x"),
        ((0, 1), ["--relative-to", "zero3"], [], "(balanced): Use ZeRO-0", "0.83x"),  # which the run never reached
        # Flags that cannot be read leave the defaults.
        *(((0, 1), flags, [], "(balanced): Use ZeRO-0", "0.83x") for flags in (["--goal", "fun"], ["--help"])),
    ],
)
def test_report_uses_its_own_flags_then_those_of_the_run(
    stages: tuple[int, ...],
    of_run: list[str],
    of_report: list[str],
    goal: str,
    ratio: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = fakes.write_run(tmp_path, run_of(stages), arguments=["--model", "tiny", *of_run]).folder
    assert main(["report", str(folder), *of_report, "--verbose"]) == 0
    out = capsys.readouterr().out
    assert f"Recommendation {goal}" in out
    assert ratio in out
    assert "usage:" not in out
    assert ("the result has no row zero3; ratios" in out) == ("zero3" in of_run and 3 not in stages)


def test_ratios_may_refer_to_any_label_that_is_shown(tmp_path: Path) -> None:
    one, _ = two_models(tmp_path)
    gpt2 = fakes.workload(model="gpt2")
    (record,) = run_of((2,), of=gpt2)
    changed = run_of((2,), of=gpt2, ds_config={**record.trial.ds_config, "prescale_gradients": True})
    other = fakes.write_run(tmp_path / "c", [record, *changed]).folder
    (comparison_report,) = build_reports([other])
    labels = [row.label for row in comparison_report.comparison.rows]
    assert len({*labels, "ZeRO-2"}) == 3, labels
    for label in labels:
        first, second = build_reports([Path(one), other], label)
        baselines = [each.comparison.baseline for each in (first, second)]
        assert [row.label for row in baselines if row is not None] == ["ZeRO-0", label]


# ------------------------------------------------------------------ charts and configurations


def test_export_finds_the_row_and_says_which_of_several_results_it_is_from(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flat JSON without the configuration is passed over."""
    monkeypatch.chdir(tmp_path)
    flat = flat_copy(result, tmp_path)
    assert main(["report", str(result), "--export", "3"]) == 0
    one, other = two_models(tmp_path)
    capsys.readouterr()
    assert main(["report", str(flat), one, other, "--export", "0"]) == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "taken from" in line]
    assert said.endswith(f"({flat}, {one})")
    for stage in (0, 3):
        config = json.loads((tmp_path / f"ds_config_zero{stage}" / "ds_config.json").read_text(encoding="utf-8"))
        assert config["zero_optimization"]["stage"] == stage


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
        (result, "zero7", "--export zero7: no such row. Choose from zero0, zero1, zero2, zero3"),
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


BAD_INPUT = [
    (["report", "{result}", "--html", "/nowhere/at/all.html"], ["--html", "/nowhere/at"]),
    (["report", "{result}", "--html", "{result}"], ["--html", "folder"]),
    (["report", "{result}", "--plots", "{notes}"], ["--plots", "notes.txt"]),
    (["report", "{result}", "--plots", "/proc"], ["--plots /proc"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_INPUT, ids=lambda value: " ".join(value)[:50])
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], words: list[str], result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("no JSON at all")
    names = {"notes": tmp_path / "notes.txt", "result": result}
    capsys.readouterr()
    assert main([text.format(**names) for text in arguments]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.strip().splitlines()) == 1, captured.err
    assert all(word in captured.err for word in words), captured.err


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
    assert commands.main(["--verson"]) == 2
    assert commands.main(["baseline"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "ds-compare: Unknown argument --modle. Did you mean --model?",
        "ds-compare: Unknown command 'reprot'. Did you mean 'report'?",
        "ds-compare: Unknown argument --frobnicate. See python -m ds_bench plan --help",
        "ds-compare: Unknown argument --verson. Did you mean --version?",
        "ds-compare: Missing ACTION. See python -m ds_bench baseline --help",
    ]


def test_axes_are_listed_with_what_they_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["axes", "overlap_comm", "--json"]) == 0
    (axis,) = json.loads(capsys.readouterr().out)
    assert axis["sets"]["keys"] == ["zero_optimization.overlap_comm"]
    assert axis["changes"] == ["deepspeed_buffers", "time"]
    assert axis["source"]
    assert commands.main(["axes"]) == 0
    text = capsys.readouterr().out
    assert "zero_optimization.overlap_comm" in text
    assert max(map(len, text.splitlines())) <= 80
