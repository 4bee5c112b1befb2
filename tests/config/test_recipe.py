"""Recipes: refused values with their place, the defaults of the scripts, the JSON Schema."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ds_bench.cli.arguments import add_flags_over_recipe, parse
from ds_bench.config import recipe, recipe_file, sweep
from ds_bench.config.options import GOALS, Options
from ds_bench.config.spec import Inspection
from ds_bench.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def points(text: str) -> list[tuple[str, Options]]:
    """Text and Options of every point of a recipe."""
    read = recipe_file.parse_recipe(text, "r.yaml")
    found = sweep.find_sweep(read)
    made = []
    for point in found.points():
        checked = recipe.check_recipe(read, found.data_of(point))
        options = recipe.options_of(checked, read.folder, point=tuple(point.items()))
        made.append((options.point_text, options))
    return made


REFUSED = {
    "gpt2": "r.yaml holds no keys",
    "training:\n  seq_length: 512": r"r.yaml, line 2: unknown key training.seq_length\. Did you mean training.seq_len",
    "root:$6$salt$0123456789abcdef:19000:0:99999:7:::": r"line 1: not a key of a recipe\. The sections",
    "training: {lr: 1e-4}": r"Did you mean optimizer.params.lr\?",
    "training: {zero_optimization: {}}": r"Did you mean configurations.deepspeed.zero_optimization\?",
    "dataset: {tokens: 8}": r"The keys of dataset are path, dtype, vocab_size, seq_len; ",
    "training:\n  seq_len: long": r"line 2: training.seq_len is .long.\. It must be a valid integer or",
    "training: {steps: 0}": r"training.steps is 0\. It must be greater than or equal to 1",
    "training: {local_batch_size: many}": r"a valid integer or it must be 'auto'",
    "training: [512]": "It must be an object",
    "configurations: {stages: [0, 4]}": r"configurations.stages\[1\] is 4",
    "configurations: {strategies: [zero2, zero3_ofload]}": "Did you mean zero3_offload",
    "model: {factory: module}": "package.module:function",
    "configurations: {inline: {../up: {}}}": "a name of letters, digits, dots",
    "launch: {accelerator: gpu}": "It must be 'auto', 'cuda' or 'cpu'",
    'configurations: {configs: [" "]}': "A path must not be empty",
    "model: {name: a}\nmodel: {name: b}": "line 2: 'model' is given twice, first on line 1",
    "a: &a [1, 1]\nb: &b [*a, *a]": r"line 1: anchors and aliases",
    "a: !!python/object/apply:os.system [x]": "python/object/apply:os.system is not supported",
    "[" * 1000: "nested deeper than 20 levels",
    "training:\n\tsteps: 1": "r.yaml, line 2: not YAML",
    "training: {steps: " + "9" * 5000 + "}": "line 1: 9{20}… is not a number that a recipe can use",
    "training: {steps: 1e999}": "line 1: 1e999 is not a number that a recipe can use",
    "training: {global_batch_size: 8, grad_accum: 2}": "Give one of them",
    "training: {global_batch_size: 8, local_batch_size: auto}": "local_batch_size auto",
    "training: {seq_len: []}": "has no values",
    "training: {seq_len: [8, x]}": 'training.seq_len is "x"',
    "training: {seq_len: 8}\nsweep: {matrix: {training.seq_len: [16]}}": "in sweep.matrix and in the section training",
    "sweep: {matrix: {training.seqlen: [16]}}": r"Did you mean training.seq_len\?",
    "sweep:\n  matrix: {training.seq_len: []}": r"line 2: sweep.matrix.training.seq_len is ..\. It must have at least",
    "sweep: {matrx: {}}": r"unknown key sweep.matrx\. The keys of sweep are matrix, include, exclude",
    "sweep: {matrix: {launch.timeout: [1, 2]}}": "launch.timeout cannot be swept",
    "sweep: {matrix: {optimizer.params: [1, 2]}}": "optimizer.params cannot be swept",
    "sweep: {matrix: {optimizer.params.lr: [[1, 2]]}}": "has a list among its values",
    "optimizer: {params: {lr: [1e-4, 1e-4]}}": "optimizer.params.lr has 0.0001 twice",
    "training: {seq_len: 8}\ndataset: {seq_len: 16}": "training.seq_len 8 and dataset.seq_len 16 contradict each other",
    "configurations: {inline: {ddp: {}}}": "ddp rows train without DeepSpeed",
    "training: {seq_len: [8]}\nsweep: {exclude: [{training.seq_len: 16}]}": "has no value 16",
    "training: {seq_len: [8]}\nsweep: {exclude: [{training.steps: 16}]}": "which is not an axis",
    "training: {seq_len: [8]}\nsweep: {exclude: [{training.seq_len: 8}]}": "leaves no point",
    "sweep: {include: [{training.seq_len: 8}]}": "without any axis",
}


def test_wrong_values_are_refused_in_one_line_with_their_place(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for text in REFUSED:
        with subtests.test(text):
            with pytest.raises(UsageError, match=REFUSED[text]) as caught:
                points(text)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 250
    path = tmp_path / "r.yaml"
    for content, reason in ((b"# \n" * 2**17, "is larger than"), (b"\xff\xfe", "is not UTF-8 text")):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=reason):
            recipe_file.read_recipe(path)


def test_numbers_and_words_are_those_of_yaml_1_2() -> None:
    data = recipe_file.parse_recipe("{a: [1e-4, 5e8, 1_000, 7_, 010, -0.5, no, '1', null, 12:30]}").data
    assert repr(data["a"]) == "[0.0001, 500000000.0, '1_000', '7_', 10, -0.5, 'no', '1', None, '12:30']"


def test_an_empty_recipe_is_the_script_without_flags() -> None:
    empty = recipe_file.RecipeText(name="", folder=Path(), data={})
    made = recipe.options_of(recipe.check_recipe(empty), Path())
    assert replace(made, family="zero") == parse("zero", "zero.py", [])
    assert set(GOALS) == set(recipe.recipe_schema()["$defs"]["Output"]["properties"]["goal"]["enum"])


def test_every_flag_of_a_script_is_a_value_of_recipes_or_of_the_command_run() -> None:
    """A new flag of the scripts must reach recipes, or it would be taken and ignored."""
    run_flags = {"resume", "shard", "retry", "dry_run", "format", "quiet", "verbose", "strict", "print_recipe"}
    parser = argparse.ArgumentParser()
    add_flags_over_recipe(parser)
    names = {action.dest for action in parser._actions} - {"help"}
    of_recipes_alone = {"global_batch_size", "pass_type", "synchronized", "csv", "script"}
    assert names - run_flags - {"axes"} == set(recipe.PATHS) - of_recipes_alone
    elsewhere = {"configurations.inline", "configurations.deepspeed", "optimizer.params", "dataset.seq_len"}
    assert set(recipe.PATHS.values()) == set(recipe.known_paths()) - elsewhere
    assert {field.name for field in fields(Inspection)} < set(recipe.PATHS)


def test_all_is_each_configuration_once_and_values_of_deepspeed_are_set_in_every_one() -> None:
    every = ("zero0", "zero1", "zero2", "zero3", "cpu_optimizer", "cpu_full", "zero2_offload")
    assert points("configurations: {strategies: all}")[0][1].strategies == every
    with_disk = points("{configurations: {strategies: all, stages: [1]}, launch: {nvme_path: /d}}")[0][1]
    assert with_disk.strategies == ("zero0", "zero2", "zero3", "cpu_optimizer", "cpu_full", "nvme", "zero2_offload")
    text = "configurations: {deepspeed: {gradient_clipping: 0.5}}\noptimizer: {params: {lr: 1e-3}}"
    assert points(text)[0][1].set == ({"gradient_clipping": 0.5}, {"optimizer": {"params": {"lr": 0.001}}})


def test_an_inline_configuration_is_a_row_under_any_name() -> None:
    own = points("configurations: {inline: {cpu_optimizer: {}, zero2: {}, mine: {}}}")[0][1]
    assert (own.stages, own.strategies) == ((), ("cpu_optimizer", "zero2"))
    assert [file.name for file in own.inline] == ["mine"]


def test_written_values_are_read_back(subtests: pytest.Subtests) -> None:
    for value in ("1e-4", "no", "010", "1_0", "~", "", "a: b", "# c", 1e-05, [1, None, True], {"a": {}}):
        with subtests.test(value=value):
            shared = [value]
            data = {"section": {"one": value, "two": shared, "three": shared}}
            assert recipe_file.parse_recipe(recipe_file.yaml_text(data)).data == data


def test_the_recipes_of_the_documentation_are_recipes() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(blocks) > 1
    for block in blocks:
        points(block)
