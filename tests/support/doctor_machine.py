"""A machine made up for the checks of the doctor."""

from __future__ import annotations

import shlex
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ds_bench.doctor.findings import Finding, SystemAccess

# The C compiler has the name that Python was built with: gcc, or x86_64-linux-gnu-gcc where Debian built it.
C_COMPILER = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
PROGRAMS = ("c++", "g++", "cc", "gcc", "clang", "ninja", "nvcc", C_COMPILER)
EVERYTHING = {name: f"/usr/bin/{name}" for name in PROGRAMS}


def machine(
    root: Path = Path("/nowhere"),
    programs: Mapping[str, str] = EVERYTHING,
    ask: Callable[[Sequence[str], str], str | None] = lambda _command, _text: "",
    **environ: str,
) -> SystemAccess:
    return SystemAccess(root=root, environ=environ, find_program=programs.get, run_program=ask)


def without(*names: str) -> dict[str, str]:
    return {name: path for name, path in EVERYTHING.items() if name not in names}


def by_name(findings: Sequence[Finding] | Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def nvcc(version: str) -> Callable[[Sequence[str], str], str | None]:
    text = f"nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {version}, V{version}.88\n"
    return lambda command, _text: text if command[0].endswith("/nvcc") else ""


def versions(**installed: str) -> Callable[[str], str | None]:
    return installed.get
