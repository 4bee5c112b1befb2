"""Files of token ids: read, hashed, and refused in one line if they cannot be trained on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest

from ds_bench.config import token_file
from ds_bench.config.token_file import read_token_file
from ds_bench.errors import UsageError


def write(path: Path, ids: Any, dtype: str = "<u2") -> Path:
    numpy.asarray(ids, dtype=dtype).tofile(path)
    return path


def test_a_file_is_read_whole_or_in_parts_with_its_largest_id_and_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file, "_PART_BYTES", 400)
    ids = numpy.arange(3000) % 60_000
    ids[2500] = 60_001  # in a later part than the first
    found = read_token_file(write(tmp_path / "with a space.uint16", ids), None)
    assert (found.dtype, found.tokens, found.read_tokens) == ("uint16", 3000, 3000)
    assert (found.largest_id, found.largest_at, found.note) == (60_001, 2500, None)
    copy = write(tmp_path / "copy.bin", ids)
    os.utime(copy, (1, 1))
    assert read_token_file(copy, "uint16").digest == found.digest
    ids[2999] += 1
    assert read_token_file(write(copy, ids), "uint16").digest != found.digest

    monkeypatch.setattr(token_file, "_LARGEST_READ_WHOLE", 4000)
    ids = numpy.zeros(100_001)
    ids[[0, 100_000]] = 7, 9
    path = write(tmp_path / "large.u32", ids, "<u4")
    found = read_token_file(path, None)
    assert (found.tokens, found.read_tokens, found.largest_id, found.dtype) == (100_001, 1000, 9, "uint32")
    assert f"only 3.91 KB of {path} (391 KB), in evenly spaced parts" in (found.note or "")
    os.utime(path, (1, 1))  # what was not read may have changed
    assert read_token_file(path, None).digest != found.digest


def test_unusable_files_are_refused_with_the_remedy(tmp_path: Path, subtests: pytest.Subtests) -> None:
    (tmp_path / "odd.uint16").write_bytes(b"123")
    (tmp_path / "empty.uint32").touch()
    numpy.save(tmp_path / "header.npy", numpy.zeros(8, "<u2"))
    for name, message in (
        ("none.uint16", "none.uint16: No such file or directory"),
        ("header.npy", "Give --data-dtype uint16 or uint32"),
        ("odd.uint16", r"has 3 bytes, which is not a whole number of uint16 ids\. It is cut off"),
        ("empty.uint32", "is empty"),
    ):
        with subtests.test(name), pytest.raises(UsageError, match=message):
            read_token_file(tmp_path / name, None)
    with pytest.raises(UsageError, match=r"Write only the ids: array\.tofile"):
        read_token_file(tmp_path / "header.npy", "uint16")
    found = read_token_file(write(tmp_path / "ids.uint16", [5, 999, 0]), None)
    found.require_usable(1000, "the model tiny", 3)
    with pytest.raises(UsageError, match=r"has the id 999 at position 1, but the model tiny has only 999 ids"):
        found.require_usable(999, "the model tiny", 3)
    with pytest.raises(UsageError, match=r"has 3 tokens, fewer than one sequence of 4. Give .* 3 tokens or fewer"):
        found.require_usable(None, "", 4)
