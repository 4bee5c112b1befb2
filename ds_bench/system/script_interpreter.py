"""The interpreter of a user's script, which may be of another environment than this program's."""

from __future__ import annotations

from dataclasses import replace

from ..errors import PreflightError
from .environment import PACKAGES, Environment, Interpreter
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


def environment_of(environment: Environment, interpreter: Interpreter | None) -> Environment:
    """Return the environment with the versions of a script's interpreter, if any, in place of this program's."""
    if interpreter is None:
        return environment
    return replace(
        environment,
        python_version=interpreter.python_version,
        packages={name: version for name, version in interpreter.packages.items() if name in PACKAGES},
        torch_cuda_version=interpreter.torch_cuda_version,
    )
