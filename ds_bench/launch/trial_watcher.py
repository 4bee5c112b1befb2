"""Watches a running trial through its files, until it ends, stalls or runs out of time.

It checks five times a second, with a few system calls.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ..records.rank_files import Heartbeat, rank_file, read_beat, read_exits
from ..system import files, processes

Ending = Literal["ended", "hung_at_exit", "rank_failed", "timeout", "stalled", "host_lost"]
_POLL_SECONDS = 0.2
_GROWTH_BYTES = 16 * 2**20
"""Growth in memory or I/O that proves silent ranks alive: more than the log or caches of a hung rank can grow."""
_CHECKS_PER_STALL = 4
"""Checks for growth within the stall timeout."""
_MAX_CHECK_INTERVAL_SECONDS = 5.0
"""Longest interval between checks until every rank has taken a step; later checks are rarer, as they slow the steps."""
_EXIT_SECONDS_PER_GB = 0.3
"""Added to the grace period at exit per 10**9 bytes of resident memory: page-locked memory is released slowly."""
STACKS_SECONDS = 1.0
"""Time for ranks to write their stacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time limits of a trial."""

    timeout_seconds: float = 3600.0
    """Whole trial."""
    stall_timeout_seconds: float = 600.0
    """Without a sign of life from any rank: a heartbeat, growth of its memory, or disk traffic."""
    failure_grace_seconds: float = 5.0
    """For the other ranks to report after one has failed."""
    exit_grace_seconds: float = 10.0
    """For processes to end after every rank has written its file; longer if they hold much memory."""
    kill_grace_seconds: float = 5.0
    """Between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a running trial has got."""

    phase: str
    step: int
    """Optimizer steps done, warm-up included; -1 before the first."""
    last_step_seconds: float | None
    elapsed_seconds: float


ProgressCallback = Callable[[Progress], None]


class OtherHosts(Protocol):
    """The hosts of a trial whose ranks are not descendants of this process: see ``RemoteTrial``."""

    @property
    def any_lost(self) -> bool: ...
    def ended_without_file(self, written: Collection[int]) -> bool: ...
    def read_activity(self) -> processes.Activity | None: ...
    def request_stacks(self) -> None: ...


def watch(
    folder: Path,
    world_size: int,
    limits: Limits,
    wait_leader: Callable[[float], bool],
    on_progress: ProgressCallback,
    hosts: OtherHosts | None = None,
) -> tuple[Ending, float | None]:
    """Wait for a trial to end. Return how it ended, and the seconds from its start to its first warm-up step.

    ``wait_leader`` waits at most the given seconds and returns whether the leader has ended. ``hosts``: set if the
    ranks are not descendants of this process.
    """
    watcher = _Watcher(folder, world_size, limits, hosts)
    while True:
        if wait_leader(_POLL_SECONDS):
            # Once more, for what the ranks wrote since the last check.
            watcher.check(on_progress)
            return "ended", watcher.start_seconds
        ending = watcher.check(on_progress)
        if ending is not None:
            # For any other ending the cause is already known.
            if ending in ("timeout", "stalled"):
                watcher.request_stacks()
            return ending, watcher.start_seconds


class _Watcher:
    """Observations of a trial so far."""

    def __init__(self, folder: Path, world_size: int, limits: Limits, hosts: OtherHosts | None = None) -> None:
        self._folder, self._limits, self._hosts = folder, limits, hosts
        self._ranks = range(world_size)
        self._start = self._last_sign_of_life = time.monotonic()
        self._beats: dict[int, Heartbeat] = {}
        self._lowest_activity: processes.Activity | None = None
        self._growth_checked_at = self._start
        self._exit_deadline: float | None = None
        self._failed_at: float | None = None
        self.start_seconds: float | None = None

    def check(self, on_progress: ProgressCallback) -> Ending | None:
        """Read the trial's files once. Return how the trial ended; None while it runs."""
        now = time.monotonic()
        for rank in self._ranks:
            beat = read_beat(self._folder, rank)
            if beat is not None and beat != self._beats.get(rank):
                self._beats[rank] = beat
                self._last_sign_of_life, self._lowest_activity = now, None
        self._check_growth(now)
        all_started = len(self._beats) == len(self._ranks)
        if self.start_seconds is None and all_started and all(beat.step >= 0 for beat in self._beats.values()):
            self.start_seconds = now - self._start
        if self._beats:
            slowest = min(self._beats.values(), key=lambda beat: beat.step)
            on_progress(
                Progress(
                    phase=slowest.phase,
                    step=slowest.step,
                    last_step_seconds=slowest.last_step_seconds,
                    elapsed_seconds=now - self._start,
                )
            )
        if ending := self._check_rank_files(now):
            return ending
        if self._hosts is not None and self._hosts.any_lost:
            return "host_lost"
        if now - self._start > self._limits.timeout_seconds:
            return "timeout"
        return "stalled" if now - self._last_sign_of_life > self._limits.stall_timeout_seconds else None

    def _check_growth(self, now: float) -> None:
        """Count growth as a sign of life from silent ranks.

        Libraries load, build or initialize for minutes without a heartbeat. A script may prepare data between steps.
        """
        interval = self._limits.stall_timeout_seconds / _CHECKS_PER_STALL
        stepping = len(self._beats) == len(self._ranks) and all(beat.step >= 1 for beat in self._beats.values())
        if not stepping:
            interval = min(interval, _MAX_CHECK_INTERVAL_SECONDS)
        if now - max(self._growth_checked_at, self._last_sign_of_life) < interval:
            return
        self._growth_checked_at = now
        activity = self._read_activity()
        if activity is None:  # a host that does not answer proves neither life nor a hang
            return
        lowest = self._lowest_activity or activity
        if (
            activity.resident_bytes >= lowest.resident_bytes + _GROWTH_BYTES
            or activity.disk_bytes >= lowest.disk_bytes + _GROWTH_BYTES
        ):
            self._last_sign_of_life, self._lowest_activity = now, activity
        else:  # memory that was freed may grow again
            self._lowest_activity = processes.Activity(
                resident_bytes=min(activity.resident_bytes, lowest.resident_bytes),
                disk_bytes=min(activity.disk_bytes, lowest.disk_bytes),
            )

    def _read_activity(self) -> processes.Activity | None:
        # All descendants count: a compiler that a rank started works for it.
        return self._hosts.read_activity() if self._hosts else processes.read_activity(processes.descendants())

    def _check_rank_files(self, now: float) -> Ending | None:
        written = [rank for rank in self._ranks if rank_file(self._folder, rank).exists()]
        if len(written) == len(self._ranks):
            if self._exit_deadline is None:
                activity = self._read_activity()
                resident_gb = 0.0 if activity is None else activity.resident_bytes / 1e9
                self._exit_deadline = now + self._limits.exit_grace_seconds + _EXIT_SECONDS_PER_GB * resident_gb
            # A rank may hang after writing its file, while its libraries shut down; its result still counts.
            return "hung_at_exit" if now > self._exit_deadline else None
        # A line without a rank is the launcher's, whose end does not mean that a rank failed.
        ended = any(entry.rank is not None and entry.rank not in written for entry in read_exits(self._folder))
        ended = ended or (self._hosts is not None and self._hosts.ended_without_file(written))
        if self._failed_at is None and (ended or any(map(self._reports_failure, written))):
            self._failed_at = now
        if self._failed_at is not None and now - self._failed_at > self._limits.failure_grace_seconds:
            return "rank_failed"
        return None

    def _reports_failure(self, rank: int) -> bool:
        with contextlib.suppress(OSError), files.opened(rank_file(self._folder, rank), sys.maxsize) as file:
            return b'"failure"' in file.read(64)  # the first key; the file may have any size
        return False

    def request_stacks(self) -> None:
        """Make every rank write the stacks of its threads (rank<N>.stacks)."""
        if self._hosts is not None:
            self._hosts.request_stacks()
            return
        request_stacks(self._folder, processes.descendants())
        time.sleep(STACKS_SECONDS)


def request_stacks(folder: Path, members: Collection[int]) -> None:
    """Make the ranks with a heartbeat in ``folder`` write their stacks, if they are among these processes.

    A heartbeat is not enough: its process may have ended, and another may have its id by now.
    """
    beats = (read_beat(folder, int(path.stem.removeprefix("rank"))) for path in folder.glob("rank[0-9]*.beat"))
    processes.send_signal([beat.pid for beat in beats if beat is not None and beat.pid in members], signal.SIGUSR2)
