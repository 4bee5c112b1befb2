"""Comparisons inside allocations of a real Slurm cluster."""

from __future__ import annotations

import pytest

from tests.support.slurm import SlurmCluster

pytestmark = [pytest.mark.deepspeed]


def test_a_job_of_two_nodes_runs_on_two_host_names(slurm: SlurmCluster) -> None:
    done = slurm.run("srun", "-N2", "-n2", "hostname")
    assert sorted(done.stdout.split()) == ["node1", "node2"], done.stderr
