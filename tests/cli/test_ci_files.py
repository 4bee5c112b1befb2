"""Files for CI systems: JUnit XML of ``baseline check`` and ``compare``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ds_bench.cli import commands
from ds_bench.config import recipe, recipe_file
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.real_trials import ROOT

CARD = fakes.placement(accelerator="cuda")


def ran(stage: int, *seconds: float, **changes: Any) -> list[TrialRecord]:
    """One run for each of ``seconds``, the time of each step."""
    trials = [
        fakes.trial(fakes.zero(stage), on=CARD, repeat=number, trial_id=f"{number}_zero{stage}")
        for number in range(len(seconds))
    ]
    return [fakes.success(trial, step_seconds=[s] * 10, **changes) for trial, s in zip(trials, seconds, strict=True)]


def failed(stage: int) -> TrialRecord:
    return fakes.failure(fakes.trial(fakes.zero(stage), on=CARD))


def run(folder: Path, *records: TrialRecord) -> str:
    return str(fakes.write_run(folder, records).folder)


def outcomes(path: Path) -> dict[str, tuple[str, str]]:
    """Name of each test → its outcome and message; the totals of the suite count its tests."""
    (suite,) = ElementTree.parse(path).getroot().findall("testsuite")
    seen = {}
    for case in suite.findall("testcase"):
        (child,) = case
        outcome = "passed" if child.tag == "system-out" else child.tag
        seen[case.attrib["name"]] = (outcome, child.text or child.attrib["message"])
    counted = [outcome for outcome, _ in seen.values()]
    totals = {"tests": len(counted), "failures": counted.count("failure"), "skipped": counted.count("skipped")}
    assert {name: int(suite.attrib[name]) for name in totals} == totals
    return seen


def test_a_check_as_junit_fails_what_exits_3_and_skips_what_was_not_judged(tmp_path: Path) -> None:
    baselines, junit = str(tmp_path / "baselines.json"), tmp_path / "junit.xml"
    before = run(tmp_path / "before", *ran(0, 0.1), *ran(1, 0.1), *ran(2, 0.1))
    after = run(tmp_path / "after", *ran(0, 0.1), *ran(1, 0.2), failed(2), *ran(3, 0.1))
    assert commands.main(["baseline", "save", before, "--baselines", baselines]) == 0
    flags = ["baseline", "check", after, "--baselines", baselines, "--junit", str(junit)]
    assert commands.main([*flags, "--fail-on", "regression"]) == 3
    seen = outcomes(junit)
    assert {name.split("/")[1]: outcome for name, (outcome, _) in seen.items()} == {
        "zero0": "passed", "zero1": "failure", "zero2": "failure", "zero3": "skipped"
    }  # fmt: skip
    assert "2,560 against 5,120 (-50.0 %)" in seen["tiny/zero1/seq128"][1]
    assert commands.main(flags) == 3  # a row without a baseline fails by default
    assert outcomes(junit)["tiny/zero3/seq128"][0] == "failure"


def test_a_comparison_as_junit_fails_rows_that_no_longer_train(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    before = run(tmp_path / "before", *ran(0, 0.1), *ran(1, 0.1), *ran(2, 0.1))
    after = run(tmp_path / "after", *ran(0, 0.2), failed(1))
    assert commands.main(["compare", before, after, "--junit", str(junit)]) == 0
    assert {name: outcome for name, (outcome, _) in outcomes(junit).items()} == {
        "ZeRO-0": "passed", "ZeRO-1": "failure", "ZeRO-2": "failure"
    }  # fmt: skip


def test_a_name_that_xml_cannot_hold_is_spelled_out(tmp_path: Path) -> None:
    from ds_bench.report.export_formats import TestCase, junit_text

    text = junit_text("s", [TestCase(name="a\x00<b>\x1b", outcome="failure", message='"&\ud800\n')])
    (case,) = ElementTree.fromstring(text.encode())[0]
    assert case.attrib["name"] == "a\\u0000<b>\\u001b"


def test_a_file_that_cannot_be_written_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing" / "file")
    for words in (["compare", "a", "b", "--junit"], ["baseline", "check", "a", "--junit"], ["report", "a", "--html"]):
        assert commands.main([*words, missing]) == 2
        assert capsys.readouterr().err == (
            f"ds_bench: {words[-1]} {missing}: no folder {tmp_path / 'missing'} (make it first)\n"
        )


def test_the_recipe_of_the_page_on_ci_is_one() -> None:
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(model: .*?)```", page, re.DOTALL)
    assert recipe.check_recipe(recipe_file.parse_recipe(text))["output.repeats"] >= 3
