"""The profile ``nsys``: opens and closes a window of steps by CUDA's profiler API, for a run under Nsight Systems.

``nsys profile --capture-range=cudaProfilerApi`` records what lies between the calls. Without nsys they do nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from .profiled_steps import Findings, ProfiledSteps


def observe(steps: ProfiledSteps) -> Findings:
    """Takes the steps, those of the window between both calls; on the CPU accelerator without the calls."""
    return take_window(steps, torch.cuda.profiler) if steps.on_cuda else Findings()


def take_window(steps: ProfiledSteps, api: Any) -> Findings:
    """Takes the steps, those of the window between ``api.start()`` and ``api.stop()``, as ``torch.cuda.profiler``'s."""
    workload, inspection = steps.trial.workload, steps.trial.inspection
    steps_before = workload.warmup_steps + workload.num_steps
    window = inspection.nsys_window(steps_before)
    for number in inspection.profiled_steps(steps_before):
        # Synchronised at both ends: kernels run later than they are launched, and would cross the window's bounds.
        if number == window.start:
            steps.synchronize()
            api.start()
        steps.step()
        if number == window.stop - 1:
            steps.synchronize()
            api.stop()
    return Findings(lines=(f"the window for nsys held steps {window.start} to {window.stop - 1}",))
