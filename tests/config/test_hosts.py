"""Hostfiles, read as DeepSpeed reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_bench.config.hosts import read_hostfile
from ds_bench.errors import UsageError


def test_a_hostfile_is_read_by_lines_with_comments_and_blanks(tmp_path: Path, subtests: pytest.Subtests) -> None:
    path = tmp_path / "hosts"
    path.write_text("# cluster\n\n  node-1   slots=8  # first\nnode-2\tslots=4 max_slots=8\n")
    assert read_hostfile(path) == {"node-1": 8, "node-2": 4}
    for line in (
        *("node-2", "node-2 slots=0", "node-2 slots = 8", "node-1 slots=8"),
        *("node-2 slots=²", "node-2 gpus=8", "-o slots=1"),
    ):
        path.write_text(f"node-1 slots=8\n\n{line}\n")
        with subtests.test(line), pytest.raises(UsageError) as caught:
            read_hostfile(path)
        assert f"{path}, line 3: {line!r}" in str(caught.value)
    path.write_bytes(b"# nobody\n")
    with pytest.raises(UsageError, match="names no host"):
        read_hostfile(path)
    with pytest.raises(UsageError, match=r"hostfile .*Give a readable file"):
        read_hostfile(tmp_path)
