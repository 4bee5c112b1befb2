"""The measurement of a disk by DeepSpeed's own asynchronous I/O, in a real process on a real disk."""

from __future__ import annotations

import contextlib
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

MIB = 2**20


def variables() -> dict[str, str]:
    return rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ)


def command(folder: Path, size: int, seconds: float = 5.0) -> list[str]:
    aio = {"block_size": 2**20, "queue_depth": 8, "intra_op_parallelism": 1}
    aio |= {"single_submit": False, "overlap_events": True}
    settings = {**aio, "bytes": size, "seconds": seconds}
    return [sys.executable, "-m", "ds_bench.worker.disk_speed", str(folder), json.dumps(settings)]


def measured(folder: Path, size: int, seconds: float = 5.0) -> dict[str, Any]:
    environment = {**os.environ, **variables()}
    done = subprocess.run(command(folder, size, seconds), env=environment, capture_output=True, check=True, timeout=120)
    (line,) = done.stdout.splitlines()
    answer: dict[str, Any] = json.loads(line)
    return answer


@pytest.mark.nvme
def test_a_real_disk_is_written_and_read_back_from_the_disk_itself(tmp_path: Path) -> None:
    if disk.file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary folders of this machine are in memory")
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
def test_nothing_is_left_on_the_disk_however_the_measurement_ends(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path, 2048 * MIB, 60.0), env={**os.environ, **variables()}) as process:
        try:
            deadline = time.monotonic() + 120
            while not file_of(process.pid, tmp_path):
                assert process.poll() is None, "ended early"
                assert time.monotonic() < deadline, "the measurement did not begin"
                time.sleep(0.01)
            assert list(tmp_path.iterdir()) == []
        finally:
            process.kill()


def file_of(pid: int, folder: Path) -> bool:
    """Whether the process has a file in that folder open."""
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(each).startswith(str(folder)):  # noqa: PTH115
                return True
    return False


@pytest.mark.nvme
def test_the_mark_of_a_built_op_is_where_the_doctor_looks_for_it() -> None:
    assert ops.is_built(ops.ASYNC_IO, Path(variables()["TORCH_EXTENSIONS_DIR"]))
