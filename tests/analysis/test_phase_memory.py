"""Memory by phase of a node: pages that ranks share count once, the fullest node counts, unknown stays unknown."""

from __future__ import annotations

from dataclasses import replace

from ds_bench.analysis.phase_memory import NodePhaseMemory, largest_of_runs, node_phase_memory
from ds_bench.records.schema import PhaseMemory, RankMeasurement
from tests.support import fakes

MB = 2**20


def rank(host: str, peak: int | None, end: int | None, pss: int | None, gpu: int | None = None) -> RankMeasurement:
    sizes = [None if size is None else size * MB for size in (peak, end, pss, gpu)]
    memory = PhaseMemory(
        host_peak_bytes=sizes[0], host_end_bytes=sizes[1], host_end_pss_bytes=sizes[2], gpu_peak_bytes=sizes[3]
    )
    return replace(fakes.measurement(), hostname=host, phase_memory={"build": memory})


def test_shared_pages_count_once_and_the_fullest_node_counts() -> None:
    """Of 300 MB at the end, 100 are shared by the two ranks of a node: 250 each."""
    ranks = [rank("a", 400, 300, 250, 7), rank("a", 350, 300, 250, 9), rank("b", 500, 300, 300, 8)]
    assert node_phase_memory(ranks) == {
        "build": NodePhaseMemory(host_peak_bytes=650 * MB, host_end_bytes=500 * MB, gpu_peak_bytes=9 * MB)
    }


def test_a_node_of_which_one_rank_is_not_known_is_not_known() -> None:
    assert node_phase_memory([rank("a", 400, 300, 250), rank("a", None, 300, 250)])["build"] == NodePhaseMemory(
        host_end_bytes=500 * MB
    )
    assert node_phase_memory([rank("a", 400, 300, None)])["build"] == NodePhaseMemory()
    assert node_phase_memory([fakes.measurement()]) == {}


def test_of_several_runs_the_largest_values_are_shown() -> None:
    runs = [node_phase_memory([rank("a", peak, 300, 300)]) for peak in (400, 380)]
    assert largest_of_runs([*runs, {}])["build"] == NodePhaseMemory(host_peak_bytes=400 * MB, host_end_bytes=300 * MB)
