"""The hosts of a multi-host run: a connection to an agent on each, which ssh or another program starts there.

An agent runs on every host of the placement, including this one if it is among them: a rank that a remote shell starts
is a child of that shell's server, not of this process.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from ..config.spec import Placement
from ..records import json_files
from ..system.device_locks import DeviceLocks
from ..system.processes import die_with_parent, import_variables
from .host_agent import HostEnd
from .message_stream import SILENCE_SECONDS, Message, MessageStream, code_digest

SSH_OPTIONS = (
    "-T", "-x",
    "-o", "BatchMode=yes",
    "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3",
    "-o", "ControlMaster=no",
)  # fmt: skip
"""Never prompts, notices a lost host, leaves no process behind. Host keys are checked as configured for ssh."""
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]*")
_CONNECT_SECONDS = 60.0
"""Time for ssh to log in and Python to start there, even from a slow disk."""
_REQUEST_SECONDS = 60.0
_RETRY_SECONDS = 2.0
_CLOSE_SECONDS = 20.0
"""Time for an agent to end what it has started."""
_MAX_ERROR_BYTES = 2**16

Say = Callable[[str], None]


class HostError(Exception):
    """A host cannot be used. ``str()`` is one line: its name and the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


class HostLostError(HostError):
    """The host does not answer, or could not be reached."""


def agent_words(*, every_gpu: bool = False) -> list[str]:
    """Return the agent's command line for any host: interpreter and package have the same paths there as here.

    ``every_gpu``: ignore the CUDA_VISIBLE_DEVICES that a login there sets.
    """
    variables = import_variables(os.environ.get("PYTHONPATH", ""))
    assignments = [f"{name}={value}" for name, value in variables.items()]
    unset = ["-u", "CUDA_VISIBLE_DEVICES"] if every_gpu else []
    return ["env", *unset, *assignments, sys.executable, "-m", "ds_bench.launch.host_agent"]


def command_on_host(template: str, host: str, words: Sequence[str]) -> list[str]:
    """Return the command line that runs ``words`` on a host. ``template``: such as ``ssh {host}``.

    ssh joins its words for the login shell there, so it gets one quoted word. Raises ValueError for a name that the
    program could read as an option.
    """
    if not _HOST.fullmatch(host):
        raise ValueError(f"{host!r} is not a host name")
    program, *others = (word.replace("{host}", host) for word in shlex.split(template))
    if Path(program).name == "ssh":
        return [program, *SSH_OPTIONS, *others, shlex.join(words)]
    return [program, *others, *words]


class HostConnection:
    """The connection to one host's agent; it is lost when the agent's output ends or after 15 s without a message."""

    def __init__(self, name: str, command: Sequence[str] = (), *, connected: socket.socket | None = None) -> None:
        """``command`` starts the agent; ``connected`` is a connection to one that is already running."""
        self.name, self._command, self._socket = name, command, connected
        self.hostname = ""
        """The host's own name; empty until its agent has answered."""
        self.address: str | None = None
        """Address that ssh connected to; None without ssh."""
        self.problem: str | None = "not connected"
        """Why the host cannot be used; None while it answers."""
        self.listen: Callable[[Message], None] = lambda _message: None
        """Called in the connection's thread with each message that does not answer a request."""
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._stream: MessageStream | None = None
        self._is_lost = False
        self._heard = 0.0
        """Time of the last message other than a ping, by the monotonic clock."""
        self._greeting: Future[str] = Future()
        """The hash of the agent's code."""
        self._replies: dict[int, tuple[Future[Any], Say, Any]] = {}
        self._ids = count(1)

    def start(self) -> None:
        """Start the agent, without waiting for it."""
        own = self._socket
        if own is None:
            own, other = socket.socketpair()
            # A file, because nobody would empty a pipe, and a full one would block ssh.
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
            # Closed here, or the input would not end when the agent does.
            with other:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=other.fileno(),
                    stdout=other.fileno(),
                    stderr=self._errors,
                    start_new_session=True,  # Ctrl-C is for the run, which then ends its trial
                    preexec_fn=die_with_parent,
                )
            self._socket = own
        self.problem = None
        self._stream = MessageStream(own.fileno(), own.fileno(), receive=self._receive, ended=self._end)
        # ssh is silent while it logs in. The agent's greeting restores the usual limit.
        self._stream.silence_seconds = _CONNECT_SECONDS
        self._stream.start()

    def wait_for_agent(self) -> None:
        """Wait until the agent has answered. Raises HostError if it does not, or if its code differs from ours."""
        digest = self.result_of(self._greeting, _CONNECT_SECONDS + 5.0)
        if digest != code_digest():
            self.close()
            self.problem = f"its ds_bench code ({digest}) differs from this host's ({code_digest()})"
            raise HostError(self.name, self.problem)

    def request(self, what: str, *, kind: Any = Any, **values: Any) -> Any:
        """Return the agent's answer to a request. Raises HostError.

        ``kind``: type of the answer. A host whose answer has a different type is lost.
        """
        return self.result_of(self.send_request(what, kind=kind, **values), _REQUEST_SECONDS)

    def send_request(self, what: str, say: Say = lambda _text: None, kind: Any = Any, **values: Any) -> Future[Any]:
        """Send a request without waiting. The Future returns or raises what :meth:`request` does.

        ``say``: called with each of the agent's progress messages, after the host's name.
        """
        future: Future[Any] = Future()
        number = next(self._ids)
        # Before the request is sent, because the answer may arrive immediately, in another thread.
        self._replies[number] = future, say, kind
        if self._stream is not None:
            self._stream.send({"id": number, "request": what, **values})
        if self.problem is not None:  # even if it was lost before it could answer
            self._fail(future)
        return future

    def result_of(self, future: Future[Any], timeout_seconds: float | None, began: float | None = None) -> Any:
        """Wait for the answer to a request. Raises HostError.

        ``timeout_seconds``: None to wait until the host is lost. ``began``: time of the request by the monotonic clock,
        if the limit counts from then.
        """
        waited = 0.0 if began is None else time.monotonic() - began
        try:
            return future.result(None if timeout_seconds is None else max(0.0, timeout_seconds - waited))
        except FutureTimeoutError:
            raise HostLostError(self.name, f"took longer than {timeout_seconds:.0f} s to answer") from None

    def result_while_active(self, future: Future[Any], quiet_seconds: float, began: float) -> Any:
        """Wait for the answer to a request for as long as the agent sends more than pings. Raises HostError.

        After ``quiet_seconds`` of nothing but pings the host is lost: pings continue even if a file system blocks the
        agent. ``began``: time of the request by the monotonic clock.
        """
        while True:
            # Computed again each time, because the connection's thread updates ``_heard``.
            left = max(began, self._heard) + quiet_seconds - time.monotonic()
            with contextlib.suppress(FutureTimeoutError):
                return future.result(max(0.0, left))
            if left <= 0:
                self._is_lost = True
                self.problem = self.problem or f"did nothing for {quiet_seconds:.0f} s"
                self.close_input()
                raise HostLostError(self.name, self.problem)

    def _receive(self, message: Message) -> None:
        self._heard = time.monotonic()
        if "agent" in message and not self._greeting.done():
            if self._stream is not None:
                self._stream.silence_seconds = SILENCE_SECONDS
            # A greeting from different code may lack these fields; wait_for_agent refuses that agent.
            if message["agent"] == code_digest():
                self.hostname, self.address = str(message["hostname"]), message.get("address")
            self._greeting.set_result(str(message["agent"]))
        elif "say" in message and message.get("id") in self._replies:
            self._replies[message["id"]][1](f"{self.name}: {message['say']}")
        elif message.get("id") in self._replies:
            future, _, kind = self._replies[message["id"]]
            if "error" in message:
                future.set_exception(HostError(self.name, str(message["error"])))
            else:
                # A value of a different type raises, which ends the stream and thus the wait for this answer.
                future.set_result(json_files.build(kind, message.get("result")))
            del self._replies[message["id"]]
        else:
            self.listen(message)

    def _end(self, reason: str) -> None:
        # Any end but closing is a fault, whose cause ssh may print to standard error.
        self._is_lost = self._is_lost or reason != "closed"
        if self._process is not None and self._errors is not None and self._is_lost:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES))
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1].strip()[:300] if lines else reason
        self.problem = self.problem or reason
        for future in [self._greeting, *(future for future, _, _ in self._replies.values())]:
            self._fail(future)

    def _fail(self, future: Future[Any]) -> None:
        with contextlib.suppress(Exception):  # it already has its answer
            future.set_exception(HostLostError(self.name, self.problem or "lost"))

    def close_input(self) -> None:
        """End the agent's input, without waiting for the agent to end."""
        if self._stream is not None:
            self._stream.close()
        if self._socket is not None:
            self._socket.close()

    def close(self) -> None:
        """End the agent, which ends what it has started. Does nothing the second time."""
        self.close_input()
        if self._process is not None:
            try:
                # A lost agent ends on its own after 15 s without a message; this waits only for ssh or srun.
                self._process.wait(0.1 if self._is_lost else _CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._errors is not None:
            self._errors.close()


class Hosts:
    """The connections of a run, in the order of the hosts; a context manager that ends the agents on exit."""

    def __init__(
        self,
        names: Sequence[str],
        command_of: Callable[[str], list[str]],
        *,
        connected: Mapping[str, socket.socket] = MappingProxyType({}),
        python: str | None = None,
    ) -> None:
        """``command_of``: host → command that starts its agent. ``connected``: host → connection to a running agent."""
        self.names, self._command_of = tuple(names), command_of
        self._connected = frozenset(connected)
        self.python = python
        """Interpreter of a user's script, which the hosts inspect instead of this program's; None without a script."""
        self.connections = [
            HostConnection(name, () if name in connected else command_of(name), connected=connected.get(name))
            for name in names
        ]
        self.unproven: list[tuple[str, str]] = []
        """Pairs of host and trial: the host was lost before it proved that the trial had left no process there."""
        self._gave_up = False
        """Whether the last trial could not begin because a host was lost."""
        self._locked: tuple[Placement, Say] | None = None
        """The placement whose devices are locked, and the function that reports a wait for them."""

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.unproven:  # after the last trial: Slurm's signal before a time limit ends srun and thus the agents
            self._locked = None  # no trial follows
            with contextlib.suppress(HostError):
                self.reconnect(0.0)
        for connection in self.connections:
            connection.close_input()
        for connection in self.connections:
            connection.close()

    def connect(self) -> list[HostError]:
        """Connect to all hosts in parallel. Return one error for each host that cannot be used."""
        for connection in self.connections:
            connection.start()
        problems = []
        for connection in self.connections:
            try:
                connection.wait_for_agent()
            except HostError as error:
                problems.append(error)
        return problems

    def reconnect(self, wait_seconds: float) -> None:
        """Connect to lost hosts again, and make sure that their trials left no process there.

        Waits at most ``wait_seconds`` for them, and not again after a failure. Raises HostError.
        """
        deadline = time.monotonic() + (0.0 if self._gave_up else wait_seconds)
        for number, connection in enumerate(self.connections):
            while connection.problem is not None:
                if connection.name in self._connected:
                    problem = f"{connection.problem}; the launcher that started its agent does not start another"
                    raise HostLostError(connection.name, problem)
                connection.close()
                connection = HostConnection(connection.name, self._command_of(connection.name))
                self.connections[number] = connection
                connection.start()
                try:
                    connection.wait_for_agent()
                    # The old agent's locks ended with it.
                    self._lock(connection, max(_REQUEST_SECONDS, deadline - time.monotonic()))
                except HostError as error:
                    connection.problem = connection.problem or error.reason
                    # There is always one attempt, even if no time was left.
                    if time.monotonic() > deadline:
                        self._gave_up = True
                        raise
                    time.sleep(_RETRY_SECONDS)
            # Hosts that answer are asked too: only their agents know whether an earlier trial is gone.
            for name, trial in [each for each in self.unproven if each[0] == connection.name]:
                end = connection.request("end", kind=HostEnd, trial=trial, grace_seconds=0.0)
                if end.left:
                    # They would distort the next trial's measurements.
                    raise HostError(name, f"processes {[*end.left]} of an earlier trial could not be killed")
                self.unproven.remove((name, trial))
        self._gave_up = False

    def lock_devices(self, placement: Placement, say: Say) -> DeviceLocks:
        """Wait for the locks of the devices that the ranks use on every host, and hold them until the agents end.

        Hosts are locked one by one, in the order of their own names, so that two runs never wait for each other even if
        their hostfiles name a host differently. Raises HostError.
        """
        locks, self._locked = DeviceLocks(), (placement, say)
        for connection in sorted(self.connections, key=lambda each: each.hostname):
            own = self._lock(connection, None)
            locks.waited |= own.waited
            locks.notes += [f"{connection.name}: {note}" for note in own.notes]
        return locks

    def _lock(self, connection: HostConnection, timeout_seconds: float | None) -> DeviceLocks:
        if self._locked is None:
            return DeviceLocks()
        placement, say = self._locked
        slots = placement.slots_of(connection.name)
        answer = connection.send_request("lock", say, DeviceLocks, accelerator=placement.accelerator, slots=slots)
        locks: DeviceLocks = connection.result_of(answer, timeout_seconds)
        return locks

    def master_of(self, placement: Placement) -> tuple[str, int]:
        """Return the address and port on the first host where the ranks of the next trial meet. Raises HostError.

        The first host reaches the second from this address; its name may resolve to a different one.
        """
        first, *others = self.connections
        address = placement.master_addr
        if address is None:
            address = first.address or "127.0.0.1"
            if others:
                address = first.request("address", kind=str, towards=others[0].address or others[0].hostname)
                if address.startswith(("127.", "::1")):
                    raise HostError(
                        first.name, "no address found at which other hosts can reach it: give --master-addr"
                    )
        return address, placement.master_port or first.request("free_port", kind=int)

    def request_all(
        self,
        what: str,
        each: Iterable[Mapping[str, Any]] | None = None,
        *,
        timeout_seconds: float = _REQUEST_SECONDS,
        say: Say = lambda _text: None,
        kind: Any = Any,
        **values: Any,
    ) -> dict[str, Any]:
        """Send a request to all hosts in parallel, and return host → answer. Raises HostError for the first that fails.

        ``each``: further values for each host, in order. See ``HostConnection.request`` for the other parameters.
        """
        began = time.monotonic()
        futures = [
            connection.send_request(what, say, kind, **values, **own)
            for connection, own in zip(self.connections, each or [{}] * len(self.connections), strict=True)
        ]
        return {
            connection.name: connection.result_of(future, timeout_seconds, began)
            for connection, future in zip(self.connections, futures, strict=True)
        }
