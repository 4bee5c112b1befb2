"""Parts of a step's time in real ranks: CPU Adam, the disk, communication."""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis.step_costs import step_costs, step_parts
from ds_bench.config.spec import Configuration, Trial
from ds_bench.models.presets import ModelFacts
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.built_models import facts_from_config
from tests.support.real_trials import Launch, make_trial

pytestmark = pytest.mark.deepspeed


@cache
def wide() -> ModelFacts:
    """A model so wide that the parts of two ranks are large enough to be swapped."""
    return facts_from_config("wide", "gpt2", {**fakes.preset("tiny").config, "n_embd": 512, "n_layer": 2})


def wide_trial(row: Configuration, **changes: Any) -> Trial:
    workload = fakes.workload(
        model="wide",
        model_source="preset",
        model_type="gpt2",
        model_config=wide().config,
        batch_size=1,
        seq_length=32,
        num_steps=2,
        warmup_steps=1,
    )
    return make_trial(row, workload=workload, largest_parameter=wide().largest_parameter, **changes)


def trained(record: TrialRecord) -> TrialRecord:
    assert record.outcome.success, record.outcome.details
    assert record.caveats == ()
    return record


def test_cpu_adam_moves_28_bytes_for_each_parameter_in_fp32(launch: Launch) -> None:
    record = trained(launch(wide_trial(fakes.offload("cpu_optimizer", 2))))
    moved = sum(rank.offload.cpu_adam_bytes or 0 for rank in record.ranks if rank.offload is not None)
    assert moved == pytest.approx(28 * wide().parameters, rel=0.01)  # partitions are padded
    for rank in record.ranks:
        assert rank.offload is not None
        assert 0 < (rank.offload.cpu_adam_seconds or 0) < rank.phase_seconds["step"]
        assert rank.offload.disk_wait_seconds is None
    speed = step_costs(record).cpu_adam_bytes_per_second
    assert speed is not None
    assert 1e8 < speed < 1e12


@pytest.mark.nvme
def test_swapped_bytes_and_the_time_that_training_waits_for_them(launch: Launch, tmp_path: Path) -> None:
    """The bytes asked for are those that the kernel counted in the measured steps."""
    disk = tmp_path / "disk"
    disk.mkdir()
    record = trained(launch(wide_trial(fakes.offload("nvme"), nvme_path=str(disk), num_gpus=1)))
    for rank in record.ranks:
        times = rank.offload
        assert times is not None
        assert times.disk_read_bytes == pytest.approx((rank.nvme_read_bytes or 0) / 2, rel=0.02)
        assert times.disk_written_bytes == pytest.approx((rank.nvme_written_bytes or 0) / 2, rel=0.02)
        assert 0 < (times.disk_wait_seconds or 0) <= (times.disk_busy_seconds or 0) * 1.05
        assert rank.step_parts["transfer"] == times.disk_wait_seconds
        assert sum(rank.step_parts.values()) == pytest.approx(sum(rank.phase_seconds.values()))
    costs = step_costs(record)
    assert costs.disk_needed_bytes_per_second is not None
    assert costs.disk_measured_bytes_per_second is not None
    wait = step_parts(record.ranks)["transfer"]
    assert costs.disk_bound is (
        wait > statistics.fmean(sum(rank.phase_seconds.values()) - wait for rank in record.ranks)
    )


REDUCED_TO_OWNERS = {"zero_optimization": {"use_multi_rank_bucket_allreduce": False}}
NOTHING_KEPT = {"zero_optimization": {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}}
VOLUMES = (
    (1, {}, 3, 0),
    (2, REDUCED_TO_OWNERS, 2, 0),
    (3, {}, 2, 0),
    (3, NOTHING_KEPT, 3, 2),
)
"""ZeRO stage, changes of its configuration, bytes of all collectives of a step in multiples of the parameters' and of
the shared embedding's.

Rajbhandari et al., "ZeRO" (2020), section 7, say 2 for stages 0 to 2 and 3 for stage 3. DeepSpeed 0.19.8 by default
all-reduces each bucket at stages 1 and 2, which the paper reduces to its owner, before it gathers parameters; and at
stage 3 it keeps up to a billion gathered parameters for the backward pass, which a small model does not exceed. Where
it keeps none, the embedding that is the output layer too is gathered for each use."""


@pytest.mark.slow
def test_communication_has_the_volume_of_the_stages_formula(launch: Launch) -> None:
    shared = wide().vocabulary_size * wide().hidden_size
    for stage, changes, of_all, of_embedding in VOLUMES:
        row = wide_trial(fakes.zero(stage), changes=changes)
        record = trained(launch(row))
        costs = step_costs(record)
        volume = of_all * wide().parameters + of_embedding * shared
        for rank in record.ranks:
            assert rank.communication
            assert rank.offload is None
            assert rank.step_parts.keys() == {*rank.phase_seconds, "communication"}
            assert rank.step_parts["communication"] == pytest.approx(sum(each.seconds for each in rank.communication))
            for each in rank.communication:
                assert each.wait_seconds is not None
                assert 0 <= each.wait_seconds < each.seconds
        assert costs.disk_bound is None
        assert costs.communication_bytes == pytest.approx(2 * volume, rel=0.02), stage
