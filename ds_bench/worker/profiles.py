"""Profiles of further steps after the measured window: which profiler observes them, and what is kept of it.

Every rank takes the same steps, whether it is observed or not, so that collectives meet and all rows train alike. A
profiler that fails leaves a caveat; where a step of training fails, the rank does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config.spec import ProfileName, Trial
from ..records.schema import Profile
from . import comms_profile, flops_profile, memory_profile, nsys_window, torch_profile
from .profiled_steps import Findings, ProfiledSteps
from .training_loop import Trainer

MOST_FILE_BYTES = 2**29
"""A file of a profile that is larger is removed."""
_MOST_LINE_LENGTH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiler:
    """How one profiler observes steps."""

    observe: Callable[[ProfiledSteps], Findings]
    """Called on the ranks that write a profile. It takes its steps with ``ProfiledSteps.step``; those that it leaves
    are taken for it."""
    further_steps: int = 0
    """Steps that it takes besides those of ``--profile-steps``."""
    on_every_rank: bool = False
    """Whether it is called on all ranks, as one that communicates must be."""


PROFILERS: Mapping[ProfileName, Profiler] = {
    "torch": Profiler(observe=torch_profile.observe, further_steps=1),
    "memory": Profiler(observe=memory_profile.observe),
    "nsys": Profiler(observe=nsys_window.observe),
    "flops": Profiler(observe=flops_profile.observe),
    "comms": Profiler(observe=comms_profile.observe, on_every_rank=True),
}


def take_profiles(trainer: Trainer, trial: Trial, folder: Path, notes: Sequence[str]) -> dict[str, Any]:
    """Runs the profilers that the trial asks for, one after the other.

    Returns fields of a RankMeasurement: ``profiles``, ``notes`` with those of the profilers, and what these measured.
    ``folder``: of the trial.
    """
    measured: dict[str, Any] = {}
    profiles, all_notes = [], list(notes)
    for name in trial.inspection.profiles:
        trainer.heartbeat.beat("inspect")
        profiler = PROFILERS[name]
        count = trial.inspection.profile_steps + profiler.further_steps
        steps = ProfiledSteps(name, trainer, trial, folder, count)
        findings = Findings()
        if profiler.on_every_rank or steps.rank in trial.inspection.profile_ranks:
            findings = _observe(profiler, steps, all_notes)
        # Steps that no profiler took on this rank: the other ranks wait for it in their collectives.
        while steps.left > 0:
            steps.step()
        steps.synchronize()
        all_notes += _remove_large_files(steps)
        measured |= findings.measured
        if steps.files or findings.lines:
            run_folder = folder.parents[1]
            profile = Profile(
                name=name,
                files=tuple(path.relative_to(run_folder).as_posix() for path in steps.files),
                lines=tuple(line[:_MOST_LINE_LENGTH] for line in findings.lines),
            )
            profiles.append(asdict(profile))
    return {**measured, "profiles": profiles, "notes": list(dict.fromkeys(all_notes))}


def _observe(profiler: Profiler, steps: ProfiledSteps, notes: list[str]) -> Findings:
    """What a profiler found; nothing and a further note if it fails. Raises whatever training raises."""
    try:
        findings = profiler.observe(steps)
    except Exception as error:
        if steps.is_training:  # the other ranks cannot go on without this one
            raise
        for path in steps.files:
            path.unlink(missing_ok=True)
        steps.files.clear()
        reason = " ".join(str(error).split())[:_MOST_LINE_LENGTH]
        notes.append(f"the profile {steps.name} failed on rank {steps.rank}: {type(error).__name__}: {reason}")
        return Findings()
    notes += findings.notes
    return findings


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
