"""Locks on the devices of a run.

A lock keeps two runs from measuring on one GPU or on the same processors. It is an empty file in shared memory that
every user may open. The kernel releases it however its holder ends; the file stays. If containers do not share that
folder, ``DS_BENCH_LOCK_DIR`` names a local one that they do share.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .files import locked_file
from .gpu_state import GpuFacts


@dataclass(slots=True)
class DeviceLocks:
    """The result of locking the devices of a run."""

    waited: bool = False
    """Whether another run held one of them: facts about the machine that were read earlier may have changed."""
    notes: list[str] = field(default_factory=list)
    """Why a second run on a device would not be noticed."""


def device_names(accelerator: str, gpus: Sequence[GpuFacts], slots: Iterable[int]) -> dict[str, str]:
    """Return lock → name of each device that ranks in these slots use.

    ``gpus``: the visible ones, in order. MIG instances of one GPU share its lock. On the CPU accelerator the lock
    belongs to the processors of this process: a scheduler gives its jobs disjoint sets, which do not exclude each
    other.
    """
    if accelerator == "cuda":
        used = [gpus[slot] for slot in slots if slot < len(gpus)]
        return {gpu.uuid or f"gpu{gpu.index}": f"GPU {gpu.index}" for gpu in used}
    # Several hosts may share the folder.
    key = hashlib.sha256(f"{socket.gethostname()} {sorted(os.sched_getaffinity(0))}".encode()).hexdigest()[:16]
    return {f"processors_{key}": "the CPU"}


@contextmanager
def locked_devices(names: Mapping[str, str], say: Callable[[str], None]) -> Iterator[DeviceLocks]:
    """Hold the locks of these devices. Wait for those that another run holds, and ``say`` so once for each.

    Locks are taken in the order of their names, so that two runs never wait for each other.
    """
    # One folder for all users of this machine.
    shared = next((path for path in ("/dev/shm", "/tmp") if os.access(path, os.W_OK)), "/tmp")
    locks, folder = DeviceLocks(), Path(os.environ.get("DS_BENCH_LOCK_DIR") or shared)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)

    def wait(device: str) -> None:
        locks.waited = True
        say(f"waiting: another run is using {device} …")

    with contextlib.ExitStack() as held:
        for name, device in sorted(names.items()):
            path = folder / f"ds_bench_lock_{re.sub(r'[^A-Za-z0-9-]', '_', name)}"
            try:
                held.enter_context(locked_file(path, lambda device=device: wait(device)))  # type: ignore[misc]
            except OSError as error:
                reason = f"{device} cannot be locked ({path}: {error.strerror})"
                locks.notes.append(f"{reason}: a second run would not be noticed")
        yield locks
