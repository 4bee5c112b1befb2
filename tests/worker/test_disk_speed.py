"""The measurement of a disk by DeepSpeed's own asynchronous I/O, in a real process on a real disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config.spec import Placement
from ds_bench.doctor import disk
from ds_bench.launch import ops, rank_environment
from ds_bench.system import processes
from tests.support.real_trials import gone_within

MIB = 2**20


def variables() -> dict[str, str]:
    return rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ)


def command(folder: Path, size: int, seconds: float = 5.0) -> list[str]:
    aio = {"block_size": 2**20, "queue_depth": 8, "intra_op_parallelism": 1}
    aio |= {"single_submit": False, "overlap_events": True}
    settings = {**aio, "bytes": size, "seconds": seconds}
    return [sys.executable, "-m", "ds_bench.worker.disk_speed", str(folder), json.dumps(settings)]


def measured(folder: Path, size: int, seconds: float = 5.0) -> dict[str, Any]:
    done = subprocess.run(
        command(folder, size, seconds),
        env={**os.environ, **variables()},
        capture_output=True,
        check=True,
        timeout=120,
    )
    (line,) = done.stdout.splitlines()
    answer: dict[str, Any] = json.loads(line)
    return answer


@pytest.mark.nvme
def test_a_real_disk_is_written_and_read_back_from_the_disk_itself(tmp_path: Path) -> None:
    if disk.file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary folders of this machine lie in memory")
    answer = measured(tmp_path, 192 * MIB)
    assert answer["bytes"] == 192 * MIB
    assert answer["from_disk"] is True
    # No disk of today reads or writes a terabyte a second, and one below 1 MiB/s would have run out of time.
    for way in ("write_bytes_per_second", "read_bytes_per_second"):
        assert MIB < answer[way] < 2**40
    assert list(tmp_path.iterdir()) == []
    assert measured(Path("/proc/self"), 64 * MIB)["error"], "one line and no traceback"
    assert measured(tmp_path, 2**40, seconds=0.0)["bytes"] == 64 * MIB, "time runs out before the size is reached"


@pytest.mark.nvme
@pytest.mark.parametrize("number", [9, pytest.param(15, marks=pytest.mark.slow)])
def test_nothing_is_left_on_the_disk_however_the_doctor_ends(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "nvme"
    folder.mkdir()
    before = os.statvfs(folder).f_bavail
    program = (
        "import pathlib, signal, sys; from ds_bench.cli import doctor;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a shell's background job ignores it
        "sys.exit(doctor.show_findings(pathlib.Path(sys.argv[1]), False, False))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        env={**os.environ, **variables(), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    child = _writing(parent, folder)
    os.kill(parent.pid, number)
    assert parent.wait(timeout=30) != 0
    assert gone_within({child}, 20) == set()
    assert list(folder.iterdir()) == []
    # The file had at least 64 MiB; others may write to this disk meanwhile, so this is no exact figure.
    assert before - os.statvfs(folder).f_bavail < 2**30 // os.statvfs(folder).f_frsize


def _writing(parent: subprocess.Popen[bytes], folder: Path) -> int:
    """Waits until a process below holds a nameless file of the folder open; returns its number."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert parent.poll() is None, "ended early"
        for pid in processes.descendants(parent.pid):
            if any(target.startswith(str(folder)) for target in _open_files(pid)):
                return pid
        time.sleep(0.02)
    raise AssertionError("the measurement did not begin")


def _open_files(pid: int) -> list[str]:
    try:
        return [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]  # noqa: PTH115
    except OSError:
        return []


@pytest.mark.nvme
def test_the_mark_of_a_built_op_is_where_the_doctor_looks_for_it() -> None:
    assert ops.is_built(ops.ASYNC_IO, Path(variables()["TORCH_EXTENSIONS_DIR"]))
