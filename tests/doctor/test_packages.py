"""Packages are held to their ranges, and the driver to torch's CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ds_bench.doctor import packages
from ds_bench.doctor.findings import Finding
from tests.support.doctor_machine import by_name, versions


def checked(requirements: Sequence[str], installed: Callable[[str], str | None]) -> dict[str, Finding]:
    return by_name(packages.check(requirements, installed, lambda _name: ()))


def test_a_package_outside_its_range_is_a_problem_and_the_remedy_names_the_range() -> None:
    found = checked(["deepspeed>=0.19.8,<0.20"], versions(deepspeed="0.19.6"))
    assert found["deepspeed"].level == "problem"
    assert found["deepspeed"].remedy in (
        'pip install "deepspeed<0.20,>=0.19.8"',
        'pip install "deepspeed>=0.19.8,<0.20"',
    )


def test_a_missing_package_is_a_problem() -> None:
    assert "not installed" in checked(["rich>=14"], versions())["rich"].text


def test_where_only_results_can_be_read_one_line_names_the_extra() -> None:
    found = checked([*packages.our_requirements()], versions(pandas="3.1"))
    assert found.keys() == {"packages"}
    assert found["packages"].remedy == 'pip install "ds-compare[run]"'


def test_a_local_version_like_that_of_a_cpu_build_is_within_the_range() -> None:
    assert checked(["torch>=2.11"], versions(torch="2.13.0+cpu"))["packages"].level == "ok"


def test_a_nightly_build_is_compared_as_a_version_and_not_refused_for_being_one() -> None:
    assert "torch" not in checked(["torch>=2.11"], versions(torch="2.14.0.dev20260101+cu130"))


def test_a_version_that_is_none_is_told_as_unreadable() -> None:
    assert "could not be read" in checked(["torch>=2.11"], versions(torch="garbage version"))["torch"].text


def test_what_an_installed_package_asks_of_another_is_checked_too() -> None:
    needs = {"transformers": ["tokenizers<0.30,>=0.22", 'flax; extra == "flax"', "not a (requirement"]}
    found = by_name(
        packages.check(
            ["transformers>=5"],
            versions(transformers="5.23.0", tokenizers="0.19.0"),
            lambda name: needs.get(name, ()),
        )
    )
    assert found["tokenizers"].level == "problem"
    assert "transformers 5.23.0 needs" in found["tokenizers"].text
    assert found.keys() == {"packages", "tokenizers"}


def test_the_ranges_come_from_the_checkout_and_hold_here() -> None:
    assert any(line.startswith("deepspeed") for line in packages.our_requirements())
    assert {each.level for each in packages.check()} == {"ok"}


@pytest.mark.parametrize("content", [None, "no toml [", '[project]\nname = "another"\ndependencies = ["x"]\n'])
def test_another_projects_file_beside_the_package_is_not_ours(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "pyproject.toml"
    if content is not None:
        path.write_text(content)
    assert "x" not in packages.our_requirements(path)


def test_the_driver_must_be_of_the_branch_that_torchs_cuda_needs(subtests: pytest.Subtests) -> None:
    for driver, torch_cuda, level in (
        ("580.65.06", "13.0", "ok"),
        ("575.57", "13.0", "warning"),
        ("525.60.13", "12.8", "ok"),
        ("515.105.01", "12.8", "warning"),
        ("450.80.02", "11.8", "ok"),
        ("580.65.06", "99.0", "warning"),
        ("garbage", "12.8", "warning"),
    ):
        with subtests.test(driver=driver, torch_cuda=torch_cuda, level=level):
            (found,) = packages.check_driver(driver, torch_cuda)
            assert found.level == level


def test_without_driver_or_cuda_there_is_nothing_to_say_of_the_driver() -> None:
    assert [*packages.check_driver(None, "12.8"), *packages.check_driver("580.65", None)] == []


def test_a_package_that_no_training_needs_is_a_warning_whoever_declares_it() -> None:
    """The stack of a bare machine: torch declares jinja2, which it imports for compiled code alone."""
    installed = dict.fromkeys(("deepspeed", "torch", "transformers", "accelerate"), "99")
    lines = ["torch>=2.11", "deepspeed>=0.19.8", "transformers>=5", "accelerate>=1", "matplotlib>=3.10"]
    found = by_name(packages.check([*lines, "hjson>=3.1"], versions(**installed), lambda _name: ["jinja2"]))
    assert {name: found[name].level for name in ("matplotlib", "jinja2", "hjson")} == {
        "matplotlib": "warning",
        "jinja2": "warning",
        "hjson": "problem",
    }
    assert found["matplotlib"].remedy == 'pip install "matplotlib>=3.10"'


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.11.0a0+eb65b36914.nv26.02", True),
        ("2.10.0a0+b4e4ee81d3.nv25.12", False),
        ("2.11.0a0", False),  # a published pre-release is older than the release
    ],
)
def test_a_vendors_build_from_a_release_branch_counts_as_that_release(version: str, fits: bool) -> None:
    assert ("torch" not in checked(["torch>=2.11"], versions(torch=version))) is fits
