"""Shared by the tests that start real processes: ops built once, one preloaded server, scripts run as users do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# As in an activated virtual environment: python is this Python in every printed command.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

from ds_bench.config.spec import Placement, Trial
from ds_bench.launch import Limits, ops, rank_environment
from ds_bench.launch.warm_launcher import WarmLauncher
from ds_bench.records.schema import TrialRecord
from ds_bench.system import processes
from tests.support.mounts import mounted
from tests.support.real_trials import ROOT, SHORT, SUPPORT, Launch, Script, make_trial
from tests.support.scripted_run import ScriptedRun
from tests.support.shared_files import FilesAbsent
from tests.support.slurm import SlurmCluster, running_slurm, why_no_slurm

# Examples that are slow to draw on a busy machine say nothing about the code. CI draws more of them.
settings.register_profile(
    "any_machine",
    deadline=None,
    max_examples=100 if os.environ.get("CI") else 30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any_machine")

REAL = ("deepspeed", "nvme", "browser")


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and nohup the hangup; the scripts rightly leave those alone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers


LONGEST = (
    *("test_older_versions", "test_strategies", "test_two_hosts", "test_simulated_card", "test_own_script"),
    *("test_engine_allocations", "test_prediction", "test_axes", "test_install", "test_factories", "test_scripts"),
    *("test_failures_by_enumeration", "test_gpu_check"),
)
"""Files that take minutes, longest first. One that began last would keep one worker busy while the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, then those of whole runs: what is short fills the gaps at the end."""
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (order.get(item.path.stem, len(order)), item.path.parent.name != "integration"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """At least four: a whole run often waits for its processes."""
    return max(4, min(8, len(os.sched_getaffinity(0))))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """In CI a test of a real component must run: a skip fails there, unless files outside the checkout are missing."""
    report = yield
    absent = call.excinfo is not None and isinstance(call.excinfo.value, FilesAbsent)
    if os.environ.get("CI") and report.skipped and not absent and any(item.get_closest_marker(name) for name in REAL):
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


@pytest.fixture(scope="session", autouse=True)
def own_device_locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No run waits for one of another program on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_BENCH_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
        yield


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that no file of an earlier build gets into it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "ds_bench", source / "ds_bench", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "wheel", str(source), *options], check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def built_ops() -> dict[str, ops.OpState]:
    """DeepSpeed's ops for the CPU accelerator, built once into the user's cache."""
    variables = rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ)
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


@pytest.fixture(scope="session")
def server(built_ops: dict[str, ops.OpState]) -> Callable[[Limits], WarmLauncher]:
    """Launchers of one preloaded server, by limits."""
    variables = rank_environment.rank_environment(Placement(accelerator="cpu", num_gpus=2), os.environ)
    variables |= rank_environment.preload_variables(["gpt2"])
    variables["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), variables["PYTHONPATH"]])
    variables["DS_BENCH_PRELOAD_OPS"] = ",".join(op for op, state in built_ops.items() if state.ready)
    assert WarmLauncher(variables, SHORT).prepare() is None
    return lambda limits: WarmLauncher(variables, limits)


@pytest.fixture
def launch(server: Callable[[Limits], WarmLauncher], tmp_path: Path) -> Launch:
    """Launches a trial of make_trial's arguments in a fresh folder, and asserts that no process is left."""

    def go(trial: Trial | None = None, *, limits: Limits = SHORT, **arguments: Any) -> TrialRecord:
        earlier = len(list(tmp_path.glob("trial*")))
        folder = tmp_path / f"trial{earlier or ''}"
        folder.mkdir()
        before = processes.descendants()
        record = server(limits).launch(trial or make_trial(**arguments), folder, lambda _progress: None)
        assert processes.descendants() <= before, "a process of the trial is left"
        return record

    return go


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Starts a script in a process group of its own, as a shell does; ends it with the test."""
    started: list[Script] = []

    def start(name: str, *arguments: str, output_dir: Path | None = None, **environment: str) -> Script:
        folder = output_dir or tmp_path / "out"
        path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
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
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedRun:
    return ScriptedRun(tmp_path, monkeypatch)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    with mounted(tmp_path / "small", "size=12m") as folder:
        yield folder


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A Slurm cluster of two nodes, node1 and node2, of four processors each."""
    if (reason := why_no_slurm()) is not None:
        pytest.skip(f"no Slurm cluster: {reason}")
    with running_slurm(nodes=2) as cluster:
        yield cluster
