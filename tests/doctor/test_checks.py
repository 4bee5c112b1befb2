"""The order of all checks, and the checks that a plan needs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config.configuration_files import read_configuration_files
from ds_bench.config.spec import Configuration, Placement
from ds_bench.doctor import checks, disk, software
from ds_bench.doctor.findings import Finding, SystemAccess, ok, problem, run_check, warning
from ds_bench.errors import PreflightError
from ds_bench.launch import ops
from ds_bench.system import environment
from ds_bench.system.gpu_state import GpuFacts, GpuInventory
from tests.support import fakes

CPU, CUDA = Placement(accelerator="cpu"), Placement(accelerator="cuda")


class Cards:
    def __init__(self, *gpus: GpuFacts) -> None:
        self.gpus, self.times = gpus, 0

    def __call__(self) -> GpuInventory:
        self.times += 1
        return GpuInventory(driver_version="580.65.06" if self.gpus else None, gpus=self.gpus)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SystemAccess:
    """A machine that shows nothing: no files, programs, GPUs or variables."""
    monkeypatch.setenv("DS_BENCH_OPS_CACHE", str(tmp_path / "ops"))
    root = tmp_path / "root"
    root.mkdir()
    return SystemAccess(
        root=root, environ={}, read_gpus=Cards(), find_program=lambda _name: None, run_program=lambda *_: None
    )


def test_check_that_breaks_off_keeps_its_findings_and_the_error() -> None:
    def check(error: BaseException) -> Iterator[Finding]:
        yield ok("first", "fine")
        raise error

    broken = run_check("second", lambda: check(ValueError("garbage")))
    assert broken == [ok("first", "fine"), warning("second", "could not be read: garbage")]
    refused = PreflightError("no disk", remedy="buy one")
    assert run_check("disk", lambda: check(refused))[1] == problem("disk", "no disk", "buy one")
    with pytest.raises(KeyboardInterrupt):
        run_check("any", lambda: check(KeyboardInterrupt()))


def test_check_that_breaks_costs_no_other_group_and_gpus_are_read_once(
    bare: SystemAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(software, "check_programs", breaks)
    groups = checks.run_all_checks(bare)
    assert list(groups) == ["Packages", "Tools", "GPUs", "Host", "DeepSpeed ops", "NVMe"]
    assert groups.pop("Tools") == [warning("tools", "could not be read: broken")]
    assert "problem" in {finding.level for findings in groups.values() for finding in findings}
    assert all(groups.values())
    assert isinstance(bare.read_gpus, Cards)
    assert bare.read_gpus.times == 1


def test_speed_is_measured_only_on_a_usable_path_and_with_the_op(
    bare: SystemAccess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "check_speed", lambda *_: [ok("NVMe speed", "measured")])
    (missing,) = checks.run_all_checks(bare, nvme_path=tmp_path / "missing")["NVMe"]
    assert missing.level == "problem"
    not_built = checks.run_all_checks(bare, nvme_path=tmp_path)["NVMe"][-1]
    assert (not_built.name, not_built.level, not_built.remedy) == (
        "NVMe speed",
        "warning",
        software.build_command(None),
    )
    monkeypatch.setattr(ops, "is_built", lambda *_: True)
    assert checks.run_all_checks(bare, nvme_path=tmp_path)["NVMe"][-1].text == "measured"


def test_build_and_files_add_their_findings(
    bare: SystemAccess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(names: list[str], *_: object, **__: object) -> dict[str, ops.OpState]:
        return {name: ops.OpState(op=name, ready=name != ops.CPU_ADAM, reason="no g++") for name in names}

    monkeypatch.setattr(ops, "prepare_ops", build)
    levels = {each.name: each.level for each in checks.run_all_checks(bare, build=True)["DeepSpeed ops"]}
    assert levels == {"ShareMemComm op": "ok", "CPUAdam op": "problem", "AsyncIO op": "ok"}
    for name, zero in (("fine", {"stage": 1, "offload_optimizer": {"device": "cpu"}}), ("old", {"mics_shard_size": 2})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"zero_optimization": zero, "optimizer": {"type": "Lion"}}))
    files, lines = read_configuration_files([tmp_path])
    fine, _, old = checks.run_all_checks(bare, files=files, file_lines=lines)["Your configurations"]
    assert (fine.name, fine.level, "CPULion" in fine.text) == ("fine", "ok", True)
    assert (old.name, old.level, "mics_shard_size" in old.text) == ("old", "problem", True)


# ------------------------------------------------------------------ for a plan


def planned(*rows: Configuration, place: Placement = CPU, **arguments: Any) -> dict[str, Finding]:
    return {each.name: each for each in checks.run_plan_checks(place, rows, **arguments)}


def test_plan_on_this_machine_is_ready() -> None:
    found = planned(fakes.offload("none"), fakes.offload("cpu_optimizer"))
    assert [each for each in found.values() if each.level == "problem"] == []
    assert planned(fakes.offload("cpu_full"), need_host_bytes=2**60)["host memory"].level == "warning"


def test_tool_that_every_row_needs_is_a_problem_and_else_a_warning(bare: SystemAccess) -> None:
    none, offload = fakes.offload("none"), fakes.offload("cpu_optimizer")
    assert planned(none, system=bare)["ninja"].level == "problem"  # CPU ranks communicate through an op
    assert planned(none, offload, place=CUDA, system=bare)["ninja"].level == "warning"
    assert planned(fakes.offload("cpu_full"), offload, place=CUDA, system=bare)["ninja"].level == "problem"


def test_nvme_path_is_checked_only_for_rows_that_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Placement(accelerator="cpu", nvme_path=str(tmp_path / "missing"))
    assert "NVMe path" not in planned(fakes.offload("cpu_full"), place=missing)
    assert planned(fakes.offload("nvme"), place=missing)["NVMe path"].level == "problem"
    monkeypatch.setattr(disk, "check_nvme", lambda *_: [problem("direct I/O", "not tried: the disk is full")])
    for lacks_space, level in ((None, "problem"), ("1 MB free", "warning")):  # the plan has marked rows that swap
        found = planned(fakes.offload("nvme"), place=missing, lacks_space=lacks_space)
        assert found["direct I/O"].level == level


def test_gpus_are_checked_only_if_the_plan_uses_them(monkeypatch: pytest.MonkeyPatch, bare: SystemAccess) -> None:
    monkeypatch.setattr(environment, "torch_built_for", {"cuda": "12.8"}.get)
    divided = SystemAccess(read_gpus=Cards(GpuFacts(index=0, mig=True), GpuFacts(index=1)), environ={})
    row = fakes.offload("none")
    assert "GPU 0 MIG" not in planned(row, system=divided)
    assert planned(row, place=CUDA, system=divided)["GPU 0 MIG"].level == "problem"
    assert "GPU 0 MIG" not in planned(row, place=CUDA, system=divided, slots=[1])
    assert "GPUs" not in planned(row, system=bare)
    (bare.root / "dev").mkdir()
    (bare.root / "dev/kfd").touch()
    assert "ROCm is not supported" in planned(row, system=bare)["GPUs"].text


def test_problem_ends_the_plan_and_quiet_hides_warnings() -> None:
    found = [ok("a", "fine"), warning("b", "so so")]
    for quiet in (False, True):
        stream = io.StringIO()
        checks.require_ready(found, stream, quiet=quiet)
        assert ("so so" in stream.getvalue(), "fine" in stream.getvalue()) == (not quiet, False)
        with pytest.raises(PreflightError, match="not ready: 1 problem"):
            checks.require_ready([*found, problem("deepspeed", "0.14 is installed", "install")], stream, quiet=quiet)
        assert "0.14 is installed -> install" in stream.getvalue()
