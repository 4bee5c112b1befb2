"""Reads files of other programs: regular files only, up to a maximum size, without waiting for a writer.

Writes files whole or not at all. Checks that a folder can be written and that its disk is not full. Tells in-memory and
network file systems from others.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import PreflightError

FULL_DISK_BYTES = 8 * 2**20
"""A disk with less free space than this counts as full."""
FIRST_FILES_BYTES = 2**20
"""Upper bound on what a run writes before its first trial."""
_BUFFER_BYTES = 2**20


@contextmanager
def opened(path: Path, max_bytes: int) -> Iterator[BinaryIO]:
    """Open a regular file of ``max_bytes`` or less for reading.

    Raises OSError: EINVAL for a folder, pipe, socket or device; EILSEQ for a name with a null byte; EFBIG for a larger
    file.
    """
    if "\0" in str(path):
        raise OSError(errno.EILSEQ, "the name contains a null byte", str(path))
    if not stat.S_ISREG(path.stat().st_mode):  # opening a device can already have an effect
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    # O_NONBLOCK: if the path has become a pipe, opening it would wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # Again, since the path may have been replaced in between.
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        if facts.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"is larger than {max_bytes} bytes", str(path))
        with os.fdopen(handle, "rb", buffering=_BUFFER_BYTES, closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a regular file. Raises OSError as :func:`opened` does, and if it grows past the limit."""
    with opened(path, max_bytes) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"is larger than {max_bytes} bytes", str(path))
    return data


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file atomically: temporary name, fsync, rename.

    The target of a link is replaced, not the link; a device or pipe is written to. ``mode``: permissions before the
    umask is applied. Raises OSError naming the file.
    """
    write_texts({path: text}, mode)


def write_texts(texts: Mapping[Path, str], mode: int = 0o666) -> None:
    """Write several files as :func:`write_text` does; no file is replaced before all are on disk.

    A full disk therefore changes nothing; only a kill between two renames leaves some new and some old.
    """
    renames: list[tuple[Path, Path]] = []
    target = Path()
    try:
        for path, text in texts.items():
            target = path.resolve()
            if target.exists() and not target.is_file():
                target.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
                continue
            # Beside the target: rename(2) works within one file system only. The pid keeps two writers apart,
            # and remove_temporaries recognizes the file by it.
            temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            # Noted before it is made, so that it is removed whatever fails from here on.
            renames.append((temporary, target))
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
            # backslashreplace: a file name that is not UTF-8 holds lone surrogates, which cannot be encoded.
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
                file.write(text)
                file.flush()
                # Before the rename, or a power failure could leave the new name with an empty file.
                os.fsync(file.fileno())
        for temporary, target in renames:
            temporary.replace(target)
    except OSError as error:
        # Errors of write() and fsync() name no file.
        raise OSError(error.errno, error.strerror, str(target)) from None
    finally:
        for temporary, _ in renames:
            temporary.unlink(missing_ok=True)


@contextmanager
def locked_file(path: Path, wait: Callable[[], None]) -> Iterator[int]:
    """Hold the lock of a file and yield its descriptor. Call ``wait`` first if another process holds the lock.

    The kernel releases the lock when every process that has the descriptor has ended. The file is created if missing
    and stays. Raises OSError if it cannot be opened or locked.
    """
    # The folder is open to every user, so no link is followed. The file is opened in two steps: with O_CREAT the kernel
    # may refuse another user's file in a sticky folder (Documentation/admin-guide/sysctl/fs.rst, fs.protected_regular).
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(FileExistsError):
        made = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
        os.fchmod(made, 0o644)  # whatever the umask: other users must be able to open it
        os.close(made)
    # NFS grants an exclusive lock only on a file that is open for writing (flock(2)); another user's file cannot be.
    try:
        handle = os.open(path, flags | os.O_RDWR)
    except PermissionError:
        handle = os.open(path, flags | os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def remove_temporaries(folder: Path, name: str) -> None:
    """Remove temporary files that killed writers of ``name`` (a pattern) left behind. No such file may be in use."""
    for temporary in folder.glob(f".{name}.*.tmp"):
        # The part before "tmp" is the writer's pid; other files are left alone.
        if temporary.name.split(".")[-2].isdecimal() and temporary.is_file():
            temporary.unlink(missing_ok=True)


def disk_is_full(folder: str | None) -> bool:
    """Return whether a folder's file system, or the user's quota there, has less than 8 MiB left; False for None."""
    if folder is None:
        return False
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            # This allocates blocks; statvfs(3) does not show a user's quota.
            os.posix_fallocate(probe.fileno(), 0, FULL_DISK_BYTES)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False


def nearest_existing(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def require_writable(folder: Path, flag: str, file_bytes: int = 0) -> None:
    """Raise PreflightError if no file of ``file_bytes`` can be created in ``folder`` or, if that is missing, its
    nearest existing parent.

    ``flag``: the flag that named it.
    """
    try:
        # The folder may be missing, and is not created here: a refused run leaves nothing behind.
        with tempfile.TemporaryFile(dir=nearest_existing(folder)) as probe:
            probe.write(bytes(file_bytes))
            probe.flush()
    except OSError as error:
        raise not_writable(folder, flag, error) from None


def not_writable(folder: Path, flag: str, error: OSError) -> PreflightError:
    """Return the error for a folder that cannot be written. ``flag``: the flag that named it."""
    problem = f"{flag} {folder} cannot be written: {error.strerror or error}"
    return PreflightError(problem, remedy=remedy_of(error))


def remedy_of(error: OSError) -> str:
    """Return what to do about a file or folder that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space or inodes on that disk, or give a folder on another one"
    if error.errno == errno.ENOENT:  # in /proc, or in a folder that was removed
        return "give a folder that you can write to, and leave it in place while this runs"
    return "give a folder that you can write to"


def require_working_folder() -> None:
    """Raise PreflightError if the current folder was removed: relative paths lead nowhere then."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise PreflightError("the current folder no longer exists", remedy="go to one that does") from None


IN_MEMORY = ("tmpfs", "ramfs")
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "fuse", "ceph", "9p", "virtiofs")
"""How the names of network file systems begin."""


def file_system(path: Path) -> str | None:
    """Return the type of the file system that holds ``path``; None if the kernel does not show it."""
    import psutil

    try:
        mounts = [(Path(mount.mountpoint), mount.fstype) for mount in psutil.disk_partitions(all=True)]
    except OSError:
        return None
    # The deepest mount above the path holds it; if there are several at one place, the last, which covers the others.
    holding = [mount for mount in reversed(mounts) if path.resolve().is_relative_to(mount[0])]
    return max(holding, key=lambda mount: len(mount[0].parts), default=(None, None))[1]
