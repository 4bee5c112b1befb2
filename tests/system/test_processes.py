"""Which processes live, how they are ended, and what forbids forking a process: real children, a driver of our own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_bench.system import processes

FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60 if __import__("platform").machine() == "x86_64" else 93, 0)
"""


def test_process_whose_first_thread_has_ended_lives_while_its_others_do() -> None:
    """A rank that dies in the driver: its leader is a zombie, and a thread still holds the card."""
    with subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 10
        while processes.stat_values(Path(f"/proc/{child.pid}/stat"))[0] != "Z" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.monotonic() < deadline
        assert processes.is_alive(child.pid)
        child.kill()
        while processes.is_alive(child.pid) and time.monotonic() < deadline + 10:
            time.sleep(0.01)
        assert not processes.is_alive(child.pid)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libcuda.so.1 that answers as the driver does before and after cuInit."""
    source = """
static int ready = 0;
extern "C" int cuInit(unsigned) { ready = 1; return 0; }
extern "C" int cuDeviceGetCount(int *count) { *count = ready; return ready ? 0 : 3; }
"""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = ["c++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c++", "-", "-o", str(path)]
    if subprocess.run(command, input=source, text=True, check=False).returncode != 0:
        pytest.skip("no C++ compiler")
    return path


@pytest.mark.parametrize(
    ("does", "initialized"),
    [("pass", False), ("ctypes.CDLL(driver)", False), ("ctypes.CDLL(driver).cuInit(0)", True)],
    ids=["not loaded", "loaded", "initialized"],
)
def test_only_an_initialized_driver_forbids_a_fork(driver: Path, does: str, initialized: bool) -> None:
    program = (
        f"import ctypes; driver = {str(driver)!r}; {does}; "
        "from ds_bench.system import processes; print(processes.cuda_is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(initialized)


def test_nvmls_device_files_do_not_forbid_a_fork_and_those_of_computing_do(tmp_path: Path) -> None:
    links = tmp_path / "fd"
    links.mkdir()
    for number, name in enumerate(("nvidiactl", "nvidia0", "nvidia-uvm", "null")):
        (links / str(number)).symlink_to(f"/dev/{name}")
    assert processes.open_gpu_files(tmp_path) == ["/dev/nvidia-uvm"]


IGNORES_SIGTERM = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
os.write(1, b"ready\\n")
time.sleep(60)
"""


def test_what_ignores_sigterm_is_killed_after_the_grace_with_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", IGNORES_SIGTERM], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        earlier = processes.descendants() - {child.pid} - processes.descendants(child.pid)
        start = time.monotonic()
        assert processes.end_tree(None, earlier=earlier, grace_seconds=0.3) == set()
        assert 0.3 <= time.monotonic() - start < processes.KILL_SECONDS


def test_activity_is_memory_and_disk_traffic_of_processes_that_live(tmp_path: Path) -> None:
    before = processes.read_activity([os.getpid(), 2**22])  # the second does not exist
    kept = bytearray(b"1") * (32 * 2**20)
    with (tmp_path / "file").open("wb") as file:
        file.write(kept)
        os.fsync(file.fileno())
    after = processes.read_activity([os.getpid()])
    assert after.resident_bytes >= before.resident_bytes + 24 * 2**20
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    assert abs(after.disk_bytes - int(counts["read_bytes"]) - int(counts["write_bytes"])) < 2**20
