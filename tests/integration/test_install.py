"""The wheel in one new environment: reading results without torch, docs/ci_and_python.md, action.yml, and a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from packaging.requirements import Requirement

from ds_bench.launch import ops
from tests.support.real_trials import ROOT

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow, pytest.mark.usefixtures("built_ops")]
RESULT = ROOT / "results/reference/cpu_2cores_2026-11-21/zero_comparison_20261121_154122.json"
RUN = ROOT / "tests/data/zero_run/runs/zero_20261121_093000"
EXTRA = 'pip install "ds-compare[run]"'
RECIPE = """
model: {name: tiny}
training: {steps: 3, warmup_steps: 1, local_batch_size: 2, seq_len: 32}
configurations: {stages: [1]}
launch: {num_gpus: 1, accelerator: cpu}
output: {repeats: 3}
"""
PAGE = (ROOT / "docs" / "ci_and_python.md").read_text(encoding="utf-8").partition("\n## Python\n")[0]


def link_requirements(names: Iterator[str], folder: Path) -> None:
    """Links the installed packages of these requirements, and of theirs, into a folder."""
    waiting, seen = [Requirement(name) for name in names], set[str]()
    while waiting:
        requirement = waiting.pop()
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        distribution = metadata.distribution(requirement.name)
        waiting += [Requirement(text) for text in distribution.requires or ()]
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))


class Machine:
    """An environment with the wheel, and a repository of somebody else."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.wheel, self.repository = wheel, folder / "repository"
        self.repository.mkdir()
        (self.repository / "perf.yaml").write_text(RECIPE)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        self.dependencies, self.readers = packages / "dependencies.pth", folder / "readers"
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
        # Packages are taken from here: installing them would take minutes and gigabytes. pip finds every requirement
        # of the extra among them.
        self.dependencies.write_text(sysconfig.get_path("purelib") + "\n")
        self.run(f'python -m pip install --quiet --no-compile --no-index "ds-compare[run] @ {wheel.as_uri()}"')
        # Ops that are built already, under the name that they have for this environment: building takes minutes.
        cache = self.run("""python -c 'from ds_bench.launch import ops; print(ops.cache_folder("cpu"))'""").stdout
        shutil.copytree(ops.cache_folder("cpu"), cache.strip(), symlinks=True)

    def run(self, script: str, *, code: int | None = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a script as GitHub does: bash that ends at the first command that fails."""
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            capture_output=True,
            text=True,
            cwd=self.repository,
            env={**self.variables, **variables},
            timeout=300,
            check=False,
        )
        assert code in (None, done.returncode), f"{script}\n{done.stdout}{done.stderr}"
        return done


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Machine:
    made = Machine(tmp_path_factory.mktemp("machine"), wheel)
    where = made.run("python -c 'import ds_bench; print(ds_bench.__file__)'").stdout
    assert "site-packages" in where
    assert str(ROOT) not in where
    return made


def test_the_wheel_holds_every_data_file_of_the_package(wheel: Path) -> None:
    present = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "ds_bench").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert [name for path in files if (name := path.relative_to(ROOT).as_posix()) not in present] == []


def test_without_torch_everything_works_that_runs_nothing(machine: Machine, wheel: Path) -> None:
    machine.readers.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    required = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    link_requirements((text for text in required if "extra ==" not in text), machine.readers)
    machine.dependencies.write_text(f"{machine.readers}\n")
    try:
        assert "No module named 'torch'" in machine.run("python -c 'import torch'", code=1).stderr
        (machine.repository / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1, "gradient_cliping": 1}')
        shown = {
            "plan --model llama-2-7b --num-gpus 8 --min-gpus": "ZeRO-3",
            f"report {RESULT} --html page.html --plots plots": "★ ZeRO-0",
            f"compare {RESULT} {RESULT}": "ZeRO-1",
            f"baseline save {RUN} --baselines b.json": "",
            f"baseline check {RUN} --baselines b.json": "passed",
            f"explain zero0 zero3 {RESULT}": "memory",
            "axes": "overlap_comm",
            "models": "gpt2",
        }
        for words, text in shown.items():
            assert text in machine.run(f"ds-compare {words}").stdout
        assert "gradient_clipping" in machine.run("ds-compare check ds.json", code=1).stdout
        assert EXTRA in machine.run("ds-compare doctor", code=2).stdout
        program = (
            f"import ds_bench as d; print(d.plan(model='gpt2').answer, len(d.load({str(RESULT)!r}).to_dataframe()))"
        )
        assert machine.run(f'python -c "{program}"').stdout.endswith("12\n")
        refused = {
            "run --model tiny": EXTRA,
            "ops": EXTRA,
            "plan --model some/model": "ive a model's folder or its config.json",
            f"report {RESULT} --format parquet": 'pip install "ds-compare[parquet]"',
        }
        for words, remedy in refused.items():
            (line,) = machine.run(f"ds-compare {words}", code=2).stderr.splitlines()
            assert remedy in line
    finally:
        machine.dependencies.write_text(sysconfig.get_path("purelib") + "\n")


def commands_of_the_page() -> Iterator[str]:
    """The commands of the page's part on CI in order: shell blocks, then the workflow."""
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL):
        yield from (line.partition("  #")[0].strip() for line in block.splitlines() if line)
    for block in re.findall(r"```yaml\n(name: .*?)```", PAGE, re.DOTALL):
        for job in yaml.safe_load(block)["jobs"].values():
            yield from (step["run"] for step in job["steps"] if "run" in step)


def test_every_command_of_the_page_runs_from_the_wheel_and_the_same_code_raises_no_alarm(machine: Machine) -> None:
    commands = [each for each in commands_of_the_page() if not each.startswith("pip install") and "pytest" not in each]
    measure = commands[0]
    assert sum(each == measure for each in commands) == 2
    for command in dict.fromkeys(commands):  # the workflow's first steps are those of the page
        # Other tests run meanwhile: a tolerance that only another program would exceed.
        done = machine.run(command.replace("baseline save", "baseline save --tolerance 0.95"), code=None)
        undecided = "baseline check" in command and "noise could hide a regression" in done.stderr
        assert done.returncode == (2 if undecided else 0), f"{command}\n{done.stdout}{done.stderr}"
    assert {"run", "baseline", "report", "ops"} <= {each.split()[1] for each in commands}
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
        done = machine.run(command, code=None, PYTEST_ADDOPTS="-k fast" if number else "")
        slower = "compare-fail" in command and "Performance has regressed" in done.stdout + done.stderr
        assert done.returncode == 0 or slower, f"{command}\n{done.stdout}{done.stderr}"
    assert json.loads((machine.repository / "speed.json").read_text())["benchmarks"]


def steps_of_the_action(inputs: Mapping[str, str], outputs: Mapping[str, str]) -> list[tuple[str, dict[str, str]]]:
    """Script and variables of each step, with what GitHub puts in place of expressions."""
    action: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    given = {name: str(entry.get("default", "")) for name, entry in action["inputs"].items()} | dict(inputs)

    def value(match: re.Match[str]) -> str:
        scope, name = match[1].split(".", 1)
        return given[name] if scope == "inputs" else outputs.get(name.rpartition(".")[2], "")

    steps = []
    for step in action["runs"]["steps"]:
        assert "${{" not in step["run"]  # an input in a script would run as a part of it
        variables = {name: re.sub(r"\$\{\{ (.*?) \}\}", value, text) for name, text in step.get("env", {}).items()}
        steps.append((step["run"], variables))
    return steps


def test_the_steps_of_the_action_compare_check_and_write_the_summary(machine: Machine) -> None:
    inputs = {
        "arguments": "perf.yaml",
        "baselines": "limits.json",
        "output-dir": "out dir",
        "package": str(machine.wheel),
    }
    limit: dict[str, Any] = {"name": "tiny/zero1/batch2-seq32", "throughput_tokens_per_sec": 1.0, "tolerance": 0.5}
    limit |= {"peak_memory_mb": None, "version": "1", "timestamp": "2026-11-22T00:00:00+00:00"}
    limits, summary = machine.repository / "limits.json", machine.files["GITHUB_STEP_SUMMARY"]
    limits.write_text(json.dumps({limit["name"]: limit}))
    summary.write_text("")
    outputs: dict[str, str] = {}
    for number in range(len(steps_of_the_action(inputs, outputs))):
        script, variables = steps_of_the_action(inputs, outputs)[number]
        machine.run(script, **variables)
        if machine.files["GITHUB_OUTPUT"].exists():
            outputs |= dict(line.split("=", 1) for line in machine.files["GITHUB_OUTPUT"].read_text().splitlines())
    assert "compared, 0 regressed" in summary.read_text()
    assert "ZeRO-1" in summary.read_text()
    assert {"junit.xml", "check.txt"} <= {path.name for path in (machine.repository / "out dir").iterdir()}
    # A check that fails fails its step, and the summary is written all the same.
    limits.write_text(json.dumps({limit["name"]: limit | {"throughput_tokens_per_sec": 1e9}}))
    *_, check, write_summary = steps_of_the_action(inputs, outputs)
    slow = machine.run(check[0], code=3, **check[1])
    machine.run(write_summary[0], **write_summary[1])
    assert slow.stdout.splitlines()[-1] in summary.read_text()
