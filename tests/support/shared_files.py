"""Files outside the repository: tests that read them are skipped if they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]


class FilesAbsent(pytest.skip.Exception):
    """Skips a test without its files, even in CI."""


def shared_files(folder: str, pattern: str) -> list[Path]:
    """The files of a folder next to the checkout, or in $DS_BENCH_SHARED. Skips the test if it has no files."""
    root = Path(os.environ.get("DS_BENCH_SHARED", _REPOSITORY.parent / "shared"))
    found = sorted((root / folder).glob(pattern))
    if not found:
        raise FilesAbsent(f"no {folder} here", _use_item_location=True)
    return found
