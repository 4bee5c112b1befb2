"""What users, scripts and stored files depend on, compared with expectations under ``data/public_surface``.

Everything goes through the two scripts, ``ds-compare``, files and the public Python names, so that the test outlives
any move of modules. Whoever changes the public surface on purpose changes the expectation in the same commit.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import inspect
import io
import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ds_bench.baselines
import ds_bench.benchmarks
import ds_bench.cli
from tests.support.fakes import FakeLauncher, success  # the only internals: runs scripted by tests, without processes
from tests.support.scripted_run import ScriptedRun

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
EXPECTED = TESTS / "data" / "public_surface"
STORED = TESTS / "data" / "zero_run"
STORED_RUN = STORED / "runs" / "zero_20261121_093000"
REFERENCE = ROOT / "results/reference/cpu_2cores_2026-11-21/zero_comparison_20261121_154122.json"
SCRIPTS = ("zero_stage_comparison.py", "offload_comparison.py")
SMALL = ("--model", "tiny", "--seq-length", "16", "--quiet")
JSON_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}

Run = Callable[..., int]


def expected(name: str) -> Any:
    """A stored expectation: parsed if it is JSON, else its text."""
    text = (EXPECTED / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else text


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script file with the flags given and trials that a FakeLauncher plays; returns its exit code."""
    machine = ScriptedRun(tmp_path, monkeypatch)

    def run(script: str | Path, *flags: str, launcher: FakeLauncher | None = None) -> int:
        machine.launcher = launcher or FakeLauncher()
        monkeypatch.setattr(sys, "argv", [str(script), *flags])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        return int(end.value.code or 0)

    return run


def ds_compare(*arguments: str | Path) -> int:
    """Runs the installed command in this process and returns its exit code."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    main: Callable[[], int] = pkgutil.resolve_name(scripts["ds-compare"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ds-compare", *map(str, arguments)])
        patch.setenv("COLUMNS", "160")
        patch.setenv("HF_HUB_OFFLINE", "1")
        return main()


def output_of(*arguments: str | Path, exit_codes: tuple[int, ...] = (0,)) -> str:
    """Standard output of a ``ds-compare`` command that must end with one of these exit codes."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(stream):
        assert ds_compare(*arguments) in exit_codes
    stream.flush()
    return stream.buffer.getvalue().decode()


class ParserReady(Exception):  # noqa: N818 - no error: it ends a command where it would parse its arguments
    """A command has built its parser."""


def parser_of(command: Callable[[], object]) -> argparse.ArgumentParser:
    """The argument parser that a command builds; the command itself does not run."""

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise ParserReady(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        with pytest.raises(ParserReady) as ready:
            command()
    parser: argparse.ArgumentParser = ready.value.args[0]
    return parser


def commands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parser and those of its subcommands, by the words that a user types."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, subparser in action.choices.items():
                yield from commands(f"{name} {word}", subparser)


def flags_of(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """Name of each flag or positional argument → its default, choices and number of values."""
    flags = {}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        default = None if action.default is argparse.SUPPRESS else action.default
        facts = {"default": default, "choices": action.choices and list(action.choices), "nargs": action.nargs}
        flags[" ".join(action.option_strings) or action.dest] = {
            name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            for name, value in facts.items()
            if name == "default" or value is not None
        }
    return flags


def types_by_path(value: Any) -> dict[str, str]:
    """Path of every value in a JSON document, such as ``[].gpu_bytes.parameters`` → the types that occur there."""
    types: defaultdict[str, set[str]] = defaultdict(set)

    def visit(path: str, part: Any) -> None:
        types[path].add(JSON_TYPES.get(type(part), "object"))
        if isinstance(part, dict):
            for key, child in part.items():
                visit(f"{path}.{key}".lstrip("."), child)
        elif isinstance(part, list):
            for child in part:
                visit(f"{path}[]", child)

    visit("", value)
    return {path or "(whole)": " | ".join(sorted(names)) for path, names in types.items()}


def names_of_files(folder: Path) -> list[str]:
    """Paths of all files below a folder, with ``STAMP`` in place of the time in their names; no hidden ones."""
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("[!.]*") if path.is_file()]
    return sorted(re.sub(r"\d{8}_\d{6}", "STAMP", name) for name in files)


def call_signature(function: Callable[..., Any]) -> list[str]:
    """Parameters as a caller sees them: ``name``, ``name=default``; ``*`` before those that must be named."""
    parts: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if parameter.kind is parameter.VAR_KEYWORD:
            parts.append(f"**{parameter.name}")
        elif parameter.default is parameter.empty:
            parts.append(parameter.name)
        else:
            default = str(parameter.default) if isinstance(parameter.default, Path) else repr(parameter.default)
            parts.append(f"{parameter.name}={default}")
    return [re.sub(r"=<.*>$|(?<=^version)=.*", "=…", part) for part in parts]


def without_recommendation(report: str) -> str:
    """A report up to its recommendation, whose wording may be improved; trailing spaces are left out."""
    lines = [line.rstrip() for line in report.splitlines()]
    end = next(number for number, line in enumerate(lines) if "Recommendation" in line)
    return "\n".join(lines[:end]).rstrip() + "\n"


# ------------------------------------------------------------------ commands, flags, exit codes


def all_flags(run_script: Run) -> dict[str, Any]:
    parsers = {script: parser_of(lambda script=script: run_script(script)) for script in SCRIPTS}  # type: ignore[misc]
    parsers |= dict(commands("ds-compare", parser_of(ds_compare)))
    return {name: flags_of(parser) for name, parser in parsers.items()}


def test_commands_and_flags_keep_their_names_defaults_and_choices(run_script: Run) -> None:
    """Commands, flags and choices may be added; those that are written down here stay."""
    present = all_flags(run_script)
    kept: dict[str, dict[str, Any]] = expected("flags.json")
    for command, flags in kept.items():
        for flag, facts in flags.items():
            found = dict(present[command][flag])
            missing = set(facts.get("choices", ())) - set(found.pop("choices", ()))
            assert (command, flag, missing, found) == (
                command,
                flag,
                set(),
                {k: v for k, v in facts.items() if k != "choices"},
            )


def test_exit_codes_of_the_scripts(run_script: Run, tmp_path: Path) -> None:
    zero = ("zero_stage_comparison.py", *SMALL, "--output-dir", str(tmp_path / "out"))
    assert run_script(*zero, launcher=FakeLauncher("OOM")) == 0
    assert run_script(*zero, "--strict", launcher=FakeLauncher("OOM")) == 1
    assert run_script(*zero, "--stages", "1", launcher=FakeLauncher("OOM")) == 1
    assert run_script(*zero, "--stages", "4") == 2
    assert run_script(*zero, "--output-dir", str(ROOT / "README.md")) == 2  # which is no folder: a check before the run
    assert run_script(*zero, launcher=FakeLauncher("Success", "Interrupted")) == 130
    assert run_script(*zero, launcher=FakeLauncher(KeyboardInterrupt())) == 130


def test_the_scripts_and_the_package_run_as_programs(tmp_path: Path) -> None:
    def program(*words: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "COLUMNS": "160"}
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)

    for script in SCRIPTS:
        refused = program(ROOT / script, "--no-such-flag")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr == f"ds-compare: Unknown argument --no-such-flag. See {script} --help\n"
    shown = program("-m", "ds_bench", "report", REFERENCE)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == expected("reference_table_ascii.txt")
    version = program("-m", "ds_bench", "--version")
    assert (version.returncode, version.stdout) == (0, f"{ds_bench.__version__}\n")


def test_the_worker_takes_a_trial_folder_and_leaves_its_files_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ds_bench.worker", str(tmp_path)]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3"}, timeout=60, check=False)
    assert ended.returncode == 1  # there is no trial.json to follow
    assert names_of_files(tmp_path) == ["rank3.beat", "rank3.json", "rank3.log", "rank3.stacks"]
    failure = json.loads((tmp_path / "rank3.json").read_text())["failure"]
    assert "trial.json" in failure["message"]
    assert types_by_path(failure).keys() >= {"rank", "error_class", "message", "phase", "step", "time", "traceback"}


# ------------------------------------------------------------------ files that are written


def test_a_run_and_a_report_write_files_of_the_same_names(run_script: Run, tmp_path: Path) -> None:
    out, report = tmp_path / "out", tmp_path / "report"
    report.mkdir()
    assert run_script("zero_stage_comparison.py", *SMALL, "--output-dir", str(out)) == 0
    (run,) = (out / "runs").iterdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(report)
        output_of("report", run, "--html", "page.html", "--plots", "plots", "--export", "zero1")
    with_export = tmp_path / "with_export"
    flags = ("--output-dir", str(with_export), "--export", "none")
    assert run_script("offload_comparison.py", *SMALL, *flags) == 0
    written = {folder.name: names_of_files(folder) for folder in (out, report, with_export)}
    assert written == expected("files.json")


def test_flat_columns_keep_their_names_order_and_types(
    run_script: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = dict(line.split() for line in expected("flat_columns.txt").splitlines())
    flags = (*SMALL, "--output-dir", str(tmp_path / "out"), "--format", "json", "--num-gpus", "2")
    assert run_script("zero_stage_comparison.py", *flags, launcher=FakeLauncher("Success", "OOM")) == 0
    printed = json.loads(capsys.readouterr().out)
    (json_path,), (csv_path,) = tmp_path.glob("out/*_comparison_*.json"), tmp_path.glob("out/*.csv")
    (recommendation_path,) = tmp_path.glob("out/*_recommendation_*.json")
    rows, recommendation = json.loads(json_path.read_text()), json.loads(recommendation_path.read_text())
    assert printed == [{**row, "recommendation": recommendation} for row in rows]
    with csv_path.open(newline="") as file:
        assert next(csv.reader(file)) == list(columns)
    for row in rows:
        assert isinstance(row.pop("caveat_list"), list)
        assert list(row) == list(columns)
    for row in [*rows, *json.loads(REFERENCE.read_text())]:
        types = {name: JSON_TYPES[type(value)] for name, value in row.items() if name in columns and value is not None}
        assert types == {name: columns[name] for name in types}
    assert [row["status"] for row in rows[:2]] == ["✅ Success", "❌ OOM"]


# ------------------------------------------------------------------ JSON for machines


ROW = "tiny/zero0/batch2-seq32-2ranks"
OTHER_ROW = "tiny/zero2/batch2-seq32-2ranks"


def json_documents(run_script: Run, folder: Path) -> dict[str, Any]:
    """Every kind of JSON document that is made for other programs, with most of what it can hold."""
    flags = ("plan", "--num-gpus", "2", "--gpu", "12GB", "--host-memory", "24", "--min-gpus", "--max-batch", "--json")
    models = {"gpt2": 0, "facebook/opt-1.3b": 1}  # nothing fits for the larger one
    plans = [
        output_of(*flags, "--batch-size", "8", "--model", model, exit_codes=(code,)) for model, code in models.items()
    ]
    baselines = folder / "baselines.json"
    output_of("baseline", "save", STORED_RUN, "--baselines", baselines)
    entries = json.loads(baselines.read_text())
    worse = {**entries[ROW], "throughput_tokens_per_sec": 1e6}
    elsewhere = {**entries[OTHER_ROW], "environment": {**entries[OTHER_ROW]["environment"], "cpu_model": "another"}}
    changed = folder / "changed.json"
    changed.write_text(json.dumps({ROW: worse, OTHER_ROW: elsewhere}))
    verdicts = output_of("baseline", "check", STORED_RUN, "--baselines", changed, "--json", exit_codes=(3,))
    slow_and_small: Any = lambda trial: success(trial, step_seconds=[0.2] * 20, host_peak_bytes=2**30)  # noqa: E731
    launcher = FakeLauncher(by_strategy={"zero3": slow_and_small})
    traded, undecided = folder / "traded", folder / "undecided"
    run_script(SCRIPTS[0], *SMALL, "--goal", "memory", "--output-dir", str(traded), launcher=launcher)
    run_script(SCRIPTS[1], *SMALL, "--output-dir", str(undecided))
    (first,), (second,) = (out.glob("runs/*/recommended/recommendation.json") for out in (traded, undecided))
    return {
        "plan --json": [row for plan in plans for row in json.loads(plan)],
        "doctor --json": json.loads(output_of("doctor", "--json", exit_codes=(0, 2))),
        "baseline check --json": json.loads(verdicts),
        "baselines.json, each entry": list(entries.values()),
        "recommendation.json, two of them": [json.loads(path.read_text()) for path in (first, second)],
    }


def test_json_documents_keep_their_keys_and_types(run_script: Run, tmp_path: Path) -> None:
    documents = json_documents(run_script, tmp_path)
    assert {name: types_by_path(document) for name, document in documents.items()} == expected("json_types.json")
    assert {finding["level"] for finding in documents["doctor --json"]} <= {"ok", "warning", "problem"}
    assert {row["verdict"] for row in documents["plan --json"]} == {"fits", "does not fit"}


def test_a_baselines_file_of_an_earlier_version_is_read_and_decides_the_exit_code(tmp_path: Path) -> None:
    stored = EXPECTED / "baselines.json"
    check = ("baseline", "check", STORED_RUN, "--baselines")
    output_of(*check, stored, exit_codes=(0,))
    output_of(*check, tmp_path / "absent.json", exit_codes=(2,))
    limits = tmp_path / "limits.json"
    for figures, code in (((1.0, 1e6), 0), ((1e6, None), 3), ((None, 1.0), 3)):
        limit = dict(zip(("throughput_tokens_per_sec", "peak_memory_mb"), figures, strict=True))
        limits.write_text(json.dumps({ROW: {"name": ROW, "tolerance": 0.05, **limit}}))
        output_of(*check, limits, "--fail-on", "regression", exit_codes=(code,))
    entry = ds_bench.baselines.load_baseline(ROW, stored)
    assert entry is not None
    assert (entry.throughput_tokens_per_sec, entry.peak_memory_mb) == (pytest.approx(1387.53, abs=0.01), 794.3984375)


# ------------------------------------------------------------------ results read back


def test_results_of_earlier_versions_show_the_same_table(tmp_path: Path) -> None:
    assert output_of("report", REFERENCE) == expected("reference_table.txt")
    verbose = without_recommendation(output_of("report", REFERENCE, "--verbose"))
    assert verbose == expected("reference_table_verbose.txt")
    assert without_recommendation(output_of("report", "--markdown", REFERENCE)) == expected("reference_markdown.md")
    shown = without_recommendation(output_of("report", "--markdown", STORED_RUN))
    assert shown == expected("run_markdown.md")
    for name in (STORED_RUN / "records.jsonl", STORED / "zero_comparison_20261121_093000.json"):
        assert (
            without_recommendation(output_of("report", "--markdown", name)).splitlines()[2:7] == shown.splitlines()[2:7]
        )
    compared = output_of("compare", STORED_RUN, STORED_RUN).splitlines()
    (row,) = (line.split() for line in compared if line.startswith("ZeRO-0"))
    assert row[1:5] == ["1,388", "tokens/s"] * 2


# ------------------------------------------------------------------ Python names


def python_names() -> dict[str, Any]:
    """Public name → how it is called; for a class also its fields and properties."""
    modules = {
        "ds_bench": ds_bench,
        "ds_bench.baselines": ds_bench.baselines,
        "ds_bench.benchmarks": ds_bench.benchmarks,
    }
    values = {f"{where}.{name}": getattr(module, name) for where, module in modules.items() for name in module.__all__}
    values["ds_bench.baselines.BaselineEntry.of"] = ds_bench.baselines.BaselineEntry.of
    values["ds_bench.benchmarks.ThroughputBenchmark.run"] = ds_bench.benchmarks.ThroughputBenchmark.run
    values["ds_bench.cli.main"] = ds_bench.cli.main
    for script in SCRIPTS:
        values[f"{script}: create_deepspeed_config"] = runpy.run_path(str(ROOT / script))["create_deepspeed_config"]
    names: dict[str, Any] = {name: call_signature(value) for name, value in values.items() if callable(value)}
    for name, value in values.items():
        if isinstance(value, type):
            properties = [key for key, _ in inspect.getmembers(value, lambda member: isinstance(member, property))]
            fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
            names[f"{name}: attributes"] = sorted([*properties, *fields])
    return names


def test_python_names_keep_their_signatures_and_attributes() -> None:
    assert python_names() == expected("python_names.json")
    assert str(ds_bench.baselines.DEFAULT_PATH) == "baselines.json"
    assert re.fullmatch(r"\d+\.\d+\.\d+", ds_bench.__version__)
    assert issubclass(ds_bench.benchmarks.BenchmarkFailedError, Exception)
    assert ds_bench.benchmarks.ThroughputBenchmark.group == "throughput"
    assert ds_bench.benchmarks.MemoryBenchmark.group == "memory"


def test_what_a_user_changes_in_create_deepspeed_config_is_what_trains(run_script: Run, tmp_path: Path) -> None:
    line = "    # For example: config"
    edits = {
        "zero_stage_comparison.py": 'config["gradient_clipping"] = stage + batch_size / 8\n',
        "offload_comparison.py": 'config["gradient_clipping"] = strategy.stage + batch_size / 8\n'
        '    assert strategy.name == "cpu_optimizer"\n',
    }
    chosen = {"zero_stage_comparison.py": ("--stages", "3"), "offload_comparison.py": ("--strategies", "cpu_optimizer")}
    for script, edit in edits.items():
        copy, out = tmp_path / script, tmp_path / script.removesuffix(".py")
        source = (ROOT / script).read_text(encoding="utf-8")
        assert source.count(line) == 1
        assert source.index("def create_deepspeed_config(") < 1000  # near the top: a user is meant to edit it
        copy.write_text(source.replace(line, f"    {edit}{line}"), encoding="utf-8")
        assert run_script(copy, *SMALL, *chosen[script], "--batch-size", "2", "--output-dir", str(out)) == 0
        (config,) = out.glob("runs/*/recommended/ds_config.json")
        assert json.loads(config.read_text())["gradient_clipping"] == 3.25
