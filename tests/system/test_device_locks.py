"""Locks on cards and processors, held by real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds_bench.system import device_locks
from ds_bench.system.device_locks import card_names, device_names, locked_devices, processor_names
from ds_bench.system.gpus import GpuFacts
from tests.support.real_trials import ROOT

CARDS = card_names([GpuFacts(index=0, uuid="GPU-a/../b"), GpuFacts(index=3, uuid="GPU-b"), GpuFacts(index=4)])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DS_BENCH_LOCK_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def hold() -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Starts a process that holds locks until its standard input ends."""
    program = """
        import sys
        from ds_bench.system.device_locks import locked_devices
        with locked_devices({name: name for name in sys.argv[1:]}, print):
            print("held", flush=True)
            sys.stdin.read()
    """
    started = []

    def start(names: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_run_waits_for_the_run_that_holds_one_of_its_cards_and_says_which(
    hold: Callable[[list[str]], subprocess.Popen[str]], folder: Path
) -> None:
    holder = hold(["GPU-b"])
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        holder.send_signal(signal.SIGKILL)  # the kernel unlocks

    with locked_devices(CARDS, say) as locks:
        assert (locks.waited, locks.notes) == (True, [])
        assert said == [f"waiting for GPU 3, which process {holder.pid} uses …"]
        assert sorted(path.name for path in folder.iterdir()) == [
            "ds_bench_lock_GPU-a____b", "ds_bench_lock_GPU-b", "ds_bench_lock_gpu4",
        ]  # fmt: skip
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}  # other users may lock them too
    assert list(folder.iterdir()) == []


def test_of_another_users_run_the_user_is_named_too(
    hold: Callable[[list[str]], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = hold(["GPU-b"])
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        holder.kill()

    with locked_devices(CARDS, say):
        owner = Path("/proc/self").owner()
        assert said == [f"waiting for GPU 3, which process {holder.pid} of {owner} uses …"]


def test_other_cards_and_other_processors_are_not_waited_for(
    hold: Callable[[list[str]], subprocess.Popen[str]],
) -> None:
    hold([*card_names([GpuFacts(index=1, uuid="GPU-c")]), *processor_names({0, 1})])
    with locked_devices({**CARDS, **processor_names({2, 3})}, pytest.fail) as locks:
        assert not locks.waited


def test_a_run_locks_the_cards_in_its_slots_or_on_the_cpu_accelerator_its_processors() -> None:
    gpus = [GpuFacts(index=index, uuid=f"GPU-{index}") for index in (4, 5, 6)]
    assert device_names("cuda", gpus, [0, 2, 3]) == {"GPU-4": "GPU 4", "GPU-6": "GPU 6"}
    assert device_names("cpu", gpus, [0]) == processor_names()


def test_two_runs_never_hold_one_lock_though_its_file_is_removed_at_the_end_of_each(folder: Path) -> None:
    program = """
        import sys, pathlib
        from ds_bench.system.device_locks import locked_devices
        inside = pathlib.Path(sys.argv[1])
        for _ in range(200):
            with locked_devices({"GPU-a": "GPU 0"}, lambda _: None):
                inside.mkdir()
                inside.rmdir()
    """
    words = [sys.executable, "-c", textwrap.dedent(program), str(folder / "inside")]
    runs = [subprocess.Popen(words, cwd=ROOT) for _ in range(3)]
    assert [run.wait(60) for run in runs] == [0, 0, 0]


def test_a_lock_that_cannot_be_taken_is_a_note_and_a_link_is_not_followed(folder: Path) -> None:
    target = folder / "target"
    target.touch()
    (folder / "ds_bench_lock_GPU-a").symlink_to(target)
    with locked_devices({"GPU-a": "GPU 0"}, pytest.fail) as locks:
        assert not locks.waited
    path = folder / "ds_bench_lock_GPU-a"
    assert locks.notes == [
        f"GPU 0 cannot be locked ({path}: Too many levels of symbolic links): a second run would not be noticed"
    ]
    assert target.exists()


def test_the_folder_is_one_that_all_users_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_BENCH_LOCK_DIR")
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    assert device_locks.lock_folder() in (Path("/dev/shm"), Path("/tmp"))
