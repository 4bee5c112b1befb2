"""Which processors a rank is bound to."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_bench.system import host_memory
from ds_bench.worker.cpu_binding import choose_cpus

TWO_NODES = [[0, 1, 2, 3], [4, 5, 6, 7]]


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
