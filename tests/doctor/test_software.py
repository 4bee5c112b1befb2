"""Packages within their ranges, programs that build ops, and ops: built, buildable or not."""

from __future__ import annotations

import ast
import importlib.util
import shlex
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from ds_bench.doctor import software
from ds_bench.doctor.findings import Finding, SystemAccess, find_program, run_program
from ds_bench.launch import ops

# The C compiler has the name that Python was built with: gcc, or x86_64-linux-gnu-gcc where Debian built it.
C_COMPILER = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
PROGRAMS = ("c++", "g++", "cc", "gcc", "clang", "ninja", "nvcc", C_COMPILER)
EVERYTHING = {name: f"/usr/bin/{name}" for name in PROGRAMS}


def machine(
    root: Path = Path("/nowhere"),
    programs: Mapping[str, str] = EVERYTHING,
    ask: Callable[[Sequence[str], str], str | None] = lambda _command, _text: "",
    **environ: str,
) -> SystemAccess:
    return SystemAccess(root=root, environ=environ, find_program=programs.get, run_program=ask)


def without(*names: str) -> dict[str, str]:
    return {name: path for name, path in EVERYTHING.items() if name not in names}


def by_name(findings: Sequence[Finding] | Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def nvcc(version: str) -> Callable[[Sequence[str], str], str | None]:
    text = f"nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {version}, V{version}.88\n"
    return lambda command, _text: text if command[0].endswith("/nvcc") else ""


def versions(**installed: str) -> Callable[[str], str | None]:
    return installed.get


def packages(lines: Sequence[str], **installed: str) -> dict[str, Finding]:
    return by_name(software.check_packages(lines, versions(**installed), lambda _: []))


def test_a_deepspeed_that_was_installed_without_its_dependencies_is_a_problem() -> None:
    lines = ["hjson", "einops", "msgpack", 'pytest; extra == "dev"']
    found = software.check_packages(["deepspeed", "hjson"], versions(deepspeed="0.19.8", msgpack="1"), lambda _: lines)
    assert [each.name for each in found if each.level == "problem"] == ["hjson", "einops"], "each once"


def test_each_package_is_within_its_range_or_a_finding_with_the_command() -> None:
    levels = {
        ("deepspeed<0.20,>=0.19.8", "0.19.6"): "warning", ("rich>=14", None): "problem",
        ("rich>=14", "13.9"): "problem", ("torch>=2.11", None): "problem",
        ("torch>=2.11", "2.13.0+cpu"): None, ("torch>=2.11", "2.14.0.dev20260101+cu130"): None,
        ("torch>=2.11", "garbage version"): "warning", ('flax; extra == "flax"', None): None,
        ("matplotlib>=3.10", None): "warning",
        # A vendor's build from a release branch counts as that release, a published pre-release does not.
        ("torch>=2.11", "2.11.0a0+eb65b36914.nv26.02"): None, ("torch>=2.11", "2.11.0a0"): "warning",
    }  # fmt: skip
    for (line, version), level in levels.items():
        name = line.partition(">")[0].partition("<")[0].partition(";")[0]
        finding = packages([line], **({} if version is None else {name: version})).get(name)
        assert (None if finding is None else finding.level) == level, (line, version)
    assert packages(["matplotlib>=3.10"])["matplotlib"].remedy == 'pip install "matplotlib>=3.10"'
    (only_reading,) = packages(software.our_requirements(), pandas="3.1").values()
    assert (only_reading.level, only_reading.remedy) == ("problem", 'pip install "ds-compare[run]"')


def test_a_deepspeed_that_is_known_to_train_wrongly_is_named() -> None:
    found = [
        [
            each
            for each in software.check_packages(["deepspeed>=0.16"], versions(deepspeed=version), lambda _: [])
            if each.level != "ok"
        ]
        for version in ("0.17.5", "0.17.6", "0.19.8")
    ]
    assert [[each.name for each in findings] for findings in found] == [["deepspeed"], ["deepspeed"] * 3, []]
    assert "7718" in found[1][0].text


def test_ranges_come_from_this_project_and_hold_here(tmp_path: Path) -> None:
    assert any(line.startswith("deepspeed") for line in software.our_requirements())
    assert {each.level for each in software.check_packages()} == {"ok"}
    for content in ("no toml [", '[project]\nname = "another"\ndependencies = ["x"]\n'):
        (tmp_path / "pyproject.toml").write_text(content)
        assert "x" not in software.our_requirements(tmp_path / "pyproject.toml")


def test_driver_must_be_of_the_branch_that_torchs_cuda_needs() -> None:
    for driver, cuda, levels in (
        ("580.65.06", "13.0", ["ok"]), ("575.57", "13.0", ["warning"]), ("525.60.13", "12.8", ["ok"]),
        ("515.105.01", "12.8", ["warning"]), ("580.65.06", "99.0", ["warning"]), ("garbage", "12.8", ["warning"]),
        (None, "12.8", []), ("580.65", None, []),
    ):  # fmt: skip
        assert [each.level for each in software.check_driver(driver, cuda)] == levels, (driver, cuda)


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
    assert by_name(software.check_programs(nothing, "cuda", "12.8"))["CUDA toolkit"].level == "warning"
    assert by_name(software.check_programs(nothing, "cpu", None))["CUDA toolkit"].level == "ok"
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "ops/op_builder/builder.py").read_text()
    text = source.partition("cuda_minor_mismatch_ok = ")[2]
    theirs = {major: set(releases) for major, releases in ast.literal_eval(text[: text.index("}") + 1]).items()}
    ours = {major: {f"{major}.{minor}" for minor in minors} for major, minors in software.COMPATIBLE_MINORS.items()}
    assert ours == theirs, "the table of the installed DeepSpeed"


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


def test_op_is_built_buildable_or_failed_before_and_a_missing_part_has_its_remedy(tmp_path: Path) -> None:
    (tmp_path / f"{ops.CPU_ADAM}.ready").write_text("[]")
    (tmp_path / f"{ops.ASYNC_IO}.log").touch()
    found = found_ops(machine(), tmp_path)
    assert found["CPUAdam op"].text.startswith("built")
    assert found["ShareMemComm op"].text.startswith("not built yet, but can be")
    assert (found["AsyncIO op"].level, "AsyncIOBuilder.log" in found["AsyncIO op"].text) == ("warning", True)
    states = {ops.CPU_ADAM: ops.OpState(op=ops.CPU_ADAM, ready=False, reason="no g++")}
    of_script = by_name(software.check_ops(machine(), "cpu", tmp_path, check_nvme=False, python="/venv/bin/python"))
    for op in ("ShareMemComm op", "AsyncIO op"):
        assert "doctor --build --python /venv/bin/python" in (of_script[op].remedy or "")
    said = by_name(software.check_ops(machine(), "cpu", tmp_path, check_nvme=False, states=states))["CPUAdam op"]
    assert (said.level, "no g++" in said.text) == ("problem", True)
    for path in tmp_path.iterdir():
        path.unlink()
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
