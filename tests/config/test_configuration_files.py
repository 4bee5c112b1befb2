"""The user's own configurations are read as DeepSpeed, Accelerate and the Trainer read them, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_bench.config.configuration_files import (
    ConfigSyntaxError,
    ConfigurationFileError,
    parse_hjson,
    position_of,
    read_configuration_file,
    read_configuration_files,
)

DEEPSPEED = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}


def write(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_deepspeed_file_is_kept_word_for_word_and_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    text = json.dumps(DEEPSPEED, indent=3) + "\n"
    file = read_configuration_file(write(tmp_path, "my config (1).json", text))
    assert (file.kind, file.name, file.text, file.config) == ("deepspeed", "my_config_1", text, DEEPSPEED)
    assert not file.notes
    lax = '{\n  // small buckets\n  "zero_optimization": {"stage": 3,},\n  "train_batch_size": 8,\n}\n'
    (file,), lines = read_configuration_files([write(tmp_path, "commented.json", lax)])
    assert file.config == {"zero_optimization": {"stage": 3}, "train_batch_size": 8}
    assert (file.lax_line, len(lines)) == (2, 1)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_accelerates_and_a_trainers_own_keys_become_the_configuration_that_they_make(
    tmp_path: Path, suffix: str
) -> None:
    def read(values: Any) -> Any:
        # In YAML without quotes, where no is false.
        text = json.dumps(values) if suffix == "json" else yaml.safe_dump(values).replace("'", "")
        return read_configuration_file(write(tmp_path, f"a.{suffix}", text))

    block = {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 4}
    file = read({"distributed_type": "DEEPSPEED", "mixed_precision": "no", "deepspeed_config": block})
    assert (file.kind, file.precision, file.config["gradient_accumulation_steps"]) == ("accelerate", "fp32", 4)
    assert file.config["zero_optimization"]["stage"] == 3
    assert file.config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    values = {"deepspeed": DEEPSPEED, "bf16": True, "learning_rate": "2e-5", "warmup_ratio": 0.1, "max_steps": -1}
    file = read(values | {"per_device_train_batch_size": 2, "gradient_checkpointing": True, "model": "x"})
    assert (file.kind, file.precision, file.activation_checkpointing) == ("trainer", "bf16", True)
    assert file.arguments == {"learning_rate": 2e-5, "warmup_steps": 0.1}
    assert (file.batch_arguments, file.config) == ({"per_device_train_batch_size": 2}, DEEPSPEED)
    assert read(values | {"deepspeed": json.dumps(DEEPSPEED)}).config == DEEPSPEED


def test_a_deepspeed_file_that_is_named_is_read_from_next_to_it_or_below_a_folder_above(tmp_path: Path) -> None:
    path = write(tmp_path, "sub/ds.json", DEEPSPEED)
    block = {"deepspeed_config_file": "ds.json", "zero_stage": 1}
    text = yaml.safe_dump({"mixed_precision": "bf16", "deepspeed_config": block})
    (file,), lines = read_configuration_files([write(tmp_path, "sub/acc.yaml", text)])
    assert file.config == {"gradient_accumulation_steps": 1, **DEEPSPEED}
    assert (file.precision, file.conflicts, file.deepspeed_file) == (None, ("zero_stage", "mixed_precision"), path)
    assert json.dumps(DEEPSPEED) in file.text
    assert "deepspeed_config_file: ds.json" in file.text
    assert len(lines) == 2
    # Accelerate takes the path from the folder that it is started in, which may be any of them.
    launch = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: sub/ds.json}"
    assert read_configuration_file(write(tmp_path, "examples/train/a.yaml", launch)).deepspeed_file == path


def test_what_an_accelerate_file_leaves_open_has_accelerates_defaults(tmp_path: Path) -> None:
    """Accumulation is "auto" without deepspeed_config_file, 1 if that file has none (utils/dataclasses.py)."""
    write(tmp_path, "own.json", DEEPSPEED | {"gradient_accumulation_steps": "auto"})
    write(tmp_path, "none.json", DEEPSPEED)
    blocks = ({"gradient_clipping": 1.0}, {"deepspeed_config_file": "none.json"}, {"deepspeed_config_file": "own.json"})
    files = [read_configuration_file(write(tmp_path, "a.yaml", {"deepspeed_config": block})) for block in blocks]
    assert [file.config["gradient_accumulation_steps"] for file in files] == ["auto", 1, "auto"]
    assert files[0].config["zero_optimization"]["stage"] == 2  # not DeepSpeed's 0


def test_a_folder_gives_its_configurations_and_names_the_other_files(tmp_path: Path) -> None:
    """JSON is read under any name, and 2e8 is a number there, unlike in YAML."""
    text = '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}}'
    for name in ("a.yaml", "b.config", "c", ".hidden"):
        write(tmp_path, name, text)
    write(tmp_path, "LICENSE", "nothing")
    write(tmp_path, "package.json", {"name": "x", "scripts": {}})
    read, (left_out, twice) = read_configuration_files([tmp_path, tmp_path / "a.yaml"])
    assert [(file.name, file.config) for file in read] == [(name, json.loads(text)) for name in "abc"]
    assert "package.json: not a DeepSpeed configuration" in left_out
    assert str(tmp_path / "a.yaml") in twice


def test_files_of_one_name_and_of_a_strategys_name_get_the_names_of_their_folders(tmp_path: Path) -> None:
    names = {"a/ds.json": "a_ds", "b/ds.json": "b_ds", "b/zero3.json": "b_zero3", "a/x/ds.json": "x_ds"}
    names |= {"b/ddp.json": "b_ddp", "b/設定 1.json": "設定_1"}
    read, lines = read_configuration_files([write(tmp_path, name, DEEPSPEED) for name in names])
    assert [file.name for file in read] == list(names.values())
    assert len(lines) == 5


REFUSED = {
    "package.json": ('{"name": "x", "version": "1"}', "its first keys: name, version"),
    "twice.json": ('{"train_batch_size": 1, "train_batch_size": 2}', "the key 'train_batch_size' appears twice"),
    "nan.json": ('{"gradient_clipping": NaN}', "NaN is not a JSON number"),
    "deep.json": ('{"fp16": ' * 40 + "1" + "}" * 40, "more than 32 levels"),
    "deeper.json": ('{"fp16": ' * 9000 + "1" + "}" * 9000, "nested too deeply"),
    "tag.yaml": ("fp16: !!python/object/apply:os.system [true]", "not YAML, line 1, column 7"),
    "twice.yaml": ("fp16: 1\nfp16: 2\n", "the key 'fp16' appears twice"),
    "date.yaml": ("fp16: 2026-99-99", "cannot be read as YAML"),
    "gone.yaml": ("deepspeed: nowhere.json", "the folders above it or the current folder /"),
    "itself.yaml": ("deepspeed: itself.yaml\nbf16: true", "itself.yaml is not a DeepSpeed configuration"),
    "rate.yaml": ("deepspeed: {fp16: {}}\nlearning_rate: fast", "learning_rate is 'fast'"),
    "endless.yaml": ("deepspeed: {fp16: {}}\nlearning_rate: inf", "learning_rate is 'inf', not a number"),
    "zero.yaml": (
        "deepspeed: {fp16: {}}\nper_device_train_batch_size: 0",
        "per_device_train_batch_size is 0",
    ),
    "half.yaml": (
        "deepspeed: {fp16: {}}\ngradient_accumulation_steps: 0.5",
        "gradient_accumulation_steps is 0.5",
    ),
    "negative.yaml": (
        "deepspeed: {fp16: {}}\nper_device_train_batch_size: -2",
        "per_device_train_batch_size is -2",
    ),
    "both.yaml": ("deepspeed: {fp16: {}}\nbf16: true\nfp16: true", "bf16 and fp16 are both true"),
    "null.json": ('{"deepspeed": null, "bf16": true}', "deepspeed is null"),
    "fp8.yaml": ("mixed_precision: fp8\ndeepspeed_config: {zero_stage: 2}", "mixed_precision fp8"),
    # Merge keys that explode.
    "merges.yaml": (
        "\n".join(
            ["m0: &m0 {a: 1}", *(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}]}}" for n in range(1, 12))]
        ),
        "aliases counted",
    ),
}


def test_a_file_that_is_not_a_configuration_is_refused_with_a_remedy(tmp_path: Path, subtests: pytest.Subtests) -> None:
    files = {write(tmp_path, name, content): reason for name, (content, reason) in REFUSED.items()}
    for path, reason in {**files, Path("/dev/zero"): "", tmp_path / "missing.json": ""}.items():
        with subtests.test(path.name):
            with pytest.raises(ConfigurationFileError, match=str(path)) as caught:
                read_configuration_files([path])
            assert reason in caught.value.reason
            assert caught.value.remedy


TEXT = """// comment {
{
  "a": 1, # another
  /* "b": 1 */
  "zero": {
    "stage": 3,
    quoteless:
      { device: cpu
      }
    "list": [ {"x": 1},
      {"y": 2}],
  },
  "text": "{ \\" : ,",
}
"""


def test_a_key_has_its_position_and_a_missing_one_that_of_its_block() -> None:
    data = parse_hjson(TEXT)
    assert data["zero"] == {"stage": 3, "quoteless": {"device": "cpu"}, "list": [{"x": 1}, {"y": 2}]}
    places = {"a": (3, 3), "zero": (5, 3), "zero.stage": (6, 5), "zero.quoteless": (7, 5), "text": (13, 3)}
    places |= {"zero.quoteless.device": (8, 9), "zero.list": (10, 5), "zero.absent": (5, 3)}
    assert {path: position_of(TEXT, data, path) for path in places} == places
    assert position_of(TEXT, data, "absent") is None
    escaped = '{"\\u0061": 1}'
    assert position_of(escaped, parse_hjson(escaped), "a") == (1, 12)  # its value


def test_what_deepspeed_cannot_read_is_an_error_with_its_line() -> None:
    for text, position, problem in (
        ('{\n"b": {"c": 1,\n "c": 2}}', (3, 2), "'c' appears twice"),
        ('{\n"a" 1}', (2, 5), "Expecting ':'"),
        ('{"a": 1e999}', (1, None), "infinity"),
        ('{"a": /* ', (1, None), "cannot be read"),
    ):
        with pytest.raises(ConfigSyntaxError, match=problem) as caught:
            parse_hjson(text)
        assert (caught.value.line, caught.value.column) == position
