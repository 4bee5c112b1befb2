"""Writes and reads a file through DeepSpeed's asynchronous I/O, and prints the disk's sequential speed.

``python -m ds_bench.worker.disk_speed FOLDER SETTINGS``, where SETTINGS is a JSON object: the ``aio`` block of a
DeepSpeed configuration, ``bytes`` (the maximum to write) and ``seconds`` (the maximum for writing, and for reading).
Prints one JSON line: ``{"bytes", "write_bytes_per_second", "read_bytes_per_second", "from_disk"}`` or ``{"error"}``.

DeepSpeed opens files with O_DIRECT, which bypasses the page cache, but some file systems accept the flag and cache
anyway. The cache is therefore dropped before reading, and ``from_disk`` is false if the kernel counted fewer bytes from
a device than were read (None if it does not count). Not measured: random access, several ranks at once.

The file has no name, so that the kernel removes it however this process ends.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .failure import describe_error
from .measured_memory import io_bytes

_CHUNK_BYTES = 64 * 2**20
"""Size of one request, like a large tensor's."""


def measure(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Write a file without a name, then read it back. Raises OSError, or RuntimeError from DeepSpeed."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    max_bytes, max_seconds = int(settings["bytes"]), float(settings["seconds"])
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
    # Random bytes, which no disk or file system can compress.
    content = torch.randint(0, 256, (_CHUNK_BYTES,), dtype=torch.uint8)
    # Page-locked memory, as trials on a GPU use; DeepSpeed copies any other first (csrc/aio, bounce buffer).
    buffer = handle.new_cpu_locked_tensor(_CHUNK_BYTES, content)
    # It has no address if the limit on locked memory is too low.
    buffer = buffer.copy_(content) if buffer.data_ptr() else content
    with tempfile.TemporaryFile(dir=folder) as file:
        # DeepSpeed opens files by path, and this path leads to the file without a name.
        name = f"/proc/self/fd/{file.fileno()}"

        def transfer(start: Callable[..., object], offset: int) -> None:
            start(buffer, name, offset)
            if (completed := handle.wait()) != 1:
                raise RuntimeError(f"DeepSpeed's async I/O completed {completed} requests instead of 1")

        write, read = partial(transfer, handle.async_pwrite), partial(transfer, handle.async_pread)
        write(0)  # the first request starts threads and loads code
        written, write_seconds = _repeat(write, max_bytes, max_seconds)
        # Pages that are not on disk yet cannot be dropped (posix_fadvise(2)), and would be read from memory.
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = io_bytes()
        read_back, read_seconds = _repeat(read, written, max_seconds)
        after = io_bytes()
    return {
        "bytes": written,
        "write_bytes_per_second": written / write_seconds,
        "read_bytes_per_second": read_back / read_seconds,
        "from_disk": None if before is None or after is None else after[0] - before[0] >= read_back,
    }


def _repeat(transfer: Callable[[int], None], max_bytes: int, max_seconds: float) -> tuple[int, float]:
    """Transfer one chunk after another, at least one. Return (bytes, seconds)."""
    done, start = 0, time.perf_counter()
    while True:
        transfer(done)
        done += _CHUNK_BYTES
        seconds = time.perf_counter() - start
        if done + _CHUNK_BYTES > max_bytes or seconds > max_seconds:
            return done, seconds


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed's builders and C++ code print too; only the answer may go to stdout
    try:
        answer = measure(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except Exception as error:  # from the disk, the file system or DeepSpeed
        answer = {"error": describe_error(error)}
    print(json.dumps(answer), file=out, flush=True)
