"""Ops: built, buildable or not, with the reason and the strategies that need them."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path

import pytest

from ds_bench.doctor import ops as compiled
from ds_bench.doctor.findings import Finding, SystemAccess
from ds_bench.launch import ops
from tests.support.doctor_machine import by_name, machine, nvcc, without


def compiled_ops(
    there: SystemAccess, folder: Path, accelerator: str = "cpu", *, cuda: str | None = None, nvme: bool = False
) -> dict[str, Finding]:
    return by_name(compiled.check(there, accelerator, folder, check_nvme=nvme))  # type: ignore[arg-type]


def test_each_op_names_the_strategies_that_need_it() -> None:
    users = compiled.strategies_by_op("cpu")
    assert len(users[ops.SHARED_MEMORY]) == 8
    assert users[ops.CPU_ADAM] == ["cpu_optimizer", "cpu_full", "nvme"]
    assert users[ops.ASYNC_IO] == ["nvme"]
    assert compiled.strategies_by_op("cuda")[ops.FUSED_ADAM] == ["zero0", "zero1", "zero2", "zero3", "none"]


def test_an_op_with_our_mark_is_built_and_one_without_can_be(tmp_path: Path) -> None:
    (tmp_path / f"{ops.CPU_ADAM}.ready").write_text("[]")
    found = compiled_ops(machine(), tmp_path)
    assert found["CPUAdam op"].text.startswith("built")
    assert found["CPUAdam op"].remedy is None
    assert found["ShareMemComm op"].text.startswith("not built yet, but can be")
    assert {each.level for each in found.values()} == {"ok"}


def test_an_op_cannot_be_built_without_ninja(tmp_path: Path) -> None:
    found = compiled_ops(machine(programs=without("ninja")), tmp_path)
    assert found["CPUAdam op"].level == "problem"
    assert "ninja" in found["CPUAdam op"].text


def test_with_another_cuda_than_torchs_the_build_decides(tmp_path: Path) -> None:
    found = compiled_ops(machine(ask=nvcc("11.8")), tmp_path, "cuda", cuda="12.8")
    assert {each.text.partition(",")[0] for each in found.values()} == {"not built yet"}


def test_without_a_toolkit_only_the_ops_that_link_against_cuda_cannot_be_built(tmp_path: Path) -> None:
    there = machine(ask=lambda command, _text: None if command[0].endswith("nvcc") else "")
    found = compiled_ops(there, tmp_path, "cuda", cuda="12.8")
    assert found["FusedAdam op"].level == "warning"
    assert "install the CUDA toolkit" in (found["AsyncIO op"].remedy or "")
    assert found["CPUAdam op"].text.startswith("not built yet, but can be")


@pytest.mark.parametrize(("nvme", "level"), [(True, "problem"), (False, "warning")])
def test_missing_libaio_is_a_problem_only_where_nvme_is_asked_for(tmp_path: Path, nvme: bool, level: str) -> None:
    there = machine(ask=lambda command, _text: None if "-laio" in command else "")
    found = compiled_ops(there, tmp_path, nvme=nvme)["AsyncIO op"]
    assert found.level == level
    assert "libaio-dev" in (found.remedy or "")


def test_a_build_that_failed_before_is_told_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / f"{ops.CPU_ADAM}.log"
    log.touch()
    found = compiled_ops(machine(), tmp_path)["CPUAdam op"]
    assert found.level == "problem"
    assert str(log) in found.text


def test_an_op_that_another_run_is_building_has_not_failed(tmp_path: Path) -> None:
    (tmp_path / f"{ops.CPU_ADAM}.log").touch()
    with ops.lock_file(ops.CPU_ADAM, tmp_path).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert compiled_ops(machine(), tmp_path)["CPUAdam op"].level == "ok"


def test_what_a_build_says_goes_before_what_the_cache_shows(tmp_path: Path) -> None:
    states = {
        ops.CPU_ADAM: ops.OpState(op=ops.CPU_ADAM, ready=False, reason="no g++"),
        ops.SHARED_MEMORY: ops.OpState(op=ops.SHARED_MEMORY, ready=True),
    }
    found = by_name(compiled.check(machine(), "cpu", tmp_path, check_nvme=False, states=states))
    assert found["CPUAdam op"].level == "problem"
    assert "no g++" in found["CPUAdam op"].text
    assert found["ShareMemComm op"].text.startswith("built")


def test_the_compilers_flags_of_the_user_find_libaio_in_an_odd_place() -> None:
    asked: list[Sequence[str]] = []

    def ask(command: Sequence[str], _text: str) -> str:
        asked.append(command)
        return ""

    assert compiled.has_libaio(machine(ask=ask, CFLAGS="-I/opt/aio/include", LDFLAGS="-L/opt/aio/lib"))
    assert "-I/opt/aio/include" in asked[0]
    assert list(asked[0]).index("-L/opt/aio/lib") < list(asked[0]).index("-laio")


def test_a_real_compiler_finds_no_library_that_does_not_exist() -> None:
    broken = SystemAccess(environ={"CFLAGS": "-include /no/such/header.h"})
    assert not compiled.has_libaio(broken)


def test_stale_locks_of_ours_and_of_the_users_own_programs_are_told_apart(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    theirs = tmp_path / ".cache/torch_extensions/py311_cpu/cpu adam"
    (ours / "cpu_adam").mkdir(parents=True)
    theirs.mkdir(parents=True)
    (ours / "cpu_adam" / "lock").touch()
    (theirs / "lock").touch()
    mine, yours = compiled.check_locks(machine(HOME=str(tmp_path)), ours)
    assert compiled.BUILD_COMMAND in (mine.remedy or "")
    assert yours.remedy == f"rm '{theirs}/lock'"  # quoted: the path has a space in it


def test_a_lock_that_somebody_holds_is_not_stale(tmp_path: Path) -> None:
    (tmp_path / "cpu_adam").mkdir()
    with (tmp_path / "cpu_adam" / "lock").open("w"):
        (found,) = compiled.check_locks(machine(HOME=str(tmp_path)), tmp_path)
    assert found.level == "ok"
