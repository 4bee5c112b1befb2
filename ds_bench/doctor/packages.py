"""The installed packages: within the ranges this project asks for, and fit for one another and for the driver."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from .findings import Finding, ok, problem, unreadable, warning

PROJECT = "ds-compare"
_PYPROJECT = Path(__file__).resolve().parent.parent.parent / "pyproject.toml"
_OUR_STACK = ("deepspeed", "torch", "transformers", "accelerate")
# Least driver branch of a CUDA major version (NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1).
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}

Installed = Callable[[str], str | None]
"""Name of a package → its version; None where it is not installed."""


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name) or None
    except (metadata.PackageNotFoundError, KeyError, ValueError):  # absent, or the remains of a broken installation
        return None


def declared(name: str) -> list[str]:
    """What an installed package says it needs."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def our_requirements(pyproject: Path = _PYPROJECT) -> list[str]:
    """This project's dependencies: of the checkout this file lies in, else of the installed package."""
    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        project = {}
    if project.get("name") == PROJECT:
        return list(project.get("dependencies", []))
    return declared(PROJECT)


def check(
    requirements: Sequence[str] | None = None,
    installed: Installed = installed_version,
    needs: Callable[[str], Sequence[str]] = declared,
) -> Iterator[Finding]:
    """Packages that are missing or outside their range, each in a line; the others together in one."""
    from packaging.requirements import Requirement

    installed = cache(installed)  # a look-up reads a file of some hundred KB
    wanted = our_requirements() if requirements is None else requirements
    if not wanted:
        yield unreadable("packages", "neither pyproject.toml nor the installed package tells the ranges")
        return
    good: list[str] = []
    bad: list[Finding] = []
    for line in wanted:
        finding = _against(line, installed, f"{PROJECT} needs")
        if finding is None:
            good.append(Requirement(line).name)
        else:
            bad.append(finding)
    if good:
        yield ok("packages", f"{_summed(good, installed)}: within the ranges that {PROJECT} is for")
    yield from bad
    said = {finding.name for finding in bad}
    for name in _OUR_STACK:
        for line in needs(name) if installed(name) else ():
            finding = _against(line, installed, f"{name} {installed(name)} needs")
            if finding is not None and finding.name not in said:
                said.add(finding.name)
                yield finding


def _summed(names: Sequence[str], installed: Installed) -> str:
    """The versions that matter most, and how many others there are."""
    shown = [f"{name} {installed(name)}" for name in names if name in _OUR_STACK] or list(names)
    others = len(names) - len(shown)
    return ", ".join(shown) + (f" and {others} more" if others else "")


def _against(line: str, installed: Installed, who: str) -> Finding | None:
    """None where a requirement is met, or does not apply here."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion, Version

    try:
        wanted = Requirement(line)
    except InvalidRequirement:
        return None  # somebody else's metadata: nothing can be claimed
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return None
    version, install = installed(wanted.name), f'pip install "{wanted.name}{wanted.specifier}"'
    if version is None:
        return problem(wanted.name, f"not installed; {who} {wanted.name}{wanted.specifier}", install)
    try:
        fits = wanted.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return unreadable(wanted.name, f"its version is {version!r}")
    return None if fits else problem(wanted.name, f"{version} is installed; {who} {wanted.specifier}", install)


def check_driver(driver: str | None, torch_cuda: str | None) -> Iterator[Finding]:
    """Whether the driver is new enough for the CUDA that torch was built for. Nothing where there is no driver."""
    if driver is None or torch_cuda is None:
        return
    branch, cuda = re.match(r"\d+", driver), re.match(r"\d+", torch_cuda)
    least = LEAST_DRIVER.get(int(cuda[0])) if cuda else None
    if branch is None or least is None:
        yield unreadable("GPU driver", f"no rule for driver {driver} with torch's CUDA {torch_cuda}")
    elif int(branch[0]) < least:
        text = f"{driver}; torch's CUDA {torch_cuda} needs {least} or newer, unless cuda-compat is installed"
        yield warning("GPU driver", text, "update the driver, or install torch for an older CUDA")
    else:
        yield ok("GPU driver", f"{driver}, new enough for torch's CUDA {torch_cuda}")
