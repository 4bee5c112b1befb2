"""Shards as real processes side by side: one after the other on the same processors, and read as one result."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_bench.cli.report import build_reports
from ds_bench.system.device_locks import device_names, locked_devices
from tests.support.real_trials import ROOT, Script
from tests.support.slurm import SlurmCluster

RECIPE = """
model: {name: tiny}
training: {seq_len: [16, 32], local_batch_size: 1, steps: 2, warmup_steps: 1}
configurations: {stages: [0, 1]}
launch: {accelerator: cpu, num_gpus: 1}
"""


def test_ctrl_c_ends_a_run_that_waits_and_it_has_begun_nothing(start_script: Callable[..., Script]) -> None:
    with locked_devices(device_names("cpu", [], [0]), pytest.fail):
        script = start_script("zero_stage_comparison.py", "--model", "tiny")
        assert script.process.stderr is not None
        line = script.process.stderr.readline()
        script.process.send_signal(signal.SIGINT)
        _, rest = script.process.communicate(timeout=60)
    assert "another run is using the CPU" in line
    assert (script.process.returncode, rest) == (130, "interrupted\n")
    assert not script.output_dir.exists()


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_array_tasks_run_one_shard_each_and_a_task_run_again_resumes_its_own(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    folder = tmp_path / 'it\'s 5% of; $(touch made) "x"'
    folder.mkdir()
    (folder / "sweep.yaml").write_text(RECIPE)
    words = [str(ROOT / "examples" / "slurm" / "sweep.sbatch"), "2", "sweep.yaml"]
    for_tests = ["--gpus-per-node=0", "--cpus-per-task=4", "--time=10"]
    variables = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    job = slurm.submit("--array=1-2", *for_tests, *words, cwd=folder, **variables)

    def logs() -> list[str]:
        return [path.read_text() for path in folder.glob("*.log")]

    assert slurm.wait_for_job(job, 300) == "COMPLETED", logs()
    results = folder / "results" / f"sweep_{job}"
    runs = sorted((results / "runs").iterdir(), key=lambda path: path.name[-10:])
    assert [run.name.rpartition("_")[2] for run in runs] == ["shard1of2", "shard2of2"]
    reports = build_reports(runs)
    assert sorted(report.environments[0].hostname for report in reports) == ["node1", "node2"]
    assert [len(report.comparison.rows) for report in reports] == [2, 2]
    assert not any("missing" in note or "SLURM" in note for report in reports for note in report.notes)

    # As after a requeue in the middle: the first shard has lost its second row.
    records = (runs[0] / "records.jsonl").read_text().splitlines(keepends=True)
    (runs[0] / "records.jsonl").write_text(records[0])
    again = slurm.submit("--array=1", *for_tests, *words, cwd=folder, **variables, RESULTS=str(results))
    assert slurm.wait_for_job(again, 300) == "COMPLETED", logs()
    assert set((results / "runs").iterdir()) == set(runs)
    assert (runs[0] / "records.jsonl").read_text().startswith(records[0])
    assert [len(report.comparison.rows) for report in build_reports(runs)] == [2, 2]
    assert not (folder / "made").exists()
