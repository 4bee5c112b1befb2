"""What is reported of each step while a trial trains: a rank's step file, ``steps.jsonl`` and TensorBoard events.

A rank writes its steps to a memory-mapped file (``rank<N>.steps``) without a system call, which is cheap enough between
two measured steps. The file holds only the latest steps; the parent reads it while the trial runs and appends every
step to ``steps.jsonl``.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..system import files
from ..units import to_gb, to_ms
from . import json_files

STEPS_FILE = "steps.jsonl"
_HEADER = struct.Struct("<qq")
"""Steps written so far; tokens of the whole job in a step."""
_COUNT = struct.Struct("<q")
# The fields of StepSample in order, with NaN and _UNKNOWN for None.
_SAMPLE = struct.Struct("<qdddqqqq")
_CAPACITY = 1024
"""Steps that a rank's file holds. The parent reads it five times a second."""
_FILE_BYTES = _HEADER.size + _CAPACITY * _SAMPLE.size
_UNKNOWN = -1
_MAX_BYTES = 2**30


class StepSample(NamedTuple):
    """One step on one rank, in the order of ``_SAMPLE``. None if a value is unknown."""

    measured: bool
    """False for a warm-up step."""
    time: float
    """End of the step, in seconds since the epoch."""
    seconds: float
    loss: float | None
    """Mean over the rank's micro-batches; None if it is not finite."""
    gpu_allocated_bytes: int | None = None
    """Held by tensors at the end of the step."""
    gpu_reserved_bytes: int | None = None
    """Held by torch's allocator at the end of the step."""
    gpu_peak_bytes: int | None = None
    """Peak allocated since the warm-up or the measured steps began."""
    host_resident_bytes: int | None = None
    """Resident memory at the end of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStep:
    """One step of the whole job: a line of ``steps.jsonl`` (docs/reading.md)."""

    step: int
    """From 0, warm-up steps included."""
    phase: str
    """``warmup`` or ``measured``."""
    time: float
    seconds: float
    """On the slowest rank."""
    tokens_per_second: float | None
    """For the whole job; None for a step that took no time by the clock."""
    loss: float | None
    """Mean over ranks."""
    gpu_allocated_bytes: int | None = None
    gpu_reserved_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    """All ``gpu_*`` fields: on the fullest rank."""
    host_resident_bytes: int | None = None
    """Sum over the ranks."""

    @property
    def shown_values(self) -> dict[str, float]:
        """The known values of the step for trackers, with the names and units of the flat files."""
        values = {
            "loss": self.loss,
            "step_time_ms": to_ms(self.seconds),
            "throughput_tokens_per_sec": self.tokens_per_second,
            "gpu_allocated_gb": to_gb(self.gpu_allocated_bytes),
            "gpu_reserved_gb": to_gb(self.gpu_reserved_bytes),
            "gpu_peak_gb": to_gb(self.gpu_peak_bytes),
            "cpu_used_gb": to_gb(self.host_resident_bytes),
        }
        return {name: value for name, value in values.items() if value is not None}


def steps_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.steps"


class StepFileWriter:
    """Writes the steps of one rank. Making one raises OSError if the disk has no room for the file."""

    def __init__(self, folder: Path, rank: int, tokens_per_step: int) -> None:
        descriptor = os.open(steps_file(folder, rank), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, _FILE_BYTES)  # a store to a page without room on disk would kill the rank
            self._memory = mmap.mmap(descriptor, _FILE_BYTES)
        finally:
            os.close(descriptor)
        self._count = 0
        _HEADER.pack_into(self._memory, 0, 0, tokens_per_step)

    def add(self, sample: StepSample) -> None:
        """Add the next step; the first one is step 0."""
        measured, time, seconds, loss, *sizes = sample
        _SAMPLE.pack_into(
            self._memory,
            _HEADER.size + self._count % _CAPACITY * _SAMPLE.size,
            measured,
            time,
            seconds,
            math.nan if loss is None else loss,
            *(_UNKNOWN if size is None else size for size in sizes),
        )
        self._count += 1
        _COUNT.pack_into(self._memory, 0, self._count)  # last, when the sample that it counts is complete


class StepFileReader:
    """Reads the steps of one rank while it writes them."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = steps_file(folder, rank)
        self._next = 0
        self.tokens_per_step = 0

    def new_samples(self) -> Iterator[tuple[int, StepSample]]:
        """Yield the number and sample of each step not yet read; nothing until the rank has made its file."""
        try:
            data = files.read_bytes(self.path, _FILE_BYTES)
        except OSError:
            return
        # The rank has made the file but not yet given it its size.
        if len(data) < _FILE_BYTES:
            return
        count, self.tokens_per_step = _HEADER.unpack_from(data)
        # If the file is full, the oldest slot is left out: the rank may be writing its next step there.
        first = max(self._next, count - _CAPACITY + 1)
        self._next = max(count, self._next)
        for number in range(first, count):
            values = _SAMPLE.unpack_from(data, _HEADER.size + number % _CAPACITY * _SAMPLE.size)
            measured, time, seconds, loss, *sizes = values
            known_sizes = (None if size == _UNKNOWN else int(size) for size in sizes)
            known_loss = loss if math.isfinite(loss) else None
            yield number, StepSample(bool(measured), time, seconds, known_loss, *known_sizes)


def read_steps(folder: Path) -> list[TrialStep]:
    """Return the steps in ``steps.jsonl`` of a trial's folder, skipping invalid lines; empty without the file."""
    return json_files.read_lines(TrialStep, folder / STEPS_FILE, _MAX_BYTES)


class TensorBoardFile:
    """An event file of one run. It is written when :meth:`flush` is called."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the run's, created if missing; TensorBoard shows the run under the folder's name."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard recognizes an event file by "tfevents" in its name.
        path = folder / f"events.out.tfevents.{time.time_ns()}.ds_bench"
        self._event = Event
        # Not EventFileWriter, which chooses the file name itself and writes from its own thread.
        self._records = RecordWriter(path.open("xb"))
        # The first record of an event file holds the format version.
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def add_scalars(self, values: Mapping[str, float], step: int, when: float) -> None:
        """Add the values of one step. ``when``: seconds since the epoch."""
        summary = {"value": [{"tag": name, "simple_value": value} for name, value in values.items()]}
        self._records.write(self._event(wall_time=when, step=step, summary=summary).SerializeToString())

    def add_summary(self, summary: object, when: float) -> None:
        """Add what a TensorBoard plugin makes: a ``Summary`` message."""
        self._records.write(self._event(wall_time=when, summary=summary).SerializeToString())

    def flush(self) -> None:
        """Write the added values to the file."""
        self._records.flush()

    def close(self) -> None:
        """Write and close the file."""
        self._records.close()
