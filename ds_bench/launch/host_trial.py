"""One host's part of a trial on several hosts: its private folder, its processes, and the files that go to the run."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from ..system import files, processes
from ..system.host_memory import read_oom_kill_count
from .leader import start_leader
from .message_stream import Message
from .monitor import request_stacks
from .scratch import OWNER_FILE, create_scratch, owner, remove_abandoned, remove_scratch, swap_folder

_REPLACED = re.compile(r"rank\d+(\.measured)?\.json|rank\d+\.beat|rank\d+\.steps")
"""Files that are sent whole when they have changed."""
_GROWING = re.compile(rf"rank\d+\.(log|stacks)|{re.escape(EXITS_FILE)}|{re.escape(LEADER_LOG)}")
"""Files that are only added to, and sent from where they were. All others are sent at the end of the trial."""
_PART_BYTES = 2**18

Send = Callable[[Message], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnd:
    """A host's report on a trial that was ended there."""

    left: tuple[int, ...]
    """Processes that could not be ended."""
    oom_killed: bool
    """The kernel killed a process for memory meanwhile."""
    disk_full: bool
    """The disk of the swap folder was full."""


class HostTrial:
    """A trial on this host, from :meth:`begin` to :meth:`end`; to end one of an earlier agent, its id is enough."""

    def __init__(self, scratch_id: str, send: Send = lambda _message: None) -> None:
        self.scratch_id, self._send = scratch_id, send
        self._private = Path(tempfile.gettempdir()) / f"{HOST_FOLDER_PREFIX}{os.getuid()}_{scratch_id}"
        self.folder: Path | None = None
        """Of the trial's files; None before :meth:`begin`."""
        self._assignment: Assignment | None = None
        self._seen: dict[Path, tuple[int, ...]] = {}
        """State of each file that is sent whole, when it was last sent."""
        self._sent_bytes: dict[Path, int] = {}
        """How much has been sent of a file that grows."""
        self._leader: subprocess.Popen[bytes] | None = None
        self._leader_noted = False
        self._oom_kills_before = read_oom_kill_count()

    def begin(self, name: str, assignment: Assignment, config: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        """Makes the private folder with the files of the trial. Raises OSError.

        ``name``: last two parts of the folder's path on the run's host. ``assignment``: as the run has it, without
        folders of this host. ``variables``: of this host's ranks.
        """
        trial = assignment.trial
        self._private.mkdir(mode=0o700)
        (self._private / OWNER_FILE).write_text(owner())
        parent, _, own = name.partition("/")
        self.folder = self._private / parent / own
        self.folder.mkdir(parents=True)
        # The run cannot see the disks of this host: what killed runs left on them is removed here.
        if trial.placement.nvme_path is not None:
            remove_abandoned(Path(trial.placement.nvme_path))
        checkpoint = assignment.checkpoint_folder
        # The folder that the run names may exist only on its own disk.
        if checkpoint is not None and not Path(checkpoint).parent.is_dir():
            checkpoint = str(self.folder / "checkpoint_files")
        self._assignment = replace(
            assignment,
            # Both are in the names of shared memory (scratch.shared_memory) where ranks do not meet through a file.
            scratch_id=f"{variables['MASTER_ADDR']}_{variables['MASTER_PORT']}",
            environment={**variables, **trial.configuration.variables},
            swap_folder=swap_folder(trial, self.scratch_id),
            checkpoint_folder=checkpoint,
        )
        create_scratch(self._assignment)
        self._assignment.save(self.folder, config)

    def start_ranks(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Runs a command that starts this host's ranks, as the child of a leader; its last word is the folder."""
        assert self.folder is not None
        environment = processes.child_environment({**variables, TRIAL_VARIABLE: self.scratch_id})
        self._leader = start_leader(self.folder, [*command, str(self.folder)], environment, Path("/"))

    @property
    def ranks_ended(self) -> bool:
        """Whether what :meth:`start_ranks` began has ended; False without it. Notes a leader that was killed."""
        if self._leader is None or (code := self._leader.poll()) is None:
            return False
        if code < 0 and self.folder is not None and not self._leader_noted:
            self._leader_noted = True
            append_exit(self.folder, None, self._leader.pid, -code)
            self.send_changes()
        return True

    def members(self) -> set[int]:
        """Living processes of the trial on this host."""
        return find_trial_processes(self.scratch_id)

    def request_stacks(self) -> None:
        """Makes every rank of this host write the stacks of its threads."""
        if self.folder is not None:
            request_stacks(self.folder, self.members())

    def send_changes(self, most_parts: int = 4) -> None:
        """Sends what has changed of the files that a running trial is watched by; ``most_parts`` of one that grows."""
        for path in sorted(self.folder.iterdir()) if self.folder is not None else ():
            with contextlib.suppress(OSError):  # it is being replaced
                if _REPLACED.fullmatch(path.name):
                    self._send_if_changed(path)
                elif _GROWING.fullmatch(path.name):
                    self._send_growth(path, most_parts)

    def _send_all(self, folder: Path) -> None:
        """Sends the rest of every file, including profiles."""
        self.send_changes(sys.maxsize)
        checkpoint = self._assignment.checkpoint_folder if self._assignment is not None else None
        for path in sorted(folder.rglob("*")):
            was_sent = path.parent == folder and (_REPLACED.fullmatch(path.name) or _GROWING.fullmatch(path.name))
            # The run has written these itself, and holds its own version (FileReceiver refuses them).
            is_own = path.name in (TRIAL_FILE, CONFIG_FILE) or path.name.startswith(".")
            if not (was_sent or is_own or (checkpoint is not None and path.is_relative_to(checkpoint))):
                with contextlib.suppress(OSError):  # a folder
                    self._send_if_changed(path)

    def _send_if_changed(self, path: Path) -> None:
        with files.opened(path, sys.maxsize) as file:
            facts = os.fstat(file.fileno())
            seen: tuple[int, ...] = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
            if path.suffix == ".steps":  # a mapped file: stores do not change its time
                seen = (zlib.crc32(file.read()),)
                file.seek(0)
            if seen != self._seen.get(path):
                self._seen[path] = seen
                # One part ahead, as the last must be marked: the receiver then puts the file in its place.
                part, start = file.read(_PART_BYTES), 0
                while True:
                    following = file.read(_PART_BYTES)
                    self._send_part(path, start, part, whole=True, last=not following)
                    if not following:
                        return
                    part, start = following, start + len(part)

    def _send_growth(self, path: Path, most_parts: int) -> None:
        start = self._sent_bytes.get(path, 0)
        if path.stat().st_size <= start:
            return
        with files.opened(path, sys.maxsize) as file:
            file.seek(start)
            for _ in range(most_parts):
                part = file.read(_PART_BYTES)
                if not part:
                    return
                self._send_part(path, start, part, whole=False, last=True)
                start = self._sent_bytes[path] = start + len(part)

    def _send_part(self, path: Path, start: int, data: bytes, *, whole: bool, last: bool) -> None:
        assert self.folder is not None
        name, text = path.relative_to(self.folder).as_posix(), base64.b64encode(data).decode()
        self._send({"file": name, "start": start, "data": text, "whole": whole, "last": last})

    def end(self, grace_seconds: float, *, send_files: bool = True) -> HostEnd:
        """Ends every process of the trial here, sends its last files and removes what it has created.

        ``send_files``: False where nobody receives them, as reading large ones would keep them from being removed.
        """
        left = processes.end_processes(self.members, grace_seconds=grace_seconds, first_signal=signal.SIGTERM)
        if self._leader is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._leader.wait(1.0)
        swap = self._assignment.swap_folder if self._assignment is not None else None
        # Before anything is removed, which makes room on the disk again.
        end = HostEnd(
            left=tuple(sorted(left)),
            oom_killed=read_oom_kill_count() > self._oom_kills_before,
            disk_full=files.disk_is_full(swap),
        )
        if send_files and self.folder is not None:
            self._send_all(self.folder)
        self.remove_files()
        return end

    def remove_files(self) -> None:
        """Removes the private folder and what the ranks leave behind."""
        if self._assignment is not None:
            remove_scratch(self._assignment)
        with contextlib.suppress(OSError):
            if self._private.lstat().st_uid == os.getuid():
                shutil.rmtree(self._private)


def find_trial_processes(*scratch_ids: str) -> set[int]:
    """Living processes of this user that carry a trial's id among their variables, what they have started, and what is
    in a session that one of them leads."""
    marks = {f"{TRIAL_VARIABLE}={scratch_id}".encode() for scratch_id in scratch_ids}
    members, parents, sessions = set(), {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(entry.name)
            if entry.stat().st_uid != os.getuid() or not processes.is_alive(pid):
                continue
            # Before the variables, which may be unreadable: the process is then still found by its parent or session.
            values = processes.stat_values(entry / "stat")  # state, parent, group, session
            parents[pid], sessions[pid] = (int(values[1]), int(values[3])) if values else (0, 0)
            if not marks.isdisjoint((entry / "environ").read_bytes().split(b"\0")):
                members.add(pid)
    while True:
        # Until none is added, as children of children count too.
        related = {pid for pid in parents if parents[pid] in members or sessions[pid] in members}
        if related <= members:
            return members - {os.getpid()}
        members |= related
