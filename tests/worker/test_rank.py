"""How a rank starts: its number, its processors, and one line where it cannot train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_bench.config.spec import Workload
from ds_bench.records.rank_files import Assignment
from ds_bench.system import host_memory
from ds_bench.worker.rank import choose_cpus
from tests.support import fakes

TWO_NODES = [[0, 1, 2, 3], [4, 5, 6, 7]]
ROOT = Path(__file__).resolve().parent.parent.parent


def start_by_hand(
    folder: Path, ranks: int, world_size: int | None, of: Workload | None = None, **variables: str
) -> tuple[int, str]:
    """Exit code and standard error of rank 0 of a trial whose files are in ``folder``."""
    trial = fakes.trial(on=fakes.placement(num_gpus=ranks), of=of)
    # A launcher that says how many ranks the node has also says where they meet.
    rendezvous = None if variables else f"file://{folder / 'meeting file of a trial that has ended'}"
    Assignment(trial=trial, rendezvous=rendezvous, scratch_id="1").save(folder, trial.ds_config)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    if world_size is not None:
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    command = [sys.executable, "-m", "ds_bench.worker", str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("world_size", "message"),
    [
        (2, "the trial has ended: the file through which its ranks meet is gone; repeat the run"),
        (None, "the trial has 2 ranks, but WORLD_SIZE is 1"),
    ],
)
def test_a_rank_that_no_other_will_meet_ends_with_one_line(
    tmp_path: Path, world_size: int | None, message: str
) -> None:
    assert start_by_hand(tmp_path, 2, world_size) == (1, f"rank 0: RuntimeError: {message}\n")
    failure = json.loads((tmp_path / "rank0.json").read_text())["failure"]
    assert (failure["message"], failure["phase"]) == (message, "hello")


@pytest.mark.parametrize(("name", "ranks"), [("LOCAL_SIZE", 4096), ("LOCAL_WORLD_SIZE", 8192)])
def test_processors_are_shared_among_the_ranks_of_the_node_and_not_of_the_job(
    tmp_path: Path, name: str, ranks: int
) -> None:
    bound = fakes.workload(cpu_binding="cores")
    code, errors = start_by_hand(tmp_path, 2, 1, bound, **{name: str(ranks)})
    assert code == 1
    assert f"{ranks} ranks cannot be bound to {len(os.sched_getaffinity(0))} processors" in errors


def test_every_rank_has_an_equal_part_of_the_processors_that_are_allowed() -> None:
    parts = [choose_cpus("cores", [1, 2, 5, 6, 7], TWO_NODES, rank, 2) for rank in range(2)]
    assert parts == [[1, 2], [5, 6]]
    with pytest.raises(ValueError, match="3 ranks cannot be bound to 2 processors"):
        choose_cpus("cores", [0, 1], TWO_NODES, 0, 3)


def test_a_rank_on_a_numa_node_shares_it_with_its_neighbours() -> None:
    expected = {
        2: [[0, 1, 2, 3], [4, 5, 6, 7]],
        4: [[0, 1], [2, 3], [4, 5], [6, 7]],
        3: [[0, 1], [2, 3], [4, 5]],  # two on the first node
    }
    assert {
        ranks: [choose_cpus("numa", list(range(8)), TWO_NODES, rank, ranks) for rank in range(ranks)]
        for ranks in expected
    } == expected


def test_numa_nodes_are_read_from_the_kernel(tmp_path: Path) -> None:
    for number, text in ((10, "8-9\n"), (2, "0-3,6\n"), (3, "\n")):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    assert host_memory.numa_cpus(tmp_path) == [[0, 1, 2, 3, 6], [8, 9]]
    assert len(host_memory.numa_cpus(tmp_path / "none")) == 1
