"""The command check: its output in each format, and its exit code."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from syrupy.assertion import SnapshotAssertion

from ds_bench.cli import check, commands
from ds_bench.config import lint
from ds_bench.config.rules import RULES

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
ACCELERATE = """\
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  zero_stage: 2
  {}
"""
AUTO = {**GOOD, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
FILES: dict[str, Any] = {
    "bad.json": BAD,
    "good.json": GOOD,
    "commented.json": "// a comment\n" + json.dumps(GOOD),
    "twice.json": '{\n "a": 1,\n "a": 2}',
    "auto.json": AUTO,
    "own.yaml": ACCELERATE.format("offload_param_device: cpu"),
    "names.yaml": ACCELERATE.format("deepspeed_config_file: good.json"),
    "missing.yaml": ACCELERATE.format("deepspeed_config_file: gone.json").replace("  zero_stage: 2\n", ""),
    # Trainer's arguments, where auto is filled in.
    "arguments.json": {"deepspeed": AUTO},
    # Left out of the folder.
    "package.json": {"name": "x"},
    "notes.txt": "text",
    "Dockerfile": "FROM image\nRUN make",
}

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file into the current folder, which is a new one; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write_file(content: str | dict[str, Any], name: str = "ds.json") -> str:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content if isinstance(content, str) else json.dumps(content, indent=1), encoding="utf-8")
        return name

    return write_file


def test_a_folder_of_configurations_as_text_and_as_annotations(
    write: Write, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    for name, content in FILES.items():
        write(content, f"configs/{name}")
    for output_format in ("text", "github"):
        assert commands.main(["check", "configs", "--format", output_format]) == 1
        out = capsys.readouterr().out.replace(str(Path.cwd()), "HERE")
        assert out == snapshot(name=output_format)


def test_the_exit_code_says_whether_the_check_failed_or_found_something(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, name, code in (
        (GOOD, "ds.json", 0),
        ({**GOOD, "wall_clock_breakdown": True}, "ds.json", 0),  # only a hint
        ({**GOOD, "typo": 1}, "ds.json", 1),
        ('{"name": "x", "version": "1.0", "scripts": {}}', "ds.json", 2),
        ('{"a":' * 50_000, "ds.json", 2),
        (" " * 300_000, "ds.json", 2),
        ("a: [1\nb: {", "a.yaml", 2),
        ("a: 1", "b.yaml", 2),
    ):
        assert commands.main(["check", write(content, name)]) == code
        assert len(capsys.readouterr().err.splitlines()) == (code == 2)
    Path("empty").mkdir()
    for arguments in (["absent.json"], ["empty"], [write(GOOD), "--model", "gpt3"], [write(GOOD, "x.json"), "absent"]):
        assert commands.main(["check", *arguments]) == 2


def test_a_folder_fails_for_a_configuration_that_cannot_be_used_and_names_what_cannot_be_read(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(GOOD, "configs/good.json")
    write("apiVersion: {{ x }}\n- a", "configs/chart.yaml")
    write("deepspeed:\n\tmake", "configs/Makefile")
    Path("configs/utf16.json").write_bytes(b"\xff\xfe{}")
    assert commands.main(["check", "configs"]) == 0
    assert capsys.readouterr().err == "left out of configs: utf16.json: not UTF-8 text\n"
    write('{"bf16": {"enabled": true}, "gradient_clipping": NaN}', "configs/nan.json")
    write(ACCELERATE.replace("bf16", "fp8").format("offload_param_device: none"), "configs/fp8.yaml")
    assert commands.main(["check", "configs", "--json"]) == 2
    reports = json.loads(capsys.readouterr().out)
    assert {each["file"]: each["problem"] for each in reports} == {
        "configs/fp8.yaml": "mixed_precision fp8 is not supported",
        "configs/good.json": None,
        "configs/nan.json": "NaN is not a JSON number",
    }


def test_standard_input_is_a_file(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, accelerate = json.dumps({"deepspeed": {**GOOD, "typo": 1}}), ACCELERATE.format("offload_param_device: cpu")
    for text, code in ((BAD, 1), (trainer, 1), (accelerate, 1), (" " * 300_000, 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert commands.main(["check", "-"]) == code
    out = capsys.readouterr().out
    assert "-:5:5: error: zero_optimization.mics_shard_size" in out
    assert "-:5:3: warning: zero_optimization.offload_param" in out


def test_a_file_that_another_one_names_is_reported_once_under_the_given_path(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(GOOD, "configs/good.json")
    write(FILES["names.yaml"], "configs/names.yaml")
    for arguments in (["configs"], ["configs/names.yaml", "configs/good.json"], ["configs", "configs/good.json"]):
        commands.main(["check", *arguments, "--json"])
        files = [entry["file"] for entry in json.loads(capsys.readouterr().out)]
        assert sorted(files) == ["configs/good.json", "configs/names.yaml"]


def test_json_has_every_file_and_finding(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**GOOD, "optimizer": {"type": "OneBitAdam"}}
    commands.main(["check", "--json", write(BAD), write({"name": "x"}, "package.json"), write(config, "one.json")])
    shown = capsys.readouterr()
    bad, other, one = json.loads(shown.out)
    assert shown.err.startswith("ds-compare: package.json: not a DeepSpeed configuration (its first keys: name). Give ")
    assert (bad["file"], bad["problem"], bad["findings"][0]["line"]) == ("ds.json", None, 5)
    assert bad["findings"][0].keys() == {"rule", "level", "path", "reason", "remedy", "source", "line", "column"}
    assert (other["findings"], other["problem"]) == ([], "not a DeepSpeed configuration (its first keys: name)")
    assert one["findings"][0]["reason"].endswith(": DeepSpeed stops when training starts")


def test_a_file_cannot_write_an_annotation_of_its_own(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write({**GOOD, "a\u001b[2J\n::error::b": 1})
    commands.main(["check", "--format", "github", "ds.json", write(BAD, "a,b.json")])
    out = capsys.readouterr().out
    assert "::error file=a%2Cb.json,line=5,col=5,title=removed-key%3A zero_optimization." in out
    assert "\u001b" not in out
    assert not [line for line in out.splitlines() if line.startswith("::error::b")]


def test_the_excerpt_marks_the_key_and_never_shows_a_credential(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    def excerpt(text: str, name: str = "ds.json") -> list[str]:
        commands.main(["check", write(text, name), "--ignore", "hint"])
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith(" ") and " | " in line]

    assert excerpt('{"train_batch_size": 1,\n\t"typo": 1 // 5\n}') == ['     2 |  "typo": 1 // 5', "       |  ^^^^^^"]
    line, carets = excerpt(json.dumps({**GOOD, "steps_per_print": "x" * 200, "bf16": {"enabeld": True}}))[:2]
    assert line[carets.index("^") : carets.rindex("^") + 1] == '"enabeld"'
    assert len(line) <= 130
    for secret in ('"hf_abcdefgh"', "1 // token=abcdefgh", '{"cookie": "bob"}', '{"cookie": "b\\u006fb"}', '"sk-1" 1'):
        assert excerpt(f'{{"train_batch_size": 1,\n"typo": {secret}}}') == [], secret


def test_only_selected_rules_count_and_no_selection_hides_an_unreadable_file(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write({**GOOD, "typo": 1, "wall_clock_breakdown": True, "fp16": {"enable": True}})
    for flags, rules, code in (
        ([], ["unknown-key", "ignored-key", "wall-clock-breakdown"], 1),
        (["--select", "wall-clock-breakdown"], ["wall-clock-breakdown"], 0),
        (["--select", "warning", "--select", "hint"], ["ignored-key", "wall-clock-breakdown"], 1),
        (["--ignore", "error,warning"], ["wall-clock-breakdown"], 0),
        (["--select", "warning", "--ignore", "ignored-key"], [], 0),
    ):
        assert commands.main(["check", "ds.json", "--json", *flags]) == code
        (report,) = json.loads(capsys.readouterr().out)
        assert [finding["rule"] for finding in report["findings"]] == rules
    assert commands.main(["check", write('{"a": 1, "a": 2}', "twice.json"), "--select", "type"]) == 1
    for flags in (["--select", "tipe"], ["--ignore", "tipe"], ["--explain", "tipe"]):
        capsys.readouterr()
        assert commands.main(["check", "ds.json", *flags]) == 2
        assert capsys.readouterr().err == "ds-compare: Unknown rule 'tipe'. Did you mean 'type'?\n"
    assert commands.main(["check", "--explain", "error"]) == 2  # a level, not a rule
    assert commands.main(["check"]) == 2


def test_an_explained_example_breaks_its_rule_as_the_explanation_says(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sub/ds_config.json", "sub/configs/ds_config.json"):
        (Path.cwd() / name).parent.mkdir(parents=True)
        write(GOOD, name)
    assert commands.main(["check", "--explain", "all", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    for each in explained:
        if "compute capability" in each["given"]:  # needs a different machine
            continue
        file = write(each["example"], "sub/ds.json" if each["example"].startswith("{") else "sub/ds.yaml")
        commands.main(["check", "--json", file, *each["given"].split()])
        own = json.loads(capsys.readouterr().out)[0]["findings"]
        (found,) = [finding for finding in own if finding["rule"] == each["rule"]]
        assert {found[name] == each[name] for name in ("level", "remedy", "source")} == {True}, each["rule"]
    # Every rule that the code names has an explanation, and every explanation has a rule.
    code = "".join(Path(module.__file__ or "").read_text(encoding="utf-8") for module in (lint, check))
    named = re.findall(r'(?:Finding|_stops|at_name|file_finding)\(\s*"([\w-]+)"', code)
    rules = {rule.name for rule in RULES if rule.level}
    assert {each["rule"] for each in explained} == {*named, *rules}


def test_an_explanation_reads_as_it_should(capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion) -> None:
    for rule in ("muon-updates-8463", "swap-buffer-too-small"):
        commands.main(["check", "--explain", rule])
    assert capsys.readouterr().out == snapshot
    commands.main(["check", "--explain", "all"])
    assert "\nunknown-key (error): A key that DeepSpeed does not define for this block." in capsys.readouterr().out


def test_the_hook_runs_this_command_on_files_with_names_of_configurations() -> None:
    hooks = Path(commands.__file__).parents[2] / ".pre-commit-hooks.yaml"
    (hook,) = yaml.safe_load(hooks.read_text(encoding="utf-8"))
    program, *arguments = hook["entry"].split()
    assert program == "ds-compare"
    assert commands.build_parser().parse_args([*arguments, "ds_config.json"]).paths == [Path("ds_config.json")]
    names = ["ds_config.json", "configs/zero3.json", "scripts/zero_2_offload.json", "deepspeed.json"]
    assert [name for name in [*names, "package.json", "zeros.json"] if re.search(hook["files"], name)] == names
