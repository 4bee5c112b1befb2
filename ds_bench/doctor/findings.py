"""Findings of the checks of this machine, and how checks access it.

A check is a function that yields findings; :func:`run_check` turns what it raises into one. It reads files, variables,
programs and GPUs only through :class:`SystemAccess`, so that a test can make up a machine. No check changes a setting
of the host or of a GPU.

A *problem* keeps comparisons from running, or makes what a flag names unusable. A *warning* rules out a strategy, or
makes figures worse or less certain. Everything else is ok.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import DsBenchError
from ..system import helper_programs, terminal
from ..system.gpu_state import GpuInventory, read_gpus
from ..system.host_resources import ROOT

Level = Literal["ok", "warning", "problem"]
_PROGRAM_SECONDS = 20.0
"""Time for a compiler to print its version, or to compile one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    """Subject of the check: ``ninja``, ``swap``, ``GPU 0 memory``."""
    level: Level
    """Defined in this module's docstring."""
    text: str
    remedy: str | None = None
    """What to do about it; None if nothing needs to be done, or nothing is known to help."""


Groups = dict[str, list[Finding]]
"""Heading → findings, in the order of printing."""


def ok(name: str, text: str, remedy: str | None = None) -> Finding:
    return Finding(name=name, level="ok", text=text, remedy=remedy)


def warning(name: str, text: str, remedy: str | None = None) -> Finding:
    return Finding(name=name, level="warning", text=text, remedy=remedy)


def problem(name: str, text: str, remedy: str | None = None) -> Finding:
    return Finding(name=name, level="problem", text=text, remedy=remedy)


def unreadable(name: str, reason: str | None = None) -> Finding:
    """Return a warning for a fact that cannot be read."""
    return warning(name, "could not be read" + (f": {reason}" if reason else ""))


def format_finding(finding: Finding, name_width: int) -> str:
    """Return one line for a terminal: level, name, text and remedy. Control characters are escaped."""
    remedy = f" → {finding.remedy}" if finding.remedy else ""
    return terminal.escape_controls(f"  {finding.level:<7}  {finding.name:<{name_width}}  {finding.text}{remedy}")


def format_count(findings: Iterable[Finding], level: Level) -> str:
    """Return ``no problems``, ``1 problem``, ``2 problems``."""
    count = sum(finding.level == level for finding in findings)
    return f"{count or 'no'} {level}{'' if count == 1 else 's'}"


def run_check(name: str, check: Callable[[], Iterable[Finding]], failed_level: Level = "warning") -> list[Finding]:
    """Return the findings of a check and, if it raises, its error: at ``failed_level`` unless it is a DsBenchError."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except DsBenchError as error:
        findings.append(problem(name, error.problem, error.remedy or None))
    except Exception as error:  # an unusual machine may break one check; the others still run
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = f"could not be read: {reason or type(error).__name__}"
        findings.append(Finding(name=name, level=failed_level, text=text))
    return findings


def run_checks(checks: Mapping[str, Callable[[], Finding]]) -> Iterator[Finding]:
    """Yield the finding of each check under its name. A check that raises does not stop the others."""
    for name, check in checks.items():
        yield from run_check(name, lambda check=check: [check()])  # type: ignore[misc]


def find_program(name: str) -> str | None:
    """Return the path of a program on PATH or next to the interpreter, whose environment may not be activated."""
    beside = Path(sys.executable).with_name(name)
    return shutil.which(name) or (str(beside) if beside.is_file() and os.access(beside, os.X_OK) else None)


def run_program(command: Sequence[str], text: str = "") -> str | None:
    """Return a program's output for the input ``text``; None if it cannot be started, fails or takes too long."""
    try:
        done = helper_programs.run_program(
            command, text=text.encode(), environment={}, timeout_seconds=_PROGRAM_SECONDS
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemAccess:
    """How checks read this machine, or one that a test makes up."""

    root: Path = ROOT
    """Folder that holds ``proc``, ``sys`` and ``dev``."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    read_gpus: Callable[[], GpuInventory] = read_gpus
    find_program: Callable[[str], str | None] = find_program
    run_program: Callable[[Sequence[str], str], str | None] = run_program
