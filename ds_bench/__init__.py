"""Which DeepSpeed configuration should this model be trained with, on these machines?

The packages in the order that data takes: ``cli`` reads the flags; ``config`` holds what they ask for, with
``models`` and the facts of the machine from ``system``; ``planner`` makes the trials; ``doctor`` checks the machine;
``prediction`` gives each trial the memory that it will need; ``launch`` runs each one in processes of its own, whose
ranks are ``worker``; ``records`` keeps what was observed; ``analysis`` computes numbers, caveats and a comparison from
it; ``recommend`` chooses a row; ``report`` shows all of it. ``runner`` is the main path through these, ``size_search``
finds the largest micro-batch or the longest sequence, and ``baselines`` compares later results with stored ones.
``api`` has the functions and classes of ``__all__`` (docs/ci_and_python.md).
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


if not TYPE_CHECKING:  # else type checkers would take any name for one that exists

    def __getattr__(name: str) -> Any:
        """The public names, imported on first use: importing the package itself loads nothing."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import api

        value = globals()[name] = getattr(api, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
