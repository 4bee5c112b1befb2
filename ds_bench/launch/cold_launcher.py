"""Cold launch: every trial through the ``deepspeed`` launcher.

Ranks start as they do for a user and import everything again in each trial. On one host they meet through a file. On
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
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config.spec import Placement, Trial
from ..records.schema import TrialRecord
from ..system.processes import child_environment
from .host_agent import free_port
from .host_connections import Hosts
from .leader import start_leader
from .rank_environment import thread_variables
from .remote_trial import RemoteTrial
from .trial import Leader, run_trial
from .trial_watcher import Limits, ProgressCallback

_WORKER = "ds_bench.worker"


class DeepSpeedLauncher:
    """Runs ``deepspeed … --module ds_bench.worker FOLDER`` as the child of a leader of ours.

    ``hosts``: on several hosts, whose agents start the ranks.
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
        return {**self._environment, **thread_variables(trial.placement, os.environ)}

    def _start(self, trial: Trial, folder: Path, remote: RemoteTrial | None) -> Leader:
        if remote is None:
            command = launch_command(trial.placement, folder.resolve(), self._devices)
            process = start_leader(folder, command, child_environment(self._variables(trial)), folder)

            def wait_for_process(seconds: float) -> bool:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
                return process.poll() is not None

            return Leader(process.pid, wait_for_process)
        remote.start_ranks(lambda number: node_command(trial.placement, number, remote.master))

        def wait_for_ranks(seconds: float) -> bool:
            if not remote.ranks_ended:
                time.sleep(seconds)
            return remote.ranks_ended

        return Leader(None, wait_for_ranks)


def launch_command(placement: Placement, folder: Path, devices: Sequence[int] | None = None) -> list[str]:
    """The launcher's command line for one trial. ``devices``: indices of the GPUs to use on one node."""
    if placement.hosts:
        # Shown by --dry-run, with DeepSpeed's default port (constants.py, TORCH_DISTRIBUTED_DEFAULT_PORT).
        master = placement.master_addr or placement.hosts[0][0], placement.master_port or 29500
        return [*node_command(placement, 0, master), str(folder)]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", "--master_port", str(free_port())]
    # An empty hostfile, since the launcher's default path may have one.
    command += ["--hostfile", os.devnull, "--master_addr", "127.0.0.1"]
    # With --num_gpus the launcher ignores CUDA_VISIBLE_DEVICES and takes the first GPUs (launcher/runner.py).
    included = "localhost:" + ",".join(map(str, devices[: placement.num_gpus])) if devices else None
    command += ["--include", included] if included else ["--num_gpus", str(placement.num_gpus)]
    return [*command, "--module", _WORKER, str(folder)]


def node_command(placement: Placement, number: int, master: tuple[str, int]) -> list[str]:
    """The command that starts the ranks of one host, as DeepSpeed's runner starts it there."""
    slots = {name: placement.slots_of(name) for name, _ in placement.hosts}
    address, port = master
    return [
        *[sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--node_rank={number}"],
        f"--world_info={base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()}",
        *[f"--master_addr={address}", f"--master_port={port}", "--no_local_rank", "--module", _WORKER],
    ]
