"""Programs that start other processes: all of them end with the program, at its time limit, and with the caller."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_bench.system import helper_programs, processes

MARK = "DS_BENCH_TEST_MARK"
"""Variable that marks the processes of a test, in whatever session and below whatever parent they are."""
STARTED = (
    "subprocess.Popen(['sleep', '100'])",  # holds the pipes
    "subprocess.Popen(['setsid', 'sleep', '100'])",
    "subprocess.Popen(['sleep', '100'], process_group=0)",  # as ninja's
    "subprocess.run(['sh', '-c', 'setsid sleep 100 &'])",  # an orphan
    "subprocess.Popen(['sh', '-c', 'trap \"\" TERM; sleep 100; sleep 100'])",
)
PROGRAM = f"""
import os, signal, subprocess, sys, tempfile, time
{"; ".join(STARTED)}
tempfile.mkdtemp()
print("began", flush=True)
"""
ENDLESS = {
    "hangs": "time.sleep(100)",
    "stops itself": "os.killpg(0, signal.SIGSTOP)",
    "stops its leader": "os.kill(os.getppid(), signal.SIGSTOP); time.sleep(100)",
}


def find_marked(mark: str) -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in variables and processes.is_alive(int(entry.name)):
                found.add(int(entry.name))
    return found


def left_after(mark: str, seconds: float = 15) -> set[int]:
    """The marked processes that do not end within that time."""
    deadline = time.monotonic() + seconds
    while (left := find_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The mark of this test's processes, whose temporary files go to its folder."""
    monkeypatch.setenv(MARK, tmp_path.name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path.name  # pytest itself is not marked: /proc shows the variables that a process began with


def program(then: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM + then]


def test_program_takes_all_that_it_started_with_it(mark: str, tmp_path: Path) -> None:
    start = time.monotonic()
    done = helper_programs.run_program(program("sys.exit(3)"), environment={}, timeout_seconds=60)
    assert (done.returncode, done.stdout) == (3, b"began\n")
    assert time.monotonic() - start < 50
    assert find_marked(mark) == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", [*list(ENDLESS)[:2], pytest.param("stops its leader", marks=pytest.mark.slow)])
def test_program_that_takes_too_long_is_ended_with_all_that_it_started(way: str, mark: str, tmp_path: Path) -> None:
    seconds: list[float] = []
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        helper_programs.run_program(program(ENDLESS[way]), environment={}, timeout_seconds=6, listen=seconds.append)
    assert caught.value.stdout == b"began\n"
    assert len(seconds) >= 2
    assert all(each >= number for number, each in enumerate(seconds, 1)), "about once a second"
    assert find_marked(mark) == set()
    if way != "stops its leader":
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["hangs", "stops itself"])
def test_program_ends_with_all_that_it_started_when_this_process_is_killed(way: str, mark: str, tmp_path: Path) -> None:
    command = program(f"open({str(tmp_path / 'began')!r}, 'w'); {ENDLESS[way]}")
    caller = f"""from ds_bench.system import helper_programs, processes
helper_programs.run_program({command!r}, environment={{}}, timeout_seconds=100)"""
    parent = subprocess.Popen([sys.executable, "-c", caller])
    deadline = time.monotonic() + 60
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(find_marked(mark)) >= 2 + len(STARTED)
    parent.kill()
    parent.wait()
    assert left_after(mark) == set()
    assert [path.name for path in tmp_path.iterdir()] == ["began"]


def test_file_is_kept_open_by_the_leader_that_ends_last(tmp_path: Path) -> None:
    code = "import os, sys; print(os.path.samefile(f'/proc/{os.getppid()}/fd/{sys.argv[1]}', sys.argv[2]))"
    with (tmp_path / "lock").open("w") as lock:
        words = [sys.executable, "-c", code, str(lock.fileno()), lock.name]
        done = helper_programs.run_program(words, environment={}, timeout_seconds=60, kept_open=[lock.fileno()])
    assert done.stdout == b"True\n"


def test_program_runs_without_a_folder_for_temporary_files_and_has_the_exit_code_of_a_shell() -> None:
    code = (
        "import resource; from ds_bench.system import helper_programs\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
        "done = helper_programs.run_program(['sh', '-c', 'echo ran; kill -9 $$'], environment={}, timeout_seconds=60);"
        "print(done.stdout, done.returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"b'ran\\n' {128 + signal.SIGKILL}\n"


def test_objects_that_a_tool_prints_are_its_reply_and_other_lines_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
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
