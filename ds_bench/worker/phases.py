"""Parts of a step's time, from further steps after the measured window that are synchronized between phases.

They are slower than the measured steps, since nothing overlaps, and never part of the headline numbers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed

from ..records.schema import OffloadTimes
from . import training_loop
from .operation_timers import CommunicationTimer, OffloadTimer

_STEPS = 2
_PHASES = ("forward", "backward", "step")


def measure_phases(trainer: training_loop.Trainer) -> dict[str, Any]:
    """Return the fields ``phase_seconds``, ``offload`` and ``step_parts`` of a RankMeasurement, from two steps.

    Only the synchronization between phases makes them slower.
    """
    with OffloadTimer(trainer.engine) as offload:
        seconds, parts = _time_phases(trainer, lambda: offload.disk.wait_seconds)
    if offload.swaps:
        parts["transfer"] = offload.disk.wait_seconds / _STEPS
    times = offload.times(_STEPS)
    return {
        "phase_seconds": seconds,
        "offload": None if times == OffloadTimes() else asdict(times),
        "step_parts": parts,
    }


def measure_communication(trainer: training_loop.Trainer) -> dict[str, Any]:
    """Return the fields ``communication`` and ``step_parts`` of a RankMeasurement, from two steps.

    Each collective operation, and on GPUs each copy between host and device, is made synchronous. Every rank must call
    it.
    """
    if trainer.engine.zero_optimization_stage() == 3:  # a pass without backward has left gathered parameters behind
        trainer.step()
    trainer.heartbeat.beat("inspect")
    torch.distributed.barrier()  # else the first operation waits for a rank that still writes a profile
    synchronize = functools.partial(training_loop.synchronize, trainer.accelerator)
    offload = OffloadTimer(trainer.engine, synchronize if trainer.accelerator == "cuda" else None)
    with offload, CommunicationTimer(synchronize) as communication:
        seconds, parts = _time_phases(
            trainer, lambda: communication.seconds + offload.disk.wait_seconds + offload.copy_seconds
        )
    parts["communication"] = communication.seconds / _STEPS
    if offload.swaps or offload.copy_seconds:
        # not the sum of all copies, which include copies of micro-batches to the device between steps
        accounted = sum(parts[name] for name in (*_PHASES, "communication"))
        parts["transfer"] = max(0.0, sum(seconds.values()) - accounted)
    operations = communication.operations(_STEPS, trainer.first_device)
    return {"communication": [asdict(each) for each in operations], "step_parts": parts}


def _time_phases(
    trainer: training_loop.Trainer, other_seconds: Callable[[], float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Train for ``_STEPS`` steps, synchronized around each phase, and return two sets of mean seconds per step.

    First the phases; then the parts of a step: the phases without ``other_seconds``, and the wait for a data loader if
    there is one. ``other_seconds``: seconds so far in parts that are timed separately.
    """
    seconds, parts = (dict.fromkeys(_PHASES, 0.0) for _ in range(2))
    waited_before = trainer.data_wait_seconds
    for _ in range(_STEPS * trainer.grad_accum):
        trainer.heartbeat.beat("inspect")
        batch, marks = next(trainer.batches), list[tuple[float, float]]()

        def mark(marks: list[tuple[float, float]] = marks) -> None:
            training_loop.synchronize(trainer.accelerator)
            marks.append((time.perf_counter(), other_seconds()))

        mark()
        loss = trainer.compute_loss(batch)
        mark()
        trainer.engine.backward(loss)
        mark()
        trainer.engine.step()
        mark()
        del loss  # its graph holds the activations where no backward pass freed them
        for phase, before, after in zip(_PHASES, marks, marks[1:], strict=False):
            seconds[phase] += (after[0] - before[0]) / _STEPS
            parts[phase] += (after[0] - before[0] - (after[1] - before[1])) / _STEPS
    waited = trainer.data_wait_seconds
    if waited is not None and waited_before is not None:
        parts["data_wait"] = (waited - waited_before) / _STEPS
    return seconds, parts
