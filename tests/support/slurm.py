"""A private Slurm cluster for a test: the distribution's munged, slurmctld and slurmd, on loopback.

Each daemon runs in process, mount and host name namespaces of its own, so that a node has a host name and sees no
process of another node; all of them end with the test, and whatever they started ends with them. The nodes share the
network and the file system of this machine, but have a temporary folder and a ``/dev/shm`` each.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_bench.system.processes import die_with_parent

_NAMESPACES = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
_COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo", "unshare", "mount")
_CONTROLLER = "controller"
# The shell stays as process 1 and collects the orphans of its namespace.
_DAEMON = 'mount --bind "$0" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && hostname "$1" && shift && "$@"; exit $?'
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MailProg=/bin/true
TaskProlog={folder}/task_prolog
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
"""


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    """A cluster that answers commands."""

    folder: Path
    """Configuration, key, sockets and logs."""
    environment: dict[str, str]
    """Variables of a program that uses this cluster."""

    def run(
        self, *command: str, cwd: Path | None = None, seconds: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command such as ``sbatch`` or ``srun`` to its end."""
        environment = self.environment | variables
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )

    def submit(self, *arguments: str, cwd: Path | None = None, **variables: str) -> str:
        """Submits a job with sbatch. Returns its number."""
        done = self.run("sbatch", "--parsable", *arguments, cwd=cwd, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().partition(";")[0]

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING, COMPLETED, TIMEOUT; for an array, each state of its tasks once."""
        words = self.run("scontrol", "show", "job", job).stdout.split()
        return " ".join(sorted({word.removeprefix("JobState=") for word in words if word.startswith("JobState=")}))

    def wait_for_job(self, job: str, seconds: float) -> str:
        """Waits until a job, or every task of an array, has ended. Returns its state."""
        end = time.monotonic() + seconds
        while {"PENDING", "RUNNING", "COMPLETING"} & set((state := self.state(job)).split()):
            assert time.monotonic() < end, f"job {job} is {state} after {seconds} s\n{self.logs()}"
            time.sleep(0.3)
        return state

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


def why_no_slurm() -> str | None:
    """Why this machine cannot run a cluster for a test; None if it can."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = [command for command in _COMMANDS if shutil.which(command, path=path) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    done = subprocess.run([*_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces: {done.stderr.strip()}" if done.returncode else None


@contextlib.contextmanager
def running_slurm(nodes: int = 1, cpus: int = 4) -> Iterator[SlurmCluster]:
    """Starts a cluster of ``nodes`` nodes, node1 onwards, of ``cpus`` processors each; removes it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        cluster = _write_files(folder, nodes, cpus)
        names = [f"node{number}" for number in range(1, nodes + 1)]
        munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "key-file", "log-file", "pid-file")]
        munge += [f"--seed-file={folder}/munge.seed", "--num-threads=10", "--force", "--foreground"]
        _start(daemons, cluster, _CONTROLLER, "munged", *munge)
        _wait_until(lambda: (folder / "munge.socket").exists(), daemons, cluster)
        _start(daemons, cluster, _CONTROLLER, "slurmctld", "-D", "-c")
        for name in names:
            _start(daemons, cluster, name, "slurmd", "-D", "-N", name)
        idle = ["idle"] * nodes
        _wait_until(lambda: cluster.run("sinfo", "-h", "-N", "-o", "%T").stdout.split() == idle, daemons, cluster)
        yield cluster
    finally:
        for daemon in reversed(daemons):  # unshare; the kernel then kills process 1 of its namespace, and so all others
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _write_files(folder: Path, nodes: int, cpus: int) -> SlurmCluster:
    folder.chmod(0o755)  # munged wants every user to reach its socket
    for name in ("state", *(f"tmp{number}" for number in range(1, nodes + 1))):
        (folder / name).mkdir()
    key = folder / "munge.key-file"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    names = [f"node{number}" for number in range(1, nodes + 1)]
    (folder / "hosts").write_text(f"127.0.0.1 localhost {_CONTROLLER} {socket.gethostname()} {' '.join(names)}\n")
    prolog = folder / "task_prolog"
    prolog.write_text(f'#!/bin/sh\necho "export TMPDIR={folder}/tmp${{SLURMD_NODENAME#node}}"\n')
    prolog.chmod(0o755)
    ports = _free_ports(nodes + 1)
    lines = [_CONFIGURATION.format(folder=folder, controller=_CONTROLLER, ports=ports)]
    for name, port in zip(names, ports[1:], strict=True):
        lines.append(f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000\n")
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
    (folder / "slurm.conf").write_text("".join(lines))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    path = os.pathsep.join([kept.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    return SlurmCluster(folder, {**kept, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")})


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start(daemons: list[subprocess.Popen[bytes]], cluster: SlurmCluster, host: str, *command: str) -> None:
    with (cluster.folder / f"{host}.{command[0]}.out.log").open("wb") as log:
        process = subprocess.Popen(
            [*_NAMESPACES, "sh", "-c", _DAEMON, str(cluster.folder / "hosts"), host, *command],
            env=cluster.environment,
            cwd=cluster.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    daemons.append(process)


def _wait_until(condition: Callable[[], bool], daemons: list[subprocess.Popen[bytes]], cluster: SlurmCluster) -> None:
    end = time.monotonic() + 60
    while not condition():
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        assert not ended, f"ended: {ended}\n{cluster.logs()}"
        assert time.monotonic() < end, f"the cluster does not answer\n{cluster.logs()}"
        time.sleep(0.2)
