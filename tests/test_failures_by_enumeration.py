"""A run is killed, or its disk fails, at its n-th change to a file, for n = 1, 2, … until it succeeds. Resuming
completes it: nothing finished is lost, nothing runs twice, and no temporary file remains.

Changes are seen by an audit hook (PEP 578), and ``os.fsync``, which raises no audit event, by a wrapper.
"""

from __future__ import annotations

import errno
import json
import multiprocessing.process
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_bench.records import run_folder
from tests.support.fakes import FakeLauncher
from tests.support.scripted_run import ScriptedRun

STAGES = ("--stages", "0", "2")
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")


def _change_of(event: str, arguments: tuple[Any, ...], folder: str) -> bool:
    """Whether an audit event is about to change a file below ``folder``."""
    if event == "open":
        path, _, flags = arguments
        return str(path).startswith(folder) and bool(flags & (os.O_WRONLY | os.O_RDWR))
    return event in CHANGES and str(arguments[0]).startswith(folder)


NEVER_REACHED = 77
"""Exit code of a run that ended before its n-th change."""


def _fail_at(number: int, folder: Path, fail: Callable[[str], None]) -> Callable[[], bool]:
    """Call ``fail`` in place of the n-th change from here on; this cannot be undone in this process.

    Return a function that returns whether that change was reached.
    """
    seen = 0

    def count(what: str) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            fail(what)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _change_of(event, arguments, str(folder)):
            count(event)

    os.fsync = lambda _descriptor: count("fsync")
    sys.addaudithook(hook)
    return lambda: seen >= number


def _kill(_what: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(what: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what)


def _run_in_child(scripted: ScriptedRun, number: int, fail: Callable[[str], None], errors: Path) -> int:
    """Start the comparison in a forked process that fails at the n-th change. Return its wait status."""
    child = os.fork()
    if child == 0:
        with errors.open("w") as file:
            os.dup2(file.fileno(), 2)
            # This process must not use the temporary folder of the test's own process.
            multiprocessing.process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
            try:
                reached = _fail_at(number, scripted.output, fail)
                code = scripted.run(*STAGES)
                code = code if reached() else NEVER_REACHED
            except BaseException:
                traceback.print_exc()
                code = 99
        os._exit(code)
    return os.waitpid(child, 0)[1]


def _finished(scripted: ScriptedRun) -> int:
    """Number of trials whose record is complete on disk."""
    lines = b"".join(path.read_bytes() for path in scripted.output.glob("runs/*/records.jsonl")).splitlines(True)
    return sum(line.endswith(b"\n") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("fail", [_kill, _raise], ids=["killed", "disk full"])
def test_a_run_that_fails_at_any_change_is_completed_by_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[str], None]
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # no power is lost here
    for number in range(1, 1000):
        scripted = ScriptedRun(tmp_path / str(number), monkeypatch)
        errors = tmp_path / "errors.txt"
        status = _run_in_child(scripted, number, fail, errors)
        assert "Traceback" not in errors.read_text(), f"change {number}: {errors.read_text()}"
        finished, folders = _finished(scripted), [*scripted.output.glob(f"runs/*/{run_folder.RUN_FILE}")]
        script = FakeLauncher()
        if not folders:
            assert finished == 0
            scripted = ScriptedRun(tmp_path / f"{number}_again", monkeypatch)
            assert scripted.run(*STAGES, script=script) == 0
        elif scripted.resume("--quiet", script=script):
            # Ended before the trials were planned: there is nothing to resume.
            assert not json.loads(folders[0].read_text())["trials"], f"change {number}"
            continue
        assert len(script.launched) == 2 - finished, f"change {number}"
        assert [(row["strategy"], row["success"]) for row in scripted.rows()] == [("zero0", True), ("zero2", True)]
        assert not [*scripted.output.glob("**/.*.tmp")], f"change {number}"
        if os.waitstatus_to_exitcode(status) == NEVER_REACHED:
            assert number > 20
            return
    pytest.fail("the run never succeeded")
