"""Programs that start other processes: all of them end with the program, at its time limit, and with the caller."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ds_bench.system import helper_programs
from tests.support.marked_processes import MARK, find_marked, left_after

STARTED = (
    "subprocess.Popen(['sleep', '100'])",  # holds the pipes
    "subprocess.Popen(['setsid', 'sleep', '100'])",
    "subprocess.Popen(['sleep', '100'], process_group=0)",  # as ninja's
    "subprocess.run(['sh', '-c', 'setsid sleep 100 &'])",  # an orphan
    "subprocess.Popen(['sh', '-c', 'trap \"\" TERM; sleep 100; sleep 100'])",
)
PROGRAM = """
import os, signal, subprocess, sys, tempfile, time
STARTED
tempfile.mkdtemp()
print("began", flush=True)
"""


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The mark of this test's processes, whose temporary files go to its folder."""
    monkeypatch.setenv(MARK, tmp_path.name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path.name  # pytest itself is not marked: /proc shows the variables that a process began with


def program(started: str, then: str = "") -> list[str]:
    return [sys.executable, "-c", PROGRAM.replace("STARTED", started) + then]


def test_program_takes_all_that_it_started_with_it(mark: str, tmp_path: Path) -> None:
    start = time.monotonic()
    done = helper_programs.run_program(program("; ".join(STARTED), "sys.exit(3)"), environment={}, timeout_seconds=60)
    assert (done.returncode, done.stdout) == (3, b"began\n")
    assert time.monotonic() - start < 20
    assert find_marked(mark) == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("then", ["time.sleep(100)", "os.killpg(0, signal.SIGSTOP)"], ids=["hangs", "stops itself"])
def test_a_program_that_takes_too_long_is_ended_with_all_that_it_started(then: str, mark: str, tmp_path: Path) -> None:
    seconds: list[float] = []
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        helper_programs.run_program(
            program("; ".join(STARTED), then), environment={}, timeout_seconds=3, listen=seconds.append
        )
    assert caught.value.stdout == b"began\n"
    assert [round(each) for each in seconds] == [1, 2]
    assert find_marked(mark) == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("then", ["time.sleep(100)", "os.killpg(0, signal.SIGSTOP)"], ids=["hangs", "stops itself"])
def test_a_program_ends_with_all_that_it_started_when_this_process_is_killed(
    then: str, mark: str, tmp_path: Path
) -> None:
    command = program("; ".join(STARTED), f"open({str(tmp_path / 'began')!r}, 'w'); {then}")
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from ds_bench.system import helper_programs\n"
            f"helper_programs.run_program({command!r}, environment={{}}, timeout_seconds=100)",
        ]
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(find_marked(mark)) >= 2 + len(STARTED)
    parent.kill()
    parent.wait()
    assert left_after(mark) == set()
    assert [path.name for path in tmp_path.iterdir()] == ["began"]


@pytest.mark.slow
def test_a_stopped_leader_is_ended_too(mark: str) -> None:
    stop = f"os.kill(os.getppid(), {int(signal.SIGSTOP)}); time.sleep(100)"
    with pytest.raises(subprocess.TimeoutExpired):
        helper_programs.run_program(
            program("subprocess.Popen(['sleep', '100'])", stop), environment={}, timeout_seconds=3
        )
    assert find_marked(mark) == set()


def test_a_lock_that_the_leader_keeps_is_released_when_the_whole_tree_has_ended(mark: str, tmp_path: Path) -> None:
    keeper = textwrap.dedent(f"""
        import fcntl, shlex
        from ds_bench.system import helper_programs
        lock = open({str(tmp_path / "lock")!r}, "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["setsid", "--fork", "sh", "-c", "trap '' TERM; sleep 100; sleep 100"]
        command = ["sh", "-c", shlex.join(command) + "; sleep 100"]
        helper_programs.run_program(command, environment={{}}, timeout_seconds=100, kept_open=[lock.fileno()])
    """)
    parent = subprocess.Popen([sys.executable, "-c", keeper])
    deadline = time.monotonic() + 60
    while len(find_marked(mark)) < 6 and time.monotonic() < deadline:
        time.sleep(0.02)
    others = find_marked(mark) - {parent.pid}
    parent.kill()
    parent.wait()
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert len(find_marked(mark)) <= 1, "only the leader, which is about to end"
    assert len(others) == 5, "leader, shell, its sleep, and the orphans"
    assert left_after(mark) == set()


def test_a_program_runs_without_a_folder_for_temporary_files_and_has_the_exit_code_of_a_shell() -> None:
    code = (
        "import resource; from ds_bench.system import helper_programs\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
        "done = helper_programs.run_program(['sh', '-c', 'echo ran; kill -9 $$'], environment={}, timeout_seconds=60);"
        "print(done.stdout, done.returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"b'ran\\n' {128 + signal.SIGKILL}\n"


def test_the_objects_that_a_tool_prints_are_its_reply_and_other_lines_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for output, errors, objects, ending in (
        (b'ninja: stopped\n3\nnull\n{"a": 1}\n{"b": 2}\n{"cut', b"", ({"a": 1}, {"b": 2}), "ended with code 5"),
        (b"", b"Traceback\nValueError: x\n", (), "ended with code 5: ValueError: x"),
    ):
        done = subprocess.CompletedProcess([], 5, output, errors)
        monkeypatch.setattr(helper_programs, "run_program", lambda *_, done=done, **__: done)
        reply = helper_programs.run_tool("worker.any", environment={})
        assert (reply.objects, reply.ending) == (objects, ending)
        assert reply.last_object("it") == (objects[-1] if objects else {"error": f"it {ending}"})
    late = subprocess.TimeoutExpired([], 2, output=b"{}")
    monkeypatch.setattr(helper_programs, "run_program", lambda *_, **__: (_ for _ in ()).throw(late))
    assert helper_programs.run_tool("worker.any", environment={}, timeout_seconds=2).ending == "took more than 2 s"
