"""Runs one trial, for both launchers: assign, start, monitor, end, and determine the outcome."""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..config.deepspeed_config import with_swap_folder
from ..config.spec import LauncherName, Trial
from ..records.rank_files import Assignment
from ..records.schema import TrialRecord
from ..system import host_memory, processes
from ..system.files import disk_is_full
from ..system.signals import raising_on_interrupt
from .monitor import Ending, Limits, Progress, ProgressCallback, watch
from .outcome import Evidence, determine_outcome
from .scratch import (
    checkpoint_folder,
    new_scratch_id,
    note_owned,
    remove_scratch,
    rendezvous_file,
    shared_memory,
    swap_folder,
)
from .step_monitor import StepMonitor


@dataclass(frozen=True, slots=True)
class Leader:
    """The process that leads the session of a started trial."""

    pid: int
    wait: Callable[[float], bool]
    """Waits at most the seconds given. Returns whether the process has ended."""


Start = Callable[[Trial, Path], Leader]


def run_trial(
    trial: Trial,
    folder: Path,
    listen: ProgressCallback,
    *,
    limits: Limits,
    environment: Mapping[str, str],
    start: Start,
    launch: LauncherName,
    rendezvous_by_file: bool = True,
    server_is_alive: Callable[[], bool] = lambda: True,
) -> TrialRecord:
    """Runs one trial through ``start`` and records how it ended.

    ``server_is_alive``: whether the process that the ranks are forked from, and die with, still runs. A
    KeyboardInterrupt becomes a record with status Interrupted; any other exception is raised again. In both cases the
    process tree is ended first.
    """
    processes.adopt_orphans()
    assignment = _create_assignment(trial, folder, environment, rendezvous_by_file, limits)
    assignment.save(folder, with_swap_folder(trial.ds_config, assignment.swap_folder or ""))
    started_at, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    oom_kills_before = _read_oom_kill_count()
    earlier = processes.descendants()
    ending: Ending | None = None
    start_seconds: float | None = None
    interruption: BaseException | None = None
    leader = None
    monitor = StepMonitor(trial, folder) if trial.inspection.monitor is not None else None

    def observe(progress: Progress) -> None:
        if monitor is not None:
            monitor.update()
        listen(progress)

    try:
        leader = start(trial, folder)
        with raising_on_interrupt():
            ending, start_seconds = watch(folder, trial.placement.num_gpus, limits, leader.wait, observe)
    except BaseException as error:  # the tree must end first
        interruption = error
    grace_seconds = min(limits.kill_grace_seconds, 2.0 if interruption is not None else limits.kill_grace_seconds)
    left = processes.end_tree(leader.pid if leader else None, earlier=earlier, grace_seconds=grace_seconds)
    if leader is not None:
        leader.wait(1.0)
    if monitor is not None:
        monitor.close()
    disk_full = disk_is_full(assignment.swap_folder)
    remove_scratch(assignment)
    if interruption is not None and not isinstance(interruption, KeyboardInterrupt):
        raise interruption
    result = determine_outcome(
        Evidence(
            folder=folder,
            world_size=trial.placement.num_gpus,
            ending=ending,
            limits=limits,
            host_ran_out=_read_oom_kill_count() > oom_kills_before,
            disk_full=disk_full,
            server_died=not server_is_alive(),
        )
    )
    caveats = (*trial.caveats, *result.caveats)
    if monitor is not None and monitor.problem is not None:
        caveats += (monitor.problem,)
    if left:
        caveats += (f"processes {sorted(left)} could not be ended",)
    return TrialRecord(
        trial=trial,
        outcome=result.outcome,
        ranks=result.measurements,
        failures=result.failures,
        launch=launch,
        started_at=started_at,
        wall_seconds=time.monotonic() - clock,
        start_seconds=start_seconds,
        caveats=caveats,
    )


_COLLECTIVE_MARGIN_SECONDS = 120.0
"""Added to the limits of a trial: time for the parent to notice that one is exceeded and to request stacks."""
_MAX_COLLECTIVE_SECONDS = 30 * 24 * 3600.0


def _create_assignment(
    trial: Trial, folder: Path, environment: Mapping[str, str], rendezvous_by_file: bool, limits: Limits
) -> Assignment:
    scratch_id = new_scratch_id()
    rendezvous = rendezvous_file(scratch_id)
    note_owned(glob.escape(str(rendezvous)), shared_memory(scratch_id))
    if (
        rendezvous_by_file
    ):  # it exists for as long as the trial runs: a rank started by hand afterwards finds it missing
        rendezvous.touch(mode=0o600, exist_ok=False)
    swap, checkpoint = swap_folder(trial, scratch_id), checkpoint_folder(trial, folder, scratch_id)
    for private in filter(None, (swap, checkpoint)):
        Path(private).mkdir(parents=True)
    return Assignment(
        trial=trial,
        rendezvous=f"file://{rendezvous}" if rendezvous_by_file else None,
        scratch_id=scratch_id,
        environment={**environment, **trial.configuration.variables},
        swap_folder=swap,
        checkpoint_folder=checkpoint,
        collective_timeout_seconds=min(
            max(limits.timeout_seconds, limits.stall_timeout_seconds) + _COLLECTIVE_MARGIN_SECONDS,
            _MAX_COLLECTIVE_SECONDS,
        ),
        working_folder=str(Path.cwd()),
    )


def _read_oom_kill_count() -> int:
    """How many processes the kernel has killed for memory so far, in this cgroup and on this host."""
    return (host_memory.cgroup_oom_kill_count() or 0) + (host_memory.host_oom_kill_count() or 0)
