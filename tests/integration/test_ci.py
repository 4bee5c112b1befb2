"""docs/ci.md and action.yml as a user of the wheel has them: in a repository of their own, without this one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from ds_bench.launch import ops
from tests.support.real_trials import ROOT

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow, pytest.mark.usefixtures("built_ops")]
RECIPE = """
model: {name: tiny}
training: {steps: 10, warmup_steps: 2, local_batch_size: 2, seq_len: 32}
configurations: {stages: [1]}
launch: {num_gpus: 1, accelerator: cpu}
output: {repeats: 3}
"""
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
BUSY = "the CPU was busy"


class Machine:
    """An environment with the wheel, and a repository of somebody else."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.wheel, self.repository = wheel, folder / "repository"
        self.repository.mkdir()
        (self.repository / "perf.yaml").write_text(RECIPE)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        # Dependencies are taken from here: installing them would take minutes and gigabytes.
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.files = {name: folder / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
        # Without pytest-xdist's variables too: in its workers pytest-benchmark writes no file.
        left_out = ("PYTHON", "PYTEST_", "GITHUB_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        self.variables = {
            **kept,
            **{name: str(path) for name, path in self.files.items()},
            "DS_BENCH_OPS_CACHE": str(folder / "cache"),
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTION_PATH": str(folder / "action"),
            "GITHUB_WORKSPACE": str(self.repository),
            "PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}",
        }
        self.run(f'python -m pip install --quiet --no-deps "{wheel}"')
        # Ops that are built already, under the name that they have for this environment: building takes minutes.
        cache = self.run(
            """python -c 'from ds_bench.launch import ops; print(ops.cache_folder("cpu"))'"""
        ).stdout.strip()
        shutil.copytree(ops.cache_folder("cpu"), cache, symlinks=True)

    def run(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a script as GitHub does: bash that ends at the first command that fails."""
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        environment = {**self.variables, **variables}
        return subprocess.run(
            command, capture_output=True, text=True, cwd=self.repository, env=environment, timeout=900, check=False
        )


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Machine:
    made = Machine(tmp_path_factory.mktemp("machine"), wheel)
    where = made.run("python -c 'import ds_bench; print(ds_bench.__file__)'").stdout
    assert "site-packages" in where
    assert str(ROOT) not in where
    return made


def commands_of_the_page() -> Iterator[str]:
    """The commands of docs/ci.md in order: shell blocks, then the workflow."""
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL):
        yield from (line.partition("  #")[0].strip() for line in block.splitlines() if line)
    for block in re.findall(r"```yaml\n(name: .*?)```", PAGE, re.DOTALL):
        for job in yaml.safe_load(block)["jobs"].values():
            yield from (step["run"] for step in job["steps"] if "run" in step)


def test_every_command_of_the_page_runs_from_the_wheel_and_the_same_code_raises_no_alarm(machine: Machine) -> None:
    commands = [each for each in commands_of_the_page() if not each.startswith("pip install") and "pytest" not in each]
    measure, save, *others = [each.replace("baseline save", "baseline save --tolerance 0.95") for each in commands]
    for _ in range(5):  # other programs may use the processors for a while
        shutil.rmtree(machine.repository / "perf", ignore_errors=True)
        measured, saved = machine.run(measure), machine.run(save)
        assert measured.returncode == 0, measured.stderr
        if saved.returncode == 0:
            break
        assert BUSY in saved.stdout, saved.stderr
    else:
        pytest.xfail("other programs used the processors all the time: no baseline is saved")
    for command in others:
        if command == measure:
            shutil.rmtree(machine.repository / "perf")  # the workflow begins in a checkout
        done = machine.run(command)
        undecided = "baseline check" in command and "noise hides a regression" in done.stderr
        assert done.returncode == (2 if undecided else 0), f"{command}\n{done.stdout}{done.stderr}"
    assert sum(each == measure for each in commands) == 2
    assert {"baseline", "report", "ops"} <= {each.split()[1] for each in others}
    assert ElementTree.parse(machine.repository / "perf" / "junit.xml").getroot().tag == "testsuites"
    assert "ZeRO-1" in machine.files["GITHUB_STEP_SUMMARY"].read_text()


def test_the_tests_of_the_page_pass_with_pytest(machine: Machine) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    tests = machine.repository / "tests"
    tests.mkdir()
    small = block.replace(", batch_size=4, seq_length=512", "").replace(
        'model_name="gpt2"', 'model_name="tiny", batch_size=2, seq_length=32, num_steps=3, device="cpu"'
    )
    assert small.count('"tiny"') == 2
    (tests / "test_speed.py").write_text(small)
    commands = [command for command in commands_of_the_page() if "pytest" in command]
    assert len(commands) == 3
    for number, command in enumerate(commands):
        # pytest-benchmark's flags say nothing to the test of memory, which is passed once.
        done = machine.run(command, PYTEST_ADDOPTS="-k fast" if number else "")
        slower = "compare-fail" in command and "Performance has regressed" in done.stdout + done.stderr
        assert done.returncode == 0 or slower, f"{command}\n{done.stdout}{done.stderr}"
    assert json.loads((machine.repository / "speed.json").read_text())["benchmarks"]


def steps_of_the_action(
    inputs: Mapping[str, str], outputs: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, str], bool]]:
    """Script, variables and condition of each step, with what GitHub puts in place of expressions."""
    action: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    given = {name: str(entry.get("default", "")) for name, entry in action["inputs"].items()} | dict(inputs)

    def value(match: re.Match[str]) -> str:
        scope, name = match[1].split(".", 1)
        return given[name] if scope == "inputs" else outputs.get(name.rpartition(".")[2], "")

    for step in action["runs"]["steps"]:
        assert "${{" not in step["run"]  # an input in a script would run as a part of it
        variables = {name: re.sub(r"\$\{\{ (.*?) \}\}", value, text) for name, text in step.get("env", {}).items()}
        condition = step.get("if", "")
        wanted = ("inputs.baselines" not in condition or given["baselines"]) and (
            "steps.compare.outputs.run" not in condition or outputs.get("run")
        )
        yield step["run"], variables, bool(wanted)


def test_the_steps_of_the_action_compare_check_and_write_the_summary(machine: Machine) -> None:
    inputs = {
        "arguments": "perf.yaml", "baselines": "limits.json", "output-dir": "out dir", "package": str(machine.wheel),
    }  # fmt: skip
    limit: dict[str, Any] = {"name": "tiny/zero1/batch2-seq32", "throughput_tokens_per_sec": 1.0, "tolerance": 0.5}
    limit |= {"peak_memory_mb": None, "version": "1", "timestamp": "2026-11-22T00:00:00+00:00"}
    limits, summary = machine.repository / "limits.json", machine.files["GITHUB_STEP_SUMMARY"]
    limits.write_text(json.dumps({limit["name"]: limit}))
    summary.write_text("")
    outputs: dict[str, str] = {}
    for number in range(len(list(steps_of_the_action(inputs, outputs)))):
        script, variables, wanted = list(steps_of_the_action(inputs, outputs))[number]
        assert wanted
        done = machine.run(script, **variables)
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        if machine.files["GITHUB_OUTPUT"].exists():
            lines = machine.files["GITHUB_OUTPUT"].read_text().splitlines()
            outputs |= dict(line.split("=", 1) for line in lines)
    assert "compared, 0 regressed" in summary.read_text()
    assert "ZeRO-1" in summary.read_text()
    assert {"junit.xml", "check.txt"} <= {path.name for path in (machine.repository / "out dir").iterdir()}
    # A check that fails fails its step, and the summary is written all the same.
    limits.write_text(json.dumps({limit["name"]: limit | {"throughput_tokens_per_sec": 1e9}}))
    steps = list(steps_of_the_action(inputs, outputs))
    slow = machine.run(steps[2][0], **steps[2][1])
    assert slow.returncode == 3 or BUSY in slow.stdout, slow.stdout
    assert machine.run(steps[3][0], **steps[3][1]).returncode == 0
    assert slow.stdout.splitlines()[-1] in summary.read_text()
