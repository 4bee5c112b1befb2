"""The program on each host of a run on several: ``python -m ds_bench.launch.host_agent``, started by :mod:`hosts`.

It answers requests on standard input, one JSON object a line: ``{"id": 1, "request": "environment", …}`` by
``{"id": 1, "result": …}`` or ``{"id": 1, "error": "…"}``. When its input ends, or nothing has come for 15 s, it ends
every process that belongs to the run on this host, removes what it has created, and ends itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..config.spec import Configuration, Placement
from ..errors import DsBenchError
from ..records import json_files
from ..records.rank_files import Assignment
from ..system import device_locks, processes
from ..system.environment import read_environment
from ..system.gpus import read_gpus, select_visible
from ..system.signals import ENDING_SIGNALS
from ..system.tools import run_tool
from . import rank_environment
from .host_trial import HostEnd, HostTrial
from .message_stream import Message, MessageStream, code_digest
from .monitor import STACKS_SECONDS
from .ops import OpState
from .scratch import remove_abandoned, temporary_folder_variables

Say = Callable[[str], None]
_SEND_SECONDS = 0.5
"""How often the files of a running trial are looked at."""
_CHECK_SECONDS = 100.0
"""For the checks of this host, which take less than a second on a machine that is well."""
_CLEAN_UP_SECONDS = 30.0
"""For the main thread to end processes and remove files."""


class HostAgent:
    """Answers the requests of a run, one after the other; sends the files of a trial while it runs."""

    def __init__(self, reader: int, writer: int) -> None:
        self._requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stream = MessageStream(reader, writer, receive=self._requests.put, ended=end_main_thread)
        self._trial: HostTrial | None = None
        self._locks = contextlib.ExitStack()
        self._variables: dict[str, str] = {}
        """Of the trial's ranks."""
        self._listener: socket.socket | None = None

    def run(self) -> None:
        """Answers until SystemExit is raised, by a signal or the end of the input."""
        # A shell or launcher may end before the ranks that it has started: they stay descendants of this process.
        processes.adopt_orphans()
        self._stream.start()
        self._stream.send(
            {"agent": code_digest(), "hostname": socket.gethostname(), "address": own_address(os.environ)}
        )
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    # The wait is also the interval at which the files of a trial are looked at.
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
        """Does what a request asks for with its values, and sends the result."""
        values = dict(message)
        request_id = values.pop("id", None)

        def say(text: str) -> None:
            self._stream.send({"id": request_id, "say": text})

        answers: dict[str, Callable[..., Any]] = {
            "environment": read_environment,
            "build_ops": partial(_build_ops, say),
            "lock": partial(self._lock_devices, say),
            "doctor": _run_checks,
            "listen": self._listen,
            "stop_listening": self._stop_listening,
            "connect": _connect,
            "address": address_towards,
            "free_port": free_port,
            "begin": self._begin,
            "launch": self._launch,
            "activity": self._read_activity,
            "clock": time.time,
            "gpus": lambda: select_visible(os.environ, read_gpus().gpus),
            "stacks": self._request_stacks,
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

    def _listen(self, address: str, port: int) -> int:
        """Listens at an address and port of this host, 0 for a free one, until asked to stop. Returns the port.

        Nothing is accepted: the kernel completes a connection by itself.
        """
        self._stop_listening()
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((address, port), family=family, backlog=128)
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
        """Prepares a trial. ``trial``: its id. ``variables``: those that the user has set."""
        asked = Assignment.from_dict(assignment)
        placement, environ = asked.trial.placement, {**os.environ, **variables}
        address, port = master
        self._variables = {
            **variables,
            **chosen_devices(placement, environ),
            **host_variables(placement, environ),
            **interface_variables(address, environ),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        self._trial = HostTrial(trial, self._send)
        own = {name: value for name, value in self._variables.items() if name != "PYTHONPATH"}
        self._trial.begin(folder, asked, config, own)

    def _lock_devices(self, say: Say, accelerator: str, slots: Sequence[int]) -> device_locks.DeviceLocks:
        """Holds the locks of the devices in these slots of this host until the agent ends; waits for them."""
        names = device_locks.device_names(accelerator, read_environment().gpus, slots)
        return self._locks.enter_context(device_locks.locked_devices(names, say))

    def _launch(self, command: Sequence[str]) -> None:
        if self._trial is not None:
            self._trial.start_ranks(command, self._variables)

    def _read_activity(self) -> processes.Activity:
        """Memory and disk traffic of the trial's processes here."""
        return processes.read_activity(self._trial.members() if self._trial is not None else ())

    def _request_stacks(self) -> None:
        if self._trial is not None:
            self._trial.request_stacks()
            # The ranks write them in handlers of a signal: the files are complete a moment later.
            time.sleep(STACKS_SECONDS)
            self._trial.send_changes()

    def _end(self, trial: str, grace_seconds: float) -> HostEnd:
        """Ends the trial of this id, which an earlier agent of this host may have begun."""
        own = self._trial
        end = (own if own is not None and own.scratch_id == trial else HostTrial(trial)).end(grace_seconds)
        self._trial = None
        return end


def end_main_thread(_reason: str) -> None:
    """Makes the main thread end the process; does so itself where that hangs."""
    # Python runs handlers only in the main thread, and a signal to that thread ends a system call that blocks it.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(_CLEAN_UP_SECONDS)
    # Not sys.exit, which would only end this thread.
    os._exit(1)


def own_address(environ: Mapping[str, str]) -> str | None:
    """The address of this host that ssh has connected to; None without ssh, and for one that only this host has."""
    words = environ.get("SSH_CONNECTION", "").split()  # the client's address and port, then the server's
    address = words[2] if len(words) == 4 else None
    return None if address is None or address.startswith(("127.", "::1")) else address


def address_towards(towards: str) -> str:
    """The address of this host on the way to another. Nothing is sent: the kernel chooses the route."""
    # Any port will do: connecting a datagram socket only looks up the route.
    family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _connect(address: str, port: int, timeout_seconds: float) -> None:
    """Connects to another host, and closes the connection."""
    socket.create_connection((address, port), timeout=timeout_seconds).close()


def free_port() -> int:
    """A TCP port that nothing on this host listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def interface_variables(master: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The network interface of gloo and TensorPipe: the one that leads to the master. None that the user has named.

    By itself gloo listens at the address of this host's name, which on many systems only this host can reach.
    """
    import psutil

    own = address_towards(master)
    addresses = psutil.net_if_addrs().items()
    interface = next((name for name, each in addresses if any(one.address == own for one in each)), None)
    names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    return {} if interface is None else {name: interface for name in names if name not in environ}


def chosen_devices(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The GPUs that Slurm or a launcher chose for this host's processes; DeepSpeed would take the first of all."""
    if placement.hostfile is not None or placement.accelerator != "cuda":
        return {}
    return {name: value for name, value in environ.items() if name == "CUDA_VISIBLE_DEVICES"}


def host_variables(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of every process of every trial on this host."""
    variables = rank_environment.rank_environment(placement, environ)
    return {**variables, **temporary_folder_variables(environ, variables["TORCH_EXTENSIONS_DIR"])[0]}


def _build_ops(
    say: Say, placement: Mapping[str, Any], configurations: Sequence[Mapping[str, Any]]
) -> dict[str, OpState]:
    here = json_files.build(Placement, placement)
    rows = json_files.build(list[Configuration], configurations)
    return rank_environment.build_ops(here, rows, host_variables(here, os.environ), say, lambda _elapsed: None)


def _run_checks(**values: Any) -> list[dict[str, Any]]:
    """The findings of ``doctor.on_host``, a program of its own since its package imports this one."""
    placement = json_files.build(Placement, values["placement"])
    variables = host_variables(placement, os.environ)
    reply = run_tool(
        "doctor.on_host", environment=variables, requests=[values], timeout_seconds=_CHECK_SECONDS
    ).last_object("the checks")
    if "error" in reply:
        raise RuntimeError(reply["error"])
    findings: list[dict[str, Any]] = reply["findings"]
    return findings


def main() -> None:
    """Runs the agent on standard input and output."""
    os.chdir("/")  # the folder that ssh begins in may be unmounted while the run goes on
    # Under other numbers: what the agent starts inherits 0 and 1, and would read requests or write among messages.
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # whatever else prints must not get between the messages

    def end(_number: int, _frame: object) -> None:
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # one is enough
        raise SystemExit(0)

    for number in ENDING_SIGNALS:
        signal.signal(number, end)
    # As the run does on its own host.
    remove_abandoned()
    HostAgent(reader, writer).run()


if __name__ == "__main__":
    main()
