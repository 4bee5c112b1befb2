"""scripts/gpu_check.sh: whole on a simulated card, and with an interpreter that answers for the product: what is kept
however a call ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.launch.ops import OpState
from ds_bench.prediction.predicted_memory import Prediction
from ds_bench.system import gpu_state, processes
from tests.support import fakes
from tests.support.nvml_replay import NvmlReplay
from tests.support.real_trials import ROOT, SUPPORT, gone_within
from tests.support.simulated_card import CardPlan, write_plans

ROW = {
    "strategy": "zero3", "status": "Success", "success": True, "model": "tiny", "batch_size": 2, "seq_length": 64,
    "num_steps": 5, "avg_step_time_ms": 20.0, "gpu_peak_gb": 8.0, "start_seconds": 3.0, "caveats": "", "launch": "warm",
    "num_gpus": 1, "predicted_over_measured": 0.75,
}  # fmt: skip
INTERPRETER = """#!/bin/bash
case "$1" in -c | - | -m) exec {python} "$@" ;; esac
name=$(basename "$1" .py)
[[ $name == gpu_check ]] && exec {python} "$@"
while (($#)); do
    [[ $1 == --resume ]] && resumed="goes on with $2"
    [[ $1 == --output-dir ]] && cp {rows} "$2/zero_comparison_1.json"
    [[ $1 == --output-dir ]] && cp -r {runs} "$2/runs"
    [[ $1 == --output && $name == fidelity ]] &&
        echo '{{"ratio_to_bare": {{"warm": {{"median": 1.01, "min": 0.99, "max": 1.02}}}}}}' >"$2"
    shift
done
echo "GPU-12345678-90ab-cdef-1234-567890abcdef in $PWD $resumed"
[[ $name == "$HANGS" ]] && sleep 600
exit 0
"""

NVIDIA_SMI = """GPU 00000000:DB:00.0
    Product Name                          : NVIDIA H100
    Serial Number                         : 1650124008279
    GPU UUID                              : GPU-f7b02328-d6fe-5b1f-9683-15041689bb03
    Processes
        Process ID                        : 77
            Name                          : python of_mine.py
"""


def write_run(folder: Path) -> None:
    """A row predicted at 2 GB that took 1 GB, and one that failed, each with a log of its rank."""
    found = Prediction(gpu={"parameters": 2 * fakes.GB}, host={}, nvme={}, phase="update", ledger={})
    trial = fakes.trial(fakes.zero(3), on=fakes.placement(accelerator="cuda"))
    sizes = dict.fromkeys(("gpu_peak_bytes", "gpu_init_peak_bytes", "gpu_peak_reserved_bytes"), fakes.GB)
    sizes |= {"gpu_device_used_bytes": fakes.GB, "gpu_reserved_bytes": fakes.GB}
    good = fakes.success(replace(trial, prediction=found.to_dict()), **sizes)
    bad = fakes.failure(replace(trial, trial_id="99_bad", repeat=1))
    for record in (good, bad):
        logs = folder / "run_1/trials" / record.trial.trial_id
        logs.mkdir(parents=True)
        (logs / "rank0.log").write_text("line\n" * 50_000)
    lines = [json.dumps(record.to_dict()) for record in (good, bad)]
    (folder / "run_1/run.json").write_text("{}")
    (folder / "run_1/records.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def start(tmp_path: Path) -> Any:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([ROW]))
    write_run(tmp_path / "runs")
    python = tmp_path / "python"
    python.write_text(INTERPRETER.format(python=sys.executable, rows=rows, runs=tmp_path / "runs"))
    python.chmod(0o755)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat <<'END'\n{NVIDIA_SMI}END\n")
    smi.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    def go(steps: str, hangs: str = "", stderr: int | None = None, **variables: str) -> subprocess.Popen[str]:
        given = {"GPU_CHECK_ACCELERATOR": "cpu", "GPU_CHECK_MODELS": "tiny", "STEPS": steps, "HANGS": hangs}
        return subprocess.Popen(
            [str(ROOT / "scripts/gpu_check.sh"), str(tmp_path / "out")],
            cwd=ROOT,
            env={**os.environ, **given, "PYTHON": str(python), "PATH": path, **variables},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    return go


def kept(folder: Path) -> dict[str, str]:
    """Path in the archive → text."""
    with tarfile.open(folder / "out.tar.gz") as archive:
        files = {name: archive.extractfile(name) for name in archive.getnames()}
        return {name.removeprefix("out/"): file.read().decode() for name, file in files.items() if file}


def test_a_call_that_ends_reports_and_archives_everything_but_names(start: Any, tmp_path: Path) -> None:
    out, _ = start("tiny-zero launch short fidelity").communicate(timeout=120)
    files = kept(tmp_path)
    assert {"tiny-zero/zero_comparison_1.json", "fidelity/figures.json", "report.txt", "steps.json"} <= files.keys()
    logs = {name: len(text) for name, text in files.items() if name.startswith("tiny-zero/") and "rank0.log" in name}
    assert logs == {"tiny-zero/runs/run_1/trials/99_bad/rank0.log": 100_000}, "of the row that failed, its end"
    assert files["nvidia_smi.txt"].split() == ["GPU", "Product", "Name", ":", "NVIDIA", "H100"]
    assert files["tiny-zero/log"] == "GPU-UUID in . \n"
    assert '"hostname": "HOST"' in files["tiny-zero/runs/run_1/records.jsonl"]
    assert not [name for name, text in files.items() if str(ROOT) in text]
    assert "zero3                  20.00      20.00      1.000            3.0            3.0" in out
    assert "product (warm) / bare loop 1.010 (0.990 to 1.020)" in out
    assert "short sequences at stage 3: 8.000 GB allocated, 2.000 GB more than predicted" in out
    (row,) = re.findall(r"^tiny-zero +ZeRO-3 +(2.*)", out, re.MULTILINE)
    assert row.split() == "2.00 1.00 2.00 8.60 1.00 8.60 2.00 1.00 2.00 1.00, 1.00; step (rule)".split()
    numbers = "least 2.00 GB, measured 1.00; peak allocated 2.00 GB, measured 1.00"
    assert f"prediction off: tiny-zero ZeRO-3: {numbers}\n" in out, "what is reserved is an upper bound"
    assert "left for the next call: probe" in out
    # The next call goes on with what is left.
    again, _ = start("", BUDGET_SECONDS="16").communicate(timeout=120)
    assert "tiny-zero" not in again.partition("left for the next call:")[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_call_that_is_cut_short_keeps_finished_steps_and_the_next_goes_on(
    start: Any, tmp_path: Path, number: int
) -> None:
    process = start("tiny-zero tiny-offload", hangs="offload_comparison")
    wait_for(tmp_path / "out/tiny-offload/log")
    below = processes.descendants(process.pid)
    if number == signal.SIGKILL:
        os.killpg(process.pid, number)
        processes.send_signal(below, number)  # as the end of a machine does, which leaves nothing
    else:
        process.send_signal(number)
    process.communicate(timeout=60)
    files = kept(tmp_path)
    assert "tiny-zero/zero_comparison_1.json" in files
    if number == signal.SIGTERM:
        assert "step tiny-offload was cut short" in files["report.txt"]
        assert "tiny-offload/log" in files
        assert not list(tmp_path.glob("*.tmp")), "half an archive is left"
    assert gone_within(below, 60) == set()
    start("tiny-offload").communicate(timeout=60)
    log = (tmp_path / "out/tiny-offload/log").read_text().splitlines()
    assert log[-1].endswith(f"goes on with {tmp_path}/out/tiny-offload/runs/run_1")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not (path.is_file() and path.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_within_the_budget_and_named(start: Any, tmp_path: Path) -> None:
    out, _ = start("tiny-zero fidelity", hangs="zero_stage_comparison", BUDGET_SECONDS="45").communicate(timeout=180)
    assert "(timed out)" in out
    assert "step tiny-zero ended with 124" in out
    assert "not begun, the budget is spent: fidelity\n" in out
    assert "fidelity" in out.partition("left for the next call:")[2]
    steps = {step["name"]: step for step in json.loads((tmp_path / "out/steps.json").read_text())}
    assert steps["tiny-zero"]["timed_out"]


def test_all_blocking_problems_are_listed_before_the_first_step(start: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        """
from importlib import metadata
installed = metadata.version
def version(name):
    if name in ("hjson", "deepspeed", "jinja2", "adjustText"):
        raise metadata.PackageNotFoundError(name)
    return installed(name)
metadata.version = version
"""
    )
    process = start("tiny-zero", PYTHONPATH=str(tmp_path), stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert {tuple(line.split(": ")[1:3]) for line in out.splitlines()[:-1]} == {
        ("warning", "jinja2"),
        ("warning", "adjustText"),
        ("problem", "hjson"),
        ("problem", "deepspeed"),
    }
    assert "make_wheels.sh" in out.splitlines()[-1]
    assert not (tmp_path / "out" / "steps.json").exists()


def test_the_probe_and_a_comparison_on_a_simulated_card_are_read_back(
    built_ops: dict[str, OpState], tmp_path: Path
) -> None:
    out, variables = tmp_path / "out", write_plans(tmp_path / "machine", CardPlan())
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(SUPPORT)])
    variables |= {"GPU_CHECK_MODELS": "tiny", "STEPS": "probe short axes-lion", "PYTHON": sys.executable}
    done = subprocess.run(
        [str(ROOT / "scripts/gpu_check.sh"), str(out)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks can be forked: yes" in done.stdout
    assert "simulated cards, to try the plumbing" in done.stdout
    assert "\naxes-lion: left out, DeepSpeed's Lion is a CUDA kernel\n" in done.stdout
    assert re.search(r"^short +ZeRO-3 +[\d.]", done.stdout, re.MULTILINE), "predicted and measured memory"
    (tmp_path / "elsewhere").mkdir()
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        archive.extractall(tmp_path / "elsewhere", filter="data")
    folder = tmp_path / "elsewhere/out"
    probe = json.loads((folder / "probe/figures.json").read_text())
    assert probe["cuda"]["to_gpu_bytes_per_second"] > 0
    (folder / "nvml.json").write_text(json.dumps(probe["nvml"]))
    (gpu,) = gpu_state.read_gpus(NvmlReplay(folder / "nvml.json")).gpus
    assert (gpu.name, gpu.uuid) == ("NVIDIA H100 80GB HBM3", "GPU-0")
    report = subprocess.run(
        [sys.executable, "-m", "ds_bench", "report", str(next(folder.glob("short/runs/*")))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert report.returncode == 0, report.stderr
    assert "ZeRO-3" in report.stdout
