"""Files of token ids: read, hashed, and refused in one line where they cannot be trained on."""

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


def test_a_file_is_read_whole_with_its_largest_id_and_a_hash_of_its_content(tmp_path: Path) -> None:
    ids = numpy.arange(3_000_000) % 60_000
    ids[2_500_000] = 60_001  # in a later part than the first
    path = write(tmp_path / "with a space.uint16", ids)
    found = read_token_file(path, None)
    assert (found.dtype, found.tokens, found.read_tokens) == ("uint16", 3_000_000, 3_000_000)
    assert (found.largest_id, found.largest_at, found.note) == (60_001, 2_500_000, None)
    copy = write(tmp_path / "copy.bin", ids)
    os.utime(copy, (1, 1))
    assert read_token_file(copy, "uint16").digest == found.digest
    ids[2_999_999] += 1
    assert read_token_file(write(copy, ids), "uint16").digest != found.digest


def test_of_a_large_file_parts_are_read_and_the_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "_PART_BYTES", 400)
    monkeypatch.setattr(token_file, "_LARGEST_READ_WHOLE", 4000)
    ids = numpy.zeros(100_001)
    ids[[0, 100_000]] = 7, 9
    path = write(tmp_path / "large.u32", ids, "<u4")
    found = read_token_file(path, None)
    assert (found.tokens, found.read_tokens, found.largest_id, found.dtype) == (100_001, 1000, 9, "uint32")
    assert found.note is not None
    assert "391 KB, of which 3.91 KB in evenly spaced parts were read" in found.note
    os.utime(path, (1, 1))  # what was not read may have changed
    assert read_token_file(path, None).digest != found.digest


def refusal(path: Path, dtype: Any = None) -> str:
    with pytest.raises(UsageError) as caught:
        read_token_file(path, dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_file_of_ids_is_refused_with_the_remedy(tmp_path: Path) -> None:
    assert "none.uint16: No such file or directory" in refusal(tmp_path / "none.uint16")
    assert "is a folder (give a file" in refusal(tmp_path)
    assert "add --data-dtype uint16, or uint32" in refusal(write(tmp_path / "train.bin", [1]))
    (tmp_path / "odd.uint16").write_bytes(b"123")
    assert "has 3 bytes, which is no whole number of uint16 ids (it is cut off" in refusal(tmp_path / "odd.uint16")
    (tmp_path / "empty.uint32").touch()
    assert "is empty" in refusal(tmp_path / "empty.uint32")
    numpy.save(tmp_path / "header.npy", numpy.zeros(8, "<u2"))
    assert "write the ids alone: array.tofile(FILE)" in refusal(tmp_path / "header.npy", "uint16")
    os.mkfifo(tmp_path / "pipe.uint16")
    assert "is not a regular file" in refusal(tmp_path / "pipe.uint16")  # and nobody waits for a writer


def test_ids_beyond_the_vocabulary_and_less_than_a_sequence_are_refused(tmp_path: Path) -> None:
    found = read_token_file(write(tmp_path / "ids.uint16", [5, 999, 0]), None)
    found.require_usable(1000, "the model tiny", 3)
    with pytest.raises(UsageError, match=r"holds the id 999 \(token 1\), beyond the 999 ids of the model tiny"):
        found.require_usable(999, "the model tiny", 3)
    with pytest.raises(UsageError, match=r"has 3 tokens, fewer than one sequence of 4 .*--seq-length 3 or less"):
        found.require_usable(None, "", 4)
