"""Cgroups built in a folder, and this machine's own."""

from pathlib import Path

import pytest

from ds_bench.system import host_memory
from tests.support.cgroups import V2_MOUNT, place, write

GB = 2**30
V1_MOUNT = "35 31 0:32 {inside} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GB, 40 of them available, without cgroups."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {40 * 2**20} kB")
    return tmp_path


def test_a_tighter_parent_binds_although_the_own_cgroup_allows_more(root: Path) -> None:
    place(root, "0::/slurm/job/step")
    write(root / "sys/fs/cgroup/slurm/memory.max", 32 * GB)
    write(root / "sys/fs/cgroup/slurm/job/memory.max", 4 * GB)
    write(root / "sys/fs/cgroup/slurm/job/step/memory.max", 8 * GB)
    assert host_memory.cgroup_limit_bytes(root) == 4 * GB


def test_the_peak_is_that_of_the_cgroup_whose_limit_binds(root: Path) -> None:
    place(root, "0::/job/step")
    write(root / "sys/fs/cgroup/job/memory.max", 4 * GB)
    write(root / "sys/fs/cgroup/job/memory.peak", 3 * GB)
    write(root / "sys/fs/cgroup/job/step/memory.max", "max")
    write(root / "sys/fs/cgroup/job/step/memory.peak", 1 * GB)
    assert host_memory.cgroup_peak_bytes(root) == 3 * GB


def test_without_a_limit_the_peak_is_the_own_cgroups(root: Path) -> None:
    place(root, "0::/job/step")
    write(root / "sys/fs/cgroup/job/memory.peak", 3 * GB)
    write(root / "sys/fs/cgroup/job/step/memory.peak", 1 * GB)
    assert host_memory.cgroup_peak_bytes(root) == 1 * GB


def test_oom_kills_are_read_from_the_nearest_cgroup_that_accounts_memory(root: Path) -> None:
    place(root, "0::/job/step")
    write(root / "sys/fs/cgroup/job/memory.events", "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0")
    assert host_memory.read_oom_kill_count(root) == 2


def test_version_1_is_read_where_it_holds_the_memory_controller_of_a_hybrid_machine(root: Path) -> None:
    place(root, "4:memory:/docker/abc\n1:cpu,cpuacct:/\n0::/wrong", V2_MOUNT.format(inside="/") + "\n" + V1_MOUNT)
    group = root / "sys/fs/cgroup/memory/docker/abc"
    write(root / "sys/fs/cgroup/wrong/memory.max", 1 * GB)
    write(group / "memory.limit_in_bytes", 6 * GB)
    write(group / "memory.usage_in_bytes", 5 * GB)
    write(group / "memory.stat", f"inactive_file {3 * GB}\ntotal_inactive_file {1 * GB}")
    assert host_memory.cgroup_limit_bytes(root) == 6 * GB
    assert host_memory.available_host_bytes(root) == 2 * GB


def test_no_limit_is_max_in_version_2_and_a_huge_number_in_version_1(root: Path) -> None:
    place(root, "0::/job")
    write(root / "sys/fs/cgroup/job/memory.max", "max")
    assert host_memory.cgroup_limit_bytes(root) is None
    place(root, "4:memory:/", V1_MOUNT)
    write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    assert host_memory.cgroup_limit_bytes(root) is None


def test_a_container_that_mounts_only_its_own_cgroup_finds_the_limit_at_the_mount_point(root: Path) -> None:
    place(root, "4:memory:/docker/abc/child", V1_MOUNT, inside="/docker/abc")
    write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", 2 * GB)
    assert host_memory.cgroup_limit_bytes(root) == 2 * GB


@pytest.mark.parametrize(("own", "inside"), [("0::/../other", "/"), ("0::/other", "/docker/abc")])
def test_the_limit_of_a_cgroup_that_is_not_ours_is_not_taken(root: Path, own: str, inside: str) -> None:
    place(root, own, inside=inside)
    write(root / "sys/fs/cgroup/memory.max", 2 * GB)
    assert host_memory.cgroup_limit_bytes(root) is None


def test_the_mount_that_covers_another_is_the_one_read(root: Path) -> None:
    place(root, "0::/job", V2_MOUNT.format(inside="/elsewhere") + "\n" + V2_MOUNT)
    write(root / "sys/fs/cgroup/job/memory.max", 2 * GB)
    assert host_memory.cgroup_limit_bytes(root) == 2 * GB


def test_available_memory_is_what_limit_and_host_leave_with_droppable_pages(root: Path) -> None:
    place(root, "0::/job")
    write(root / "sys/fs/cgroup/job/memory.stat", f"anon {5 * GB}\ninactive_file {1 * GB}")
    for limit, current, available in ((8, 6, 3), (200, 1, 40), (8, 10, 0)):
        write(root / "sys/fs/cgroup/job/memory.max", limit * GB)
        write(root / "sys/fs/cgroup/job/memory.current", current * GB)
        assert host_memory.available_host_bytes(root) == available * GB


def test_cpu_quota_is_in_cores(root: Path) -> None:
    place(root, "0::/job")
    for quota, cores in (("max 100000", None), ("250000 100000", 2.5), ("0 0", None), ("", None)):
        write(root / "sys/fs/cgroup/job/cpu.max", quota)
        assert host_memory.cgroup_cpu_cores(root) == cores
    place(root, "1:cpu,cpuacct:/job", "3 1 0:3 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct")
    write(root / "sys/fs/cgroup/cpu/job/cpu.cfs_period_us", 100000)
    for quota_us, cores in ((-1, None), (400000, 4.0)):
        write(root / "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", quota_us)
        assert host_memory.cgroup_cpu_cores(root) == cores


def test_swap_is_none_where_the_kernel_does_not_tell_and_not_zero(root: Path) -> None:
    assert host_memory.swap_bytes(root) == (None, None)
    write(root / "proc/meminfo", "SwapTotal: 100 kB\nSwapFree: 40 kB\n")
    assert host_memory.swap_bytes(root) == (100 * 1024, 60 * 1024)


def test_missing_torn_and_foreign_files_give_none(tmp_path: Path) -> None:
    place(tmp_path / "torn", "garbage\n0::/job\n:", "1 2\n - \n" + V2_MOUNT)
    write(tmp_path / "torn/proc/meminfo", "MemTotal:\nMemAvailable: many kB\n\x00")
    for name in ("memory.max", "memory.peak", "memory.events", "cpu.max"):
        write(tmp_path / "torn/sys/fs/cgroup/job" / name, "not a number")
    for name in ("torn", "empty"):
        readers = (
            host_memory.available_host_bytes, host_memory.cgroup_cpu_cores, host_memory.cgroup_limit_bytes,
            host_memory.cgroup_peak_bytes, host_memory.host_memory_bytes,
        )  # fmt: skip
        assert [reader.__name__ for reader in readers if reader(tmp_path / name) is not None] == []


def test_lists_of_the_kernel_include_both_ends_and_nonsense_is_refused() -> None:
    assert host_memory.parse_numbers("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert host_memory.parse_numbers(None) == set()
    for text in ("x", "3-1", "-1", "0-99999999999", "1--2"):
        with pytest.raises(ValueError, match=r".+"):
            host_memory.parse_numbers(text)
