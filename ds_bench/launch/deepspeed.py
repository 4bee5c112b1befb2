"""Cold launch: every trial through the ``deepspeed`` launcher, on one node or many.

Ranks start as they do for a user, with every import paid anew. On one node they meet through a
file; across nodes through the launcher's MASTER_ADDR, with the run directory on storage that
every node sees.
"""

from __future__ import annotations

import contextlib
import json
import os
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
from .trial import run_trial


class DeepSpeedLauncher:
    """Runs ``deepspeed … -m ds_bench.worker FOLDER`` under a leader of ours."""

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
            environment={name: value for name, value in self._environment.items() if name != "PYTHONPATH"},
            start=self._start,
            launch="deepspeed",
            meet_by_file=trial.placement.hostfile is None,
        )

    def _start(self, trial: Trial, folder: Path) -> _SpawnedLeader:
        command = launch_command(trial.placement, folder.resolve(), self._devices)
        with (folder / LEADER_LOG).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ds_bench.launch.leader", str(folder), json.dumps(command)],
                env=child_environment(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return _SpawnedLeader(process)


def launch_command(placement: Placement, folder: Path, devices: Sequence[int] | None = None) -> list[str]:
    """The launcher's command line for one trial.

    ``devices``: with ``--num_gpus`` the launcher forgets CUDA_VISIBLE_DEVICES and takes the first
    ones (launcher/runner.py), so the indices to use are given with ``--include``.
    """
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank"]
    if placement.hostfile is not None:
        command += ["--hostfile", placement.hostfile, "--master_port", str(_free_port())]
    elif devices:
        command += ["--include", "localhost:" + ",".join(map(str, devices[: placement.num_gpus]))]
    else:
        command += ["--num_gpus", str(placement.num_gpus)]
    if placement.hostfile is None:  # and not the hostfile that may lie at the launcher's default path
        command += ["--hostfile", os.devnull, "--master_addr", "127.0.0.1", "--master_port", str(_free_port())]
    return [*command, "--module", "ds_bench.worker", str(folder)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _SpawnedLeader:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def wait(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None
