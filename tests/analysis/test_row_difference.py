"""Why two rows differ: categories sum to the difference, measured overrides predicted, noise decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ds_bench.analysis import load_results
from ds_bench.analysis.comparison import ComparisonRow, compare
from ds_bench.analysis.row import make_run
from ds_bench.analysis.row_difference import ACTS_ON, REST, KeyDifference, RowDifference, TierDifference, explain
from ds_bench.config.axes import AXES
from ds_bench.config.spec import Configuration, Trial
from ds_bench.prediction import trial_predictions
from ds_bench.prediction.model_profile import find_profile
from ds_bench.prediction.trial_predictions import MemoryCapacity
from ds_bench.records import schema
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.real_trials import ROOT

GB = fakes.GB
CARDS = fakes.placement(accelerator="cuda", num_gpus=2)
WITH_RUN_FOLDER = [
    ROOT / "tests/data/zero_run/runs/zero_20261121_093000",
    ROOT / "tests/data/offload_run/runs/offload_20261122_093000",
]
FLAT = ROOT / "results/reference/cpu_2cores_2026-11-21/zero_comparison_20261121_154122.json"


def gigabytes(**sizes: float) -> dict[str, int]:
    return {name: int(size * GB) for name, size in sizes.items()}


def predicted(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The records with the predictions of their trials, made as before a run."""
    facts = fakes.preset("tiny")
    profile = find_profile(facts, records[0].trial.workload.seq_length)
    trials = trial_predictions.attach_predictions(
        [record.trial for record in records], profile, MemoryCapacity(gpu_bytes=None, host_bytes=None), skip=False
    )
    completed = [
        trial_predictions.with_savings(each, profile, facts.hidden_size, lacked_memory=False) for each in trials
    ]
    return [replace(record, trial=trial) for record, trial in zip(records, completed, strict=True)]


def on_cards(stage: int, **zero_changes: Any) -> Trial:
    """A trial on two cards with changed keys in ``zero_optimization``."""
    trial = fakes.trial(fakes.zero(stage), on=CARDS)
    block = {**trial.ds_config["zero_optimization"], **zero_changes}
    return replace(trial, ds_config={**trial.ds_config, "zero_optimization": block})


def runs(configuration: Configuration, *seconds: float, **values: Any) -> list[TrialRecord]:
    return [
        fakes.success(fakes.trial(configuration, on=CARDS, repeat=number), step_seconds=(step,) * 10, **values)
        for number, step in enumerate(seconds)
    ]


def rows(*records: TrialRecord) -> tuple[ComparisonRow, ...]:
    return compare([make_run(record) for record in records], environments=[fakes.environment()]).rows


def explained(*records: TrialRecord) -> RowDifference:
    a, b = rows(*records)
    return explain(a, b)


def keys(*records: TrialRecord) -> dict[str, KeyDifference]:
    return {key.path: key for key in explained(*records).keys}


def tier(difference: RowDifference, name: str, moment: str = "peak") -> TierDifference:
    return next(each for each in difference.memory if (each.tier, each.moment) == (name, moment))


def by_category(of: TierDifference) -> dict[str, int]:
    return {each.category: each.difference_bytes for each in of.categories}


# ------------------------------------------------------------------ memory


def test_a_higher_stage_is_split_into_what_grew_and_what_shrank() -> None:
    """ZeRO-3 against ZeRO-2, which keeps less between steps and takes more at the peak."""
    two = gigabytes(parameters=12.5, gradients=12.5, optimizer_states=19, activations=6)
    three = gigabytes(parameters=6.25, gradients=6.25, optimizer_states=19, activations=6, deepspeed_buffers=1)
    sizes = [
        {"gpu_peak_bytes": 52 * GB, "gpu_allocated_bytes": 45 * GB},
        {"gpu_peak_bytes": 56 * GB, "gpu_allocated_bytes": 25 * GB},
    ]
    records = [
        *runs(fakes.zero(2), 0.2, ledger={"gpu": two}, ledger_after_step={"gpu": two}, **sizes[0]),
        *runs(fakes.zero(3), 0.3, ledger={"gpu": three}, ledger_after_step={"gpu": three}, **sizes[1]),
    ]
    difference = explained(*predicted(records))
    peak, after, host = tier(difference, "gpu"), tier(difference, "gpu", "after_step"), tier(difference, "cpu")
    changes = gigabytes(parameters=-6.25, gradients=-6.25, optimizer_states=0, activations=0, deepspeed_buffers=1)
    assert by_category(peak) == {**changes, REST: int(15.5 * GB)}
    assert by_category(after) == {**changes, REST: int(-8.5 * GB)}
    assert [each.b_bytes for each in (peak, after, host)] == [56 * GB, 25 * GB, difference.b.host_peak_bytes]
    assert {each.category for each in peak.uncounted} == {
        "attention_gradient",
        "gathered_parameters",
        "logits_and_loss",
        "workspaces",
    }
    assert difference.larger is difference.b is explain(difference.b, difference.a).larger
    (saving,) = difference.savings  # predicted for the larger row
    assert (saving.name, saving.gpu_bytes) == ("small_buffers", pytest.approx(2 * 5e8, rel=0.05))


@pytest.mark.parametrize("path", WITH_RUN_FOLDER, ids=lambda path: path.name)
def test_categories_sum_to_the_total_of_the_run_in_every_result(path: Any) -> None:
    found = compare(load_results.load(path).runs).rows
    for a in found:
        for b in found:
            for each in explain(a, b).memory:
                assert sum(by_category(each).values()) == each.difference_bytes
                if each.tier == "cpu" and b.succeeded and not each.predicted:
                    of_runs = ((rank.ledger["cpu"].values() for rank in run.ranks) for run in b.successes)
                    assert each.b_bytes == max(sum(map(sum, ledgers)) for ledgers in of_runs)
    if path.name.startswith("offload"):  # the run made predictions, whose form may have changed since
        assert all(trial_predictions.stored_prediction(row.trial) for row in found)


def test_a_row_that_ran_out_of_memory_is_compared_by_predictions_of_both() -> None:
    failed = fakes.failure(fakes.trial(fakes.zero(0), on=CARDS), requested_bytes=2 * GB, free_bytes=GB)
    records = predicted([failed, *runs(fakes.zero(3), 0.1)])
    difference = explained(*records)
    assert explained(failed, records[1]).main is None
    assert difference.time is None
    assert difference.main is not None
    assert difference.main.predicted
    assert {"activations", "overhead"} <= by_category(difference.main).keys()
    assert difference.larger is difference.b  # buckets of 5e8 elements, whatever the model


def test_what_a_result_does_not_hold_is_named() -> None:
    a, b, *_ = compare(load_results.load(FLAT).runs).rows
    difference = explain(a, b)
    assert {key.path for key in difference.keys} == {"zero_optimization.stage"}
    assert set(difference.unknown) == {
        "the DeepSpeed configurations",
        "predictions",
        "memory by category",
        "memory between steps",
    }
    failed = explained(*(fakes.failure(fakes.trial(fakes.zero(stage), on=CARDS), schema.TIMEOUT) for stage in (0, 1)))
    assert (failed.memory, failed.time, failed.savings, failed.unknown) == ((), None, (), ("predictions",))


def test_flat_rows_of_gpus_differ_by_their_host_memory() -> None:
    """Two ranks of 1 GB against two of 3 GB, on one node."""
    trials = fakes.trial(fakes.zero(2), on=CARDS), fakes.trial(fakes.offload("cpu_full"), on=CARDS)
    records = [fakes.success(each, host_peak_bytes=size * GB) for each, size in zip(trials, (1, 3), strict=True)]
    a, b = compare([load_results.flat_run(make_run(record).row) for record in records]).rows
    (host,) = (tier for tier in explain(a, b).memory if tier.tier == "cpu")
    assert (host.scope, host.difference_bytes) == ("fullest node", 4 * GB)


# ------------------------------------------------------------------ time


def test_noise_decides_nothing(subtests: pytest.Subtests) -> None:
    for count, spread, verdict in ((1, 0.0, None), (3, 0.0, True), (3, 0.5, False)):
        with subtests.test(count=count, spread=spread):
            ours, theirs = ([size * (1 + spread * step) for step in (-1, 0, 1)][:count] for size in (0.2, 0.22))
            time = explained(*runs(fakes.zero(1), *ours), *runs(fakes.zero(2), *theirs[::-1])).time
            assert time is not None
            assert not time.incomparable_reasons
            assert verdict == (None if time.interval is None else time.interval.distinguishable)


def test_rows_on_different_hardware_have_no_ratio_and_say_what_differs() -> None:
    records = [*runs(fakes.zero(1), 0.1), *runs(fakes.zero(2), 0.1)]
    machines = [fakes.environment(), fakes.environment(logical_cores=8)]
    a, b = (
        compare([make_run(record, environment=on)], environments=[on]).rows[0]
        for record, on in zip(records, machines, strict=True)
    )
    difference = explain(a, b)
    assert difference.time is not None
    assert difference.environment_differences == difference.time.incomparable_reasons == ("logical cores 16 vs 8",)


# ------------------------------------------------------------------ configuration


def test_keys_say_what_they_act_on_and_whether_the_stage_sets_them() -> None:
    small = on_cards(3, reduce_bucket_size=5_000_000)
    found = keys(*runs(fakes.zero(2), 0.1), fakes.success(small))
    bucket, prefetch = (
        found[f"zero_optimization.{name}"] for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size")
    )
    assert (bucket.from_layout, "deepspeed_buffers" in bucket.acts_on) == (False, True)
    assert (prefetch.a, prefetch.b, prefetch.from_layout) == (None, 50_000_000, True)
    assert "gathered_parameters" in prefetch.acts_on
    checkpointed = replace(small, workload=replace(small.workload, activation_checkpointing=True))
    plain = keys(fakes.success(small), fakes.success(checkpointed))
    assert {name: key.acts_on for name, key in plain.items()} == {
        "activation_checkpointing": ("activations", "backward")
    }


def test_a_key_that_a_rows_stage_does_not_read_is_no_difference() -> None:
    """Stage 3 orders gradients in its own way, whatever ``round_robin_gradients`` says; stages 1 and 2 read it."""
    for stage, told in ((3, False), (1, True)):
        found = keys(fakes.success(on_cards(2)), fakes.success(on_cards(stage, round_robin_gradients=True)))
        assert ("zero_optimization.round_robin_gradients" in found) is told
    alike = keys(*(fakes.success(on_cards(stage, allgather_bucket_size=200_000_000)) for stage in (1, 3)))
    assert "zero_optimization.allgather_bucket_size" not in alike


def test_keys_act_on_what_their_axes_say_they_change() -> None:
    ledger = {"parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations"}
    for axis in AXES.values():
        for key in (*axis.keys, *axis.fields) if len(axis.keys) + len(axis.fields) == 1 else ():
            if key in ACTS_ON:
                assert ledger & {*axis.changes} == ledger & {*ACTS_ON[key]}, key


def test_a_key_that_both_engines_resolved_alike_is_no_difference_and_a_different_engine_is_one() -> None:
    resolved = {"zero_config": {"stage": 2, "overlap_comm": False}}
    silent = on_cards(2)
    block = {key: value for key, value in silent.ds_config["zero_optimization"].items() if key != "overlap_comm"}
    silent = replace(silent, ds_config={**silent.ds_config, "zero_optimization": block})
    records = [fakes.success(each, resolved_config=resolved) for each in (on_cards(2), silent)]
    assert keys(*records) == {}
    of_torch = fakes.trial(fakes.reference("ddp"), on=CARDS)
    engine = keys(fakes.success(on_cards(0)), fakes.success(of_torch, resolved_config={"engine": "DdpEngine"}))[
        "engine"
    ]
    assert (engine.a, engine.b) == ("deepspeed", "ddp")
