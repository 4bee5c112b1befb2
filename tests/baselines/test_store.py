"""baselines.json as a file: bad ones, and several writers at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_bench.baselines import store
from ds_bench.errors import UsageError
from tests.support.real_trials import ROOT


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "5", '{"a": 1}', '{"a": [1]}', '{"a": {"x": NaN}}', '{"a": {}, "a": {}}', "name,tokens\n",
        '{"a": {}} {}', "[" * 100_000,
    ],
)  # fmt: skip
def test_invalid_file_is_one_line_with_a_remedy(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        store.read(path)
    assert str(path) in str(caught.value)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_missing_file_is_empty_and_a_folder_or_pipe_is_refused_at_once(tmp_path: Path) -> None:
    assert store.read(tmp_path / "none.json") is None
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe):
        with pytest.raises(UsageError, match="not a regular file"):
            store.read(path)
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        store.edit(tmp_path / "none" / "baselines.json", lambda entries: entries)


@pytest.mark.parametrize("text", ["{broken", '{"a": {"x": 1}}'])
def test_failed_change_leaves_the_file_as_it_was(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        store.edit(path, lambda entries: {**entries, "b": {"x": float("nan")}})
    assert path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["baselines.json"]


def test_entries_are_sorted_and_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    store.edit(link, lambda entries: {**entries, "b": {}})
    store.edit(link, lambda entries: {**entries, "a": {}})
    assert link.is_symlink()
    assert list(json.loads(real.read_text())) == ["a", "b"]


_SAVE_MANY = """
import sys
from pathlib import Path
from ds_bench.baselines import BaselineEntry, save_baseline
for number in range(25):
    save_baseline(BaselineEntry(name=f"{sys.argv[2]}{number}", throughput_tokens_per_sec=1.0), Path(sys.argv[1]))
"""


def test_processes_that_save_at_once_lose_no_entry(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    writers = [
        subprocess.Popen([sys.executable, "-c", _SAVE_MANY, str(path), name], cwd=ROOT) for name in ("a", "b", "c")
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    assert len(json.loads(path.read_text())) == 75
    assert [file.name for file in tmp_path.iterdir()] == ["baselines.json"]


def test_killed_writer_does_not_block_a_later_one(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    program = f"""
import os, signal
from pathlib import Path
from ds_bench.baselines import store
store.edit(Path({str(path)!r}), lambda entries: os.kill(os.getpid(), signal.SIGKILL))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == -9
    store.edit(path, lambda entries: {**entries, "a": {}})
    assert store.read(path) == {"a": {}}
