"""Packages that one flag alone needs, and that ds_bench does without."""

from __future__ import annotations

import importlib.util

from ..errors import UsageError


def require_installed(package: str, asked_by: str) -> None:
    """Raises UsageError if the package is not installed. ``asked_by``: the flag and value that need it."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{asked_by}: the package {package} is not installed", remedy=f"pip install {package}")
