"""Which DeepSpeed configuration should this model be trained with, on these machines?

The packages, in the order of the data flow: ``cli`` parses flags; ``config`` holds the request, with ``models`` for the
model and ``system`` for the machine; ``planning`` makes the trials; ``doctor`` checks the machine; ``prediction``
predicts the memory of each trial; ``launch`` runs it in its own processes, whose ranks are ``worker``; ``records``
stores the measurements; ``analysis`` turns them into numbers, caveats and a comparison; ``recommend`` chooses a row;
``report`` shows everything. ``runner`` is the main path through these packages, and ``baselines`` compares new results
with stored ones. ``api`` has the functions and classes of ``__all__`` (docs/ci_and_python.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Plan, PlannedRow, Result, load, plan, run
    from .errors import DsBenchError, PreflightError, UsageError

__version__ = "0.1.0"
__all__ = [
    "DsBenchError",
    "Plan",
    "PlannedRow",
    "PreflightError",
    "Result",
    "UsageError",
    "__version__",
    "load",
    "plan",
    "run",
]


if not TYPE_CHECKING:  # otherwise type checkers would accept any attribute

    def __getattr__(name: str) -> Any:
        """Import a public name on first use, so that importing the package loads nothing else."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import api

        value = globals()[name] = getattr(api, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
