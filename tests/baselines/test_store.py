"""baselines.json as a file: bad ones, and several writers at once."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.baselines import store
from ds_bench.errors import UsageError
from tests.support.real_trials import ROOT


def test_there_is_nothing_in_a_file_that_does_not_exist(tmp_path: Path) -> None:
    assert store.read(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "5", '{"a": 1}', '{"a": [1]}', '{"a": {"x": NaN}}', '{"a": {}, "a": {}}', "name,tokens\n",
        '{"a": {}} {}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_bad_file_is_one_line_with_a_remedy(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        store.read(path)
    assert str(path) in str(caught.value)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@given(data=st.binary(max_size=60))
def test_whatever_stands_in_the_file_it_is_read_or_refused(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_bytes(data)
    found: object = {}
    with contextlib.suppress(UsageError):
        found = store.read(path)
    assert isinstance(found, dict)


def test_a_folder_or_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe):
        with pytest.raises(UsageError, match="not a regular file"):
            store.read(path)


def test_a_bad_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    path.write_text("{broken")
    with pytest.raises(UsageError):
        store.edit(path, lambda entries: {**entries, "a": {}})
    assert path.read_text() == "{broken"
    assert [file.name for file in tmp_path.iterdir()] == ["baselines.json"]


def test_a_change_that_fails_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    path.write_text('{"a": {"x": 1}}')
    with pytest.raises(UsageError, match="cannot be written"):
        store.edit(path, lambda entries: {**entries, "b": {"x": float("nan")}})
    assert json.loads(path.read_text()) == {"a": {"x": 1}}
    assert [file.name for file in tmp_path.iterdir()] == ["baselines.json"]


def test_a_folder_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        store.edit(tmp_path / "none" / "baselines.json", lambda entries: entries)


def test_entries_are_in_order_of_their_names_so_that_a_change_reads_well_in_a_diff(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    store.edit(path, lambda entries: {**entries, "b": {}})
    store.edit(path, lambda entries: {**entries, "a": {}})
    assert list(json.loads(path.read_text())) == ["a", "b"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o400


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("{}")
    link.symlink_to(real)
    store.edit(link, lambda entries: {**entries, "a": {}})
    assert link.is_symlink()
    assert json.loads(real.read_text()) == {"a": {}}


_SAVE_MANY = """
import sys
from pathlib import Path
from ds_bench.baselines import BaselineEntry, save_baseline
for number in range(25):
    save_baseline(BaselineEntry(name=f"{sys.argv[2]}{number}", throughput_tokens_per_sec=1.0), Path(sys.argv[1]))
"""


def test_processes_that_save_at_once_lose_none_of_each_others_entries(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    writers = [
        subprocess.Popen([sys.executable, "-c", _SAVE_MANY, str(path), name], cwd=ROOT) for name in ("a", "b", "c")
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    assert len(json.loads(path.read_text())) == 75
    assert [file.name for file in tmp_path.iterdir()] == ["baselines.json"]


def test_a_writer_that_was_killed_stops_no_later_one(tmp_path: Path) -> None:
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
