"""Checks of host and cards, on machines made up in a folder and cards made up in memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.config.spec import Placement
from ds_bench.doctor import gpus as cards
from ds_bench.doctor import host
from ds_bench.doctor.findings import Finding, SystemAccess, run_check
from ds_bench.system import host_memory
from ds_bench.system.gpus import GpuFacts, GpuInventory

GB = 2**30
CPU = Placement(accelerator="cpu")
FIELDS = ("memory", "persistence mode", "clocks")


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


# ------------------------------------------------------------------ host


def test_memory_tells_what_can_be_used_and_what_the_cgroup_allows(root: Path) -> None:
    cgroup(root, memory_max=32 * GB, memory_current=2 * GB)
    found = looked(root)["host memory"]
    assert found.level == "ok"
    assert found.text == "30.00 GB of 64.00 GB can be used; the cgroup allows this job 32.00 GB"


def test_memory_that_others_have_taken_is_a_warning(root: Path) -> None:
    meminfo(root, available=15)
    assert looked(root)["host memory"].level == "warning"


def test_a_quarter_of_the_cgroups_memory_is_measured_against_the_cgroup_and_not_the_machine(root: Path) -> None:
    cgroup(root, memory_max=8 * GB, memory_current=0)
    assert looked(root)["host memory"].level == "ok"  # 8 of 64 GB, but all that was granted


def test_a_plan_that_needs_more_than_there_is_gets_a_warning_with_both_figures(root: Path) -> None:
    found = looked(root, need=70 * GB)["host memory"]
    assert found.level == "warning"
    assert "70.00 GB" in found.text
    assert "60.00 GB" in found.text


def test_swap_in_use_is_a_warning_and_swap_unused_is_none(root: Path) -> None:
    assert looked(root)["swap"].level == "ok"
    meminfo(root, swap_free=6)
    assert looked(root)["swap"].level == "warning"
    assert "2.00 GB of 8.00 GB" in looked(root)["swap"].text


def test_more_swap_free_than_there_is_cannot_be_read(root: Path) -> None:
    meminfo(root, swap=1, swap_free=2)
    assert "could not be read" in looked(root)["swap"].text


def space(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    real = os.statvfs("/")
    parts = list(real[:10])
    parts[0], parts[1], parts[2], parts[4] = 4096, 4096, 2 * free_bytes // 4096, free_bytes // 4096
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(parts))


def test_dockers_64_mb_of_shared_memory_are_too_little_for_one_cpu_rank(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2 x 1 MiB + 2 x 32 MiB = 66 MiB for a rank (csrc/cpu/comm/shm.cpp)
    space(monkeypatch, 64 * 2**20)
    found = looked(root)["shared memory"]
    assert found.level == "problem"
    assert "66.00 MB" in found.text
    assert "--shm-size" in (found.remedy or "")


def test_each_cpu_rank_needs_its_own_part_of_shared_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space(monkeypatch, 140 * 2**20)
    levels = [looked(root, Placement(accelerator="cpu", num_gpus=n))["shared memory"].level for n in (1, 2, 3)]
    assert levels == ["ok", "ok", "problem"]  # 66, 132, 198 MiB


def test_ranks_of_other_nodes_take_no_shared_memory_here(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space(monkeypatch, 140 * 2**20)
    place = Placement(accelerator="cpu", num_gpus=64, hostfile="/etc/hosts", launcher="deepspeed")
    assert looked(root, place)["shared memory"].level == "ok"


def test_nccl_wants_a_gigabyte_where_there_are_several_gpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space(monkeypatch, 64 * 2**20)
    levels = [looked(root, Placement(accelerator="cuda", num_gpus=n))["shared memory"].level for n in (1, 2)]
    assert levels == ["ok", "warning"]


@pytest.mark.parametrize(
    ("limit", "capabilities", "level"),
    [(8 * 2**20, "0", "warning"), (8 * 2**20, "4000", "ok"), (resource.RLIM_INFINITY, "0", "ok")],
)
def test_a_limit_on_locked_memory_counts_unless_the_user_is_above_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, limit: int, capabilities: str, level: str
) -> None:
    write(root / "proc/self/status", f"CapEff:\t{capabilities}")
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (limit, limit))
    assert looked(root)["locked memory"].level == level


def test_affinity_that_leaves_part_of_the_machine_is_said(root: Path) -> None:
    write(root / "proc/self/status", "Cpus_allowed_list:\t0-1,6\nCapEff:\t0")
    found = looked(root)["cores"]
    assert (found.level, found.text) == ("ok", "3 hardware thread(s) of the machine's 8 (affinity)")


def test_a_kernel_that_allows_more_threads_than_are_there_counts_those_there(root: Path) -> None:
    write(root / "proc/self/status", "Cpus_allowed_list:\t0-255\nCapEff:\t0")
    assert looked(root)["cores"].text == "8 hardware thread(s)"


def test_a_quota_below_the_number_of_threads_is_a_warning_with_a_number_to_export(root: Path) -> None:
    cgroup(root, cpu_max="250000 100000")
    found = looked(root)["cores"]
    assert found.level == "warning"
    assert "2.50 cores' worth" in found.text
    assert "OMP_NUM_THREADS=2" in (found.remedy or "")


def test_cores_whose_memory_is_not_allowed_are_a_warning(root: Path) -> None:
    write(root / "sys/devices/system/node/node0/cpulist", "0-3")
    write(root / "sys/devices/system/node/node1/cpulist", "4-7")
    assert looked(root)["NUMA"].level == "warning"
    write(root / "proc/self/status", "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0-1\nCapEff:\t0")
    found = looked(root)["NUMA"]
    assert (found.level, found.text) == ("ok", "2 nodes; cores of node 0, memory of node 0, 1 may be used")


@given(st.sets(st.integers(0, 300)))
def test_lists_of_the_kernel_are_read_as_they_are_written(wanted: set[int]) -> None:
    assert host_memory.parse_numbers(",".join(map(str, sorted(wanted))) + "\n") == wanted


def test_ranges_of_the_kernel_include_both_ends() -> None:
    assert host_memory.parse_numbers("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}


def test_a_list_that_is_none_is_refused_at_once(subtests: pytest.Subtests) -> None:
    for text in ("x", "3-1", "-1", "0-99999999999", "1--2"):
        with subtests.test(text), pytest.raises(ValueError, match=r".+"):
            host_memory.parse_numbers(text)


def test_an_empty_machine_gives_findings_that_cannot_be_read_and_no_error(tmp_path: Path) -> None:
    found = looked(tmp_path)
    for name in ("host memory", "swap", "shared memory", "cores", "NUMA"):
        assert "could not be read" in found[name].text
        assert found[name].level == "warning"


def test_garbage_in_every_file_gives_findings_and_no_error(root: Path) -> None:
    for path in [path for path in root.rglob("*") if path.is_file()]:
        path.write_bytes(b"\xff\x00garbage -1 kB\n: :\n")
    assert looked(root).keys() == {"host memory", "swap", "shared memory", "locked memory", "cores", "NUMA"}


def test_one_file_that_makes_no_sense_costs_no_other_answer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1, 1))
    write(root / "proc/self/status", "Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0\nCapEff:\tnot a number")
    found = looked(root)
    assert "could not be read" in found["locked memory"].text
    assert found["cores"].level == "ok"


def test_this_machines_own_files_can_all_be_read() -> None:
    assert [each for each in looked(Path("/")).values() if "could not be read" in each.text] == []


# ------------------------------------------------------------------ cards


def card(index: int = 0, **facts: Any) -> GpuFacts:
    """An idle H200 with nothing to complain of."""
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


def seen(
    *gpus: GpuFacts, root: Path = Path("/nowhere"), torch_cuda: str | None = "12.8", **environ: str
) -> dict[str, Finding]:
    machine, inventory = SystemAccess(root=root, environ=environ), GpuInventory(driver_version="580.65", gpus=gpus)
    return {each.name: each for each in cards.check(machine, inventory, torch_cuda)}


def test_an_idle_card_with_nothing_wrong_has_only_ok_lines() -> None:
    found = seen(card())
    assert [each.level for each in found.values()] == ["ok", "ok", "ok"]
    assert found["GPU 0 memory"].text == "NVIDIA H200, 140 GB of 140 GB free, no other process"
    assert found["GPU 0 clocks"].text == "345 of 1980 MHz, idle, not throttled"


def processes(root: Path, namespace: int) -> str:
    """What is said of two processes, in a process namespace of that number."""
    write(root / "proc/77/comm", "python3")
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
    busy = card(memory_used_bytes=3 * GB, other_processes=((77, 3 * GB), (99, None)))
    found = seen(busy, root=root)["GPU 0 memory"]
    assert found.level == "warning"
    return found.text


def test_another_users_process_is_named_with_what_it_holds(tmp_path: Path) -> None:
    said = processes(tmp_path, 4026531836)  # the number of the host's own process namespace
    assert "process 77 (python3, 3.00 GB), process 99 (nothing known of it)" in said


def test_in_a_container_a_number_of_the_host_is_given_no_name_of_a_process_here(tmp_path: Path) -> None:
    assert "process 77 (3.00 GB)" in processes(tmp_path, 4026532201)


def test_memory_taken_by_nobody_who_can_be_seen_is_a_warning() -> None:
    assert seen(card(memory_used_bytes=20 * GB))["GPU 0 memory"].level == "warning"
    assert seen(card(memory_used_bytes=GB))["GPU 0 memory"].level == "ok"  # the driver's own


def test_persistence_mode_off_is_mended_by_the_flag_for_it_and_by_no_clock_setting() -> None:
    found = seen(card(persistence_mode=False))["GPU 0 persistence mode"]
    assert found.level == "warning"
    assert "nvidia-smi -i 0 -pm 1" in (found.remedy or "")


def test_a_card_that_is_held_down_says_by_what(subtests: pytest.Subtests) -> None:
    for reason in ("hw_thermal_slowdown", "sw_power_cap", "hw_power_brake_slowdown", "0x800"):
        with subtests.test(reason):
            held = card(throttle_reasons=("gpu_idle", reason), temperature_celsius=93, power_limit_watts=350.0)
            found = seen(held)["GPU 0 clocks"]
            assert found.level == "warning"
            assert reason in found.text
            assert "93 degrees" in found.text
            assert "350 W" in found.text


def test_a_card_cut_into_instances_is_a_problem() -> None:
    assert seen(card(mig=True))["GPU 0 MIG"].level == "problem"


def test_a_card_that_tells_nothing_has_findings_that_cannot_be_read() -> None:
    found = seen(GpuFacts(index=3))
    assert {each.name: each.text for each in found.values()} == {
        f"GPU 3 {name}": "could not be read" for name in FIELDS
    }


def test_cards_that_torch_cannot_use_are_a_problem() -> None:
    assert seen(card(), torch_cuda=None)["GPUs"].level == "problem"


def test_cards_of_two_kinds_are_a_warning() -> None:
    assert "L4" in seen(card(), card(1, name="NVIDIA L4"))["GPUs"].text


def test_a_card_without_bf16_is_a_warning() -> None:
    found = seen(card(name="Tesla T4", compute_capability=(7, 5)))["GPU 0 bf16"]
    assert (found.level, found.remedy) == ("warning", "--precision fp16, which auto takes here")
    assert "GPU 0 bf16" not in seen(card(name="NVIDIA A100", compute_capability=(8, 0)))


def test_a_selection_that_hides_every_card_is_named() -> None:
    found = seen(card(), CUDA_VISIBLE_DEVICES="7")["GPUs"]
    assert found.level == "warning"
    assert "'7' hides all 1" in found.text


def test_a_driver_without_cards_is_told_from_a_host_without_a_driver(tmp_path: Path) -> None:
    without = seen(root=tmp_path)["GPUs"].text
    write(tmp_path / "proc/driver/nvidia/version", "NVRM version: 580")
    assert "driver is loaded" in seen(root=tmp_path)["GPUs"].text
    assert "driver is loaded" not in without


def test_a_card_in_good_order_gives_nothing_but_ok() -> None:
    found = cards.check(SystemAccess(environ={}), GpuInventory(gpus=(card(),)), "12.8")
    assert {each.level for each in found} == {"ok"}
