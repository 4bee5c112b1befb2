"""Runs one trial on several hosts: begins it on all of them, receives its files, and ends it on all of them."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..records.rank_files import CONFIG_FILE, EXITS_FILE, LEADER_LOG, TRIAL_FILE, Assignment, shift_times
from ..system.processes import KILL_SECONDS, Activity
from .host_agent import HostEnd
from .host_connections import HostConnection, HostError, HostLostError, Hosts
from .message_stream import SILENCE_SECONDS, Message
from .rank_environment import forwarded_variables

# Relative, without a part that begins with a dot: no host can write outside the trial's folder.
_FILE_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.@=+-]{0,200}/){0,3}[A-Za-z0-9_][A-Za-z0-9_.@=+-]{0,200}")
_RANK_FILE = re.compile(r"rank([0-9]+)")
"""The beginning of the names of a rank's files."""
_BEGIN_SECONDS = 2 * SILENCE_SECONDS
_ACTIVITY_SECONDS = 3.0
_STACKS_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEnd:
    """The hosts' reports on a trial that was ended there."""

    lost: HostLostError | None = None
    """The first host that did not answer; None if all did."""
    caveats: tuple[str, ...] = ()
    oom_killed: bool = False
    """Whether the kernel killed a process on one of the hosts because memory ran out."""
    disk_full: bool = False
    """Whether the disk of the swap folder was full on one of them."""


class RemoteTrial:
    """A trial on the hosts of a run. It writes files to ``folder`` for ``trial_watcher`` and ``outcome``."""

    def __init__(self, hosts: Hosts, folder: Path, assignment: Assignment) -> None:
        self._hosts, self._folder, self._assignment = hosts, folder, assignment
        self._placement, self._scratch_id = assignment.trial.placement, assignment.scratch_id
        self.master: tuple[str, int] = ("", 0)
        """Address and port at which the ranks meet; known once the trial has begun."""
        ends = list(accumulate(ranks for _, ranks in self._placement.hosts))
        self._receivers = [
            FileReceiver(folder, number, range(end - ranks, end))
            for number, (end, (_, ranks)) in enumerate(zip(ends, self._placement.hosts, strict=True))
        ]
        self._begun: list[HostConnection] = []

    def begin(self, wait_seconds: float) -> None:
        """Prepare every host. Raises HostError if one cannot be used within ``wait_seconds``."""
        self._hosts.reconnect(wait_seconds)
        self.master = self._hosts.master_of(self._placement)
        for connection, receiver in zip(self._hosts.connections, self._receivers, strict=True):
            sent, theirs = time.time(), connection.request("clock", kind=float)
            receiver.clock_ahead_seconds = theirs - (sent + time.time()) / 2
            # Before the request: a host that fails halfway through it has something to end, too.
            connection.listen = receiver.receive
            self._begun.append(connection)
        self._hosts.request_all(
            "begin",
            timeout_seconds=_BEGIN_SECONDS,
            trial=self._scratch_id,
            folder="/".join(self._folder.resolve().parts[-2:]),
            assignment=self._assignment.to_dict(),
            config=dict(self._assignment.trial.ds_config),
            master=self.master,
            variables=forwarded_variables(os.environ, self._placement.forwarded_variables),
        )

    def start_ranks(self, command_of: Callable[[int], list[str]]) -> None:
        """Make the agent of each host start its ranks. ``command_of``: host number → command. Raises HostError."""
        commands = [{"command": command_of(number)} for number in range(self._placement.num_nodes)]
        self._hosts.request_all("launch", commands, timeout_seconds=_BEGIN_SECONDS)

    @property
    def ranks_ended(self) -> bool:
        """Whether the ranks have ended on every host."""
        return all(receiver.ended for receiver in self._receivers)

    def ended_without_file(self, written: Collection[int]) -> bool:
        """Whether all ranks of a host have ended, but not all of them are among ``written``."""
        return any(receiver.ended and not receiver.ranks <= set(written) for receiver in self._receivers)

    @property
    def any_lost(self) -> bool:
        """Whether a host no longer answers."""
        return any(each.problem is not None for each in self._hosts.connections)

    def read_activity(self) -> Activity | None:
        """Memory and disk bytes of the trial's processes, summed over the hosts; None if a host did not answer."""
        try:
            answers = self._hosts.request_all("activity", timeout_seconds=_ACTIVITY_SECONDS, kind=Activity).values()
        except HostError:
            return None
        return Activity(
            resident_bytes=sum(answer.resident_bytes for answer in answers),
            disk_bytes=sum(answer.disk_bytes for answer in answers),
        )

    def request_stacks(self) -> None:
        """Make the ranks of every host write their threads' stacks. Waits at most ``_STACKS_SECONDS``."""
        with contextlib.suppress(HostError):
            self._hosts.request_all("stacks", timeout_seconds=_STACKS_SECONDS)

    def end(self, grace_seconds: float, quiet_seconds: float) -> RemoteEnd:
        """End the trial's processes on every host where it has begun, and wait for their last files.

        ``quiet_seconds``: a host that sends nothing but pings for this long, in addition to the time that ending takes,
        is lost.
        """
        values: dict[str, Any] = {"trial": self._scratch_id, "grace_seconds": grace_seconds}
        # All in parallel, because each may take the whole grace period.
        futures = [(each, each.send_request("end", kind=HostEnd, **values)) for each in self._begun]
        answers: list[HostEnd] = []
        caveats: list[str] = []
        lost: HostLostError | None = None
        began, quiet_seconds = time.monotonic(), quiet_seconds + grace_seconds + KILL_SECONDS
        for connection, future in futures:
            try:
                answers.append(connection.result_while_active(future, quiet_seconds, began))  # large profiles are slow
                if left := answers[-1].left:
                    caveats.append(f"processes {[*left]} on host {connection.name} could not be killed")
            except HostError as error:
                lost = lost or (error if isinstance(error, HostLostError) else None)
                self._hosts.unproven.append((connection.name, self._scratch_id))
                caveats.append(f"a process may be left on a host: {error}")
            # Anything that a host still sends, for instance after it was lost, no longer belongs to a trial.
            connection.listen = lambda _message: None
        caveats += [receiver.problem for receiver in self._receivers if receiver.problem is not None]
        return RemoteEnd(
            lost=lost,
            caveats=tuple(caveats),
            oom_killed=any(answer.oom_killed for answer in answers),
            disk_full=any(answer.disk_full for answer in answers),
        )


class FileReceiver:
    """Writes the files of one host's ranks into the trial's folder here."""

    def __init__(self, folder: Path, number: int, ranks: range) -> None:
        """``number``: of the host. ``ranks``: those on it; files of other ranks are refused."""
        self._folder, self._number, self.ranks = folder, number, frozenset(ranks)
        self.clock_ahead_seconds = 0.0
        """By how much the host's clock is ahead of this one's."""
        self._stopped = False
        """Whether writing a file has failed; later files would fail too."""
        self.problem: str | None = None
        """Why files are missing; None if they are all there."""
        self.ended = False
        """Whether the leader of the host's ranks has ended."""

    def receive(self, message: Message) -> None:
        """Handle one message from the host's agent. A full disk ends the writing, not the trial."""
        if "leader_ended" in message:
            self.ended = True
        if "file" not in message or self._stopped:
            return
        name = str(message["file"])
        rank = _RANK_FILE.match(name)
        # Refuse trial.json and ds_config.json, which are written here, and files of a rank on another host.
        if (
            not _FILE_NAME.fullmatch(name)
            or name in (TRIAL_FILE, CONFIG_FILE)
            or (rank and int(rank[1]) not in self.ranks)
        ):
            self.problem = self.problem or f"a file from another host was left out because of its name {name[:80]!r}"
            return
        try:
            data, start = base64.b64decode(message["data"]), int(message["start"])
            if not message["whole"] or (start == 0 and message["last"]):
                data = shift_times(name, data, -self.clock_ahead_seconds)
            # Each host has its own leader log.
            path = self._folder / (f"leader.host{self._number}.log" if name == LEADER_LOG else name)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Renamed when complete, since the watcher takes a rank's file for its result as soon as it exists.
            target = path.with_name(f".{path.name}.part") if message["whole"] else path
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            flags |= os.O_TRUNC if message["whole"] and start == 0 else 0
            flags |= os.O_APPEND if name == EXITS_FILE else 0  # each host adds to it
            with os.fdopen(os.open(target, flags, 0o644), "wb") as file:
                if name != EXITS_FILE:
                    file.seek(start)
                file.write(data)
            if message["whole"] and message["last"]:
                target.replace(path)
        except OSError as error:
            self._stopped = True
            self.problem = f"files from another host could not be written: {error.strerror or error}"
