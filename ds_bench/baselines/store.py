"""The file of baselines: a JSON object keyed by name, read whole, changed by one writer at a time.

Only the file is known here; what stands in an entry is for :mod:`baselines`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..records.rank_files import write_json
from ..records.strict_json import NotJsonError, Reader, decode
from ..system import files

Entries = dict[str, dict[str, Any]]
"""Name → entry, as it stands in the file."""

_LARGEST_BYTES = 2**26
_REMEDY = "restore it from version control, or remove it and save anew"


def read(path: Path) -> Entries | None:
    """Every entry, unchecked; None where there is no such file. Raises UsageError for anything but such an object."""
    data = _bytes(path)
    if data is None:
        return None
    notes: list[str] = []
    try:
        value = Reader().parse(decode(data), str(path), notes)
    except NotJsonError as error:
        raise UsageError(f"{path} {error}", remedy=_REMEDY) from None
    if notes:
        raise UsageError(notes[0], remedy="correct it by hand")
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object keyed by name", remedy=_REMEDY)
    for name, entry in value.items():
        if not isinstance(entry, dict):
            raise UsageError(f"{path}: {name!r} is not a JSON object", remedy=_REMEDY)
    return value


def _bytes(path: Path) -> bytes | None:
    """None where there is no such file; never waits for a pipe or a device."""
    try:
        return files.read_bytes(path, _LARGEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise UsageError(f"{path} is larger than any file of baselines", remedy=_REMEDY) from None
        if error.errno == errno.EINVAL:
            raise UsageError(f"{path} is not a regular file", remedy="give the file that baseline save wrote") from None
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy="give a file that you may read") from None


def edit(path: Path, change: Callable[[Entries], Entries]) -> None:
    """Replaces the file by what ``change`` makes of its entries, whole or not at all.

    Writers wait for each other, so none undoes what another wrote. Raises UsageError where the file is bad or cannot
    be written; it is then as it was.
    """
    try:
        path = path.resolve()  # a link stays one
        with _held(path.with_name(f".{path.name}.lock")):
            write_json(path, dict(sorted(change(read(path) or {}).items())))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{path} cannot be written: {reason}", remedy="give a file in a folder you may write"
        ) from None


@contextlib.contextmanager
def _held(lock: Path) -> Iterator[None]:
    """Alone among all who hold this lock; the kernel lets go of it however a holder ends. Leaves no file behind."""
    while True:
        handle = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _is(lock, handle):
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return
        finally:
            os.close(handle)


def _is(path: Path, handle: int) -> bool:
    """Whether the open file is still the one of that name, and not what an earlier holder has removed."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
