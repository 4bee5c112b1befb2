"""baselines.json as a file: bad ones, and several writers at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_bench.baselines import store
from ds_bench.errors import UsageError
from tests.support.real_trials import ROOT


@pytest.mark.parametrize("text", ["{", "[]", '{"a": [1]}', '{"a": {"x": NaN}}', '{"a": {}, "a": {}}', "[" * 100_000])
def test_invalid_file_is_one_line_with_a_remedy_and_stays_as_it_was(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        store.edit(path, lambda entries: {**entries, "b": {}})
    assert str(path) in str(caught.value)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    assert (path.read_text(), [*tmp_path.iterdir()]) == (text, [path])


def test_missing_file_is_empty_and_one_in_no_folder_cannot_be_written(tmp_path: Path) -> None:
    assert store.read(tmp_path / "none.json") is None
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        store.edit(tmp_path / "none" / "baselines.json", lambda entries: entries)


def test_error_of_a_change_is_not_reported_as_a_failed_write(tmp_path: Path) -> None:
    def fail(_entries: store.Entries) -> store.Entries:
        raise ValueError("zero1 ended with OOM")

    with pytest.raises(ValueError, match=r"^zero1 ended with OOM$"):
        store.edit(tmp_path / "baselines.json", fail)
    assert not (tmp_path / "baselines.json").exists()


def test_entries_are_sorted_and_a_symbolic_link_stays_one_with_the_lock_of_its_file(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    locks: list[str] = []

    def add(entries: store.Entries) -> store.Entries:
        locks.extend(path.name for path in tmp_path.glob(".*.lock"))
        return {**entries, "b": {}}

    store.edit(link, add)
    store.edit(link, lambda entries: {**entries, "a": {}})
    assert locks == [".real.json.lock"], "of writers that use either name"
    assert link.is_symlink()
    assert list(json.loads(real.read_text())) == ["a", "b"]


SAVE_MANY = """
import os, signal, sys
from pathlib import Path
from ds_bench.baselines import store
path, name = Path(sys.argv[1]), sys.argv[2]
for number in range(25):
    store.edit(path, lambda entries: {**entries, f"{name}{number}": {}})
if name == "killed":
    store.edit(path, lambda entries: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_processes_that_save_at_once_lose_no_entry_and_a_killed_one_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    commands = [[sys.executable, "-c", SAVE_MANY, str(path), name] for name in ("a", "b", "killed")]
    writers = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    assert [writer.wait(120) for writer in writers] == [0, 0, -9]
    store.edit(path, lambda entries: {**entries, "last": {}})
    assert len(store.read(path) or {}) == 76
    assert [file.name for file in tmp_path.iterdir()] == ["baselines.json"]
