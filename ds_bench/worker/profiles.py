"""Profiles of further steps after the measured window: which profiler observes them, and what is kept of it.

Every rank takes the same steps, whether it is observed or not, so that collectives meet and all rows train alike. A
profiler that fails leaves a caveat; where a step of training fails, the rank does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..config.caveats import Caveat
from ..config.spec import ProfileName, Trial
from ..records.schema import Profile
from . import torch_profile, training_loop
from .torch_profile import ProfiledSteps

MOST_FILE_BYTES = 2**29
"""Files of a profile that are larger are removed."""
_MOST_LINE_LENGTH = 200


def observe_nsys(steps: ProfiledSteps) -> Sequence[str]:
    """Open and close a window of steps by CUDA's profiler API, for a run under Nsight Systems.

    ``nsys profile --capture-range=cudaProfilerApi`` records what lies between the calls. Without nsys they do nothing;
    on the CPU accelerator they are left out.
    """
    return take_window(steps, torch.cuda.profiler) if steps.on_cuda else ()


def take_window(steps: ProfiledSteps, api: Any) -> Sequence[str]:
    """Take the steps, with ``api.start()`` and ``api.stop()`` (as of ``torch.cuda.profiler``) around the window."""
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
    return (f"the window for nsys held steps {window.start} to {window.stop - 1}",)


Observe = Callable[[ProfiledSteps], Sequence[str]]
"""Takes the steps under a profiler, on a rank that writes a profile. Returns lines for the report."""
PROFILERS: Mapping[ProfileName, tuple[Observe, int]] = {
    "torch": (torch_profile.observe_time, 1),
    "memory": (torch_profile.observe_memory, 0),
    "nsys": (observe_nsys, 0),
}
"""Profiler → how it observes, and its steps in addition to ``--profile-steps``."""


def take_profiles(
    trainer: training_loop.Trainer, trial: Trial, folder: Path, notes: Sequence[str | Caveat]
) -> dict[str, Any]:
    """Run the profilers that the trial asks for, one after the other.

    Return the fields ``profiles`` and ``notes`` of a RankMeasurement. ``folder``: of the trial.
    """
    profiles, all_notes = [], list(notes)
    for name in trial.inspection.profiles:
        trainer.heartbeat.beat("inspect")
        observe, further_steps = PROFILERS[name]
        steps = ProfiledSteps(name, trainer, trial, folder, trial.inspection.profile_steps + further_steps)
        lines: Sequence[str] = ()
        if steps.rank in trial.inspection.profile_ranks:
            try:
                lines = observe(steps)
            except Exception as error:
                if steps.is_training:  # the other ranks cannot go on without this one
                    raise
                for path in steps.files:
                    path.unlink(missing_ok=True)
                steps.files.clear()
                reason = " ".join(str(error).split())[:_MOST_LINE_LENGTH]
                all_notes.append(f"the profile {name} failed on rank {steps.rank}: {type(error).__name__}: {reason}")
        # Steps that no profiler took on this rank: the other ranks wait for it in their collectives.
        while steps.left > 0:
            steps.step()
        steps.synchronize()
        all_notes += _remove_large_files(steps)
        if steps.files or lines:
            files = tuple(path.relative_to(folder.parents[1]).as_posix() for path in steps.files)
            kept = tuple(line[:_MOST_LINE_LENGTH] for line in lines)
            profiles.append(asdict(Profile(name=name, files=files, lines=kept)))
    return {"profiles": profiles, "notes": list(dict.fromkeys(all_notes))}


def _remove_large_files(steps: ProfiledSteps) -> list[str]:
    """Removes files of more than ``MOST_FILE_BYTES``, and leaves out those that were not written. Returns notes."""
    notes = []
    for path in [*steps.files]:
        size = path.stat().st_size if path.exists() else 0
        if 0 < size <= MOST_FILE_BYTES:
            continue
        steps.files.remove(path)
        path.unlink(missing_ok=True)
        if size:
            limit = f"{MOST_FILE_BYTES / 2**20:.0f} MB"
            notes.append(
                f"the profile {steps.name} was removed: {path.name} had more than {limit}; fewer --profile-steps"
            )
    return notes
