"""The wheel in new environments: one that reads results, without torch, and one that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.real_trials import ROOT

pytestmark = pytest.mark.slow
RESULT = ROOT / "results/reference/cpu_2cores_2026-11-21/zero_comparison_20261121_154122.json"
RUN = ROOT / "tests/data/zero_run/runs/zero_20261121_093000"
EXTRA = 'pip install "ds-compare[run]"'

Call = Callable[..., subprocess.CompletedProcess[str]]


def environment(folder: Path, install: Sequence[str], packages: Path | None = None) -> Call:
    """A new environment with what ``install`` asks of pip; returns a function that calls its programs.

    ``packages``: a folder whose packages it has too.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    if packages is not None:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "shared.pth").write_text(f"{packages}\n")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DS_BENCH_CPU"))}

    def call(program: str, *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "bin" / program), *map(str, arguments)]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        return done

    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-compile"]
    subprocess.run([*pip, "--quiet", "--disable-pip-version-check", *install], cwd=folder, env=variables, check=True)
    return call


def test_the_wheel_holds_every_data_file_of_the_package(wheel: Path) -> None:
    present = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "ds_bench").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert [name for path in files if (name := path.relative_to(ROOT).as_posix()) not in present] == []


def test_without_torch_everything_works_that_runs_nothing(wheel: Path, tmp_path: Path) -> None:
    call = environment(tmp_path / "reader", [str(wheel)])
    assert call("python", "-c", "import torch", code=1).stderr.endswith("No module named 'torch'\n")
    config = tmp_path / "ds_config.json"
    config.write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1, "gradient_cliping": 1}')

    assert "ZeRO-3" in call("ds-compare", "plan", "--model", "llama-2-7b", "--num-gpus", "8", "--min-gpus").stdout
    assert "gradient_clipping" in call("ds-compare", "check", config, code=1).stdout
    assert "★ ZeRO-0" in call("ds-compare", "report", RESULT, "--html", "page.html", "--plots", "plots").stdout
    assert len(json.loads(call("ds-compare", "report", RESULT, "--format", "json").stdout)) == 12
    assert "ZeRO-1" in call("ds-compare", "compare", RESULT, RESULT).stdout
    call("ds-compare", "baseline", "save", RUN)
    assert "passed" in call("ds-compare", "baseline", "check", RUN).stdout
    assert "memory" in call("ds-compare", "explain", "zero0", "zero3", RESULT).stdout
    assert "overlap_comm" in call("ds-compare", "axes").stdout
    assert "gpt2" in call("ds-compare", "models").stdout
    assert EXTRA in call("ds-compare", "doctor", code=2).stdout
    program = f"import ds_bench as d; print(d.plan(model='gpt2').answer, len(d.load({str(RESULT)!r}).to_dataframe()))"
    assert call("python", "-c", program).stdout.endswith("12\n")

    refused = {
        ("run", "--model", "tiny"): EXTRA,
        ("ops",): EXTRA,
        ("plan", "--model", "some/model"): EXTRA,
        ("report", str(RESULT), "--format", "parquet"): 'pip install "ds-compare[parquet]"',
    }
    for arguments, remedy in refused.items():
        line = call("ds-compare", *arguments, code=2).stderr
        assert line.count("\n") == 1, line
        assert remedy in line
    assert "pip install" in call("python", "-c", "import ds_bench; ds_bench.run(model='tiny')", code=1).stderr


@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_with_the_extra_run_the_installed_program_trains(wheel: Path, tmp_path: Path) -> None:
    """Heavy packages come from the tests' own environment; pip finds every requirement of the extra among them."""
    shared = Path(sysconfig.get_path("purelib"))
    call = environment(tmp_path / "run", ["--no-index", f"ds-compare[run] @ {wheel.as_uri()}"], shared)
    where = call("python", "-c", "import ds_bench; print(ds_bench.__file__)").stdout
    assert where.startswith(str(tmp_path))
    small = ("--num-steps=1", "--warmup-steps=1", "--batch-size=1", "--seq-length=16", "--accelerator=cpu")
    shown = call("ds-compare", "run", "--model=tiny", "--stages=0", *small, "--format=json", "--quiet").stdout
    assert [row["status"] for row in json.loads(shown)] == ["✅ Success"]
