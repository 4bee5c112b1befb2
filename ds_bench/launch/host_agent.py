"""The agent on each host of a multi-host run: starts, watches and ends that host's ranks, and sends their files.

:mod:`.host_connections` starts it as ``python -m ds_bench.launch.host_agent``. It reads requests from standard input,
one JSON object per line, such as ``{"id": 1, "request": "environment", …}``, and answers each with
``{"id": 1, "result": …}`` or ``{"id": 1, "error": "…"}``. When its input ends, or nothing has arrived for 15 s, it ends
every process that belongs to the run on this host, removes what it has created, and exits.
"""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..config.spec import Configuration, Placement
from ..config.training_script import file_digest
from ..errors import DsBenchError
from ..records import json_files
from ..records.rank_files import (
    CONFIG_FILE,
    EXITS_FILE,
    HOST_FOLDER_PREFIX,
    LEADER_LOG,
    TRIAL_FILE,
    TRIAL_VARIABLE,
    Assignment,
    append_exit,
)
from ..system import device_locks, files, gpu_state, processes
from ..system.environment import Interpreter, read_environment, read_interpreter
from ..system.helper_programs import run_tool
from ..system.host_resources import read_oom_kill_count
from . import rank_environment
from .leader import start_leader
from .message_stream import Message, MessageStream, code_digest
from .ops import OpState
from .scratch import (
    OWNER_FILE,
    create_scratch,
    owner,
    remove_abandoned,
    remove_scratch,
    swap_folder,
    temporary_folder_variables,
)
from .trial_watcher import STACKS_SECONDS, request_stacks

_SEND_SECONDS = 0.5
"""Interval at which the files of a running trial are checked for changes."""
_CHECK_SECONDS = 100.0
"""Time limit for the checks of this host, which take less than a second on a healthy machine."""
_CLEAN_UP_SECONDS = 30.0
"""Time for the main thread to end processes and remove files."""
_REPLACED = re.compile(r"rank\d+(\.measured)?\.json|rank\d+\.beat|rank\d+\.steps")
"""Files that are sent whole when they have changed."""
_GROWING = re.compile(rf"rank\d+\.(log|stacks)|{re.escape(EXITS_FILE)}|{re.escape(LEADER_LOG)}")
"""Files whose new part is sent. All others are sent at the end of the trial."""
_PART_BYTES = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnd:
    """A host's report on a trial that was ended there."""

    left: tuple[int, ...]
    """Processes that could not be killed."""
    oom_killed: bool
    """Whether the kernel's OOM killer ended a process during the trial."""
    disk_full: bool
    """Whether the disk of the swap folder was full."""


class HostTrial:
    """A trial on this host, from :meth:`begin` to :meth:`end`. A trial of an earlier agent can be ended by its id."""

    def __init__(self, scratch_id: str, send: Callable[[Message], None] = lambda _message: None) -> None:
        self.scratch_id, self._send = scratch_id, send
        self._private = Path(tempfile.gettempdir()) / f"{HOST_FOLDER_PREFIX}{os.getuid()}_{scratch_id}"
        self._folder: Path | None = None
        """Holds the trial's files; None before :meth:`begin`."""
        self._assignment: Assignment | None = None
        self._sent: dict[Path, Any] = {}
        """What has been sent: the length for a growing file, the state for any other."""
        self._leader: subprocess.Popen[bytes] | None = None
        self._leader_noted = False
        self._oom_kills_before = read_oom_kill_count()

    def begin(self, name: str, assignment: Assignment, config: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        """Create the private folder with the files of the trial. Raises OSError.

        ``name``: last two parts of the path that the trial's folder has on the run's host. ``assignment``: the run's
        assignment, without this host's folders. ``variables``: environment variables of this host's ranks.
        """
        trial = assignment.trial
        self._private.mkdir(mode=0o700)
        (self._private / OWNER_FILE).write_text(owner())
        self._folder = self._private / name
        self._folder.mkdir(parents=True)
        # The run cannot see the disks of this host, so leftovers of killed runs are removed here.
        if trial.placement.nvme_path is not None:
            remove_abandoned(Path(trial.placement.nvme_path))
        checkpoint = assignment.checkpoint_folder
        # The folder that the run names may exist only on the run's own host.
        if checkpoint is not None and not Path(checkpoint).parent.is_dir():
            checkpoint = str(self._folder / "checkpoint_files")
        self._assignment = replace(
            assignment,
            # DeepSpeed puts both into the names of its shared memory (scratch.remove_scratch).
            scratch_id=f"{variables['MASTER_ADDR']}_{variables['MASTER_PORT']}",
            environment={**variables, **trial.configuration.variables},
            swap_folder=swap_folder(trial, self.scratch_id),
            checkpoint_folder=checkpoint,
        )
        create_scratch(self._assignment)
        self._assignment.save(self._folder, config)

    def start_ranks(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Run a command that starts this host's ranks, as the child of a leader.

        The folder is appended as the last argument.
        """
        assert self._folder is not None
        environment = processes.child_environment({**variables, TRIAL_VARIABLE: self.scratch_id})
        self._leader = start_leader(self._folder, [*command, str(self._folder)], environment, Path("/"))

    @property
    def ranks_ended(self) -> bool:
        """Whether the leader of the ranks has ended. Records the exit of a leader that was killed."""
        if self._leader is None or (code := self._leader.poll()) is None:
            return False
        if code < 0 and self._folder is not None and not self._leader_noted:
            self._leader_noted = True
            append_exit(self._folder, None, self._leader.pid, -code)
            self.send_changes()
        return True

    def members(self) -> set[int]:
        """Living processes of the trial on this host."""
        return find_trial_processes(self.scratch_id)

    def request_stacks(self) -> None:
        """Make every rank of this host write the stacks of its threads, and send them."""
        if self._folder is not None:
            request_stacks(self._folder, self.members())
            # The ranks write them in signal handlers: the files are complete a moment later.
            time.sleep(STACKS_SECONDS)
            self.send_changes()

    def send_changes(self, max_parts: int = 4) -> None:
        """Send the changes to the files that the run watches; at most ``max_parts`` parts of a growing file."""
        for path in sorted(self._folder.iterdir()) if self._folder is not None else ():
            with contextlib.suppress(OSError):  # it is being replaced
                if _REPLACED.fullmatch(path.name):
                    self._send_whole(path)
                elif _GROWING.fullmatch(path.name):
                    start = self._sent.get(path, 0)
                    if path.stat().st_size > start:
                        self._sent[path] = self._send_parts(path, start, max_parts, whole=False)

    def _send_whole(self, path: Path) -> None:
        facts = path.stat()
        state: Any = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if path.suffix == ".steps":  # memory-mapped: writes do not update its modification time
            with files.opened(path, sys.maxsize) as file:
                state = zlib.crc32(file.read())
        if state != self._sent.get(path):
            self._sent[path] = state
            self._send_parts(path, 0, sys.maxsize, whole=True)

    def _send_parts(self, path: Path, start: int, max_parts: int, *, whole: bool) -> int:
        """Send a file from ``start`` on. Return the offset reached.

        The receiver puts a whole file in place when its last part arrives.
        """
        assert self._folder is not None
        name = path.relative_to(self._folder).as_posix()
        with files.opened(path, sys.maxsize) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(start)
            while max_parts > 0:
                data = file.read(_PART_BYTES)
                last = start + len(data) >= size or not data
                text = base64.b64encode(data).decode()
                self._send({"file": name, "start": start, "data": text, "whole": whole, "last": last})
                start += len(data)
                max_parts = 0 if last else max_parts - 1
        return start

    def end(self, grace_seconds: float, *, send_files: bool = True) -> HostEnd:
        """End every process of the trial here, send its last files and remove what it has created.

        ``send_files``: False if nobody receives them; reading large ones would delay their removal.
        """
        left = processes.end_processes(self.members, grace_seconds=grace_seconds, first_signal=signal.SIGTERM)
        if self._leader is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._leader.wait(1.0)
        # Read before anything is removed, because removal frees disk space.
        end = HostEnd(
            left=tuple(sorted(left)),
            oom_killed=read_oom_kill_count() > self._oom_kills_before,
            disk_full=files.disk_is_full(self._assignment.swap_folder if self._assignment is not None else None),
        )
        if send_files and self._folder is not None:
            # The rest of every file, including profiles, but not the checkpoint.
            self.send_changes(sys.maxsize)
            checkpoint = self._assignment.checkpoint_folder if self._assignment is not None else None
            for path in sorted(self._folder.rglob("*")):
                in_folder = path.parent == self._folder
                was_sent = in_folder and (_REPLACED.fullmatch(path.name) or _GROWING.fullmatch(path.name))
                # The run has written these itself, and holds its own version (FileReceiver refuses them).
                is_own = path.name in (TRIAL_FILE, CONFIG_FILE) or path.name.startswith(".")
                if not (was_sent or is_own or (checkpoint is not None and path.is_relative_to(checkpoint))):
                    with contextlib.suppress(OSError):  # a folder
                        self._send_whole(path)
        if self._assignment is not None:
            remove_scratch(self._assignment)
        with contextlib.suppress(OSError):
            if self._private.lstat().st_uid == os.getuid():
                shutil.rmtree(self._private)
        return end


def find_trial_processes(scratch_id: str) -> set[int]:
    """Living processes of this user that belong to a trial.

    These are the processes with the trial's id among their variables, their descendants, and the members of sessions
    that one of them leads.
    """
    mark = f"{TRIAL_VARIABLE}={scratch_id}".encode()
    members, parents, sessions = set(), {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(entry.name)
            if entry.stat().st_uid != os.getuid() or not processes.is_alive(pid):
                continue
            # Before the variables, which may be unreadable: the process is then still found by its parent or session.
            values = processes.stat_values(entry / "stat")  # state, parent, group, session
            parents[pid], sessions[pid] = (int(values[1]), int(values[3])) if values else (0, 0)
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                members.add(pid)
    while True:
        # Until none is added, as children of children count too.
        related = {pid for pid in parents if parents[pid] in members or sessions[pid] in members}
        if related <= members:
            return members - {os.getpid()}
        members |= related


class HostAgent:
    """Answers the requests of a run, one after another; sends the files of a trial while it runs."""

    def __init__(self, reader: int, writer: int) -> None:
        self._requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stream = MessageStream(reader, writer, receive=self._requests.put, ended=end_main_thread)
        self._trial: HostTrial | None = None
        self._locks = contextlib.ExitStack()
        self._variables: dict[str, str] = {}
        """Environment variables of the trial's ranks."""
        self._listener: socket.socket | None = None

    def run(self) -> None:
        """Answer until SystemExit is raised, by a signal or the end of the input."""
        # A shell or launcher may end before the ranks that it has started: they stay descendants of this process.
        processes.adopt_orphans()
        self._stream.start()
        # The address that ssh has connected to (sshd(8): the client's address and port, then the server's). No other
        # host can reach a loopback address.
        words = os.environ.get("SSH_CONNECTION", "").split()
        address = words[2] if len(words) == 4 and not words[2].startswith(("127.", "::1")) else None
        self._stream.send({"agent": code_digest(), "hostname": socket.gethostname(), "address": address})
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    # The wait is also the interval at which the files of a trial are checked.
                    self._answer(self._requests.get(timeout=_SEND_SECONDS))
                if self._trial is not None:
                    self._trial.send_changes()
                    if self._trial.ranks_ended:
                        self._send({"leader_ended": True})
        finally:
            if self._trial is not None:
                self._trial.end(grace_seconds=0.0, send_files=not self._stream.closed)
            processes.end_tree(None, earlier=set(), grace_seconds=1.0)
            # Last: from here on another run may use the devices.
            self._locks.close()

    def _answer(self, message: Message) -> None:
        """Carry out a request with its values, and send the result."""
        values = dict(message)
        request_id = values.pop("id", None)

        def say(text: str) -> None:
            self._stream.send({"id": request_id, "say": text})

        def build_ops(
            placement: Mapping[str, Any], configurations: Sequence[Mapping[str, Any]], python: str | None = None
        ) -> dict[str, OpState]:
            here = json_files.build(Placement, placement)
            rows = json_files.build(list[Configuration], configurations)
            variables = _host_variables(here, os.environ, python)
            return rank_environment.build_ops(here, rows, variables, say, lambda _elapsed: None, python)

        def lock_devices(accelerator: str, slots: Sequence[int]) -> device_locks.DeviceLocks:
            # Held until the agent ends.
            names = device_locks.device_names(accelerator, read_environment().gpus, slots)
            return self._locks.enter_context(device_locks.locked_devices(names, say))

        answers: dict[str, Callable[..., Any]] = {
            "environment": lambda python=None: read_environment(interpreter=_interpreter(python)),
            "file_digest": file_digest,
            "build_ops": build_ops,
            "lock": lock_devices,
            "doctor": _run_checks,
            "listen": self._listen,
            "stop_listening": self._stop_listening,
            "connect": lambda address, port, timeout_seconds: socket.create_connection(
                (address, port), timeout=timeout_seconds
            ).close(),
            "address": address_towards,
            "free_port": free_port,
            "begin": self._begin,
            "launch": lambda command: self._begun.start_ranks(command, self._variables),
            "activity": lambda: processes.read_activity(self._begun.members()),
            "clock": time.time,
            "gpus": lambda: gpu_state.select_visible(os.environ, gpu_state.read_gpus().gpus),
            "stacks": lambda: self._begun.request_stacks(),
            "end": self._end,
        }
        try:
            result = answers[values.pop("request")](**values)
            self._stream.send({"id": request_id, "result": result})
        except Exception as error:  # any error is an answer
            text = str(error) if isinstance(error, DsBenchError) else f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and error.strerror and error.filename is None:  # such as a refused connection
                text = error.strerror
            self._stream.send({"id": request_id, "error": " ".join(text.split())[:500]})

    @property
    def _begun(self) -> HostTrial:
        assert self._trial is not None, "no trial has begun"
        return self._trial

    def _listen(self, address: str, port: int) -> int:
        """Listen on an address and port of this host (0: any free port) until asked to stop. Return the port.

        Nothing is accepted: the kernel completes the connections on its own, one for each other host.
        """
        self._stop_listening()
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((address, port), family=family, backlog=4096)
        taken: int = self._listener.getsockname()[1]
        return taken

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _send(self, message: Message) -> None:
        self._stream.wait_for_room()
        self._stream.send(message)

    def _begin(
        self,
        trial: str,
        folder: str,
        assignment: Mapping[str, Any],
        config: Mapping[str, Any],
        master: tuple[str, int],
        variables: Mapping[str, str],
    ) -> None:
        """Prepare a trial. ``trial``: its id. ``variables``: those that the user has set."""
        import psutil

        requested = Assignment.from_dict(assignment)
        placement, environ = requested.trial.placement, {**os.environ, **variables}
        script, (address, port) = requested.trial.workload.script, master
        # gloo and TensorPipe use the interface that leads to the master, unless the user has set one. By default gloo
        # listens on the address that this host's name resolves to, which on many systems only this host can reach.
        own_address, interfaces = address_towards(address), dict[str, str]()
        for interface, addresses in psutil.net_if_addrs().items():
            if any(each.address == own_address for each in addresses):
                names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
                interfaces = {name: interface for name in names if name not in environ}
                break
        self._variables = {
            **variables,
            **chosen_devices(placement, environ),
            **_host_variables(placement, environ, None if script is None else script.python),
            **interfaces,
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        self._trial = HostTrial(trial, self._send)
        own = {name: value for name, value in self._variables.items() if name != "PYTHONPATH"}
        self._trial.begin(folder, requested, config, own)

    def _end(self, trial: str, grace_seconds: float) -> HostEnd:
        """End the trial with this id, which an earlier agent on this host may have begun."""
        own = self._trial
        end = (own if own is not None and own.scratch_id == trial else HostTrial(trial)).end(grace_seconds)
        self._trial = None
        return end


def end_main_thread(_reason: str) -> None:
    """Make the main thread end the process. If that hangs, end it here."""
    # Python runs handlers only in the main thread, and a signal to that thread interrupts a system call that blocks it.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(_CLEAN_UP_SECONDS)
    # Not sys.exit, which would only end this thread.
    os._exit(1)


def address_towards(towards: str) -> str:
    """The address from which this host reaches another. Nothing is sent: the kernel chooses the route."""
    # Any port will do: connecting a datagram socket only looks up the route.
    family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def free_port() -> int:
    """A TCP port of this host that is not in use."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def chosen_devices(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The GPUs that Slurm or a launcher chose for this host's processes; DeepSpeed would use the first ones."""
    if placement.hostfile is not None or placement.accelerator != "cuda":
        return {}
    return {name: value for name, value in environ.items() if name == "CUDA_VISIBLE_DEVICES"}


@cache
def _interpreter(python: str | None) -> Interpreter | None:
    """The interpreter of a user's script on this host, None without one. Raises PreflightError."""
    return None if python is None else read_interpreter(python)


def _host_variables(placement: Placement, environ: Mapping[str, str], python: str | None) -> dict[str, str]:
    """Variables of every process of every trial on this host. ``python``: the interpreter of a user's script."""
    variables = rank_environment.rank_environment(placement, environ, interpreter=_interpreter(python))
    return {**variables, **temporary_folder_variables(environ, variables["TORCH_EXTENSIONS_DIR"])[0]}


def _run_checks(**values: Any) -> list[dict[str, Any]]:
    """Run ``doctor.checks`` as a program, since its package imports this one. Return its findings."""
    placement = json_files.build(Placement, values["placement"])
    reply = run_tool(
        "doctor.checks",
        environment=_host_variables(placement, os.environ, values["python"]),
        requests=[values],
        timeout_seconds=_CHECK_SECONDS,
    ).last_object("the checks")
    if "error" in reply:
        raise RuntimeError(reply["error"])
    findings: list[dict[str, Any]] = reply["findings"]
    return findings


def main() -> None:
    """Run the agent on standard input and output."""
    os.chdir("/")  # the folder that ssh begins in may be unmounted while the run goes on
    # Duplicated, because processes that the agent starts inherit 0 and 1 and would read requests or write between
    # messages.
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # other output must not get between the messages

    def end(_number: int, _frame: object) -> None:
        for number in processes.ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # one is enough
        raise SystemExit(0)

    for number in processes.ENDING_SIGNALS:
        signal.signal(number, end)
    # As the run does on its own host.
    remove_abandoned()
    HostAgent(reader, writer).run()


if __name__ == "__main__":
    main()
