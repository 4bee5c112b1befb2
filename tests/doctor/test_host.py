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

GB = 2**30
CPU = Placement(accelerator="cpu")


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


def meminfo(root: Path, *, total: int = 64, available: int = 60, swap: int = 8, swap_free: int = 8) -> None:
    """In GB."""
    values = {"MemTotal": total, "MemAvailable": available, "SwapTotal": swap, "SwapFree": swap_free}
    write(root / "proc/meminfo", "\n".join(f"{name}: {value * 2**20} kB" for name, value in values.items()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GB and 8 hardware threads on one NUMA node."""
    meminfo(tmp_path)
    write(tmp_path / "proc/self/status", "Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0\nCapEff:\t0000000000000000")
    write(tmp_path / "sys/devices/system/cpu/online", "0-7")
    write(tmp_path / "sys/devices/system/node/node0/cpulist", "0-7")
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def looked(root: Path, place: Placement = CPU, need: int | None = None) -> dict[str, Finding]:
    return {each.name: each for each in run_check("host", lambda: host.check(SystemAccess(root=root), place, need))}


def cgroup(root: Path, **files: object) -> None:
    write(root / "proc/self/cgroup", "0::/job")
    write(root / "proc/self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
    for name, content in files.items():
        write(root / "sys/fs/cgroup/job" / name.replace("_", "."), content)


def test_memory_is_compared_with_the_cgroup_and_with_the_plans_need(root: Path) -> None:
    cgroup(root, memory_max=32 * GB, memory_current=2 * GB)
    found = looked(root)["host memory"]
    assert (found.level, found.text) == (
        "ok", "30.00 GB of 64.00 GB available; the cgroup allows this job 32.00 GB",
    )  # fmt: skip
    cgroup(root, memory_max=8 * GB, memory_current=0)  # 8 of 64 GB, but everything that was granted
    assert looked(root)["host memory"].level == "ok"
    (root / "proc/self/cgroup").unlink()
    assert [looked(root, need=need * GB)["host memory"].level for need in (60, 70)] == ["ok", "warning"]
    for available, level in ((16, "ok"), (15, "warning")):
        meminfo(root, available=available)
        assert looked(root)["host memory"].level == level


def test_swap_in_use_is_a_warning(root: Path) -> None:
    assert looked(root)["swap"].level == "ok"
    meminfo(root, swap_free=6)
    found = looked(root)["swap"]
    assert (found.level, found.text) == ("warning", "2.00 GB of 8.00 GB in use")


def test_shared_memory_suffices_for_the_ranks_of_this_host(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def level(free_mib: int, **placement: object) -> str:
        parts = list(os.statvfs_result(range(10)))
        parts[0] = parts[1] = 4096
        parts[2], parts[4] = 2 * free_mib * 256, free_mib * 256
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "statvfs", lambda _path: os.statvfs_result(parts))
            return looked(root, Placement(**placement))["shared memory"].level  # type: ignore[arg-type]

    # 2 x 1 MiB + 2 x 32 MiB = 66 MiB for a CPU rank (csrc/cpu/comm/shm.cpp): 66, 132, 198 MiB; Docker gives 64 MiB.
    assert level(64, accelerator="cpu") == "problem"
    assert [level(140, accelerator="cpu", num_gpus=number) for number in (1, 2, 3)] == ["ok", "ok", "problem"]
    elsewhere = {"num_gpus": 64, "hostfile": "/etc/hosts", "launcher": "deepspeed"}
    assert level(140, accelerator="cpu", **elsewhere) == "ok"
    # NCCL asks for a gigabyte.
    assert [level(1023, accelerator="cuda", num_gpus=number) for number in (1, 2)] == ["ok", "warning"]
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert [level(4096, accelerator="cuda", num_gpus=number) for number in (1, 2)] == ["ok", "warning"]
    assert level(4096, accelerator="cpu") == "problem"


def test_limit_on_locked_memory_counts_unless_the_user_is_above_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {(8 * 2**20, "0"): "warning", (8 * 2**20, "4000"): "ok", (resource.RLIM_INFINITY, "0"): "ok"}
    for (limit, capabilities), level in levels.items():
        write(root / "proc/self/status", f"CapEff:\t{capabilities}")
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, limit=limit: (limit, limit))
        assert looked(root)["locked memory"].level == level


def test_cores_are_those_allowed_and_online_less_a_quota(root: Path) -> None:
    texts = {"0-1,6": "3 hardware thread(s) of the machine's 8 (affinity)", "0-255": "8 hardware thread(s)"}
    for allowed, text in texts.items():
        write(root / "proc/self/status", f"Cpus_allowed_list:\t{allowed}\nCapEff:\t0")
        assert (looked(root)["cores"].level, looked(root)["cores"].text) == ("ok", text)
    cgroup(root, cpu_max="250000 100000")
    found = looked(root)["cores"]
    assert (found.level, "2.50 cores' worth" in found.text) == ("warning", True)
    assert "OMP_NUM_THREADS=2" in (found.remedy or "")


def test_cores_whose_memory_is_not_allowed_are_a_warning(root: Path) -> None:
    assert looked(root)["NUMA"].text == "one node"
    write(root / "sys/devices/system/node/node0/cpulist", "0-3")
    write(root / "sys/devices/system/node/node1/cpulist", "4-7")
    assert looked(root)["NUMA"].level == "warning"
    write(root / "proc/self/status", "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0-1\nCapEff:\t0")
    found = looked(root)["NUMA"]
    assert (found.level, found.text) == ("ok", "2 nodes; this job may use cores of node 0, memory of node 0, 1")


def test_files_that_are_missing_or_make_no_sense_cost_no_other_answer(root: Path, tmp_path: Path) -> None:
    names = {"host memory", "swap", "shared memory", "locked memory", "cores", "NUMA"}
    empty = looked(tmp_path / "empty")
    unreadable = {name for name, each in empty.items() if each.text.startswith("could not be read")}
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


def test_fault_of_a_gpu_has_its_level() -> None:
    held = card(throttle_reasons=("gpu_idle", "hw_slowdown"), temperature_celsius=93, power_limit_watts=350.0)
    for found, name, level in (
        (gpus(card(memory_used_bytes=20 * GB)), "GPU 0 memory", "warning"),
        (gpus(card(memory_used_bytes=GB)), "GPU 0 memory", "ok"),  # the driver's own
        (gpus(card(persistence_mode=False)), "GPU 0 persistence mode", "warning"),
        (gpus(card(mig=True)), "GPU 0 MIG", "problem"),
        (gpus(card(name="Tesla T4", compute_capability=(7, 5))), "GPU 0 bf16", "warning"),
        (gpus(card(), torch_cuda=None), "GPUs", "problem"),
        (gpus(card(), card(1, name="NVIDIA L4")), "GPUs", "warning"),
        (gpus(held), "GPU 0 clocks", "warning"),
    ):
        assert found[name].level == level, name
    assert "GPU 0 bf16" not in gpus(card(compute_capability=(8, 0)))
    assert "lowered by hw_slowdown at 93 degrees Celsius, power limit 350 W" in gpus(held)["GPU 0 clocks"].text


def test_process_on_a_gpu_is_named_only_in_the_hosts_own_process_namespace(tmp_path: Path) -> None:
    busy = card(memory_used_bytes=3 * GB, other_processes=((77, 3 * GB), (99, None)))
    for namespace, said in ((4026531836, "process 77 (python3, 3.00 GB)"), (4026532201, "process 77 (3.00 GB)")):
        root = tmp_path / str(namespace)
        write(root / "proc/77/comm", "python3")
        (root / "proc/self/ns").mkdir(parents=True)
        (root / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
        found = gpus(busy, root=root)["GPU 0 memory"]
        assert (found.level, f"{said}, process 99 (details not visible)" in found.text) == ("warning", True)


def test_missing_gpus_have_their_reason(tmp_path: Path) -> None:
    assert "'7' hides all 1" in gpus(card(), CUDA_VISIBLE_DEVICES="7")["GPUs"].text
    assert "none found" in gpus(root=tmp_path)["GPUs"].text
    write(tmp_path / "proc/driver/nvidia/version", "NVRM version: 580")
    assert "the driver is loaded" in gpus(root=tmp_path)["GPUs"].text
    write(tmp_path / "dev/kfd", "")
    found = gpus(root=tmp_path)["GPUs"]
    assert (found.level, "ROCm is not supported" in found.text) == ("warning", True)
