"""Which checks run and in which order: all of them, and those that a plan needs."""

from __future__ import annotations

import errno
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config.configuration_files import read_configuration_files
from ds_bench.config.spec import Configuration, Placement
from ds_bench.doctor import checks as doctor
from ds_bench.doctor import compilers, nvme, packages
from ds_bench.doctor.findings import Finding, SystemAccess, ok, problem, warning
from ds_bench.errors import PreflightError
from ds_bench.launch import ops
from ds_bench.system import environment
from ds_bench.system.gpus import GpuFacts, GpuInventory
from tests.support import fakes

GROUPS = ["Packages", "Tools", "GPUs", "Host", "DeepSpeed ops", "NVMe"]
CPU = Placement(accelerator="cpu")


class Cards:
    def __init__(self, *gpus: GpuFacts) -> None:
        self.gpus = gpus
        self.times = 0

    def __call__(self) -> GpuInventory:
        self.times += 1
        return GpuInventory(driver_version="580.65.06" if self.gpus else None, gpus=self.gpus)


OFFLINE = {"HF_HUB_OFFLINE": "1"}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SystemAccess:
    """A machine that tells nothing: no files, no programs, no cards, no variables."""
    monkeypatch.setenv("DS_BENCH_OPS_CACHE", str(tmp_path / "ops"))
    root = tmp_path / "root"
    root.mkdir()
    return SystemAccess(
        root=root, environ=OFFLINE, read_gpus=Cards(), find_program=lambda _name: None, run_program=lambda *_: None
    )


# ------------------------------------------------------------------ the whole


def test_a_machine_that_tells_nothing_gets_an_answer_of_every_group(bare: SystemAccess) -> None:
    groups = doctor.run_all_checks(bare)
    assert list(groups) == GROUPS
    assert all(groups.values())
    assert "problem" in {finding.level for findings in groups.values() for finding in findings}


def test_the_cards_are_asked_once(bare: SystemAccess) -> None:
    assert isinstance(bare.read_gpus, Cards)
    doctor.run_all_checks(bare)
    assert bare.read_gpus.times == 1


def test_a_check_that_breaks_costs_no_other_group(bare: SystemAccess, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(compilers, "check", breaks)
    groups = doctor.run_all_checks(bare)
    assert list(groups) == GROUPS
    assert groups["Tools"] == [warning("tools", "could not be read: broken")]


def test_a_path_that_cannot_be_used_is_not_measured(
    bare: SystemAccess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme, "check_speed", lambda *_: pytest.fail("measured all the same"))
    (found,) = doctor.run_all_checks(bare, nvme_path=tmp_path / "missing")["NVMe"]
    assert found.level == "problem"


def test_without_the_op_the_speed_is_not_measured_and_the_remedy_builds_it(bare: SystemAccess, tmp_path: Path) -> None:
    found = doctor.run_all_checks(bare, nvme_path=tmp_path)["NVMe"][-1]
    assert (found.name, found.level) == ("NVMe speed", "warning")
    assert "--build" in (found.remedy or "")


def test_build_hands_every_op_of_the_catalogue_to_the_builder(
    bare: SystemAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def build(names: list[str], *_: object, **__: object) -> dict[str, ops.OpState]:
        asked.extend(names)
        return {name: ops.OpState(op=name, ready=name != ops.CPU_ADAM, reason="no g++") for name in names}

    monkeypatch.setattr(ops, "prepare_ops", build)
    groups = doctor.run_all_checks(bare, build=True)
    levels = {each.name: each.level for each in groups["DeepSpeed ops"]}
    assert asked == [ops.SHARED_MEMORY, ops.CPU_ADAM, ops.ASYNC_IO]
    assert levels["CPUAdam op"] == "problem"
    assert levels["ShareMemComm op"] == "ok"


def test_a_cache_that_cannot_be_made_is_a_finding_of_the_ops(
    bare: SystemAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "cache_roots", lambda: [Path("/proc/nowhere")])  # no other cache takes its place
    found = doctor.run_all_checks(bare, build=True)["DeepSpeed ops"][-1]
    assert found.level == "problem"
    assert found.remedy == "set DS_BENCH_OPS_CACHE"


# ------------------------------------------------------------------ for a plan


def planned(*rows: Configuration, place: Placement = CPU, **arguments: Any) -> dict[str, Finding]:
    found = doctor.run_plan_checks(place, rows, **arguments)
    return {each.name: each for each in found}


def test_a_plan_on_this_machine_is_ready_and_says_so_quickly() -> None:
    start = time.monotonic()
    found = planned(fakes.offload("none"), fakes.offload("cpu_optimizer"))
    assert time.monotonic() - start < 5  # 0.2 s on an idle machine
    assert [each for each in found.values() if each.level == "problem"] == []


def test_a_tool_that_every_row_needs_is_a_problem(bare: SystemAccess) -> None:
    assert (
        planned(fakes.offload("none"), system=bare)["ninja"].level == "problem"
    )  # on the CPU every row talks by an op


def test_a_tool_that_only_some_rows_need_is_a_warning(bare: SystemAccess) -> None:
    place = Placement(accelerator="cuda")
    some = planned(fakes.offload("none"), fakes.offload("cpu_optimizer"), place=place, system=bare)
    every = planned(fakes.offload("cpu_full"), fakes.offload("cpu_optimizer"), place=place, system=bare)
    assert some["ninja"].level == "warning"
    assert every["ninja"].level == "problem"


def test_the_nvme_path_is_looked_at_only_where_a_row_uses_it(tmp_path: Path) -> None:
    place = Placement(accelerator="cpu", nvme_path=str(tmp_path / "missing"))
    assert "NVMe path" not in planned(fakes.offload("cpu_full"), place=place)
    assert planned(fakes.offload("nvme"), place=place)["NVMe path"].level == "problem"


def test_a_full_disk_for_swapping_stops_only_the_rows_that_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(nvme, "_write_directly", no_space)
    place = Placement(accelerator="cpu", nvme_path=str(tmp_path))
    assert planned(fakes.offload("nvme"), place=place)["direct I/O"].level == "problem"
    assert planned(fakes.offload("nvme"), place=place, lacks_space="1 MB free")["direct I/O"].level == "warning"


def test_cards_are_looked_at_only_where_the_plan_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "torch_cuda_version", lambda: "12.8")
    cut = SystemAccess(read_gpus=Cards(GpuFacts(index=0, mig=True)), environ={})
    assert "GPU 0 MIG" not in planned(fakes.offload("none"), system=cut)
    assert (
        planned(fakes.offload("none"), place=Placement(accelerator="cuda"), system=cut)["GPU 0 MIG"].level == "problem"
    )


def test_an_amd_gpu_is_said_to_be_unsupported(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    there = SystemAccess(root=tmp_path, read_gpus=Cards(), environ={})
    assert "GPUs" not in planned(fakes.offload("none"), system=there)
    (tmp_path / "dev/kfd").touch()
    assert "ROCm is not supported: this runs on the CPU" in planned(fakes.offload("none"), system=there)["GPUs"].text
    assert "ROCm is not supported" in doctor.run_all_checks(there)["GPUs"][0].text


def test_host_memory_is_held_against_what_the_plan_needs() -> None:
    assert planned(fakes.offload("cpu_full"), need_host_bytes=2**60)["host memory"].level == "warning"


def test_a_deepspeed_that_is_too_old_ends_the_plan_in_second_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "check", lambda: [problem("deepspeed", "0.14 is installed", "pip install it")])
    stream = io.StringIO()
    with pytest.raises(PreflightError, match="not ready: 1 problem"):
        doctor.require_ready(doctor.run_plan_checks(CPU, [fakes.offload("none")]), stream)
    assert "0.14 is installed -> pip install it" in stream.getvalue()


@pytest.mark.parametrize(("quiet", "printed"), [(False, True), (True, False)])
def test_warnings_are_printed_unless_quiet_and_let_the_plan_go_on(quiet: bool, printed: bool) -> None:
    stream = io.StringIO()
    doctor.require_ready([ok("a", "fine"), warning("b", "so so")], stream, quiet=quiet)
    assert ("so so" in stream.getvalue()) is printed
    assert "fine" not in stream.getvalue()


def test_a_problem_is_printed_also_where_quiet() -> None:
    stream = io.StringIO()
    with pytest.raises(PreflightError):
        doctor.require_ready([problem("b", "broken")], stream, quiet=True)
    assert "broken" in stream.getvalue()


def test_a_plan_without_rows_needs_nothing_and_does_not_fail() -> None:
    assert "NVMe path" not in planned()


def test_a_file_says_what_it_needs_here_and_why_it_cannot_run(bare: SystemAccess, tmp_path: Path) -> None:
    for name, zero in (("fine", {"stage": 1, "offload_optimizer": {"device": "cpu"}}), ("old", {"mics_shard_size": 2})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"zero_optimization": zero, "optimizer": {"type": "Lion"}}))
    files, lines = read_configuration_files([tmp_path])
    fine, _, old = doctor.run_all_checks(bare, files=files, file_lines=lines)["Your configurations"]
    assert (fine.name, fine.level) == ("fine", "ok")
    assert "CPULion" in fine.text
    assert (old.name, old.level) == ("old", "problem")
    assert "mics_shard_size" in old.text
