"""Checkpoints of real rows on two CPU ranks: saved, loaded and proven, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ds_bench.config.spec import Configuration, Inspection, ProfileName
from ds_bench.launch import Limits
from ds_bench.launch.warm_launcher import WarmLauncher
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.real_trials import SHORT, make_trial

pytestmark = [pytest.mark.slow, pytest.mark.deepspeed]

WORKLOAD = fakes.workload(batch_size=2, seq_length=32, num_steps=3, warmup_steps=1, dropout=0.0)


@pytest.fixture
def train(server: Callable[[Limits], WarmLauncher], tmp_path: Path) -> Callable[[Configuration], TrialRecord]:
    def go(row: Configuration, profiles: Sequence[ProfileName] = ()) -> TrialRecord:
        disk, folder = tmp_path / "disk", tmp_path / "trial"
        disk.mkdir()
        folder.mkdir()
        asked = Inspection(checkpoint=True, checkpoint_path=str(disk), profiles=tuple(profiles))
        on_disk = {"nvme_path": str(tmp_path)} if row.uses_nvme else {}
        trial = replace(make_trial(row, workload=WORKLOAD, **on_disk), inspection=asked)
        record = server(SHORT).launch(trial, folder, lambda _progress: None)
        assert record.outcome.success, record.outcome
        assert list(disk.iterdir()) == []
        return record

    return go


@pytest.mark.parametrize(
    ("row", "bytes_each"),
    [
        (fakes.zero(0), 14),
        (fakes.zero(3), 12),  # its 16-bit weights are not saved, as they follow from the fp32 ones
        (fakes.offload("cpu_optimizer", 2), 14),
        (fakes.reference("fsdp2"), 12),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_checkpoint_has_all_states_and_restores_them(
    row: Configuration, bytes_each: int, train: Callable[[Configuration], TrialRecord]
) -> None:
    record = train(row)
    first = record.ranks[0]
    assert first.checkpoint.keys() == {"save", "load", "model_16bit"}
    assert [action.not_done for action in first.checkpoint.values()] == [None] * 3
    close = 0.35 if row.is_reference else 0.05  # torch's functions save tied weights twice
    for name, each in (("save", bytes_each), ("model_16bit", 2)):
        assert first.checkpoint[name].written_bytes == pytest.approx(each * first.parameter_count, rel=close)
    # Where every rank holds all weights, only the first answers for them.
    assert [rank.checkpoint_restored for rank in record.ranks] == [
        True, None if row.name == "zero0" else True
    ]  # fmt: skip
    for rank in record.ranks:
        assert (rank.checkpoint["save"].seconds or 0) > 0
        assert (rank.checkpoint["load"].memory.host_peak_bytes or 0) > 0
        assert rank.repeated_loss is not None


def test_states_too_small_for_the_disk_are_not_restored_and_the_note_says_why(
    server: Callable[[Limits], WarmLauncher], tmp_path: Path
) -> None:
    folder = tmp_path / "trial"
    folder.mkdir()
    trial = make_trial(fakes.offload("nvme"), nvme_path=str(tmp_path))
    asked = Inspection(checkpoint=True, checkpoint_path=str(tmp_path))
    record = server(SHORT).launch(replace(trial, inspection=asked), folder, lambda _progress: None)
    assert record.outcome.success, record.outcome
    first = record.ranks[0]
    assert first.checkpoint_restored is False
    assert any("too small to be swapped" in note for note in first.notes)


@pytest.mark.parametrize("row", [fakes.offload("nvme", 3)], ids=lambda row: row.name)
def test_profilers_run_after_the_checkpoint_whose_memory_they_leave_alone(
    row: Configuration, train: Callable[..., TrialRecord]
) -> None:
    """What profilers keep in the process is more than a checkpoint of this model takes."""
    record = train(row, profiles=("torch", "memory"))
    for rank in record.ranks:
        assert not [action for action in rank.checkpoint.values() if action.not_done]
        assert rank.checkpoint_restored
        assert rank.weight_change
        steady = rank.phase_memory["steady"].host_peak_bytes or 0
        for name in ("save", "load", "model_16bit"):
            assert 0 < (rank.checkpoint[name].memory.host_peak_bytes or 0) < steady + 50 * 2**20
        # With parameters on a disk, DeepSpeed fails in a step after a forward pass without a backward pass.
        assert rank.repeated_loss is None
    assert [profile.name for profile in record.ranks[0].profiles] == ["torch", "memory"]
