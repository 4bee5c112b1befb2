"""Values of axes are read from text, and make the rows that differ."""

from __future__ import annotations

import pytest

from ds_bench.config import axis_rows
from ds_bench.config.axes import Layout, RowFacts
from ds_bench.errors import UsageError

ZERO2 = RowFacts(stage=2, offload_optimizer=None, offload_param=None, grad_accum=1, ranks=4, hidden_size=64)
CPU_ADAM = RowFacts(
    stage=3, offload_optimizer="cpu", offload_param=None, grad_accum=2, ranks=4, hidden_size=64, parameters=3_200_000
)


def setting(facts: RowFacts, *texts: str) -> axis_rows.Setting:
    return axis_rows.setting_of(tuple(value for values in axis_rows.read_axes(texts) for value in values), facts)


def test_a_wrong_axis_is_one_line_with_the_nearest(subtests: pytest.Subtests) -> None:
    for text, says in (
        ("overlap_comm", "is not NAME=V1,V2"),
        ("overlap_comm=", "is not NAME=V1,V2"),
        ("overlap_com=true", "did you mean overlap_comm?"),
        ("stage3_prefetch_bucket_size=1", "did you mean prefetch?"),
        ("colour=red", "python -m ds_bench axes lists them"),
        ("overlap_comm=ture", "did you mean true?"),
        ("overlap_comm=on", "did you mean true?"),
        ("overlap_comm=2", "give true or false"),
        ("buffers=small_bufers", "did you mean small_buffers?"),
        ("sub_group_size=big", "give a whole number from 1 to 1e+13"),
        ("sub_group_size=0", "0 is out of range"),
        ("sub_group_size=1.5", "1.5 is out of range"),
        ("sub_group_size=1e400", "1e400 is out of range"),
        ("sub_group_size=nan", "'nan' is none of its values"),
        ("prefetch=atuo", "did you mean auto?"),
        ("offload_ratio=1.1", "give a number from 0 to 1"),
    ):
        with subtests.test(text):
            with pytest.raises(UsageError) as error:
                axis_rows.read_axes([text])
            assert says in str(error.value)
            assert "\n" not in str(error.value)


def test_an_axis_given_twice_is_refused_and_a_value_given_twice_counts_once() -> None:
    with pytest.raises(UsageError, match="overlap_comm is given twice"):
        axis_rows.read_axes(["overlap_comm=true", "overlap_comm=false"])
    (values,) = axis_rows.read_axes(["sub_group_size=1e8,100000000,1e9"])
    assert [value.text for value in values] == ["1e8", "1e9"]


def test_rows_are_every_combination_of_the_axes_that_act_there() -> None:
    selected = axis_rows.read_axes(["overlap_comm=true,false", "prefetch=0,5e7", "pin_memory=true,false"])
    names = {
        stage: [axis_rows.row_name("z", values) for values in axis_rows.combinations(selected, Layout(stage=stage))]
        for stage in (0, 2, 3)
    }
    assert names == {
        0: ["z"],
        2: ["z+overlap_comm=true", "z+overlap_comm=false"],
        3: [
            "z+overlap_comm=true+prefetch=0",
            "z+overlap_comm=true+prefetch=5e7",
            "z+overlap_comm=false+prefetch=0",
            "z+overlap_comm=false+prefetch=5e7",
        ],
    }
    assert axis_rows.row_label("ZeRO-2", selected[0][1:]) == "ZeRO-2, overlap_comm off"
    assert axis_rows.row_label("ZeRO-3", selected[1][1:]) == "ZeRO-3, prefetch 5e7"


def test_the_name_of_a_row_tells_its_values_and_other_names_stay() -> None:
    (big,), (on, _) = axis_rows.read_axes(["sub_group_size=1e+8", "overlap_comm=TRUE,false"])
    name = axis_rows.row_name("zero3", (big, on))
    assert name == "zero3+sub_group_size=1e8+overlap_comm=true"
    assert axis_rows.split_name(name) == ("zero3", (big, on))
    for other in ("my+file", "zero3+colour=red", "zero2"):
        assert axis_rows.split_name(other) == (other, ())


def test_an_axis_that_acts_in_some_rows_is_noted_and_one_that_acts_in_none_is_refused() -> None:
    selected = axis_rows.read_axes(["prefetch=0,5e7"])
    layouts = {"ZeRO-2": Layout(stage=2), "ZeRO-3": Layout(stage=3)}
    assert axis_rows.idle_axes(selected, layouts) == ["prefetch acts in rows of stage 3 alone: not varied in ZeRO-2"]
    with pytest.raises(UsageError, match="prefetch acts in rows of stage 3 alone, and none is compared"):
        axis_rows.idle_axes(selected, {"ZeRO-2": Layout(stage=2)})


def test_axes_that_set_one_thing_differently_contradict_each_other(subtests: pytest.Subtests) -> None:
    for texts, facts in (
        (["buffers=default", "reduce_bucket_size=5e8"], ZERO2),
        (["precision=fp32", "bf16_states=all"], ZERO2),
        (["offload_ratio=0.5", "sub_group_size=1e9"], CPU_ADAM),
        (["precision=bf16", "torch_autocast=bf16"], ZERO2),
    ):
        with subtests.test(texts=texts, facts=facts):
            if texts[0] == "buffers=default":
                assert setting(facts, *texts).config  # they agree
                texts = ["buffers=default", "reduce_bucket_size=1e6"]
            with pytest.raises(UsageError, match="contradict each other"):
                setting(facts, *texts)


def test_axes_that_agree_go_together() -> None:
    both = setting(ZERO2, "precision=bf16", "bf16_states=all")
    assert both.config["bf16"] == {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }


def test_sizes_follow_from_the_hidden_size() -> None:
    assert setting(ZERO2, "reduce_bucket_size=auto").config == {"zero_optimization": {"reduce_bucket_size": 64 * 64}}
    at_stage_3 = setting(CPU_ADAM, "buffers=trainer_auto").config["zero_optimization"]
    assert at_stage_3 == {
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
    }
    assert setting(ZERO2, "buffers=trainer_auto").config == {"zero_optimization": {"reduce_bucket_size": 4096}}
    with pytest.raises(UsageError, match="needs the model's hidden size"):
        setting(
            RowFacts(stage=2, offload_optimizer=None, offload_param=None, grad_accum=1, ranks=1), "buffers=trainer_auto"
        )


def test_a_ratio_comes_with_sub_groups_small_enough_to_act() -> None:
    zero = setting(CPU_ADAM, "offload_ratio=0.5").config["zero_optimization"]
    assert zero == {"offload_optimizer": {"ratio": 0.5}, "sub_group_size": 100_000}


def test_zenflow_keeps_the_rows_accumulation() -> None:
    block = setting(CPU_ADAM, "zenflow=on", "grad_accum=8").config["zero_optimization"]["zenflow"]
    assert (block["update_interval"], block["select_interval"]) == (8, 8)


def test_a_key_of_an_offload_block_is_set_only_where_the_row_has_it() -> None:
    zero = setting(CPU_ADAM, "pin_memory=false").config["zero_optimization"]
    assert zero == {"offload_optimizer": {"pin_memory": False}}


def test_what_cannot_run_on_the_cpu_says_so_except_for_the_default() -> None:
    assert setting(CPU_ADAM, "superoffload=false").requires.accelerator is None
    on = setting(CPU_ADAM, "superoffload=true").requires
    assert (on.accelerator, on.reason) == ("cuda", "its optimizer refuses the CPU accelerator")


def test_a_flag_that_sets_the_key_of_an_axis_is_refused() -> None:
    selected = axis_rows.read_axes(["overlap_comm=true,false"])
    axis_rows.require_no_override(selected, "--set", {"zero_optimization": {"reduce_bucket_size": 1}})
    with pytest.raises(UsageError, match=r"--axis overlap_comm and --set both set zero_optimization\.overlap_comm"):
        axis_rows.require_no_override(selected, "--set", {"zero_optimization": {"overlap_comm": True}})


def test_too_many_rows_are_refused() -> None:
    axis_rows.require_few(64)
    with pytest.raises(UsageError, match="the axes make 65 rows, where 64 are the most"):
        axis_rows.require_few(65)
