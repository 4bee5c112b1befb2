"""The training loop: warm-up, the measured window, and further steps that time the parts of a step.

A step is one optimizer step: ``grad_accum`` micro-batches forward and backward, then the update.
Nothing is synchronized inside the window that plain DeepSpeed training would not synchronize.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import cycle
from typing import Any

import torch
import torch.distributed

from ..records.rank_files import HeartbeatWriter
from ..records.schema import OffloadTimes
from .library_versions import loss_scale
from .operation_timers import CommunicationTimer, OffloadTimer
from .step_clock import StepClock, StepRecorder

Batch = dict[str, torch.Tensor]
_MAX_EXTRA_WARMUP = 64
"""Maximum number of extra warm-up steps to let fp16's loss scale settle."""
_MAX_COMPILING_STEPS = 16
"""Maximum number of extra warm-up steps to let a compiled model settle."""
DEEPCOMPILE_WARMUP = 8
"""Minimum number of warm-up steps for DeepCompile: it compiles again at step 5 (compile/init_z3.py, WARMUP)."""


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output: ``.loss``, the first item of a tuple, or the tensor itself."""
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the model returned {type(output).__name__} without a loss")
    return loss


def synchronize(accelerator: str) -> None:
    if accelerator == "cuda":
        torch.cuda.synchronize()


class Trainer:
    """Trains a model through an engine, DeepSpeed's or a reference, step by step, with a heartbeat at each phase."""

    def __init__(
        self,
        engine: Any,
        batches: list[Batch],
        accelerator: str,
        heartbeat: HeartbeatWriter,
        *,
        loaded: Iterator[Batch] | None = None,
        loss_share: float = 1.0,
        loss_parts: int = 1,
        synchronized: bool = True,
    ) -> None:
        """``loaded``: the micro-batches to train on; None: ``batches``, again and again.

        ``loss_share``: weight of this rank's mean loss in the loss of its sequences, which ``loss_parts`` ranks share.
        ``synchronized``: see ``StepClock``.
        """
        self.engine = engine
        self.accelerator = accelerator
        self.grad_accum = int(engine.gradient_accumulation_steps())
        self.first_batch = batches[0]
        self.first_device = next(iter(batches[0].values())).device
        self.batches: Iterator[Batch] = loaded or cycle(batches)
        self.heartbeat = heartbeat
        self.recorder: StepRecorder | None = None
        """Reports each step while the trial runs; None if not requested."""
        self.synchronized = synchronized
        self._loss_share, self._loss_parts = loss_share, loss_parts
        self._losses: list[list[torch.Tensor]] = []
        self._grad_norms: list[Any] = []
        self._steps_done = 0

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        """Run the forward pass and return the loss.

        If each rank has a part of every sequence, the mean over ranks is the loss of the whole sequences. The gradients
        are those of the rank's share of that loss: DeepSpeed adds up the gradients of a sequence's ranks.
        """
        loss = loss_of(self.engine(**batch))
        if self._loss_parts == 1:
            return loss
        own = loss * self._loss_share
        # The second term has a value but no gradient.
        return own + (self._loss_parts - 1) * own.detach()

    def step(self) -> None:
        """One optimizer step: every micro-batch forward and backward, then the update."""
        losses = []
        for _ in range(self.grad_accum):
            self.heartbeat.beat("forward", self._steps_done)
            loss = self.compute_loss(next(self.batches))
            self.heartbeat.beat("backward")
            self.engine.backward(loss)
            self.heartbeat.beat("step")
            self.engine.step()
            # Not read here: item() would wait for the device.
            losses.append(loss.detach())
            del loss  # its graph holds the activations if no backward pass has freed them
        self._losses.append(losses)
        self._grad_norms.append(reported_grad_norm(self.engine))
        self._steps_done += 1

    @property
    def skipped(self) -> int:
        """Steps the optimizer has skipped so far, because of overflow or NaN gradients."""
        return int(getattr(self.engine, "skipped_steps", 0))

    @property
    def data_wait_seconds(self) -> float | None:
        """Time spent waiting for a data loader so far; None without one."""
        return getattr(self.batches, "wait_seconds", None)

    @property
    def is_compiled(self) -> bool:
        """Whether torch compiles the model."""
        return bool(getattr(self.engine, "is_compiled", False))

    def losses(self) -> list[float | None]:
        """Mean over the micro-batches of each step so far; None where not finite."""
        return finite_values(torch.stack([loss.float() for loss in step]).mean() for step in self._losses)

    def grad_norms(self) -> list[float | None]:
        """Return the norm of each step's gradients; None where the engine reports none, or it is not finite."""
        return finite_values(self._grad_norms)

    def time_steps(self, steps: int, measured: bool = False) -> list[float]:
        """Take ``steps`` steps. Return the seconds of each. ``measured``: whether they are the measured window."""
        clock = StepClock(self.accelerator, synchronized=self.synchronized)
        clock.mark()
        before = time.perf_counter()
        for _ in range(steps):
            self.step()
            if self.recorder is not None:
                self.recorder.take_losses(self._losses[-1])
            clock.mark()
            if self.recorder is not None:
                self.recorder.end_step(clock, measured)
            # The host's time: reading the device's would mean waiting for it.
            now = time.perf_counter()
            self.heartbeat.beat("step", self._steps_done, now - before)
            before = now
        return clock.seconds()


def finite_values(values: Iterable[Any]) -> list[float | None]:
    """Return the values as numbers, which waits for the device; None for one that is missing or not finite."""
    return [float(value) if value is not None and math.isfinite(value) else None for value in values]


def reported_grad_norm(engine: Any) -> Any:
    """Return the norm before clipping from the engine's last step, perhaps a tensor that is still being computed."""
    norm, wrapper = engine.get_global_grad_norm(), type(engine.optimizer).__name__
    if norm is None or wrapper not in ("FP16_Optimizer", "FP16_UnfusedOptimizer"):
        return norm
    if engine.autotp_size() > 1:  # only the norm of one rank's parts (runtime/utils.py, get_weight_norm)
        return None
    # Only this wrapper has the norm of the scaled gradients (fp16/unfused_optimizer.py, step).
    return norm / loss_scale(engine.optimizer) if wrapper == "FP16_UnfusedOptimizer" else norm


def warm_up(trainer: Trainer, steps: int, after: Iterable[tuple[int, Callable[[], None]]] = ()) -> list[float]:
    """Take ``steps`` steps. With fp16's dynamic loss scale, continue until the optimizer has taken a step.

    ``after``: pairs of a number of steps and a function to call once that many are done; pairs beyond ``steps`` are
    ignored. Return the seconds of each step.
    """
    seconds = list[float]()
    for done, call in sorted([*after, (steps, lambda: None)], key=lambda pair: pair[0]):
        if done <= steps:
            seconds += trainer.time_steps(done - len(seconds)) if done > len(seconds) else []
            call()
    scales_loss = trainer.engine.fp16_enabled() and trainer.engine.dynamic_loss_scale()
    for _ in range(_MAX_EXTRA_WARMUP if scales_loss else 0):
        if trainer.skipped < len(seconds):
            break
        seconds += trainer.time_steps(1)
    return seconds


def warm_up_compiled(trainer: Trainer, steps_done: int, min_steps: int) -> list[float]:
    """Take further warm-up steps of a compiled model, at least ``min_steps`` in total, until one compiles nothing.

    All ranks take the same number, as they must. Return the seconds of each; none for a model that runs uncompiled.
    """
    seconds = list[float]()
    while trainer.is_compiled and len(seconds) < max(_MAX_COMPILING_STEPS, min_steps - steps_done):
        before = compiled_graphs()
        seconds += trainer.time_steps(1)
        compiled = torch.tensor(compiled_graphs() > before, device=trainer.first_device, dtype=torch.int32)
        # Ranks may compile in different steps; a rank that took an extra step would deadlock.
        torch.distributed.all_reduce(compiled, torch.distributed.ReduceOp.MAX)
        if steps_done + len(seconds) >= min_steps and not compiled.item():
            break
    return seconds


def compiled_graphs() -> int:
    """Number of graphs that torch has compiled in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def measure_window(trainer: Trainer, steps: int, barrier: Callable[[], None]) -> dict[str, Any]:
    """Take the measured steps. Return their fields of a RankMeasurement; losses and norms cover all steps so far.

    The window is synchronized only before its first and after its last step. ``barrier`` makes all ranks start
    together.
    """
    skipped_before = trainer.skipped
    if trainer.recorder is not None:
        # Steps of the warm-up are reported here, not within the window.
        trainer.recorder.report()
    barrier()
    synchronize(trainer.accelerator)
    start, waited_before = time.perf_counter(), trainer.data_wait_seconds
    step_seconds = trainer.time_steps(steps, measured=True)
    if trainer.synchronized:
        synchronize(trainer.accelerator)
    window_seconds = time.perf_counter() - start
    if trainer.recorder is not None:
        trainer.recorder.report()
    waited = trainer.data_wait_seconds
    return {
        "step_seconds": step_seconds,
        "window_seconds": window_seconds,
        "data_wait_seconds": None if waited is None or waited_before is None else (waited - waited_before) / steps,
        "skipped_steps": trainer.skipped - skipped_before,
        # After the window, since they read from the device.
        "losses": trainer.losses(),
        "grad_norms": trainer.grad_norms(),
    }


def repeated_loss(trainer: Trainer) -> float | None:
    """The loss on this rank's first batch, without dropout and without training on it.

    None if it is not finite, and for a compiled engine, which would be compiled again.
    """
    if trainer.is_compiled:
        return None
    trainer.engine.eval()
    try:
        with torch.no_grad():
            loss = float(trainer.compute_loss(trainer.first_batch))
    finally:
        trainer.engine.train()
    return loss if math.isfinite(loss) else None


# Parts of a step's time, from further steps after the measured window that are synchronized between phases. They are
# slower than the measured steps, since nothing overlaps, and never part of the headline numbers.

_STEPS = 2
_PHASES = ("forward", "backward", "step")


def measure_phases(trainer: Trainer) -> dict[str, Any]:
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


def measure_communication(trainer: Trainer) -> dict[str, Any]:
    """Return the fields ``communication`` and ``step_parts`` of a RankMeasurement, from two steps.

    Each collective operation, and on GPUs each copy between host and device, is made synchronous. Every rank must call
    this.
    """
    if trainer.engine.zero_optimization_stage() == 3:  # a pass without backward has left gathered parameters behind
        trainer.step()
    trainer.heartbeat.beat("inspect")
    torch.distributed.barrier()  # else the first operation would wait for a rank still writing a profile
    wait = functools.partial(synchronize, trainer.accelerator)
    offload = OffloadTimer(trainer.engine, wait if trainer.accelerator == "cuda" else None)
    with offload, CommunicationTimer(wait) as communication:
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


def _time_phases(trainer: Trainer, other_seconds: Callable[[], float]) -> tuple[dict[str, float], dict[str, float]]:
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
            synchronize(trainer.accelerator)
            marks.append((time.perf_counter(), other_seconds()))

        mark()
        loss = trainer.compute_loss(batch)
        mark()
        trainer.engine.backward(loss)
        mark()
        trainer.engine.step()
        mark()
        del loss  # its graph holds the activations if no backward pass has freed them
        for phase, before, after in zip(_PHASES, marks, marks[1:], strict=False):
            seconds[phase] += (after[0] - before[0]) / _STEPS
            parts[phase] += (after[0] - before[0] - (after[1] - before[1])) / _STEPS
    waited = trainer.data_wait_seconds
    if waited is not None and waited_before is not None:
        parts["data_wait"] = (waited - waited_before) / _STEPS
    return seconds, parts
