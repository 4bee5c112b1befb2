"""Why two rows differ: categories sum to the difference, measured goes before predicted, noise decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis import load_results
from ds_bench.analysis.comparison import ComparisonRow, compare
from ds_bench.analysis.row import make_run
from ds_bench.analysis.row_difference import (
    ACTS_ON,
    REST,
    KeyDifference,
    RowDifference,
    TierDifference,
    explain,
    ledger_of_tier,
)
from ds_bench.config.axes import AXES
from ds_bench.config.spec import Configuration
from ds_bench.prediction import trial_predictions
from ds_bench.prediction.model_profile import find_profile
from ds_bench.prediction.trial_predictions import MemoryCapacity
from ds_bench.records import schema
from ds_bench.records.schema import TrialRecord
from tests.support import fakes

GB = fakes.GB
DATA = Path(__file__).resolve().parents[1] / "data"
ROOT = Path(__file__).resolve().parents[2]
BUCKET = {"deepspeed_buffers": 10**9}
CARDS = fakes.placement(accelerator="cuda", num_gpus=2)
WITH_RUN_FOLDER = (
    DATA / "zero_run/runs/zero_20261121_093000",
    DATA / "offload_run/runs/offload_20261122_093000",
)
FLAT = ROOT / "results/reference/cpu_2cores_2026-11-21/zero_comparison_20261121_154122.json"


def gigabytes(**sizes: float) -> dict[str, int]:
    return {name: int(size * GB) for name, size in sizes.items()}


def predicted(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The records with the predictions of their trials, made as before a run."""
    facts = fakes.resolved_model().facts
    assert facts is not None
    profile = find_profile(facts, records[0].trial.workload.seq_length)
    trials = trial_predictions.attach_predictions(
        [record.trial for record in records], profile, MemoryCapacity(gpu_bytes=None, host_bytes=None), skip=False
    )
    completed = []
    for trial in trials:
        changes = trial_predictions.predict_changes(trial, profile, facts.hidden_size)
        completed.append(replace(trial, prediction={**(trial.prediction or {}), **changes}))
    return [replace(record, trial=trial) for record, trial in zip(records, completed, strict=True)]


def runs(configuration: Configuration, *seconds: float, **values: Any) -> list[TrialRecord]:
    return [
        fakes.success(fakes.trial(configuration, on=CARDS, repeat=number), step_seconds=(step,) * 10, **values)
        for number, step in enumerate(seconds)
    ]


def rows(*records: TrialRecord) -> tuple[ComparisonRow, ...]:
    return compare([make_run(record) for record in records], environments=[fakes.environment()]).rows


def higher_stage(*, count: int = 1) -> RowDifference:
    """ZeRO-3 against ZeRO-2, which keeps less between steps and takes more at the peak."""
    two = runs(
        fakes.zero(2),
        *(0.2, 0.201, 0.199)[:count],
        gpu_peak_bytes=int(52.4 * GB),
        gpu_allocated_bytes=int(45.5 * GB),
        ledger={"gpu": gigabytes(parameters=12.6, gradients=12.6, optimizer_states=19, activations=6)},
        ledger_after_step={"gpu": gigabytes(parameters=12.6, optimizer_states=32.5)},
    )
    three = runs(
        fakes.zero(3),
        *(0.3, 0.301, 0.299)[:count],
        gpu_peak_bytes=int(56.1 * GB),
        gpu_allocated_bytes=int(25.3 * GB),
        ledger={
            "gpu": gigabytes(parameters=6.3, gradients=6.3, optimizer_states=19, activations=6, deepspeed_buffers=1)
        },
        ledger_after_step={"gpu": gigabytes(parameters=6.3, optimizer_states=18) | BUCKET},
    )
    a, b = rows(*predicted([*two, *three]))
    return explain(a, b)


def tier(difference: RowDifference, name: str, moment: str = "peak") -> TierDifference:
    return next(each for each in difference.memory if (each.tier, each.moment) == (name, moment))


def by_category(of: TierDifference) -> dict[str, int]:
    return {each.category: each.difference_bytes for each in of.categories}


def keys(of: RowDifference) -> dict[str, KeyDifference]:
    return {key.path: key for key in of.keys}


def test_a_higher_stage_is_split_into_what_grew_and_what_shrank() -> None:
    difference = higher_stage()
    peak, after = tier(difference, "gpu"), tier(difference, "gpu", "after_step")
    assert peak.difference_bytes / GB == pytest.approx(3.7, abs=0.01)
    assert after.difference_bytes / GB == pytest.approx(-20.2, abs=0.01)
    assert by_category(peak)["parameters"] / GB == pytest.approx(-6.3, abs=0.01)
    assert by_category(peak)[REST] / GB == pytest.approx(15.3, abs=0.01)
    assert {each.category for each in peak.uncounted} == {"gathered_parameters", "logits_and_loss", "workspaces"}
    assert difference.larger is difference.b
    swapped = explain(difference.b, difference.a)
    assert swapped.larger is swapped.a


def test_categories_sum_to_the_total_of_the_run_in_every_result() -> None:
    checked = 0
    for path in WITH_RUN_FOLDER:
        found = compare(load_results.load(path).runs).rows
        for a in found:
            for b in found:
                difference = explain(a, b)
                for each in difference.memory:
                    assert sum(by_category(each).values()) == each.difference_bytes
                    if each.tier == "cpu" and b.succeeded and not each.predicted:
                        ledgers = [ledger_of_tier(run.ranks, "cpu") for run in b.successes]
                        assert each.b_bytes == max(ledger.total() for ledger in ledgers)
                        checked += 1
    assert checked > 10
    measured = higher_stage()
    assert tier(measured, "gpu").b_bytes == measured.b.gpu_peak_bytes
    assert tier(measured, "cpu").b_bytes == measured.b.host_peak_bytes
    assert tier(measured, "gpu", "after_step").b_bytes == int(25.3 * GB)


def test_a_row_that_ran_out_of_memory_is_held_by_predictions_of_both() -> None:
    failed = fakes.failure(fakes.trial(fakes.zero(0), on=CARDS), requested_bytes=2 * GB, free_bytes=GB)
    a, b = rows(*predicted([failed, *runs(fakes.zero(3), 0.1)]))
    difference = explain(a, b)
    assert difference.time is None
    main = difference.main
    assert main is not None
    assert main.predicted
    assert {"activations", "overhead"} <= by_category(main).keys()
    assert difference.larger is b  # buckets of 5e8 elements, whatever the model


def test_savings_are_those_predicted_for_the_larger_row() -> None:
    difference = higher_stage()
    assert [each.name for each in difference.savings] == ["small_buffers"]
    assert difference.savings[0].gpu_bytes / GB == pytest.approx(2 * 5e8 / GB, rel=0.05)


def test_noise_decides_nothing(subtests: pytest.Subtests) -> None:
    for count, spread, verdict in ((1, 0.0, None), (3, 0.0, True), (3, 0.5, False)):
        with subtests.test(count=count, spread=spread, verdict=verdict):
            seconds = [(0.2 * (1 + spread * step), 0.22 * (1 - spread * step)) for step in (-1, 0, 1)][:count]
            a, b = rows(*runs(fakes.zero(1), *(a for a, _ in seconds)), *runs(fakes.zero(2), *(b for _, b in seconds)))
            time = explain(a, b).time
            assert time is not None
            assert not time.incomparable_reasons
            assert verdict == (None if time.interval is None else time.interval.distinguishable)


def test_rows_of_other_hardware_have_no_ratio_and_say_what_differs() -> None:
    records = [*runs(fakes.zero(1), 0.1), *runs(fakes.zero(2), 0.1)]
    machines = [fakes.environment(), fakes.environment(logical_cores=8)]
    a, b = (
        compare([make_run(record, None, None, on)], environments=[on]).rows[0]
        for record, on in zip(records, machines, strict=True)
    )
    difference = explain(a, b)
    assert difference.environment_differences == ("logical cores 16 against 8",)
    assert difference.time is not None
    assert difference.time.incomparable_reasons == ("logical cores 16 against 8",)


def test_keys_say_what_they_act_on_and_whether_the_stage_sets_them() -> None:
    small = fakes.zero(3)
    small = replace(
        small,
        name="zero3_small",
        deepspeed_config={
            **small.deepspeed_config,
            "zero_optimization": {**small.deepspeed_config["zero_optimization"], "reduce_bucket_size": 5_000_000},
        },
    )
    trial = fakes.trial(small, on=CARDS)
    config = {**trial.ds_config, "zero_optimization": small.deepspeed_config["zero_optimization"]}
    records = [*runs(fakes.zero(2), 0.1), fakes.success(replace(trial, configuration=small, ds_config=config))]
    found = keys(explain(*rows(*records)))
    assert found["zero_optimization.reduce_bucket_size"].from_layout is False
    assert "deepspeed_buffers" in found["zero_optimization.reduce_bucket_size"].acts_on
    prefetch = found["zero_optimization.stage3_prefetch_bucket_size"]
    assert (prefetch.a, prefetch.b, prefetch.from_layout) == (None, 50_000_000, True)
    assert "gathered_parameters" in prefetch.acts_on


def test_a_key_that_a_rows_stage_does_not_read_is_no_difference() -> None:
    """Stage 3 orders gradients in its own way, whatever ``round_robin_gradients`` says; stages 1 and 2 read it."""
    for stages, told in (((2, 3), False), ((2, 1), True)):
        plain, other = (fakes.trial(fakes.zero(stage), on=CARDS) for stage in stages)
        block = {**other.ds_config["zero_optimization"], "round_robin_gradients": True}
        other = replace(other, ds_config={**other.ds_config, "zero_optimization": block})
        found = keys(explain(*rows(fakes.success(plain), fakes.success(other))))
        assert ("zero_optimization.round_robin_gradients" in found) is told


def test_what_lower_stages_alone_read_is_no_difference_where_it_is_set_alike() -> None:
    trials = []
    for stage in (1, 3):
        trial = fakes.trial(fakes.zero(stage), on=CARDS)
        block = {**trial.ds_config["zero_optimization"], "allgather_bucket_size": 200_000_000}
        trials.append(replace(trial, ds_config={**trial.ds_config, "zero_optimization": block}))
    assert "zero_optimization.allgather_bucket_size" not in keys(explain(*rows(*map(fakes.success, trials))))


def test_keys_act_on_what_their_axes_say_they_change() -> None:
    ledger = {"parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations"}
    for axis in AXES.values():
        for key in (*axis.keys, *axis.fields) if len(axis.keys) + len(axis.fields) == 1 else ():
            if key in ACTS_ON:
                assert ledger & {*axis.changes} == ledger & {*ACTS_ON[key]}, key


def test_a_key_that_both_engines_resolved_alike_is_no_difference() -> None:
    resolved = {"zero_config": {"stage": 2, "overlap_comm": False}}
    records = runs(fakes.zero(2), 0.1, resolved_config=resolved)
    silent = fakes.trial(fakes.zero(2), on=CARDS)
    block = {key: value for key, value in silent.ds_config["zero_optimization"].items() if key != "overlap_comm"}
    silent = replace(silent, ds_config={**silent.ds_config, "zero_optimization": block})
    a, b = rows(*records, fakes.success(silent, resolved_config=resolved))
    assert keys(explain(a, b)) == {}


def test_another_engine_is_one_difference() -> None:
    of_torch = fakes.trial(fakes.reference("ddp"), on=CARDS)
    of_deepspeed = fakes.trial(fakes.zero(2), on=CARDS)
    records = fakes.success(of_deepspeed), fakes.success(of_torch, resolved_config={"engine": "DdpEngine"})
    engines = [(key.a, key.b) for key in explain(*rows(*records)).keys if key.path == "engine"]
    assert engines == [("deepspeed", "ddp")]


def test_a_checkpointed_row_differs_by_its_workload() -> None:
    plain = fakes.trial(fakes.zero(2), on=CARDS)
    checkpointed = replace(plain, workload=replace(plain.workload, activation_checkpointing=True))
    found = keys(explain(*rows(fakes.success(plain), fakes.success(checkpointed))))
    assert found["activation_checkpointing"].acts_on == ("activations", "backward")


def test_what_a_flat_file_does_not_hold_is_named() -> None:
    a, b, *_ = compare(load_results.load(FLAT).runs).rows
    difference = explain(a, b)
    assert set(difference.unknown) == {
        "the DeepSpeed configurations",
        "predictions",
        "memory by category",
        "memory between steps",
    }
    assert set(keys(difference)) == {"zero_optimization.stage"}


def test_predictions_of_stored_records_are_read() -> None:
    """A change of their form makes every record's prediction unknown, without an error."""
    runs_on_disk = load_results.load(DATA / "offload_run/runs/offload_20261122_093000").runs
    assert all(trial_predictions.stored_prediction(run.trial) for run in runs_on_disk)


def test_flat_rows_of_gpus_differ_by_their_host_memory() -> None:
    """Two ranks of 1 GB against two of 3 GB, on one node."""
    trials = fakes.trial(fakes.zero(2), on=CARDS), fakes.trial(fakes.offload("cpu_full"), on=CARDS)
    records = [fakes.success(each, host_peak_bytes=size * GB) for each, size in zip(trials, (1, 3), strict=True)]
    flat = [load_results.flat_run(make_run(record).row) for record in records]
    (host,) = (tier for tier in explain(*compare(flat).rows).memory if tier.tier == "cpu")
    assert (host.scope, host.difference_bytes) == ("fullest node", 4 * GB)


def test_a_result_in_which_everything_failed_still_explains() -> None:
    records = [fakes.failure(fakes.trial(fakes.zero(stage), on=CARDS), schema.TIMEOUT) for stage in (0, 1)]
    difference = explain(*rows(*records))
    assert (difference.memory, difference.time, difference.savings) == ((), None, ())
    assert difference.unknown == ("predictions",)
