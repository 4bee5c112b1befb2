"""The hook in a user's script: what it writes down a second time, how it counts, and which exception it reports."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from ds_bench.config import training_script
from ds_bench.records import rank_files

PACKAGE = Path(rank_files.__file__).parents[1]
FILE = PACKAGE / "worker" / "script_hook" / "ds_bench_script_hook.py"
LOADED = ("worker/failure.py", "worker/measured_memory.py", "worker/cpu_load.py", "system/redaction.py")
LOADED_BY_THESE = (
    "system/host_resources.py",
    "system/processes.py",
    "worker/interpreter_facts.py",
    "worker/build_op.py",
)


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("script_hook_under_test", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_written_down_a_second_time_is_the_same(hook: ModuleType) -> None:
    assert (hook.PHASES, hook.BEAT.format) == (rank_files.PHASES, rank_files._BEAT.format)
    assert hook.OWN_KEYS == training_script.OWN_KEYS


def test_what_runs_in_the_scripts_interpreter_needs_only_the_standard_library_and_an_old_python() -> None:
    for name in (FILE, FILE.with_name("sitecustomize.py"), *LOADED, *LOADED_BY_THESE):
        text = (PACKAGE / name).read_text()
        nodes = list(ast.walk(ast.parse(text, feature_version=(3, 9))))
        at_once = [node for node in ast.parse(text).body if isinstance(node, ast.Import)]
        packages = {alias.name.partition(".")[0] for node in at_once for alias in node.names} - {"torch"}
        assert packages <= sys.stdlib_module_names, name
        # Neither does the grammar of 3.9 refuse these, nor do they exist there.
        keywords = {word.arg for node in nodes if isinstance(node, ast.Call) for word in node.keywords}
        assert not keywords & {"slots", "kw_only", "strict"}, name


@pytest.mark.parametrize(
    ("arguments", "keywords", "expected"),
    [
        ((), {"input_ids": [[5, 6, 0]], "labels": [[5, 6, -100]], "attention_mask": [[1, 1, 0]]}, (3, 2, 11, 0)),
        ((), {"pixels": [[0.5]], "labels": [[3, 4]]}, (2, 2, 7, 0)),
        (([[0.5]], [[1, 2, 3]]), {}, (3, 3, 6, 0)),
        (({"input_ids": [[7, 7]]},), {}, (2, 2, 14, 0)),
        # Packed into one row, and image classes, one for each sample.
        ((), {"position": [0.5], "input_ids": [7, 8]}, (2, 2, 15, 0)),
        ((), {"labels": [3, 9], "pixels": [[0.5], [0.5]]}, (0, 0, 12, 2)),
        ((0.5, [[0.5], [0.1], [0.2]]), {}, (0, 0, None, 3)),
        ((), {}, (0, 0, None, 0)),
    ],
)
def test_tokens_are_ids_else_labels_else_the_first_whole_numbers(
    hook: ModuleType, arguments: Any, keywords: Any, expected: tuple[int | None, ...]
) -> None:
    def tensors(value: Any) -> Any:
        return BatchEncoding(named(value)) if isinstance(value, dict) else torch.tensor(value)

    def named(values: dict[str, Any]) -> dict[str, Any]:
        return {name: torch.tensor(value) for name, value in values.items()}

    counts = hook.count_tokens(tuple(map(tensors, arguments)), named(keywords))
    found = [None if counts[name] is None else int(counts[name]) for name in hook.COUNTS]
    assert tuple(found) == expected


def raise_root() -> None:
    raise ValueError("of the script")


def accident_in_finally() -> None:
    try:
        raise_root()
    finally:
        None.save_model()  # type: ignore[attr-defined]


def meant_instead() -> None:
    try:
        raise_root()
    except ValueError:
        raise KeyError("meant")  # noqa: B904 - without from


def meant_from() -> None:
    try:
        raise_root()
    except ValueError as error:
        raise KeyError("meant") from error


@pytest.mark.parametrize(
    ("function", "root"), [(accident_in_finally, ValueError), (meant_instead, KeyError), (meant_from, KeyError)]
)
def test_an_accident_in_a_finally_does_not_hide_the_exception_before_it(
    hook: ModuleType, function: Any, root: type[BaseException]
) -> None:
    with pytest.raises((AttributeError, KeyError)) as raised:
        function()
    assert type(hook.find_root(raised.value)) is root


def test_an_overriding_configuration_keeps_the_scripts_batch_optimizer_and_precision(
    hook: ModuleType, tmp_path: Path
) -> None:
    row = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_batch_size": 8}
    own = {"zero_optimization": {"stage": 0}, "fp16": {"enabled": True}, "optimizer": {"type": "Lion"}}
    (tmp_path / "own.json").write_text(json.dumps(own))
    rank = SimpleNamespace(config=row)
    expected = {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}, "optimizer": {"type": "Lion"}}
    assert hook.Hook.replaced(rank, tmp_path / "own.json", marked=False) == expected
    # What has passed through Accelerate, which fills in "auto", is not replaced a second time.
    marked = hook.Hook.replaced(rank, own, marked=True)
    assert hook.Hook.replaced(rank, {**marked, "train_batch_size": 16}, marked=False) == {
        **expected,
        "train_batch_size": 16,
    }


ENDS = """
import json, os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
import ds_bench_script_hook
ds_bench_script_hook.install()
sys.stdout = None
{}
"""


@pytest.mark.parametrize(
    ("script", "error_class", "text"),
    [
        ("sys.exit('the data set is gone')", "NoEngine", "the data set is gone"),
        # A script that starts itself again in its own process, as to set LD_PRELOAD.
        (
            "os.environ.get('AGAIN') or os.execve(sys.executable, sys.orig_argv, {**os.environ, 'AGAIN': '1'})",
            "NoEngine",
            "",
        ),
        ("thread = threading.Thread(target=lambda: {}['x']); thread.start(); thread.join()", "KeyError", "KeyError"),
        # A signal: its handler raised, Python's own or the script's.
        ("os.kill(os.getpid(), signal.SIGINT)", None, ""),
        (
            "def end(*_): raise KeyboardInterrupt\nsignal.signal(signal.SIGTERM, end)\nos.kill(os.getpid(), 15)",
            None,
            "",
        ),
    ],
)
def test_an_exit_leaves_its_last_line_and_an_exception_of_a_thread_is_the_scripts(
    script: str, error_class: str | None, text: str, tmp_path: Path
) -> None:
    """None: no file of the rank, so that the signal that ended it is the cause."""
    workload = {"warmup_steps": 2, "num_steps": 5, "script": {"engine": None, "config_source": "command"}}
    trial = {"trial": {"workload": workload, "placement": {"gpu_memory_limit_bytes": None}}}
    (tmp_path / "trial.json").write_text(json.dumps(trial))
    (tmp_path / "ds_config.json").write_text("{}")
    variables = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "DS_BENCH_SCRIPT": str(tmp_path)}
    with (tmp_path / "rank0.log").open("w") as log:
        command = [sys.executable, "-c", ENDS.replace("{}", script, 1), str(FILE.parent)]
        ended = subprocess.run(command, env=variables, stdout=log, stderr=log, check=False)
    if error_class is None:
        assert (ended.returncode, (tmp_path / "rank0.json").exists()) == (-signal.SIGINT, False)
        return
    failure = json.loads((tmp_path / "rank0.json").read_text())["failure"]
    assert failure["error_class"] == error_class
    assert text in failure["traceback"]
