"""Benchmarks from Python and under pytest-benchmark: real trials, and a stand-in where only pytest is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_bench.baselines.gate import BaselineEntry, compare_to_baseline, load_baseline, save_baseline
from ds_bench.benchmarks import BenchmarkConfig, BenchmarkFailedError, MemoryBenchmark, ThroughputBenchmark
from ds_bench.cli import arguments as flags
from ds_bench.config.spec import Trial
from ds_bench.errors import UsageError
from ds_bench.launch import scratch
from ds_bench.records.schema import TrialRecord
from tests.support.fakes import FakeLauncher, success
from tests.support.real_trials import ROOT
from tests.support.scripted_run import ScriptedRun

TINY = {"model_name": "tiny", "batch_size": 2, "seq_length": 64, "num_steps": 3, "warmup_steps": 1, "device": "cpu"}


# ------------------------------------------------------------------ what is asked


@pytest.fixture(autouse=True)
def process_folder() -> None:
    """Creates the folder that lasts as long as this process before a test moves temporary files to another place."""
    scratch.temporary_folder()


def test_a_value_that_makes_no_sense_names_its_field(subtests: pytest.Subtests) -> None:
    for changes in (
        {"batch_size": 0}, {"num_steps": 2.5}, {"warmup_steps": -1}, {"backend": "nccl"}, {"device": "tpu"},
        {"strategy": "zero4"}, {"batch_size": True},
    ):  # fmt: skip
        with subtests.test(changes=changes), pytest.raises(ValueError, match=f"^{next(iter(changes))} is "):
            BenchmarkConfig("x", **changes)


def test_a_config_becomes_the_flags_of_the_script_that_has_its_strategy() -> None:
    for strategy, family, rows in (("zero0", "zero", (0,)), ("cpu_full", "offload", ("cpu_full",))):
        config = BenchmarkConfig("x", strategy=strategy, repeats=3, arguments=("--grad-accum", "2"), **TINY)
        options = flags.parse(config.family, "benchmark", config.flags())
        assert config.family == family
        assert (options.stages or options.strategies) == rows
        assert (options.model, options.batch_size, options.seq_length) == ("tiny", 2, 64)
        assert (options.num_steps, options.warmup_steps, options.repeats, options.grad_accum) == (3, 1, 3, 2)
        assert (options.accelerator, options.launcher) == ("cpu", "deepspeed")


def test_rounds_follow_from_all_flags() -> None:
    for arguments, rounds in (((), 9), (("--num-steps", "20"), 60), (("--repeats", "2"), 6)):
        assert ThroughputBenchmark(name="x", repeats=3, arguments=arguments, **TINY).rounds == rounds


def test_variables_of_env_are_set_during_the_run(scripted: ScriptedRun) -> None:
    seen: list[str | None] = []

    def look(trial: Trial) -> TrialRecord:
        seen.append(os.environ.get("MINE"))
        return success(trial)

    scripted.launcher = FakeLauncher(look)
    ThroughputBenchmark(name="x", arguments=("--env", "MINE=a=b"), **TINY).run()
    assert (seen, "MINE" in os.environ) == (["a=b"], False)


def test_a_request_that_cannot_be_run_is_one_line_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UsageError, match="positions"):
        ThroughputBenchmark(name="x", **{**TINY, "seq_length": 1_000_000}).run()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_is_an_exception_that_says_how_and_keeps_its_folder(
    scripted: ScriptedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scripted.launcher = FakeLauncher("OOM (host)")
    with pytest.raises(BenchmarkFailedError, match=r"^benchmark small failed: OOM \(host\)") as caught:
        MemoryBenchmark(name="small", **TINY).run()
    kept = Path(str(caught.value).rpartition("Logs in ")[2])
    assert (kept / "records.jsonl").is_file()


# ------------------------------------------------------------------ real trials


@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_a_real_benchmark_is_measured_saved_and_compared(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # torch's cache of compiled code outlives a run on purpose.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
    path = tmp_path / "baselines.json"
    result = ThroughputBenchmark(
        BenchmarkConfig("tiny", strategy="zero1", **{**TINY, "num_steps": 9}), num_steps=3
    ).run()
    assert (result.name, result.memory, len(result.step_seconds)) == ("tiny", "host", 3)
    rate = result.throughput_tokens_per_sec
    assert rate == pytest.approx(2 * 64 / (sum(result.step_seconds) / 3), rel=0.2)
    assert rate is not None
    assert result.samples_per_sec == pytest.approx(rate / 64)
    assert 100 < (result.average_memory_mb or 0) < (result.peak_memory_mb or 0) < 10_000
    assert list(tmp_path.iterdir()) == []  # nothing is left of a run that succeeded
    save_baseline(BaselineEntry.of(result), path)
    assert compare_to_baseline(result, path=path).passed is True
    saved = load_baseline("tiny", path)
    assert saved is not None
    assert saved.environment is not None


def nested(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """pytest on ``folder`` as a user runs it, warnings being errors."""
    (folder / "pytest.ini").touch()
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**own, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


# ------------------------------------------------------------------ pytest-benchmark, with a stand-in for the trial

_STAND_IN = """
import os
import pytest
from ds_bench.benchmarks import BenchmarkResult, ThroughputBenchmark, run_under, step_clock

class StandIn(ThroughputBenchmark):
    runs = 0

    def run(self):
        StandIn.runs += 1
        seconds = tuple(float(os.environ["STEP"]) + number / 1000 for number in range(4))
        return BenchmarkResult(name="x", throughput_tokens_per_sec=5.0, peak_memory_mb=7.0, step_seconds=seconds)

{mark}
def test_speed(benchmark):
    result = run_under(benchmark, StandIn(name="x", num_steps=2, repeats=2))
    assert result.peak_memory_mb == 7.0
    assert StandIn.runs == 1
"""
_MARK = "@pytest.mark.benchmark(timer=step_clock)"


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with one test whose steps take STEP seconds plus 0 to 3 ms."""
    (tmp_path / "test_speed.py").write_text(_STAND_IN.replace("{mark}", _MARK))
    return tmp_path


def test_every_step_of_every_run_is_a_round_and_nothing_is_timed_by_the_wall(stand_in: Path) -> None:
    done = nested(stand_in, "--benchmark-enable", "--benchmark-json=F.json", STEP="50")
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = json.loads((stand_in / "F.json").read_text())["benchmarks"]
    assert entry["stats"]["data"] == [50.0, 50.001, 50.002, 50.003]
    assert (entry["group"], entry["options"]["timer"]) == ("throughput", "step_clock")
    assert entry["extra_info"]["throughput_tokens_per_sec"] == 5.0
    done = nested(stand_in, "--benchmark-disable", STEP="1")  # the benchmark still runs once
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_test_without_the_step_clock_is_stopped_before_anything_is_run(tmp_path: Path) -> None:
    (tmp_path / "test_speed.py").write_text(_STAND_IN.replace("{mark}", ""))
    done = nested(tmp_path, "--benchmark-enable", STEP="not even read")
    assert done.returncode == 1
    assert "would be timed by the wall clock" in done.stdout
    assert "mark it @pytest.mark.benchmark(timer=ds_bench.benchmarks.step_clock)" in done.stdout
