"""Checks of the GPUs, made up in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_bench.doctor import host
from ds_bench.doctor.findings import Finding, SystemAccess
from ds_bench.system.gpus import GpuFacts, GpuInventory

GB = 2**30


def card(index: int = 0, **facts: Any) -> GpuFacts:
    """An idle H200 without a fault."""
    healthy: dict[str, Any] = {
        "name": "NVIDIA H200",
        "memory_total_bytes": 140 * GB,
        "memory_used_bytes": 0,
        "sm_clock_mhz": 345,
        "max_sm_clock_mhz": 1980,
        "persistence_mode": True,
        "throttle_reasons": ("gpu_idle",),
        "default_power_limit_watts": 700.0,
        "other_processes": (),
        "mig": False,
    }
    return GpuFacts(index=index, **{**healthy, **facts})


def looked(
    *cards: GpuFacts, root: Path = Path("/nowhere"), torch_cuda: str | None = "12.8", **environ: str
) -> dict[str, Finding]:
    machine, inventory = SystemAccess(root=root, environ=environ), GpuInventory(driver_version="580.65", gpus=cards)
    return {each.name: each for each in host.check_gpus(machine, inventory, torch_cuda)}


def test_healthy_gpu_is_ok_and_a_silent_one_unreadable() -> None:
    found = looked(card())
    assert {name: (each.level, each.text) for name, each in found.items()} == {
        "GPU 0 memory": ("ok", "NVIDIA H200, 140 GB of 140 GB free, no other process"),
        "GPU 0 persistence mode": ("ok", "on"),
        "GPU 0 clocks": ("ok", "345 of 1980 MHz, idle, not throttled"),
    }
    silent = {each.name: each.text for each in looked(GpuFacts(index=3)).values()}
    assert silent == {f"GPU 3 {name}": "could not be read" for name in ("memory", "persistence mode", "clocks")}


def test_fault_of_a_gpu_has_its_level() -> None:
    levels = {
        "GPU 0 memory": (looked(card(memory_used_bytes=20 * GB)), "warning"),
        "GPU 0 persistence mode": (looked(card(persistence_mode=False)), "warning"),
        "GPU 0 MIG": (looked(card(mig=True)), "problem"),
        "GPU 0 bf16": (looked(card(name="Tesla T4", compute_capability=(7, 5))), "warning"),
    }
    assert {name: found[name].level for name, (found, _) in levels.items()} == {
        name: level for name, (_, level) in levels.items()
    }
    assert looked(card(memory_used_bytes=GB))["GPU 0 memory"].level == "ok"  # the driver's own
    assert "GPU 0 bf16" not in looked(card(name="NVIDIA A100", compute_capability=(8, 0)))
    assert looked(card(), torch_cuda=None)["GPUs"].level == "problem"
    two_models = looked(card(), card(1, name="NVIDIA L4"))["GPUs"]
    assert (two_models.level, "NVIDIA L4" in two_models.text) == ("warning", True)


def test_throttled_gpu_names_reason_temperature_and_power_limit() -> None:
    for reason in ("hw_thermal_slowdown", "sw_power_cap", "hw_power_brake_slowdown", "0x800"):
        held = card(throttle_reasons=("gpu_idle", reason), temperature_celsius=93, power_limit_watts=350.0)
        found = looked(held)["GPU 0 clocks"]
        assert found.level == "warning"
        assert f"lowered by {reason} at 93 degrees Celsius, power limit 350 W" in found.text


def test_process_on_a_gpu_is_named_only_in_the_hosts_own_process_namespace(tmp_path: Path) -> None:
    busy = card(memory_used_bytes=3 * GB, other_processes=((77, 3 * GB), (99, None)))
    for namespace, said in ((4026531836, "process 77 (python3, 3.00 GB)"), (4026532201, "process 77 (3.00 GB)")):
        root = tmp_path / str(namespace)
        (root / "proc/77").mkdir(parents=True)
        (root / "proc/77/comm").write_text("python3\n")
        (root / "proc/self/ns").mkdir(parents=True)
        (root / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
        found = looked(busy, root=root)["GPU 0 memory"]
        assert (found.level, f"{said}, process 99 (details not visible)" in found.text) == ("warning", True)


def test_missing_gpus_have_their_reason(tmp_path: Path) -> None:
    hidden = looked(card(), CUDA_VISIBLE_DEVICES="7")["GPUs"]
    assert (hidden.level, "'7' hides all 1" in hidden.text) == ("warning", True)
    assert "none found" in looked(root=tmp_path)["GPUs"].text
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: 580")
    assert "the driver is loaded" in looked(root=tmp_path)["GPUs"].text
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert "ROCm is not supported" in looked(root=tmp_path)["GPUs"].text
