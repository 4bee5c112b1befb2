"""The locks that keep two runs from measuring on the same devices."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

import pytest

from ds_bench.system.device_locks import device_names, locked_devices
from ds_bench.system.gpu_state import GpuFacts

GPUS = [GpuFacts(index=0, uuid="GPU-a/../b"), GpuFacts(index=3, uuid="GPU-b"), GpuFacts(index=4)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DS_BENCH_LOCK_DIR", str(tmp_path))
    return tmp_path


def hold(path: Path) -> IO[bytes]:
    """Take the lock as another run would: each opening of a file counts by itself. Raises BlockingIOError."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    return file


def test_run_waits_for_the_run_on_one_of_its_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said, open_file = folder / "ds_bench_lock_GPU-b", list[str](), os.open

    def open_as_its_reader(path: Path, flags: int, mode: int = 0o777) -> int:
        if path.name.endswith("GPU-b") and flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionError  # the file is another user's
        return open_file(path, flags, mode)

    with hold(path) as other, hold(folder / "ds_bench_lock_GPU-c"):

        def end_other(text: str) -> None:
            said.append(text)
            other.close()

        monkeypatch.setattr(os, "open", open_as_its_reader)
        with locked_devices(device_names("cuda", GPUS, range(3)), end_other) as locks:
            assert (locks.waited, locks.notes, said) == (True, [], ["waiting: another run is using GPU 3 …"])
            names = {each.name: each.stat().st_mode & 0o777 for each in folder.glob("*GPU-a*")}
            assert names == {"ds_bench_lock_GPU-a____b": 0o644}, "other users can open it, whatever the umask"
            with pytest.raises(BlockingIOError):
                hold(path)
    hold(path).close()


def test_run_locks_the_gpus_in_its_slots_or_on_the_cpu_accelerator_its_processors() -> None:
    assert device_names("cuda", GPUS, [1, 2, 3]) == {"GPU-b": "GPU 3", "gpu4": "GPU 4"}
    before, all_cpus = device_names("cpu", GPUS, [0]), os.sched_getaffinity(0)
    assert list(before.values()) == ["the CPU"]
    os.sched_setaffinity(0, {min(all_cpus)})
    try:
        assert (device_names("cpu", GPUS, [0]) == before) == (len(all_cpus) == 1)
    finally:
        os.sched_setaffinity(0, all_cpus)


def test_lock_that_cannot_be_taken_is_a_note_and_no_link_is_followed(folder: Path) -> None:
    path = folder / "ds_bench_lock_GPU-a"
    (folder / "target").touch()
    path.symlink_to(folder / "target")
    with locked_devices({"GPU-a": "GPU 0"}, pytest.fail) as locks:
        assert not locks.waited
    assert [str(path) in note for note in locks.notes] == [True]
