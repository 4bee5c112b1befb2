"""The locks that torch leaves in a cache of compiled ops.

torch creates an empty file ``lock`` in an op's folder to build or load the op, and removes it afterwards
(torch/utils/file_baton.py). One that a killed program left makes every later build and load wait without end.
"""

from __future__ import annotations

import contextlib
import fcntl
import signal
import time
from pathlib import Path

_LOAD_SECONDS = 60.0
"""More than it takes to load a built op, for which its lock is held too."""


def stale_locks(folder: Path) -> list[Path]:
    """Build locks that no process holds open."""
    is_open = {lock: _is_open(lock) for lock in folder.glob("*/lock")}
    if None in is_open.values():
        open_here = set()
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                open_here.add(str(link.readlink()))
        for lock in [lock for lock, known in is_open.items() if known is None]:
            # A process of another host, whose files are not in /proc, may be loading the op.
            with contextlib.suppress(OSError):
                is_open[lock] = str(lock.resolve()) in open_here or time.time() - lock.lstat().st_mtime <= _LOAD_SECONDS
    return [lock for lock, known in is_open.items() if known is False]


def _is_open(path: Path) -> bool | None:
    """Whether any process of this machine has the file open, in containers too, whose processes /proc may not show.

    The kernel grants a write lease on a file that nobody else has open (fcntl(2), F_SETLEASE). None where it never
    grants one: for another user's file, or on a network file system.
    """
    try:
        with path.open("rb") as file:
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # breaking a lease kills its holder by default
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # removed since it was listed
        return True
    except OSError:
        return None
    return False


def remove_stale_locks(folder: Path) -> list[Path]:
    """Removes the locks that no process holds open. Returns them."""
    removed = stale_locks(folder)
    for lock in removed:
        lock.unlink(missing_ok=True)
    return removed
