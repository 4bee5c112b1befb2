"""Locks on GPUs and processors. Real processes hold them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds_bench.system.device_locks import device_names, locked_devices
from ds_bench.system.gpus import GpuFacts
from tests.support.real_trials import ROOT

GPUS = [GpuFacts(index=0, uuid="GPU-a/../b"), GpuFacts(index=3, uuid="GPU-b"), GpuFacts(index=4)]
NAMES = device_names("cuda", GPUS, range(3))
Hold = Callable[[str], subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DS_BENCH_LOCK_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Starts a process that holds a lock until it is killed."""
    program = """
        import sys
        from ds_bench.system.device_locks import locked_devices
        with locked_devices({sys.argv[1]: "x"}, print):
            print("held", flush=True)
            sys.stdin.read()
    """
    started = []

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(program), name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_run_waits_for_the_run_on_one_of_its_gpus_however_that_ends(hold: Hold, folder: Path) -> None:
    hold("GPU-c")  # of another run
    holder = hold("GPU-b")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        holder.kill()

    with locked_devices(NAMES, say) as locks:
        assert (locks.waited, locks.notes) == (True, [])
        assert said == ["waiting: another run is using GPU 3 …"]
        names = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        # Other users can open them too, whatever the umask.
        assert names == {f"ds_bench_lock_{name}": 0o644 for name in ("GPU-a____b", "GPU-b", "GPU-c", "gpu4")}
        assert hold_would_wait(folder / "ds_bench_lock_GPU-b")
    assert not hold_would_wait(folder / "ds_bench_lock_GPU-b")


def hold_would_wait(path: Path) -> bool:
    return subprocess.run(["flock", "--nonblock", path, "true"], check=False).returncode != 0


def test_run_locks_the_gpus_in_its_slots_or_on_the_cpu_accelerator_its_processors() -> None:
    gpus = [GpuFacts(index=index, uuid=f"GPU-{index}") for index in (4, 5, 6)]
    assert device_names("cuda", gpus, [0, 2, 3]) == {"GPU-4": "GPU 4", "GPU-6": "GPU 6"}
    before, all_cpus = device_names("cpu", gpus, [0]), os.sched_getaffinity(0)
    assert list(before.values()) == ["the CPU"]
    os.sched_setaffinity(0, {min(all_cpus)})
    try:
        assert (device_names("cpu", gpus, [0]) == before) == (len(all_cpus) == 1)
    finally:
        os.sched_setaffinity(0, all_cpus)


def test_lock_that_cannot_be_taken_is_a_note_and_no_link_is_followed(folder: Path) -> None:
    path = folder / "ds_bench_lock_GPU-a"
    path.symlink_to(folder / "target")
    with locked_devices({"GPU-a": "GPU 0"}, pytest.fail) as locks:
        assert not locks.waited
    assert [str(path) in note for note in locks.notes] == [True]
    assert not (folder / "target").exists()
