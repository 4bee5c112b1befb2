"""Comparisons inside allocations of a real Slurm cluster."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path

import pytest

from tests.support.real_trials import ROOT, SUPPORT, rows_of
from tests.support.slurm import SlurmCluster

pytestmark = [pytest.mark.deepspeed, pytest.mark.usefixtures("built_ops")]

SMALL = ("--model", "tiny", "--batch-size", "2", "--seq-length", "32", "--num-steps", "3", "--warmup-steps", "1")


def script(output: Path, *flags: str) -> list[str]:
    command = [sys.executable, str(ROOT / "zero_stage_comparison.py"), "--accelerator", "cpu", *SMALL]
    return [*command, "--output-dir", str(output), *flags]


def left_on_nodes(slurm: SlurmCluster) -> str:
    """Processes and temporary files of ours on the two nodes."""
    words = "ps ax -o args | grep ds_bench | grep -v grep; ls $TMPDIR /dev/shm | grep -e ds_bench -e deepspeed"
    return slurm.run("srun", "-N2", "-n2", "sh", "-c", words).stdout


def test_two_tasks_of_srun_are_one_comparison_on_two_ranks(slurm: SlurmCluster, tmp_path: Path) -> None:
    done = slurm.run("srun", "-N1", "-n2", *script(tmp_path / "out", "--stages", "0", "1"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(row["status"], row["num_gpus"]) for row in rows_of(tmp_path / "out")] == [("✅ Success", 2)] * 2
    assert len(list(tmp_path.glob("out/runs/*"))) == 1, "the second task made a run of its own"


@pytest.mark.slow
def test_a_batch_job_of_two_nodes_is_one_comparison_on_both(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The agents and the ranks are started through srun; nodes have namespaces, so each host ends its own processes."""
    flags = ["--ntasks-per-node=1", "--nodes=2", f"--output={tmp_path}/log"]
    command = shlex.join(script(tmp_path / "out", "--stages", "0", "3", "--master-addr", "127.0.0.1"))
    state = slurm.wait_for_job(slurm.submit(*flags, "--wrap", command, cwd=tmp_path), 240)
    log = (tmp_path / "log").read_text()
    assert state == "COMPLETED", log
    rows = rows_of(tmp_path / "out")
    assert [(row["status"], row["num_gpus"], row["num_nodes"]) for row in rows] == [("✅ Success", 2, 2)] * 2, log
    (records,) = tmp_path.glob("out/runs/*/records.jsonl")
    for line in records.read_text().splitlines():
        assert [rank["hostname"] for rank in json.loads(line)["ranks"]] == ["node1", "node2"]
    assert left_on_nodes(slurm) == ""


@pytest.mark.slow
def test_slurms_signal_to_a_job_of_two_nodes_leaves_nothing_on_them_and_the_next_job_resumes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm signals every step at once: the run, the agents and the ranks."""
    again = ["--model-factory", "faults:hangs_at_stage_2", "--master-addr", "127.0.0.1"]
    hangs = ["--stages", "2", *SMALL[2:], "--accelerator", "cpu", *again]
    example = [f"--output={tmp_path}/log", "--nodes=2", "--gpus-per-node=0", "--cpus-per-task=1"]
    example += [str(ROOT / "examples" / "slurm" / "compare.sbatch")]
    path = os.pathsep.join([str(Path(sys.executable).parent), slurm.environment["PATH"]])
    out = ["--output-dir", str(tmp_path / "out")]
    variables = {"PYTHONPATH": str(SUPPORT), "PATH": path}
    job = slurm.submit(*example, *hangs, *out, cwd=ROOT, **variables)
    end = time.monotonic() + 120
    while len(list(tmp_path.glob("out/runs/*/trials/*/rank*.beat"))) < 2:
        assert time.monotonic() < end, (tmp_path / "log").read_text()
        assert slurm.state(job) in ("PENDING", "RUNNING"), (tmp_path / "log").read_text()
        time.sleep(0.5)
    assert slurm.run("scancel", "--signal=TERM", job).returncode == 0
    assert slurm.wait_for_job(job, 60) == "FAILED"
    log = (tmp_path / "log").read_text()
    assert [row["status"] for row in rows_of(tmp_path / "out")] == ["⏹️ Interrupted"], log
    assert "interrupted; go on with:" in log
    assert left_on_nodes(slurm) == ""
    (run,) = tmp_path.glob("out/runs/*")
    job = slurm.submit(*example, "--resume", str(run), *again, cwd=ROOT, FAULTS_MENDED="1", **variables)
    assert slurm.wait_for_job(job, 120) == "COMPLETED", (tmp_path / "log").read_text()
    assert [(row["status"], row["num_nodes"]) for row in rows_of(tmp_path / "out")] == [("✅ Success", 2)]


@pytest.mark.slow
def test_slurms_signal_before_the_limit_and_the_limit_itself_keep_the_rows_and_the_next_job_resumes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Through the batch script in ``examples``; Slurm looks at limits every 30 s, and they are whole minutes."""
    hangs = ["--model-factory", "faults:hangs_at_stage_2"]
    flags = ["--accelerator", "cpu", "--num-gpus", "2", "--stages", "1", "2", *SMALL[2:], *hangs]
    path = os.pathsep.join([str(Path(sys.executable).parent), slurm.environment["PATH"]])
    variables = {"PYTHONPATH": str(SUPPORT), "PATH": path}
    example = ["--gpus-per-node=0", "--cpus-per-task=2", str(ROOT / "examples" / "slurm" / "compare.sbatch")]
    limits = {"signal": ("--time=3", "--signal=TERM@120"), "limit": ("--time=1", "--signal=TERM@0")}
    jobs = {}
    for name, limit in limits.items():
        log, out = f"--output={tmp_path}/{name}.log", ["--output-dir", str(tmp_path / name)]
        locks = {"DS_BENCH_LOCK_DIR": str(tmp_path / f"locks_{name}")}  # the two do not wait for each other
        jobs[name] = slurm.submit(*limit, log, *example, *flags, *out, cwd=ROOT, **variables, **locks)
    assert {name: slurm.wait_for_job(job, 180) for name, job in jobs.items()} == {
        "signal": "FAILED",
        "limit": "TIMEOUT",
    }
    for name in limits:
        log_text = (tmp_path / f"{name}.log").read_text()
        assert [row["status"] for row in rows_of(tmp_path / name)] == ["✅ Success", "⏹️ Interrupted"], log_text
        assert "Exited with exit code 130" in log_text
        assert "interrupted; go on with: python zero_stage_comparison.py --resume" in log_text
    (run,) = (tmp_path / "signal" / "runs").iterdir()
    again = ["--resume", str(run), *hangs]
    job = slurm.submit(f"--output={tmp_path}/again.log", *example, *again, cwd=ROOT, FAULTS_MENDED="1", **variables)
    assert slurm.wait_for_job(job, 120) == "COMPLETED"
    assert [row["status"] for row in rows_of(tmp_path / "signal")] == ["✅ Success"] * 2
    assert "[1/1] ZeRO-2" in (tmp_path / "again.log").read_text()
