"""Which ops a plan needs, where they are cached, and builds that hang, die or answer nonsense (a fake builder)."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config import deepspeed_config
from ds_bench.config.spec import Configuration, Placement, Strategy
from ds_bench.config.strategies import make_configuration
from ds_bench.errors import PreflightError
from ds_bench.launch import ops, rank_environment
from ds_bench.system import processes
from ds_bench.system.tools import ToolReply
from tests.support import fakes

# ------------------------------------------------------------------ needed ops


def needed(accelerator: Any, *rows: Configuration, optimizer: str = "AdamW") -> list[str]:
    changed = [
        replace(each, deepspeed_config=deepspeed_config.with_optimizer(dict(each.deepspeed_config), optimizer))
        for each in rows
    ]
    return ops.needed_ops(accelerator, changed)


def with_config(row: Configuration, **changes: Any) -> Configuration:
    return replace(row, deepspeed_config={**row.deepspeed_config, **changes})


def test_each_row_needs_its_ops_in_order_of_need() -> None:
    cpu_optimizer, nvme = fakes.offload("cpu_optimizer"), fakes.offload("nvme")
    assert needed("cuda", *map(fakes.zero, range(4)), fakes.offload("none")) == []
    assert needed("cpu") == [ops.SHARED_MEMORY]
    assert needed("cpu", cpu_optimizer, fakes.offload("cpu_full"), nvme) == [
        ops.SHARED_MEMORY, ops.CPU_ADAM, ops.ASYNC_IO,
    ]  # fmt: skip
    only_parameters = make_configuration(Strategy(name="x", label="X", stage=3, offload_param="nvme"))
    assert needed("cuda", only_parameters) == [ops.ASYNC_IO]
    by_optimizer = {name: needed("cuda", cpu_optimizer, optimizer=name) for name in ("Adam", "Adagrad", "Lion")}
    assert by_optimizer == {"Adam": [ops.CPU_ADAM], "Adagrad": ["CPUAdagradBuilder"], "Lion": ["CPULionBuilder"]}


def test_deepcompile_and_quantisation_need_their_ops_at_the_stages_where_they_act() -> None:
    compiled = {stage: with_config(fakes.zero(stage), compile={"deepcompile": True}) for stage in (0, 1, 3)}
    found = {stage: ops.needed_ops("cuda", [row]) for stage, row in compiled.items()}
    assert found == {0: [], 1: [ops.DEEPCOMPILE], 3: [ops.DEEPCOMPILE]}
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        for stage, expected in ((2, []), (3, [ops.QUANTIZER])):
            zero = {**fakes.zero(stage).deepspeed_config["zero_optimization"], key: True}
            assert ops.needed_ops("cuda", [with_config(fakes.zero(stage), zero_optimization=zero)]) == expected
    for config in ({}, {"optimizer": None}, {"optimizer": {"type": None}}, {"zero_optimization": {}}):
        assert ops.needed_ops("cuda", [replace(fakes.zero(0), deepspeed_config=config)]) == []


# ------------------------------------------------------------------ the cache


def test_cache_folder_names_everything_that_a_build_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS_BENCH_OPS_CACHE", str(tmp_path))
    before = ops.cache_folder("cpu")
    assert before.is_relative_to(tmp_path)
    changes: list[Callable[[pytest.MonkeyPatch], object]] = [
        lambda patch: patch.setattr(ops, "installed_version", lambda _package: "9.9"),
        lambda patch: patch.setattr(ops, "read_text", lambda _path: "flags : other"),
        lambda patch: patch.setattr(sys, "prefix", "/elsewhere"),
        lambda patch: patch.setattr("sysconfig.get_python_version", lambda: "3.99"),
    ]
    folders = {before, ops.cache_folder("cuda"), ops.cache_folder("cpu", "8.0;9.0")}
    for change in changes:
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            folders.add(ops.cache_folder("cpu"))
    assert len(folders) == 3 + len(changes)
    monkeypatch.setattr(ops, "installed_version", lambda _package: None)
    with pytest.raises(PreflightError, match=r"torch is not installed"):
        ops.cache_folder("cpu")


def test_op_older_than_its_sources_is_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ops._sources_time() > 0
    mark = tmp_path / f"{ops.CPU_ADAM}.ready"
    mark.write_text("[]")
    monkeypatch.setattr(ops, "_sources_time", lambda: 1000)
    for seconds, built in ((1001, True), (999, False)):
        os.utime(mark, (seconds, seconds))
        assert ops.is_built(ops.CPU_ADAM, tmp_path) == built


def test_no_op_is_loaded_from_a_temporary_folder_that_another_user_can_write_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A user without a home folder has no other place for a cache."""
    for name in ("DS_BENCH_OPS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"ds_bench_cache_{os.getuid()}"
    assert ops.cache_roots() == [own]
    own.chmod(0o777)
    with pytest.raises(PreflightError, match="set DS_BENCH_OPS_CACHE to a folder of your own"):
        ops.cache_roots()


# ------------------------------------------------------------------ builds, by a fake builder

BUILDER = """
import json, os, pathlib, signal, subprocess, sys, time
name = sys.argv[1]
cache = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"])
(cache / "calls").open("a").write(name + "\\n")
print("compiling", name, file=sys.stderr)
library = f"{name}/{name}.so"
answer = {"op": name, "state": "ready", "seconds": 1.5, "reason": "", "libraries": [library]}
mode = os.environ["FAKE_BUILD"]
if mode == "hang":
    (cache / name).mkdir()
    held = open(cache / name / "lock", "w")
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    compiler = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    (cache / "compiler").write_text(str(compiler.pid))
    time.sleep(60)
elif mode == "killed":
    (cache / name).mkdir()
    held = open(cache / name / "lock", "w")
    os.kill(os.getpid(), signal.SIGKILL)
elif mode == "noisy":
    (cache / name).mkdir(exist_ok=True)
    (cache / library).touch()
    print("ninja: build stopped")
    print(json.dumps(answer))
elif mode == "failed":
    print(json.dumps({**answer, "state": "failed", "reason": "CalledProcessError: no g++"}))
elif mode == "ready":
    (cache / name).mkdir(exist_ok=True)
    (cache / library).touch()
    print(json.dumps(answer))
else:
    print(mode)
"""


class Workshop:
    """A cache folder, and a builder whose behaviour a test chooses."""

    def __init__(self, root: Path) -> None:
        self.cache = root / "cache"
        self.said: list[str] = []
        self.elapsed: list[str] = []
        (root / "builder.py").write_text(BUILDER)
        self.interpreter = root / "python"
        """Called as ``python -m ds_bench.worker.build_op NAME``, and as the leader of that."""
        self.interpreter.write_text(
            f'#!/bin/sh\n[ "$2" = ds_bench.system.tools ] && exec {sys.executable} "$@"\n'
            f'exec {sys.executable} {root / "builder.py"} "$3"\n'
        )
        self.interpreter.chmod(0o755)

    def build(self, *names: str, mode: str = "ready", timeout: float = 60) -> dict[str, ops.OpState]:
        variables = {"FAKE_BUILD": mode, "PYTHONPATH": ""}
        say, show = self.said.append, self.elapsed.append
        return ops.prepare_ops(names, self.cache, variables, timeout_seconds=timeout, say=say, show_elapsed=show)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    made = Workshop(tmp_path)
    monkeypatch.setattr(sys, "executable", str(made.interpreter))
    before = processes.descendants()
    yield made
    assert processes.descendants() <= before, "a builder is left"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_op_is_built_once_and_again_if_its_library_is_gone(workshop: Workshop) -> None:
    built = workshop.build("AOpBuilder", "BOpBuilder")
    assert built["BOpBuilder"] == ops.OpState(op="BOpBuilder", ready=True, seconds=1.5)
    assert all(state.ready for state in workshop.build("AOpBuilder", "BOpBuilder", mode="failed").values())
    (workshop.cache / "AOpBuilder" / "AOpBuilder.so").unlink()
    assert not workshop.build("AOpBuilder", mode="failed")["AOpBuilder"].ready
    assert workshop.build("AOpBuilder", mode="noisy")["AOpBuilder"].ready
    assert (workshop.cache / "calls").read_text().split() == ["AOpBuilder", "BOpBuilder", "AOpBuilder", "AOpBuilder"]


def test_failed_build_has_a_reason_and_a_log_and_the_next_run_tries_again(workshop: Workshop) -> None:
    log = workshop.cache / "AOpBuilder.log"
    for mode in ("", "not json", "3", "null", "{}"):
        state = workshop.build("AOpBuilder", mode=mode)["AOpBuilder"]
        assert (state.ready, state.reason) == (False, f"the build ended with code 0; log {log}")
    state = workshop.build("AOpBuilder", mode="failed")["AOpBuilder"]
    assert (state.ready, state.reason) == (False, f"CalledProcessError: no g++; log {log}")
    assert "compiling AOpBuilder" in log.read_text()
    assert workshop.build("AOpBuilder")["AOpBuilder"].ready


NO_TOOLKIT = """
import torch.utils.cpp_extension
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.async_io import AsyncIOBuilder
from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder
torch.cuda.is_available = lambda: True
torch.utils.cpp_extension.CUDA_HOME = None
PinMemoryBuilder.load = lambda self, verbose=False: None
AsyncIOBuilder.is_compatible = lambda self, verbose=False: True
get_accelerator().create_op_builder = lambda name: AsyncIOBuilder()
from ds_bench.worker import build_op
print(build_op.build("AsyncIOBuilder")["reason"])
"""


def test_missing_cuda_toolkit_is_named_where_deepspeed_raises_type_error(tmp_path: Path) -> None:
    """DeepSpeed's own builder, as on a machine with a GPU and no CUDA_HOME."""
    variables = {
        **rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ),
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", NO_TOOLKIT]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert "NoneType" in done.stderr
    remedy = ops.remedy_of(done.stdout.splitlines()[-1])
    assert remedy == "install the CUDA toolkit of torch's CUDA version and set CUDA_HOME"


def test_killed_build_leaves_no_lock(workshop: Workshop) -> None:
    state = workshop.build("AOpBuilder", mode="killed")["AOpBuilder"]
    assert not state.ready
    assert f"code {128 + signal.SIGKILL}" in state.reason
    assert list(workshop.cache.glob("*/lock")) == []


def test_build_that_hangs_is_ended_with_its_compilers_and_its_lock(workshop: Workshop) -> None:
    start = time.monotonic()
    state = workshop.build("AOpBuilder", mode="hang", timeout=2.0)["AOpBuilder"]
    assert time.monotonic() - start < 20
    assert "the build took more than 2 s" in state.reason
    assert len(workshop.elapsed) == 1
    assert not processes.is_alive(int((workshop.cache / "compiler").read_text()))
    assert list(workshop.cache.glob("*/lock")) == []


def test_compilers_keep_the_lock_of_their_op(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the next build begins only after the compilers of a killed run have ended."""
    kept: list[os.stat_result] = []

    def run(*_: object, kept_open: list[int], **__: object) -> ToolReply:
        kept.extend(map(os.fstat, kept_open))
        return ToolReply(objects=(), ending="ended with code 0")

    monkeypatch.setattr(ops, "run_tool", run)
    workshop.build("AOpBuilder")
    assert [os.path.samestat(each, ops.lock_file("AOpBuilder", workshop.cache).stat()) for each in kept] == [True]


def test_one_run_builds_an_op_and_only_those_that_need_it_wait(workshop: Workshop) -> None:
    (workshop.cache / "cpu_adam").mkdir(parents=True)
    (workshop.cache / "cpu_adam" / "lock").touch()
    with ops.lock_file(ops.CPU_ADAM, workshop.cache).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert workshop.build(ops.ASYNC_IO)[ops.ASYNC_IO].ready
        assert workshop.said[0].partition(":")[0] == "removed a stale build lock"
        workshop.said.clear()
        waiting = threading.Thread(target=workshop.build, args=(ops.CPU_ADAM,))
        waiting.start()
        wait_for(lambda: bool(workshop.said))
        assert workshop.said == ["waiting for another run that builds CPUAdam …"]
        assert waiting.is_alive()
        fcntl.flock(file, fcntl.LOCK_UN)
        waiting.join(10)
    assert not waiting.is_alive()
