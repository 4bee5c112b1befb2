"""Sweeps: lists of values, the matrix and its entries as points; values set by flags."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_bench.config.recipe_file import parse_recipe, with_value
from ds_bench.config.sweep import find_sweep
from ds_bench.errors import UsageError


def test_lists_the_matrix_and_its_entries_make_the_points() -> None:
    lists = "training: {seq_len: [8, 16]"
    include = "[{training.seq_len: 16, training.local_batch_size: 1}, {training.precision: fp32}"
    include += ", {training.seq_len: 32, training.local_batch_size: 2}]"
    exclude = "[{training.seq_len: 8, training.dropout: 0.1}]"
    length, batch, precision = "training.seq_len", "training.local_batch_size", "training.precision"
    model, dropout = "model.name", "training.dropout"
    for text, points in (
        (f"{lists}}}\nsweep: {{matrix: {{model.name: [tiny, gpt2]}}}}",
         [{length: 8, model: "tiny"}, {length: 8, model: "gpt2"},
          {length: 16, model: "tiny"}, {length: 16, model: "gpt2"}]),
        # Values are added to the points that match; an entry that matches none is a point.
        (f"{lists}}}\nsweep: {{include: {include}, exclude: []}}",
         [{length: 8, precision: "fp32"}, {length: 16, batch: 1, precision: "fp32"}, {length: 32, batch: 2}]),
        (f"{lists}, dropout: [null, 0.1]}}\nsweep: {{exclude: {exclude}}}",
         [{length: 8, dropout: None}, {length: 16, dropout: None}, {length: 16, dropout: 0.1}]),
    ):  # fmt: skip
        assert find_sweep(parse_recipe(text)).points() == points
    # Points are counted without being made.
    axes = {f"training.{name}": list(range(1, 101)) for name in ("seq_len", "steps", "warmup_steps", "grad_accum")}
    read = replace(parse_recipe("{}"), data={"sweep": {"matrix": axes}})
    assert find_sweep(read).max_points == 10**8


def test_a_value_set_by_a_flag_replaces_its_list() -> None:
    text = "training: {steps: [1, 2]}\nsweep: {matrix: {training.seq_len: [8, 16]}}"
    read = parse_recipe(text, "r.yaml")
    assert read.place(("training", "seq_len")) == "r.yaml, line 1: "
    for path, value in ((("training", "seq_len"), 32), (("training", "steps"), 3), (("output", "goal"), "speed")):
        read = with_value(read, path, value)
    assert read.place(("training", "seq_len")) == ""  # the file is not to blame
    found = find_sweep(read)
    assert found.points() == [{}]
    assert found.base["training"] == {"seq_len": 32, "steps": 3}
    assert with_value(parse_recipe("training:"), ("training", "steps"), 3).data["training"] == {"steps": 3}
    with pytest.raises(UsageError, match=r"training\.steps is not a section"):
        with_value(read, ("training", "steps", "more"), 1)
