"""Checks of the host and its GPUs, on machines made up in a folder."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config.spec import Placement
from ds_bench.doctor import host
from ds_bench.doctor.findings import Finding, SystemAccess, run_check
from ds_bench.system.gpu_state import GpuFacts, GpuInventory
from tests.support.cgroups import place as place_in_cgroup
from tests.support.cgroups import write

GB = 2**30
CPU = Placement(accelerator="cpu")


def meminfo(root: Path, *, available_gb: int = 60, swap_free_gb: int = 8) -> None:
    values = {"MemTotal": 64, "MemAvailable": available_gb, "SwapTotal": 8, "SwapFree": swap_free_gb}
    write(root / "proc/meminfo", "\n".join(f"{name}: {value * 2**20} kB" for name, value in values.items()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GB and 8 hardware threads, whose cgroup has no limits yet."""
    meminfo(tmp_path)
    write(tmp_path / "proc/self/status", "Cpus_allowed_list:\t0-7\nCapEff:\t0000000000000000")
    write(tmp_path / "sys/devices/system/cpu/online", "0-7")
    (tmp_path / "dev/shm").mkdir(parents=True)
    place_in_cgroup(tmp_path, "0::/job")
    return tmp_path


def looked(root: Path, place: Placement = CPU, need: int | None = None) -> dict[str, Finding]:
    return {each.name: each for each in run_check("host", lambda: host.check(SystemAccess(root=root), place, need))}


def level(root: Path, name: str, **arguments: Any) -> str:
    return looked(root, **arguments)[name].level


def test_memory_is_compared_with_the_cgroup_and_with_the_plans_need(root: Path) -> None:
    group = root / "sys/fs/cgroup/job"
    write(group / "memory.max", 32 * GB)
    write(group / "memory.current", 2 * GB)
    found = looked(root)["host memory"]
    text = "30.00 GB of 64.00 GB available; the cgroup allows this job 32.00 GB"
    assert (found.level, found.text) == ("ok", text)
    write(group / "memory.max", 8 * GB)  # 6 of 64 GB, but most of what was granted
    assert level(root, "host memory") == "ok"
    write(group / "memory.max", "max")
    assert [level(root, "host memory", need=need * GB) for need in (60, 70)] == ["ok", "warning"]
    for available, expected in ((16, "ok"), (15, "warning")):
        meminfo(root, available_gb=available)
        assert level(root, "host memory") == expected


def test_swap_in_use_is_a_warning(root: Path) -> None:
    assert level(root, "swap") == "ok"
    meminfo(root, swap_free_gb=6)
    found = looked(root)["swap"]
    assert (found.level, found.text) == ("warning", "2.00 GB of 8.00 GB in use")


def test_shared_memory_suffices_for_the_ranks_of_this_host(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_free(mib: int, accelerator: Any, num_gpus: int = 1, **more: Any) -> str:
        parts = list(os.statvfs_result(range(10)))
        parts[0] = parts[1] = 4096
        parts[2], parts[4] = 2 * mib * 256, mib * 256
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "statvfs", lambda _path: os.statvfs_result(parts))
            return level(root, "shared memory", place=Placement(accelerator=accelerator, num_gpus=num_gpus, **more))

    # 2 x 1 MiB + 2 x 32 MiB = 66 MiB for a CPU rank (csrc/cpu/comm/shm.cpp): 66, 132, 198 MiB; Docker gives 64 MiB.
    assert [with_free(mib, "cpu") for mib in (64, 66)] == ["problem", "ok"]
    assert [with_free(140, "cpu", number) for number in (2, 3)] == ["ok", "problem"]
    assert with_free(140, "cpu", 64, hostfile="/etc/hosts", launcher="deepspeed") == "ok"
    # NCCL recommends a gigabyte.
    assert [with_free(1023, "cuda", number) for number in (1, 2)] == ["ok", "warning"]
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert [with_free(4096, "cuda", number) for number in (1, 2)] == ["ok", "warning"]
    assert with_free(4096, "cpu") == "problem"


def test_limit_on_locked_memory_counts_unless_the_user_is_above_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {(8 * 2**20, "0"): "warning", (8 * 2**20, "4000"): "ok", (resource.RLIM_INFINITY, "0"): "ok"}
    for (limit, capabilities), expected in levels.items():
        write(root / "proc/self/status", f"CapEff:\t{capabilities}")
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, limit=limit: (limit, limit))
        assert level(root, "locked memory") == expected


def test_cores_are_those_allowed_and_online_less_a_quota(root: Path) -> None:
    texts = {"0-1,6": "3 hardware threads of the machine's 8 (affinity)", "0-255": "8 hardware threads"}
    for allowed, text in texts.items():
        write(root / "proc/self/status", f"Cpus_allowed_list:\t{allowed}\nCapEff:\t0")
        assert (looked(root)["cores"].level, looked(root)["cores"].text) == ("ok", text)
    write(root / "sys/fs/cgroup/job/cpu.max", "250000 100000")
    found = looked(root)["cores"]
    assert (found.level, "2.50 cores' worth" in found.text) == ("warning", True)
    assert "OMP_NUM_THREADS=2" in (found.remedy or "")


def test_files_that_are_missing_or_make_no_sense_cost_no_other_answer(root: Path, tmp_path: Path) -> None:
    names = {"host memory", "swap", "shared memory", "locked memory", "cores"}
    unreadable = {name for name, each in looked(tmp_path / "empty").items() if "could not be read" in each.text}
    assert unreadable == names - {"locked memory"}
    for path in [path for path in root.rglob("*") if path.is_file()]:
        path.write_bytes(b"\xff\x00garbage -1 kB\n: :\n")
    assert looked(root).keys() == names
    assert [each for each in looked(Path("/")).values() if "could not be read" in each.text] == [], "this machine's"


# ------------------------------------------------------------------ GPUs


def card(index: int = 0, **facts: Any) -> GpuFacts:
    """An idle H200 without a fault."""
    healthy: dict[str, Any] = {
        "name": "NVIDIA H200", "memory_total_bytes": 140 * GB, "memory_used_bytes": 0, "sm_clock_mhz": 345,
        "max_sm_clock_mhz": 1980, "persistence_mode": True, "throttle_reasons": ("gpu_idle",),
        "default_power_limit_watts": 700.0, "other_processes": (), "mig": False,
    }  # fmt: skip
    return GpuFacts(index=index, **{**healthy, **facts})


def gpus(
    *cards: GpuFacts, root: Path = Path("/nowhere"), torch_cuda: str | None = "12.8", **environ: str
) -> dict[str, Finding]:
    machine, inventory = SystemAccess(root=root, environ=environ), GpuInventory(driver_version="580.65", gpus=cards)
    return {each.name: each for each in host.check_gpus(machine, inventory, torch_cuda)}


def test_healthy_gpu_is_ok_and_a_silent_one_unreadable() -> None:
    assert {name: (each.level, each.text) for name, each in gpus(card()).items()} == {
        "GPU 0 memory": ("ok", "NVIDIA H200, 140 GB of 140 GB free, no other process"),
        "GPU 0 persistence mode": ("ok", "on"),
        "GPU 0 clocks": ("ok", "345 of 1980 MHz, idle, not throttled"),
    }
    silent = {each.name: each.text for each in gpus(GpuFacts(index=3)).values()}
    assert silent == {f"GPU 3 {name}": "could not be read" for name in ("memory", "persistence mode", "clocks")}


SLOW = card(throttle_reasons=("gpu_idle", "hw_slowdown"), temperature_celsius=93, power_limit_watts=350.0)
FAULTS: tuple[tuple[dict[str, Finding], str, str, str], ...] = (
    (gpus(card(memory_used_bytes=20 * GB)), "GPU 0 memory", "warning",
     "used by processes that NVML does not list, perhaps in a container"),
    (gpus(card(memory_used_bytes=GB)), "GPU 0 memory", "ok", ""),  # the driver's own
    (gpus(card(other_processes=((77, 3 * GB), (99, None)))), "GPU 0 memory", "warning",
     "used by process 77 (3.00 GB), process 99 (bytes not visible)"),
    (gpus(card(persistence_mode=False)), "GPU 0 persistence mode", "warning", ""),
    (gpus(card(mig=True)), "GPU 0 MIG", "problem", ""),
    (gpus(card(name="Tesla T4", compute_capability=(7, 5))), "GPU 0 bf16", "warning", ""),
    (gpus(card(), torch_cuda=None), "GPUs", "problem", "torch is a CPU build"),
    (gpus(card(), card(1, name="NVIDIA L4")), "GPUs", "warning", "different models"),
    (gpus(SLOW), "GPU 0 clocks", "warning", "lowered by hw_slowdown at 93 degrees Celsius, power limit 350 W"),
    (gpus(card(), CUDA_VISIBLE_DEVICES="7"), "GPUs", "warning", "'7' hides all 1"),
    (gpus(), "GPUs", "warning", "none found"),
)  # fmt: skip


def test_fault_of_a_gpu_has_its_level_and_its_words(tmp_path: Path) -> None:
    for found, name, expected, said in FAULTS:
        assert (found[name].level, said in found[name].text) == (expected, True), found[name]
    write(tmp_path / "proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n")
    assert "WSL" in gpus(card(), root=tmp_path)
    assert "WSL" not in gpus(card(), root=Path("/nowhere"))
    assert "GPU 0 bf16" not in gpus(card(compute_capability=(8, 0)))
    for path, said in (("proc/driver/nvidia/version", "the driver is loaded"), ("dev/kfd", "ROCm is not supported")):
        write(tmp_path / path, "")
        assert said in gpus(root=tmp_path)["GPUs"].text
