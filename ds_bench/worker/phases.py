"""Parts of a step's time, from further steps after the measured window that are synchronised between phases."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed

from ..records.schema import OffloadTimes
from . import training_loop
from .communication import CommunicationTimer
from .offload_times import OffloadTimer

_STEPS = 2


def measure_phases(trainer: training_loop.Trainer) -> dict[str, Any]:
    """The fields ``phase_seconds``, ``offload`` and ``step_parts`` of a RankMeasurement, from two steps.

    Nothing is made slower but by the synchronisation between phases.
    """
    waited_before = trainer.data_wait_seconds
    with OffloadTimer(trainer.engine) as offload:
        phases = phase_times(trainer, lambda: offload.disk.wait_seconds)
    parts = dict(phases.own_seconds)
    if offload.swaps:
        parts["transfer"] = offload.disk.wait_seconds / _STEPS
    return {
        "phase_seconds": phases.seconds,
        "offload": None if (times := offload.times(_STEPS)) == OffloadTimes() else asdict(times),
        "step_parts": parts | _data_wait(trainer, waited_before),
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
    waited_before = trainer.data_wait_seconds
    offload = OffloadTimer(trainer.engine, synchronize if trainer.accelerator == "cuda" else None)
    with offload, CommunicationTimer(synchronize) as communication:
        phases = phase_times(trainer, lambda: communication.seconds + offload.disk.wait_seconds + offload.copy_seconds)
    parts = {**phases.own_seconds, "communication": communication.seconds / _STEPS}
    if offload.swaps or offload.copy_seconds:
        # not the sum of all copies, which include copies of micro-batches to the device between steps
        parts["transfer"] = max(0.0, sum(phases.seconds.values()) - sum(parts.values()))
    return {
        "communication": [asdict(each) for each in communication.operations(_STEPS, trainer.first_device)],
        "step_parts": parts | _data_wait(trainer, waited_before),
    }


def _data_wait(trainer: training_loop.Trainer, waited_before: float | None) -> dict[str, float]:
    waited = trainer.data_wait_seconds
    return {} if waited is None or waited_before is None else {"data_wait": (waited - waited_before) / _STEPS}


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of ``forward``, ``backward`` and ``step``."""

    seconds: dict[str, float]
    own_seconds: dict[str, float]
    """Without what is timed as a part of its own."""


def phase_times(trainer: training_loop.Trainer, parts: Callable[[], float]) -> PhaseTimes:
    """Mean seconds per optimizer step in forward, backward and step, synchronised around each.

    Slower than the measured steps, since nothing overlaps; never part of the headline numbers. ``parts``: seconds so
    far in what is timed as a part of its own.
    """
    micro_steps = [time_micro_step(trainer, parts) for _ in range(_STEPS * trainer.grad_accum)]

    def mean(kind: list[dict[str, float]]) -> dict[str, float]:
        return {phase: sum(each[phase] for each in kind) / _STEPS for phase in kind[0]}

    return PhaseTimes(mean([each.seconds for each in micro_steps]), mean([each.own_seconds for each in micro_steps]))


def time_micro_step(trainer: training_loop.Trainer, parts: Callable[[], float] = lambda: 0.0) -> PhaseTimes:
    """Trains on one micro-batch. Returns the seconds of its phases, with the device synchronised between them."""
    trainer.heartbeat.beat("inspect")
    engine, batch = trainer.engine, next(trainer.batches)
    marks = list[tuple[float, float]]()

    def mark() -> None:
        training_loop.synchronize(trainer.accelerator)
        marks.append((time.perf_counter(), parts()))

    mark()
    loss = trainer.compute_loss(batch)
    mark()
    engine.backward(loss)
    mark()
    engine.step()
    mark()
    seconds, own_seconds = dict[str, float](), dict[str, float]()
    for phase, before, after in zip(("forward", "backward", "step"), marks, marks[1:], strict=False):
        seconds[phase] = after[0] - before[0]
        own_seconds[phase] = seconds[phase] - (after[1] - before[1])
    return PhaseTimes(seconds, own_seconds)
