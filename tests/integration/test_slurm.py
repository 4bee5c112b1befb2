"""Comparisons inside allocations of a real Slurm cluster, and under Open MPI's mpirun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_trials import ROOT
from tests.support.slurm import SlurmCluster

pytestmark = [pytest.mark.deepspeed, pytest.mark.usefixtures("built_ops")]

SMALL = ("--model", "tiny", "--batch-size", "2", "--seq-length", "32", "--num-steps", "3", "--warmup-steps", "1")


def script(output: Path, *flags: str) -> list[str]:
    command = [sys.executable, str(ROOT / "zero_stage_comparison.py"), "--accelerator", "cpu", *SMALL]
    return [*command, "--output-dir", str(output), *flags]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*_comparison_*.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def test_two_tasks_of_srun_are_one_comparison_on_two_ranks(slurm: SlurmCluster, tmp_path: Path) -> None:
    done = slurm.run("srun", "-N1", "-n2", *script(tmp_path / "out", "--stages", "0", "1"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(row["status"], row["num_gpus"]) for row in rows_of(tmp_path / "out")] == [("✅ Success", 2)] * 2
    assert len(list(tmp_path.glob("out/runs/*"))) == 1, "the second task made a run of its own"


def test_two_processes_of_mpirun_are_one_comparison_on_two_ranks(tmp_path: Path) -> None:
    if (mpirun := shutil.which("mpirun")) is None:
        pytest.skip("Open MPI's mpirun is not installed")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [mpirun, "--oversubscribe", "-n", "2", *script(tmp_path / "out", "--stages", "1")],
        env={**os.environ, **allowed}, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(tmp_path / "out")
    assert (row["status"], row["num_gpus"]) == ("✅ Success", 2)
    assert len(list(tmp_path.glob("out/runs/*"))) == 1
