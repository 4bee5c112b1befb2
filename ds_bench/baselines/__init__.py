"""Baselines by name and the regression gate, for users' own programs and tests."""

from .gate import (
    DEFAULT_PATH,
    BaselineComparison,
    compare_to_baseline,
    load_baseline,
    missing_baselines,
    save_baseline,
    save_results,
)
from .store import BaselineEntry

__all__ = [
    "DEFAULT_PATH",
    "BaselineComparison",
    "BaselineEntry",
    "compare_to_baseline",
    "load_baseline",
    "missing_baselines",
    "save_baseline",
    "save_results",
]
