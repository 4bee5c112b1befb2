"""Runs helper programs: tools of this package, which measure or build something, and compilers.

Each has a leader, ``python -m ds_bench.system.helper_programs COMMAND…``. When the program ends or takes too
long, or this process dies, the leader ends every process that the program has started, even in other sessions, and
removes its temporary files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from . import processes

_RUN_FILE = "import runpy, sys; del sys.path[0], sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Runs a file of this package without its folder on the path: modules there with common names would hide others."""
_GRACE_SECONDS = 2.0
"""Between SIGTERM and SIGKILL: time for the program's processes to remove their shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReply:
    """The output of a tool and how it ended."""

    objects: tuple[dict[str, Any], ...]
    """The JSON objects on standard output, one per line; other lines are skipped."""
    ending: str
    """"took more than 300 s", or the exit code and the last line on standard error."""

    def last_object(self, program: str) -> dict[str, Any]:
        """Return the last object. Without one, return an object whose ``error`` says how ``program`` ended."""
        return self.objects[-1] if self.objects else {"error": f"{program} {self.ending}"}


def run_tool(
    module: str,
    *arguments: str,
    environment: Mapping[str, str],
    requests: Sequence[Mapping[str, Any]] = (),
    timeout_seconds: float = 300.0,
    python: str | None = None,
    **how: Any,
) -> ToolReply:
    """Run ``python -m ds_bench.MODULE`` and read the JSON objects that it prints.

    ``environment``: added to the variables of this process. ``requests``: written to standard input, one JSON line
    each. ``python``: another interpreter, for a module that imports nothing from this package. ``how``: see
    :func:`run_program`. A tool that fails or takes too long raises nothing: the reply has what it printed.
    """
    command = [sys.executable, "-m", f"ds_bench.{module}"]
    if python is not None:
        file = Path(__file__).resolve().parents[1] / f"{module.replace('.', '/')}.py"
        path = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"  # the user's own, without this package
        command = ["env", "-u", "PYTHONSAFEPATH", path, python, "-c", _RUN_FILE, str(file)]
    try:
        done = run_program(
            [*command, *arguments],
            text="".join(json.dumps(request) + "\n" for request in requests).encode(),
            environment=environment,
            timeout_seconds=timeout_seconds,
            **how,
        )
        output, ending = done.stdout, f"ended with code {done.returncode}"
        if last_lines := (done.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]:
            ending = f"{ending}: {last_lines[0][:200]}"
    except subprocess.TimeoutExpired as late:
        output, ending = late.stdout or b"", f"took more than {timeout_seconds:g} s"
    objects = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # not JSON, or cut off
            value = json.loads(line)
            if isinstance(value, dict):
                objects.append(value)
    return ToolReply(objects=tuple(objects), ending=ending)


def run_program(
    command: Sequence[str],
    *,
    text: bytes = b"",
    environment: Mapping[str, str],
    timeout_seconds: float,
    errors: IO[bytes] | int = subprocess.PIPE,
    listen: Callable[[float], None] = lambda _seconds: None,
    kept_open: Sequence[int] = (),
) -> subprocess.CompletedProcess[bytes]:
    """Run a program with ``text`` as its input. Return its output, and its exit code as a shell reports it.

    ``errors``: where standard error goes. ``listen`` is called every second with the seconds since the start.
    ``kept_open``: file descriptors that stay open until every process of the program has ended. Raises
    subprocess.TimeoutExpired with the output so far.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "ds_bench.system.helper_programs", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=processes.child_environment(environment),
        pass_fds=kept_open,
        # Ctrl-C reaches only this process.
        start_new_session=True,
        preexec_fn=processes.die_with_parent,
    ) as leader:
        start, unsent = time.monotonic(), text or None
        try:
            while True:
                left = start + timeout_seconds - time.monotonic()
                try:
                    output, error_output = leader.communicate(unsent, timeout=max(0.0, min(1.0, left)))
                    return subprocess.CompletedProcess(command, leader.returncode, output, error_output)
                except subprocess.TimeoutExpired:
                    # The wait was at most one second: if no more than that was left, the time is up.
                    if left <= 1.0:
                        raise
                unsent = None  # communicate resumes where it left off
                listen(time.monotonic() - start)
        finally:
            leader.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                leader.wait(_GRACE_SECONDS + processes.KILL_SECONDS)
            # A leader that was stopped or killed has ended nothing.
            processes.end_led(leader.pid)
            leader.kill()


def _lead(command: Sequence[str]) -> int:
    """Run a command and end every process that it leaves behind. Return its exit code as a shell reports it."""
    waited_for = {signal.SIGCHLD, signal.SIGTERM}
    # Blocked and waited for, not handled: no signal is lost, and none interrupts the clean-up.
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    processes.adopt_orphans()
    processes.die_with_parent(signal.SIGTERM)

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited_for)
        processes.die_with_parent()

    folder = None
    with contextlib.suppress(OSError):  # without a folder of its own, the program uses the usual one
        os.environ["TMPDIR"] = folder = tempfile.mkdtemp(prefix="ds_bench_tool_")
    try:
        # A process group of its own: a program that stops its group does not stop the leader.
        child = subprocess.Popen(command, process_group=0, preexec_fn=begin)
        while (code := child.poll()) is None and signal.sigwait(waited_for) != signal.SIGTERM:
            pass
    finally:
        processes.end_led(os.getpid(), first_signal=signal.SIGTERM, grace_seconds=_GRACE_SECONDS)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_lead(sys.argv[1:]))
