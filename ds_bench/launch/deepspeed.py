"""Cold launch: every trial through the ``deepspeed`` launcher, on one node or many.

Ranks start as they do for a user and import everything again in each trial. On one node they meet through a file. On
several they meet at MASTER_ADDR; each host's files are in a private folder there, which its agent sends here.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..config.spec import Placement, Trial
from ..records.rank_files import TRIAL_VARIABLE
from ..records.schema import TrialRecord
from ..system.processes import LEADER_VARIABLE, child_environment
from .host_agent import free_port
from .hosts import SSH_OPTIONS, Hosts
from .leader import start_leader
from .monitor import Limits, ProgressCallback
from .rank_environment import thread_variables
from .remote_trial import RemoteTrial
from .scratch import temporary_folder
from .trial import Leader, run_trial

_WORKER = "ds_bench.worker"
_EXPORTED_NAMES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""Beginnings of the variables that DeepSpeed's runner writes into the command line of every host, between double quotes
at most (launcher/runner.py, EXPORT_ENVS and the accelerator's export_envs): where others see them, and a shell reads
them."""


class DeepSpeedLauncher:
    """Runs ``deepspeed … --module ds_bench.worker FOLDER`` as the child of a leader of ours.

    ``hosts``: of a placement on several; where it has no hostfile, their agents start the ranks.
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
        """Of this trial: points of a sweep may have other numbers of ranks, and so of threads."""
        return {**self._environment, **thread_variables(trial.placement, os.environ)}

    def _start(self, trial: Trial, folder: Path, remote: RemoteTrial | None) -> Leader:
        if remote is None:
            command = launch_command(trial.placement, folder.resolve(), self._devices)
            return _leader_of(start_leader(folder, command, child_environment(self._variables(trial)), folder))
        if trial.placement.hostfile is None:
            remote.start_ranks(lambda number: node_command(trial.placement, number, remote.master))
            return Leader(None, lambda seconds: _wait_for_ranks(remote, seconds))
        # The runner reads the file for every trial: the user's may have changed since the hosts were checked.
        command = hosts_command(replace(trial.placement, hostfile=write_hostfile(trial.placement)), remote.master)
        environment = runner_environment({**self._variables(trial), **hosts_variables(remote, os.environ)})
        # On SIGTERM DeepSpeed's runner ends every job of this user on these hosts that deepspeed has started, by
        # "pkill -f deepspeed.launcher.launch" (launcher/runner.py, sigkill_handler). The agents end this trial alone.
        kind = signal.SIGKILL if trial.placement.multi_node_launcher == "pdsh" else signal.SIGTERM
        # The runner's working folder is part of a shell command and of PYTHONPATH on every host.
        return _leader_of(start_leader(folder, command, environment, Path("/")), kind)


def _wait_for_ranks(remote: RemoteTrial, seconds: float) -> bool:
    if not remote.ranks_ended:
        time.sleep(seconds)
    return remote.ranks_ended


def _leader_of(process: subprocess.Popen[bytes], first_signal: int = signal.SIGTERM) -> Leader:
    def wait(seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.poll() is not None

    return Leader(process.pid, wait, first_signal)


def launch_command(placement: Placement, folder: Path, devices: Sequence[int] | None = None) -> list[str]:
    """The launcher's command line for one trial. ``devices``: indices of the GPUs to use on one node."""
    if placement.hosts:
        # For --dry-run, which asks no host; DeepSpeed's default port (constants.py, TORCH_DISTRIBUTED_DEFAULT_PORT).
        master = placement.master_addr or placement.hosts[0][0], placement.master_port or 29500
        if placement.hostfile is None:
            return node_command(placement, 0, master)
        return hosts_command(placement, master)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", "--master_port", str(free_port())]
    # An empty hostfile, since there may be one at the launcher's default path.
    command += ["--hostfile", os.devnull, "--master_addr", "127.0.0.1"]
    # With --num_gpus the launcher ignores CUDA_VISIBLE_DEVICES and takes the first GPUs (launcher/runner.py).
    included = "localhost:" + ",".join(map(str, devices[: placement.num_gpus])) if devices else None
    command += ["--include", included] if included else ["--num_gpus", str(placement.num_gpus)]
    return [*command, "--module", _WORKER, str(folder)]


def hosts_command(placement: Placement, master: tuple[str, int]) -> list[str]:
    """The runner's command line for one trial on the hosts of a hostfile; ranks find their folder by DS_BENCH_TRIAL."""
    address, port = master
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank"]
    command += ["--hostfile", str(placement.hostfile), "--launcher", placement.multi_node_launcher]
    command += ["--master_addr", address, "--master_port", str(port)]
    # By itself the runner tries ssh to the first host, and starts the ranks of a single host here, whichever it is.
    command += ["--no_ssh_check", "--force_multi"]
    if placement.include is not None:
        command += [f"--include={placement.include}"]
    if placement.launcher_args:
        command += [f"--launcher_args={shlex.join(placement.launcher_args)}"]
    if placement.multi_node_launcher == "slurm":  # that runner ignores --module (launcher/multinode_runner.py)
        return [*command, "--", "-m", _WORKER]
    return [*command, "--module", _WORKER]


def write_hostfile(placement: Placement) -> str:
    """Writes the hosts of a placement, with slots up to the last that is used. Returns the path of the private file."""
    path = Path(temporary_folder()) / "launcher_hosts"
    path.write_text("".join(f"{name} slots={max(placement.slots_of(name)) + 1}\n" for name, _ in placement.hosts))
    return str(path)


def runner_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of DeepSpeed's runner on several hosts: none that it writes into command lines but Python's path.

    The ranks get what the user has set of them from the agents (``remote_trial.user_variables``).
    """
    own = ("PYTHONPATH", "PYTHONSAFEPATH")
    everything = child_environment(variables).items()
    return {name: value for name, value in everything if name in own or not name.startswith(_EXPORTED_NAMES)}


def hosts_variables(remote: RemoteTrial, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of DeepSpeed's runner, and in a file of its own those that it sets on every host."""
    address, port = remote.master
    exported = {TRIAL_VARIABLE: remote.scratch_id, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    # DS_ENV_FILE replaces the name of the user's own files, so their lines are taken over, from the places where
    # the runner looks (launcher/runner.py, DEEPSPEED_ENVIRONMENT_PATHS).
    texts = [path.read_text() for path in dict.fromkeys([Path.home() / name, Path.cwd() / name]) if path.is_file()]
    texts += [f"{name}={value}" for name, value in exported.items()]
    path = Path(temporary_folder()) / "launcher_variables"
    path.write_text("\n".join(text.strip("\n") for text in texts) + "\n")
    # The user's lines may hold credentials.
    path.chmod(0o600)
    ssh = " ".join(filter(None, [environ.get("PDSH_SSH_ARGS_APPEND"), *SSH_OPTIONS]))
    # The leader here is no process of the hosts: with an empty id ranks there take the leader of their session.
    return {"DS_ENV_FILE": str(path), "PDSH_SSH_ARGS_APPEND": ssh, LEADER_VARIABLE: ""}


def node_command(placement: Placement, number: int, master: tuple[str, int]) -> list[str]:
    """The command that starts the ranks of one host, as DeepSpeed's runner starts it there."""
    slots = {name: list(range(ranks)) for name, ranks in placement.hosts}
    address, port = master
    return [
        *[sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--node_rank={number}"],
        f"--world_info={base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()}",
        *[f"--master_addr={address}", f"--master_port={port}", "--no_local_rank", "--module", _WORKER],
    ]
