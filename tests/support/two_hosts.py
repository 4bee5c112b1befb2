"""Two hosts on one machine, as Linux namespaces joined by a virtual Ethernet link.

Each host has namespaces of its own for processes, network, host name, mounts and shared memory, private ``/tmp`` and
``/dev/shm``, its own ``/etc/hosts`` and an sshd on its address of the link. Only the two hosts see the link. Nothing
outlives the first process of a host, which the kernel kills together with the process that made the host.

Run as a program, this module is that first process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_bench.system.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("unshare", "nsenter", "ip", "sshd", "ssh", "ssh-keygen")
NAMESPACES = ("--mount", "--uts", "--net", "--pid", "--ipc")
DEVICE = "eth0"
"""Name of the link on either host."""
NAMES = {"node-a": "192.0.2.1", "node-b": "192.0.2.2"}
"""Names and addresses; the addresses are reserved for documentation (RFC 5737)."""


class NoHostsError(Exception):
    """This machine lacks the rights or the programs to make hosts."""


@dataclass
class Host:
    """One host. Paths and process ids are the machine's unless noted."""

    name: str
    address: str
    first_process: subprocess.Popen[bytes]
    """``unshare``, which waits for the host's first process."""
    pid: int
    ssh_folder: Path
    sshd: subprocess.Popen[bytes] | None = None

    def command(self, words: Sequence[str | Path], folder: str | Path = "/") -> list[str]:
        """The command that runs ``words`` inside the host, in a session of its own."""
        enter = ["nsenter", "--target", str(self.pid), *NAMESPACES, "setsid", "env", "--chdir", str(folder)]
        return [*enter, *map(str, words)]

    def start(self, words: Sequence[str | Path], *, folder: str | Path = "/", **options: Any) -> subprocess.Popen[Any]:
        """Starts a command inside the host. The process returned is ``nsenter``, which ends as the command does."""
        return subprocess.Popen(self.command(words, folder), **{"stdin": subprocess.DEVNULL, **options})

    def run(
        self, words: Sequence[str | Path], *, seconds: float = 60, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command inside the host to its end."""
        process = self.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        try:
            output, errors = process.communicate(timeout=seconds)
        finally:
            send_signal(process, signal.SIGKILL)
        if check and process.returncode:
            raise AssertionError(f"{self.name}: {words} ended with {process.returncode}: {output}{errors}")
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def path(self, inside: str | Path) -> Path:
        """Where the machine sees a path of the host."""
        return Path(f"/proc/{self.pid}/root") / str(inside).lstrip("/")

    def processes(self, *, with_variable: str = "") -> dict[int, str]:
        """Process ids and command lines in the host; only those whose environment has ``with_variable``, if given.

        The first process, ended ones, and the host's sshd with its connections are left out.
        """
        found = {}
        for pid in namespace_members(Path(f"/proc/{self.pid}/ns/pid").readlink()) - {self.pid}:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if not words or words.startswith(("sshd:", "/usr/sbin/sshd")):
                    continue
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if not with_variable or any(each.startswith(f"{with_variable}=".encode()) for each in variables):
                    found[pid] = words
        return found

    def temporary_files(self) -> set[str]:
        """Paths in the host's ``/tmp`` and ``/dev/shm``, without mount points and lock files, which stay."""
        mounts = {line.split()[1] for line in Path(f"/proc/{self.pid}/mounts").read_text().splitlines()}
        paths = {f"{inside}/{path.name}" for inside in ("/tmp", "/dev/shm") for path in self.path(inside).iterdir()}
        paths = {path for path in paths if "/ds_bench_lock_" not in path}
        return {path for path in paths if not any(f"{mount}/".startswith(f"{path}/") for mount in mounts)}

    def start_sshd(self) -> None:
        """Starts sshd on the host's address, and waits until it listens."""
        path = self.ssh_folder / "sshd.log"
        with path.open("wb") as log:
            self.sshd = self.start([shutil.which("sshd") or "", "-D", "-e"], stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while "Server listening" not in path.read_text():
            assert self.sshd.poll() is None, path.read_text()
            assert time.monotonic() < deadline, path.read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        """Ends the host, as a power failure would."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for process in filter(None, (self.first_process, self.sshd)):
            process.wait(60)


def namespace_members(namespace: Path) -> set[int]:
    """Process ids of the running processes in a process namespace (``pid:[…]``, what ``/proc/PID/ns/pid`` links to).

    An ended process whose parent has not collected it yet has no executable file, and does not count: the first
    process of the machine, which inherits those of a killed host, may take as long as it likes.
    """
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and (entry / "ns/pid").readlink() == namespace and (entry / "exe").readlink():
                found.add(int(entry.name))
    return found


def send_signal(process: subprocess.Popen[Any], number: int, *, group: bool = False) -> None:
    """Sends a signal to the command that ``Host.start`` has started (``group``: to its process group, as Ctrl-C)."""
    with contextlib.suppress(OSError):
        for pid in map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
            (os.killpg if group else os.kill)(pid, number)


@dataclass
class TwoHosts:
    """Host ``a``, where the program under test is started, and host ``b``."""

    a: Host
    b: Host
    folder: Path
    """The folder for results, by its name on both hosts."""
    hostfile: Path
    """On host ``a``, with one slot for each host."""
    variables: dict[str, str] = field(default_factory=dict)
    """The environment for programs on host ``a``."""

    def set_link(self, *, up: bool) -> None:
        """Plugs the link in or unplugs it, at host ``b``."""
        self.b.run(["ip", "link", "set", DEVICE, "up" if up else "down"])


@contextlib.contextmanager
def make_two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Makes two hosts, and removes them afterwards. ``folder``: an empty one; each host has its own subfolder ``work``.

    Each host's own name resolves to 127.0.1.1 there, as Debian's installer sets it up. Raises NoHostsError with the
    reason.
    """
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing:
        raise NoHostsError(f"not installed: {', '.join(missing)}")
    if os.geteuid():
        raise NoHostsError("namespaces and sshd need root")
    work = folder / "work"
    work.mkdir()
    ssh = _write_ssh_files(folder)
    with contextlib.ExitStack() as stack:
        hosts = []
        for name in NAMES:
            source = folder / f"work of {name}"
            source.mkdir()
            hosts.append(_make_host(name, {str(source): str(work)}, ssh[name]))
            stack.callback(hosts[-1].kill)
        a, b = hosts
        _join(a, b)
        for host in hosts:
            host.start_sshd()
        hostfile = work / "hosts of the run"
        a.path(hostfile).write_text("".join(f"{name} slots=1\n" for name in NAMES))
        yield TwoHosts(a=a, b=b, folder=work, hostfile=hostfile, variables=_variables(a, work))


def _variables(host: Host, work: Path) -> dict[str, str]:
    """The variables of a login shell, and processors that nobody else uses, as everywhere in these tests."""
    idle = os.environ.get("DS_BENCH_CPU_ROOT")
    kept = {name: os.environ[name] for name in ("HOME", "USER", "PATH", "LANG") if name in os.environ}
    if idle is not None:
        shutil.copytree(idle, host.path(work / "idle"))
        kept["DS_BENCH_CPU_ROOT"] = str(work / "idle")
    return {**kept, "COLUMNS": "160", "PYTHONPATH": str(ROOT / "tests" / "support")}


def _make_host(name: str, folders: Mapping[str, str], ssh_folder: Path) -> Host:
    # A checkout or an environment below /tmp stays visible there.
    kept = {str(path) for path in (ROOT, sys.prefix, sys.base_prefix) if Path(path).is_relative_to("/tmp")}
    addresses = NAMES | {name: "127.0.1.1"}
    hosts_file = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())
    shown = {path: path for path in kept}
    if cache := os.environ.get("DS_BENCH_OPS_CACHE"):  # host b, which ssh reaches, has no variables of this machine
        shown[f"{cache}/ds_bench"] = str(Path.home() / ".cache" / "ds_bench")
    description = {
        "name": name,
        "folders": {**shown, **folders},
        "ssh": str(ssh_folder),
        "hosts_file": hosts_file,
    }
    unshare = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen(
        [*unshare, sys.executable, "-m", "tests.support.two_hosts", json.dumps(description)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    with process.stdout as output:
        if (line := output.readline()) != b"ready\n":
            process.kill()
            raise NoHostsError((line + output.read()).decode().strip() or "namespaces cannot be made")
    (pid,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    return Host(name=name, address=NAMES[name], first_process=process, pid=pid, ssh_folder=ssh_folder)


def _join(a: Host, b: Host) -> None:
    # Only the network namespace is entered: the process id of b has no meaning in the process namespace of a.
    peer = ["peer", "name", DEVICE, "netns", str(b.pid)]
    enter = ["nsenter", "--target", str(a.pid), "--net"]
    subprocess.run([*enter, "ip", "link", "add", DEVICE, "type", "veth", *peer], check=True)
    for host in (a, b):
        host.run(["ip", "address", "add", f"{host.address}/24", "dev", DEVICE])
        host.run(["ip", "link", "set", DEVICE, "up"])


def _write_ssh_files(folder: Path) -> dict[str, Path]:
    """Writes the ``/etc/ssh`` of each host: keys made for this test alone, and which hosts and users they trust."""
    folders = {}
    for name, address in NAMES.items():
        ssh = folders[name] = folder / f"ssh of {name}"
        ssh.mkdir()
        for key in ("host_key", "user_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"{key} of {name}", "-f", str(ssh / key)]
            subprocess.run(words, check=True)
        (ssh / "sshd_config").write_text(
            f"ListenAddress {address}\nListenAddress 127.0.1.1\nHostKey /etc/ssh/host_key\n"
            "PidFile none\nUsePAM no\nStrictModes no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            "AuthorizedKeysFile /etc/ssh/authorized_keys\n"
        )
        (ssh / "ssh_config").write_text(
            "IdentityFile /etc/ssh/user_key\nGlobalKnownHostsFile /etc/ssh/known_hosts\nUserKnownHostsFile none\n"
            "UpdateHostKeys no\nIdentitiesOnly yes\n"
        )
    keys = "".join((ssh / "user_key.pub").read_text() for ssh in folders.values())
    known = "".join(f"{name},{NAMES[name]} {(ssh / 'host_key.pub').read_text()}" for name, ssh in folders.items())
    for ssh in folders.values():
        (ssh / "authorized_keys").write_text(keys)
        (ssh / "known_hosts").write_text(known)
    return folders


# ------------------------------------------------------------------ inside: the first process of a host


def _become_first_process(description: Mapping[str, Any]) -> None:
    """Mounts what the host sees, and collects processes that end, until it is killed."""
    _mount_private_folders(description["folders"], description["ssh"], description["hosts_file"])
    socket.sethostname(description["name"])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print("ready", flush=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.05)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def _mount_private_folders(folders: Mapping[str, str], ssh: str, hosts_file: str) -> None:
    _mount("-t", "tmpfs", "tmpfs", "/run")
    for number, source in enumerate(folders):
        Path(f"/run/{number}").mkdir()
        _mount("--rbind", source, f"/run/{number}")
    hosts = Path("/run/hosts")
    hosts.write_text(hosts_file)
    _mount("--bind", str(hosts), "/etc/hosts")
    _mount("--bind", ssh, "/etc/ssh")
    Path("/run/sshd").mkdir(mode=0o755)
    if (own := Path.home() / ".ssh").is_dir():  # the user's keys and settings are not those of the host
        _mount("-t", "tmpfs", "tmpfs", str(own))
    for inside in ("/tmp", "/dev/shm"):
        _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", inside)
    for number, target in enumerate(folders.values()):
        Path(target).mkdir(parents=True, exist_ok=True)
        _mount("--rbind", f"/run/{number}", target)


if __name__ == "__main__":
    _become_first_process(json.loads(sys.argv[1]))
