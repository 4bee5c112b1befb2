"""Files that a flag names."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError
from ..system.files import write_text


def check_output(flag: str, path: Path) -> None:
    """Raises UsageError for a path that cannot be a file, before anything is read."""
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a folder", remedy="give a file name")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: no folder {path.parent}", remedy="make it first")


def write_output(flag: str, path: Path, content: str | bytes) -> None:
    """Writes the file. Raises UsageError where it cannot be written."""
    try:
        # Text replaces the file at once, by a rename; a Parquet file is written in its place.
        if isinstance(content, str):
            write_text(path, content)
        else:
            path.write_bytes(content)
    except OSError as error:
        problem = f"{flag} {path}: {error.strerror or error}"
        raise UsageError(problem, remedy="give a file that you may write") from None
