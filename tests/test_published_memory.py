"""Predictions against published memory figures; their table is outside the repository, if it is there at all."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ds_bench.models import lookup
from ds_bench.prediction import allocation_trace, model_profile
from ds_bench.system.helper_programs import ToolReply
from tests.support.shared_files import shared_files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
RESULT = ROOT / "results" / "reference" / "published_memory.json"


def test_verdicts_about_published_configurations_are_never_optimistic() -> None:
    """The committed comparison, which docs/prediction.md shows."""
    summary = json.loads(RESULT.read_text(encoding="utf-8"))["summary"]
    assert summary["ran_out"] >= 4
    assert summary["ran_out_but_fits"] == 0
    replayed = summary["errors"]["replayed"]
    assert replayed["points"] >= 9
    assert replayed["median_absolute_error"] <= 0.09


def test_the_page_shows_figures_of_the_committed_comparison() -> None:
    import published_memory

    data = json.loads(RESULT.read_text(encoding="utf-8"))
    points = [{name: value for name, value in row.items() if name != "error"} for row in data["points"]]
    figures = published_memory.markdown([published_memory.Point(**point) for point in points]).splitlines()
    for name, errors in data["summary"]["errors"].items():
        if not errors["points"]:
            continue
        absolute, signed = errors["median_absolute_error"], errors["median_error"]
        figures.append(f"| {name} | {errors['points']} | {100 * absolute:.1f} % | {100 * signed:+.1f} % |")
    page = (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8").partition("## How far off")[2]
    shown = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| group")]
    assert len(shown) > 10
    assert [line for line in shown if line not in figures] == []


def run_forked(
    module: str, *arguments: str, environment: Mapping[str, str], requests: Sequence[Any] = (), **_: Any
) -> ToolReply:
    """``run_tool`` in a fork of this process: importing torch takes most of the time of three programs per model."""
    program = importlib.import_module(f"ds_bench.{module}")
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as answers:
        given.writelines(f"{json.dumps(each)}\n" for each in requests)
        given.seek(0)
        child = os.fork()
        if child == 0:
            try:
                os.environ.update(environment)
                sys.argv[1:], sys.stdin, sys.stdout = arguments, given, answers
                warnings.simplefilter("ignore")
                program.main()
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        answers.seek(0)
        return ToolReply(objects=tuple(map(json.loads, answers)), ending="in a fork")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_errors_are_those_of_the_committed_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    (points,) = shared_files("published", "points.csv")
    import published_memory

    for caller in (lookup, model_profile, allocation_trace):
        monkeypatch.setattr(caller, "run_tool", run_forked)
    models = (f"transformers.models.{family}.modeling_{family}" for family in ("gpt2", "granite", "qwen2"))
    for name in ("deepspeed", "peft", *models):  # so that no fork imports them
        importlib.import_module(name)
    found = published_memory.summarize(published_memory.compare_all(points))
    committed = json.loads(RESULT.read_text(encoding="utf-8"))["summary"]
    for name, errors in committed["errors"].items():
        then, now = errors["median_absolute_error"], found["errors"][name]["median_absolute_error"]
        assert now == (then if then is None else pytest.approx(then, abs=0.005)), name
    assert {name: found[name] for name in ("ran", "ran_out", "ran_out_but_fits")} == {
        name: committed[name] for name in ("ran", "ran_out", "ran_out_but_fits")
    }
