"""Loading compiled ops without waiting for the lock of a program that was killed."""

from __future__ import annotations

import time
from pathlib import Path

from torch.utils.file_baton import FileBaton

from ..system.build_locks import remove_stale_locks


def wait_only_for_living_programs() -> None:
    """Makes this process remove the lock that it waits for once no process holds it open.

    torch waits without end (torch/utils/file_baton.py, wait). The locks are removed before the first trial too, but a
    program beside this one may be killed while it loads an op.
    """
    FileBaton.wait = _wait  # type: ignore[assignment, method-assign]


def _wait(baton: FileBaton) -> None:
    lock = Path(baton.lock_file_path)
    while lock.exists():
        # The folder of all ops: each op has a folder in it, with its lock.
        remove_stale_locks(lock.parent.parent)
        time.sleep(baton.wait_seconds)
