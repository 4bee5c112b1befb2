"""Which locks of torch's build cache are stale, with real processes that hold them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds_bench.system import build_locks
from tests.support.namespaces import in_namespace


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A lock as torch's file baton leaves it: empty, in the op's own folder."""
    (tmp_path / "cpu_adam").mkdir()
    path = tmp_path / "cpu_adam" / "lock"
    path.touch()
    return path


def test_a_lock_that_nobody_holds_open_is_stale(lock: Path) -> None:
    assert build_locks.stale_locks(lock.parent.parent) == [lock]


def test_a_lock_that_this_process_holds_open_is_not(lock: Path) -> None:
    with lock.open():
        assert build_locks.stale_locks(lock.parent.parent) == []
    assert build_locks.stale_locks(lock.parent.parent) == [lock]


def test_a_lock_that_another_living_process_holds_open_is_not_until_it_is_killed(lock: Path) -> None:
    program = f"import time; held = open({str(lock)!r}); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert build_locks.remove_stale_locks(lock.parent.parent) == []
        assert lock.exists()
        holder.kill()
        holder.wait()
        assert build_locks.remove_stale_locks(lock.parent.parent) == [lock]
    assert not lock.exists()


def test_a_lock_behind_a_link_to_the_cache_is_known_as_the_one_that_is_held(lock: Path, tmp_path: Path) -> None:
    link = tmp_path.parent / f"{tmp_path.name}_link"
    link.symlink_to(tmp_path)
    try:
        with lock.open():
            assert build_locks.stale_locks(link) == []
        assert build_locks.stale_locks(link) == [link / "cpu_adam" / "lock"]
    finally:
        link.unlink()


def test_without_locks_there_is_nothing_stale(tmp_path: Path) -> None:
    assert build_locks.stale_locks(tmp_path) == []
    assert build_locks.stale_locks(tmp_path / "missing") == []


def test_a_lock_that_a_process_of_another_namespace_holds_is_not_stale(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    imports = "from pathlib import Path; from ds_bench.system.build_locks import stale_locks"
    program = f"{imports}; print(stale_locks(Path('{tmp_path}')))"
    script = f'{sys.executable} -c "{program}"'
    with lock.open("x"):  # by this process, which the new namespace does not show
        assert in_namespace("--pid", "--mount-proc", script=script) == "[]"
    assert build_locks.stale_locks(tmp_path) == [lock]
