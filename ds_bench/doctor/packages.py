"""The installed packages: within the ranges this project needs, and fit for one another and for the driver."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from ..system.environment import install_command, installed_version
from .findings import Finding, ok, problem, unreadable, warning

PROJECT = "ds-compare"
_PYPROJECT = Path(__file__).resolve().parent.parent.parent / "pyproject.toml"
_OUR_STACK = ("deepspeed", "torch", "transformers", "accelerate")
_TRAINED_WITHOUT = {
    "jinja2": "an HTML page",
    "matplotlib": "the charts of an HTML page",
    "pandas": "data frames and Parquet",
}
"""Packages that no training needs, whatever declares them, and what is lost without them."""
MIN_DRIVER_BRANCH = {11: 450, 12: 525, 13: 580}
"""CUDA's major version → driver (NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1)."""

Installed = Callable[[str], str | None]
"""Name of a package → its version; None if it is not installed."""


def declared_requirements(name: str) -> list[str]:
    """The requirements in the metadata of an installed package; empty if it is not installed."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def our_requirements(pyproject: Path = _PYPROJECT) -> list[str]:
    """What runs need: this project's dependencies and its extra ``run``.

    Those of the checkout that holds this file, else of the installed package.
    """
    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        project = {}
    if project.get("name") == PROJECT:
        return [*project.get("dependencies", []), *project.get("optional-dependencies", {}).get("run", [])]
    return list(_of_extra(declared_requirements(PROJECT), "run"))


def _of_extra(lines: Sequence[str], extra: str) -> Iterator[str]:
    """The requirements that apply with an extra, without their markers."""
    from packaging.requirements import Requirement

    for line in lines:
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
            yield f"{wanted.name}{wanted.specifier}"


def check(
    requirements: Sequence[str] | None = None,
    installed: Installed = installed_version,
    needs: Callable[[str], Sequence[str]] = declared_requirements,
) -> Iterator[Finding]:
    """One finding for all packages within their ranges, and one for each that is missing or outside.

    ``requirements``: None for :func:`our_requirements`. ``needs``: requirements of a package of the stack.
    """
    installed = functools.cache(installed)  # a look-up reads a file of some hundred KB
    requirements = our_requirements() if requirements is None else requirements
    if not requirements:
        yield unreadable("packages", "neither pyproject.toml nor the installed package tells the ranges")
        return
    # An installation for reading results gets one finding, not one for every package that it lacks.
    if set(_OUR_STACK) <= set(_names(requirements)) and not any(map(installed, _OUR_STACK)):
        text = f"{', '.join(_OUR_STACK)} are not installed: results can be read here, and nothing can be run"
        yield problem("packages", text, install_command())
        return
    findings = {line: _check_requirement(line, installed, f"{PROJECT} needs") for line in requirements}
    if fitting := [line for line, finding in findings.items() if finding is None]:
        yield ok("packages", f"{_summarise(fitting, installed)}: within the ranges that {PROJECT} is for")
    bad = [finding for finding in findings.values() if finding is not None]
    yield from bad
    names = {finding.name for finding in bad}
    for name in _OUR_STACK:
        for line in needs(name) if installed(name) else ():
            finding = _check_requirement(line, installed, f"{name} {installed(name)} needs")
            if finding is not None and finding.name not in names:  # one finding per package
                names.add(finding.name)
                yield finding


def _names(requirements: Sequence[str]) -> list[str]:
    from packaging.requirements import Requirement

    return [Requirement(line).name for line in requirements]


def _summarise(requirements: Sequence[str], installed: Installed) -> str:
    """The versions that matter most, and how many others there are."""
    names = _names(requirements)
    shown = [f"{name} {installed(name)}" for name in names if name in _OUR_STACK] or names
    others = len(names) - len(shown)
    return ", ".join(shown) + (f" and {others} more" if others else "")


def _check_requirement(line: str, installed: Installed, needed_by: str) -> Finding | None:
    """None if the requirement is met, or does not apply on this system."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion, Version

    try:
        wanted = Requirement(line)
    except InvalidRequirement:
        return None  # another package's metadata is faulty: nothing can be concluded
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return None
    version, install = installed(wanted.name), f'pip install "{wanted.name}{wanted.specifier}"'
    lost = _TRAINED_WITHOUT.get(wanted.name)
    finding = functools.partial(warning if lost else problem, wanted.name, remedy=install)
    only_for = f" for {lost}" if lost else ""
    if version is None:
        return finding(f"not installed; {needed_by} {wanted.name}{wanted.specifier}{only_for}")
    try:
        parsed = Version(version)
    except InvalidVersion:
        return unreadable(wanted.name, f"its version is {version!r}")
    # A vendor's build from the branch of a release is called a pre-release of it: NVIDIA's 2.11.0a0+eb65b36914.nv26.02.
    if parsed.is_prerelease and parsed.local:
        parsed = Version(parsed.base_version)
    if wanted.specifier.contains(parsed, prereleases=True):
        return None
    return finding(f"{version} is installed; {needed_by} {wanted.specifier}{only_for}")


def check_driver(driver: str | None, torch_cuda: str | None) -> Iterator[Finding]:
    """Whether the driver is new enough for the CUDA that torch was built for. No finding without a driver."""
    if driver is None or torch_cuda is None:
        return
    branch, cuda = re.match(r"\d+", driver), re.match(r"\d+", torch_cuda)
    minimum = MIN_DRIVER_BRANCH.get(int(cuda[0])) if cuda else None
    if branch is None or minimum is None:
        yield unreadable("GPU driver", f"no rule for driver {driver} with torch's CUDA {torch_cuda}")
    elif int(branch[0]) < minimum:
        text = f"{driver}; torch's CUDA {torch_cuda} needs {minimum} or newer, unless cuda-compat is installed"
        yield warning("GPU driver", text, "update the driver, or install torch for an older CUDA")
    else:
        yield ok("GPU driver", f"{driver}, new enough for torch's CUDA {torch_cuda}")
