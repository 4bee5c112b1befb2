"""What a step's time is spent on, from further steps after the measured window that are synchronised between phases."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch.distributed

from ..records.schema import OffloadTimes
from . import training_loop
from .communication import CommunicationTimer
from .offload_times import OffloadTimer


def measure_phases(trainer: training_loop.Trainer) -> dict[str, Any]:
    """The fields ``phase_seconds``, ``offload`` and ``step_parts`` of a RankMeasurement, from two steps.

    Nothing is made slower but by the synchronisation between phases.
    """
    steps, waited_before = 2, trainer.data_wait_seconds
    with OffloadTimer(trainer.engine) as offload:
        phases = training_loop.phase_times(trainer, steps, lambda: offload.disk.wait_seconds)
    parts = dict(phases.own_seconds)
    if offload.swaps:
        parts["transfer"] = offload.disk.wait_seconds / steps
    return {
        "phase_seconds": phases.seconds,
        "offload": None if (times := offload.times(steps)) == OffloadTimes() else asdict(times),
        "step_parts": parts | _data_wait(trainer, waited_before, steps),
    }


def measure_communication(trainer: training_loop.Trainer, steps: int) -> dict[str, Any]:
    """The fields ``communication`` and ``step_parts`` of a RankMeasurement, from ``steps`` steps.

    Each collective operation, and on GPUs each copy between host and device, is made synchronous. Every rank must call
    it.
    """
    torch.distributed.barrier()  # else the first operation waits for a rank that still writes another profile
    synchronize = functools.partial(training_loop.synchronize, trainer.accelerator)
    waited_before = trainer.data_wait_seconds
    offload = OffloadTimer(trainer.engine, synchronize if trainer.accelerator == "cuda" else None)
    with offload, CommunicationTimer(synchronize) as communication:
        phases = training_loop.phase_times(
            trainer, steps, lambda: communication.seconds + offload.disk.wait_seconds + offload.copy_seconds
        )
    parts = {**phases.own_seconds, "communication": communication.seconds / steps}
    if offload.swaps or offload.copy_seconds:
        # not the sum of all copies, to which those of micro-batches to the device between steps belong
        parts["transfer"] = max(0.0, sum(phases.seconds.values()) - sum(parts.values()))
    return {
        "communication": [asdict(each) for each in communication.operations(steps, trainer.first_device)],
        "step_parts": parts | _data_wait(trainer, waited_before, steps),
    }


def _data_wait(trainer: training_loop.Trainer, waited_before: float | None, steps: int) -> dict[str, float]:
    waited = trainer.data_wait_seconds
    return {} if waited is None or waited_before is None else {"data_wait": (waited - waited_before) / steps}
