"""scripts/gpu_check.sh with an interpreter that answers for the product: what is kept however a chunk ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ds_bench.system import processes
from tests.support.real_trials import ROOT, gone_within

ROW = {
    "strategy": "zero3",
    "status": "Success",
    "success": True,
    "avg_step_time_ms": 20.0,
    "gpu_peak_gb": 8.0,
    "predicted_over_measured": 1.25,
    "start_seconds": 3.0,
    "caveats": "",
}
INTERPRETER = """#!/bin/bash
case "$1" in -c | - | -m) exec {python} "$@" ;; esac
name=$(basename "$1" .py)
while (($#)); do
    [[ $1 == --output-dir ]] && cp {rows} "$2/zero_comparison_1.json"
    [[ $1 == --output && $name == prediction ]] && cp {pairs} "$2"
    [[ $1 == --output && $name == fidelity ]] &&
        echo '{{"ratio_to_bare": {{"warm": {{"median": 1.01, "min": 0.99, "max": 1.02}}}}}}' >"$2"
    shift
done
[[ $name == "$HANGS" ]] && echo "before the end" && sleep 600
exit 0
"""


def predicted_pairs() -> Any:
    """What bench/prediction.py writes of two cells, the second predicted at double its size."""
    program = """
import json
from dataclasses import asdict
from prediction import Pair
sizes = {"gpu parameters": (2**30, 2**30), "gpu peak allocated": (2**31, 2**30)}
pairs = [Pair(strategy="zero3", what=what, predicted_bytes=a, measured_bytes=b) for what, (a, b) in sizes.items()]
print(json.dumps({"pairs": list(map(asdict, pairs))}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT / "bench")},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture
def start(tmp_path: Path) -> Any:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([ROW]))
    pairs = tmp_path / "pairs.json"
    pairs.write_text(json.dumps(predicted_pairs()))
    python = tmp_path / "python"
    python.write_text(INTERPRETER.format(python=sys.executable, rows=rows, pairs=pairs))
    python.chmod(0o755)

    def go(steps: str, hangs: str = "", stderr: int | None = None, **variables: str) -> subprocess.Popen[str]:
        given = {"GPU_CHECK_ACCELERATOR": "cpu", "GPU_CHECK_MODELS": "tiny", "STEPS": steps, "HANGS": hangs}
        return subprocess.Popen(
            [str(ROOT / "scripts/gpu_check.sh"), str(tmp_path / "out")],
            env={**os.environ, **given, "PYTHON": str(python), "TMPDIR": str(tmp_path), **variables},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    return go


def kept(folder: Path) -> set[str]:
    with tarfile.open(folder / "out.tar.gz") as archive:
        return {Path(name).name for name in archive.getnames()}


def test_a_chunk_that_ends_reports_and_archives_everything(start: Any, tmp_path: Path) -> None:
    out, _ = start("tiny-zero launch fidelity").communicate(timeout=120)
    assert {"tiny-zero.json", "fidelity.json", "launch-cold.json", "report.txt", "steps.json"} <= kept(tmp_path)
    assert "zero3           Success         20.00      8.00               1.250" in out
    assert "zero3                  20.00      20.00      1.000            3.0            3.0" in out
    assert "product (warm) / bare loop 1.010 (0.990 to 1.020)" in out
    assert "nothing failed" in out


def test_cells_that_are_predicted_wrongly_are_named(start: Any) -> None:
    out, _ = start("prediction").communicate(timeout=120)
    assert "prediction: 2 cells, 1 off by more than 10 %" in out
    assert "predicted    2.000 GB, measured    1.000 GB" in out
    assert "prediction off: zero3, gpu peak allocated" in out


def test_wheels_are_installed_once_for_all_chunks(start: Any, tmp_path: Path) -> None:
    """DeepSpeed's ops are built again where its sources are newer, or lie elsewhere."""
    wheels, info = tmp_path / "wheels", "a_package-1.0.dist-info"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "a_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_package.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: a-package\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    times = set()
    for _ in range(2):
        start("tiny-zero", WHEELS=str(wheels), XDG_CACHE_HOME=str(tmp_path / "cache")).communicate(timeout=120)
        (installed,) = (tmp_path / "cache").rglob("a_package.py")
        times.add(installed.stat().st_mtime_ns)
    assert len(times) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_chunk_that_is_cut_short_keeps_what_had_finished(start: Any, tmp_path: Path, number: int) -> None:
    process = start("tiny-zero fidelity", hangs="fidelity")
    log = next(iter(wait_for(tmp_path, "tmp.*/fidelity/log")))
    assert log.exists()
    below = processes.descendants(process.pid)
    if number == signal.SIGKILL:
        os.killpg(process.pid, number)
        processes.send_signal(below, number)  # as the end of a machine does, which leaves nothing
    else:
        process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert "tiny-zero.json" in kept(tmp_path)
    if number == signal.SIGTERM:
        assert "fidelity: cut short" in out
        assert "fidelity.log" in kept(tmp_path)
        assert not list(tmp_path.glob("tmp.*")), "the folder of unfinished work is left"
    assert gone_within(below, 15) == set()


def wait_for(folder: Path, pattern: str) -> list[Path]:
    deadline = time.monotonic() + 60
    while not (found := [path for path in folder.glob(pattern) if path.stat().st_size]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_within_the_budget_and_named(start: Any, tmp_path: Path) -> None:
    out, _ = start("tiny-zero fidelity", hangs="zero_stage_comparison", BUDGET_SECONDS="37").communicate(timeout=90)
    assert "its time was up" in out
    assert "fidelity: not started, the budget is spent" in out
    assert "step tiny-zero ended with 124" in out
    steps = {step["name"]: step for step in json.loads((tmp_path / "out/steps.json").read_text())}
    assert steps["tiny-zero"]["timed_out"]


def test_everything_that_a_run_would_be_refused_for_is_named_before_the_first_step(start: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        """
from importlib import metadata
installed = metadata.version
def version(name):
    if name in ("hjson", "deepspeed", "jinja2"):
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
        ("problem", "hjson"),
        ("problem", "deepspeed"),
    }
    assert "make_wheels.sh" in out.splitlines()[-1]
    assert not (tmp_path / "out" / "steps.json").exists()
