"""Which trials are one row, and which facts forbid a ratio."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.analysis import comparability
from ds_bench.analysis.comparability import group_repeats, unique_labels
from ds_bench.analysis.row import Run, make_run
from ds_bench.config.axes import PARALLEL_AXES
from ds_bench.config.identity import format_fact, role_of, row_key
from ds_bench.config.spec import SAME_TRAINING_FIELDS, Configuration, Placement, Trial, Workload
from ds_bench.records.schema import TrialRecord
from tests.support import fakes

CUDA = fakes.placement(accelerator="cuda", num_gpus=2)


def gpu(stage: int = 1, **changes: Any) -> Trial:
    return fakes.trial(fakes.zero(stage), on=changes.pop("on", CUDA), **changes)


def summaries(*records: TrialRecord) -> list[Run]:
    return [make_run(each) for each in records]


def incomparable_facts(*records: TrialRecord) -> list[str]:
    return [each.text for each in comparability.incomparable_facts(*summaries(*records))]


def between(a: Trial, b: Trial, **changes: Any) -> list[str]:
    return incomparable_facts(fakes.success(a), fakes.success(b, **changes))


# ------------------------------------------------------------------ runs of one row


def test_interleaved_repeats_are_one_row_each_in_order_of_appearance() -> None:
    records = [fakes.success(gpu(stage, repeat=repeat)) for repeat in (0, 1, 2) for stage in (3, 0)]
    groups = group_repeats(summaries(*records))
    assert [[run.trial.repeat for run in runs] for runs in groups.values()] == [[0, 1, 2]] * 2
    assert list(groups) == [row_key(records[0].trial), row_key(records[1].trial)]


def test_runs_of_one_row_on_different_cards_or_versions_are_never_mixed_into_a_mean() -> None:
    for changes in ({"device_name": "NVIDIA A100"}, {"torch_version": "2.11.0"}, {"deepspeed_version": "0.18.0"}):
        here, there = fakes.success(gpu()), fakes.success(gpu(repeat=1), **changes)
        failed = fakes.failure(gpu(repeat=2))  # measured nothing, so that it makes no row of its own
        for records in ((here, there, failed, here), (failed, here, there, here)):
            key = row_key(here.trial)
            groups = group_repeats(summaries(*records))
            assert {name: len(runs) for name, runs in groups.items()} == {key: 3, f"{key}-2": 1}, changes


def test_a_reference_engine_never_shares_a_row_with_the_stage_that_splits_alike(subtests: pytest.Subtests) -> None:
    """Their DeepSpeed configurations may be equal, down to the last key."""
    for engine, stage in (("ddp", 0), ("fsdp2", 3)):
        with subtests.test(engine):
            reference = fakes.trial(fakes.reference(engine), on=CUDA)
            same = replace(gpu(stage), ds_config=reference.ds_config)
            assert len(group_repeats(summaries(fakes.success(reference), fakes.success(same)))) == 2


# ------------------------------------------------------------------ what forbids a ratio

TWO_NODES: dict[str, Any] = {"hosts": (("a", 1), ("b", 1))}
COSMETIC = [each.name for each in fields(Placement) if role_of(each.name) == "cosmetic"]


def test_a_difference_in_the_workload_or_placement_is_named_once_with_both_values() -> None:
    ours = gpu().workload
    for name in (each.name for each in fields(Workload) if each.name not in ("model_config", "script")):
        theirs = fakes.with_another(ours, name)
        expected = f"{name} {format_fact(getattr(ours, name))} vs {format_fact(getattr(theirs, name))}"
        assert between(gpu(), gpu(of=theirs)) == [expected]
    for name in (each.name for each in fields(Placement) if each.name not in COSMETIC):
        found = incomparable_facts(fakes.success(gpu()), fakes.failure(gpu(on=fakes.with_another(CUDA, name))))
        assert [text.partition(" ")[0] for text in found] == [name]


def test_what_a_row_is_there_to_show_may_differ_and_nothing_else() -> None:
    """The strategy, how a step is computed, what an axis sets, the batch of a file, ranks that share their data."""
    assert between(gpu(0), gpu(3)) == []
    plain = fakes.zero(1)
    computed = [{name: getattr(fakes.with_another(fakes.workload(), name), name)} for name in SAME_TRAINING_FIELDS]
    batch = {"batch_size": 8, "grad_accum": 2}
    ran = {"micro_batch_size": 8, "grad_accum": 2}
    shared = {"data_parallel_size": 1}
    cases: list[tuple[Configuration, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        *((replace(plain, workload_changes=changes), changes, {}, {}) for changes in computed),
        (replace(plain, axis_values={"grad_accum": "2", "micro_batch": "8"}), batch, ran, {}),
        (replace(plain, source="file", workload_changes=batch), batch, ran, {}),
        *((replace(plain, axis_values={axis: "2"}), {}, shared, {}) for axis in PARALLEL_AXES),
        (replace(plain, source="file"), {}, shared, {"sequence_parallel_size": 2}),
    ]
    for configuration, workload, measured, config in cases:
        for length, expected in ((128, []), (256, ["seq_length 128 vs 256"])):
            trial = replace(gpu(of=fakes.workload(seq_length=length, **workload)), configuration=configuration)
            trial = replace(trial, ds_config={**trial.ds_config, **config})
            assert between(gpu(), trial, **measured) == expected, configuration
    assert between(gpu(), gpu(), **shared) == ["data_parallel_size 2 vs 1"]


def test_the_number_and_ranks_of_nodes_count_and_their_names_do_not() -> None:
    ours = fakes.success(gpu(on=replace(CUDA, **TWO_NODES)))
    elsewhere = replace(CUDA, hosts=(("c", 1), ("d", 1)))
    for name in {*COSMETIC} - {"hosts"}:
        elsewhere = fakes.with_another(elsewhere, name)
    for on, expected in ((elsewhere, []), (replace(CUDA, hosts=(("a", 3), ("b", 1))), ["ranks_of_nodes"])):
        theirs = fakes.failure(gpu(on=on))
        assert [text.partition(" ")[0] for text in incomparable_facts(ours, theirs)] == expected
    assert incomparable_facts(fakes.success(gpu()), ours) == ["num_nodes 1 vs 2"]


def test_only_the_facts_in_which_two_models_differ_are_named() -> None:
    ours = fakes.workload(model_config={"n_layer": 2, "n_embd": 64, "rope": {"theta": 1}})
    theirs = fakes.workload(model_config={"n_layer": 4, "n_embd": 64, "rope": {"theta": 2}, "bias": False})
    assert between(gpu(of=ours), gpu(of=theirs)) == [
        "model_config.n_layer 2 vs 4",
        "model_config.rope.theta 1 vs 2",
        "model_config.bias unset vs false",
    ]


def test_a_size_that_both_rows_searched_for_may_differ(subtests: pytest.Subtests) -> None:
    for policy, searched, size in (
        ("batch_policy", "largest", {"batch_size": 8}),
        ("seq_policy", "longest", {"seq_length": 256}),
    ):
        with subtests.test(policy):
            ours, theirs = {policy: searched}, {policy: searched, **size}
            measured = {"micro_batch_size": size["batch_size"]} if "batch_size" in size else {}
            assert between(gpu(of=fakes.workload(**ours)), gpu(of=fakes.workload(**theirs)), **measured) == []
            (name,) = size
            found = between(gpu(), gpu(of=fakes.workload(**theirs)))
            assert {text.partition(" ")[0] for text in found} == {policy, name}


def test_what_the_engine_ran_counts_and_not_what_the_flags_said(subtests: pytest.Subtests) -> None:
    for changes, said in (
        ({"micro_batch_size": 8}, "micro_batch_size 4 vs 8"),
        ({"grad_accum": 2}, "grad_accum 1 vs 2"),
        ({"torch_version": "2.11.0"}, "torch 2.13.0 vs 2.11.0"),
        ({"deepspeed_version": "0.18.0"}, "deepspeed 0.19.8 vs 0.18.0"),
        ({"device_name": "NVIDIA A100"}, "device 2 x NVIDIA H100 80GB HBM3 vs 2 x NVIDIA A100"),
        ({"dropout": 0.5}, "dropout unset vs 0.5"),
    ):
        with subtests.test(said):
            assert between(gpu(), gpu(3), **changes) == [said]


def test_one_card_of_a_different_kind_among_many_counts_and_the_order_of_ranks_does_not() -> None:
    entry = fakes.success(gpu())
    first, second = entry.ranks
    mixed = replace(entry, ranks=(first, replace(second, device_name="NVIDIA A100")))
    turned = replace(entry, ranks=(replace(first, device_name="NVIDIA A100"), second))
    assert incomparable_facts(mixed, turned) == []
    (said,) = incomparable_facts(entry, mixed)
    assert said.endswith("vs 1 x NVIDIA A100, 1 x NVIDIA H100 80GB HBM3")


def test_a_different_method_or_launch_forbids_a_ratio_even_if_nothing_else_differs() -> None:
    entry = fakes.success(gpu())
    newer = replace(entry, method_version=99)
    versions = [f"method_version {entry.method_version} vs 99"]
    assert incomparable_facts(entry, newer) == incomparable_facts(fakes.failure(gpu()), newer) == versions
    assert incomparable_facts(entry, replace(entry, launch="deepspeed")) == ["launch warm vs deepspeed"]


def test_a_requested_dropout_equal_to_the_models_own_makes_no_difference() -> None:
    """A flat row contains the dropout that ran, not whether a flag asked for it."""
    own = fakes.success(gpu(), dropout=0.1)
    asked, without = (replace(gpu(), workload=fakes.workload(dropout=dropout)) for dropout in (0.1, 0.0))
    assert incomparable_facts(own, fakes.success(asked, dropout=0.1)) == []
    assert incomparable_facts(own, fakes.success(without, dropout=0.0)) == ["dropout 0.1 vs 0.0"]
    assert incomparable_facts(own, fakes.failure(without)) == ["dropout unset vs 0.0"]


def test_fp32_under_tf32_does_not_compare_with_fp32_and_other_formats_do_not_care() -> None:
    for precision, told in (("fp32", ["tf32 true vs false"]), ("bf16", [])):
        trial = gpu(of=fakes.workload(precision=precision))
        assert incomparable_facts(fakes.success(trial, tf32=True), fakes.success(trial, tf32=None)) == told


# ------------------------------------------------------------------ labels


def with_config(**changes: Any) -> Trial:
    return replace(gpu(), ds_config={**gpu().ds_config, **changes})


def test_labels_are_lengthened_by_what_differs_and_only_those_that_need_it(subtests: pytest.Subtests) -> None:
    for records, expected in (
        (
            [fakes.success(gpu(stage, of=fakes.workload(batch_size=size))) for stage, size in ((1, 1), (2, 4), (1, 8))],
            ["ZeRO-1 (micro-batch 1)", "ZeRO-2", "ZeRO-1 (micro-batch 8)"],
        ),
        # What is not known of a failed row does not count.
        (
            [fakes.success(gpu()), fakes.failure(with_config(gradient_clipping=0.5))],
            ["ZeRO-1 (gradient_clipping 1.0)", "ZeRO-1 (gradient_clipping 0.5)"],
        ),
        (
            [fakes.success(gpu()), fakes.success(gpu(), device_name="NVIDIA A100")],
            ["ZeRO-1 (2 x NVIDIA H100 80GB HBM3)", "ZeRO-1 (2 x NVIDIA A100)"],
        ),
    ):
        with subtests.test(expected=expected):
            assert unique_labels(summaries(*records)) == expected


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "a #2", "a (micro-batch 1)"]), st.integers(1, 3), st.booleans()),
        max_size=8,
    )
)
def test_labels_are_unique_whatever_the_rows(rows: list[tuple[str, int, bool]]) -> None:
    trials = [gpu(of=fakes.workload(batch_size=size)) for _, size, _ in rows]
    trials = [
        replace(trial, configuration=replace(trial.configuration, label=label))
        for trial, (label, _, _) in zip(trials, rows, strict=True)
    ]
    found = unique_labels(
        summaries(
            *(fakes.success(t) if good else fakes.failure(t) for t, (_, _, good) in zip(trials, rows, strict=True))
        )
    )
    assert len(set(found)) == len(rows)
    assert all(text.startswith(label) for text, (label, *_) in zip(found, rows, strict=True))
