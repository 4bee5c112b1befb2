"""How a rank starts: its number, its processors, where it meets others, and one line where it cannot train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from ds_bench.config.spec import Placement
from ds_bench.launch import rank_environment
from ds_bench.records.rank_files import Assignment
from ds_bench.system import host_resources
from ds_bench.worker.rank import choose_cpus
from ds_bench.worker.rank_layout import serve_store
from tests.support import fakes
from tests.support.real_trials import ROOT, free_port

BEGINNING = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
TWO_NODES = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        (BEGINNING, "RuntimeError: the trial has ended: the file through which its ranks meet is gone; repeat the run"),
        ({}, "RuntimeError: the trial has 2 ranks, but WORLD_SIZE is 1"),
        # Processors are shared among the ranks of the node and not of the job.
        ({**BEGINNING, "LOCAL_SIZE": "4096"}, "ValueError: 4096 ranks cannot be bound to"),
        ({**BEGINNING, "LOCAL_WORLD_SIZE": "8192", "LOCAL_SIZE": "1"}, "ValueError: 8192 ranks cannot be bound to"),
    ],
)
def test_a_rank_that_cannot_train_ends_with_one_line(tmp_path: Path, variables: dict[str, str], error: str) -> None:
    """A launcher that says how many ranks the node has also says where they meet."""
    own = "LOCAL_SIZE" in variables
    trial = fakes.trial(on=fakes.placement(num_gpus=2), of=fakes.workload(cpu_binding="cores" if own else "none"))
    rendezvous = None if own else f"file://{tmp_path / 'meeting file of a trial that has ended'}"
    Assignment(trial=trial, rendezvous=rendezvous, scratch_id="1").save(tmp_path, trial.ds_config)
    command = [sys.executable, "-m", "ds_bench.worker", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith(f"rank 0: {error}")
    failure = json.loads((tmp_path / "rank0.json").read_text())["failure"]
    assert ended.stderr == f"rank 0: {failure['error_class']}: {failure['message']}\n"
    assert failure["phase"] == "hello"


def test_every_rank_has_an_equal_part_of_the_allowed_processors_or_of_its_numa_node() -> None:
    for binding, allowed, parts in (
        ("cores", [1, 2, 5, 6, 7], [[1, 2], [5, 6]]),
        ("numa", list(range(8)), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("numa", list(range(8)), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("numa", list(range(8)), [[0, 1], [2, 3], [4, 5]]),  # two on the first node
    ):
        ranks = range(len(parts))
        assert [choose_cpus(binding, allowed, TWO_NODES, rank, len(ranks)) for rank in ranks] == parts


def test_numa_nodes_are_read_from_the_kernel(tmp_path: Path) -> None:
    for number, text in ((10, "8-9\n"), (2, "0-3,6\n"), (3, "\n")):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    assert host_resources.numa_cpus(tmp_path) == [[0, 1, 2, 3, 6], [8, 9]]
    assert len(host_resources.numa_cpus(tmp_path / "none")) == 1


def listening() -> set[object]:
    """Addresses at which this process listens; process groups of earlier tests may have left some."""
    return {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def test_the_store_listens_at_the_masters_address_alone() -> None:
    port, before = free_port(), listening()

    def serve(address: str) -> TCPStore | None:
        return serve_store({"MASTER_ADDR": address, "MASTER_PORT": str(port)})

    # A name may be 127.0.1.1 on its own host, and an address may be translated on the way: both are left to torch.
    assert [serve(address) for address in ("localhost", "192.0.2.77", "")] == [None] * 3
    store = serve("127.0.0.1")
    assert store is not None
    assert listening() - before == {("127.0.0.1", port)}
    TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10)).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        serve("127.0.0.1")


def test_no_collective_ends_before_the_trials_own_limits(tmp_path: Path) -> None:
    """In a process group that DeepSpeed makes for itself too; torch's own default for NCCL is 10 minutes."""
    program = f"""
import os
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
import torch.distributed
from types import SimpleNamespace
from ds_bench.worker.rank_layout import connect_ranks
assignment = SimpleNamespace(rendezvous="file://{tmp_path}/meet", collective_timeout_seconds=7320.0)
connect_ranks(assignment, "cpu")
groups = torch.distributed.distributed_c10d
import deepspeed.comm
for group in (None, deepspeed.comm.new_group([0])):
    backend = (group or groups._get_default_group())._get_backend(torch.device("cpu"))
    print(backend.options._timeout.total_seconds(), flush=True)
print(groups._get_default_timeout("nccl").total_seconds())
"""
    variables = rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=False)
    assert done.stdout.split()[-3:] == ["7320.0"] * 3, done.stderr
