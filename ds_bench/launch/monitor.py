"""Watching a trial from outside: files and clocks only, a few system calls every fifth of a second."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..records.rank_files import Heartbeat, beat_file, rank_file, read_beat, read_exits
from ..system import files, processes

Ending = Literal["ended", "hung_at_exit", "rank_failed", "timeout", "stalled"]
_POLL_SECONDS = 0.2
_GROWTH_BYTES = 16 * 2**20
"""Memory or I/O by which silent ranks have to grow to count as alive: more than a hung rank's log or caches do."""
_LOOKS_PER_STALL = 4
"""How often the growth of silent ranks is looked at within the stall timeout."""
_LONGEST_BETWEEN_LOOKS_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things may take."""

    timeout_seconds: float = 3600.0
    """Whole trial."""
    stall_timeout_seconds: float = 600.0
    """Without any sign of life from any rank: a beat or, until each has done its first step, growth of what it holds
    in memory or has moved to and from disks."""
    failure_grace_seconds: float = 5.0
    """For the other ranks to report after one has failed."""
    exit_grace_seconds: float = 10.0
    """For processes to end after every rank has written its file."""
    kill_grace_seconds: float = 5.0
    """Between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a running trial is."""

    phase: str
    step: int
    """Optimizer steps done, warm-up included; -1 before the first."""
    last_step_seconds: float | None
    elapsed_seconds: float


ProgressCallback = Callable[[Progress], None]


def watch(
    folder: Path, world_size: int, limits: Limits, wait_leader: Callable[[float], bool], listen: ProgressCallback
) -> tuple[Ending, float | None]:
    """Waits for the end of a trial. Returns how it ended, and seconds from the start to the first warm-up step.

    ``wait_leader(seconds)``: waits at most so long; True once the leader has ended.
    """
    watcher = _Watcher(folder, world_size, limits)
    while True:
        if wait_leader(_POLL_SECONDS):
            watcher.look(listen)
            return "ended", watcher.start_seconds
        ending = watcher.look(listen)
        if ending is not None:
            if ending in ("timeout", "stalled"):
                watcher.dump_stacks()
            return ending, watcher.start_seconds


def _beginning(path: Path) -> bytes:
    """The first bytes of a rank's file; none where it is no regular file."""
    try:
        with files.opened(path, sys.maxsize) as file:
            return file.read(64)
    except OSError:
        return b""


class _Watcher:
    def __init__(self, folder: Path, world_size: int, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._ranks = range(world_size)
        self._start = self._last_life = time.monotonic()
        self._beats: dict[int, Heartbeat] = {}
        self._lowest: processes.Activity | None = None
        self._looked_at = self._start
        self._written_at: float | None = None
        self._failed_at: float | None = None
        self.start_seconds: float | None = None

    def look(self, listen: ProgressCallback) -> Ending | None:
        now = time.monotonic()
        self._read_beats(now)
        if self._beats:
            slowest = min(self._beats.values(), key=lambda beat: beat.step)
            listen(
                Progress(
                    phase=slowest.phase,
                    step=slowest.step,
                    last_step_seconds=slowest.last_step_seconds,
                    elapsed_seconds=now - self._start,
                )
            )
        return self._over_by_files(now) or self._over_by_clock(now)

    def _read_beats(self, now: float) -> None:
        for rank in self._ranks:
            beat = read_beat(self._folder, rank)
            if beat is not None and beat != self._beats.get(rank):
                self._beats[rank] = beat
                self._last_life = now
        self._look_for_growth(now)
        everyone = len(self._beats) == len(self._ranks)
        if self.start_seconds is None and everyone and all(beat.step >= 0 for beat in self._beats.values()):
            self.start_seconds = now - self._start

    def _look_for_growth(self, now: float) -> None:
        """Ranks that load, build or initialise are silent in libraries for minutes, but move bytes meanwhile."""
        interval = min(self._limits.stall_timeout_seconds / _LOOKS_PER_STALL, _LONGEST_BETWEEN_LOOKS_SECONDS)
        stepping = len(self._beats) == len(self._ranks) and all(beat.step >= 1 for beat in self._beats.values())
        if stepping or now - self._looked_at < interval:
            return
        self._looked_at = now
        seen = processes.read_activity(processes.descendants())
        before = self._lowest
        if before is None:
            self._lowest = seen
        elif (
            seen.resident_bytes >= before.resident_bytes + _GROWTH_BYTES
            or seen.disk_bytes >= before.disk_bytes + _GROWTH_BYTES
        ):
            self._last_life, self._lowest = now, seen
        else:  # what was given back can grow again
            self._lowest = processes.Activity(
                resident_bytes=min(seen.resident_bytes, before.resident_bytes),
                disk_bytes=min(seen.disk_bytes, before.disk_bytes),
            )

    def _over_by_files(self, now: float) -> Ending | None:
        written = [rank for rank in self._ranks if rank_file(self._folder, rank).exists()]
        if len(written) == len(self._ranks):
            self._written_at = self._written_at or now
            return "hung_at_exit" if now - self._written_at > self._limits.exit_grace_seconds else None
        if self._failed_at is None and (self._died(written) or self._reported_failure(written)):
            self._failed_at = now
        if self._failed_at is not None and now - self._failed_at > self._limits.failure_grace_seconds:
            return "rank_failed"
        return None

    def _died(self, written: list[int]) -> bool:
        return any(entry.rank is not None and entry.rank not in written for entry in read_exits(self._folder))

    def _reported_failure(self, written: list[int]) -> bool:
        return any(b'"failure"' in _beginning(rank_file(self._folder, rank)) for rank in written)

    def _over_by_clock(self, now: float) -> Ending | None:
        if now - self._start > self._limits.timeout_seconds:
            return "timeout"
        if now - self._last_life > self._limits.stall_timeout_seconds:
            return "stalled"
        return None

    def dump_stacks(self) -> None:
        """Asks every rank of this node for the stacks of its threads (rank<N>.stacks)."""
        ours = processes.descendants()
        for rank in self._ranks:
            beat = read_beat(self._folder, rank)
            if beat is not None and beat.pid in ours and beat_file(self._folder, rank).exists():
                os.kill(beat.pid, signal.SIGUSR2)
        time.sleep(1.0)
