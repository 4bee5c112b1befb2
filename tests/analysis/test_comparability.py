"""Which trials are one row, and what two rows may not differ in."""

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
from ds_bench.config.identity import format_fact, row_key
from ds_bench.config.spec import SAME_TRAINING_FIELDS, Placement, Trial, Workload
from ds_bench.records.schema import TrialRecord
from tests.support import fakes

CUDA = fakes.placement(accelerator="cuda", num_gpus=2)
quick = settings(deadline=None)


def gpu(stage: int = 1, **changes: Any) -> Trial:
    return fakes.trial(fakes.zero(stage), on=changes.pop("on", CUDA), **changes)


def summaries(*records: TrialRecord) -> list[Run]:
    return [make_run(each) for each in records]


def incomparable_facts(*records: TrialRecord) -> list[str]:
    return [each.text for each in comparability.incomparable_facts(*summaries(*records))]


def labels(*records: TrialRecord) -> list[str]:
    return unique_labels(summaries(*records))


# ------------------------------------------------------------------ the key of a row

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@quick
@given(
    config=st.dictionaries(st.text(max_size=5), json_values, max_size=4),
    model=st.text(min_size=1, max_size=8),
    model_config=st.dictionaries(st.text(max_size=5), json_values, max_size=3),
    repeat=st.integers(0, 9),
)
def test_the_key_is_that_of_the_trial_with_repeat_0(
    config: dict[str, Any], model: str, model_config: dict[str, Any], repeat: int
) -> None:
    of = fakes.workload(model=model, model_config=model_config)
    trial = replace(gpu(), ds_config=config, workload=of, repeat=repeat)
    assert row_key(trial) == row_key(replace(trial, repeat=0))


def test_interleaved_repeats_are_one_row_each_in_order_of_appearance() -> None:
    records = [fakes.success(gpu(stage, repeat=repeat)) for repeat in (0, 1, 2) for stage in (3, 0)]
    groups = group_repeats(summaries(*records))
    assert [[run.trial.repeat for run in runs] for runs in groups.values()] == [[0, 1, 2]] * 2
    assert [runs[0].trial.configuration.stage for runs in groups.values()] == [3, 0]
    assert list(groups) == [row_key(records[0].trial), row_key(records[1].trial)]


def test_runs_of_one_row_on_other_cards_or_versions_are_never_mixed_into_a_median(subtests: pytest.Subtests) -> None:
    for changes in ({"device_name": "NVIDIA A100"}, {"torch_version": "2.11.0"}, {"deepspeed_version": "0.18.0"}):
        with subtests.test(changes=changes):
            here, there = fakes.success(gpu()), fakes.success(gpu(repeat=1), **changes)
            failed = fakes.failure(gpu(repeat=2))
            groups = group_repeats(summaries(here, there, failed, here))
            key = row_key(here.trial)
            assert {name: len(runs) for name, runs in groups.items()} == {key: 3, f"{key}-2": 1}


def test_a_run_that_measured_nothing_does_not_make_a_row_of_its_own_by_coming_first() -> None:
    groups = group_repeats(summaries(fakes.failure(gpu()), fakes.success(gpu(repeat=1))))
    assert [len(runs) for runs in groups.values()] == [2]


# ------------------------------------------------------------------ what forbids a ratio


def between(a: Trial, b: Trial, **changes: Any) -> list[str]:
    return incomparable_facts(fakes.success(a), fakes.success(b, **changes))


def test_another_strategy_is_what_a_comparison_is_about() -> None:
    assert between(gpu(0), gpu(3)) == []
    assert incomparable_facts(fakes.success(gpu(0)), fakes.failure(gpu(3))) == []


OTHER_WORKLOADS: dict[str, Any] = {
    "model": "other",
    "model_source": "hub",
    "model_type": None,
    "batch_size": 8,
    "batch_policy": "largest",
    "seq_policy": "longest",
    "seq_length": 256,
    "grad_accum": 2,
    "num_steps": 11,
    "warmup_steps": 3,
    "precision": "fp16",
    "activation_checkpointing": True,
    "seed": 7,
    "trust_remote_code": True,
    "dropout": 0.0,
    "attention": "eager",
    "loss": "tiled",
    "compile": "torch",
    "tiled_mlp": True,
    "data_workers": 0,
    "data_pin_memory": True,
    "data_prefetch": 4,
    "cpu_binding": "cores",
    "zero_init": False,
    "pass_type": "forward",
    "synchronized": False,
    "vocab_size": 9,
    "data_path": "/ids.bin",
    "data_dtype": "uint16",
    "data_tokens": 9,
    "data_digest": "a",
}
TWO_NODES = {"hosts": (("a", 1), ("b", 1))}
OF_SEVERAL_NODES: dict[str, dict[str, Any]] = {
    "ranks_of_nodes": {"hosts": (("a", 3), ("b", 1))},
}
NOT_MEASURED: dict[str, Any] = {
    "compute_capability": (7, 0),
    "include": "a:0@b:0",
    "master_addr": "10.0.0.1",
    "master_port": 29501,
    "hostfile": "/hosts",
    "host_command": "srun --nodelist={host}",
    "forwarded_variables": ("HTTPS_PROXY",),
    "hosts": (("c", 1), ("d", 1)),
}
OTHER_PLACEMENTS: dict[str, Any] = {
    "accelerator": "cpu",
    "num_gpus": 4,
    "launcher": "deepspeed",
    "nvme_path": "/d",
    "cpu_memory_limit_bytes": 1,
    "gpu_memory_limit_bytes": 2,
    "supported_precisions": ("fp32",),
}


def test_every_field_of_workload_and_placement_is_tried_below() -> None:
    assert {each.name for each in fields(Workload)} == OTHER_WORKLOADS.keys() | {"model_config"}
    of_nodes = {name for changes in OF_SEVERAL_NODES.values() for name in changes}
    assert {each.name for each in fields(Placement)} == {*OTHER_PLACEMENTS, *of_nodes, *NOT_MEASURED}


def test_a_difference_of_the_workload_is_named_once_with_both_values(subtests: pytest.Subtests) -> None:
    for name in OTHER_WORKLOADS:
        with subtests.test(name):
            theirs = gpu(of=fakes.workload(**{name: OTHER_WORKLOADS[name]}))
            values = getattr(gpu().workload, name), OTHER_WORKLOADS[name]
            ours, shown = map(format_fact, values)
            assert between(gpu(), theirs) == [f"{name} {ours} against {shown}"]


def test_how_a_step_is_computed_may_differ_where_a_row_is_there_to_show_it(subtests: pytest.Subtests) -> None:
    for name in SAME_TRAINING_FIELDS:
        with subtests.test(name):
            changes = {name: OTHER_WORKLOADS[name]}
            row = replace(fakes.zero(1), workload_changes=changes)
            assert between(gpu(), replace(gpu(of=fakes.workload(**changes)), configuration=row)) == []
            longer = replace(gpu(of=fakes.workload(seq_length=256, **changes)), configuration=row)
            assert between(gpu(), longer) == ["seq_length 128 against 256"]


def test_rows_whose_ranks_share_data_are_compared_by_tokens_per_second(subtests: pytest.Subtests) -> None:
    for axis in PARALLEL_AXES:
        with subtests.test(axis):
            row = replace(fakes.zero(1), axis_values={axis: "2"})
            assert between(gpu(), replace(gpu(), configuration=row), data_parallel_size=1) == []


def test_a_difference_of_the_placement_is_named(subtests: pytest.Subtests) -> None:
    for name in OTHER_PLACEMENTS:
        with subtests.test(name):
            theirs = gpu(on=replace(CUDA, **{name: OTHER_PLACEMENTS[name]}))
            found = incomparable_facts(fakes.success(gpu()), fakes.failure(theirs))
            assert [text.partition(" ")[0] for text in found] == [name]


def test_of_several_nodes_their_number_and_ranks_count_and_not_their_names() -> None:
    def named(**changes: Any) -> list[str]:
        ours, theirs = (gpu(on=replace(CUDA, **TWO_NODES)), gpu(on=replace(CUDA, **{**TWO_NODES, **changes})))
        return [text.partition(" ")[0] for text in incomparable_facts(fakes.success(ours), fakes.failure(theirs))]

    assert {name: named(**changes) for name, changes in OF_SEVERAL_NODES.items()} == {
        name: [name] for name in OF_SEVERAL_NODES
    }
    assert named(**NOT_MEASURED) == []
    assert between(gpu(), gpu(on=replace(CUDA, **TWO_NODES))) == ["num_nodes 1 against 2"]


def test_of_two_models_only_the_facts_that_differ_are_named() -> None:
    ours = fakes.workload(model_config={"n_layer": 2, "n_embd": 64, "rope": {"theta": 1}})
    theirs = fakes.workload(model_config={"n_layer": 4, "n_embd": 64, "rope": {"theta": 2}, "bias": False})
    assert between(gpu(of=ours), gpu(of=theirs)) == [
        "model_config.n_layer 2 against 4",
        "model_config.rope.theta 1 against 2",
        "model_config.bias none against false",
    ]


def test_what_the_engine_ran_counts_and_not_what_the_flags_said(subtests: pytest.Subtests) -> None:
    for changes, said in (
        ({"micro_batch_size": 8}, "micro_batch_size 4 against 8"),
        ({"grad_accum": 2}, "grad_accum 1 against 2"),
        ({"data_parallel_size": 1}, "data_parallel_size 2 against 1"),
        ({"torch_version": "2.11.0"}, "torch 2.13.0 against 2.11.0"),
        ({"deepspeed_version": "0.18.0"}, "deepspeed 0.19.8 against 0.18.0"),
        ({"device_name": "NVIDIA A100"}, "device 2 x NVIDIA H100 80GB HBM3 against 2 x NVIDIA A100"),
    ):
        with subtests.test(changes=changes):
            assert between(gpu(), gpu(3), **changes) == [said]


def test_what_an_axis_sets_may_differ_and_nothing_else() -> None:
    configuration = replace(fakes.zero(2), axis_values={"grad_accum": "2", "micro_batch": "8"})
    row = fakes.success(
        fakes.trial(configuration, on=CUDA, of=fakes.workload(grad_accum=2, batch_size=8)),
        micro_batch_size=8,
        grad_accum=2,
    )
    assert incomparable_facts(fakes.success(gpu(2)), row) == []
    longer = fakes.success(fakes.trial(configuration, on=CUDA, of=fakes.workload(grad_accum=2, seq_length=8)))
    assert len(incomparable_facts(fakes.success(gpu(2)), longer)) == 1


def test_the_batch_of_a_file_may_differ() -> None:
    """``--keep-batch`` is there to compare it: by tokens per second, as the rows of an axis are."""
    own = {"batch_size": 8, "grad_accum": 2}
    configuration = replace(fakes.zero(2), name="mine", source="file", workload_changes=own)
    trial = fakes.trial(configuration, on=CUDA, of=fakes.workload(**own))
    row = fakes.success(trial, micro_batch_size=8, grad_accum=2)
    assert incomparable_facts(fakes.success(gpu(2)), row) == []


def test_ranks_of_a_file_that_share_their_data_may_be_fewer() -> None:
    """As those of the axes autotp and sequence_parallel, of which flat files hold the value alone."""
    for keys, values in (({"sequence_parallel_size": 2}, {}), ({}, {"sequence_parallel": "2"})):
        configuration = replace(fakes.zero(2), name="mine", source="file", axis_values=values)
        trial = fakes.trial(configuration, on=CUDA)
        row = fakes.success(replace(trial, ds_config={**trial.ds_config, **keys}), data_parallel_size=1)
        assert incomparable_facts(fakes.success(gpu(2)), row) == []
    assert incomparable_facts(fakes.success(gpu(2)), fakes.success(gpu(2), data_parallel_size=1))


def test_an_effective_batch_that_differs_on_purpose_is_a_difference_too() -> None:
    """Twice the micro-batch without accumulation trains the same tokens a step; its speed is of another workload."""
    ours = gpu(of=fakes.workload(batch_size=4, grad_accum=2))
    theirs = gpu(of=fakes.workload(batch_size=8, grad_accum=1))
    assert between(ours, theirs) == ["batch_size 4 against 8", "grad_accum 2 against 1"]


def test_one_card_of_another_kind_among_many_is_seen_and_the_order_of_ranks_is_not() -> None:
    entry = fakes.success(gpu())
    first, second = entry.ranks
    mixed = replace(entry, ranks=(first, replace(second, device_name="NVIDIA A100")))
    turned = replace(entry, ranks=(replace(first, device_name="NVIDIA A100"), second))
    assert incomparable_facts(mixed, turned) == []
    (said,) = incomparable_facts(entry, mixed)
    assert said.endswith("against 1 x NVIDIA A100, 1 x NVIDIA H100 80GB HBM3")


def test_another_method_or_launch_forbids_a_ratio_even_where_nothing_else_differs() -> None:
    entry = fakes.success(gpu())
    newer = replace(entry, method_version=entry.method_version + 1)
    versions = f"method_version {entry.method_version} against {newer.method_version}"
    assert incomparable_facts(entry, newer) == [versions]
    assert incomparable_facts(fakes.failure(gpu()), newer) == [versions]
    assert incomparable_facts(entry, replace(entry, launch="deepspeed")) == ["launch warm against deepspeed"]


# ------------------------------------------------------------------ labels


def test_labels_are_lengthened_by_what_differs_and_only_those_that_need_it() -> None:
    records = [fakes.success(gpu(1, of=fakes.workload(batch_size=size))) for size in (1, 8)]
    assert labels(records[0], fakes.success(gpu(2)), records[1]) == [
        "ZeRO-1 (micro-batch 1)",
        "ZeRO-2",
        "ZeRO-1 (micro-batch 8)",
    ]


def test_two_models_side_by_side_are_told_apart_by_name_first() -> None:
    small, large = fakes.workload(model="gpt2"), fakes.workload(model="gpt2-xl", batch_size=1)
    assert labels(fakes.success(gpu(of=small)), fakes.success(gpu(of=large))) == [
        "ZeRO-1 (gpt2, micro-batch 4)",
        "ZeRO-1 (gpt2-xl, micro-batch 1)",
    ]


def test_rows_that_differ_in_their_configuration_alone_are_told_apart_by_its_keys() -> None:
    trial = gpu()
    zero = trial.ds_config["zero_optimization"]
    other = replace(trial, ds_config={**trial.ds_config, "zero_optimization": {**zero, "overlap_comm": True}})
    assert labels(fakes.success(trial), fakes.success(other)) == [
        "ZeRO-1 (overlap_comm false)",
        "ZeRO-1 (overlap_comm true)",
    ]


def test_a_failed_row_is_not_told_apart_by_what_is_not_known_of_it() -> None:
    trial = gpu()
    other = replace(trial, ds_config={**trial.ds_config, "gradient_clipping": 0.5})
    assert labels(fakes.success(trial), fakes.failure(other)) == [
        "ZeRO-1 (gradient_clipping 1.0)",
        "ZeRO-1 (gradient_clipping 0.5)",
    ]


def test_the_same_row_on_two_kinds_of_cards_is_told_apart_by_them() -> None:
    on_other = fakes.success(gpu(), device_name="NVIDIA A100")
    assert labels(fakes.success(gpu()), on_other) == [
        "ZeRO-1 (2 x NVIDIA H100 80GB HBM3)",
        "ZeRO-1 (2 x NVIDIA A100)",
    ]


names = st.sampled_from(["a", "b", "a #2", "a (micro-batch 1)"])


@quick
@given(st.lists(st.tuples(names, st.integers(1, 3), st.sampled_from([1.0, 0.5]), st.booleans()), max_size=8))
def test_labels_are_unique_whatever_the_rows(rows: list[tuple[str, int, float, bool]]) -> None:
    records = []
    for label, size, clipping, good in rows:
        plain = fakes.trial(replace(fakes.zero(1), label=label), of=fakes.workload(batch_size=size), on=CUDA)
        trial = replace(plain, ds_config={**plain.ds_config, "gradient_clipping": clipping})
        records.append(fakes.success(trial) if good else fakes.failure(trial))
    found = labels(*records)
    assert len(set(found)) == len(records)
    assert all(text.startswith(label) for text, (label, *_) in zip(found, rows, strict=True))


def test_a_dropout_that_was_asked_for_and_the_same_as_the_models_own_are_alike() -> None:
    """A flat row tells what ran and not whether a flag asked for it."""
    own = fakes.success(gpu(), dropout=0.1)
    asked = replace(gpu(), workload=fakes.workload(dropout=0.1))
    assert incomparable_facts(own, fakes.success(asked, dropout=0.1)) == []
    without = replace(gpu(), workload=fakes.workload(dropout=0.0))
    assert incomparable_facts(own, fakes.success(without, dropout=0.0)) == ["dropout 0.1 against 0.0"]
    assert incomparable_facts(own, fakes.failure(without)) == ["dropout none against 0.0"]


@pytest.mark.parametrize(("engine", "stage"), [("ddp", 0), ("fsdp2", 3)])
def test_a_reference_engine_is_never_one_row_with_the_stage_that_splits_alike(engine: str, stage: int) -> None:
    """Their DeepSpeed configurations may be equal, down to the last key."""
    reference = fakes.trial(fakes.reference(engine), on=CUDA)
    same = replace(gpu(stage), ds_config=reference.ds_config)
    rows = summaries(fakes.success(reference), fakes.success(same))
    assert len(group_repeats(rows)) == 2
    assert rows[0].row.config_hash != rows[1].row.config_hash
    assert row_key(reference) == row_key(replace(reference, repeat=1))


def test_fp32_under_tf32_does_not_compare_with_fp32_and_other_formats_do_not_care() -> None:
    for precision, told in (("fp32", ["tf32 true against false"]), ("bf16", [])):
        trial = fakes.trial(on=fakes.placement(accelerator="cuda"), of=fakes.workload(precision=precision))
        a, b = fakes.success(trial, tf32=True), fakes.success(trial, tf32=None)
        assert incomparable_facts(a, b) == told
