"""The ops that a plan needs, their cache, builds that fail, and the variables of ranks."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config import deepspeed_config
from ds_bench.config.spec import Configuration, Placement, Strategy
from ds_bench.config.strategies import make_configuration
from ds_bench.errors import PreflightError
from ds_bench.launch import ops, rank_environment
from ds_bench.system.gpu_state import GpuFacts, GpuInventory
from ds_bench.system.helper_programs import ToolReply
from tests.support import fakes

# ------------------------------------------------------------------ needed ops


def with_config(row: Configuration, **changes: Any) -> Configuration:
    return replace(row, deepspeed_config={**row.deepspeed_config, **changes})


def with_optimizer(row: Configuration, optimizer: str) -> Configuration:
    return replace(row, deepspeed_config=deepspeed_config.with_optimizer(dict(row.deepspeed_config), optimizer))


def quantized(stage: int, key: str) -> Configuration:
    zero = {**fakes.zero(stage).deepspeed_config["zero_optimization"], key: True}
    return with_config(fakes.zero(stage), zero_optimization=zero)


CPU_OPTIMIZER = fakes.offload("cpu_optimizer")
ONLY_PARAMETERS = make_configuration(Strategy(name="x", label="X", stage=3, offload_param="nvme"))
COMPILED = {"deepcompile": True}
NEEDED: tuple[tuple[Any, list[Configuration], list[str]], ...] = (
    ("cuda", [*map(fakes.zero, range(4)), fakes.offload("none")], []),
    ("cpu", [], [ops.SHARED_MEMORY]),
    ("cpu", [with_optimizer(row, "AdamW") for row in (CPU_OPTIMIZER, fakes.offload("cpu_full"), fakes.offload("nvme"))],
     [ops.SHARED_MEMORY, ops.CPU_ADAM, ops.ASYNC_IO]),
    ("cuda", [ONLY_PARAMETERS], [ops.ASYNC_IO]),
    ("cuda", [with_optimizer(CPU_OPTIMIZER, "Adam")], [ops.CPU_ADAM]),
    ("cuda", [with_optimizer(CPU_OPTIMIZER, "Adagrad")], ["CPUAdagradBuilder"]),
    ("cuda", [with_optimizer(CPU_OPTIMIZER, "Lion")], ["CPULionBuilder"]),
    # DeepCompile acts from stage 1 on, quantization at stage 3.
    ("cuda", [with_config(fakes.zero(0), compile=COMPILED)], []),
    ("cuda", [with_config(fakes.zero(1), compile=COMPILED)], [ops.DEEPCOMPILE]),
    ("cuda", [quantized(2, "zero_quantized_weights"), quantized(2, "zero_quantized_gradients")], []),
    ("cuda", [quantized(3, "zero_quantized_weights")], [ops.QUANTIZER]),
    ("cuda", [quantized(3, "zero_quantized_gradients")], [ops.QUANTIZER]),
    ("cuda", [replace(fakes.zero(0), deepspeed_config={"optimizer": {"type": None}})], []),
)  # fmt: skip


def test_each_row_needs_its_ops_in_order_of_need() -> None:
    for accelerator, rows, expected in NEEDED:
        assert ops.needed_ops(accelerator, rows) == expected


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
    # The same versions installed again: ninja would compile within a trial, as their headers are newer.
    torch = tmp_path / "lib/python3.11/site-packages/torch/__init__.py"
    torch.parent.mkdir(parents=True)
    torch.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "prefix", str(tmp_path))
        before = ops.cache_folder("cpu")
        os.utime(torch, (1, 1))
        assert ops.cache_folder("cpu") != before
    monkeypatch.setattr(ops, "installed_version", lambda _package: None)
    with pytest.raises(PreflightError, match=r"torch is not installed"):
        ops.cache_folder("cpu")


def test_cache_is_in_the_first_folder_that_can_be_written_and_never_where_another_user_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "denied").mkdir()
    monkeypatch.setattr(os, "access", lambda path, _mode: "denied" not in str(path))
    monkeypatch.setenv("HOME", str(tmp_path / "denied"))
    monkeypatch.setenv("DS_BENCH_OPS_CACHE", str(tmp_path / "denied"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ops.cache_root() == tmp_path / "xdg"
    # A shared folder in which another user has made the folder of these versions.
    monkeypatch.setattr(os, "access", lambda path, _mode: "denied" not in str(path) and "_deepspeed" not in str(path))
    (tmp_path / "xdg").joinpath(ops.cache_folder("cpu").relative_to(tmp_path / "xdg")).mkdir(parents=True)
    assert not ops.cache_folder("cpu").is_relative_to(tmp_path / "xdg")
    monkeypatch.delenv("XDG_CACHE_HOME")
    own = tmp_path / f"ds_bench_cache_{os.getuid()}"
    assert ops.cache_root() == own
    assert ops.cache_folder("cpu").is_relative_to(own)
    own.chmod(0o777)
    with pytest.raises(PreflightError, match="Set DS_BENCH_OPS_CACHE to a folder of your own"):
        ops.cache_root()


# ------------------------------------------------------------------ builds, by a made-up tool


class Builder:
    """Stands for the tool ``worker.build_op``. Each build takes the next reply, and succeeds without one."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache, self.said, self.elapsed = cache, list[str](), list[str]()
        self.replies: list[ToolReply] = []
        self.built: list[str] = []
        monkeypatch.setattr(ops, "run_tool", self._run_tool)

    def _run_tool(self, module: str, name: str, *, listen: Callable[[float], None], **how: Any) -> ToolReply:
        assert (module, how["environment"]["TORCH_EXTENSIONS_DIR"]) == ("worker.build_op", str(self.cache))
        (lock,) = how["kept_open"]  # until the last compiler has ended, so that no other run builds here before
        assert os.path.samestat(os.fstat(lock), (self.cache / "builds").stat())
        listen(1.0)
        how["errors"].write(b"compiling")
        self.built.append(name)
        (self.cache / name).mkdir(exist_ok=True)
        (self.cache / name / "lock").touch()  # of a build that was killed
        if self.replies:
            return self.replies.pop(0)
        (self.cache / name / "lock").unlink()
        (self.cache / name / "op.so").touch()
        return ToolReply(objects=({"state": "ready", "seconds": 1.5, "libraries": [f"{name}/op.so"]},), ending="")

    def build(self, *names: str) -> dict[str, ops.OpState]:
        return ops.prepare_ops(names, self.cache, {}, say=self.said.append, show_elapsed=self.elapsed.append)


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    return Builder(tmp_path / "cache", monkeypatch)


def test_op_is_built_once_and_again_if_its_library_is_gone(builder: Builder) -> None:
    built = builder.build("AOpBuilder", "BOpBuilder")
    assert built["BOpBuilder"] == ops.OpState(op="BOpBuilder", ready=True, seconds=1.5)
    assert builder.elapsed == ["building AOp … 1.0 s", "building BOp … 1.0 s"]
    assert all(state.ready for state in builder.build("AOpBuilder", "BOpBuilder").values())
    (builder.cache / "AOpBuilder" / "op.so").unlink()
    builder.build("AOpBuilder", "BOpBuilder")
    assert builder.built == ["AOpBuilder", "BOpBuilder", "AOpBuilder"]


def test_failed_build_has_a_reason_and_a_log_leaves_no_lock_and_the_next_run_tries_again(builder: Builder) -> None:
    log = builder.cache / "AOpBuilder.log"
    failed = {"state": "failed", "reason": "CalledProcessError: no g++", "seconds": 2.0}
    for reply, reason in (
        (ToolReply(objects=({},), ending="took more than 2 s"), "the build took more than 2 s"),
        (ToolReply(objects=(failed,), ending="ended with code 0"), "CalledProcessError: no g++"),
    ):
        builder.replies = [reply]
        state = builder.build("AOpBuilder")["AOpBuilder"]
        assert (state.ready, state.reason) == (False, f"{reason}; log {log}")
        assert list(builder.cache.glob("*/lock")) == []
    assert log.read_bytes() == b"compiling"
    assert builder.build("AOpBuilder")["AOpBuilder"].ready


def test_one_run_builds_and_another_waits_only_if_an_op_is_missing(builder: Builder) -> None:
    assert builder.build("AOpBuilder")["AOpBuilder"].ready
    with (builder.cache / "builds").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert builder.build("AOpBuilder")["AOpBuilder"].ready
        builder.said.clear()
        waiting = threading.Thread(target=builder.build, args=("AOpBuilder", "BOpBuilder"))
        waiting.start()
        deadline = time.monotonic() + 60
        while not builder.said and time.monotonic() < deadline:
            time.sleep(0.02)
        assert builder.said == ["waiting for another run that is building DeepSpeed's ops …"]
        assert builder.built == ["AOpBuilder"]
        fcntl.flock(file, fcntl.LOCK_UN)
        waiting.join(10)
    assert builder.built == ["AOpBuilder", "BOpBuilder"]


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
    assert remedy == "install the CUDA toolkit that matches torch's CUDA version and set CUDA_HOME"


# ------------------------------------------------------------------ variables of ranks


def test_every_way_to_select_gpus_becomes_numbers_for_deepspeed() -> None:
    """DeepSpeed calls int() on each part between commas (accelerator/cuda_accelerator.py)."""
    cards = GpuInventory(gpus=tuple(GpuFacts(index=index, uuid=f"GPU-{index}aaa") for index in range(4)))
    for selection, numbers in (("0,", "0"), (" 0, 1", "0,1"), ("GPU-3aaa,GPU-1aaa", "3,1"), ("1,-1,2", "1")):
        variables = rank_environment.cuda_environment({"CUDA_VISIBLE_DEVICES": selection}, cards)
        assert variables["CUDA_VISIBLE_DEVICES"] == numbers
    for environ, there in (({}, cards), ({"CUDA_VISIBLE_DEVICES": "1"}, GpuInventory())):
        assert "CUDA_VISIBLE_DEVICES" not in rank_environment.cuda_environment(environ, there)
