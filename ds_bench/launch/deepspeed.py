"""Cold launch: every trial through the ``deepspeed`` launcher, on one node or many.

Ranks start as they do for a user and import everything again in each trial. On one node they meet through a file;
across nodes through the launcher's MASTER_ADDR, with the run folder on storage that every node sees.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config.spec import Placement, Trial
from ..records.rank_files import LEADER_LOG
from ..records.schema import TrialRecord
from ..system.processes import child_environment, die_with_parent
from .monitor import Limits, ProgressCallback
from .rank_environment import thread_variables
from .trial import Leader, run_trial


class DeepSpeedLauncher:
    """Runs ``deepspeed … --module ds_bench.worker FOLDER`` as the child of a leader of ours."""

    def __init__(
        self, environment: Mapping[str, str], limits: Limits, *, device_indices: Sequence[int] | None = None
    ) -> None:
        self._environment = dict(environment)
        self._limits = limits
        self._devices = device_indices

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
            rendezvous_by_file=trial.placement.hostfile is None,
        )

    def _variables(self, trial: Trial) -> dict[str, str]:
        """Of this trial: points of a sweep may have other numbers of ranks, and so of threads."""
        return {**self._environment, **thread_variables(trial.placement, os.environ)}

    def _start(self, trial: Trial, folder: Path) -> Leader:
        command = launch_command(trial.placement, folder.resolve(), self._devices)
        with (folder / LEADER_LOG).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ds_bench.launch.leader", str(folder), json.dumps(command)],
                env=child_environment(self._variables(trial)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

        def wait(seconds: float) -> bool:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            return process.poll() is not None

        return Leader(process.pid, wait)


def launch_command(placement: Placement, folder: Path, devices: Sequence[int] | None = None) -> list[str]:
    """The launcher's command line for one trial. ``devices``: indices of the GPUs to use."""
    port = placement.master_port or _free_port()
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", "--master_port", str(port)]
    if placement.hostfile is not None:
        command += ["--hostfile", placement.hostfile, "--launcher", placement.multi_node_launcher]
        command += ["--include", placement.include] if placement.include else []
        command += ["--master_addr", placement.master_addr] if placement.master_addr else []
        # With "=", since the arguments begin with a dash.
        command += [f"--launcher_args={shlex.join(placement.launcher_args)}"] if placement.launcher_args else []
    else:  # an empty hostfile, since there may be one at the launcher's default path
        command += ["--hostfile", os.devnull, "--master_addr", "127.0.0.1"]
        # With --num_gpus the launcher ignores CUDA_VISIBLE_DEVICES and takes the first GPUs (launcher/runner.py).
        included = "localhost:" + ",".join(map(str, devices[: placement.num_gpus])) if devices else None
        command += ["--include", included] if included else ["--num_gpus", str(placement.num_gpus)]
    return [*command, "--module", "ds_bench.worker", str(folder)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
