"""Which ops a plan needs, whose lock is stale, and builds that hang, die or answer nonsense (a fake builder)."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
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
from tests.support import fakes
from tests.support.namespaces import in_namespace

# ------------------------------------------------------------------ what is needed


def needed(accelerator: Any, *strategies: Configuration, optimizer: str = "AdamW") -> list[str]:
    rows = [
        replace(each, deepspeed_config=deepspeed_config.with_optimizer(dict(each.deepspeed_config), optimizer))
        for each in strategies
    ]
    return ops.needed_ops(accelerator, rows)


def test_zero_stages_on_gpus_need_no_op_that_a_gpu_run_builds_ahead() -> None:
    assert needed("cuda", *map(fakes.zero, range(4))) == []


def test_on_the_cpu_ranks_talk_through_shared_memory() -> None:
    assert needed("cpu", fakes.zero(0)) == [ops.SHARED_MEMORY]
    assert needed("cpu") == [ops.SHARED_MEMORY]


def test_an_offloaded_optimizer_needs_its_cpu_version(subtests: pytest.Subtests) -> None:
    for optimizer, op in (
        ("AdamW", ops.CPU_ADAM),
        ("Adam", ops.CPU_ADAM),
        ("Adagrad", "CPUAdagradBuilder"),
        ("Lion", "CPULionBuilder"),
    ):
        with subtests.test(optimizer):
            assert needed("cuda", fakes.offload("cpu_optimizer"), optimizer=optimizer) == [op]
            assert needed("cuda", fakes.offload("none"), optimizer=optimizer) == []


def test_nvme_needs_async_io_and_the_cpu_optimizer() -> None:
    assert needed("cuda", fakes.offload("nvme")) == [ops.CPU_ADAM, ops.ASYNC_IO]


def test_parameters_alone_on_nvme_need_async_io_too() -> None:
    strategy = make_configuration(Strategy(name="x", label="X", stage=3, offload_param="nvme"))
    assert needed("cuda", strategy) == [ops.ASYNC_IO]


def test_deepcompile_needs_its_op_at_the_stages_that_it_acts_at() -> None:
    for stage, expected in ((0, []), (1, [ops.DEEPCOMPILE]), (3, [ops.DEEPCOMPILE])):
        config = {**fakes.zero(stage).deepspeed_config, "compile": {"deepcompile": True}}
        assert needed("cuda", replace(fakes.zero(stage), deepspeed_config=config)) == expected


def test_quantised_communication_needs_its_op_at_stage_3_whoever_asks_for_it() -> None:
    for stage, expected in ((2, []), (3, [ops.QUANTIZER])):
        for key in ("zero_quantized_weights", "zero_quantized_gradients"):
            row = fakes.zero(stage)
            zero = {**row.deepspeed_config["zero_optimization"], key: True}
            assert (
                needed("cuda", replace(row, deepspeed_config={**row.deepspeed_config, "zero_optimization": zero}))
                == expected
            )


def test_an_op_that_several_rows_need_is_built_once_in_order_of_need() -> None:
    rows = [fakes.offload(name) for name in ("none", "cpu_optimizer", "cpu_full", "nvme")]
    assert needed("cpu", *rows) == [ops.SHARED_MEMORY, ops.CPU_ADAM, ops.ASYNC_IO]


def test_a_config_that_says_little_needs_little(subtests: pytest.Subtests) -> None:
    for config in ({}, {"optimizer": None}, {"optimizer": {"type": None}}, {"zero_optimization": {}}):
        with subtests.test(config=config):
            assert ops.needed_ops("cuda", [replace(fakes.zero(0), deepspeed_config=config)]) == []


# ------------------------------------------------------------------ where they lie


def test_ops_of_another_accelerator_or_python_never_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS_BENCH_OPS_CACHE", str(tmp_path))
    cpu, cuda = ops.cache_folder("cpu"), ops.cache_folder("cuda")
    assert cpu != cuda
    assert cpu.is_relative_to(tmp_path)
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in cpu.name
    assert "torch2" in cpu.name
    assert "deepspeed0.19" in cpu.name


def test_ops_of_another_torch_or_processor_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ops.cache_folder("cpu")
    monkeypatch.setattr(ops, "_processor", lambda: "other")
    assert ops.cache_folder("cpu") != before
    monkeypatch.undo()
    monkeypatch.setattr(ops, "_version", lambda _package: "9.9")
    assert ops.cache_folder("cpu") != before


def test_ops_of_sources_in_another_folder_never_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As those of wheels that were unpacked into a folder which PYTHONPATH names: ninja would build them again."""
    folders = set()
    for place in (Path(sys.prefix) / "a", Path(sys.prefix) / "b", tmp_path / "a", tmp_path / "b"):
        monkeypatch.setattr(ops, "_deepspeed_folder", lambda place=place: place)
        folders.add(ops.cache_folder("cpu"))
    assert len(folders) == 3


def test_an_op_that_is_older_than_its_sources_is_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, mark = tmp_path / "ops/csrc/adam/cpu_adam.cpp", tmp_path / f"{ops.CPU_ADAM}.ready"
    source.parent.mkdir(parents=True)
    source.touch()
    mark.write_text("[]")
    monkeypatch.setattr(ops, "_deepspeed_folder", lambda: tmp_path)
    os.utime(source, (1000, 1000))
    for seconds, built in ((1001, True), (999, False)):
        os.utime(mark, (seconds, seconds))
        assert ops.is_built(ops.CPU_ADAM, tmp_path) == built


def test_a_shared_cache_replaces_nothing_that_was_built_since(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ops, "_sources_time", lambda: 0.0)
    shared, own = (tmp_path / name / "ds_bench" / "ops" / "key" for name in ("shared", "own"))
    monkeypatch.setattr(ops, "cache_roots", lambda: [tmp_path / "shared"])
    for folder, seconds, names in ((shared, 1000, (ops.CPU_ADAM, ops.ASYNC_IO)), (own, 2000, (ops.CPU_ADAM,))):
        folder.mkdir(parents=True)
        for name in names:
            mark = folder / f"{name}.ready"
            mark.write_text("[]")
            os.utime(mark, (seconds, seconds))
    ops._copy_shared_cache(own, [ops.CPU_ADAM, ops.ASYNC_IO])
    times = {name: (own / f"{name}.ready").stat().st_mtime for name in (ops.CPU_ADAM, ops.ASYNC_IO)}
    assert times == {ops.CPU_ADAM: 2000, ops.ASYNC_IO: 1000}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize(("owner", "mode", "used"), [(0, 0o777, False), (54321, 0o700, True), (54321, 0o777, False)])
def test_no_op_is_loaded_from_a_folder_in_tmp_that_another_user_can_write_to(owner: int, mode: int, used: bool) -> None:
    """As a user without a home folder, who has no other place for a cache."""
    program = (
        "import os; from ds_bench.launch import ops; from ds_bench.errors import PreflightError\n"
        "os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        "try: print(*ops.cache_roots())\n"
        "except PreflightError as error: print(error.remedy)"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        cache = Path(folder) / "ds_bench_cache_54321"
        cache.mkdir()
        os.chown(cache, owner, owner)
        cache.chmod(mode)
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**processes.import_variables(""), "TMPDIR": folder, "PATH": os.defpath},
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.strip() == (str(cache) if used else "set DS_BENCH_OPS_CACHE to a folder of your own")


def test_the_sources_of_ops_lie_where_they_are_looked_for() -> None:
    assert ops._sources_time() > 0


def test_a_package_that_is_missing_is_told_with_the_remedy() -> None:
    with pytest.raises(PreflightError, match=r"no_such_package is not installed \(pip install .ds-compare\[run\].\)"):
        ops._version("no_such_package")


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
    """A cache folder, and a builder that does what it is told."""

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

    @property
    def calls(self) -> list[str]:
        path = self.cache / "calls"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    made = Workshop(tmp_path)
    monkeypatch.setattr(sys, "executable", str(made.interpreter))
    before = processes.descendants()
    yield made
    assert processes.descendants() <= before, "a builder is left"


def test_an_op_is_built_once_and_is_ready_for_ever(workshop: Workshop) -> None:
    assert workshop.build("AOpBuilder", "BOpBuilder")["BOpBuilder"] == ops.OpState(
        op="BOpBuilder", ready=True, seconds=1.5
    )
    again = workshop.build("AOpBuilder", "BOpBuilder", mode="failed")
    assert all(state.ready for state in again.values())
    assert workshop.calls == ["AOpBuilder", "BOpBuilder"]
    assert "building DeepSpeed's AOp op (once, minutes on few cores) …" in workshop.said
    assert "built AOp in 1.5 s" in workshop.said


def test_an_op_that_fails_is_told_with_reason_and_log_and_the_next_is_built(workshop: Workshop) -> None:
    state = workshop.build("AOpBuilder", mode="failed")["AOpBuilder"]
    log = workshop.cache / "AOpBuilder.log"
    assert not state.ready
    assert state.reason == f"CalledProcessError: no g++; log {log}"
    assert "compiling AOpBuilder" in log.read_text()


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


def test_deepspeeds_type_error_without_a_cuda_toolkit_is_told_as_what_it_is(tmp_path: Path) -> None:
    """DeepSpeed's own builder, as on a machine with a GPU and no CUDA_HOME."""
    variables = {
        **rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ),
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", NO_TOOLKIT]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert "NoneType" in done.stderr
    reason = done.stdout.splitlines()[-1]
    assert ops.remedy_of(reason) == "install the CUDA toolkit of torch's CUDA version and set CUDA_HOME"


def test_a_mark_without_the_library_that_was_built_is_not_believed(workshop: Workshop) -> None:
    workshop.build("AOpBuilder")
    (workshop.cache / "AOpBuilder" / "AOpBuilder.so").unlink()
    assert not workshop.build("AOpBuilder", mode="failed")["AOpBuilder"].ready
    assert workshop.build("AOpBuilder")["AOpBuilder"].ready
    (workshop.cache / "AOpBuilder.ready").write_text("")  # of a release that wrote nothing in it
    workshop.build("AOpBuilder")
    assert workshop.calls == ["AOpBuilder"] * 4


def test_an_op_that_failed_is_tried_again_by_the_next_run(workshop: Workshop) -> None:
    workshop.build("AOpBuilder", mode="failed")
    assert workshop.build("AOpBuilder")["AOpBuilder"].ready


def test_a_builders_noise_before_its_answer_is_passed_over(workshop: Workshop) -> None:
    assert workshop.build("AOpBuilder", mode="noisy")["AOpBuilder"].ready


@pytest.mark.parametrize("answer", ["", "not json", "3", "null", "{}", '{"state": "ready"}'])
def test_an_answer_that_is_none_is_a_failed_build_and_no_exception(workshop: Workshop, answer: str) -> None:
    state = workshop.build("AOpBuilder", mode=answer)["AOpBuilder"]
    assert not state.ready
    assert "the build ended with code 0" in state.reason


def test_a_build_that_is_killed_leaves_no_lock_to_wait_on_for_ever(workshop: Workshop) -> None:
    state = workshop.build("AOpBuilder", mode="killed")["AOpBuilder"]
    assert not state.ready
    assert f"code {128 + signal.SIGKILL}" in state.reason
    assert list(workshop.cache.glob("*/lock")) == []


def test_a_build_that_hangs_is_ended_with_its_compilers_and_its_lock(workshop: Workshop) -> None:
    start = time.monotonic()
    state = workshop.build("AOpBuilder", mode="hang", timeout=3.0)["AOpBuilder"]
    assert time.monotonic() - start < 20
    assert not state.ready
    assert "the build took more than 3 s" in state.reason
    assert re.fullmatch(r"building AOp … 1\.\d s building AOp … 2\.\d s", " ".join(workshop.elapsed))
    assert not processes.is_alive(int((workshop.cache / "compiler").read_text()))
    assert list(workshop.cache.glob("*/lock")) == []


def test_a_build_ends_with_its_compilers_when_its_run_is_killed_and_only_then_another_begins(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        f"import sys; sys.executable = {str(workshop.interpreter)!r}; import pathlib; from ds_bench.launch import ops;"
        f"ops.prepare_ops(['AOpBuilder'], pathlib.Path({str(workshop.cache)!r}), {{'FAKE_BUILD': 'hang'}}, say=print)"
    )
    monkeypatch.undo()  # the real interpreter
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    compiler = workshop.cache / "compiler"
    deadline = time.monotonic() + 60
    while not (compiler.exists() and compiler.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(1)  # for it to ignore SIGTERM
    assert processes.is_alive(int(compiler.read_text()))
    run.kill()
    run.wait()
    with ops.lock_file("AOpBuilder", workshop.cache).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not processes.is_alive(int(compiler.read_text()))


def test_a_lock_left_by_an_earlier_run_is_removed_before_building_and_said(workshop: Workshop) -> None:
    (workshop.cache / "cpu_adam").mkdir(parents=True)
    (workshop.cache / "cpu_adam" / "lock").touch()
    assert workshop.build("AOpBuilder")["AOpBuilder"].ready
    assert any("removed a stale build lock" in line for line in workshop.said)


def test_one_run_at_a_time_builds_and_the_other_says_that_it_waits(workshop: Workshop) -> None:
    workshop.cache.mkdir()
    with ops.lock_file(ops.CPU_ADAM, workshop.cache).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = threading.Thread(target=workshop.build, args=(ops.CPU_ADAM,))
        waiting.start()
        deadline = time.monotonic() + 10
        while not workshop.said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert workshop.said == ["waiting for another run that builds CPUAdam …"]
        assert waiting.is_alive()
        fcntl.flock(file, fcntl.LOCK_UN)
        waiting.join(10)
    assert not waiting.is_alive()


def test_run_does_not_wait_for_another_runs_build_of_an_op_that_it_does_not_need(workshop: Workshop) -> None:
    slow = threading.Thread(target=workshop.build, args=(ops.ASYNC_IO,), kwargs={"mode": "hang", "timeout": 8})
    slow.start()
    try:
        while not (workshop.cache / "compiler").exists():
            time.sleep(0.01)
        workshop.said.clear()
        assert workshop.build(ops.CPU_ADAM)[ops.CPU_ADAM].ready
        assert slow.is_alive()
        assert not any("waiting" in line or "stale" in line for line in workshop.said)
    finally:
        slow.join()


def test_no_ops_are_no_builds(workshop: Workshop) -> None:
    assert workshop.build() == {}
    assert workshop.calls == []


# ------------------------------------------------------------------ shared caches, containers, no locks


def test_a_cache_that_cannot_be_written_is_taken_over_and_nothing_is_built_twice(tmp_path: Path) -> None:
    shared, home = tmp_path / "shared", tmp_path / "home"
    built = shared / "ds_bench" / "ops" / ops.cache_folder("cpu").name
    (built / "a_op").mkdir(parents=True)
    (built / "a_op" / "a_op.so").write_text("compiled")
    (built / "AOpBuilder.ready").write_text('["a_op/a_op.so"]')
    program = (
        "from ds_bench.launch import ops; folder = ops.cache_folder('cpu');"
        "states = ops.prepare_ops(['AOpBuilder'], folder, {}, say=print);"
        "print(folder, states['AOpBuilder'].ready, (folder / 'a_op' / 'a_op.so').read_text())"
    )
    told = in_namespace(
        "--mount",
        script=f"mount --bind {shared} {shared}; mount -o remount,ro,bind {shared};"
        f'DS_BENCH_OPS_CACHE={shared} XDG_CACHE_HOME={home} {sys.executable} -c "{program}"',
    )
    assert told == f"{home}/ds_bench/ops/{built.name} True compiled"


def test_a_cache_on_a_file_system_without_locks_is_built_in_with_a_note(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert workshop.build("AOpBuilder")["AOpBuilder"].ready
    assert any("cannot be locked (No locks available)" in line for line in workshop.said)


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
