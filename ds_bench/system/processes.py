"""Process trees on Linux: who dies with whom, who is left, how to end them all; and running one worker program.

prctl(2) is not in the standard library, hence ctypes; walking the tree is psutil's.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> bool:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(option, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):  # not Linux
        return False


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Variables of a Python process started here: it finds this package, and nothing in the current folder."""
    variables = {**os.environ, **changes}
    return {**variables, **import_variables(variables.get("PYTHONPATH", ""))}


WORKER_TOOL_SECONDS = 300.0
"""Time that a worker program has unless its caller gives another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReply:
    """What a worker program printed, and how it ended."""

    objects: tuple[dict[str, Any], ...]
    """The JSON objects on standard output, one per line; other lines are left out."""
    ending: str
    """"took more than 300 s", or the exit code and the last line on standard error."""

    def last_object(self, program: str) -> dict[str, Any]:
        """The last object; without one an ``error`` in which ``program`` is the subject of how it ended."""
        return self.objects[-1] if self.objects else {"error": f"{program} {self.ending}"}


def run_worker_tool(
    module: str,
    *arguments: str,
    environment: Mapping[str, str],
    requests: Sequence[Mapping[str, Any]] = (),
    timeout_seconds: float = WORKER_TOOL_SECONDS,
) -> WorkerReply:
    """Runs ``python -m ds_bench.worker.MODULE`` and reads the JSON objects that it prints.

    ``environment``: variables besides this process's. ``requests``: written to its standard input, one JSON line each.
    Never raises for a program that fails or takes too long: what it printed by then is in the reply. The program dies
    with this process.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"ds_bench.worker.{module}", *arguments],
            input="".join(json.dumps(request) + "\n" for request in requests).encode(),
            env=child_environment(environment),
            preexec_fn=die_with_parent,
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
        )
        output, ending = done.stdout, f"ended with code {done.returncode}"
        if last_lines := done.stderr.decode(errors="replace").strip().splitlines()[-1:]:
            ending = f"{ending}: {last_lines[0][:200]}"
    except subprocess.TimeoutExpired as late:
        output, ending = late.stdout or b"", f"took more than {timeout_seconds:g} s"
    objects = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # a line of another kind, or one that was cut off
            value = json.loads(line)
            if isinstance(value, dict):
                objects.append(value)
    return WorkerReply(objects=tuple(objects), ending=ending)


def import_variables(python_path: str) -> dict[str, str]:
    """Where a Python process looks for modules: this package and ``python_path``; never the current folder.

    A ``random.py`` there would run in every process.
    """
    package = str(Path(__file__).resolve().parent.parent.parent)
    path = dict.fromkeys([package, *filter(None, python_path.split(os.pathsep))])  # an empty part is the current folder
    return {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """This process gets signal ``number`` when its parent dies (prctl(2), PR_SET_PDEATHSIG)."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), number)


LEADER_VARIABLE = "DS_BENCH_LEADER"
"""Process id of the leader of the trial, for the ranks that a launcher on its node starts."""


def die_with_leader() -> None:
    """This process gets SIGKILL when the leader of its trial dies, whatever stands between the two of them.

    A launcher that outlives both its own parents would go on training otherwise. Where no leader is named, on other
    nodes, the leader of this session takes its place if it lives. A thread sleeps in the kernel until then
    (pidfd_open(2)): it takes no time from the trial.
    """
    named = os.environ.get(LEADER_VARIABLE)
    leader = int(named) if named else os.getsid(0)
    if named and not alive(leader):
        os.kill(os.getpid(), signal.SIGKILL)
    if leader != os.getpid() and alive(leader):
        threading.Thread(target=_die_after, args=(leader,), name="watches the leader", daemon=True).start()


def _die_after(leader: int) -> None:
    try:
        ended = select.poll()
        ended.register(os.pidfd_open(leader), select.POLLIN)
        ended.poll()
    except OSError:  # an old kernel, a sandbox, or the leader is gone and collected
        while alive(leader):
            time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process (PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def open_gpu_files(process: Path = Path("/proc/self")) -> list[str]:
    """Device files of computing on a GPU that a process holds open: one forked from it could not use the GPU safely.

    NVML's own (``/dev/nvidiactl``, ``/dev/nvidia0``) are not among them: it opens them to look, and makes no context.
    """
    found = set()
    for link in process.glob("fd/*"):
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if target.startswith(("/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/render")):
                found.add(target)
    return sorted(found)


_CUDA_ERROR_NOT_INITIALIZED = 3


def cuda_is_initialised() -> bool:
    """Whether this process has initialised the CUDA driver, which no process forked from it could then use.

    Asked of the driver's library itself, where it is loaded: before ``cuInit`` every call answers 3
    (CUDA Driver API, CUDA_ERROR_NOT_INITIALIZED).
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _CUDA_ERROR_NOT_INITIALIZED
    except (OSError, AttributeError):  # not loaded, or not the driver
        return False


def descendants(pid: int | None = None) -> set[int]:
    """Living processes below ``pid`` (this process by default), zombies left out."""
    import psutil

    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return set()
    return {child.pid for child in children if alive(child.pid)}


def session_members(session: int) -> set[int]:
    """Living processes of a session, wherever they hang in the tree."""
    members = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(pid := int(entry.name)) == session and alive(pid):
                members.add(pid)
    return members


def alive(pid: int) -> bool:
    """Whether a thread of the process runs. One whose first thread has ended is a zombie while its others live on."""
    process = Path(f"/proc/{pid}")
    try:
        threads = map(stat_values, chain([process / "stat"], process.glob("task/*/stat")))
        return any(values and values[0] not in ("Z", "X") for values in threads)
    except OSError:  # it ended meanwhile
        return False


def stat_values(stat: Path) -> list[str]:
    """The values of a process or thread from its state on, which is 0 here and field 3 in proc_pid_stat(5).

    None of them where it has ended.
    """
    try:
        return stat.read_text().rpartition(")")[2].split()  # behind the name, which may hold anything
    except OSError:
        return []


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since the machine did: no two of one number share it (proc(5), stat).

    None where it does not exist.
    """
    values = stat_values(Path(f"/proc/{pid}/stat"))
    return int(values[19]) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What processes hold and have moved; CPU time is left out, since a hung wait may spin."""

    resident_bytes: int
    """Resident memory of all of them at this moment."""
    disk_bytes: int
    """Read from and written to block devices by those that live, since each began."""


def activity(pids: Iterable[int]) -> Activity:
    """Sums over the processes that can be read; a process that has just ended counts nothing."""
    import psutil

    resident = disk = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            resident += process.memory_info().rss
            counters = process.io_counters()
            disk += counters.read_bytes + counters.write_bytes
    return Activity(resident_bytes=resident, disk_bytes=disk)


def send(pids: Iterable[int], number: int) -> None:
    """A signal to each; those already gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap(pids: Iterable[int]) -> None:
    """Collects adopted children that have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.waitpid(pid, os.WNOHANG)


def end_tree(leader: int | None, *, earlier: set[int], grace_seconds: float) -> set[int]:
    """Ends a trial's process tree: SIGTERM to all of it, grace, SIGKILL, then proof.

    ``leader`` leads the trial's session, or None where it did not come to that. ``earlier``:
    descendants of this process from before the trial, which are left alone. Everything else below
    this process belongs to the trial, since orphans are adopted. Returns what could not be
    ended: nothing, or a bug to report.
    """

    def members() -> set[int]:
        return (descendants() - earlier) | (session_members(leader) if leader is not None else set())

    left = members()
    send(left, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        reap(left)
        left = members()
    deadline = time.monotonic() + 10.0
    while left and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        time.sleep(0.05)
        reap(left)
        left = members()
    return left
