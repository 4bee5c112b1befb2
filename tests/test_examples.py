"""The files in ``examples``: that they are well formed and request what they must. Another test runs Slurm's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import yaml

from ds_bench.cli import arguments, commands
from tests.support.real_trials import ROOT

EXAMPLES = ROOT / "examples"


def test_the_kubernetes_job_requests_what_a_run_needs_and_its_flags_are_ours() -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes" / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert (job["spec"]["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert pod["terminationGracePeriodSeconds"] > 60, "trials end, then rows are written"
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in mounted["/work/results"]
    assert 'ENTRYPOINT ["ds-compare"]' in (ROOT / "Dockerfile").read_text()
    values = commands.build_parser().parse_args(container["args"])
    assert str(values.nvme_path) in mounted
    assert str(values.output_dir) in mounted


def test_the_batch_script_is_asked_to_end_before_its_time_limit_and_its_examples_parse() -> None:
    lines = (EXAMPLES / "slurm" / "compare.sbatch").read_text().splitlines()
    asked = dict(line.removeprefix("#SBATCH --").split("=") for line in lines if line.startswith("#SBATCH"))
    assert asked["signal"] == "TERM@120", "the run ends as on Ctrl-C"
    for line in lines:
        if line.startswith("#   sbatch"):
            arguments.parse("zero", "x", line.partition("compare.sbatch")[2].split())


def test_a_requeued_shard_resumes_only_a_folder_that_can_be_resumed(tmp_path: Path) -> None:
    (python := tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    runs = tmp_path / "results" / "runs"
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "1", "RESULTS": "results"}

    def words() -> str:
        script = str(ROOT / "examples" / "slurm" / "sweep.sbatch")
        return subprocess.run(
            ["bash", script, "2", "a.yaml"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
        ).stdout

    (runs / "comparison_1_shard1of2").mkdir(parents=True)
    assert "--resume" not in words()
    (runs / "comparison_2_shard1of2").mkdir()
    (runs / "comparison_2_shard1of2" / "run.json").touch()
    assert words().endswith("a.yaml --resume results/runs/comparison_2_shard1of2\n")
