"""The command line of a user's script, its placeholders, what it cannot be combined with, and its rows."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench import runner
from ds_bench.analysis.load_results import load
from ds_bench.analysis.merge_results import merge
from ds_bench.api import _how_to_continue
from ds_bench.cli import commands
from ds_bench.cli.report import _flags_of_run
from ds_bench.config.spec import Configuration
from ds_bench.config.training_script import Script, placeholder_values, read_script
from ds_bench.errors import UsageError
from ds_bench.system import invocation
from ds_bench.system.environment import read_interpreter
from tests.support import fakes
from tests.support.fakes import FakeLauncher
from tests.support.scripted_run import ScriptedRun

OWN = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3, "overlap_comm": True}, "my": 1}
OFFLOADING = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "ratio": 0.5}}}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("own.json").write_text(json.dumps(OWN))
    Path("offloading.json").write_text(json.dumps(OFFLOADING))
    Path("old.json").write_text('{"zero_optimization": true}')


def script(*command: str) -> Script:
    return read_script(command, python=None, override=False, accelerate_env=False, engine=None)


def test_only_known_placeholders_are_replaced() -> None:
    command = (
        "train.py",
        "--ds={config}",
        '{"config": {"a": 1}}',
        "{{config}}",
        "{row}-{stage}",
        "{num_gpus}",
        "{{bos}}",
    )
    values = placeholder_values(script(*command), "mine", OWN, 4)
    words = script(*command).words({**values, "config": "/t/c.json"})
    assert words == ["train.py", "--ds=/t/c.json", '{"config": {"a": 1}}', "{config}", "mine-3", "4", "{{bos}}"]


def test_a_command_that_cannot_start_is_refused_with_one_that_can(subtests: pytest.Subtests) -> None:
    for command, error in (
        (
            ["torchrun", "--nproc_per_node", "2", "train.py", "{config}"],
            r"Give only the script: -- train.py '\{config\}'",
        ),
        (["accelerate", "launch", "-m", "pkg.train", "{config}"], r"-- -m pkg.train"),
        (["/usr/bin/python3", "-m", "torch.distributed.run", "train.py"], r"-- train.py"),
        (["-m", "torch.distributed.run", "--nproc_per_node=2", "train.py", "{config}"], r"-- train.py '\{config\}'"),
        (["python", "-m"], "-- train.py"),
        (["train.py", "{config}", "{outputdir}"], r"Write \{output_dir\}"),
        (["absent.py", "{config}"], "does not exist"),
        (["train.sh", "{config}"], "not a Python file"),
        (["train.py", "{{config}}"], r"\{config\} among .*--accelerate-env, or --override-config"),
    ):
        with subtests.test(error), pytest.raises(UsageError, match=error):
            script(*command)


TRAIN = ("--", "train.py", "{config}")
MICRO = ("--configs", "own.json", "--", "train.py", "{config}", "{micro_batch}")


def test_options_that_conflict_with_a_script_are_refused(subtests: pytest.Subtests) -> None:
    for words, error in (
        *(
            (("--configs", "own.json", *flag.split(), *TRAIN), f"{flag.split()[0]}.* and a script cannot be combined")
            for flag in (
                *("--model tiny", "--batch-size 2", "--batch-size auto", "--seq-length 8", "--grad-accum 2"),
                *("--precision bf16", "--data a.u16", "--optimizer Lion", "--checkpoint", "--launcher warm"),
                *("--profile torch", "--monitor", "--seed 3"),
            )
        ),
        (
            ("--base-config", "own.json", "--strategies", "ddp", *TRAIN),
            "--strategies ddp and a script",
        ),
        (("--configs", "own.json", "--base-config", "own.json", *TRAIN), "--configs and --base-config"),
        (
            ("--configs", "own.json", "--override-config", "--accelerate-env", *TRAIN),
            "--accelerate-env cannot be",
        ),
        (("--stages", "1", *TRAIN), "--base-config FILE"),
        (
            ("--base-config", "own.json", "--stages", "2", "--set", "zero_optimization.stage=1", *TRAIN),
            "stage 1 to the row Z",
        ),
        (("--configs", "own.json", "--set", "zero_optimization=2", *TRAIN), "is 2, not a block"),
        (("--base-config", "absent.json", *TRAIN), "^--base-config .*absent.json"),
        (TRAIN, "no configurations"),
        (("--configs", "own.json", "--axis", "attention=sdpa", *TRAIN), "changes the built-in training"),
        (MICRO, "train_micro_batch_size_per_gpu of own is 'auto'"),
        (("--configs", "own.json", "--python", "absent/python", *TRAIN), "is not a program"),
        (("--model", "tiny", "--base-config", "own.json"), "--base-config without a script"),
    ):
        with subtests.test(error):
            command, values = commands.parse(["run", *words])
            with pytest.raises(UsageError, match=error):
                commands.function_of(command)(**values)


def run(scripted: ScriptedRun, *words: str) -> dict[str, Configuration]:
    """Run rows of a script on a machine without processes. Return those that were launched, by name."""
    words = ("--accelerator", "cpu", "--quiet", "--output-dir", str(scripted.output), *words, *TRAIN)
    command, values = commands.parse(["run", *words])
    commands.function_of(command)(**values)
    return {trial.configuration.name: trial.configuration for trial in scripted.launcher.launched}


ZERO_1 = {**OWN, "gradient_clipping": 2, "zero_optimization": {"stage": 1, "overlap_comm": False}}
WITH_CPU = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["--configs", "own.json"], {"own": OWN}),
        (
            "--base-config own.json --stages 1 --axis overlap_comm=false --set gradient_clipping=2".split(),
            {"zero1+overlap_comm=false": ZERO_1},
        ),
        # A strategy decides both offload devices; other settings of a block stay.
        (
            "--base-config offloading.json --stages 2 --strategies cpu_optimizer".split(),
            {"zero2": {"zero_optimization": {"stage": 2}}, "cpu_optimizer": {"zero_optimization": WITH_CPU}},
        ),
        # A file in the old form, which --set fixes.
        ("--configs old.json --set zero_optimization.stage=2".split(), {"old": {"zero_optimization": {"stage": 2}}}),
    ],
)
def test_rows_keep_the_users_file_except_for_requested_changes(
    scripted: ScriptedRun, words: list[str], rows: dict[str, Any]
) -> None:
    assert {name: row.deepspeed_config for name, row in run(scripted, *words).items()} == rows
    if len(rows) == 1:  # it is recommended: ready for the same command
        folder = scripted.folder / "recommended"
        assert [json.loads((folder / "ds_config.json").read_text())] == [*rows.values()]
        assert f"--nproc-per-node=1 train.py {folder.resolve()}/ds_config.json" in (folder / "README.md").read_text()


def test_a_row_of_an_axis_that_the_scripts_own_deepspeed_does_not_read_is_unsupported(
    scripted: ScriptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = replace(read_interpreter(sys.executable), packages={"torch": "2.6.0", "deepspeed": "0.17.6"})
    monkeypatch.setattr(runner, "read_interpreter", lambda _python: old)
    run(scripted, "--base-config", "own.json", "--stages", "2", "3", "--axis", "allgather_sequential=true")
    assert [(row["stage"], row["status"]) for row in scripted.rows()] == [(2, "✅ Success"), (3, "❌ Unsupported")]
    assert "DeepSpeed 0.17.6 does not read zero_optimization.stage3_allgather_" in scripted.rows()[1]["error"]


def test_every_resume_command_repeats_the_script(
    scripted: ScriptedRun,
) -> None:
    scripted.launcher = FakeLauncher("Success", "Interrupted")
    run(scripted, "--configs", "own.json", "offloading.json")
    command, values = commands.parse(["run", "--resume", str(scripted.folder)])
    with pytest.raises(UsageError) as refused:
        commands.function_of(command)(**values)
    line = invocation.command("run", "--resume", str(scripted.folder), *TRAIN)
    assert str(refused.value.remedy).endswith(f": {line}")
    assert str(_flags_of_run(*merge([load(scripted.folder)]))[2]) == line
    assert _how_to_continue(str(scripted.folder)).endswith(", script=['train.py', '{config}'])")
    scripted.launcher = FakeLauncher()
    assert commands.main(shlex.split(line)[shlex.split(line).index("run") :]) == 0
    assert [trial.configuration.name for trial in scripted.launcher.launched] == ["offloading"]


def test_rows_with_auto_do_not_start_once_deepspeed_has_refused_it_in_one(scripted: ScriptedRun) -> None:
    Path("other.json").write_text(json.dumps(OWN | {"my": 2}))
    Path("numbers.json").write_text(json.dumps(OFFLOADING))
    scripted.launcher = FakeLauncher(lambda trial: fakes.failure(trial, "TypeError", kind="auto_refused"))
    assert [*run(scripted, "--configs", "own.json", "other.json", "numbers.json")] == ["own", "numbers"]
    statuses = {row["strategy"]: row["status"] for row in scripted.rows()}
    assert statuses == {"own": "❌ TypeError", "other": "❌ Unsupported", "numbers": "✅ Success"}


def test_the_interpreter_is_this_one_unless_another_is_named() -> None:
    assert script("train.py", "{config}").python == sys.executable
