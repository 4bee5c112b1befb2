"""Comparisons inside allocations of a real Slurm cluster."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.support.real_trials import ROOT, SUPPORT, free_port, rows_of
from tests.support.slurm import SlurmCluster

pytestmark = [pytest.mark.deepspeed, pytest.mark.usefixtures("built_ops")]

SMALL = ("--model", "tiny", "--batch-size", "2", "--seq-length", "32", "--num-steps", "3", "--warmup-steps", "1")


def script(output: Path, *flags: str) -> list[str]:
    command = [sys.executable, str(ROOT / "zero_stage_comparison.py"), "--accelerator", "cpu", *SMALL]
    return [*command, "--output-dir", str(output), *flags]


def left_on_nodes(slurm: SlurmCluster) -> str:
    """Processes and temporary files of ours on the two nodes."""
    words = "ps ax -o args | grep ds_bench | grep -v grep; "
    words += "ls $TMPDIR /dev/shm | grep -e ds_bench -e deepspeed | grep -v ds_bench_lock_"
    return slurm.run("srun", "-N2", "-n2", "sh", "-c", words).stdout


@pytest.mark.slow
def test_a_batch_job_of_two_nodes_is_one_comparison_whose_rest_the_next_job_runs_after_slurms_signal(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm signals every step at once: the run, the agents that srun started, and the ranks."""
    again = ["--model-factory", "faults:hangs_at_stage_2", "--master-addr", "127.0.0.1"]
    example = [f"--output={tmp_path}/log", "--nodes=2", "--gpus-per-node=0", "--cpus-per-task=1"]
    example += [str(ROOT / "examples" / "slurm" / "compare.sbatch")]
    path = os.pathsep.join([str(Path(sys.executable).parent), slurm.environment["PATH"]])
    variables = {"PYTHONPATH": str(SUPPORT), "PATH": path}
    flags = ["--stages", "1", "2", *SMALL[2:], "--accelerator", "cpu", "--output-dir", str(tmp_path / "out"), *again]
    job = slurm.submit(*example, *flags, cwd=ROOT, **variables)
    end = time.monotonic() + 200
    while len(list(tmp_path.glob("out/runs/*/trials/01_*/rank*.beat"))) < 2:
        assert time.monotonic() < end, (tmp_path / "log").read_text()
        assert slurm.state(job) in ("PENDING", "RUNNING"), (tmp_path / "log").read_text()
        time.sleep(0.5)
    assert slurm.run("scancel", "--signal=TERM", job).returncode == 0
    assert slurm.wait_for_job(job, 60) == "FAILED"
    log = (tmp_path / "log").read_text()
    rows = [(row["status"], row["num_gpus"], row["num_nodes"]) for row in rows_of(tmp_path / "out")]
    assert rows == [("✅ Success", 2, 2), ("⏹️ Interrupted", 2, 2)], log
    assert "interrupted; continue with:" in log
    assert left_on_nodes(slurm) == ""
    (run,) = tmp_path.glob("out/runs/*")
    first = json.loads((run / "records.jsonl").read_text().splitlines()[0])
    assert [rank["hostname"] for rank in first["ranks"]] == ["node1", "node2"]
    job = slurm.submit(*example, "--resume", str(run), *again, cwd=ROOT, FAULTS_FIXED="1", **variables)
    assert slurm.wait_for_job(job, 120) == "COMPLETED", (tmp_path / "log").read_text()
    assert [(row["status"], row["num_nodes"]) for row in rows_of(tmp_path / "out")] == [("✅ Success", 2)] * 2


@pytest.mark.slow
def test_a_step_without_srun_and_scontrol_as_in_a_container_is_one_comparison(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for program in (program for folder in ("/bin", "/usr/bin") for program in Path(folder).iterdir()):
        if program.name not in ("srun", "scontrol") and not (tools / program.name).is_symlink():
            (tools / program.name).symlink_to(program)
    inside = ["env", f"PATH={Path(sys.executable).parent}:{tools}", "MASTER_ADDR=127.0.0.1"]
    inside.append("MASTER_PORT=" + str(free_port()))
    done = slurm.run("srun", "-N2", "-n2", *inside, *script(tmp_path / "out", "--stages", "1"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(row["status"], row["num_gpus"], row["num_nodes"]) for row in rows_of(tmp_path / "out")] == [
        ("✅ Success", 2, 2)
    ], done.stderr
    assert left_on_nodes(slurm) == ""
