"""What the doctor looks at, by subject; here, what a check gives back and how it sees the machine.

A check is a function that yields findings. It never raises for the state of the machine: see :func:`attempt`.
It reads files below a root, variables, programs and cards only through :class:`SystemAccess`, so that a test can
make a machine of its own. No check changes anything: neither a card's setting nor the host's.

A *problem* keeps comparisons from running, or makes what was asked for by a flag unusable. A *warning* costs a
strategy, or makes figures worse or less certain. Everything else is ok.
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
from ..system import terminal
from ..system.gpus import GpuQuery, NvmlQuery
from ..system.host_memory import ROOT
from ..system.processes import die_with_parent

Level = Literal["ok", "warning", "problem"]
_TOOL_SECONDS = 20.0
"""For a compiler to say its version, or to compile one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor's answer."""

    name: str
    """What was looked at: ``ninja``, ``swap``, ``GPU 0 memory``."""
    level: Level
    """``ok``, ``warning`` or ``problem``, as the package's docstring defines them."""
    text: str
    """What was found."""
    remedy: str | None = None
    """What to do about it; None where nothing needs doing, or nothing is known to help."""


Groups = dict[str, list[Finding]]
"""Heading → findings, in the order of printing."""


def ok(name: str, text: str, remedy: str | None = None) -> Finding:
    return Finding(name=name, level="ok", text=text, remedy=remedy)


def warning(name: str, text: str, remedy: str | None = None) -> Finding:
    return Finding(name=name, level="warning", text=text, remedy=remedy)


def problem(name: str, text: str, remedy: str | None = None) -> Finding:
    return Finding(name=name, level="problem", text=text, remedy=remedy)


def unreadable(name: str, why: str | None = None) -> Finding:
    """A fact that the machine does not tell: nothing is claimed of it."""
    return warning(name, "could not be read" + (f": {why}" if why else ""))


def format_finding(finding: Finding, name_width: int) -> str:
    """One line for a terminal: level, name, text and remedy. Control characters are escaped."""
    remedy = f" → {finding.remedy}" if finding.remedy else ""
    return terminal.plain(f"  {finding.level:<7}  {finding.name:<{name_width}}  {finding.text}{remedy}")


def count_of(count: int, noun: str) -> str:
    """``no problems``, ``1 problem``, ``2 problems``."""
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def attempt(name: str, check: Callable[[], Iterable[Finding]], failed: Level = "warning") -> list[Finding]:
    """The findings of a check, and one more where it broke off; ``failed``: how bad that is."""
    found: list[Finding] = []
    try:
        found.extend(iter(check()))
    except DsBenchError as error:
        found.append(problem(name, error.problem, error.remedy or None))
    except Exception as error:  # a machine odd enough to break a check must still get the other answers
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        found.append(Finding(name=name, level=failed, text=f"could not be read: {why}"))
    return found


def one_by_one(looks: Mapping[str, Callable[[], Finding]], failed: Level = "warning") -> Iterator[Finding]:
    """The finding of each name; one that breaks costs none of the others."""
    for name, look in looks.items():
        yield from attempt(name, lambda look=look: [look()], failed)  # type: ignore[misc]


def find_program(name: str) -> str | None:
    """Where a program lies, on PATH or beside the interpreter: a virtual environment need not be activated."""
    beside = Path(sys.executable).with_name(name)
    # What may be executed is asked of the rights in effect: shutil.which asks of the real user's, which differ from
    # them where capabilities were granted, and would not see what this process can start.
    effective = os.access in os.supports_effective_ids
    startable = beside.is_file() and os.access(beside, os.X_OK, effective_ids=effective)
    return shutil.which(name) or (str(beside) if startable else None)


def ask_program(command: Sequence[str], text: str = "") -> str | None:
    """What a program prints, given ``text``; None where it cannot be started, fails or does not come to an end."""
    try:
        done = subprocess.run(
            list(command),
            input=text.encode(),
            capture_output=True,
            timeout=_TOOL_SECONDS,
            check=False,
            preexec_fn=die_with_parent,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemAccess:
    """This machine, or one that a test makes up."""

    root: Path = ROOT
    """Folder in which ``proc``, ``sys`` and ``dev`` lie."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Environment variables."""
    query: GpuQuery = field(default_factory=NvmlQuery)
    """Tells the cards."""
    which: Callable[[str], str | None] = find_program
    """Name of a program → its path."""
    ask: Callable[[Sequence[str], str], str | None] = ask_program
    """Runs a program: see :func:`ask_program`."""
