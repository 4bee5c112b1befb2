"""``baseline save`` and ``baseline check`` on stored runs: verdicts, exit codes, JSON and JUnit XML."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ds_bench.cli import commands
from ds_bench.cli.baseline import check_command, save_command
from ds_bench.config import recipe, recipe_file
from ds_bench.config.training_script import Script
from ds_bench.errors import UsageError
from ds_bench.records import schema
from ds_bench.records.schema import TrialRecord
from ds_bench.report.junit import TestCase, junit_text
from tests.support import fakes
from tests.support.real_trials import ROOT

NAME = "tiny/zero1/seq128"
CARD = fakes.placement(accelerator="cuda")
Write = Callable[..., Path]


def ran(*seconds: float, stage: int = 1, **changes: Any) -> list[TrialRecord]:
    """One run for each of ``seconds``, the time of each step; one of 0.1 s by default."""
    return [
        fakes.success(fakes.trial(fakes.zero(stage), on=CARD, repeat=number), step_seconds=[each] * 10, **changes)
        for number, each in enumerate(seconds or (0.1,))
    ]


def failed(stage: int = 1) -> list[TrialRecord]:
    return [fakes.failure(fakes.trial(fakes.zero(stage), on=CARD), schema.OOM)]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a run folder with these records."""
    count = iter(range(99))

    def run(*records: list[TrialRecord], **changes: Any) -> Path:
        rows = [each for several in records for each in several]
        return fakes.write_run(tmp_path / f"run{next(count)}", rows, **changes).folder

    return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "baselines.json"


WIDE = (0.03, 0.3, 3.0)
CHECKS: dict[str, tuple[list[list[TrialRecord]], list[list[TrialRecord]], int | None, str]] = {
    # what was saved, what is checked, exit code (None: nothing could be judged), the last line
    "itself": ([ran(), ran(stage=2)], [ran(), ran(stage=2)], 0, "2 compared, 0 regressed"),
    "slower": ([ran()], [ran(0.12)], 3, "1 compared, 1 regressed"),
    "more memory": ([ran()], [ran(gpu_peak_bytes=9 * fakes.GB)], 3, "1 compared, 1 regressed"),
    "no longer runs": ([ran()], [failed()], 3, "1 compared, 1 regressed"),
    "missing row": ([ran(), ran(stage=2)], [ran()], 3, "1 compared, 0 regressed; 1 missing"),
    "row without a baseline": ([ran()], [ran(), ran(stage=3)], 3, "1 compared, 0 regressed; 1 without a baseline"),
    "failed before and after": (
        [ran(), failed(0)],
        [ran(), failed(0)],
        0,
        "1 compared, 0 regressed; 1 failed without a baseline",
    ),
    "one row does not compare": (
        [ran(), ran(stage=2)],
        [ran(), ran(stage=2, optimizer_class="SGD")],
        0,
        "1 compared, 0 regressed; 1 not comparable",
    ),
    "a pass that rests on noise": ([ran(0.1, 0.1, 0.1)], [ran(*WIDE)], None, "1 compared, 0 regressed; 1 too noisy"),
}


@pytest.mark.parametrize("case", CHECKS)
def test_check_compares_each_row_with_its_baseline(
    case: str, write: Write, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, code, last = CHECKS[case]
    assert save_command([write(*before)], path, None) == 0
    capsys.readouterr()
    result = write(*after)
    if code is None:
        with pytest.raises(UsageError, match="noise could hide a regression in every row"):
            check_command([result], path, False)
        assert "too noisy to detect changes below 99.7 %" in capsys.readouterr().out  # by hand in test_gate.py
        assert check_command([result], path, False, ["noisy"]) == 3
    else:
        assert check_command([result], path, False) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)


def test_json_holds_every_entry_and_reasons_left_out_of_fail_on_do_not_fail(
    write: Write, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.1 s → 0.12 s: 5120 → 4266.7 tokens/s, beyond a tolerance of 0.1."""
    save_command([write(ran(), ran(stage=3))], path, 0.1)
    capsys.readouterr()
    result = write(ran(0.12), ran(stage=2))
    assert check_command([result], path, True) == 3
    data = json.loads(capsys.readouterr().out)
    assert data["failed"] == [NAME, "tiny/zero2/seq128", "tiny/zero3/seq128"]
    slow, new, _missing = data["entries"]
    assert (slow["name"], slow["failed"], slow["comparable"], slow["regressions"]) == (NAME, True, True, ["throughput"])
    assert slow["throughput_ratio"] == pytest.approx(0.1 / 0.12)
    assert (new["failed"], new["comparable"], new["has_baseline"]) == (True, True, False)
    same = write(ran(), ran(stage=2))
    for reasons, code in ((["regression"], 0), (["missing"], 3), (["unmatched"], 3)):
        assert check_command([same], path, False, reasons) == code


def test_a_check_that_compares_nothing_does_not_pass(
    write: Write, path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    save_command([write(ran())], path, None)
    capsys.readouterr()
    with pytest.raises(UsageError, match="nothing was checked"):
        check_command([write(ran(0.5), on=fakes.environment(cpu_model="another"))], path, True)
    data = json.loads(capsys.readouterr().out)  # printed all the same
    assert (data["failed"], data["not_comparable"], data["entries"][0]["passed"]) == ([], [NAME], None)
    save_command([write(ran(), ran(stage=2))], path, None)
    junit = path.with_name("junit.xml")
    for case, after in (
        ("no row has a baseline", write(ran(stage=3), failed(0))),
        ("one row is missing, the other not comparable", write(ran(optimizer_class="SGD"))),
    ):
        with subtests.test(case), pytest.raises(UsageError, match="nothing was checked"):
            check_command([after], path, False, ["regression"], junit)
        assert set(outcomes(junit).values()) == {"skipped"}


def test_rows_of_another_run_are_not_expected(write: Write, path: Path) -> None:
    save_command([write(ran(), ran(stage=2))], path, None)
    other = fakes.trial(fakes.zero(1), on=CARD, of=fakes.workload(seq_length=64))
    save_command([write([fakes.success(other)], family="offload")], path, None)
    assert check_command([write(ran(), ran(stage=2))], path, False) == 0
    entries = json.loads(path.read_text())  # a file written before runs were kept
    path.write_text(json.dumps({name: {**entry, "run_id": None} for name, entry in entries.items()}))
    assert check_command([write(ran())], path, False) == 3


def test_several_results_are_runs_of_one_entry_and_varying_runs_are_warned_of(
    write: Write, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """512 tokens in 0.09, 0.1 and 0.11 s: 5689, 5120, 4655 tokens/s; deviation 518 of a mean of 5155 is 10.1 %."""
    save_command([write(ran(each)) for each in (0.09, 0.1, 0.11)], path, None)
    assert len(json.loads(path.read_text())[NAME]["tokens_per_sec_runs"]) == 3
    assert f"{NAME}: tokens/s of its 3 runs varies by 10.1 %" in capsys.readouterr().err


def test_a_script_without_token_ids_is_saved_with_its_samples(
    write: Write, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(command=("train.py", "{config}"), digest="abc", python="python", config_source="command")
    trial = fakes.trial(of=fakes.workload(model="train.py", model_source="script", script=script), on=CARD)
    rows = [
        fakes.success(
            replace(trial, repeat=number), step_seconds=(seconds,) * 10, script=fakes.script_of_samples(trial, 6)
        )
        for number, seconds in enumerate((0.1, 0.11, 0.12))
    ]
    save_command([write(rows)], path, None)
    printed = capsys.readouterr()
    assert "saved train.py/zero0: 54.7 samples/s, peak GPU memory" in printed.out
    assert "train.py/zero0: samples/s of its 3 runs varies by 9.1 %" in printed.err


def test_rows_that_cannot_be_baselines_leave_no_file(write: Write, path: Path, tmp_path: Path) -> None:
    rows = json.loads(fakes.write_run(tmp_path / "flat", ran()).json_path.read_text())
    (tmp_path / "no_machine.json").write_text(json.dumps([{**row, "cpu_logical_cores": None} for row in rows]))
    busy = ran(cpu_cores=16.0, cpu_threads=8, cpu_own_cores=12.0, cpu_other_cores=6.0)
    for result in (write(ran(losses=(None,) * 12)), write(failed()), write(busy), tmp_path / "no_machine.json"):
        with pytest.raises(UsageError, match="nothing was saved"):
            save_command([result], path, None)
    trial = ran()[0].trial
    other = fakes.trial(fakes.zero(1), on=CARD, ds_config={**trial.ds_config, "gradient_clipping": 0.5})
    with pytest.raises(UsageError, match=f"2 rows are called {NAME}"):
        save_command([write(ran(), [fakes.success(other)])], path, None)
    assert not path.exists()


def test_a_flat_json_is_saved_and_checked_like_its_run(write: Write, path: Path, tmp_path: Path) -> None:
    stored = fakes.write_run(tmp_path / "out", ran())
    copied = tmp_path / "copied.json"
    copied.write_text(stored.json_path.read_text())
    assert save_command([copied], path, None) == 0
    assert check_command([stored.folder], path, False) == check_command([copied], path, False) == 0
    assert check_command([write(ran(0.2))], path, False) == 3


# ------------------------------------------------------------------ JUnit XML


def outcomes(path: Path) -> dict[str, str]:
    """Name of each test → its outcome; the totals of the suite count its tests."""
    (suite,) = ElementTree.parse(path).getroot().findall("testsuite")
    cases = suite.findall("testcase")
    seen = {case.attrib["name"]: "passed" if case[0].tag == "system-out" else case[0].tag for case in cases}
    counted = list(seen.values())
    totals = {"tests": len(counted), "failures": counted.count("failure"), "skipped": counted.count("skipped")}
    assert {name: int(suite.attrib[name]) for name in totals} == totals
    return seen


def test_junit_fails_what_exits_3_or_no_longer_trains_and_skips_what_was_not_judged(
    write: Write, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junit = tmp_path / "junit.xml"
    before = str(write(ran(stage=0), ran(), ran(stage=2)))
    after = str(write(ran(stage=0), ran(0.2), failed(2), ran(stage=3)))
    save_command([Path(before)], path, None)
    flags = ["baseline", "check", after, "--baselines", str(path), "--junit", str(junit)]
    assert commands.main([*flags, "--fail-on", "regression"]) == 3
    assert "2,560 against 5,120 (-50.0 %)" in junit.read_text()
    assert {name.split("/")[1]: outcome for name, outcome in outcomes(junit).items()} == {
        "zero0": "passed", "zero1": "failure", "zero2": "failure", "zero3": "skipped"
    }  # fmt: skip
    assert commands.main(flags) == 3  # a row without a baseline fails by default
    assert outcomes(junit)["tiny/zero3/seq128"] == "failure"
    assert commands.main(["compare", before, after, "--junit", str(junit)]) == 0
    expected = {"ZeRO-0": "passed", "ZeRO-1": "passed", "ZeRO-2": "failure", "ZeRO-3": "passed"}
    assert outcomes(junit) == expected
    only_one = str(write(ran(stage=0)))
    assert commands.main(["compare", only_one, after, "--junit", str(junit)]) == 0
    assert outcomes(junit) == expected, "new rows"
    assert commands.main(["compare", after, only_one, "--junit", str(junit)]) == 0
    assert outcomes(junit) == {"ZeRO-0": "passed", "ZeRO-1": "failure", "ZeRO-2": "skipped", "ZeRO-3": "failure"}
    capsys.readouterr()
    missing = str(tmp_path / "missing" / "file")
    for words in (["compare", "a", "b"], ["baseline", "check", "a"]):
        assert commands.main([*words, "--junit", missing]) == 2
        assert f"--junit {missing}: no folder " in capsys.readouterr().err


def test_a_name_that_xml_cannot_hold_is_spelled_out() -> None:
    text = junit_text("s", [TestCase(name="a\x00<b>\x1b", outcome="failure", message='"&\ud800\n')])
    (case,) = ElementTree.fromstring(text.encode())[0]
    assert case.attrib["name"] == "a\\u0000<b>\\u001b"


def test_the_recipe_of_the_page_on_ci_is_one() -> None:
    page = (ROOT / "docs" / "ci_and_python.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(model: .*?)```", page, re.DOTALL)
    assert recipe.check_recipe(recipe_file.parse_recipe(text))["output.repeats"] >= 3
