"""The profile ``flops``: DeepSpeed's flops profiler on the forward pass of one micro-batch."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import deepspeed.profiling.flops_profiler.profiler as flops_profiler
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap

from . import training_loop
from .profiled_steps import Findings, ProfiledSteps


def observe(steps: ProfiledSteps) -> Findings:
    """Takes one step, its first forward pass under the profiler, and writes the profiler's table of modules."""
    trainer = steps.trainer
    if trainer.is_compiled:
        return Findings(notes=("FLOPs were not counted: DeepSpeed's profiler does not see into a compiled model",))
    profiler = flops_profiler.FlopsProfiler(trainer.engine.module)
    steps.is_training = True
    with _linear_layers_counted_once():
        profiler.start_profile()
    loss = trainer.compute_loss(next(trainer.batches))
    profiler.stop_profile()  # before modules are called again, where activations are recomputed in the backward pass
    trainer.engine.backward(loss)
    trainer.engine.step()
    for _ in range(trainer.grad_accum - 1):
        training_loop.time_micro_step(trainer)
    steps.is_training = False
    steps.left -= 1
    flops, seconds = profiler.get_total_flops(), profiler.get_total_duration()
    profiler.print_model_profile(output_file=str(steps.file("txt")))
    profiler.end_profile()
    line = (
        f"forward pass of one micro-batch: {flops / 1e9:,.3f} GFLOPs in {seconds * 1000:,.1f} ms with the profiler on"
    )
    return Findings(measured={"profiled_forward_flops": float(flops)}, lines=(line,))


def _linear_layers_counted_once() -> contextlib.AbstractContextManager[Any]:
    """For the time in which the profiler replaces functions: at stage 3 DeepSpeed's own ``linear`` calls ``matmul``
    (runtime/zero/linear.py), and DeepSpeed 0.19.8 counts both."""
    if torch.nn.functional.linear is not zero3_linear_wrap:
        return contextlib.nullcontext()

    def count_nothing(*_arguments: Any, **_keywords: Any) -> tuple[int, int]:
        return 0, 0

    return mock.patch.object(flops_profiler, "_linear_flops_compute", count_nothing)
