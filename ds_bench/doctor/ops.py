"""DeepSpeed's ops: which strategies need them, and whether they are built, can be built, or why not."""

from __future__ import annotations

import contextlib
import fcntl
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..config import strategies
from ..config.spec import Accelerator, Configuration
from ..launch import ops, scratch
from ..system import invocation
from . import compilers
from .findings import Finding, Level, SystemAccess, ok, warning

BUILD_COMMAND = invocation.command("doctor", "--build")
_LIBAIO_PROGRAM = "#include <libaio.h>\nint main(void) { return io_submit(0, 0, 0); }\n"


def strategies_by_op(accelerator: Accelerator, own: Sequence[Configuration] = ()) -> dict[str, list[str]]:
    """Op → names of the strategies in the catalogue, and of the user's ``own`` configurations, that load it."""
    names_by_op: dict[str, list[str]] = {}
    for configuration in (*map(strategies.make_configuration, strategies.CATALOGUE.values()), *own):
        if configuration.refusal is not None:
            continue
        for op in ops.loaded_ops(accelerator, [configuration]):
            names_by_op.setdefault(op, []).append(configuration.name)
    return names_by_op


def check(
    system: SystemAccess,
    accelerator: Accelerator,
    folder: Path,
    *,
    check_nvme: bool,
    own: Sequence[Configuration] = (),
    states: Mapping[str, ops.OpState] | None = None,
) -> Iterator[Finding]:
    """One finding per op. ``folder``: the cache of ops. ``states``: results of a build; None if none was made."""
    for op, names in strategies_by_op(accelerator, own).items():
        # Torch's AdamW can replace FusedAdam, and perhaps nobody wants NVMe offload.
        optional = op == ops.FUSED_ADAM or (op == ops.ASYNC_IO and not check_nvme)
        level: Level = "warning" if optional else "problem"
        state = None if states is None else states.get(op)
        if state is None:
            finding = _check_unbuilt(system, op, accelerator, folder, level)
        else:
            finding = ok(_title(op), "built") if state.ready else _not_buildable(op, state.reason, level)
        runnable = sum(each.refusal is None for each in own)
        every = len(names) == len(strategies.ZERO_STAGES) + len(strategies.OFFLOAD_NAMES) + runnable
        yield replace(finding, text=f"{finding.text} (for {'every strategy' if every else ', '.join(names)})")


def _title(op: str) -> str:
    return f"{op.removesuffix('Builder')} op"


def _not_buildable(op: str, reason: str, level: Level) -> Finding:
    return Finding(name=_title(op), level=level, text=f"cannot be built: {reason}", remedy=ops.remedy_of(reason))


def _check_unbuilt(system: SystemAccess, op: str, accelerator: Accelerator, folder: Path, level: Level) -> Finding:
    """What the cache and the installed programs show of an op, without building it."""
    name = _title(op)
    if ops.is_built(op, folder):
        return ok(name, "built")
    if _being_built(op, folder):
        return ok(name, "another run is building it")
    if not compilers.can_build(system):
        text = "cannot be built: a C++ compiler or ninja is missing"
        return Finding(name=name, level=level, text=text, remedy="see the tools above")
    # A toolkit of another version than torch's CUDA is left to the build: DeepSpeed compares the two only when it is
    # installed with ops built ahead (op_builder/builder.py, builder), not when it loads one (jit_load).
    links_cuda = op in (ops.FUSED_ADAM, ops.ASYNC_IO) and accelerator == "cuda"
    if op == ops.ASYNC_IO and not has_libaio(system):
        return _not_buildable(op, ops.NO_LIBAIO, level)
    if links_cuda and compilers.toolkit_release(system) is None:
        return _not_buildable(op, ops.NO_TOOLKIT, level)
    log = folder / f"{op}.log"
    # The log of a build stays; as the op is not there, it is that of a build that failed.
    if log.exists():
        remedy = f"read it, then {BUILD_COMMAND}"
        return Finding(name=name, level=level, text=f"the last build failed: {log}", remedy=remedy)
    return ok(name, "not built yet, but can be", f"{BUILD_COMMAND} builds it now; else the first comparison does")


def has_libaio(system: SystemAccess) -> bool:
    """Whether a program that calls libaio compiles and links, with the flags the user has set."""
    compiler = compilers.find_compiler(system, "CC")
    if compiler is None:
        return False
    compile_flags, link_flags = (shlex.split(system.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS"))
    with tempfile.TemporaryDirectory() as folder:
        # DeepSpeed links such a program as well (op_builder/async_io.py, is_compatible).
        command = [compiler, *compile_flags, "-x", "c", "-", "-o", f"{folder}/program", *link_flags, "-laio"]
        return system.run_program(command, _LIBAIO_PROGRAM) is not None


def _being_built(op: str, folder: Path) -> bool:
    """Whether a process that builds the op holds its lock (see ``ops.prepare_ops``)."""
    with contextlib.suppress(OSError), ops.lock_file(op, folder).open() as file:
        try:
            # Shared: a build holds this lock alone, and two doctors must not take each other for one.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def check_locks(system: SystemAccess, folder: Path) -> Iterator[Finding]:
    """Locks that a killed build left behind, in our cache ``folder`` and in those that DeepSpeed uses by itself."""
    ours = scratch.stale_locks(folder)
    if ours:
        text = f"left by a killed build: {', '.join(map(str, ours))}"
        yield warning("stale locks", text, f"{BUILD_COMMAND} removes them, as any comparison does")
    theirs = [lock for cache in _torch_caches(system) for lock in scratch.stale_locks(cache)]
    if theirs:
        text = "your own DeepSpeed programs will wait for ever on a lock that a killed build left"
        yield warning("stale locks", text, f"rm {shlex.join(map(str, theirs))}")
    if not ours and not theirs:
        yield ok("stale locks", "none")


def _torch_caches(system: SystemAccess) -> list[Path]:
    """Where torch builds extensions by default (cpp_extension.py, ``_get_build_directory``)."""
    environ = system.environ
    if folder := environ.get("TORCH_EXTENSIONS_DIR"):
        return [Path(folder)]
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache"
    return sorted(Path(cache).glob("torch_extensions/py*"))
