"""The table of axes agrees with DeepSpeed's keys and the workload, and its values make the rows that differ."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from ds_bench.config import axis_rows, deepspeed_keys, validation
from ds_bench.config.axes import AXES, CHANGES, RowFacts, Setting
from ds_bench.config.deepspeed_config import base_config, overlay, paths_of
from ds_bench.config.spec import Strategy, Workload
from ds_bench.errors import UsageError

PLAIN = RowFacts(stage=2, grad_accum=1, ranks=4, hidden_size=64, parameters=3_200_000)
OFFLOADED = replace(PLAIN, stage=3, offload_optimizer="cpu", grad_accum=2)
STAGE_3 = replace(PLAIN, stage=3)


def setting(facts: RowFacts, *texts: str) -> Setting:
    return axis_rows.setting_of(tuple(value for values in axis_rows.read_axes(texts) for value in values), facts)


def test_an_axis_sets_what_it_says_and_deepspeed_knows_it(subtests: pytest.Subtests) -> None:
    row = Strategy(name="s", label="S", stage=3, offload_optimizer="nvme", offload_param="cpu")
    full = replace(OFFLOADED, offload_optimizer="nvme", offload_param="cpu")
    for axis in AXES.values():
        numbers = [f"{axis.numbers.least:g}", f"{axis.numbers.most / 2:g}"] if axis.numbers else []
        texts = [*axis.values, *(["1", "2"] if axis.name == "hpz" else numbers)]
        with subtests.test(axis.name):
            settings = [setting(STAGE_3 if axis.name == "optimizer" else full, f"{axis.name}={text}") for text in texts]
            assert len({repr(each) for each in settings}) == len(settings) > 1, "two values set the same"
            for each in settings:
                validation.check_keys(overlay(base_config(row, 1), each.config))
                paths = {path for path, _ in paths_of(each.config)}
                assert all(any(path == key or path.startswith(f"{key}.") for key in axis.keys) for path in paths), paths
                assert each.workload.keys() == set(axis.fields) or (not each.workload and axis.settings)
                assert each.workload.keys() <= {field.name for field in fields(Workload)}
                assert each.variables.keys() == set(axis.variables)
            assert set(axis.changes) <= CHANGES.keys()
            assert not axis.cuda_only or axis.default in axis.values
            for block, _, name in (key.rpartition(".") for key in axis.keys):
                assert name in deepspeed_keys.keys_of(block)


def test_a_value_sets_what_its_row_needs(subtests: pytest.Subtests) -> None:
    small = {"reduce_bucket_size": 4096, "allgather_bucket_size": 4096, "stage3_prefetch_bucket_size": 3686}
    small |= dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 24 * 4096)
    trainer = {"stage3_prefetch_bucket_size": 3686, "stage3_param_persistence_threshold": 640}
    for facts, texts, block in (
        (PLAIN, ["reduce_bucket_size=auto"], {"reduce_bucket_size": 4096}),
        (OFFLOADED, ["buffers=trainer_auto"], {"reduce_bucket_size": 4096, **trainer}),
        (PLAIN, ["buffers=trainer_auto"], {"reduce_bucket_size": 4096}),
        (STAGE_3, ["buffers=small_buffers"], small),
        # With more sub-groups, the ratio moves roughly the fraction that it names.
        (OFFLOADED, ["offload_ratio=0.5"], {"offload_optimizer": {"ratio": 0.5}, "sub_group_size": 100_000}),
        # A key of an offload block is set only in rows that have the block.
        (OFFLOADED, ["pin_memory=false"], {"offload_optimizer": {"pin_memory": False}}),
        (PLAIN, ["optimizer=muon"], {}),
        (STAGE_3, ["optimizer=muon"], {"reduce_scatter": False}),
        (STAGE_3, ["hpz=2"], {"zero_hpz_partition_size": 2}),
    ):
        with subtests.test(texts):
            assert setting(facts, *texts).config.get("zero_optimization", {}) == block
    zenflow = setting(OFFLOADED, "zenflow=on", "grad_accum=8").config["zero_optimization"]["zenflow"]
    assert (zenflow["update_interval"], zenflow["select_interval"], zenflow["overlap_step"]) == (8, 8, False)
    unknown = replace(PLAIN, hidden_size=None)
    for facts, text in ((unknown, "buffers=trainer_auto"), (PLAIN, "hpz=3"), (OFFLOADED, "optimizer=torch_adamw")):
        with pytest.raises(UsageError, match=f"axis {text} "):
            setting(facts, text)
    # Only values other than the default need CUDA.
    assert setting(OFFLOADED, "superoffload=false").requires.accelerator is None
    on = setting(OFFLOADED, "superoffload=true", "qgz=true").requires
    assert (on.accelerator, on.min_nodes, on.ops) == ("cuda", 2, ("QuantizerBuilder",))


def test_a_wrong_axis_is_an_error_that_names_the_nearest(subtests: pytest.Subtests) -> None:
    for text, remedy in (
        ("overlap_comm=", "for example, --axis overlap_comm=true,false"),
        ("overlap_com=true", "did you mean 'overlap_comm'?"),
        ("stage3_prefetch_bucket_size=1", "did you mean 'prefetch'?"),
        ("color=red", "list them with python -m ds_bench axes"),
        ("overlap_comm=on", "did you mean true?"),
        ("overlap_comm=2", "give true or false"),
        ("buffers=small_bufers", "did you mean small_buffers?"),
        ("offload_ratio=1.1", "give a number from 0 to 1"),
        *((f"sub_group_size={size}", "give a whole number from 1 to 1e13") for size in (0, 1.5, "nan")),
    ):
        with subtests.test(text), pytest.raises(UsageError) as error:
            axis_rows.read_axes([text])
        assert error.value.remedy == remedy
    with pytest.raises(UsageError, match="overlap_comm is given twice"):
        axis_rows.read_axes(["overlap_comm=true", "overlap_comm=false"])


def test_rows_are_every_combination_of_the_axes_that_act_there() -> None:
    selected = axis_rows.read_axes(["overlap_comm=true,false", "prefetch=0,5e7", "pin_memory=true,false"])
    names = {
        stage: [axis_rows.row_name("z", values) for values in axis_rows.combinations(selected, RowFacts(stage=stage))]
        for stage in (0, 2, 3)
    }
    on, off = "z+overlap_comm=true", "z+overlap_comm=false"
    stage_3 = [f"{row}+prefetch={size}" for row in (on, off) for size in ("0", "5e7")]
    assert names == {0: ["z"], 2: [on, off], 3: stage_3}
    assert axis_rows.row_label("ZeRO-2", selected[0][1:]) == "ZeRO-2, overlap_comm off"
    axis_rows.require_few(64)
    with pytest.raises(UsageError):
        axis_rows.require_few(65)
    # An axis that acts in some rows is noted, one that acts in none is refused.
    (note,) = axis_rows.idle_axis_notes(selected[1:2], {"ZeRO-2": RowFacts(stage=2), "ZeRO-3": RowFacts(stage=3)})
    assert note == "prefetch applies only to rows of stage 3: not varied in ZeRO-2"
    with pytest.raises(UsageError):
        axis_rows.idle_axis_notes(selected[1:2], {"ZeRO-2": RowFacts(stage=2)})


def test_an_axis_acts_where_the_row_offloads_what_it_needs() -> None:
    rows = {
        "2": RowFacts(stage=2),
        "2 cpu": RowFacts(stage=2, offload_optimizer="cpu"),
        "3 cpu": RowFacts(stage=3, offload_optimizer="cpu"),
        "3 nvme": RowFacts(stage=3, offload_optimizer="nvme"),
        "3 param": RowFacts(stage=3, offload_param="cpu"),
        "fsdp2": RowFacts(stage=3, engine="fsdp2"),
    }
    acting = {
        name: [row for row, facts in rows.items() if axis_rows.acts(AXES[name], facts)]
        for name in ("offload_ratio", "aio_block_size", "zenflow", "pin_memory", "precision")
    }
    assert acting == {
        "offload_ratio": ["3 cpu", "3 nvme"],
        "aio_block_size": ["3 nvme"],
        "zenflow": ["2 cpu"],
        "pin_memory": ["2 cpu", "3 cpu", "3 nvme", "3 param"],
        "precision": list(rows),
    }


def test_the_name_of_a_row_gives_its_values_back_and_other_names_stay() -> None:
    (big,), (on, _) = axis_rows.read_axes(["sub_group_size=1e+8,100000000", "overlap_comm=TRUE,false"])
    name = axis_rows.row_name("zero3", (big, on))
    assert name == "zero3+sub_group_size=1e8+overlap_comm=true"
    assert axis_rows.split_name(name) == ("zero3", (big, on))
    assert axis_rows.split_name("zero3+color=red") == ("zero3+color=red", ())


def test_axes_and_flags_that_set_one_thing_differently_contradict_each_other() -> None:
    for agreeing in (["buffers=default", "reduce_bucket_size=5e8"], ["precision=bf16", "bf16_states=all"]):
        assert setting(PLAIN, *agreeing).config
    for texts in (
        ["buffers=default", "reduce_bucket_size=1e6"],
        ["precision=fp32", "bf16_states=all"],
        ["precision=bf16", "torch_autocast=bf16"],
    ):
        with pytest.raises(UsageError, match="contradict each other"):
            setting(PLAIN, *texts)
    selected = axis_rows.read_axes(["overlap_comm=true,false"])
    axis_rows.require_no_override(selected, "--set", {"zero_optimization": {"reduce_bucket_size": 1}})
    with pytest.raises(UsageError, match=r"axis overlap_comm and --set both set zero_optimization\.overlap_comm"):
        axis_rows.require_no_override(selected, "--set", {"zero_optimization": {"overlap_comm": True}})
