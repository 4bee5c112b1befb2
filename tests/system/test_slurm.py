"""The nodes of a Slurm job, from its variables and what scontrol says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_bench.errors import UsageError
from ds_bench.system.slurm import tasks_of_nodes

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]"}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-3]" ] && echo "node1 node2 node3"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, [1, 1, 1]),
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, [2, 2, 2]),
        ({"SLURM_TASKS_PER_NODE": "8,2(x2)"}, [8, 2, 2]),
        ({"SLURM_TASKS_PER_NODE": "4"}, [1, 1, 1]),  # of a step on fewer nodes
    ],
)
def test_every_node_has_its_tasks(changes: dict[str, str], counts: list[int], scontrol: None) -> None:
    assert tasks_of_nodes(JOB | changes) == dict(zip(["node1", "node2", "node3"], counts, strict=True))


def test_one_node_or_no_job_is_no_job_of_several_nodes() -> None:
    assert tasks_of_nodes({}) == tasks_of_nodes({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node7"}) == {}


def test_without_scontrol_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match=r"nodes node\[1-3\].*put scontrol and srun on PATH"):
        tasks_of_nodes(JOB)


def test_what_scontrol_says_when_it_fails_is_told(scontrol: None, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'scontrol: error: no controller' >&2; exit 1\n")
    with pytest.raises(UsageError, match=r"names: scontrol: error: no controller \(see whether sinfo answers, or"):
        tasks_of_nodes(JOB)
