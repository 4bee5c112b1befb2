"""Builds DeepSpeed's compiled ops before the first trial, in a cache of ours.

DeepSpeed compiles an op on first use, for minutes, which would be part of what is measured. A build that is killed
leaves an empty file ``lock`` for which every later build and load waits without end (torch/utils/file_baton.py). So the
ops that a plan needs are built here, with a timeout, each by one process at a time, and locks that no process holds
open are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..config.deepspeed_config import is_deepcompiled, optimizer_kind
from ..config.spec import Accelerator, Configuration, block_of
from ..errors import PreflightError
from ..records.json_files import write_json
from ..system import build_locks, files
from ..system.environment import install_command, installed_version
from ..system.tools import run_tool
from ..units import format_duration

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
NO_LIBAIO = "libaio's header or library is not found"
_REMEDIES = {
    r"libaio|-laio\b": "install libaio's headers: apt-get install libaio-dev, or dnf install libaio-devel",
    r"CUDA toolkit|CUDA_HOME|\bnvcc\b|-lcuda(?:rt)?\b": "install the CUDA toolkit of torch's CUDA version and set "
    "CUDA_HOME",
    r"[Nn]inja|[cg]\+\+": "install a C++ compiler and ninja: apt-get install g++, pip install ninja",
}
"""Remedies by a pattern for the reason why an op is missing; the first that matches is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpState:
    """Whether one op can be used here."""

    op: str
    """DeepSpeed's builder class."""
    ready: bool
    reason: str = ""
    """Why not."""
    seconds: float = 0.0
    """Time to build and load; 0 if it was built before."""


def remedy_of(reason: str) -> str:
    """What the user can do where an op is missing for this reason."""
    return next((remedy for cause, remedy in _REMEDIES.items() if re.search(cause, reason)), "see the build log")


def needed_ops(accelerator: Accelerator, configurations: Iterable[Configuration]) -> list[str]:
    """The ops without which trials of these configurations cannot run, in build order."""
    # DeepSpeed loads it on a CPU with the first process group (comm/torch.py), in every configuration.
    needed = [SHARED_MEMORY] if accelerator == "cpu" else []
    for configuration in configurations:
        optimizer_op = _OPTIMIZER_OPS.get(optimizer_kind(configuration.deepspeed_config))
        if optimizer_op and configuration.offloads_optimizer:
            needed.append(optimizer_op)
        if configuration.uses_nvme:
            needed.append(ASYNC_IO)
        # At stage 0 DeepSpeed uses torch.compile alone (runtime/engine.py).
        if is_deepcompiled(configuration.deepspeed_config) and configuration.stage > 0:
            needed.append(DEEPCOMPILE)
        zero = block_of(configuration.deepspeed_config, "zero_optimization")
        # DeepSpeed gives these two to stage 3 alone (runtime/engine.py).
        if configuration.stage == 3 and (zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients")):
            needed.append(QUANTIZER)
        needed += configuration.requires.ops
    return list(dict.fromkeys(needed))


def loaded_ops(accelerator: Accelerator, configurations: Sequence[Configuration]) -> list[str]:
    """The needed ops, and those of optimizers that stay on a GPU; without the latter torch's own are used."""
    on_gpu = [each for each in configurations if not each.offloads_optimizer and not each.is_reference]
    kinds = [optimizer_kind(each.deepspeed_config) for each in on_gpu] if accelerator == "cuda" else []
    fused = map(_FUSED_OPTIMIZER_OPS.get, kinds)
    return list(dict.fromkeys([*needed_ops(accelerator, configurations), *filter(None, fused)]))


def cache_folder(accelerator: Accelerator, architectures: str | None = None) -> Path:
    """The folder of built ops for this Python, torch, DeepSpeed, accelerator, processor and CUDA architectures.

    Loading an op writes beside it (a lock, ninja's log). So it lies in the first of :func:`cache_roots` that can be
    written, which may not be the one that is configured: groups share caches that only one user can write.
    """
    parts = [
        sysconfig.get_python_version(),
        *(f"{name}{_version(name)}" for name in ("torch", "deepspeed")),
        accelerator,
        _processor(),
        _build_tools(),
        *([architectures.replace(";", "+")] if architectures else []),
    ]
    folders = [root / "ds_bench" / "ops" / "_".join(parts) for root in cache_roots()]
    return next((folder for folder in folders if _can_write(folder)), folders[0])


def cache_roots() -> list[Path]:
    """Where this user's caches may lie: as configured, in the home folder, or else in the temporary folder.

    The last is left out if another user owns it, since compiled code is loaded from it.
    """
    configured = [os.environ.get("DS_BENCH_OPS_CACHE"), os.environ.get("XDG_CACHE_HOME")]
    roots = [Path(name).absolute() for name in configured if name]
    with contextlib.suppress(RuntimeError):  # no HOME, and no entry for this user in the system's list
        roots.append(Path.home() / ".cache")
    own = Path(tempfile.gettempdir()) / f"ds_bench_cache_{os.getuid()}"
    if not any(map(_can_write, roots)):
        with contextlib.suppress(OSError):
            own.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(OSError):
        status = own.lstat()
        if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700:
            roots.append(own)
    if not roots:
        raise PreflightError(f"{own} belongs to another user", remedy="set DS_BENCH_OPS_CACHE to a folder of your own")
    return roots


def _can_write(folder: Path) -> bool:
    """Whether the folder can be written or, while it does not exist, created."""
    # No folder is made to try it: of several candidates only the chosen one is to exist.
    return os.access(files.nearest_existing(folder), os.W_OK | os.X_OK)


def _version(package: str) -> str:
    if (version := installed_version(package)) is None:
        raise PreflightError(f"{package} is not installed", remedy=install_command())
    return version


def _build_tools() -> str:
    """Hash of the Python environment and its ninja: builds contain absolute paths, and another ninja repeats them.

    With the folder of DeepSpeed's sources where it lies outside the environment, as PYTHONPATH may name one.
    """
    text = f"{sys.prefix} {installed_version('ninja') or 'system'}"
    folder = _deepspeed_folder()
    if folder is not None and not folder.is_relative_to(sys.prefix):
        text += f" {folder}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _processor() -> str:
    """Hash of the instruction set, for which ops are compiled (-march=native)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return hashlib.sha256(line.encode()).hexdigest()[:8]
    return "cpu"


def prepare_ops(
    names: Iterable[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    timeout_seconds: float = 1800.0,
    say: Callable[[str], None],
    show_elapsed: Callable[[str], None] = lambda _text: None,
) -> dict[str, OpState]:
    """Builds each op that is not built yet, in a process of its own. An op that fails is a state, not an exception.

    ``show_elapsed`` is called once a second with how long the build has taken. Raises PreflightError where the folder
    cannot be created.
    """
    names = list(names)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightError(f"{folder} cannot be made: {error.strerror}", remedy="set DS_BENCH_OPS_CACHE") from None
    # A cache of a group, which this user cannot write, saves the minutes of a build all the same.
    _copy_shared_cache(folder, names)
    if build_locks.stale_locks(folder):
        # For a moment: a lock that one run removes may be taken again before another removes it.
        with _locked(folder / "builder", "waiting for another run that removes build locks …", say):
            for stale in build_locks.remove_stale_locks(folder):
                say(f"removed a stale build lock: {stale}")
    states = {}
    for name in names:
        states[name] = OpState(op=name, ready=True)
        if is_built(name, folder):
            continue
        short_name = name.removesuffix("Builder")
        with _locked(lock_file(name, folder), f"waiting for another run that builds {short_name} …", say) as lock:
            if is_built(name, folder):  # by now, by the run that was waited for
                continue
            say(f"building DeepSpeed's {short_name} op (once, minutes on few cores) …")
            states[name] = _build(
                name,
                folder,
                environment,
                timeout_seconds,
                lambda seconds, op=short_name: show_elapsed(f"building {op} … {format_duration(seconds)}"),  # type: ignore[misc]
                lock,
            )
            if states[name].ready:
                say(f"built {short_name} in {format_duration(states[name].seconds)}")
            else:
                build_locks.remove_stale_locks(folder)
    return states


def lock_file(name: str, folder: Path) -> Path:
    """Return the file that a run locks while it builds an op."""
    return folder / f"{name}.builder"


def is_built(name: str, folder: Path) -> bool:
    """Whether an earlier run built this op and the libraries that it loaded from this folder are still there.

    Not if DeepSpeed was installed after that: its sources are then newer than what was built, and ninja would build it
    again in the first trial.
    """
    mark = folder / f"{name}.ready"
    try:
        libraries = json.loads(mark.read_text())
        if mark.stat().st_mtime < _sources_time():
            return False
        return isinstance(libraries, list) and all((folder / str(library)).is_file() for library in libraries)
    except (OSError, ValueError):
        return False


@cache
def _deepspeed_folder() -> Path | None:
    """Where DeepSpeed is installed; None where it is not, or is installed as a link to its sources."""
    # Not as an import would find it: python -m looks into the current folder first, which child processes do not.
    try:
        folder = Path(str(importlib.metadata.distribution("deepspeed").locate_file("deepspeed")))
    except importlib.metadata.PackageNotFoundError:
        return None
    return folder if folder.is_dir() else None


def _sources_time() -> float:
    """When DeepSpeed's sources of ops were written; 0 where that is not known."""
    folder = _deepspeed_folder()
    try:
        return 0.0 if folder is None else (folder / "ops" / "csrc" / "adam" / "cpu_adam.cpp").stat().st_mtime
    except OSError:
        return 0.0


def _copy_shared_cache(folder: Path, names: Iterable[str]) -> None:
    """Copies ops from a cache that cannot be written, with the file times by which ninja decides what to build."""
    shared = cache_roots()[0] / "ds_bench" / "ops" / folder.name
    missing = [name for name in names if not is_built(name, folder)]
    if shared != folder and any(is_built(name, shared) for name in missing):
        with contextlib.suppress(OSError):  # what could not be copied is built
            ignored = shutil.ignore_patterns("lock", "*builder")
            shutil.copytree(shared, folder, dirs_exist_ok=True, ignore=ignored, copy_function=_copy_if_newer)


def _copy_if_newer(source: str, target: str) -> None:
    there = Path(target)
    if not there.exists() or there.stat().st_mtime < Path(source).stat().st_mtime:
        shutil.copy2(source, target)


@contextlib.contextmanager
def _locked(path: Path, waiting: str, say: Callable[[str], None]) -> Iterator[int]:
    """Hold the lock of a file, which the kernel releases however its holders end."""
    with path.open("w") as file:
        try:
            # Without waiting at first, so that the user is told what is waited for.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            say(f"{path.parent} cannot be locked ({error.strerror}): do not build ops in two runs at once")
        yield file.fileno()


def _build(
    name: str,
    folder: Path,
    environment: Mapping[str, str],
    timeout_seconds: float,
    listen: Callable[[float], None],
    lock: int,
) -> OpState:
    """Builds one op; ``listen`` is called once a second with the seconds since the start."""
    log = folder / f"{name}.log"
    with log.open("wb") as errors:
        reply = run_tool(
            "worker.build_op",
            name,
            environment={**environment, "TORCH_EXTENSIONS_DIR": str(folder)},
            timeout_seconds=timeout_seconds,
            errors=errors,
            listen=listen,
            # Held until the last compiler has ended, so that no other run builds here before.
            kept_open=[lock],
        )
    try:
        answer = reply.last_object("the build")
        ready, seconds = answer["state"] == "ready", float(answer["seconds"])
        if ready:
            # Only after the op was loaded, and renamed into place: other runs trust this file.
            mark = log.with_suffix(".ready")
            write_json(mark, answer["libraries"])
            # Sources may have a time in the future, as those of a file server whose clock is ahead.
            latest = max(mark.stat().st_mtime, _sources_time())
            os.utime(mark, (latest, latest))
        reason = "" if ready else f"{answer['reason']}; log {log}"
    except (ValueError, KeyError, TypeError):
        return OpState(op=name, ready=False, reason=f"the build {reply.ending}; log {log}")
    return OpState(op=name, ready=ready, reason=reason, seconds=seconds)
