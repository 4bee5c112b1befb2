"""Writes event files that TensorBoard shows, by the package ``tensorboard``, which is imported when one is made."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path


class TensorBoardFile:
    """An event file of one run. It is written when :meth:`flush` is called."""

    def __init__(self, folder: Path) -> None:
        """``folder``: of the run, made where it is missing; TensorBoard shows the run under its name."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard takes a file for events by "tfevents" in its name.
        path = folder / f"events.out.tfevents.{time.time_ns()}.ds_bench"
        self._event = Event
        # Not EventFileWriter, which names its file itself and writes from a thread of its own.
        self._records = RecordWriter(path.open("xb"))
        # The first record of an event file has its version.
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def add_scalars(self, values: Mapping[str, float], step: int, when: float) -> None:
        """Add the values of one step. ``when``: seconds since the epoch."""
        summary = {"value": [{"tag": name, "simple_value": value} for name, value in values.items()]}
        self._records.write(self._event(wall_time=when, step=step, summary=summary).SerializeToString())

    def add_summary(self, summary: object, when: float) -> None:
        """Add what a plugin of TensorBoard makes: a ``Summary`` of its protocol."""
        self._records.write(self._event(wall_time=when, summary=summary).SerializeToString())

    def flush(self) -> None:
        """Write what was added to the file."""
        self._records.flush()

    def close(self) -> None:
        """Write and close the file."""
        self._records.close()
