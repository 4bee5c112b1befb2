"""``--monitor`` with real DeepSpeed: steps can be followed while a trial runs, and are those of its record."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_trials import ROOT, Script

pytestmark = [pytest.mark.deepspeed, pytest.mark.usefixtures("built_ops")]
FLAGS = ("--model", "tiny", "--batch-size", "2", "--seq-length", "32", "--num-gpus", "2", "--accelerator", "cpu")


@pytest.mark.slow
def test_steps_can_be_followed_while_a_trial_runs_and_are_those_of_its_record(tmp_path: Path) -> None:
    command = [
        *(sys.executable, str(ROOT / "zero_stage_comparison.py"), *FLAGS, "--stages", "1", "--monitor"),
        *("--warmup-steps", "2", "--num-steps", "60", "--output-dir", str(tmp_path)),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    script, seen = Script(process, tmp_path), set[int]()

    def followed() -> bool:
        seen.update(len(path.read_bytes().splitlines()) for path in tmp_path.glob("runs/*/trials/*/steps.jsonl"))
        return len(seen - {0}) >= 2  # it grew while it was watched

    script.wait_for(followed)
    code, _, err = script.wait()
    assert code == 0, err
    (path,) = tmp_path.glob("runs/*/trials/*/steps.jsonl")
    steps: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    (record,) = [json.loads(line) for line in (path.parents[2] / "records.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(62))
    assert [step["phase"] for step in steps] == ["warmup"] * 2 + ["measured"] * 60
    ranks = record["ranks"]
    losses = [math.fsum(values) / len(ranks) for values in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-6)
    seconds = [max(values) for values in zip(*(rank["step_seconds"] for rank in ranks), strict=True)]
    assert [step["seconds"] for step in steps[2:]] == seconds
    assert [step["tokens_per_second"] for step in steps[2:]] == pytest.approx([2 * 2 * 32 / each for each in seconds])
    assert max(step["host_resident_bytes"] for step in steps) <= sum(rank["host_peak_bytes"] for rank in ranks)
    assert not list(path.parent.glob("*.steps"))
