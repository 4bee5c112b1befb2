"""Compilers, ninja and CUDA toolkits are found where the build looks for them."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from ds_bench.doctor import compilers
from ds_bench.doctor.findings import Finding, find_program, run_program
from tests.support.doctor_machine import by_name, machine, nvcc, without


def test_a_program_that_fails_or_is_not_there_gives_no_answer() -> None:
    assert run_program(["false"]) is None
    assert run_program(["/no/such/program"]) is None
    assert run_program(["bad\0name"]) is None
    assert run_program(["cat"], "text") == "text"


def test_ninja_is_found_beside_the_interpreter_of_an_environment_that_is_not_activated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_program("ninja") is not None


@pytest.mark.parametrize(("missing", "level"), [("c++", "problem"), ("ninja", "problem")])
def test_without_a_compiler_or_ninja_no_op_can_be_used(missing: str, level: str) -> None:
    there = machine(programs=without(missing))
    found = {each.level for each in compilers.check(there, "cpu", None) if each.remedy}
    assert found == {level}
    assert not compilers.can_build(there)


def test_a_compiler_named_by_cxx_is_the_one_looked_for() -> None:
    there = machine(programs=without("c++"), CXX="clang -v", CC="clang")
    assert {each.level for each in compilers.check(there, "cpu", None)} == {"ok"}
    assert compilers.can_build(there)


@pytest.mark.parametrize(("variable", "name"), [("CC", "C compiler"), ("CXX", "C++ compiler")])
def test_a_compiler_that_is_not_there_is_blamed_on_the_variable_that_names_it(variable: str, name: str) -> None:
    there = machine(programs=without("/nonexist"), **{variable: "/nonexist"})
    found = by_name(compilers.check(there, "cpu", None))[name]
    assert found.level != "ok"
    assert f"/nonexist, which ${variable} names" in found.text
    assert f"unset {variable}" in (found.remedy or "")


def test_a_cxx_with_an_open_quote_is_a_finding_and_no_traceback() -> None:
    found = by_name(compilers.check(machine(CXX="'g++"), "cpu", None))
    assert "could not be read" in found["C++ compiler"].text
    assert found["ninja"].level == "ok"


def toolkit(version: str, torch_cuda: str, **environ: str) -> Finding:
    return by_name(compilers.check(machine(ask=nvcc(version), **environ), "cuda", torch_cuda))["CUDA toolkit"]


def test_a_toolkit_fits_torch_by_deepspeeds_own_rule() -> None:
    level = {
        ("12.8", "12.8"): "ok",
        ("12.4", "12.8"): "ok",
        ("12.7", "12.8"): "warning",  # there was no 12.7; DeepSpeed's table has none
        ("11.8", "12.8"): "warning",
        ("12.8", "12.7"): "warning",
        ("13.0", "13.0"): "ok",
        ("13.1", "13.0"): "warning",  # DeepSpeed's table ends at 12
        ("12.10", "12.8"): "warning",  # 12.10 is not 12.1
    }
    assert {(installed, torch_cuda): toolkit(installed, torch_cuda).level for installed, torch_cuda in level} == level


def test_the_minor_versions_that_may_mix_are_those_of_the_installed_deepspeed() -> None:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "ops/op_builder/builder.py"
    assigned = {
        target.id: node.value
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    table = ast.literal_eval(assigned["cuda_minor_mismatch_ok"])
    ours = {major: {f"{major}.{minor}" for minor in minors} for major, minors in compilers.COMPATIBLE_MINORS.items()}
    assert ours == {major: set(versions) for major, versions in table.items()}


def test_without_a_toolkit_torchs_adamw_stands_in_and_that_is_said() -> None:
    there = machine(ask=lambda _command, _text: None)
    found = by_name(compilers.check(there, "cuda", "12.8"))["CUDA toolkit"]
    assert found.level == "warning"
    assert "torch's AdamW" in found.text


def test_a_cpu_build_of_torch_needs_no_toolkit() -> None:
    assert by_name(compilers.check(machine(), "cpu", None))["CUDA toolkit"].level == "ok"


def test_cuda_home_goes_before_the_nvcc_on_path() -> None:
    asked: list[str] = []

    def ask(command: Sequence[str], _text: str) -> str:
        asked.append(command[0])
        return ""

    compilers.toolkit_release(machine(ask=ask, CUDA_HOME="/opt/cuda"))
    compilers.toolkit_release(machine(ask=ask))
    compilers.toolkit_release(machine(Path("/root-of-test"), programs={}, ask=ask))
    assert asked == ["/opt/cuda/bin/nvcc", "/usr/bin/nvcc", "/root-of-test/usr/local/cuda/bin/nvcc"]
