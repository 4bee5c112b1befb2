"""The files through which the parent and the ranks of one trial communicate.

In: ``trial.json`` (what to do), ``ds_config.json``. Out, per rank N: ``rank<N>.json``, written atomically as the rank's
last act (``rank<N>.measured.json`` before it, in case what follows the measured window fails); ``rank<N>.beat``
(progress, 48 bytes rewritten in place); ``rank<N>.log`` (output, searched only for NCCL's watchdog message);
``rank<N>.stacks`` (on request). The leader of the trial adds a line to ``exits.jsonl`` for every rank that ended.

In a job on several hosts, each host has a private folder with these files; they are sent to the parent's folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config.deepspeed_config import with_swap_folder
from ..config.spec import Trial
from ..system import files
from . import json_files

PHASES = (
    *("hello", "import", "build", "init", "warmup", "loop", "forward", "backward", "step"),
    *("inspect", "write", "exit"),
)
"""Phases of a rank in order; those from ``loop`` (a script between two steps) to ``step`` repeat."""

TRIAL_FILE = "trial.json"
CONFIG_FILE = "ds_config.json"
EXITS_FILE = "exits.jsonl"
LEADER_LOG = "leader.log"
_MAX_EXITS_BYTES = 2**22
"""Room for tens of thousands of ranks."""


TRIAL_VARIABLE = "DS_BENCH_TRIAL"
"""On several hosts, the ``scratch_id`` of the trial, in every process that belongs to it."""
HOST_FOLDER_PREFIX = "ds_bench_trial_"
"""Prefix of the private folder that each of several hosts makes for a trial in its temporary folder."""


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def partial_rank_file(folder: Path, rank: int) -> Path:
    """What ``rank<N>.json`` will hold, except the inspection that follows the measured window."""
    return folder / f"rank{rank}.measured.json"


def beat_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.beat"


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stacks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Instructions for the ranks of a trial: the contents of trial.json."""

    trial: Trial
    rendezvous: str | None
    """``file://…`` on one node; None if the launcher's environment variables say where the ranks connect."""
    scratch_id: str
    """Part of the names of this trial's shared-memory segments: its MASTER_PORT or, on several hosts, MASTER_ADDR and
    MASTER_PORT. On one host, only a script listens on that port."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables set in every rank before torch is used."""
    swap_folder: str | None = None
    checkpoint_folder: str | None = None
    """Private folder for the checkpoint that is measured, or for a script's ``{output_dir}``; None without either."""
    collective_timeout_seconds: float | None = None
    """For one collective: longer than any limit of the trial, so that no library ends a rank before the parent does."""
    working_folder: str | None = None
    """Working folder of the ranks, if a launcher starts them elsewhere; None to stay where they are started."""

    def save(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Write trial.json and ds_config.json into the trial's folder.

        ``config``: DeepSpeed's, written with the private folder for NVMe swapping. Only ds_config.json contains its
        credentials, and only the user may read that file.
        """
        if self.swap_folder is not None:
            config = with_swap_folder(config, self.swap_folder)
        json_files.write_json(folder / CONFIG_FILE, config, mode=0o600)
        json_files.write_json(folder / TRIAL_FILE, self.to_dict())

    @classmethod
    def load(cls, folder: Path) -> Assignment:
        return cls.from_dict(json.loads((folder / TRIAL_FILE).read_text(encoding="utf-8")))

    def to_dict(self) -> dict[str, Any]:
        """JSON values. The configuration's credentials are redacted."""
        return {**asdict(self), "trial": self.trial.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Assignment:
        """The inverse of :meth:`to_dict`. Raises ValueError for data of a different shape."""
        # Not with json_files.build, which reads only UTF-8: folder names may be any bytes.
        return json_files.adapter(cls).validate_python(data, extra="forbid")


# pid, time, index of the phase, steps, duration of the last step, number of beats; 48 bytes without padding.
_BEAT = struct.Struct("<qdqqdq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The last progress that a rank reported."""

    pid: int
    time: float
    """Seconds since the epoch."""
    phase: str
    step: int
    """Optimizer steps finished, warm-up included; -1 before the first."""
    last_step_seconds: float | None


class HeartbeatWriter:
    """Reports a rank's progress with one small write in place, cheap enough for the timed loop (about 2 µs)."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(beat_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._pid = os.getpid()
        self.phase = "hello"
        self.step = -1
        self._last_step_seconds = 0.0
        self._count = 0
        self.beat("hello")

    def beat(self, phase: str, step: int | None = None, last_step_seconds: float | None = None) -> None:
        """Report that ``phase`` begins and ``step`` optimizer steps are done; None keeps the last value."""
        self.phase = phase
        if step is not None:
            self.step = step
        if last_step_seconds is not None:
            self._last_step_seconds = last_step_seconds
        self._count += 1
        record = _BEAT.pack(
            self._pid, time.time(), PHASES.index(phase), self.step, self._last_step_seconds, self._count
        )
        os.pwrite(self._file, record, 0)


def read_beat(folder: Path, rank: int) -> Heartbeat | None:
    """Read a rank's heartbeat; None before the first, or if it is incomplete."""
    try:
        data = files.read_bytes(beat_file(folder, rank), _BEAT.size)
        pid, when, phase, step, last, _ = _BEAT.unpack(data)
    except (OSError, struct.error):
        return None
    if not (0 <= phase < len(PHASES) and math.isfinite(when) and math.isfinite(last)):
        return None
    # Before the first step, a writer reports 0.0 for the last one.
    return Heartbeat(pid=pid, time=when, phase=PHASES[phase], step=step, last_step_seconds=last or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How a process of the trial ended, as its leader saw it."""

    rank: int | None
    """None for a launcher that hides its ranks."""
    pid: int
    code: int | None
    """Exit code; None if a signal ended it."""
    signal: int | None
    time: float
    """Seconds since the epoch."""


def append_exit(folder: Path, rank: int | None, pid: int, status: int) -> None:
    """Write how a process ended. ``status``: from ``waitpid``. A full disk is ignored, so that ranks keep training."""
    code = os.waitstatus_to_exitcode(status)
    ended = RankExit(
        rank=rank, pid=pid, code=code if code >= 0 else None, signal=-code if code < 0 else None, time=time.time()
    )
    with contextlib.suppress(OSError):
        json_files.append_line(folder / EXITS_FILE, ended)


def read_exits(folder: Path) -> list[RankExit]:
    """Read the exits that the leader has written so far, skipping incomplete lines; none if the file is unreadable."""
    return json_files.read_lines(RankExit, folder / EXITS_FILE, _MAX_EXITS_BYTES)


def shift_times(name: str, data: bytes, seconds: float) -> bytes:
    """The content of another host's file, with its times shifted to this host's clock; unchanged if it has no times."""
    with contextlib.suppress(ValueError, KeyError, TypeError, struct.error):  # an incomplete line, for instance
        if name == EXITS_FILE:
            entries = [json.loads(line) for line in data.splitlines()]
            return b"".join(json_files.json_line({**each, "time": each["time"] + seconds}) + b"\n" for each in entries)
        if name.endswith(".beat"):
            pid, when, *others = _BEAT.unpack(data)
            return _BEAT.pack(pid, when + seconds, *others)
        if re.fullmatch(r"rank\d+\.json", name) and b'"failure"' in data[:64]:
            failure = json.loads(data)["failure"]
            return json_files.json_line({"failure": {**failure, "time": failure["time"] + seconds}})
    return data
