"""The mistakes a user can make, as exceptions.

::

    DsBenchError                 one line and its remedy; never a traceback
    ├── UsageError               a flag, a value or a file the user gave is wrong (exit 2)
    ├── PreflightError           this machine is not ready for the plan (exit 2)
    ├── ResultsNotWrittenError   the disk of the results is full, or their folder can no longer be written to (exit 1)
    └── BenchmarkFailedError     a benchmark's run did not succeed (``benchmarks``; exit 1)

The failure of a *trial* is not an exception but a value: see ``records.schema.Outcome``.
"""

from __future__ import annotations


class DsBenchError(Exception):
    """Something the user can fix. ``str()`` gives one line: what is wrong, then what to do."""

    exit_code = 2

    def __init__(self, problem: str, *, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        # Only the first letter changes, so no remedy may begin with a command.
        end = "" if self.problem.endswith(("?", ".")) else "."
        line = f"{self.problem}{end} {self.remedy[:1].upper()}{self.remedy[1:]}" if self.remedy else self.problem
        return " ".join(line.split())


class UsageError(DsBenchError):
    """A flag, value or file given by the user cannot be used."""


class PreflightError(DsBenchError):
    """The machine is not ready for what the plan needs."""


class ResultsNotWrittenError(DsBenchError):
    """A run's files could not all be written, after the run had begun."""

    exit_code = 1
