"""Shards as real processes side by side: one after the other on the same processors, and read as one result."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ds_bench.cli.report import build_reports
from ds_bench.system.device_locks import locked_devices, processor_names
from tests.support.real_trials import ROOT, Script
from tests.support.slurm import SlurmCluster

RECIPE = """
model: {name: tiny}
training: {seq_len: [16, 32], local_batch_size: 1, steps: 2, warmup_steps: 1}
configurations: {stages: [0, 1]}
launch: {accelerator: cpu, num_gpus: 1}
"""


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_two_shards_started_side_by_side_take_turns_and_are_read_as_one_result(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(RECIPE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_BENCH_LOCK_DIR": str(tmp_path)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "ds_bench", "run", "sweep.yaml", "--shard", f"{number}/2"],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in (1, 2)
    ]
    ended = [(run, *run.communicate(timeout=300)) for run in runs]
    assert [run.returncode for run, _, _ in ended] == [0, 0], ended
    waited = [errors for _, _, errors in ended if "waiting for processors" in errors]
    pids = [str(run.pid) for run in runs]
    assert len(waited) == 1
    assert any(f"which process {pid} uses" in waited[0] for pid in pids)
    folders = sorted((tmp_path / "results" / "runs").glob("*of2"))
    spans = []
    for folder in folders:
        records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
        starts = [datetime.fromisoformat(record["started_at"]) for record in records]
        spans.append((starts[0], starts[-1] + timedelta(seconds=records[-1]["wall_seconds"])))
    first, second = sorted(spans)
    assert first[1] <= second[0] + timedelta(seconds=1)  # starts are stored in whole seconds
    reports = build_reports(folders)
    assert [(r.comparison.rows[0].label, len(r.comparison.rows)) for r in reports] == [("ZeRO-0", 2)] * 2
    assert not list(tmp_path.glob("ds_bench_lock_*"))


def test_ctrl_c_ends_a_run_that_waits_and_it_has_begun_nothing(start_script: Callable[..., Script]) -> None:
    with locked_devices(processor_names(), pytest.fail):
        script = start_script("zero_stage_comparison.py", "--model", "tiny")
        assert script.process.stderr is not None
        line = script.process.stderr.readline()
        script.process.send_signal(signal.SIGINT)
        _, rest = script.process.communicate(timeout=60)
    assert line.endswith(f", which process {os.getpid()} uses …\n")
    assert (script.process.returncode, rest) == (130, "interrupted\n")
    assert not script.output_dir.exists()


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_an_array_of_two_shards_runs_in_slurm_and_a_lost_one_is_submitted_again(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    folder = tmp_path / 'it\'s 5% of; $(touch made) "x"'
    folder.mkdir()
    (folder / "sweep.yaml").write_text(RECIPE)

    def ds_bench(*words: str) -> str:
        done = slurm.run(sys.executable, "-m", "ds_bench", *words, cwd=folder, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr
        return done.stdout

    arguments = "--sbatch-args=--nodes=1 --cpus-per-task=4 --time=10 --comment 'it # is; \"x\"'"
    shown = ds_bench("run", "sweep.yaml", "--submit", "slurm", "--shards", "2", arguments).splitlines()
    job = shown[0].split()[2].rstrip(":")
    (submission,) = folder.glob("results/slurm_*")

    def logs() -> list[str]:
        return [path.read_text() for path in submission.glob("*.log")]

    assert slurm.wait_for_job(job, 300) == "COMPLETED", logs()
    assert {path.name for path in submission.glob("*.log")} == {f"shard{n}_{job}.log" for n in (1, 2)}
    results = sorted((submission / "runs").iterdir(), key=lambda path: path.name[-10:])
    reports = build_reports(results)
    assert sorted(report.environments[0].hostname for report in reports) == ["node1", "node2"]
    assert [len(report.comparison.rows) for report in reports] == [2, 2]
    assert not any("missing" in note or "SLURM" in note for report in reports for note in report.notes)
    report, again = (line.partition(": ")[2] for line in shown if "Report" in line or "again" in line)
    in_shell = slurm.run("bash", "-c", f"'{sys.executable}' {report.removeprefix('python ')}", PYTHONPATH=str(ROOT))
    assert (in_shell.returncode, in_shell.stderr) == (0, "")

    shutil.rmtree(results[0])
    (line,) = {note for report in build_reports(results[1:]) for note in report.notes if "missing" in note}
    assert line.startswith("shard 1 of 2 is missing: python -m ds_bench run --shard 1/2 --output-dir ")
    assert line.endswith(" sweep.yaml")
    job = slurm.submit(*shlex.split(again)[1:], PYTHONPATH=str(ROOT))
    assert slurm.wait_for_job(job, 300) == "COMPLETED", logs()
    assert not any("missing" in note for note in build_reports(list((submission / "runs").iterdir()))[0].notes)
    assert not (folder / "made").exists()
