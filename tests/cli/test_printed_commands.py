"""Every command that the program prints runs as it is printed: in the user's folder, script or program, and Python."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ds_bench.cli import commands, script
from ds_bench.cli.report import build_reports
from ds_bench.models import lookup
from ds_bench.system import invocation
from tests.support import fakes
from tests.support.fakes import FakeLauncher
from tests.support.real_trials import ROOT
from tests.support.scripted_run import Run, ScriptedRun


def run_line(line: str, *more: str, codes: tuple[int, ...] = (0,), variables: Mapping[str, str] | None = None) -> str:
    """Runs a command in the current folder as a shell does. Returns what it prints.

    ``variables``: without them the package is found as in this process.
    """
    done = subprocess.run(
        ["bash", "-c", f"{line} {shlex.join(more)}"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **({"PYTHONPATH": str(ROOT)} if variables is None else variables)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in codes, f"{line}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


# ------------------------------------------------------------------ errors and remedies


@pytest.mark.parametrize(
    ("words", "printed", "code"),
    [
        (["plan", "--bogus"], ["plan", "--help"], 0),
        (["advice", "--configs", "bad.json"], ["check", "bad.json"], 1),
        (["run", "--configs", "bad.json", "--dry-run"], ["check", "{folder}/bad.json"], 1),
        (["zero", "--axis", "color=red"], ["axes"], 0),
        (["check", "fine.json", "--model", "qqqq"], ["models"], 0),
        (["advice", "--model", "uncountable"], ["models"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_commands_in_errors(
    words: list[str],
    printed: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("bad.json").write_text('{"zero_optimization": {"mics_shard_size": 2}}')
    Path("fine.json").write_text("{}")
    if "uncountable" in words:
        monkeypatch.setattr(lookup, "resolve_model", lambda *_, **__: fakes.resolved_model(facts=None))
    if words[0] == "zero":
        assert script.main("zero", fakes.make_config, words[1:]) == 2
    else:
        assert commands.main(words) == 2
    line = invocation.command(*(word.format(folder=tmp_path) for word in printed))
    assert line in capsys.readouterr().err
    run_line(line, codes=(code,))


@pytest.mark.parametrize("family", ["offload", "recipe"])
def test_flags_to_try_are_taken_by_the_command_that_printed_them(
    family: str, scripted: ScriptedRun, run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One tried change of every kind: of the row, of the batch, of the number of steps."""

    def compare(*flags: str, script: FakeLauncher | None = None) -> int:
        if family == "recipe":
            return run(None, "--model=tiny", "--seq-length=16", *flags, script=script)
        return scripted.run(*flags, script=script, family=family)

    tried: set[str] = set()
    for launcher in (FakeLauncher(*["OOM (host)"] * 9), FakeLauncher("Success", *["OOM (host)"] * 9), FakeLauncher()):
        compare("--num-gpus", "2", "--precision", "fp32", script=launcher)
        tried |= set(re.findall(r"^  Next:  the same command with (--.*)$", capsys.readouterr().out, re.MULTILINE))
    flags = {line for line in tried if "RUN_DIR" not in line}
    assert flags, tried
    for line in flags:
        assert compare(*shlex.split(line.replace("DIR", str(tmp_path))), "--dry-run") == 0, line


# ------------------------------------------------------------------ at the end of a run


@pytest.mark.parametrize("family", ["zero", "recipe"])
def test_commands_at_the_end_of_a_run(
    family: Any,
    scripted: ScriptedRun,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The report, the resumption, and the command that follows a provisional answer, which a later report has too."""
    monkeypatch.chdir(tmp_path)
    scripted.launcher = FakeLauncher("Success", "Interrupted")
    if family == "recipe":
        text = "model: {name: tiny}\ntraining: {seq_len: 16}\nconfigurations: {strategies: [zero1, zero3]}"
        assert run(text, script=scripted.launcher) == 130
    else:
        words = ["--model", "tiny", "--seq-length", "16", "--strategies", "zero1", "zero3"]
        assert script.main(family, fakes.make_config, [*words, "--output-dir", str(scripted.output)]) == 130
    shown = capsys.readouterr()
    answer, _, notes = shown.out.partition("\n\n")
    (page,) = re.findall(r"^  \d+ notes? and charts: (.*)$", notes, re.MULTILINE)
    (resume,) = re.findall(r"continue with: (.*)$", shown.err, re.MULTILINE)
    _, next_line, files_line = answer.splitlines()
    assert next_line == f"  Next:  {resume}"
    assert files_line.startswith(f"  Files: {scripted.folder} (to train: its recommended/README.md), ")
    run_line(page)
    assert (tmp_path / "report.html").is_file()
    run_line(resume, "--dry-run")

    def start(line: str) -> int:
        """Run a printed command in this process."""
        words, scripted.launcher = shlex.split(line), FakeLauncher()
        if family == "recipe":
            return commands.main(words[words.index("ds_bench") + 1 :])
        return script.main(family, fakes.make_config, words[words.index("--resume") :])

    assert start(resume) == 0
    ended = json.loads((scripted.folder / "recommendation.json").read_text(encoding="utf-8"))
    (again,) = build_reports([scripted.folder])
    assert ended["try_next"] == str(again.recommendation.try_next)
    (of_flat_rows,) = build_reports([next(scripted.output.glob("*comparison_*.json"))])
    assert str(of_flat_rows.recommendation.try_next) == "the same command with --repeats 3"
    run_line(ended["try_next"], "--dry-run")
    assert start(ended["try_next"]) == 0  # it adds two rounds to this run
    assert [trial.repeat for trial in scripted.launcher.launched] == [1, 1, 2, 2]


# ------------------------------------------------------------------ folders and ways to start

ENVIRONMENTS: dict[str, Callable[[Path], tuple[list[str], Path, dict[str, str]]]] = {
    "a script from elsewhere": lambda there: ([sys.executable, str(ROOT / "offload_comparison.py")], there, {}),
    "an own copy of a script": lambda there: ([sys.executable, "mine.py"], there, {"PYTHONPATH": str(ROOT)}),
    "the package from elsewhere": lambda there: (
        [sys.executable, "-m", "ds_bench", "run"],
        there,
        {"PYTHONPATH": str(ROOT)},
    ),
    "the installed program": lambda there: (
        [str(there / "bin" / "ds-compare"), "run"],
        there,
        {"PATH": f"{there / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    ),
    "another python": lambda there: (
        [sys.executable, str(ROOT / "zero_stage_comparison.py")],
        there,
        {"PATH": f"{there / 'bin'}:{os.environ['PATH']}"},
    ),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_commands_run_in_the_users_environment(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "ds-compare"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom ds_bench.cli.commands import main\nsys.exit(main())\n")
    program.chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to("/bin/false")
    if name == "the installed program":
        (tmp_path / "bin" / "python").unlink()
    source = (ROOT / "zero_stage_comparison.py").read_text()
    (tmp_path / "mine.py").write_text(source.replace("return config", 'return config | {"gradient_clipping": 0.125}'))
    words, folder, variables = ENVIRONMENTS[name](tmp_path)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    variables = {"HF_HUB_OFFLINE": "1", **variables}
    small = ["--model", "tiny", "--seq-length", "16", "--dry-run", "--verbose"]

    def output(*more: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, **variables}
        return subprocess.run([*words, *more], env=environ, capture_output=True, text=True, check=False)

    (axes,) = re.findall(r"List them with (.*)$", output("--axis", "color=red").stderr)
    assert "overlap_comm" in run_line(axes, variables=variables)
    first = output(*small, "--profile", "nsys")
    (recorded,) = re.findall(r"--output=nsys_window (.*)$", first.stderr, re.MULTILINE)
    again = run_line(recorded, "--dry-run", "--verbose", variables=variables)
    assert again.count("gradient_clipping") == first.stdout.count("gradient_clipping") > 0
    assert again.count("0.125") == first.stdout.count("0.125")
    cold = re.findall(r"made by the run\):\n(.*) -m deepspeed\.launcher\.runner", first.stdout)[0]
    run_line(f"{cold} -c 'import ds_bench'", variables=variables)
