"""Runs on two hosts: namespaces of this machine, joined by a virtual link, each with its own sshd and host name."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest

from ds_bench.records.rank_files import read_beat
from tests.support.real_trials import ROOT
from tests.support.two_hosts import (
    Host,
    NoHostsError,
    TwoHosts,
    make_two_hosts,
    namespace_members,
    send_signal,
)

pytestmark = [pytest.mark.deepspeed, pytest.mark.usefixtures("built_ops")]

TINY = ("--model", "tiny", "--batch-size", "2", "--seq-length", "32", "--num-steps", "3", "--warmup-steps", "1")
LONG = ("--model-factory", "faults:trains_long_at_stage_2", "--batch-size", "2", "--seq-length", "8")
MakeHosts = Callable[..., TwoHosts]


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[MakeHosts]:
    """Makes the hosts of a test, which ends them."""
    with ExitStack() as stack:

        def make(*, shared_file_system: bool = True, **options: bool) -> TwoHosts:
            context = make_two_hosts(tmp_path, shared_file_system=shared_file_system, **options)
            try:
                return stack.enter_context(context)
            except NoHostsError as error:
                pytest.skip(f"no hosts can be made here: {error}")

        yield make


@dataclass
class Run:
    """A comparison script, started on host ``a``."""

    hosts: TwoHosts
    process: subprocess.Popen[str]
    output: Path
    """As host ``a`` names it."""
    earlier_files: dict[str, set[str]]
    started_at: float = field(default_factory=time.time)

    def finish(self, seconds: float = 400) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)."""
        output, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, output, errors

    def rows(self) -> list[dict[str, Any]]:
        (path,) = self.hosts.a.path(self.output).glob("*_comparison_*.json")
        rows: list[dict[str, Any]] = json.loads(path.read_text())
        return rows

    def folder(self) -> Path:
        """The run folder, as this machine names it."""
        (folder,) = self.hosts.a.path(self.output).glob("runs/*")
        return folder

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder() / "records.jsonl").read_text().splitlines()]

    def wait_for_training(self, trial: str, rank: int = 1) -> None:
        """Until a rank of a trial has begun its steps."""

        def trains() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            folders = self.hosts.a.path(self.output).glob(f"runs/*/trials/{trial}*")
            beats = [read_beat(folder, rank) for folder in folders]
            return any(beat is not None and beat.time > self.started_at and beat.step >= 0 for beat in beats)

        assert wait_until(trains, 300), "no step in five minutes"

    def left_on(self, host: Host) -> tuple[dict[int, str], set[str]]:
        """Processes, and files in ``/tmp`` and ``/dev/shm``, that the run has left on a host."""
        return host.processes(), host.temporary_files() - self.earlier_files[host.name]

    def assert_nothing_left(self, seconds: float = 5) -> None:
        """Neither processes nor temporary files on either host, after at most so long."""
        hosts = (self.hosts.a, self.hosts.b)
        wait_until(lambda: all(self.left_on(host) == ({}, set()) for host in hosts), seconds)
        assert {host.name: self.left_on(host) for host in hosts} == {host.name: ({}, set()) for host in hosts}


def start(hosts: TwoHosts, script: str, *words: str | Path, output: str = "out", **variables: str) -> Run:
    """Starts a script on both hosts, with CPU ranks."""
    folder = hosts.folder / output
    command = [sys.executable, ROOT / script, "--accelerator", "cpu", "--output-dir", folder, *words]
    if "--hostfile" not in words:
        command += ["--hostfile", hosts.hostfile]
    earlier = {host.name: host.temporary_files() for host in (hosts.a, hosts.b)}
    process = hosts.a.start(
        command,
        folder=hosts.folder,
        env={**hosts.variables, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Run(hosts, process, folder, earlier)


def number_inside(pid: int) -> int:
    """Return the id that a process has in the innermost of its namespaces."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid:")]
    return int(line.split()[-1])


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether something became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


# ------------------------------------------------------------------ the hosts themselves


def test_the_hosts_are_two_and_end_with_the_process_that_made_them(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(shared_file_system=False)
    shown = hosts.a.run(["ssh", "node-b", "hostname; hostname -I; touch /tmp/own"]).stdout.split()
    assert shown[:2] == ["node-b", "192.0.2.2"]
    assert "/tmp/own" in hosts.b.temporary_files() - hosts.a.temporary_files()
    assert not hosts.b.path(hosts.hostfile).exists()
    hosts.b.stop_sshd()
    assert "refused" in hosts.a.run(["ssh", "node-b", "true"], check=False).stderr
    inner = tmp_path / "inner"
    inner.mkdir()
    program = (
        "import sys, time, pathlib; from tests.support.two_hosts import make_two_hosts\n"
        "with make_two_hosts(pathlib.Path(sys.argv[1]), shared_file_system=True) as hosts:\n"
        "    hosts.a.start(['ssh', 'node-b', 'sleep 600']); time.sleep(1)\n"
        "    print(hosts.a.pid, hosts.b.pid, flush=True); time.sleep(600)\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", program, inner], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    with maker.stdout:
        spaces = [Path(f"/proc/{pid}/ns/pid").readlink() for pid in maker.stdout.readline().split()]
    assert all(len(namespace_members(space)) > 2 for space in spaces)
    maker.kill()
    maker.wait()
    assert wait_until(lambda: not any(namespace_members(space) for space in spaces), 30)


# ------------------------------------------------------------------ runs that work


@pytest.mark.slow
def test_stages_0_and_3_train_without_a_shared_file_system_and_a_slow_link_shows(make_hosts: MakeHosts) -> None:
    """Stages 1 and 2 train on both hosts in the tests below."""
    hosts = make_hosts(shared_file_system=False, own_names_on_loopback=True)
    run = start(hosts, "zero_stage_comparison.py", *TINY, "--stages", "0", "3")
    code, output, errors = run.finish()
    assert code == 0, errors + output
    rows = run.rows()
    assert [(row["stage"], row["status"]) for row in rows] == [(stage, "✅ Success") for stage in (0, 3)]
    assert {(row["num_nodes"], row["num_gpus"], row["launch"]) for row in rows} == {(2, 2, "deepspeed")}
    assert len({row["first_loss"] for row in rows}) == 1, "both hosts have the data of their ranks"
    run_file = json.loads((run.folder() / "run.json").read_text())
    assert [each["hostname"] for each in run_file["environment"]["hosts"]] == ["node-a", "node-b"]
    run.assert_nothing_left()
    assert not list(hosts.b.path(hosts.folder).iterdir()), "of the run nothing is kept"
    fast = rows[0]
    hosts.shape_link(megabits_per_second=10)
    slowed = start(hosts, "zero_stage_comparison.py", *TINY, "--stages", "0", output="slow")
    code, output, errors = slowed.finish()
    assert code == 0, errors + output
    (slow,) = slowed.rows()
    assert slow["communication_gb_per_step"] == fast["communication_gb_per_step"] > 0
    sent_bits = fast["communication_gb_per_step"] * 2**30 / 2 * 8  # by each of two ranks
    assert slow["avg_step_time_ms"] > 0.8 * sent_bits / 10e6 * 1000, "the link holds the step up"
    assert slow["phase_communication_ms"] > 3 * fast["phase_communication_ms"]
    slowed.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.nvme
def test_offload_strategies_train_in_folders_whose_names_a_shell_would_read_otherwise(make_hosts: MakeHosts) -> None:
    hosts = make_hosts()
    disk = hosts.folder / "nvme $(touch hit) ; touch hit"
    hosts.a.path(disk).mkdir()
    words = ("--nvme-path", disk, "--strategies", "cpu_optimizer", "nvme")
    run = start(hosts, "offload_comparison.py", *TINY, *words, output='it\'s "an" `touch hit` output')
    code, output, errors = run.finish()
    assert code == 0, errors + output
    rows = run.rows()
    assert [row["status"] for row in rows] == ["✅ Success"] * 2, errors + output
    assert rows[1]["nvme_written_gb_per_step"] > 0
    run.assert_nothing_left()
    assert not list(hosts.a.path(disk).iterdir())
    assert not list(hosts.a.path(hosts.folder).rglob("hit"))
    assert not any(
        host.path(folder).joinpath("hit").exists() for host in (hosts.a, hosts.b) for folder in ("/", "/root")
    )


def start_torchrun(hosts: TwoHosts, *words: str | Path) -> tuple[Run, subprocess.Popen[str]]:
    """Starts a script by torchrun on each host. Returns the run, whose process is torchrun on host ``a``, and the
    torchrun of host ``b``."""
    earlier = {host.name: host.temporary_files() for host in (hosts.a, hosts.b)}

    def torchrun(host: Host, number: int) -> subprocess.Popen[str]:
        own = ["--node-rank", str(number), "--master-addr", hosts.a.address, "--master-port", "29400"]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *own]
        command += ["--rdzv-id", "one job", ROOT / "zero_stage_comparison.py", "--accelerator", "cpu"]
        return host.start(
            [*command, "--output-dir", hosts.folder / "out", *words],
            folder=hosts.folder,
            env=hosts.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    other = torchrun(hosts.b, 1)
    return Run(hosts, torchrun(hosts.a, 0), hosts.folder / "out", earlier), other


def without_torchruns_folders(run: Run, host: Host) -> tuple[dict[int, str], set[str]]:
    """What is left but for torchrun's own folders: its process imports torch's compiler too."""
    left, files = run.left_on(host)
    return left, {path for path in files if not path.startswith(("/tmp/torchelastic_", "/tmp/torchinductor_"))}


@pytest.mark.slow
def test_torchrun_on_both_hosts_is_one_comparison_with_the_ranks_of_both(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(shared_file_system=False)
    run, other = start_torchrun(hosts, *TINY, "--stages", "0", "2")
    code, output, errors = run.finish()
    other_output, other_errors = other.communicate(timeout=60)
    assert (code, other.returncode) == (0, 0), errors + output + other_output + other_errors
    assert [(row["status"], row["num_nodes"]) for row in run.rows()] == [("✅ Success", 2)] * 2, errors
    assert [rank["hostname"] for rank in run.records()[0]["ranks"]] == ["node-a", "node-b"]
    assert other_output == ""
    assert not hosts.b.path(hosts.folder / "out").exists()
    assert [without_torchruns_folders(run, host) for host in (hosts.a, hosts.b)] == [({}, set())] * 2


@pytest.mark.slow
def test_ctrl_c_at_torchrun_writes_the_rows_and_a_node_that_ends_is_told_once(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(shared_file_system=False)
    run, other = start_torchrun(hosts, *LONG, "--num-steps", "60", "--warmup-steps", "1", "--stages", "2")
    run.wait_for_training("00_zero2")
    send_signal(run.process, signal.SIGINT, group=True)
    _, output, errors = run.finish(60)
    assert [row["status"] for row in run.rows()] == ["⏹️ Interrupted"], errors + output
    other.communicate(timeout=60)
    wait_until(lambda: not any(without_torchruns_folders(run, host)[0] for host in (hosts.a, hosts.b)), 10)
    assert [without_torchruns_folders(run, host) for host in (hosts.a, hosts.b)] == [({}, set())] * 2
    shutil.rmtree(hosts.a.path(hosts.folder / "out"))
    run, other = start_torchrun(hosts, *LONG, "--num-steps", "60", "--warmup-steps", "1", "--stages", "2", "1", "0")
    run.wait_for_training("00_zero2")
    send_signal(other, signal.SIGTERM)
    began = time.monotonic()
    _, output, errors = run.finish(60)
    other.communicate(timeout=60)
    assert [row["status"] for row in run.rows()] == ["❌ Timeout"] * 3, errors + output
    assert all("node-b" in row["error"] for row in run.rows()), errors
    assert time.monotonic() - began < 30


# ------------------------------------------------------------------ what ends a trial, or the run


@pytest.mark.slow
def test_a_host_that_drops_out_costs_the_row_that_ran_and_no_other(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(shared_file_system=False)
    words = ("--num-steps", "60", "--warmup-steps", "1", "--stages", "2", "1", "--stall-timeout", "8")
    run = start(hosts, "zero_stage_comparison.py", *LONG, *words)
    run.wait_for_training("00_zero2")
    hosts.set_link(up=False)
    pulled = time.monotonic()
    assert wait_until(lambda: (run.folder() / "records.jsonl").exists() and run.records(), 300)
    seconds = time.monotonic() - pulled
    hosts.set_link(up=True)
    code, output, errors = run.finish()
    statuses = [row["status"] for row in run.rows()]
    assert (code, statuses[1]) == (0, "✅ Success"), errors + output
    assert statuses[0] == "❌ Timeout", errors + output
    assert "node-b" in run.rows()[0]["error"]
    assert seconds < 8 + 20, "of the stall timeout and the silence of a host"
    run.assert_nothing_left()


def test_rank_killed_on_the_remote_host_costs_its_row_and_no_other(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(shared_file_system=False)
    words = ("--num-steps", "60", "--warmup-steps", "1", "--stages", "2", "1")
    run = start(hosts, "zero_stage_comparison.py", *LONG, *words)
    run.wait_for_training("00_zero2")
    (folder,) = run.folder().glob("trials/00_zero2*")
    beat = read_beat(folder, 1)
    assert beat is not None
    # As the host itself numbers it.
    (rank,) = [pid for pid in hosts.b.processes() if number_inside(pid) == beat.pid]
    killed = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    assert wait_until(lambda: (run.folder() / "records.jsonl").exists() and run.records(), 60)
    assert time.monotonic() - killed < 30, "no stall timeout is waited for"
    code, output, errors = run.finish()
    first, second = run.rows()
    assert (code, first["status"], second["status"]) == (0, "❌ Killed", "✅ Success"), errors + output
    assert "rank 1" in first["error_details"], first
    run.assert_nothing_left()


@pytest.mark.slow
def test_ctrl_c_and_a_killed_run_leave_nothing_on_either_host_and_resume_goes_on(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(shared_file_system=False)
    words = ("--num-steps", "60", "--warmup-steps", "1", "--stages", "1", "2")
    run = start(hosts, "zero_stage_comparison.py", *LONG, *words)
    run.wait_for_training("01_zero2")
    assert hosts.b.processes(with_variable="DS_BENCH_TRIAL")
    send_signal(run.process, signal.SIGINT, group=True)
    code, output, errors = run.finish(60)
    assert code == 130, errors + output
    assert [row["status"] for row in run.rows()] == ["✅ Success", "⏹️ Interrupted"]
    run.assert_nothing_left()
    again = ("--resume", hosts.folder / "out" / "runs" / run.folder().name, "--hostfile", hosts.hostfile, *LONG[:2])
    killed = start(hosts, "zero_stage_comparison.py", *again)
    killed.wait_for_training("01_zero2")
    send_signal(killed.process, signal.SIGKILL)
    killed.finish(10)
    wait_until(lambda: killed.left_on(hosts.b) == ({}, set()) and not killed.left_on(hosts.a)[0], 20)
    # What the killed process itself had noted on its host, the next run there removes.
    assert (killed.left_on(hosts.b), killed.left_on(hosts.a)[0]) == (({}, set()), {})
    resumed = start(hosts, "zero_stage_comparison.py", *again, FAULTS_MENDED="1")
    code, output, errors = resumed.finish()
    assert code == 0, errors + output
    assert [row["status"] for row in resumed.rows()] == ["✅ Success"] * 2
    assert "[1/1]" in errors, "the first row is not run again"
    run.assert_nothing_left()


# ------------------------------------------------------------------ hosts that cannot be used


@pytest.mark.slow
def test_hosts_that_cannot_be_used_are_named_in_one_line_before_the_first_trial(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(shared_file_system=False)
    hit = hosts.folder / "hit"
    hostfiles = {
        "node-a slots=1\nnode-b slot=1\n": "line 2",
        "node-a slots=1\nnode-a slots=1\n": "line 2",
        "node-a slots=1\nnode-c slots=1\n": "node-c",
        "node-a slots=1\n192.0.2.9 slots=1\n": "192.0.2.9",
        "node-b slots=1\n192.0.2.2 slots=1\n": "both call themselves node-b",
        f"node-a slots=1\n-oProxyCommand=touch${{IFS}}{hit} slots=1\n": "line 2",
        f"node-a slots=1\nnode-b;touch${{IFS}}{hit} slots=1\n": "line 2",
        f"node-a slots=1\n$(touch${{IFS}}{hit}) slots=1\n": "line 2",
    }
    hostfile = hosts.folder / "hosts"
    for text, named in hostfiles.items():
        hosts.a.path(hostfile).write_text(text)
        assert named in refusal(hosts, hostfile), text
    hosts.b.stop_sshd()
    assert "Connection refused" in refusal(hosts, hosts.hostfile)
    hosts.b.start_sshd()
    keys = hosts.b.ssh_folder / "authorized_keys"
    known = keys.read_text()
    keys.write_text("")
    assert "Permission denied" in refusal(hosts, hosts.hostfile)
    keys.write_text(known)
    change_version(hosts.b, hosts.folder, "transformers", "5.0.0.dev1")
    line = refusal(hosts, hosts.hostfile)
    assert "node-b" in line, line
    assert "5.0.0.dev1" in line, line
    assert not any(host.path(hit).exists() for host in (hosts.a, hosts.b))


def change_version(host: Host, folder: Path, package: str, version: str) -> None:
    """Makes a host see another version of a package, in its own view of the package's metadata."""
    (metadata,) = (path for path in files(package) or () if path.name == "METADATA")
    original, changed = Path(str(metadata.locate())), folder / "METADATA"
    text = re.sub(r"(?m)^Version: .*$", f"Version: {version}", original.read_text(), count=1)
    host.path(changed).write_text(text)
    host.run(["mount", "--bind", changed, original])


def refusal(hosts: TwoHosts, hostfile: Path, **variables: str) -> str:
    """The line with which a run is refused; nothing else happens."""
    run = start(hosts, "zero_stage_comparison.py", *TINY, "--hostfile", hostfile, **variables)
    code, output, errors = run.finish(60)
    assert (code, output) == (2, ""), errors
    assert not hosts.a.path(run.output / "runs").exists()
    run.assert_nothing_left()
    (line,) = errors.splitlines()
    return line
