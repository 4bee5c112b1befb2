"""DeepSpeed's ops: which strategies need them, and whether they are built, can be built, or why not."""

from __future__ import annotations

import contextlib
import fcntl
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..config import deepspeed_config, strategies
from ..config.spec import Accelerator
from ..launch import ops
from . import compilers
from .findings import Finding, Level, SystemAccess, ok, warning

BUILD = "python -m ds_bench doctor --build"
_PROGRAM = "#include <libaio.h>\nint main(void) { return io_submit(0, 0, 0); }\n"


def users(accelerator: Accelerator) -> dict[str, list[str]]:
    """Op → names of the strategies in the catalogue that load it."""
    catalogue = [*strategies.ZERO_STAGES.values(), *map(strategies.offload_strategy, strategies.OFFLOAD_NAMES)]
    found: dict[str, list[str]] = {}
    for strategy in catalogue:
        config = deepspeed_config.base_config(strategy, 1)
        names = ops.needed_ops(accelerator, [config])
        names += ops.fused_ops([config]) if accelerator == "cuda" else []
        for name in names:
            found.setdefault(name, []).append(strategy.name)
    return found


def check(
    machine: SystemAccess,
    accelerator: Accelerator,
    folder: Path,
    *,
    torch_cuda: str | None,
    nvme_asked: bool,
    states: Mapping[str, ops.OpState] | None = None,
) -> Iterator[Finding]:
    """One finding per op. ``folder``: our cache of ops; ``states``: what a build has just given, if there was one."""
    for op, names in users(accelerator).items():
        needs = _Needs(op=op, accelerator=accelerator, torch_cuda=torch_cuda)
        every = len(names) == len(strategies.ZERO_STAGES) + len(strategies.OFFLOAD_NAMES)
        level = _level_without(op, nvme_asked)
        state = None if states is None else states.get(op)
        found = _found(machine, needs, folder, level) if state is None else _built(state, level)
        yield Finding(
            name=found.name,
            level=found.level,
            text=f"{found.text} (for {'every strategy' if every else ', '.join(names)})",
            remedy=found.remedy,
        )


def _level_without(op: str, nvme_asked: bool) -> Level:
    """How bad it is not to have an op. FusedAdam has a stand-in, torch's AdamW; NVMe may not be wanted at all."""
    return "warning" if op == ops.FUSED_ADAM or (op == ops.ASYNC_IO and not nvme_asked) else "problem"


def title(op: str) -> str:
    return f"{op.removesuffix('Builder')} op"


def _built(state: ops.OpState, level: Level) -> Finding:
    if state.ready:
        return ok(title(state.op), "built")
    text = f"cannot be built: {state.reason}"
    return Finding(name=title(state.op), level=level, text=text, remedy=ops.remedy_of(state.reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needs:
    """An op and what it is built for."""

    op: str
    """DeepSpeed's builder class."""
    accelerator: Accelerator
    """``cuda`` or ``cpu``."""
    torch_cuda: str | None
    """CUDA version torch was built for."""


def _found(machine: SystemAccess, needs: _Needs, folder: Path, level: Level) -> Finding:
    """What the cache and the tools say of an op, without building it."""
    op, name = needs.op, title(needs.op)
    if ops.is_built(op, folder):
        return ok(name, "built")
    if _being_built(folder):
        return ok(name, "another run builds ops at this moment")
    if not compilers.can_build(machine):
        text = "cannot be built: a C++ compiler or ninja is missing"
        return Finding(name=name, level=level, text=text, remedy="see the tools above")
    lacking = _lacking(machine, needs)
    if lacking is not None:
        return Finding(name=name, level=level, text=f"cannot be built: {lacking}", remedy=ops.remedy_of(lacking))
    log = folder / f"{op}.log"
    if log.exists():
        return Finding(name=name, level=level, text=f"the last build failed: {log}", remedy=f"read it, then {BUILD}")
    return ok(name, "not built yet, but can be", f"{BUILD} builds it now; else the first comparison does")


def _lacking(machine: SystemAccess, needs: _Needs) -> str | None:
    """What a build of this op would stop at, compiler and ninja apart.

    A toolkit of another version than torch's CUDA is left to the build: DeepSpeed compares the two only when it is
    installed with ops built ahead (op_builder/builder.py, ``builder``), not when it loads one (``jit_load``).
    """
    if needs.op == ops.ASYNC_IO and not has_libaio(machine):
        return ops.NO_LIBAIO
    links_cuda = needs.op in (ops.FUSED_ADAM, ops.ASYNC_IO) and needs.accelerator == "cuda"
    return ops.NO_TOOLKIT if links_cuda and compilers.toolkit_release(machine) is None else None


def has_libaio(machine: SystemAccess) -> bool:
    """Whether a program that calls libaio compiles and links, with the flags the user has set."""
    compiler = compilers.c_compiler(machine)
    if compiler is None:
        return False
    before, after = (shlex.split(machine.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS"))
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/program"
        return machine.ask([compiler, *before, "-x", "c", "-", "-o", program, *after, "-laio"], _PROGRAM) is not None


def _being_built(folder: Path) -> bool:
    """Whether a builder holds the cache (see ``ops.prepare_ops``)."""
    with contextlib.suppress(OSError), (folder / "builder").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def check_locks(machine: SystemAccess, folder: Path) -> Iterator[Finding]:
    """Locks that a killed build left behind, in our cache and in the one that DeepSpeed uses by itself."""
    ours, theirs = ops.stale_locks(folder), [lock for place in _own_caches(machine) for lock in ops.stale_locks(place)]
    if ours:
        listed = ", ".join(map(str, ours))
        yield warning(
            "stale locks", f"left by a killed build: {listed}", f"{BUILD} removes them, as any comparison does"
        )
    if theirs:
        listed = " ".join(shlex.quote(str(lock)) for lock in theirs)
        text = "your own DeepSpeed programs will wait for ever on a lock that a killed build left"
        yield warning("stale locks", text, f"rm {listed}")
    if not ours and not theirs:
        yield ok("stale locks", "none")


def _own_caches(machine: SystemAccess) -> list[Path]:
    """Where torch puts extensions when we do not say (cpp_extension.py, ``_get_build_directory``)."""
    given = machine.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return [Path(given)]
    cache = machine.environ.get("XDG_CACHE_HOME") or str(Path(machine.environ.get("HOME", "~")).expanduser() / ".cache")
    return sorted(Path(cache).glob("torch_extensions/py*"))
