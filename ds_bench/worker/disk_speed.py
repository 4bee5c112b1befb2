"""How fast a folder's disk writes and reads in sequence, by DeepSpeed's own asynchronous I/O, in its own process.

``python -m ds_bench.worker.disk_speed FOLDER SETTINGS``, where SETTINGS is a JSON object: the ``aio`` block of a
DeepSpeed configuration, ``bytes`` (how much to write at most) and ``seconds`` (how long to go on, for each way).
Prints one JSON line: ``{"bytes", "write_bytes_per_second", "read_bytes_per_second", "from_disk"}`` or ``{"error"}``.

DeepSpeed opens files with O_DIRECT, so that the page cache has no part in it; some file systems take the flag and
cache all the same. So the cache is dropped before reading, and the kernel is asked how many bytes came from a
device: ``from_disk`` is false where they were fewer than were read. Not measured: random access, several ranks at once.

The file has no name at any moment that a signal could meet: however this process ends, the kernel removes it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..system.processes import die_with_parent

_CHUNK_BYTES = 64 * 2**20
"""One request: of the size of a large tensor."""


def measure(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a file without a name, then reads it back. Raises OSError, or RuntimeError from DeepSpeed."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    most_bytes, most_seconds = int(settings["bytes"]), float(settings["seconds"])
    handle = (
        AsyncIOBuilder()
        .load(verbose=False)
        .aio_handle(
            block_size=int(settings["block_size"]),
            queue_depth=int(settings["queue_depth"]),
            single_submit=bool(settings["single_submit"]),
            overlap_events=bool(settings["overlap_events"]),
            intra_op_parallelism=int(settings["intra_op_parallelism"]),
        )
    )
    # Random bytes: a disk or file system that compresses must not gain by it.
    content = torch.randint(0, 256, (_CHUNK_BYTES,), dtype=torch.uint8)
    # Locked memory, as trials on a GPU have: from any other DeepSpeed copies first (csrc/aio, bounce buffer).
    buffer = handle.new_cpu_locked_tensor(_CHUNK_BYTES, content)
    buffer = buffer.copy_(content) if buffer.data_ptr() else content  # no address: the limit on locked memory
    with tempfile.TemporaryFile(dir=folder) as file:
        name = f"/proc/self/fd/{file.fileno()}"

        def write(offset: int) -> None:
            handle.async_pwrite(buffer, name, offset)
            _require_one(handle.wait())

        def read(offset: int) -> None:
            handle.async_pread(buffer, name, offset)
            _require_one(handle.wait())

        write(0)  # threads started, code loaded
        written, write_seconds = _repeat(write, most_bytes, most_seconds)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = _device_reads()
        got, read_seconds = _repeat(read, written, most_seconds)
        after = _device_reads()
    return {
        "bytes": written,
        "write_bytes_per_second": written / write_seconds,
        "read_bytes_per_second": got / read_seconds,
        "from_disk": None if before is None or after is None else after - before >= got,
    }


def _require_one(done: int) -> None:
    if done != 1:
        raise RuntimeError(f"DeepSpeed's async I/O completed {done} requests instead of 1")


def _repeat(act: Callable[[int], None], most_bytes: int, most_seconds: float) -> tuple[int, float]:
    """Acts on one chunk after the other; at least one. Returns (bytes, seconds)."""
    done, start = 0, time.perf_counter()
    while True:
        act(done)
        done += _CHUNK_BYTES
        seconds = time.perf_counter() - start
        if done + _CHUNK_BYTES > most_bytes or seconds > most_seconds:
            return done, seconds


def _device_reads() -> int | None:
    """Bytes that this process had fetched from devices (proc(5), /proc/pid/io); None where that is not told."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _answer(folder: str, settings: str) -> dict[str, Any]:
    try:
        return measure(Path(folder), json.loads(settings))
    except Exception as error:  # whatever a disk, a file system or DeepSpeed raises is the answer
        text = " ".join(str(error).split()) or "no reason given"
        return {"error": f"{type(error).__name__}: {text[:300]}"}


if __name__ == "__main__":
    die_with_parent()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed's builders and C++ print; the answer alone goes to stdout
    print(json.dumps(_answer(*sys.argv[1:3])), file=out, flush=True)
