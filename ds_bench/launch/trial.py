"""Cold launch, and what both launchers share: assigning, starting, watching and ending a trial, and its outcome.

Cold launch starts ranks through the ``deepspeed`` launcher, as a user would; it starts a script's ranks directly.
They import everything again in each trial. On one host they meet through a file, or at a port if they run a script. On
several hosts the agents start them, and they meet at MASTER_ADDR; each agent sends its host's files here.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..config.spec import LauncherName, Placement, Trial
from ..records.rank_files import Assignment
from ..records.schema import TrialRecord
from ..system import processes
from ..system.files import disk_is_full
from ..system.host_resources import read_oom_kill_count
from . import script_ranks
from .host_agent import free_port
from .host_connections import HostError, Hosts
from .leader import start_leader
from .outcome import Evidence, determine_outcome
from .rank_environment import thread_variables
from .remote_trial import RemoteEnd, RemoteTrial
from .scratch import (
    checkpoint_folder,
    create_scratch,
    new_scratch_id,
    remove_scratch,
    rendezvous_file,
    swap_folder,
)
from .step_monitor import StepMonitor
from .trial_watcher import Ending, Limits, Progress, ProgressCallback, watch

_COLLECTIVE_MARGIN_SECONDS = 120.0
"""Added to a trial's limits, so that the parent can notice that one is exceeded and request stacks."""
_MAX_COLLECTIVE_SECONDS = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Leader:
    """The process that leads the session of a started trial."""

    pid: int | None
    """None if agents on several hosts start the ranks."""
    wait: Callable[[float], bool]
    """Waits at most the given seconds and returns whether the process has ended."""


Start = Callable[[Trial, Path, RemoteTrial | None], Leader]
"""Starts a trial with its files in a folder, on several hosts if a RemoteTrial is given. May raise HostError."""


def run_trial(
    trial: Trial,
    folder: Path,
    listen: ProgressCallback,
    *,
    limits: Limits,
    environment: Mapping[str, str],
    start: Start,
    launch: LauncherName,
    hosts: Hosts | None = None,
    server_is_alive: Callable[[], bool] = lambda: True,
) -> TrialRecord:
    """Run one trial through ``start`` and record how it ended.

    ``hosts``: several hosts for the ranks; without them ranks meet through a file, or at a port if they run a script.
    ``server_is_alive``: whether the process that forks the ranks still runs; they die with it. A KeyboardInterrupt or
    HostError becomes a record; any other exception is raised again once the processes have been ended.
    """
    # Ranks outlive a killed launcher (DeepSpeed's launcher/launch.py). As adopted orphans they stay descendants of this
    # process, and are found when the trial is ended.
    processes.adopt_orphans()
    assignment = _make_assignment(trial, folder, environment, limits, on_this_host=hosts is None)
    remote = RemoteTrial(hosts, folder, assignment) if hosts is not None else None
    started_at, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    oom_kills_before = read_oom_kill_count()
    # The preloaded server and the connections to hosts, which serve later trials and must not end with this one.
    earlier = processes.descendants()
    ending: Ending | None = None
    start_seconds: float | None = None
    interruption: BaseException | None = None
    host_error: HostError | None = None
    leader = None
    monitor: StepMonitor | None = None

    def observe(progress: Progress) -> None:
        if monitor is not None:
            monitor.update()
        listen(progress)

    try:
        # Before any rank starts, because ranks read the trial's files immediately.
        if remote is None:
            create_scratch(assignment)
        assignment.save(folder, trial.ds_config)
        try:
            with processes.raising_on_interrupt():
                if remote is not None:
                    remote.begin(limits.stall_timeout_seconds)
        finally:
            earlier |= processes.descendants()  # new connections serve later trials too
        if trial.inspection.monitor is not None:
            monitor = StepMonitor(trial, folder)
        leader = start(trial, folder, remote)
        with processes.raising_on_interrupt():
            ending, start_seconds = watch(folder, trial.placement.num_gpus, limits, leader.wait, observe, remote)
    except HostError as error:
        ending, host_error = "host_lost", error
    except BaseException as error:  # the tree must end first
        interruption = error
    # The user, or Slurm before a time limit, waits for the end of an interrupted run.
    grace_seconds = limits.kill_grace_seconds if interruption is None else min(limits.kill_grace_seconds, 2.0)
    # This host first, because a launcher still running here could start ranks on a host that has ended its own.
    left = processes.end_tree(leader.pid if leader is not None else None, earlier=earlier, grace_seconds=grace_seconds)
    if leader is not None:
        # Lets Popen or multiprocessing note that it has ended.
        leader.wait(1.0)
    ended = remote.end(grace_seconds, limits.stall_timeout_seconds) if remote is not None else RemoteEnd()
    if monitor is not None:
        # Not before the ranks have ended: this reads their last steps and removes their files.
        monitor.close()
    # Before the swap files are removed, which makes room again.
    disk_full = disk_is_full(assignment.swap_folder)
    remove_scratch(assignment)
    # Only here, so that an error in the run leaves neither processes nor files behind.
    if interruption is not None and not isinstance(interruption, KeyboardInterrupt):
        raise interruption
    work = trial.workload
    result = determine_outcome(
        Evidence(
            folder=folder,
            world_size=trial.placement.num_gpus,
            ending=ending,
            limits=limits,
            host_ran_out=read_oom_kill_count() > oom_kills_before or ended.oom_killed,
            disk_full=disk_full or ended.disk_full,
            script_steps=None if work.script is None else work.warmup_steps + work.num_steps,
            host_error=host_error or ended.lost,
            server_died=not server_is_alive(),
        )
    )
    caveats = (*trial.caveats, *result.caveats, *ended.caveats)
    if left:
        caveats += (f"processes {sorted(left)} could not be killed",)
    if monitor is not None and monitor.problem is not None:
        caveats += (monitor.problem,)
    return TrialRecord(
        trial=trial,
        outcome=result.outcome,
        ranks=result.measurements,
        failures=result.failures,
        launch="script" if trial.workload.script is not None else launch,
        started_at=started_at,
        wall_seconds=time.monotonic() - clock,
        start_seconds=start_seconds,
        caveats=caveats,
    )


def _make_assignment(
    trial: Trial, folder: Path, environment: Mapping[str, str], limits: Limits, *, on_this_host: bool
) -> Assignment:
    """Make the ranks' assignment. On several hosts, each adds its own swap folder, and there is no rendezvous file."""
    # A script's ranks meet at a port, as under torchrun. Its number names their shared memory (scratch.remove_scratch).
    meets_at_port = on_this_host and trial.workload.script is not None
    scratch_id = str(free_port()) if meets_at_port else new_scratch_id()
    return Assignment(
        trial=trial,
        rendezvous=f"file://{rendezvous_file(scratch_id)}" if on_this_host and not meets_at_port else None,
        scratch_id=scratch_id,
        # The row's variables win, because they are what is compared.
        environment={**environment, **trial.configuration.variables},
        swap_folder=swap_folder(trial, scratch_id) if on_this_host else None,
        checkpoint_folder=checkpoint_folder(trial, folder, scratch_id),
        # Longer than the trial may take, so that a hung one is ended here, with stacks, before a collective raises.
        collective_timeout_seconds=min(
            max(limits.timeout_seconds, limits.stall_timeout_seconds) + _COLLECTIVE_MARGIN_SECONDS,
            _MAX_COLLECTIVE_SECONDS,
        ),
        working_folder=str(Path.cwd()),
    )


# ------------------------------------------------------------------ cold launch

_WORKER = "ds_bench.worker"


class DeepSpeedLauncher:
    """Runs ``deepspeed … --module ds_bench.worker FOLDER``, or a script's ranks, as the child of a leader process
    (``leader``).

    ``hosts``: those of a multi-host run, whose agents start the ranks.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        limits: Limits,
        *,
        device_indices: Sequence[int] | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._environment = dict(environment)
        self._limits = limits
        self._devices = device_indices
        self._hosts = hosts

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:
        """See ``Launcher``."""
        return run_trial(
            trial,
            folder,
            listen,
            limits=self._limits,
            environment={name: value for name, value in self._variables(trial).items() if name != "PYTHONPATH"},
            start=self._start,
            launch="deepspeed",
            hosts=self._hosts,
        )

    def _variables(self, trial: Trial) -> dict[str, str]:
        # Per trial: the points of a sweep may differ in ranks per host, and so in threads per rank.
        variables = {**self._environment, **thread_variables(trial.placement, os.environ)}
        if trial.workload.script is not None and self._devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._devices[: trial.placement.num_gpus]))
        return variables

    def _start(self, trial: Trial, folder: Path, remote: RemoteTrial | None) -> Leader:
        is_script = trial.workload.script is not None
        if remote is None:
            at = folder.resolve()
            own = [*script_ranks.command(0), str(at)]
            command = own if is_script else launch_command(trial.placement, at, self._devices)
            process = start_leader(folder, command, processes.child_environment(self._variables(trial)), folder)

            def wait_for_process(seconds: float) -> bool:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
                return process.poll() is not None

            return Leader(process.pid, wait_for_process)

        def command_of(number: int) -> list[str]:
            return script_ranks.command(number) if is_script else node_command(trial.placement, number, remote.master)

        remote.start_ranks(command_of)

        def wait_for_ranks(seconds: float) -> bool:
            if not remote.ranks_ended:
                time.sleep(seconds)
            return remote.ranks_ended

        return Leader(None, wait_for_ranks)


def launch_command(placement: Placement, folder: Path, devices: Sequence[int] | None = None) -> list[str]:
    """Return the launcher's command line for one trial. ``devices``: indices of the GPUs to use on one node."""
    if placement.hosts:
        # Shown by --dry-run, with DeepSpeed's default port (constants.py, TORCH_DISTRIBUTED_DEFAULT_PORT).
        master = placement.master_addr or placement.hosts[0][0], placement.master_port or 29500
        return [*node_command(placement, 0, master), str(folder)]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", "--master_port", str(free_port())]
    # An empty hostfile, because there may be one at the launcher's default path.
    command += ["--hostfile", os.devnull, "--master_addr", "127.0.0.1"]
    # With --num_gpus the launcher ignores CUDA_VISIBLE_DEVICES and uses the first GPUs (launcher/runner.py).
    included = "localhost:" + ",".join(map(str, devices[: placement.num_gpus])) if devices else None
    command += ["--include", included] if included else ["--num_gpus", str(placement.num_gpus)]
    return [*command, "--module", _WORKER, str(folder)]


def node_command(placement: Placement, number: int, master: tuple[str, int]) -> list[str]:
    """Return the command that DeepSpeed's runner uses to start the ranks of one host."""
    slots = {name: placement.slots_of(name) for name, _ in placement.hosts}
    address, port = master
    return [
        *[sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--node_rank={number}"],
        f"--world_info={base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()}",
        *[f"--master_addr={address}", f"--master_port={port}", "--no_local_rank", "--module", _WORKER],
    ]
