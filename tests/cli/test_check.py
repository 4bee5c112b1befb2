"""The command check: what it prints in each format, and with which exit code."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_bench.cli import commands

GOOD = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
BAD = """\
{
  "train_micro_batch_size_per_gpu": 1,
  "zero_optimization": {
    "stage": 3,
    "mics_shard_size": 8
  }
}
"""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file into the current folder, which is a new one; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write_file(content: str | dict[str, Any], name: str = "ds.json") -> str:
        Path(name).write_text(content if isinstance(content, str) else json.dumps(content, indent=1), encoding="utf-8")
        return name

    return write_file


def test_a_finding_has_its_place_reason_remedy_and_source(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", write(BAD)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("ds.json:5: error: zero_optimization.mics_shard_size: the feature was removed")
    assert out[1].endswith("[removed-key, runtime/config.py]")
    assert out[2] == "ds.json: hint: gradient_clipping: unset: 1.0 since DeepSpeed 0.19.3, no clipping before"
    assert out[-1] == "1 file checked: 1 error, 1 hint"


def test_hints_alone_are_no_failure(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", write(GOOD)]) == 0
    assert capsys.readouterr().out == "1 file checked: nothing found\n"
    assert commands.main(["check", write({**GOOD, "wall_clock_breakdown": True})]) == 0
    assert commands.main(["check", write({**GOOD, "typo": 1})]) == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("package.json", '{"name": "x", "version": "1.0", "scripts": {}}', "it has name, version, scripts"),
        ("list.json", "[1]", "is no JSON object"),
        ("deep.json", '{"a":' * 50_000, "is nested too deeply"),
        ("large.json", " " * 300_000, "is larger than"),
        ("notes.yaml", "a: 1", "is no DeepSpeed configuration"),
        ("binary.json", "", "is no DeepSpeed configuration: it has no key"),
    ],
)
def test_a_file_that_is_no_configuration_exits_2_and_the_others_are_checked(
    write: Write, capsys: pytest.CaptureFixture[str], name: str, content: str, said: str
) -> None:
    assert commands.main(["check", write(content, name), write(BAD)]) == 2
    shown = capsys.readouterr()
    assert "mics_shard_size" in shown.out
    (line,) = shown.err.splitlines()
    assert line.startswith(f"ds_bench: {name} ")
    assert said in line
    assert line.endswith("(give a DeepSpeed JSON, an Accelerate YAML, or a Trainer's arguments)")


def test_a_missing_file_exits_2(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "absent.json"]) == 2
    problem, _, remedy = capsys.readouterr().err.partition(" (")
    assert problem == "ds_bench: absent.json No such file or directory"
    assert remedy == "give a DeepSpeed JSON, an Accelerate YAML, or a Trainer's arguments)\n"


def test_what_deepspeed_cannot_parse_is_an_error_with_its_line(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["check", write('{\n "a": 1,\n "a": 2}')]) == 1
    assert "ds.json:3: error: DeepSpeed cannot read it: the key 'a' stands twice" in capsys.readouterr().out


def test_comments_are_read_and_told(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", write("// a comment\n" + json.dumps(GOOD))]) == 0
    assert "ds.json:1: hint: no strict JSON (expecting value)" in capsys.readouterr().out


def test_a_folder_is_its_configurations(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write(GOOD, "a.json"), write(BAD, "b.json"), write({"name": "x"}, "package.json"), write("text", "notes.txt")
    assert commands.main(["check", "."]) == 1
    assert "2 files checked" in capsys.readouterr().out
    Path("empty").mkdir()
    assert commands.main(["check", "empty"]) == 2
    assert "empty has no DeepSpeed configuration" in capsys.readouterr().err


def test_a_named_file_is_told_where_it_is_or_where_it_was_looked_for(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {}\n"
    Path("configs").mkdir()
    write(launch.format("gone.json"), "configs/gone.yaml"), write(launch.format("ds.json"), "configs/found.yaml")
    write(GOOD, "configs/ds.json")
    assert commands.main(["check", "configs"]) == 1
    out = capsys.readouterr().out
    assert "configs/gone.yaml:3: error: deepspeed_config.deepspeed_config_file: " in out
    assert f"gone.json is not below {Path.cwd()}/configs or a folder above it" in out
    assert "configs/found.yaml:3: hint: deepspeed_config.deepspeed_config_file: found as configs/ds.json" in out


def test_standard_input_is_a_file(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BAD.encode())))
    assert commands.main(["check", "-"]) == 1
    assert "-:5: error: zero_optimization.mics_shard_size" in capsys.readouterr().out


def test_json_has_every_file_and_finding(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    commands.main(["check", "--json", write(BAD), write({"name": "x"}, "package.json")])
    bad, other = json.loads(capsys.readouterr().out)
    assert (bad["file"], bad["problem"], bad["findings"][0]["line"]) == ("ds.json", None, 5)
    assert bad["findings"][0].keys() == {"rule", "level", "path", "reason", "remedy", "source", "line"}
    assert (other["findings"], other["problem"]) == ([], "is no DeepSpeed configuration: it has name")


def test_annotations_name_file_and_line_and_escape_what_would_end_them(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["check", "--format", "github", write(BAD, "a,b.json")]) == 1
    error, notice = capsys.readouterr().out.splitlines()
    assert error.startswith(
        "::error file=a%2Cb.json,line=5,title=removed-key%3A zero_optimization.mics_shard_size::the"
    )
    assert notice.startswith("::notice file=a%2Cb.json,title=open-gradient-clipping%3A gradient_clipping::unset")


def test_the_terminal_is_not_steered_by_a_file(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    commands.main(["check", write({**GOOD, "a\u001b[2J\n::error::b": 1, "bf16": {"enabled": "\u001b[2J"}})])
    commands.main(["check", "--format", "github", "ds.json"])
    out = capsys.readouterr().out
    assert "\u001b" not in out
    assert not [line for line in out.splitlines() if line.startswith("::error::b")]


ACCELERATE = """\
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  zero_stage: 2
  offload_param_device: cpu
"""


def test_an_accelerate_file_is_checked_at_its_own_lines(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", write(ACCELERATE, "accelerate.yaml")]) == 1
    assert "accelerate.yaml:5: warning: zero_optimization.offload_param: parameters are" in capsys.readouterr().out


def test_auto_is_no_matter_where_the_trainer_fills_it_in(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**GOOD, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
    assert commands.main(["check", write(config), write({"deepspeed": config}, "arguments.json")]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if "hint" in line] == [
        "ds.json",
        "2 files checked",
    ]


def test_the_file_that_an_accelerate_file_names_is_checked_too(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(BAD)
    text = ACCELERATE.replace("offload_param_device: cpu", "deepspeed_config_file: ds.json")
    assert commands.main(["check", write(text, "accelerate.yaml")]) == 1
    out = capsys.readouterr().out
    assert "accelerate.yaml:5: error: deepspeed_config.deepspeed_config_file: Accelerate refuses zero_stage" in out
    assert "ds.json:5: error: zero_optimization.mics_shard_size" in out


def test_an_unknown_model_is_refused_with_its_neighbours(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", write(GOOD), "--model", "gpt3"]) == 2
    assert "--model gpt3 is no built-in model (nearest: gpt2" in capsys.readouterr().err


def test_neither_torch_nor_deepspeed_is_loaded(write: Write) -> None:
    program = (
        "import sys; from ds_bench.cli import commands; commands.main(sys.argv[1:]);"
        "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'deepspeed', 'transformers', 'pandas'})"
    )
    arguments = ["check", write(BAD), "--model", "gpt2"]
    root = Path(commands.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(root)},
    )
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_hook_runs_this_command_on_files_with_names_of_configurations() -> None:
    (hook,) = yaml.safe_load(
        (Path(commands.__file__).parents[2] / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    )
    program, *arguments = hook["entry"].split()
    assert program == "ds-compare"
    assert commands.build_parser().parse_args([*arguments, "ds_config.json"]).paths == [Path("ds_config.json")]
    names = ["ds_config.json", "configs/zero3.json", "scripts/zero_2_offload.json", "deepspeed.json"]
    assert [name for name in [*names, "package.json", "zeros.json"] if re.search(hook["files"], name)] == names


def test_a_folder_is_checked_without_its_other_text_files_and_broken_yaml_is_one_line(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(GOOD)
    write("FROM image\nRUN make", "Dockerfile")
    assert commands.main(["check", "."]) == 0
    assert capsys.readouterr().out == "1 file checked: nothing found\n"
    assert commands.main(["check", write("a: [1\nb: {", "broken.yaml")]) == 2
    assert capsys.readouterr().err.startswith("ds_bench: broken.yaml is no YAML: line 2")
