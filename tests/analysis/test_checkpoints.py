"""The cost of a checkpoint: of the slowest rank and the fullest node; what was not done has none and says why."""

from __future__ import annotations

from dataclasses import replace

from ds_bench.analysis.checkpoints import CheckpointCost, checkpoint_costs, is_restored
from ds_bench.analysis.flat_reader import read_summary
from ds_bench.analysis.flat_rows import flat_rows
from ds_bench.analysis.summary import summarise
from ds_bench.records.schema import CheckpointAction, PhaseMemory, RankMeasurement
from tests.support import fakes

MB = 2**20


def action(seconds: float, peak: int, written: int | None) -> CheckpointAction:
    memory = PhaseMemory(host_peak_bytes=peak * MB, host_end_bytes=300 * MB, host_end_pss_bytes=200 * MB)
    return CheckpointAction(seconds=seconds, memory=memory, written_bytes=written)


def ranks() -> list[RankMeasurement]:
    """Of 300 MB of each rank 100 are shared."""
    first = {"save": action(2.0, 500, 7 * MB), "universal": CheckpointAction(not_done="no such files")}
    second = {"save": action(3.0, 400, None), "universal": CheckpointAction(seconds=0.1)}
    return [
        replace(fakes.measurement(), rank=number, checkpoint=actions, checkpoint_restored=restored)
        for number, (actions, restored) in enumerate(((first, True), (second, None)))
    ]


def test_the_slowest_rank_and_the_fullest_node_count_and_files_once() -> None:
    assert checkpoint_costs(ranks()) == {
        "save": CheckpointCost(seconds=3.0, written_bytes=7 * MB, host_peak_bytes=700 * MB),
        "universal": CheckpointCost(),
    }


def test_a_rank_that_cannot_tell_does_not_hide_what_another_found() -> None:
    assert is_restored(ranks()) is True
    assert is_restored([*ranks(), replace(ranks()[0], checkpoint_restored=False)]) is False
    assert is_restored(ranks()[1:]) is None


def test_a_flat_row_gives_the_same_costs_and_phases_again() -> None:
    memory = {"build": PhaseMemory(host_peak_bytes=500 * MB, host_end_bytes=300 * MB, host_end_pss_bytes=200 * MB)}
    record = fakes.success(fakes.trial(fakes.zero(3)), phase_memory=memory, checkpoint=ranks()[0].checkpoint)
    (row,) = flat_rows([summarise(record, None, None)])
    assert row["checkpoint_save_seconds"] == 2.0
    assert row["checkpoint_universal_seconds"] is None
    assert row["cpu_build_peak_gb"] == 400 / 1024
    assert flat_rows([read_summary(row)]) == [row]
