"""The programs that build DeepSpeed's ops: compilers, ninja, and a CUDA toolkit that fits torch's CUDA.

Torch runs the C++ compiler and ninja each time it loads an op, even one that is built already
(torch/utils/cpp_extension.py, ``_write_ninja_file_and_build_library``): without them no op can be used.
"""

from __future__ import annotations

import re
import shlex
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ..config.spec import Accelerator
from .findings import Finding, Level, SystemAccess, ok, problem, run_checks, warning

# CUDA releases of which DeepSpeed accepts any two together (op_builder/builder.py, cuda_minor_mismatch_ok).
COMPATIBLE_MINORS = {10: range(3), 11: range(9), 12: (0, 1, 2, 3, 4, 5, 6, 8, 9)}
_NO_OPS = "no DeepSpeed op can be built or loaded"


def check(system: SystemAccess, accelerator: Accelerator, torch_cuda: str | None) -> Iterator[Finding]:
    """One finding per program. ``torch_cuda``: the CUDA version torch was built for."""
    no_libaio = "DeepSpeed cannot look for libaio, nor Triton compile"
    yield from run_checks(
        {
            "C++ compiler": lambda: _check_compiler(system, "C++ compiler", "CXX", "problem", _NO_OPS),
            "C compiler": lambda: _check_compiler(system, "C compiler", "CC", "warning", no_libaio),
            "ninja": lambda: _check_ninja(system),
            "CUDA toolkit": lambda: _check_toolkit(system, accelerator, torch_cuda),
        }
    )


def can_build(system: SystemAccess) -> bool:
    """Whether any op can be built or loaded."""
    return find_compiler(system, "CXX") is not None and system.find_program("ninja") is not None


def find_compiler(system: SystemAccess, variable: str) -> str | None:
    """Path of the compiler that is used where ``variable``, CC or CXX, is set or not; None if it does not exist."""
    words = shlex.split(_compiler_command(system, variable))
    return system.find_program(words[0]) if words else None


def _compiler_command(system: SystemAccess, variable: str) -> str:
    # Without CXX torch takes c++ (get_cxx_compiler). Without CC setuptools, with which DeepSpeed looks for libaio,
    # takes the compiler that built Python.
    default = "c++" if variable == "CXX" else sysconfig.get_config_var("CC") or "cc"
    return system.environ.get(variable) or str(default)


def _check_compiler(system: SystemAccess, name: str, variable: str, level: Level, consequence: str) -> Finding:
    path = find_compiler(system, variable)
    if path is not None:
        return ok(name, _path_and_version(system, path))
    command = _compiler_command(system, variable)
    remedy = f"apt-get install g++, or dnf install gcc-c++; or name another with {variable}"
    if system.environ.get(variable):
        command = f"{command}, which ${variable} names,"
        remedy = f"unset {variable}, or name a compiler with it that is there"
    return Finding(name=name, level=level, text=f"{command} is not found: {consequence}", remedy=remedy)


def _check_ninja(system: SystemAccess) -> Finding:
    path = system.find_program("ninja")
    if path is None:
        return problem("ninja", f"not found: {_NO_OPS}", "pip install ninja")
    return ok("ninja", _path_and_version(system, path))


def _path_and_version(system: SystemAccess, path: str) -> str:
    version = (system.run_program([path, "--version"], "") or "").strip().splitlines()
    return f"{path}: {version[0]}" if version else path


def _check_toolkit(system: SystemAccess, accelerator: Accelerator, torch_cuda: str | None) -> Finding:
    """A warning at most: CPU optimizers are built without the toolkit, and torch's AdamW can replace FusedAdam."""
    name = "CUDA toolkit"
    if torch_cuda is None or accelerator == "cpu":
        why = "no GPU is used" if accelerator == "cpu" else "torch is a CPU build"
        return ok(name, f"not needed: {why}")
    remedy = f"install the CUDA toolkit {torch_cuda} and set CUDA_HOME to it"
    release = toolkit_release(system)
    if release is None:
        text = "no nvcc: torch's AdamW is used in place of FusedAdam, and NVMe offload cannot be built"
        return warning(name, text, remedy)
    text = f"{release[0]}.{release[1]}, torch's CUDA is {torch_cuda}"
    # DeepSpeed's own rule (op_builder/builder.py, assert_no_cuda_mismatch).
    major, minor = (int(word) for word in torch_cuda.split(".")[:2])
    compatible = COMPATIBLE_MINORS.get(major, ())
    if release == (major, minor) or (release[0] == major and release[1] in compatible and minor in compatible):
        return ok(name, text)
    return warning(name, f"{text}: FusedAdam and NVMe offload may not build; CPU offload needs no toolkit", remedy)


def toolkit_release(system: SystemAccess) -> tuple[int, int] | None:
    """Major and minor version of the nvcc that torch would use (cpp_extension.py, ``_find_cuda_home``), or None."""
    home = system.environ.get("CUDA_HOME") or system.environ.get("CUDA_PATH")
    if not home:
        on_path = system.find_program("nvcc")
        home = str(Path(on_path).parent.parent) if on_path else str(system.root / "usr/local/cuda")
    version = system.run_program([f"{home}/bin/nvcc", "--version"], "")
    release = re.search(r"release (\d+)\.(\d+)", version or "")
    return (int(release[1]), int(release[2])) if release else None
