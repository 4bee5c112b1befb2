"""When a caveat of one trial holds and when it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_bench.analysis.row import Run, make_run
from ds_bench.config.caveats import Caveat, CaveatKind
from tests.support import fakes
from tests.support.runs import CUDA, run_of, seen

GB = 2**30
K = CaveatKind
BUFFERS = {"parameters": 1, "deepspeed_buffers": 9}
SOUND = {"parameters": 900, "deepspeed_buffers": 1}


def kinds(found: Run) -> list[CaveatKind]:
    return [caveat.kind for caveat in found.caveats]


def test_a_caveat_holds_from_its_limit_on(subtests: pytest.Subtests) -> None:
    """95 % of 80 GB are 76: 74 reserved and 2 outside the allocator. 0.13 next to 0.1 varies by 13 %, 0.105 by 2 %."""
    outlier = [0.10, 0.14, 0.12, 0.16, 0.10, 0.14, 0.12, 0.16]  # quartiles 0.12 and 0.16: the fence is 0.28
    unstable = K.UNSTABLE_STEPS
    cases: list[tuple[dict[str, Any], list[CaveatKind]]] = [
        ({}, []),
        ({"step_seconds": [0.1, 0.105] * 5}, []),
        ({"step_seconds": [0.1, 0.13] * 5}, [unstable]),
        ({"step_seconds": [0.1] * 5 + [0.104] * 5}, []),
        ({"step_seconds": [0.1] * 5 + [0.094] * 5}, [K.NOT_STEADY]),
        ({"step_seconds": [0.1] * 5 + [0.106] * 5}, [K.NOT_STEADY]),
        ({"step_seconds": [0.1] * 9 + [0.5]}, [unstable, K.OUTLIERS]),
        ({"step_seconds": [*outlier, 0.27]}, [unstable]),
        ({"step_seconds": [*outlier, 0.29]}, [unstable, K.OUTLIERS]),
        ({"step_seconds": [0.1] * 6 + [0.9]}, [unstable]),
        ({"step_seconds": [0.1] * 19 + [0.124]}, [unstable]),
        ({"step_seconds": [0.1] * 19 + [0.01]}, [unstable]),
        ({"step_seconds": [0.1, 0.2, 0.3]}, [unstable]),
        ({"step_seconds": [0.1]}, []),
        ({"skipped_steps": 9}, [K.STEPS_SKIPPED]),
        ({"skipped_steps": 10}, [K.ALL_STEPS_SKIPPED]),
        ({"losses": (7.0, None)}, [K.LOSS_NOT_FINITE]),
        ({"micro_batch_size": 8}, [K.BATCH_MISMATCH]),
        ({"gpu_alloc_retries": 1}, [K.ALLOCATOR_RETRIED]),
        ({"gpu_peak_reserved_bytes": 74 * GB}, []),
        ({"gpu_peak_reserved_bytes": int(74.1 * GB)}, [K.NEAR_CAPACITY]),
        ({"ledger": {"gpu": {"parameters": 51, "deepspeed_buffers": 49}}}, []),
        ({"ledger": {"gpu": {"parameters": 49, "deepspeed_buffers": 51}}}, [K.BUCKET_DOMINATES]),
        ({"ledger": {"gpu": SOUND, "cpu": BUFFERS}}, []),
        ({"ledger": {"gpu": BUFFERS, "cpu": SOUND}}, [K.BUCKET_DOMINATES]),
        ({"ledger": {"nvme": BUFFERS}}, []),
        ({"notes": ("no smaps", Caveat(K.OWN_BATCHES, {"seq_length": 8}))}, [K.NOTE, K.OWN_BATCHES]),
    ]
    for changes, expected in cases:
        with subtests.test(changes=changes):
            rank = seen(**changes)
            # Of short windows the spread and the halves are judged alike; steps are what is varied here.
            found = kinds(run_of(rank))
            assert [kind for kind in found if kind is not K.NOT_STEADY or kind in expected] == expected


def test_the_slowest_three_outliers_are_named() -> None:
    """More than three quarters take 0.10 s, so both quartiles do, and the fence is 1.25 × 0.10."""
    steps = [0.1] * 24
    for place, slow in ((2, 0.31), (5, 0.2), (8, 0.5), (11, 0.15), (19, 0.13)):
        steps[place] = slow
    (caveat,) = (each for each in run_of(seen(step_seconds=steps)).caveats if each.kind is K.OUTLIERS)
    assert caveat.values == {
        "count": 5,
        "steps": 24,
        "slowest": "step 9 (5.00x the median), step 3 (3.10x the median), step 6 (2.00x the median), 2 more",
    }


def test_any_rank_can_have_the_caveat_and_what_ranks_report_is_said_once() -> None:
    found = run_of(seen(notes=("no smaps",), losses=(5.0, 5.0)), seen(gpu_alloc_retries=2, notes=("no smaps",)))
    assert kinds(found).count(K.ALLOCATOR_RETRIED) == 1
    assert kinds(found).count(K.NOTE) == 1
    assert run_of(seen(losses=(7.0, None)), seen(losses=(5.0, 5.0))).losses == (6.0, None)


def test_what_was_known_before_the_trial_comes_first() -> None:
    offload = Caveat(K.OTHER_OFFLOAD, {"part": "optimizer", "used": "none", "named": "cpu"})
    entry = replace(fakes.success(fakes.trial(on=CUDA), skipped_steps=1), caveats=("known before", offload))
    assert kinds(make_run(entry)) == [K.NOTE, K.OTHER_OFFLOAD, K.STEPS_SKIPPED]


def test_buffers_are_weighed_on_the_fullest_rank() -> None:
    small, full = {"gpu": {name: 1000 * size for name, size in BUFFERS.items()}}, {"gpu": {"parameters": 10**6}}
    large = {"gpu": {name: 10**6 * size for name, size in BUFFERS.items()}}
    for one, other, said in ((small, full, False), (full, small, False), (large, full, True), (full, large, True)):
        assert (K.BUCKET_DOMINATES in kinds(run_of(seen(ledger=one), seen(ledger=other)))) is said


@pytest.mark.parametrize(("size", "said"), [(50_000_000, False), (50_000_001, True), (5e8, True)])
def test_a_bucket_that_is_small_already_is_not_told_to_be_raised(size: float, said: bool) -> None:
    plain = fakes.trial(fakes.zero(2), on=CUDA)
    config = {**plain.ds_config, "zero_optimization": {"stage": 2, "reduce_bucket_size": size}}
    found = make_run(fakes.success(replace(plain, ds_config=config), ledger={"gpu": BUFFERS}), None, None)
    assert (K.BUCKET_DOMINATES in kinds(found)) is said


@pytest.mark.parametrize(("resident", "kind"), [(5, K.BUCKET_NOT_RESIDENT), (10, K.BUCKET_DOMINATES)])
def test_on_the_cpu_accelerator_buffers_count_as_far_as_they_are_resident(resident: int, kind: CaveatKind) -> None:
    found = make_run(fakes.success(ledger={"cpu": BUFFERS}, host_peak_bytes=resident), None, None)
    assert kind in kinds(found)


def test_an_optimizer_of_another_family_rules_the_row_out(subtests: pytest.Subtests) -> None:
    for asked, used, said in (
        ("AdamW", "FusedAdam", False),
        ("AdamW", "ZenFlowCPUAdam", False),
        ("Lion", "DeepSpeedCPULion", False),
        ("Lion", "AdamW", True),
        ("Adagrad", "DeepSpeedCPUAdagrad", False),
        ("Adagrad", "Adam", True),
        ("Adam", "Adagrad", True),
        ("Muon", "MuonWithAuxAdam", False),
        ("AdamW", "MuonWithAuxAdam", True),
        ("OneBitAdam", "OnebitAdam", False),
        ("somebody.Own", "Own", False),
        ("AdamW", "Own", False),
        (None, "SGD", False),
    ):
        with subtests.test(asked=asked, used=used):
            plain = fakes.trial(on=CUDA)
            config = {name: value for name, value in plain.ds_config.items() if name != "optimizer"}
            if asked is not None:
                config["optimizer"] = {"type": asked, "params": {}}
            found = make_run(fakes.success(replace(plain, ds_config=config), optimizer_class=used), None, None)
            assert (K.OTHER_OPTIMIZER in kinds(found)) is said


def test_nvme_offload_that_swapped_nothing_or_reached_no_disk_is_found(subtests: pytest.Subtests) -> None:
    for stored, moved, parameters, expected in (
        (0, 0, 1, [K.NOTHING_SWAPPED]),
        (None, 0, 1, [K.NOTHING_SWAPPED]),
        (GB, 0, 1, [K.NOTHING_REACHED_DISK]),
        (GB, 1, 0, [K.PARAMETERS_NOT_SWAPPED]),
        (GB, 1, 1, []),
    ):
        for name in ("nvme", "mine"):
            with subtests.test(stored=stored, moved=moved, parameters=parameters, name=name):
                trial = fakes.trial(replace(fakes.offload("nvme"), name=name), on=replace(CUDA, nvme_path="/d"))
                ledger = {"nvme": {"parameters": parameters, "optimizer_states": 1}}
                moves = {"nvme_stored_bytes": stored, "nvme_read_bytes": moved, "nvme_written_bytes": moved}
                assert kinds(make_run(fakes.success(trial, ledger=ledger, **moves), None, None)) == expected
    assert kinds(run_of(seen(nvme_stored_bytes=None))) == []


def test_caveats_of_the_workload_of_waiting_for_data_and_of_the_first_loss() -> None:
    """ln(1000) is 6.9, and half of it is allowed on top."""
    for workload, measured, expected in (
        ({"synchronized": False}, {}, [K.NOT_SYNCHRONIZED]),
        ({"warmup_steps": 0}, {}, [K.NO_WARM_UP]),
        ({"num_steps": 1}, {}, [K.ONE_STEP]),
        ({}, {"data_wait_seconds": 0.0049}, []),
        ({}, {"data_wait_seconds": 0.0051}, [K.DATA_WAIT]),
        ({}, {"vocabulary_size": 1000, "losses": (10.3, 6.0)}, []),
        ({}, {"vocabulary_size": 1000, "losses": (10.4, 6.0)}, [K.FIRST_LOSS]),
        ({}, {"vocabulary_size": 1000, "losses": (13.9, 6.0)}, [K.FIRST_LOSS_FAR]),
        ({}, {"weight_change": (0.0, 0.0)}, [K.DOES_NOT_TRAIN]),
        ({}, {"frozen_weights_changed": True}, [K.FROZEN_WEIGHTS_CHANGED]),
    ):
        trial = fakes.trial(on=CUDA, of=fakes.workload(**workload))
        assert kinds(make_run(fakes.success(trial, **measured))) == expected, (workload, measured)
