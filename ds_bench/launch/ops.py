"""Builds DeepSpeed's compiled ops before the first trial, in our own cache.

DeepSpeed compiles an op on first use, which takes minutes and would be part of the measurement. The ops that a plan
needs are therefore built here, with a timeout, by one process at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config.deepspeed_config import is_deepcompiled, optimizer_kind
from ..config.spec import Accelerator, Configuration, block_of
from ..errors import PreflightError
from ..records.json_files import write_json
from ..system import files
from ..system.environment import Interpreter, install_command, installed_version
from ..system.helper_programs import run_tool
from ..system.host_resources import read_text
from ..units import format_duration
from .scratch import make_private, remove_stale_locks

CPU_ADAM, FUSED_ADAM, ASYNC_IO, SHARED_MEMORY = (
    "CPUAdamBuilder",
    "FusedAdamBuilder",
    "AsyncIOBuilder",
    "ShareMemCommBuilder",
)
DEEPCOMPILE, QUANTIZER = "DeepCompileBuilder", "QuantizerBuilder"
_OPTIMIZER_OPS = {"adam": CPU_ADAM, "adamw": CPU_ADAM, "adagrad": "CPUAdagradBuilder", "lion": "CPULionBuilder"}
_FUSED_OPTIMIZER_OPS = {"adam": FUSED_ADAM, "adamw": FUSED_ADAM, "lion": "FusedLionBuilder"}
NO_TOOLKIT = "there is no CUDA toolkit: CUDA_HOME is not set, and no nvcc is found"
NO_LIBAIO = "libaio's header or library was not found"
_REMEDIES = {
    r"libaio|-laio\b": "install libaio's headers: apt-get install libaio-dev, or dnf install libaio-devel",
    r"CUDA toolkit|CUDA_HOME|\bnvcc\b|-lcuda(?:rt)?\b": "install the CUDA toolkit that matches torch's CUDA "
    "version and set CUDA_HOME",
    r"[Nn]inja|[cg]\+\+": "install a C++ compiler and ninja: apt-get install g++, pip install ninja",
}
"""Pattern in the reason that an op is missing → remedy. The first match counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpState:
    """Whether one op can be used on this machine."""

    op: str
    """DeepSpeed's builder class."""
    ready: bool
    reason: str = ""
    """Why the op cannot be used; empty if it can."""
    seconds: float = 0.0
    """Time to build and load the op; 0 if it was already built."""


def remedy_of(reason: str) -> str:
    """Return the remedy for an op that is missing for this reason."""
    return next((remedy for cause, remedy in _REMEDIES.items() if re.search(cause, reason)), "see the build log")


def needed_ops(accelerator: Accelerator, configurations: Iterable[Configuration]) -> list[str]:
    """Return the ops without which trials of these configurations cannot run, in build order."""
    # On a CPU DeepSpeed loads this op with the first process group, in every configuration (comm/torch.py).
    needed = [SHARED_MEMORY] if accelerator == "cpu" else []
    for configuration in configurations:
        optimizer_op = _OPTIMIZER_OPS.get(optimizer_kind(configuration.deepspeed_config))
        if optimizer_op and configuration.offloads_optimizer:
            needed.append(optimizer_op)
        if configuration.uses_nvme:
            needed.append(ASYNC_IO)
        # At stage 0 DeepSpeed only uses torch.compile (runtime/engine.py).
        if is_deepcompiled(configuration.deepspeed_config) and configuration.stage > 0:
            needed.append(DEEPCOMPILE)
        zero = block_of(configuration.deepspeed_config, "zero_optimization")
        # Only stage 3 reads these keys (runtime/engine.py).
        if configuration.stage == 3 and (zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients")):
            needed.append(QUANTIZER)
        needed += configuration.requires.ops
    return list(dict.fromkeys(needed))


def loaded_ops(accelerator: Accelerator, configurations: Sequence[Configuration]) -> list[str]:
    """Return the needed ops, and the ops of GPU optimizers, which torch's own optimizers can replace."""
    on_gpu = [each for each in configurations if not each.offloads_optimizer and not each.is_reference]
    kinds = [optimizer_kind(each.deepspeed_config) for each in on_gpu] if accelerator == "cuda" else []
    fused = map(_FUSED_OPTIMIZER_OPS.get, kinds)
    return list(dict.fromkeys([*needed_ops(accelerator, configurations), *filter(None, fused)]))


def cache_folder(
    accelerator: Accelerator, architectures: str | None = None, interpreter: Interpreter | None = None
) -> Path:
    """Return the folder of ops for this Python, torch, DeepSpeed, accelerator, processor and CUDA architectures.

    ``interpreter``: of a user's script; None for this one.
    """
    find_version = installed_version if interpreter is None else interpreter.packages.get
    python = sysconfig.get_python_version() if interpreter is None else interpreter.python_version
    parts = [".".join(python.split(".")[:2])]
    for package in ("torch", "deepspeed"):
        if (version := find_version(package)) is None:
            raise PreflightError(f"{package} is not installed", remedy=f"install with {install_command()}")
        parts.append(f"{package}{version}")
    # Ops are compiled for this processor (-march=native), and hosts may share the folder. Builds contain absolute
    # paths, and a different version of ninja would build again.
    cpu = (read_text(Path("/proc/cpuinfo")) or "").splitlines()
    flags = next((line for line in cpu if line.startswith(("flags", "Features"))), "")
    prefix = Path(sys.prefix if interpreter is None else interpreter.prefix)
    # After a reinstallation of the same versions, ninja would compile again when a trial loads an op.
    installed = [
        path.stat().st_mtime_ns
        for package in ("torch", "deepspeed")
        for path in prefix.glob(f"lib/python3*/site-packages/{package}/__init__.py")
    ]
    tools = f"{flags} {prefix} {installed} {find_version('ninja')}"
    parts += [accelerator, hashlib.sha256(tools.encode()).hexdigest()[:12]]
    if architectures:
        parts.append(architectures.replace(";", "+"))
    path = Path("ds_bench", "ops", "_".join(parts))
    return cache_root(path) / path


def cache_root(path: Path = Path("ds_bench")) -> Path:
    """Return this user's cache folder: the first of the configured ones and ~/.cache where ``path`` is writable.

    Otherwise return a folder in the temporary directory. Raises PreflightError if another user can write there, because
    compiled code is loaded from it.
    """
    configured = [os.environ.get("DS_BENCH_OPS_CACHE"), os.environ.get("XDG_CACHE_HOME")]
    roots = [Path(name).absolute() for name in configured if name]
    with contextlib.suppress(RuntimeError):  # no HOME, and no entry for this user in the system's list
        roots.append(Path.home() / ".cache")
    for root in roots:
        if os.access(files.nearest_existing(root / path), os.W_OK | os.X_OK):
            return root
    own = Path(tempfile.gettempdir()) / f"ds_bench_cache_{os.getuid()}"
    if not make_private(own):
        raise PreflightError(f"{own} belongs to another user", remedy="set DS_BENCH_OPS_CACHE to a folder of your own")
    return own


def prepare_ops(
    names: Iterable[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    timeout_seconds: float = 1800.0,
    say: Callable[[str], None],
    show_elapsed: Callable[[str], None] = lambda _text: None,
    python: str | None = None,
) -> dict[str, OpState]:
    """Build each op that is not built yet, in its own process. A failed op is a state, not an exception.

    ``show_elapsed``: called once a second with the build's duration. ``python``: interpreter of a user's script.
    Raises PreflightError if the folder cannot be created or locked.
    """
    states = {name: OpState(op=name, ready=True) for name in names}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in remove_stale_locks(folder):
            say(f"removed a stale build lock: {stale}")
        if all(is_built(name, folder) for name in states):
            return states
        waiting = "waiting for another run that is building DeepSpeed's ops …"
        with files.locked_file(folder / "builds", lambda: say(waiting)) as lock:
            remove_stale_locks(folder)  # left by the run that was waited for
            for name in states:
                if is_built(name, folder):  # perhaps by the run that was waited for
                    continue
                op = name.removesuffix("Builder")
                say(f"building DeepSpeed's {op} op (once; takes minutes on few cores) …")

                def on_progress(seconds: float, op: str = op) -> None:
                    show_elapsed(f"building {op} … {format_duration(seconds)}")

                states[name] = _build(name, folder, environment, timeout_seconds, on_progress, lock, python)
                if states[name].ready:
                    say(f"built {op} in {format_duration(states[name].seconds)}")
                else:
                    remove_stale_locks(folder)
    except OSError as error:
        problem = f"{error.filename or folder} cannot be written or locked: {error.strerror}"
        raise PreflightError(problem, remedy="set DS_BENCH_OPS_CACHE to a local folder of your own") from None
    return states


def is_built(name: str, folder: Path) -> bool:
    """Return whether an earlier run built this op, and the libraries that it loaded from this folder still exist."""
    try:
        libraries = json.loads((folder / f"{name}.ready").read_text())
        return all((folder / library).is_file() for library in libraries)
    except (OSError, ValueError):
        return False


def _build(
    name: str,
    folder: Path,
    environment: Mapping[str, str],
    timeout_seconds: float,
    on_progress: Callable[[float], None],
    lock: int,
    python: str | None,
) -> OpState:
    log = folder / f"{name}.log"
    with log.open("wb") as errors:
        reply = run_tool(
            "worker.build_op",
            name,
            environment={**environment, "TORCH_EXTENSIONS_DIR": str(folder)},
            timeout_seconds=timeout_seconds,
            errors=errors,
            listen=on_progress,
            python=python,
            # Held until the last compiler has ended, so that no other run builds here in the meantime.
            kept_open=[lock],
        )
    answer = reply.last_object("the build")
    if answer.get("state") == "ready":
        # Only once the op has been loaded, because other runs trust this file.
        write_json(folder / f"{name}.ready", answer["libraries"])
        return OpState(op=name, ready=True, seconds=answer["seconds"])
    reason = answer.get("reason") or f"the build {reply.ending}"
    return OpState(op=name, ready=False, reason=f"{reason}; log {log}", seconds=answer.get("seconds", 0.0))
