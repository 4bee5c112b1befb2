"""Runs on two hosts: namespaces of this machine, joined by a virtual link, each with its own sshd and host name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ds_bench.records.rank_files import read_beat
from ds_bench.records.reader import parse_record
from ds_bench.report.exported_configuration import training_command
from tests.support.real_trials import ROOT, rows_of
from tests.support.two_hosts import (
    Host,
    NoHostsError,
    TwoHosts,
    make_two_hosts,
    send_signal,
)

pytestmark = [pytest.mark.deepspeed, pytest.mark.usefixtures("built_ops")]

TINY = ("--model", "tiny", "--batch-size", "2", "--seq-length", "32", "--num-steps", "3", "--warmup-steps", "1")
LONG = ("--model-factory", "faults:trains_long_at_stage_2", "--batch-size", "2", "--seq-length", "8")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    """Two hosts without a shared file system, whose own names stand for a loopback address."""
    folder = tmp_path_factory.mktemp("hosts")
    try:
        with make_two_hosts(folder) as both:
            yield both
    except NoHostsError as error:
        pytest.skip(f"no hosts can be made here: {error}")


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
        return rows_of(self.hosts.a.path(self.output))

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

    def assert_nothing_left(self, seconds: float = 30) -> None:
        """Neither processes nor temporary files on either host, after at most so long."""
        hosts = (self.hosts.a, self.hosts.b)
        wait_until(lambda: all(self.left_on(host) == ({}, set()) for host in hosts), seconds)
        assert {host.name: self.left_on(host) for host in hosts} == {host.name: ({}, set()) for host in hosts}


def start(hosts: TwoHosts, script: str, *words: str | Path, output: str, **variables: str) -> Run:
    """Starts a script on both hosts, with CPU ranks."""
    folder = hosts.folder / output
    program = [ROOT / script] if script.endswith(".py") else ["-m", "ds_bench", script]
    hostfile = [] if "--hostfile" in words else ["--hostfile", hosts.hostfile]
    command = [sys.executable, *program, "--accelerator", "cpu", "--output-dir", folder, *hostfile, *words]
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


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether something became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_without_a_shared_folder_ranks_train_and_a_host_whose_ranks_all_died_costs_one_row(hosts: TwoHosts) -> None:
    words = (*LONG, "--num-steps", "60", "--warmup-steps", "1", "--stages", "2", "1", "--env", "MINE=1")
    words += ("--monitor", "steps", "--profile", "torch", "--profile-ranks", "1")
    run = start(
        hosts, "zero_stage_comparison.py", *words, output='it\'s "an" `touch hit` output', HF_TOKEN="t", FI_X="2"
    )
    run.wait_for_training("00_zero2")
    there = hosts.b.processes(with_variable="DS_BENCH_TRIAL")
    variables = {Path(f"/proc/{pid}/environ").read_bytes() for pid in there}
    assert all(b"\0MINE=1\0" in each and b"\0FI_X=2\0" in each and b"HF_TOKEN" not in each for each in variables)
    for pid in there:
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert wait_until(lambda: (run.folder() / "records.jsonl").exists() and run.records(), 120)
    assert time.monotonic() - killed < 60, "no stall timeout is waited for"
    code, output, errors = run.finish()
    rows = run.rows()
    assert [row["status"] for row in rows] == ["❌ Killed", "✅ Success"], errors + output
    assert code == 0
    assert {(row["num_nodes"], row["num_gpus"], row["launch"]) for row in rows} == {(2, 2, "deepspeed")}
    ranks = run.records()[1]["ranks"]
    assert [rank["hostname"] for rank in ranks] == ["node-a", "node-b"]
    ((profile,),) = (rank["profiles"] for rank in ranks if rank["rank"] == 1)
    assert all((run.folder() / name).stat().st_size > 0 for name in profile["files"]), "of the other host"
    (steps,) = run.folder().glob("trials/01_zero1*/steps.jsonl")
    assert len(steps.read_text().splitlines()) == 61
    run_file = json.loads((run.folder() / "run.json").read_text())
    assert [each["hostname"] for each in run_file["environment"]["hosts"]] == ["node-a", "node-b"]
    run.assert_nothing_left()
    assert not [path for path in hosts.b.path(hosts.folder).iterdir() if path.name != "idle"], "nothing is kept there"
    assert not list(hosts.a.path(hosts.folder).rglob("hit"))


@pytest.mark.slow
def test_a_host_that_drops_out_costs_the_row_that_ran_whatever_command_reaches_it(hosts: TwoHosts) -> None:
    words = ("--num-steps", "60", "--warmup-steps", "1", "--stages", "2", "1", "--stall-timeout", "8")
    command = ("--host-command", "env ssh -x {host}")
    run = start(hosts, "zero_stage_comparison.py", *LONG, *words, *command, output="template")
    run.wait_for_training("00_zero2")
    hosts.set_link(up=False)
    pulled = time.monotonic()
    assert wait_until(lambda: (run.folder() / "records.jsonl").exists() and run.records(), 300)
    seconds = time.monotonic() - pulled
    hosts.set_link(up=True)
    code, output, errors = run.finish()
    assert (code, [row["status"] for row in run.rows()]) == (0, ["❌ Timeout", "✅ Success"]), errors + output
    assert "node-b" in run.rows()[0]["error"]
    assert seconds < 120, "of the stall timeout and the silence of a host"
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_on_either_host_and_resume_goes_on(hosts: TwoHosts) -> None:
    words = ("--num-steps", "60", "--warmup-steps", "1", "--stages", "2")
    run = start(hosts, "zero_stage_comparison.py", *LONG, *words, output="killed")
    run.wait_for_training("00_zero2")
    send_signal(run.process, signal.SIGKILL)
    run.finish(60)
    wait_until(lambda: run.left_on(hosts.b) == ({}, set()) and not run.left_on(hosts.a)[0], 60)
    # What the killed process itself had noted on its host, the next run there removes.
    assert (run.left_on(hosts.b), run.left_on(hosts.a)[0]) == (({}, set()), {})
    again = ("--resume", run.output / "runs" / run.folder().name, "--hostfile", hosts.hostfile, *LONG[:2])
    resumed = start(hosts, "zero_stage_comparison.py", *again, output="killed", FAULTS_FIXED="1")
    code, output, errors = resumed.finish()
    assert code == 0, errors + output
    assert [row["status"] for row in resumed.rows()] == ["✅ Success"]
    run.assert_nothing_left()


# ------------------------------------------------------------------ the same command on both hosts


def start_on_both(
    hosts: TwoHosts, words_of: Callable[[Host, int], list[str | Path]], output: str, **variables: str
) -> tuple[Run, subprocess.Popen[str]]:
    """Starts a command on each host. Returns the run, whose process is on host ``a``, and the process of ``b``."""
    earlier = {host.name: host.temporary_files() for host in (hosts.a, hosts.b)}
    processes = [
        host.start(
            [sys.executable, *words_of(host, number), "--accelerator", "cpu", "--output-dir", hosts.folder / output],
            folder=hosts.folder,
            env={**hosts.variables, **variables, **({"RANK": str(number)} if variables else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, host in enumerate((hosts.a, hosts.b))
    ]
    return Run(hosts, processes[0], hosts.folder / output, earlier), processes[1]


@pytest.mark.slow
def test_torchrun_on_both_hosts_is_one_comparison_and_ctrl_c_ends_it_on_both(hosts: TwoHosts) -> None:
    def torchrun(_host: Host, number: int) -> list[str | Path]:
        own = ["--node-rank", str(number), "--master-addr", hosts.a.address, "--master-port", "29400"]
        launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *own, "--rdzv-id", "one job"]
        words = [*LONG, "--num-steps", "60", "--warmup-steps", "1", "--stages", "1", "2"]
        return [*launcher, ROOT / "zero_stage_comparison.py", *words]

    run, other = start_on_both(hosts, torchrun, "torchrun")
    run.wait_for_training("01_zero2")
    send_signal(run.process, signal.SIGINT, group=True)
    _, output, errors = run.finish(180)
    other_output, _ = other.communicate(timeout=180)
    statuses = [(row["status"], row["num_nodes"]) for row in run.rows()]
    assert statuses == [("✅ Success", 2), ("⏹️ Interrupted", 2)], errors + output
    assert [rank["hostname"] for rank in run.records()[0]["ranks"]] == ["node-a", "node-b"]
    assert other_output == ""
    assert not hosts.b.path(run.output).exists()

    def left(host: Host) -> tuple[dict[int, str], set[str]]:
        """But for torchrun's own folders: its process imports torch's compiler too."""
        processes, files = run.left_on(host)
        return processes, {path for path in files if not path.startswith(("/tmp/torchelastic_", "/tmp/torchinductor_"))}

    wait_until(lambda: not any(left(host)[0] for host in (hosts.a, hosts.b)), 30)
    assert [left(host) for host in (hosts.a, hosts.b)] == [({}, set())] * 2


@pytest.mark.slow
@pytest.mark.nvme
def test_processes_with_a_pytorchjobs_variables_are_one_comparison_that_no_stranger_joins(hosts: TwoHosts) -> None:
    disk = hosts.folder / "nvme $(touch hit) ; touch hit"
    for host in (hosts.a, hosts.b):
        host.path(disk).mkdir()
    words = [ROOT / "offload_comparison.py", *TINY, "--nvme-path", disk, "--strategies", "nvme"]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts.a.address, "MASTER_PORT": "23456"}
    run, other = start_on_both(hosts, lambda _host, _number: words, "no_secret", **job)
    ended = [run.finish(180), (*other.communicate(timeout=180), other.returncode)]
    assert (ended[0][0], ended[1][2]) == (2, 2), ended
    assert all("DS_BENCH_SECRET" in str(each) for each in ended)
    stranger = "import socket, time\nwhile True:\n  try:\n    s = socket.create_connection(('192.0.2.1', 23456), 1)\n"
    stranger += "    s.sendall(b'GET / HTTP/1.1\\r\\n'); time.sleep(0.05)\n  except OSError: time.sleep(0.01)\n"
    guest = hosts.b.start([sys.executable, "-c", stranger])
    try:
        run, other = start_on_both(hosts, lambda _host, _number: words, "pods", **job, DS_BENCH_SECRET="s")
        run.earlier_files = {host.name: host.temporary_files() for host in (hosts.a, hosts.b)}
        code, output, errors = run.finish()
        other.communicate(timeout=180)
    finally:
        send_signal(guest, signal.SIGKILL)
        guest.wait(60)
    assert (code, other.returncode) == (0, 0), errors + output
    (row,) = run.rows()
    assert (row["status"], row["num_nodes"], row["num_gpus"]) == ("✅ Success", 2, 2), errors
    assert row["nvme_written_gb_per_step"] > 0
    run.assert_nothing_left()
    assert not any(list(host.path(disk).iterdir()) for host in (hosts.a, hosts.b))
    assert not any(list(host.path(hosts.folder).rglob("hit")) for host in (hosts.a, hosts.b))


# ------------------------------------------------------------------ a user's own script


@pytest.mark.slow
def test_the_users_script_trains_on_both_hosts_and_another_file_on_one_is_refused(hosts: TwoHosts) -> None:
    examples = ROOT / "examples" / "own_script"
    config, script = ((examples / name).read_text() for name in ("ds_config.json", "train_deepspeed.py"))
    hosts.a.path(hosts.folder / "ds.json").write_text(config)
    path = hosts.folder / "train.py"
    hosts.a.path(path).write_text(script)
    hosts.b.path(path).write_text(f"# Older.\n{script}")
    steps = ("--num-steps", "3", "--warmup-steps", "1", "--stages", "3")
    words = ("--base-config", "ds.json", *steps, "--", "train.py", "{config}", "{output_dir}")
    paths = os.pathsep.join([str(ROOT), hosts.variables["PYTHONPATH"]])
    refused = start(hosts, "run", *words, output="own", PYTHONPATH=paths)
    code, _, errors = refused.finish()
    assert code == 2
    assert f"{path} is missing or different on node-b" in errors
    hosts.b.path(path).write_text(script)
    run = start(hosts, "run", *words, output="own", PYTHONPATH=paths)
    code, output, errors = run.finish()
    rows = run.rows()
    assert [(row["status"], row["stage"]) for row in rows] == [("✅ Success", 3)], errors + output
    assert {(row["num_nodes"], row["num_gpus"], row["launch"]) for row in rows} == {(2, 2, "script")}
    for record in run.records():
        assert [rank["hostname"] for rank in record["ranks"]] == ["node-a", "node-b"]
        assert [rank["script"]["tokens"] for rank in record["ranks"]] == [[256] * 4] * 2
    torchrun = "-m torch.distributed.run --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=node-a:"
    for line in (run.folder() / "records.jsonl").read_bytes().splitlines():
        # Printed if a row is recommended, which noise may prevent.
        assert torchrun in training_command(parse_record(line, "records.jsonl").trial, Path("ds.json"))
    run.assert_nothing_left()
    hosts.b.path(path).unlink()
