"""What a rank takes from the launcher that started it."""

from __future__ import annotations

import pytest

from ds_bench.worker.__main__ import rank_variables


def test_a_rank_is_numbered_by_whatever_launcher_started_it(subtests: pytest.Subtests) -> None:
    """Open MPI, MPICH, Intel MPI and Slurm set none of the names that DeepSpeed reads."""
    for environ in (
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_RANK": "3", "MPI_LOCALRANKID": "1", "PMI_SIZE": "4"},
        {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"},
    ):
        with subtests.test(environ=environ):
            assert rank_variables(environ) == {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}


def test_without_a_launcher_nothing_is_set() -> None:
    assert rank_variables({"PATH": "/bin"}) == {}
