"""Installed packages, and those that some commands or flags need; looked for without importing them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from ..errors import PreflightError, UsageError

RUN_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")
"""What trials need beside the packages that reading results needs: the extra ``run``."""
MODEL_PACKAGES = ("torch", "transformers")
"""Those of them that build a model."""


def installed_version(name: str) -> str | None:
    """The version in a package's metadata; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name) or None
    except (metadata.PackageNotFoundError, KeyError, ValueError):  # absent, or the remains of a broken installation
        return None


def missing_packages(names: Sequence[str]) -> list[str]:
    """The packages of these that cannot be imported."""
    return [name for name in names if find_spec(name) is None]


def install_command(extra: str = "run") -> str:
    """The command that installs an extra."""
    return f'pip install "ds-compare[{extra}]"'


def require_packages(purpose: str, names: Sequence[str] = RUN_PACKAGES, extra: str = "run") -> None:
    """Raises PreflightError, with the extra to install, if one of the packages is not installed.

    ``purpose``: what needs them, as the beginning of a sentence.
    """
    if missing := missing_packages(names):
        are = "is" if len(missing) == 1 else "are"
        problem = f"{purpose} needs {', '.join(missing)}, which {are} not installed"
        raise PreflightError(problem, remedy=install_command(extra))


def require_installed(package: str, asked_by: str) -> None:
    """Raises UsageError if the package is not installed. ``asked_by``: the flag and value that need it."""
    if missing_packages([package]):
        raise UsageError(f"{asked_by}: the package {package} is not installed", remedy=f"pip install {package}")
