"""The programs that DeepSpeed's ops are built with: compilers, ninja, and a CUDA toolkit that fits torch's CUDA.

Torch asks for the C++ compiler and for ninja each time it loads an op, built before or not
(torch/utils/cpp_extension.py, ``_write_ninja_file_and_build_library``): without them no op can be used.
"""

from __future__ import annotations

import re
import shlex
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ..config.spec import Accelerator
from .findings import Finding, SystemAccess, ok, one_by_one, problem, warning

# CUDA releases among which DeepSpeed lets the minor version differ (op_builder/builder.py, cuda_minor_mismatch_ok).
MINORS_THAT_MIX = {10: range(3), 11: range(9), 12: (0, 1, 2, 3, 4, 5, 6, 8, 9)}
_GCC = "apt-get install g++, or dnf install gcc-c++; or name another with "


def check(machine: SystemAccess, accelerator: Accelerator, torch_cuda: str | None) -> Iterator[Finding]:
    """Every tool; ``torch_cuda`` is the CUDA version torch was built for."""
    yield from one_by_one(
        {
            "C++ compiler": lambda: _cpp_compiler(machine),
            "C compiler": lambda: _c_compiler(machine),
            "ninja": lambda: _ninja(machine),
            "CUDA toolkit": lambda: cuda_toolkit(machine, accelerator, torch_cuda),
        }
    )


def can_build(machine: SystemAccess) -> bool:
    """Whether any op can be built or loaded at all."""
    return _path(machine, _cpp(machine)) is not None and machine.which("ninja") is not None


def _cpp(machine: SystemAccess) -> str:
    return machine.environ.get("CXX") or "c++"  # as torch chooses (get_cxx_compiler)


def c_compiler(machine: SystemAccess) -> str | None:
    """The path of the C compiler that setuptools would use, as DeepSpeed does to look for libaio."""
    return _path(machine, _cc(machine))


def _cc(machine: SystemAccess) -> str:
    return machine.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc")


def _path(machine: SystemAccess, command: str) -> str | None:
    words = shlex.split(command)
    return machine.which(words[0]) if words else None


def _cpp_compiler(machine: SystemAccess) -> Finding:
    path = _path(machine, _cpp(machine))
    if path is None:
        text = f"{_named(machine, 'CXX', _cpp(machine))} is not found: no DeepSpeed op can be built or loaded"
        return problem("C++ compiler", text, _remedy(machine, "CXX"))
    return ok("C++ compiler", _version(machine, path))


def _c_compiler(machine: SystemAccess) -> Finding:
    path = c_compiler(machine)
    if path is None:
        text = (
            f"{_named(machine, 'CC', _cc(machine))} is not found: DeepSpeed cannot look for libaio, nor Triton compile"
        )
        return warning("C compiler", text, _remedy(machine, "CC"))
    return ok("C compiler", _version(machine, path))


def _named(machine: SystemAccess, variable: str, command: str) -> str:
    """The command, and the variable where that names it."""
    return f"{command}, which ${variable} names," if machine.environ.get(variable) else command


def _remedy(machine: SystemAccess, variable: str) -> str:
    if machine.environ.get(variable):
        return f"unset {variable}, or name a compiler with it that is there"
    return _GCC + variable


def _ninja(machine: SystemAccess) -> Finding:
    path = machine.which("ninja")
    if path is None:
        return problem("ninja", "not found: no DeepSpeed op can be built or loaded", "pip install ninja")
    return ok("ninja", _version(machine, path))


def _version(machine: SystemAccess, path: str) -> str:
    """The path and the first line of what ``--version`` says."""
    told = (machine.ask([path, "--version"], "") or "").strip().splitlines()
    return f"{path}: {told[0]}" if told else path


def cuda_toolkit(machine: SystemAccess, accelerator: Accelerator, torch_cuda: str | None) -> Finding:
    """A warning at most: optimizers on the CPU are built without the toolkit, and FusedAdam has a stand-in."""
    name = "CUDA toolkit"
    if torch_cuda is None or accelerator == "cpu":
        return ok(name, "not needed: " + ("torch is a CPU build" if torch_cuda is None else "no GPU is used"))
    install = f"install the CUDA toolkit {torch_cuda} and set CUDA_HOME to it"
    release = toolkit_release(machine)
    if release is None:
        text = "no nvcc: torch's AdamW is used in place of FusedAdam, and NVMe offload cannot be built"
        return warning(name, text, install)
    text = f"{release[0]}.{release[1]}, torch's CUDA is {torch_cuda}"
    if _fits(release, torch_cuda):
        return ok(name, text)
    return warning(name, f"{text}: FusedAdam and NVMe offload may not build; CPU offload needs no toolkit", install)


def _fits(release: tuple[int, int], torch_cuda: str) -> bool:
    """DeepSpeed's own rule (op_builder/builder.py, ``assert_no_cuda_mismatch``)."""
    major, minor = (int(word) for word in torch_cuda.split(".")[:2])
    mixing = MINORS_THAT_MIX.get(major, ())
    return release == (major, minor) or (release[0] == major and release[1] in mixing and minor in mixing)


def toolkit_release(machine: SystemAccess) -> tuple[int, int] | None:
    """Major and minor version of the nvcc that torch would use (cpp_extension.py, ``_find_cuda_home``)."""
    home = machine.environ.get("CUDA_HOME") or machine.environ.get("CUDA_PATH")
    on_path = machine.which("nvcc")
    if not home:
        home = str(Path(on_path).parent.parent) if on_path else str(machine.root / "usr/local/cuda")
    told = machine.ask([f"{home}/bin/nvcc", "--version"], "")
    found = re.search(r"release (\d+)\.(\d+)", told or "")
    return (int(found[1]), int(found[2])) if found else None
