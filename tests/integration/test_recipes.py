"""A recipe as a user runs it, with real DeepSpeed on two CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.real_trials import ROOT

pytestmark = [pytest.mark.deepspeed, pytest.mark.usefixtures("built_ops")]


@pytest.mark.slow
def test_the_small_recipe_trains_every_row_of_a_sweep_and_is_resumed(tmp_path: Path) -> None:
    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ds_bench", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)

    recipe = (
        "run",
        "recipes/tiny_cpu.yaml",
        "--stages",
        "0",
        "--strategies",
        "cpu_optimizer",
        "--output-dir",
        tmp_path,
    )
    begun = run(*recipe, "--set", "training.seq_len=[16, 32]", "--budget", "0.001")
    assert begun.returncode == 0, begun.stderr
    assert "runs the 3 trials left" in begun.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    ended = run("run", "--resume", folder)
    assert ended.returncode == 0, ended.stderr
    flat = json.loads((tmp_path / f"{folder.name}.json").read_text(encoding="utf-8"))
    assert [(row["seq_length"], row["strategy"], row["num_gpus"], row["success"]) for row in flat] == [
        (length, name, 2, True) for length in (16, 32) for name in ("zero0", "cpu_optimizer")
    ]
    assert "2 points · tiny · 2 CPU ranks" in ended.stdout
