"""Process trees on Linux: ending them completely, ending children with their parent, and the signals that end a run.

prctl(2) is called through ctypes, because the standard library does not have it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Variables of a Python child process: this process's, the changes, and :func:`import_variables`."""
    variables = {**os.environ, **changes}
    # Last, so that no change takes this package off the child's path.
    return {**variables, **import_variables(variables.get("PYTHONPATH", ""))}


def import_variables(python_path: str) -> dict[str, str]:
    """Variables that make a Python process find this package and ``python_path``, but not the current folder.

    Otherwise a ``random.py`` in the current folder would run in every process.
    """
    package = str(Path(__file__).resolve().parent.parent.parent)
    path = dict.fromkeys([package, *filter(None, python_path.split(os.pathsep))])  # an empty part is the current folder
    return {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def redirect_streams(path: Path) -> None:
    """Append the output of this process and its children to a file from now on; their standard input is empty."""
    sys.stdout.flush()
    sys.stderr.flush()
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Make the kernel send signal ``number`` to this process when its parent dies (prctl(2), PR_SET_PDEATHSIG)."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), number)


LEADER_VARIABLE = "DS_BENCH_LEADER"
"""Process id of the leader of the trial, for the ranks that a launcher on its node starts."""


def die_with_leader() -> None:
    """Kill this process when the leader of its trial dies, even if other processes are between the two.

    Otherwise a launcher's ranks could go on training after its parents have died. If no leader is named, as for a rank
    started by hand, the leader of this session is used if it is alive. A thread waits in the kernel
    (pidfd_open(2)) for it to end, which takes no time from the trial.
    """
    named = os.environ.get(LEADER_VARIABLE)
    leader = int(named) if named else os.getsid(0)
    if named and not is_alive(leader):
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_leader() -> None:
        try:
            ended = select.poll()
            ended.register(os.pidfd_open(leader), select.POLLIN)
            ended.poll()
        except OSError:  # an old kernel, a sandbox, or the leader has ended already
            while is_alive(leader):
                time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    if leader != os.getpid() and is_alive(leader):
        threading.Thread(target=wait_for_leader, name="waits for the end of the leader", daemon=True).start()


def adopt_orphans() -> None:
    """Make descendants whose parent dies children of this process (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def open_gpu_files(process: Path = Path("/proc/self")) -> list[str]:
    """The device files for GPU computing that a process has open. A process forked from it could not use the GPU.

    NVML's files (``/dev/nvidiactl``, ``/dev/nvidia0``) do not count, because NVML creates no CUDA context.
    """
    device_files = set()
    for link in process.glob("fd/*"):
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if target.startswith(("/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/render")):
                device_files.add(target)
    return sorted(device_files)


_CUDA_ERROR_NOT_INITIALIZED = 3


def cuda_is_initialized() -> bool:
    """Whether this process has initialized the CUDA driver. If it has, a process forked from it cannot use CUDA.

    Before ``cuInit`` every call to the driver's library returns 3 (CUDA Driver API, CUDA_ERROR_NOT_INITIALIZED).
    """
    try:
        # RTLD_NOLOAD: only if something has loaded it already; asking must not do so.
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _CUDA_ERROR_NOT_INITIALIZED
    except (OSError, AttributeError):  # not loaded, or not the driver
        return False


def descendants(pid: int | None = None) -> set[int]:
    """Live processes below ``pid`` (this process by default), zombies left out."""
    import psutil

    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return set()
    return {child.pid for child in children if is_alive(child.pid)}


def session_members(session: int) -> set[int]:
    """Live processes of a session, whoever their parents are."""
    members = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(pid := int(entry.name)) == session and is_alive(pid):
                members.add(pid)
    return members


def is_alive(pid: int) -> bool:
    """Whether any thread of the process is alive. After its first thread has ended, the process looks like a zombie."""
    process = Path(f"/proc/{pid}")
    try:
        threads = map(stat_values, chain([process / "stat"], process.glob("task/*/stat")))
        return any(values and values[0] not in ("Z", "X") for values in threads)
    except OSError:  # it ended meanwhile
        return False


def is_ending(pid: int) -> bool:
    """Whether a process has been sent SIGKILL, or is exiting: it runs no more code, but may still hold resources."""
    values = stat_values(Path(f"/proc/{pid}/stat"))
    # Fields 9 (flags, with PF_EXITING) and 31 (pending signals) of proc_pid_stat(5).
    return bool(values) and bool(int(values[6]) & 0x4 or int(values[28]) & 1 << (signal.SIGKILL - 1))


def stat_values(stat: Path) -> list[str]:
    """The values in a ``stat`` file from the state on, which is field 3 in proc_pid_stat(5). Empty if unreadable."""
    try:
        return stat.read_text().rpartition(")")[2].split()  # after the name, which may contain anything
    except OSError:
        return []


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since the machine started; None if it does not exist.

    Distinguishes processes that had the same id one after the other (proc_pid_stat(5), starttime).
    """
    values = stat_values(Path(f"/proc/{pid}/stat"))
    # Field 22 in proc_pid_stat(5); the values begin with field 3.
    return int(values[19]) if values else None


@dataclass(frozen=True)
class Activity:
    """Memory and disk traffic of processes. CPU time would prove nothing, since a hung process may spin."""

    resident_bytes: int
    """Sum of resident memory at this moment."""
    disk_bytes: int
    """Bytes read from and written to block devices since the processes started."""


def read_activity(pids: Iterable[int]) -> Activity:
    """Sum over the processes, without those that have ended."""
    import psutil

    resident = disk = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            resident += process.memory_info().rss
            # Read last: the memory of a process that hides its traffic still counts.
            counters = process.io_counters()
            disk += counters.read_bytes + counters.write_bytes
    return Activity(resident_bytes=resident, disk_bytes=disk)


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


KILL_SECONDS = 10.0
"""Time for processes to end after SIGKILL."""
_POLL_SECONDS = 0.02


def end_processes(
    find: Callable[[], set[int]], *, grace_seconds: float = 0.0, first_signal: int = signal.SIGKILL
) -> set[int]:
    """End processes: ``first_signal``, grace, SIGKILL until none is left. Return those that could not be killed.

    ``find``: returns the live ones. It is called repeatedly, since they may start others.
    """
    left = find()
    send_signal(left, first_signal)
    start = time.monotonic()
    while left and (seconds := time.monotonic() - start) < grace_seconds + KILL_SECONDS:
        if seconds >= grace_seconds:
            send_signal(left, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        # Killed children stay zombies, and their ids in use, until they are collected.
        for pid in left:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.waitpid(pid, os.WNOHANG)
        left = find()
    return left


def end_led(leader: int, *, grace_seconds: float = 0.0, first_signal: int = signal.SIGKILL) -> None:
    """End the descendants of a leader and its session, but not the leader, as :func:`end_processes` does."""
    end_processes(
        lambda: (descendants(leader) | session_members(leader)) - {leader},
        grace_seconds=grace_seconds,
        first_signal=first_signal,
    )


def end_tree(leader: int | None, *, earlier: set[int], grace_seconds: float) -> set[int]:
    """End a trial's process tree as :func:`end_processes` does. Return what is left; anything left is a bug.

    ``leader``: of the trial's session; None if it was not started. ``earlier``: descendants of this process from before
    the trial, which are left alone. All other descendants belong to the trial, since orphans are adopted.
    """

    def members() -> set[int]:
        return (descendants() - earlier) | (session_members(leader) if leader is not None else set())

    return end_processes(members, grace_seconds=grace_seconds, first_signal=signal.SIGTERM)


# ------------------------------------------------------------------ Ctrl-C, SIGTERM and SIGHUP

# These signals interrupt the run while it waits, and are remembered while it cleans up: if one could raise
# KeyboardInterrupt at any moment, processes, scratch files or an unwritten row could be left behind. A signal therefore
# raises it only inside raising_on_interrupt(). Elsewhere it is remembered: the next such block raises on entry.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_state = {"requested": False, "raising_blocks": 0}


def interrupt_requested() -> bool:
    """Whether a signal has asked the run to end."""
    return bool(_state["requested"])


@contextmanager
def handling_signals() -> Iterator[None]:
    """Within this context the three signals are handled as described above.

    A signal that is ignored stays ignored: nohup and background jobs of a shell rely on it.
    """

    def handle(_number: int, _frame: object) -> None:
        _state["requested"] = True
        if _state["raising_blocks"]:
            raise KeyboardInterrupt

    _state.update(requested=False, raising_blocks=0)
    handled = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers_before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


@contextmanager
def raising_on_interrupt() -> Iterator[None]:
    """Within this context a signal raises KeyboardInterrupt. A signal received earlier raises it on entry."""
    _state["raising_blocks"] += 1
    try:
        if _state["requested"]:
            raise KeyboardInterrupt
        yield
    finally:
        _state["raising_blocks"] -= 1
