"""Shared by the tests that start real processes: ops built once, one preloaded server, scripts run as users do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_bench import dsconfig, ops, preflight, strategies
from ds_bench.launch import Limits, processes
from ds_bench.launch.warm import WarmLauncher
from ds_bench.record import TrialRecord
from ds_bench.spec import Placement, Strategy, Trial, Workload

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
REAL = ("deepspeed", "nvme", "browser")
SHORT = Limits(
    timeout_seconds=120,
    stall_timeout_seconds=60,
    failure_grace_seconds=3,
    exit_grace_seconds=2,
    kill_grace_seconds=2,
)


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and nohup the hangup; the scripts rightly leave what is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """In CI a test of a real component must run: a skip there is a failure."""
    report = yield
    if os.environ.get("CI") and report.skipped and any(item.get_closest_marker(name) for name in REAL):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which counts as a failure in CI: {report.longrepr}"
    return report


@pytest.fixture(scope="session", autouse=True)
def idle_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every trial sees processors that nobody else uses: what a test finds depends on no other program."""
    root = tmp_path_factory.mktemp("idle_machine")
    (root / "proc").mkdir()
    lines = [f"cpu{number} 0 0 0 0 0 0 0 0 0 0" for number in os.sched_getaffinity(0)]
    (root / "proc" / "stat").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_BENCH_CPU_ROOT", str(root))
        yield


@pytest.fixture(scope="session")
def built_ops() -> dict[str, ops.OpState]:
    """DeepSpeed's ops for the CPU accelerator, built once into the user's cache."""
    variables = preflight.rank_environment(Placement(accelerator="cpu"), os.environ, None)
    names = (ops.SHARED_MEMORY, ops.CPU_ADAM, ops.ASYNC_IO)
    states = ops.prepare_ops(names, ops.cache_folder("cpu"), variables, say=lambda text: print(text, flush=True))
    assert states[ops.SHARED_MEMORY].ready, states[ops.SHARED_MEMORY].reason
    assert states[ops.CPU_ADAM].ready, states[ops.CPU_ADAM].reason
    return states


@pytest.fixture(autouse=True)
def require_async_io(request: pytest.FixtureRequest) -> None:
    """Skips a test marked ``nvme``, which fails in CI, where libaio is missing."""
    if request.node.get_closest_marker("nvme") is None:
        return
    built_ops: dict[str, ops.OpState] = request.getfixturevalue("built_ops")
    if not built_ops[ops.ASYNC_IO].ready:
        reason = built_ops[ops.ASYNC_IO].reason
        pytest.skip(f"no async_io op: {reason}; {ops.remedy_of(reason)}")


Launch = Callable[..., TrialRecord]


@pytest.fixture(scope="session")
def server(built_ops: dict[str, ops.OpState]) -> Callable[[Limits], WarmLauncher]:
    """Launchers of one preloaded server, by limits."""
    variables = preflight.rank_environment(Placement(accelerator="cpu", num_gpus=2), os.environ, "gpt2")
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS), variables["PYTHONPATH"]])
    variables["DS_BENCH_PRELOAD_OPS"] = ",".join(op for op, state in built_ops.items() if state.ready)
    assert WarmLauncher(variables, SHORT).prepare() is None
    return lambda limits: WarmLauncher(variables, limits)


def make_trial(
    strategy: Strategy | None = None,
    *,
    fault: str = "fine",
    num_steps: int = 3,
    workload: Workload | None = None,
    changes: dict[str, Any] | None = None,
    largest_parameter: int | None = None,
    **placement: Any,
) -> Trial:
    """A trial of two CPU ranks; of ``faults.<fault>`` unless a workload is given."""
    strategy = strategy or strategies.ZERO_STAGES[1]
    place = Placement(**{"accelerator": "cpu", "num_gpus": 2, **placement})
    work = workload or Workload(
        model=f"faults:{fault}", model_source="factory", batch_size=2, seq_length=8, num_steps=num_steps, warmup_steps=1
    )
    base = dsconfig.overlay(dsconfig.base_config(strategy, work.batch_size, work.grad_accum), changes or {})
    config = dsconfig.complete(base, work, place, torch_adam=True, largest_parameter=largest_parameter)
    return Trial(trial_id="t", repeat=0, strategy=strategy, workload=work, placement=place, ds_config=config)


@pytest.fixture
def launch(server: Callable[[Limits], WarmLauncher], tmp_path: Path) -> Launch:
    """Launches a trial of make_trial's arguments in a fresh folder, and asserts that no process is left."""

    def go(trial: Trial | None = None, *, limits: Limits = SHORT, **arguments: Any) -> TrialRecord:
        folder = tmp_path / "trial"
        folder.mkdir()
        before = processes.descendants()
        record = server(limits).launch(trial or make_trial(**arguments), folder, lambda _progress: None)
        assert processes.descendants() <= before, "a process of the trial is left"
        return record

    return go


@dataclass
class Script:
    """A comparison script as a user starts it."""

    process: subprocess.Popen[str]
    output_dir: Path

    def wait(self, seconds: float = 300) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Until something is so; fails when the script ends before, or time runs out."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended early: {self.process.communicate()}"
            assert time.monotonic() < deadline, "took too long"
            time.sleep(0.05)

    def rows(self) -> list[dict[str, Any]]:
        (path,) = self.output_dir.glob("*_comparison_*.json")
        rows: list[dict[str, Any]] = json.loads(path.read_text())
        return rows

    def beats(self, trial_id: str) -> list[Path]:
        return sorted(self.output_dir.glob(f"runs/*/trials/{trial_id}*/rank*.beat"))


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Starts a script in a process group of its own, like a shell does; ends it with the test."""
    started: list[Script] = []

    def start(name: str, *arguments: str, output_dir: Path | None = None, **environment: str) -> Script:
        folder = output_dir or tmp_path / "out"
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, str(ROOT / name), "--output-dir", str(folder), "--accelerator", "cpu", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "160", **environment},
            start_new_session=True,
        )
        started.append(Script(process=process, output_dir=folder))
        return started[-1]

    yield start
    for script in started:
        if script.process.poll() is None:
            script.process.kill()
            script.process.communicate()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def gone_within(pids: set[int], seconds: float) -> set[int]:
    """Which of the processes still live when time is up."""
    deadline = time.monotonic() + seconds
    while (left := {pid for pid in pids if processes.alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
