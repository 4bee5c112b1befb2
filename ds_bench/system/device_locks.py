"""Locks on the devices of a run: no two runs train on one card, or on the same processors, at a time.

A lock is an empty file in shared memory that every user may open; the kernel unlocks it however its holder ends. Where
containers do not share that folder, ``DS_BENCH_LOCK_DIR`` names a local one that they do: NFS does not lock a file that
is open for reading alone, and one of another user may not be opened for writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from .gpus import GpuFacts

FOLDER_VARIABLE = "DS_BENCH_LOCK_DIR"
_PREFIX = "ds_bench_lock_"
_POLL_SECONDS = 0.2
# For reading, since a file of another user may not be opened for writing; the folder is open to everybody, so no
# link is followed and a pipe does not block.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(slots=True)
class DeviceLocks:
    """What came of locking the devices of a run."""

    waited: bool = False
    """Whether another run held one of them: what was read of the machine before may have changed."""
    notes: list[str] = field(default_factory=list)
    """Why a second run on one of them would not be noticed."""


def device_names(accelerator: str, gpus: Sequence[GpuFacts], slots: Iterable[int]) -> dict[str, str]:
    """The locks of what ranks in these slots of this host use: a card each, on the CPU accelerator the processors.

    ``gpus``: the visible ones, in order. Lock → name for messages.
    """
    if accelerator != "cuda":
        return processor_names()
    return card_names([gpus[slot] for slot in slots if slot < len(gpus)])


def card_names(gpus: Sequence[GpuFacts]) -> dict[str, str]:
    """The lock of each card → the card's name for messages. MIG instances of one card share its lock."""
    return {gpu.uuid or f"gpu{gpu.index}": f"GPU {gpu.index}" for gpu in gpus}


def processor_names(processors: Iterable[int] | None = None) -> dict[str, str]:
    """The lock of a set of processors → its name for messages. ``processors``: by default those of this process.

    Two sets that are not equal have two locks: a scheduler gives its jobs separate ones, and a run on some of the
    processors of another is told by what the processors did besides its own work. The host's name is part of the lock,
    as several hosts may share the folder.
    """
    numbers = sorted(os.sched_getaffinity(0) if processors is None else processors)
    text = ",".join(map(str, numbers))
    shown = f"{numbers[0]}-{numbers[-1]}" if numbers == list(range(numbers[0], numbers[-1] + 1)) else text
    key = hashlib.sha256(f"{socket.gethostname()} {text}".encode()).hexdigest()[:16]
    return {f"processors_{key}": f"processors {shown}"}


def lock_folder() -> Path:
    """The folder of the locks, one for all users of this machine."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    return next((folder for folder in map(Path, ("/dev/shm", "/tmp")) if os.access(folder, os.W_OK)), Path("/tmp"))


@contextmanager
def locked_devices(names: Mapping[str, str], say: Callable[[str], None]) -> Iterator[DeviceLocks]:
    """Holds the locks of these devices; waits for those that another run holds, which ``say`` is told once.

    ``names``: lock → name for messages. Locks are taken in order of their names, so that two runs never wait for each
    other.
    """
    locks, folder = DeviceLocks(), lock_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        for name in sorted(names):
            path = folder / f"{_PREFIX}{re.sub(r'[^A-Za-z0-9-]', '_', name)}"
            try:
                file = _lock(path, names[name], locks, say)
            except OSError as error:
                locks.notes.append(
                    f"{names[name]} cannot be locked ({path}: {error.strerror}): a second run would not be noticed"
                )
            else:
                held.callback(_release, path, file)
        yield locks


def _lock(path: Path, shown: str, locks: DeviceLocks, say: Callable[[str], None]) -> BinaryIO:
    """Opens and locks a file. Raises OSError where that cannot be done."""
    told = False
    while True:
        # Opened anew each time, without waiting in flock: its holder removes the file, whose lock then excludes nobody.
        file = open(_open(path), "rb", buffering=0)  # noqa: SIM115 - open for as long as the lock is held
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                return file
            file.close()  # its holder removed it in between
        except BlockingIOError:
            if not told:
                locks.waited = told = True
                say(f"waiting for {shown}, which {_holder(file)} uses …")
            file.close()
            time.sleep(_POLL_SECONDS)
        except BaseException:
            file.close()
            raise


def _open(path: Path) -> int:
    """Opens the file of a lock, which is made if there is none. A file of another user may be locked too."""
    while True:
        try:
            # First without O_CREAT, which the kernel may refuse for another user's file in a sticky folder
            # (fs.protected_regular in Documentation/admin-guide/sysctl/fs.rst).
            return os.open(path, _FLAGS)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                handle = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
                os.fchmod(handle, 0o644)  # whatever the umask: other users must be able to open it
                return handle


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _release(path: Path, file: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # of another user
        # Before the file is closed: until the lock is released the file at this path is the one that is locked.
        path.unlink()
    file.close()


def _holder(file: BinaryIO) -> str:
    """Who holds the lock of a file, as the kernel lists it: ``process 4321``; of another user ``process 4321 of bob``.

    ``another run`` in another container, whose processes the kernel hides.
    """
    number = os.fstat(file.fileno()).st_ino
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 4321 00:1a:345 0 EOF
            if (
                len(words) > 5
                and words[1] == "FLOCK"
                and words[5].rpartition(":")[2] == str(number)
                and words[4] != "0"
            ):
                return f"process {words[4]}{_of_other_user(words[4])}"
    return "another run"


def _of_other_user(pid: str) -> str:
    process = Path("/proc", pid)
    with contextlib.suppress(OSError, KeyError):  # it has ended meanwhile, or the system does not know its user
        if process.stat().st_uid != os.getuid():
            return f" of {process.owner()}"
    return ""
