"""Checks of the host, on machines made up in a folder."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from ds_bench.config.spec import Placement
from ds_bench.doctor import host
from ds_bench.doctor.findings import Finding, SystemAccess, run_check

GB = 2**30
CPU = Placement(accelerator="cpu")
NAMES = {"host memory", "swap", "shared memory", "locked memory", "cores", "NUMA"}


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
    cgroup(root, memory_max=8 * GB, memory_current=0)  # 8 of 64 GB, but all that was granted
    assert looked(root)["host memory"].level == "ok"
    (root / "proc/self/cgroup").unlink()
    assert looked(root, need=60 * GB)["host memory"].level == "ok"
    needed = looked(root, need=70 * GB)["host memory"]
    assert (needed.level, "70.00 GB" in needed.text) == ("warning", True)
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
    found = {}
    for limit, capabilities in levels:
        write(root / "proc/self/status", f"CapEff:\t{capabilities}")
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, limit=limit: (limit, limit))
        found[limit, capabilities] = looked(root)["locked memory"].level
    assert found == levels


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
    empty = looked(tmp_path / "empty")
    unreadable = {name for name, each in empty.items() if each.text.startswith("could not be read")}
    assert unreadable == NAMES - {"locked memory"}
    write(root / "proc/self/status", "Cpus_allowed_list:\t0-7\nMems_allowed_list:\tx\nCapEff:\tnot a number")
    assert looked(root)["cores"].level == "ok"
    for path in [path for path in root.rglob("*") if path.is_file()]:
        path.write_bytes(b"\xff\x00garbage -1 kB\n: :\n")
    assert looked(root).keys() == NAMES


def test_files_of_this_machine_can_all_be_read() -> None:
    assert [each for each in looked(Path("/")).values() if "could not be read" in each.text] == []
