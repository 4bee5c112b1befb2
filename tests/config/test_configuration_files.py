"""Tests of ``config.configuration_files``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_bench.config.configuration_files import read_configuration_file, read_configuration_files
from ds_bench.errors import UsageError

DEEPSPEED = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}


def write(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_deepspeed_file_is_kept_word_for_word(tmp_path: Path) -> None:
    text = json.dumps(DEEPSPEED, indent=3) + "\n"
    file = read_configuration_file(write(tmp_path, "my config (1).json", text))
    assert (file.kind, file.name, file.text, file.config) == ("deepspeed", "my_config_1", text, DEEPSPEED)
    assert not file.notes


def test_comments_and_trailing_commas_are_read_as_deepspeed_reads_them_and_told_with_their_place(
    tmp_path: Path,
) -> None:
    text = '{\n  // small buckets\n  "zero_optimization": {"stage": 3,},\n  "train_batch_size": 8,\n}\n'
    path = write(tmp_path, "commented.json", text)
    (file,), lines = read_configuration_files([path])
    assert file.config == {"zero_optimization": {"stage": 3}, "train_batch_size": 8}
    assert lines == [
        f"{path}: not strict JSON at line 2, column 3: read as DeepSpeed reads it (hjson); Trainer and Accelerate "
        "refuse the file"
    ]


def test_accelerates_own_keys_become_the_configuration_that_accelerate_makes_of_them(tmp_path: Path) -> None:
    block = {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 4}
    path = write(
        tmp_path, "a.yaml", {"distributed_type": "DEEPSPEED", "mixed_precision": "no", "deepspeed_config": block}
    )
    path.write_text(path.read_text().replace('"no"', "no"))  # which YAML reads as false
    file = read_configuration_file(path)
    assert (file.kind, file.precision, file.config["gradient_accumulation_steps"]) == ("accelerate", "fp32", 4)
    assert file.config["zero_optimization"]["stage"] == 3
    assert file.config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_an_accelerate_file_may_name_a_deepspeed_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path, "sub/ds.json", DEEPSPEED)
    block = {"deepspeed_config_file": "ds.json", "zero_stage": 1}
    path = write(tmp_path, "sub/acc.yaml", yaml.safe_dump({"mixed_precision": "bf16", "deepspeed_config": block}))
    (file,), lines = read_configuration_files([path])
    assert file.config == {"gradient_accumulation_steps": 1, **DEEPSPEED}
    assert file.precision is None
    assert json.dumps(DEEPSPEED) in file.text
    assert "deepspeed_config_file: ds.json" in file.text
    assert len(lines) == 2
    assert "refuses zero_stage, mixed_precision beside" in lines[0]
    assert str(tmp_path / "sub" / "ds.json") in lines[1]


def test_accumulation_that_accelerate_is_not_told_is_the_scripts_or_1_beside_a_deepspeed_file(tmp_path: Path) -> None:
    """DeepSpeedPlugin: "auto" without deepspeed_config_file, 1 where that file has none (utils/dataclasses.py)."""
    write(tmp_path, "own.json", DEEPSPEED | {"gradient_accumulation_steps": "auto"})
    write(tmp_path, "none.json", DEEPSPEED)
    blocks = ({"zero_stage": 2}, {"deepspeed_config_file": "none.json"}, {"deepspeed_config_file": "own.json"})
    paths = [write(tmp_path, f"{number}.yaml", {"deepspeed_config": block}) for number, block in enumerate(blocks)]
    accumulation = [read_configuration_file(path).config["gradient_accumulation_steps"] for path in paths]
    assert accumulation == ["auto", 1, "auto"]


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_trainers_arguments_give_what_auto_stands_for(tmp_path: Path, suffix: str) -> None:
    values = {
        "deepspeed": DEEPSPEED,
        "bf16": True,
        "learning_rate": "2e-5",
        "warmup_ratio": 0.1,
        "max_steps": -1,
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": True,
        "model_name_or_path": "x",
    }
    text = json.dumps(values) if suffix == "json" else yaml.safe_dump(values).replace("'", "")
    file = read_configuration_file(write(tmp_path, f"args.{suffix}", text))
    assert (file.kind, file.precision, file.activation_checkpointing) == ("trainer", "bf16", True)
    assert file.arguments == {"learning_rate": 2e-5, "warmup_steps": 0.1}
    assert file.batch_arguments == {"per_device_train_batch_size": 2}
    assert file.config == DEEPSPEED


def test_a_folder_gives_its_configurations_and_names_the_other_files(tmp_path: Path) -> None:
    write(tmp_path, "one.json", DEEPSPEED)
    write(tmp_path, "two.json", DEEPSPEED)
    write(tmp_path, "package.json", {"name": "x", "scripts": {}})
    write(tmp_path, "notes.txt", "nothing")
    read, lines = read_configuration_files([tmp_path, tmp_path / "one.json"])
    assert [file.name for file in read] == ["one", "two"]
    assert lines == [
        f"left out of {tmp_path}: package.json is no DeepSpeed configuration: it has name, scripts",
        f"{tmp_path / 'one.json'} is given twice and compared once",
    ]


def test_json_is_read_as_json_whatever_its_file_is_called(tmp_path: Path) -> None:
    """YAML takes 2e8 for text."""
    text = '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}}'
    for name in ("a.yaml", "b.config", "c"):
        write(tmp_path, name, text)
    write(tmp_path, "LICENSE", "no configuration"), write(tmp_path, ".hidden", text)
    read, lines = read_configuration_files([tmp_path])
    assert [file.config["zero_optimization"]["reduce_bucket_size"] for file in read] == [2e8] * 3
    assert lines == []


def test_a_named_file_is_looked_for_below_the_folders_above(tmp_path: Path) -> None:
    """Accelerate takes its path from the folder that it is started in, which may be any of them."""
    write(tmp_path, "configs/zero2.json", DEEPSPEED)
    launch = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: configs/zero2.json}"
    file = read_configuration_file(write(tmp_path, "examples/train/accelerate.yaml", launch))
    assert file.deepspeed_file == tmp_path / "configs" / "zero2.json"


def test_files_of_one_name_and_of_a_strategys_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, name, DEEPSPEED)
        for name in (
            "a/ds.json",
            "b/ds.json",
            "b/zero3.json",
            "a/x/ds.json",
            "b/ddp.json",
            "b/設定 1.json",
            "b/設定2.json",
        )
    ]
    read, lines = read_configuration_files(paths)
    assert [file.name for file in read] == ["a_ds", "b_ds", "b_zero3", "x_ds", "b_ddp", "設定_1", "設定2"]
    assert f"{paths[2]} is the row b_zero3, since zero3 is the name of a strategy" in lines


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("package.json", {"name": "x", "version": "1"}, "is no DeepSpeed configuration: it has name, version"),
        ("list.json", [1], "is no JSON object"),
        ("words.json", "no JSON at all", "is no"),
        ("open.json", '{"zero_optimization": {', "is neither JSON nor hjson: line 1"),
        ("twice.json", '{"train_batch_size": 1, "train_batch_size": 2}', "has the key 'train_batch_size' twice"),
        ("nan.json", '{"gradient_clipping": NaN}', "holds NaN"),
        ("large_number.json", '{"gradient_clipping": 1e400}', "Out of range float values"),
        ("day.yaml", "gradient_clipping: 2026-01-01", "cannot be written as JSON"),
        ("digits.json", '{"fp16": ' + "9" * 6000 + "}", "holds a number of too many digits"),
        ("deep.json", '{"fp16": ' * 40 + "1" + "}" * 40, "has more than 32 levels"),
        ("deeper.json", '{"fp16": ' * 9000 + "1" + "}" * 9000, "is nested too deeply"),
        ("large.json", '{"fp16": "' + "x" * 300_000 + '"}', "is larger than 262144 bytes"),
        ("many.json", {"fp16": list(range(10_001))}, "has more than 10,000 values"),
        ("tag.yaml", "fp16: !!python/object/apply:os.system [true]", "is no YAML: line 1, column 7"),
        ("twice.yaml", "fp16: 1\nfp16: 2\n", "has the key 'fp16' twice"),
        ("loop.yaml", "fp16: &a [*a]", "has more than 10,000 values"),
        ("open.yaml", "fp16: [", "is no YAML: line 1"),
        ("date.yaml", "fp16: 2026-99-99", "cannot be read as YAML"),
        ("gone.yaml", "deepspeed: nowhere.json", "or a folder above it, nor below the current folder /"),
        ("itself.yaml", "deepspeed: itself.yaml\nbf16: true", "itself.yaml is no DeepSpeed configuration"),
        ("other.yaml", "deepspeed: package.json", "is no DeepSpeed configuration"),
        ("rate.yaml", "deepspeed: {fp16: {}}\nlearning_rate: fast", "learning_rate is 'fast', no number"),
        ("both.yaml", "deepspeed: {fp16: {}}\nbf16: true\nfp16: true", "bf16 and fp16 are both true"),
        ("null.json", {"deepspeed": None, "bf16": True}, "a Trainer's arguments without DeepSpeed"),
        ("fp8.yaml", "mixed_precision: fp8\ndeepspeed_config: {zero_stage: 2}", "mixed_precision fp8"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(
    tmp_path: Path, name: str, content: Any, told: str
) -> None:
    write(tmp_path, "package.json", {"name": "x", "version": "1"})
    path = write(tmp_path, name, content)
    with pytest.raises(UsageError) as caught:
        read_configuration_files([path])
    assert told in caught.value.problem
    assert str(path) in caught.value.problem
    assert caught.value.remedy


def test_yaml_aliases_that_explode_are_refused_at_once(tmp_path: Path) -> None:
    levels = [f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 10)}]" for n in range(1, 12)]
    merges = [f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}]}}" for n in range(1, 12)]
    for lines in (["k0: &k0 [1]", *levels], ["m0: &m0 {a: 1}", *merges]):
        path = write(tmp_path, "bomb.yaml", "\n".join(["zero_optimization: {stage: 2}", *lines]))
        with pytest.raises(UsageError, match="aliases counted"):
            read_configuration_files([path])


def test_a_missing_file_and_a_device_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", Path("/dev/zero")):
        with pytest.raises(UsageError, match=str(path)):
            read_configuration_files([path])
