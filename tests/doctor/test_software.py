"""Packages within their ranges, programs that build ops, and ops: built, buildable or not."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from ds_bench.doctor import software
from ds_bench.doctor.findings import Finding, SystemAccess, find_program, run_program
from ds_bench.launch import ops
from tests.support.doctor_machine import by_name, machine, nvcc, versions, without

STACK = dict.fromkeys(software.RUN_PACKAGES, "99")


def packages(lines: Sequence[str], needs: Sequence[str] = (), **installed: str) -> dict[str, Finding]:
    return by_name(software.check_packages(lines, versions(**installed), lambda _name: needs))


def test_each_package_is_within_its_range_or_a_finding_with_the_command() -> None:
    levels = {
        ("deepspeed<0.20,>=0.19.8", "0.19.6"): "problem", ("rich>=14", None): "problem",
        ("torch>=2.11", "2.13.0+cpu"): None, ("torch>=2.11", "2.14.0.dev20260101+cu130"): None,
        ("torch>=2.11", "garbage version"): "warning", ('flax; extra == "flax"', None): None,
        ("matplotlib>=3.10", None): "warning",
        # A vendor's build from a release branch counts as that release, a published pre-release does not.
        ("torch>=2.11", "2.11.0a0+eb65b36914.nv26.02"): None, ("torch>=2.11", "2.11.0a0"): "problem",
    }  # fmt: skip
    for (line, version), level in levels.items():
        name = line.partition(">")[0].partition("<")[0].partition(";")[0]
        finding = packages([line], **({} if version is None else {name: version})).get(name)
        assert (None if finding is None else finding.level) == level, (line, version)
    assert packages(["matplotlib>=3.10"])["matplotlib"].remedy == 'pip install "matplotlib>=3.10"'


def test_requirements_of_installed_packages_are_checked_too() -> None:
    lines = ["tokenizers<0.30,>=0.22", 'flax; extra == "flax"', "not a (requirement", "jinja2"]
    found = packages([f"{name}>=1" for name in STACK], lines, **STACK, tokenizers="0.19.0")
    assert {name: each.level for name, each in found.items()} == {
        "packages": "ok", "tokenizers": "problem", "jinja2": "warning",
    }  # fmt: skip
    assert "deepspeed 99 needs tokenizers" in found["tokenizers"].text or "torch 99" in found["tokenizers"].text


def test_reading_results_only_is_one_finding_with_the_extra_to_install() -> None:
    (found,) = packages(software.our_requirements(), pandas="3.1").values()
    assert (found.level, found.remedy) == ("problem", 'pip install "ds-compare[run]"')


def test_ranges_come_from_this_project_and_hold_here(tmp_path: Path) -> None:
    assert any(line.startswith("deepspeed") for line in software.our_requirements())
    assert {each.level for each in software.check_packages()} == {"ok"}
    for content in ("no toml [", '[project]\nname = "another"\ndependencies = ["x"]\n'):
        (tmp_path / "pyproject.toml").write_text(content)
        assert "x" not in software.our_requirements(tmp_path / "pyproject.toml")


def test_driver_must_be_of_the_branch_that_torchs_cuda_needs() -> None:
    for driver, cuda, level in (
        ("580.65.06", "13.0", "ok"), ("575.57", "13.0", "warning"), ("525.60.13", "12.8", "ok"),
        ("515.105.01", "12.8", "warning"), ("580.65.06", "99.0", "warning"), ("garbage", "12.8", "warning"),
    ):  # fmt: skip
        assert [each.level for each in software.check_driver(driver, cuda)] == [level], (driver, cuda)
    assert [*software.check_driver(None, "12.8"), *software.check_driver("580.65", None)] == []


# ------------------------------------------------------------------ programs


def test_program_that_fails_or_is_missing_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [run_program([name]) for name in ("false", "/no/such/program", "bad\0name")] == [None] * 3
    assert run_program(["cat"], "text") == "text"
    monkeypatch.setenv("PATH", "")
    assert find_program("ninja") is not None  # next to the interpreter


def test_without_a_compiler_or_ninja_no_op_can_be_used_and_a_variable_that_names_it_is_blamed() -> None:
    for missing in ("c++", "ninja"):
        found = software.check_programs(machine(programs=without(missing)), "cpu", None)
        assert {each.level for each in found if each.remedy} == {"problem"}
    there = machine(programs=without("c++"), CXX="clang -v", CC="clang")
    assert {each.level for each in software.check_programs(there, "cpu", None)} == {"ok"}
    found_all = by_name(software.check_programs(machine(CC="/nonexist", CXX="'g++"), "cpu", None))
    assert "/nonexist (from $CC)" in found_all["C compiler"].text
    assert "could not be read" in found_all["C++ compiler"].text
    assert found_all["ninja"].level == "ok"


def test_toolkit_fits_torch_by_deepspeeds_own_rule() -> None:
    levels = {
        ("12.8", "12.8"): "ok", ("12.4", "12.8"): "ok", ("13.0", "13.0"): "ok",
        ("12.7", "12.8"): "warning", ("12.8", "12.7"): "warning",  # 12.7 does not exist, nor is it in DeepSpeed's table
        ("11.8", "12.8"): "warning", ("13.1", "13.0"): "warning", ("12.10", "12.8"): "warning",
    }  # fmt: skip
    for (release, cuda), level in levels.items():
        found = by_name(software.check_programs(machine(ask=nvcc(release)), "cuda", cuda))
        assert found["CUDA toolkit"].level == level, (release, cuda)
    nothing = machine(ask=lambda _command, _text: None)
    for accelerator, cuda, level in (("cuda", "12.8", "warning"), ("cpu", None, "ok")):
        found = by_name(software.check_programs(nothing, accelerator, cuda))  # type: ignore[arg-type]
        assert found["CUDA toolkit"].level == level


def test_compatible_minor_versions_are_those_of_the_installed_deepspeed() -> None:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "ops/op_builder/builder.py").read_text()
    text = source.partition("cuda_minor_mismatch_ok = ")[2]
    table = ast.literal_eval(text[: text.index("}") + 1])
    ours = {major: {f"{major}.{minor}" for minor in minors} for major, minors in software.COMPATIBLE_MINORS.items()}
    assert ours == {major: set(releases) for major, releases in table.items()}


def test_cuda_home_goes_before_the_nvcc_on_path() -> None:
    asked: list[str] = []

    def ask(command: Sequence[str], _text: str) -> str:
        asked.append(command[0])
        return ""

    software.toolkit_release(machine(ask=ask, CUDA_HOME="/opt/cuda"))
    software.toolkit_release(machine(ask=ask))
    software.toolkit_release(machine(Path("/root-of-test"), programs={}, ask=ask))
    assert asked == ["/opt/cuda/bin/nvcc", "/usr/bin/nvcc", "/root-of-test/usr/local/cuda/bin/nvcc"]


# ------------------------------------------------------------------ ops


def found_ops(there: SystemAccess, folder: Path, accelerator: str = "cpu", *, nvme: bool = False) -> dict[str, Finding]:
    return by_name(software.check_ops(there, accelerator, folder, check_nvme=nvme))  # type: ignore[arg-type]


def test_each_op_names_the_strategies_that_need_it() -> None:
    users = software.strategies_by_op("cpu")
    assert len(users[ops.SHARED_MEMORY]) == 8
    assert (users[ops.CPU_ADAM], users[ops.ASYNC_IO]) == (["cpu_optimizer", "cpu_full", "nvme"], ["nvme"])
    assert software.strategies_by_op("cuda")[ops.FUSED_ADAM] == ["zero0", "zero1", "zero2", "zero3", "none"]


def test_op_is_built_being_built_buildable_or_failed_before(tmp_path: Path) -> None:
    (tmp_path / f"{ops.CPU_ADAM}.ready").write_text("[]")
    (tmp_path / f"{ops.ASYNC_IO}.log").touch()
    ops.lock_file(ops.SHARED_MEMORY, tmp_path).mkdir()  # cannot be opened, which hides no other finding
    found = found_ops(machine(), tmp_path)
    assert found["CPUAdam op"].text.startswith("built")
    assert found["ShareMemComm op"].text.startswith("not built yet, but can be")
    assert (found["AsyncIO op"].level, "AsyncIOBuilder.log" in found["AsyncIO op"].text) == ("warning", True)
    with ops.lock_file(ops.ASYNC_IO, tmp_path).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert found_ops(machine(), tmp_path)["AsyncIO op"].level == "ok"
    states = {ops.CPU_ADAM: ops.OpState(op=ops.CPU_ADAM, ready=False, reason="no g++")}
    said = by_name(software.check_ops(machine(), "cpu", tmp_path, check_nvme=False, states=states))["CPUAdam op"]
    assert (said.level, "no g++" in said.text) == ("problem", True)


def test_op_that_cannot_be_built_has_the_remedy_for_what_is_missing(tmp_path: Path) -> None:
    assert found_ops(machine(programs=without("ninja")), tmp_path)["CPUAdam op"].level == "problem"
    no_nvcc = machine(ask=lambda command, _text: None if command[0].endswith("nvcc") else "")
    found = found_ops(no_nvcc, tmp_path, "cuda")
    assert found["FusedAdam op"].level == "warning"
    assert "install the CUDA toolkit" in (found["AsyncIO op"].remedy or "")
    assert found["CPUAdam op"].text.startswith("not built yet, but can be")
    other_cuda = found_ops(machine(ask=nvcc("11.8")), tmp_path, "cuda")  # the build decides
    assert {each.text.partition(",")[0] for each in other_cuda.values()} == {"not built yet"}
    no_libaio = machine(ask=lambda command, _text: None if "-laio" in command else "")
    for nvme, level in ((True, "problem"), (False, "warning")):
        missing = found_ops(no_libaio, tmp_path, nvme=nvme)["AsyncIO op"]
        assert (missing.level, "libaio-dev" in (missing.remedy or "")) == (level, True)


def test_libaio_is_looked_for_with_the_users_flags() -> None:
    asked: list[str] = []
    there = machine(ask=lambda command, _text: asked.extend(command) or "", CFLAGS="-I/opt/aio", LDFLAGS="-L/opt/lib")
    assert software.has_libaio(there)
    assert "-I/opt/aio" in asked
    assert asked.index("-L/opt/lib") < asked.index("-laio")
    assert not software.has_libaio(SystemAccess(environ={"CFLAGS": "-include /no/such/header.h"}))


def test_stale_locks_of_ours_and_of_the_users_own_programs_are_told_apart(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    theirs = tmp_path / ".cache/torch_extensions/py311_cpu/cpu adam"
    for folder in (ours / "cpu_adam", theirs):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
    mine, yours = software.check_locks(machine(HOME=str(tmp_path)), ours)
    assert software.BUILD_COMMAND in (mine.remedy or "")
    assert yours.remedy == f"rm '{theirs}/lock'"  # quoted: the path has a space in it
    with (ours / "cpu_adam" / "lock").open(), (theirs / "lock").open():
        assert [each.level for each in software.check_locks(machine(HOME=str(tmp_path)), ours)] == ["ok"]
