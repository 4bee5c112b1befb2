"""A rank that is started by hand trains, or ends at once with one line that says why it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_bench.config.spec import Workload
from ds_bench.records.rank_files import Assignment
from tests.support import fakes

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
    assert json.loads((tmp_path / "rank0.json").read_text())["failure"]["message"] == message


@pytest.mark.parametrize(("name", "ranks"), [("LOCAL_SIZE", 4096), ("LOCAL_WORLD_SIZE", 8192)])
def test_processors_are_shared_among_the_ranks_of_the_node_and_not_of_the_job(
    tmp_path: Path, name: str, ranks: int
) -> None:
    bound = fakes.workload(cpu_binding="cores")
    code, errors = start_by_hand(tmp_path, 2, 1, bound, **{name: str(ranks)})
    assert code == 1
    assert f"{ranks} ranks cannot be bound to {len(os.sched_getaffinity(0))} processors" in errors
