"""The measurement of a disk by DeepSpeed's own asynchronous I/O, in a real process on a real disk."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config.spec import Placement
from ds_bench.launch import ops, rank_environment
from ds_bench.system.files import file_system

pytestmark = pytest.mark.nvme
MIB = 2**20
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Start:
    """Starts a measurement with limits on bytes and seconds."""
    variables = rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ)
    # The mark of a built op is where the doctor looks for it.
    assert ops.is_built(ops.ASYNC_IO, Path(variables["TORCH_EXTENSIONS_DIR"]))

    def go(folder: Path, size: int, seconds: float = 60.0) -> subprocess.Popen[bytes]:
        settings = {"block_size": MIB, "queue_depth": 8, "intra_op_parallelism": 1, "bytes": size, "seconds": seconds}
        settings |= {"single_submit": False, "overlap_events": True}
        command = [sys.executable, "-m", "ds_bench.worker.disk_speed", str(folder), json.dumps(settings)]
        return subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE)

    return go


def test_a_real_disk_is_written_and_read_back_from_the_disk_itself(tmp_path: Path, start: Start) -> None:
    def measured(*arguments: Any) -> dict[str, Any]:
        answer, _ = start(*arguments).communicate(timeout=120)
        return dict(json.loads(answer))

    if file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary folders of this machine are in memory")
    answer = measured(tmp_path, 192 * MIB)
    assert (answer["bytes"], answer["from_disk"]) == (192 * MIB, True)
    # No disk of today reads or writes a terabyte a second, and one below 1 MiB/s would have run out of time.
    for way in ("write_bytes_per_second", "read_bytes_per_second"):
        assert MIB < answer[way] < 2**40
    assert list(tmp_path.iterdir()) == []
    assert measured(Path("/proc/self"), 64 * MIB)["error"], "one line and no traceback"
    assert measured(tmp_path, 2**40, 0.0)["bytes"] == 64 * MIB, "time runs out before the size is reached"


def _has_open_file_in(folder: Path, pid: int) -> bool:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed after it had been listed
            if str(descriptor.readlink()).startswith(str(folder)):
                return True
    return False


def test_nothing_is_left_on_the_disk_however_the_measurement_ends(tmp_path: Path, start: Start) -> None:
    with start(tmp_path, 2048 * MIB, 60.0) as process:
        try:
            deadline = time.monotonic() + 120
            while not _has_open_file_in(tmp_path, process.pid):
                assert process.poll() is None, "ended early"
                assert time.monotonic() < deadline, "the measurement did not begin"
                time.sleep(0.01)
            assert list(tmp_path.iterdir()) == []
        finally:
            process.kill()
