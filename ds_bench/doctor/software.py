"""Checks the software: packages within their ranges, the programs that build DeepSpeed's ops, and the ops themselves.

Torch runs the C++ compiler and ninja each time it loads an op, even one that is built already
(torch/utils/cpp_extension.py, ``_write_ninja_file_and_build_library``): without them no op can be used.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import strategies
from ..config.rules import WRONG_TRAINING
from ..config.spec import Accelerator, Configuration
from ..launch import ops
from ..system import invocation
from ..system.environment import RUN_PACKAGES, Interpreter, install_command, installed_version
from .findings import Finding, Level, SystemAccess, ok, problem, run_checks, unreadable, warning

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PROJECT = "ds-compare"
_PYPROJECT = Path(__file__).resolve().parent.parent.parent / "pyproject.toml"
_REPORT_PACKAGES = {
    "adjustText": "the charts of an HTML page",
    "jinja2": "an HTML page",
    "matplotlib": "the charts of an HTML page",
    "pandas": "data frames and Parquet",
}
"""Packages that training does not need → what needs them."""
MIN_DRIVER_BRANCH = {11: 450, 12: 525, 13: 580}
"""CUDA major version → minimum driver branch (NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1)."""
COMPATIBLE_MINORS = {10: range(3), 11: range(9), 12: (0, 1, 2, 3, 4, 5, 6, 8, 9)}
"""CUDA releases that DeepSpeed accepts in any combination (op_builder/builder.py, cuda_minor_mismatch_ok)."""
_NO_OPS = "no DeepSpeed op can be built or loaded"


def build_command(python: str | None) -> str:
    """Return the command that builds missing ops. ``python``: the interpreter of a user's script."""
    return invocation.command("doctor", "--build", *([] if python is None else ["--python", python]))


_LIBAIO_PROGRAM = "#include <libaio.h>\nint main(void) { return io_submit(0, 0, 0); }\n"

# ------------------------------------------------------------------ packages


def our_requirements(pyproject: Path = _PYPROJECT) -> list[str]:
    """Return what runs need: this project's dependencies and its extra ``run``.

    They come from the checkout that holds this file, otherwise from the installed package; empty if neither exists.
    """
    from packaging.requirements import Requirement

    with contextlib.suppress(OSError, ValueError):
        project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == PROJECT:
            return [*project.get("dependencies", []), *project.get("optional-dependencies", {}).get("run", [])]
    with contextlib.suppress(metadata.PackageNotFoundError):
        wanted = map(Requirement, metadata.requires(PROJECT) or [])
        return [
            f"{each.name}{each.specifier}"
            for each in wanted
            if each.marker is None or each.marker.evaluate({"extra": "run"})
        ]
    return []


def check_packages(
    requirements: Sequence[str] | None = None,
    installed: Callable[[str], str | None] = installed_version,
    requires: Callable[[str], Sequence[str] | None] = metadata.requires,
) -> Iterator[Finding]:
    """Yield one finding for all packages within their ranges, and one for each that is missing or outside.

    ``requirements``: None for :func:`our_requirements`. ``installed``: returns the version of a package, or None.
    ``requires``: returns what an installed package requires.
    """
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in (our_requirements() if requirements is None else requirements)]
    if not wanted:
        yield unreadable("packages", "neither pyproject.toml nor the installed package names the ranges")
        return
    versions = {each.name: installed(each.name) for each in wanted}
    # An installation for reading results gets one finding, not one for every package that it lacks.
    if set(RUN_PACKAGES) <= versions.keys() and not any(map(versions.get, RUN_PACKAGES)):
        text = f"{', '.join(RUN_PACKAGES)} are not installed: results can be read here, but nothing can be run"
        yield problem("packages", text, install_command())
        return
    bad = [found for each in wanted if (found := _check_requirement(each, versions[each.name])) is not None]
    if fitting := [name for name in versions if name not in {finding.name for finding in bad}]:
        shown = [f"{name} {versions[name]}" for name in fitting if name in RUN_PACKAGES] or fitting
        more = f" and {len(fitting) - len(shown)} more" if len(fitting) > len(shown) else ""
        yield ok("packages", f"{', '.join(shown)}{more}: within the ranges that {PROJECT} supports")
    yield from bad
    # A wheel that was installed without its dependencies cannot be imported.
    for line in (requires("deepspeed") or ()) if versions.get("deepspeed") else ():
        needed = Requirement(line)
        applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if needed.name not in versions and applies and installed(needed.name) is None:
            text = f"not installed; deepspeed needs {needed.name}{needed.specifier}"
            yield problem(needed.name, text, f'pip install "{needed.name}{needed.specifier}"')
    yield from _wrong_training(versions.get("deepspeed"))


def _wrong_training(deepspeed: str | None) -> Iterator[Finding]:
    """Yield a warning for each known way in which this version trains incorrectly. ``deepspeed``: None without it."""
    for rule in WRONG_TRAINING:
        if deepspeed is not None and rule.level != "hint" and rule.holds_in(deepspeed):
            yield warning("deepspeed", rule.reason, rule.remedy)


def check_packages_of(interpreter: Interpreter | None) -> Iterator[Finding]:
    """Check the packages of a user's script, whose versions are the user's choice; None checks this program's."""
    if interpreter is None:
        yield from check_packages()
        return
    shown = ", ".join(f"{name} {version}" for name, version in interpreter.packages.items() if name in RUN_PACKAGES)
    yield ok("packages", f"{interpreter.python}: Python {interpreter.python_version}, {shown}")
    yield from _wrong_training(interpreter.packages.get("deepspeed"))


def _check_requirement(wanted: Requirement, version: str | None) -> Finding | None:
    """None if the requirement is met, or does not apply on this system."""
    from packaging.version import InvalidVersion, Version

    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return None
    use = _REPORT_PACKAGES.get(wanted.name)
    text = f"{PROJECT} needs {wanted.name}{wanted.specifier}" + (f" for {use}" if use else "")
    if version is None:
        text = f"not installed; {text}"
    else:
        try:
            parsed = Version(version)
        except InvalidVersion:
            return unreadable(wanted.name, f"its version is {version!r}")
        # A vendor's build from a release branch looks like a pre-release of it: NVIDIA's 2.11.0a0+eb65b36914.nv26.02.
        if parsed.is_prerelease and parsed.local:
            parsed = Version(parsed.base_version)
        if wanted.specifier.contains(parsed, prereleases=True):
            return None
        text = f"{version} is installed; {text}"
    install = f'pip install "{wanted.name}{wanted.specifier}"'
    # Outside their ranges torch, DeepSpeed and Transformers may still work: a run shows whether they do, row by row.
    untried = version is not None and wanted.name in RUN_PACKAGES
    return Finding(name=wanted.name, level="warning" if use or untried else "problem", text=text, remedy=install)


def check_driver(driver: str | None, torch_cuda: str | None) -> Iterator[Finding]:
    """Yield whether the driver is new enough for torch's CUDA. No finding without a driver or for a CPU build."""
    if driver is None or torch_cuda is None:
        return
    branch, cuda = re.match(r"\d+", driver), re.match(r"\d+", torch_cuda)
    minimum = MIN_DRIVER_BRANCH.get(int(cuda[0])) if cuda else None
    if branch is None or minimum is None:
        yield unreadable("GPU driver", f"no rule for driver {driver} with torch's CUDA {torch_cuda}")
    elif int(branch[0]) < minimum:
        text = f"{driver}; torch's CUDA {torch_cuda} needs {minimum} or newer, unless cuda-compat is installed"
        yield warning("GPU driver", text, "update the driver, or install torch for an older CUDA")
    else:
        yield ok("GPU driver", f"{driver}, new enough for torch's CUDA {torch_cuda}")


# ------------------------------------------------------------------ programs


def check_programs(system: SystemAccess, accelerator: Accelerator, torch_cuda: str | None) -> Iterator[Finding]:
    """Yield one finding per program that builds ops. ``torch_cuda``: the CUDA version torch was built for."""
    without_c_compiler = "DeepSpeed cannot look for libaio, and Triton cannot compile"
    yield from run_checks(
        {
            "C++ compiler": lambda: _check_program(system, "C++ compiler", "problem", _NO_OPS, "CXX"),
            "C compiler": lambda: _check_program(system, "C compiler", "warning", without_c_compiler, "CC"),
            "ninja": lambda: _check_program(system, "ninja", "problem", _NO_OPS),
            "CUDA toolkit": lambda: _check_toolkit(system, accelerator, torch_cuda),
        }
    )


def _check_program(
    system: SystemAccess, name: str, level: Level, consequence: str, variable: str | None = None
) -> Finding:
    """``variable``: the environment variable that names a compiler."""
    command = name if variable is None else _compiler_command(system, variable)
    if (path := system.find_program(shlex.split(command)[0])) is not None:
        version = (system.run_program([path, "--version"], "") or "").strip().splitlines()
        return ok(name, f"{path}: {version[0]}" if version else path)
    remedy = "pip install ninja"
    if variable is not None:
        remedy = f"apt-get install g++, or dnf install gcc-c++; or set {variable} to another compiler"
        if system.environ.get(variable):
            command += f" (from ${variable})"
            remedy = f"unset {variable}, or set it to an installed compiler"
    return Finding(name=name, level=level, text=f"{command} not found: {consequence}", remedy=remedy)


def _compiler_command(system: SystemAccess, variable: str) -> str:
    """The compiler that ``variable``, CC or CXX, names, or the default one."""
    # Without CXX, torch uses c++ (get_cxx_compiler). Without CC, setuptools, with which DeepSpeed looks for libaio,
    # uses the compiler that built Python.
    default = "c++" if variable == "CXX" else sysconfig.get_config_var("CC") or "cc"
    return system.environ.get(variable) or str(default)


def _check_toolkit(system: SystemAccess, accelerator: Accelerator, torch_cuda: str | None) -> Finding:
    """A warning at most: CPU optimizers are built without the toolkit, and torch's AdamW can replace FusedAdam."""
    name = "CUDA toolkit"
    if torch_cuda is None or accelerator == "cpu":
        return ok(name, f"not needed: {'no GPU is used' if accelerator == 'cpu' else 'torch is a CPU build'}")
    remedy = f"install the CUDA toolkit {torch_cuda} and set CUDA_HOME to it"
    release = toolkit_release(system)
    if release is None:
        text = "nvcc not found: torch's AdamW replaces FusedAdam, and NVMe offload cannot be built"
        return warning(name, text, remedy)
    text = f"{release[0]}.{release[1]}, torch's CUDA is {torch_cuda}"
    # DeepSpeed's own rule (op_builder/builder.py, assert_no_cuda_mismatch).
    major, minor = (int(word) for word in torch_cuda.split(".")[:2])
    if release == (major, minor) or (
        release[0] == major and {release[1], minor} <= {*COMPATIBLE_MINORS.get(major, ())}
    ):
        return ok(name, text)
    return warning(name, f"{text}: FusedAdam and NVMe offload may not build; CPU offload needs no toolkit", remedy)


def toolkit_release(system: SystemAccess) -> tuple[int, int] | None:
    """Return the version of the nvcc that torch would use (cpp_extension.py, ``_find_cuda_home``), or None."""
    home = system.environ.get("CUDA_HOME") or system.environ.get("CUDA_PATH")
    if not home:
        on_path = system.find_program("nvcc")
        home = str(Path(on_path).parent.parent) if on_path else str(system.root / "usr/local/cuda")
    version = system.run_program([f"{home}/bin/nvcc", "--version"], "")
    release = re.search(r"release (\d+)\.(\d+)", version or "")
    return (int(release[1]), int(release[2])) if release else None


# ------------------------------------------------------------------ ops


def strategies_by_op(accelerator: Accelerator, own: Sequence[Configuration] = ()) -> dict[str, list[str]]:
    """Return op → names of the strategies in the catalogue, and of the user's ``own`` configurations, that load it."""
    names_by_op: dict[str, list[str]] = {}
    for configuration in (*map(strategies.make_configuration, strategies.CATALOGUE.values()), *own):
        if configuration.refusal is None:
            for op in ops.loaded_ops(accelerator, [configuration]):
                names_by_op.setdefault(op, []).append(configuration.name)
    return names_by_op


def check_ops(
    system: SystemAccess,
    accelerator: Accelerator,
    folder: Path,
    *,
    check_nvme: bool,
    own: Sequence[Configuration] = (),
    states: Mapping[str, ops.OpState] | None = None,
    python: str | None = None,
) -> Iterator[Finding]:
    """Yield one finding per op.

    ``folder``: the cache of ops. ``states``: results of a build, if there was one. ``python``: see ``build_command``.
    """
    every = len(strategies.ZERO_STAGES) + len(strategies.OFFLOAD_NAMES) + sum(each.refusal is None for each in own)
    for op, names in strategies_by_op(accelerator, own).items():
        # Torch's AdamW can replace FusedAdam, and perhaps nobody wants NVMe offload.
        optional = op == ops.FUSED_ADAM or (op == ops.ASYNC_IO and not check_nvme)
        level: Level = "warning" if optional else "problem"
        state = None if states is None else states.get(op)
        if state is None:
            level, text, remedy = _check_unbuilt(system, op, accelerator, folder, level, build_command(python))
        elif state.ready:
            level, text, remedy = "ok", "built", None
        else:
            text, remedy = f"cannot be built: {state.reason}", ops.remedy_of(state.reason)
        text += f" (for {'every strategy' if len(names) == every else ', '.join(names)})"
        yield Finding(name=f"{op.removesuffix('Builder')} op", level=level, text=text, remedy=remedy)


def _check_unbuilt(
    system: SystemAccess, op: str, accelerator: Accelerator, folder: Path, level: Level, build: str
) -> tuple[Level, str, str | None]:
    """Level, text and remedy of an op according to the cache and the installed programs, without building it."""
    if ops.is_built(op, folder):
        return "ok", "built", None
    compiler = shlex.split(_compiler_command(system, "CXX"))[0]
    if system.find_program(compiler) is None or system.find_program("ninja") is None:
        return level, "cannot be built: a C++ compiler or ninja is missing", "see the tools above"
    missing = None
    # A toolkit whose version differs from torch's CUDA is left to the build: DeepSpeed compares the two only when it is
    # installed with prebuilt ops (op_builder/builder.py, builder), not when it loads one (jit_load).
    if op in (ops.FUSED_ADAM, ops.ASYNC_IO) and accelerator == "cuda" and toolkit_release(system) is None:
        missing = ops.NO_TOOLKIT
    if op == ops.ASYNC_IO and not has_libaio(system):
        missing = ops.NO_LIBAIO
    if missing is not None:
        return level, f"cannot be built: {missing}", ops.remedy_of(missing)
    log = folder / f"{op}.log"
    # A build's log is kept: if there is one but no op, the build failed.
    if log.exists():
        return level, f"the last build failed: {log}", f"read it, then run {build}"
    return "ok", "not built yet, but can be", f"{build} builds it now; otherwise the first comparison does"


def has_libaio(system: SystemAccess) -> bool:
    """Return whether a program that calls libaio compiles and links, with the flags the user has set."""
    compiler = system.find_program(shlex.split(_compiler_command(system, "CC"))[0])
    if compiler is None:
        return False
    compile_flags, link_flags = (shlex.split(system.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS"))
    with tempfile.TemporaryDirectory() as folder:
        # DeepSpeed links such a program as well (op_builder/async_io.py, is_compatible).
        command = [compiler, *compile_flags, "-x", "c", "-", "-o", f"{folder}/program", *link_flags, "-laio"]
        return system.run_program(command, _LIBAIO_PROGRAM) is not None
