"""What a trial leaves outside its folder: swap files and shared-memory segments; and their removal."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import tempfile
from pathlib import Path

from ..contract import Assignment
from ..dsconfig import uses_nvme
from ..spec import Trial
from .processes import alive

_SWAP_PREFIX = "ds_bench_swap"


def _owner_prefix() -> str:
    """Host and process namespace: a process number means something only inside both."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return f"{_SWAP_PREFIX}.{socket.gethostname()}.{namespace}"


def new_scratch_id() -> str:
    """Digits that no other trial on this machine uses."""
    return str(secrets.randbelow(9 * 10**8) + 10**8)


def swap_folder(trial: Trial, scratch_id: str) -> str | None:
    """The private folder for this trial's swap files; None where nothing swaps.

    The name carries host and process, so that a later run can tell that its owner is gone.
    """
    if trial.placement.nvme_path is None or not uses_nvme(trial.ds_config):
        return None
    name = f"{_owner_prefix()}.{os.getpid()}.{scratch_id}"
    return str(Path(trial.placement.nvme_path).resolve() / name)


def disk_is_full(folder: str | None) -> bool:
    """Whether the file system of a swap folder has no room for 8 MiB more."""
    if folder is None:
        return False
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, 8 * 2**20)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False


def remove_scratch(assignment: Assignment) -> None:
    """Removes swap folder, shared-memory segments and rendezvous file; what is gone already is fine."""
    if assignment.swap_folder is not None:
        shutil.rmtree(assignment.swap_folder, ignore_errors=True)
    # DeepSpeed never unlinks these: shm.cpp names them buffer, user, MASTER_ADDR, MASTER_PORT, rank.
    for segment in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{assignment.scratch_id}_*"):
        with contextlib.suppress(OSError):
            segment.unlink()
    if assignment.rendezvous is not None:
        Path(assignment.rendezvous.removeprefix("file://")).unlink(missing_ok=True)


def remove_abandoned_swap(nvme_path: Path) -> list[str]:
    """Removes swap folders whose owner on this host no longer lives. Returns their names."""
    removed = []
    for folder in nvme_path.glob(f"{_owner_prefix()}.*.*"):
        owner = folder.name.split(".")[-2]
        if owner.isdigit() and not alive(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed
