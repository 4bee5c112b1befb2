"""The interpreter of a user's script, which may be of another environment than this program's."""

from __future__ import annotations

from dataclasses import replace

from ..errors import PreflightError
from .environment import PACKAGES, Interpreter, Machine
from .helper_programs import run_tool

_OLDEST = (3, 9)


def read_interpreter(python: str) -> Interpreter:
    """Read the versions of an interpreter. Raises PreflightError for one that cannot train with DeepSpeed."""
    names = (*PACKAGES, "ninja")
    facts = run_tool("worker.interpreter_facts", *names, environment={}, timeout_seconds=60.0, python=python)
    answer = facts.last_object("it")
    if "error" in answer:
        raise PreflightError(f"--python {python} does not run: {answer['error']}", remedy="give another interpreter")
    found = Interpreter(python=python, **answer)
    version = found.python_version.split(".")
    if tuple(map(int, version[:2])) < _OLDEST:
        problem = f"--python {python} is Python {found.python_version}"
        raise PreflightError(problem, remedy="give one of Python 3.9 or newer")
    if missing := [name for name in ("torch", "deepspeed") if name not in found.packages]:
        problem = f"the script's interpreter {python} has no {' and no '.join(missing)}"
        raise PreflightError(problem, remedy="install it there, or give --python VENV/bin/python")
    return found


def with_interpreter(machine: Machine, python: str) -> Machine:
    """Return the machine with the versions of the script's interpreter in place of this program's."""
    found = read_interpreter(python)
    environment = replace(
        machine.environment,
        python_version=found.python_version,
        packages={name: version for name, version in found.packages.items() if name in PACKAGES},
        torch_cuda_version=found.torch_cuda_version,
    )
    return replace(machine, environment=environment, interpreter=found)
