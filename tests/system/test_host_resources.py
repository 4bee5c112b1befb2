"""Cgroups built in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_bench.system import host_resources
from tests.support.cgroups import V2_MOUNT, place, write

GB = 2**30
V1_MOUNT = "35 31 0:32 {inside} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
BOTH = V2_MOUNT.format(inside="/") + "\n" + V1_MOUNT


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GB, 40 of them available, without cgroups."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {40 * 2**20} kB")
    return tmp_path


# Name → own cgroup, mounts, part of the hierarchy that is mounted, limits by file in GB, the limit in force.
LIMITS: dict[str, tuple[str, str, str, dict[str, object], int | None]] = {
    "a tighter parent": (
        "0::/a/b/c", V2_MOUNT, "/", {"a/memory.max": 32, "a/b/memory.max": 4, "a/b/c/memory.max": 8}, 4),
    "no limit": ("0::/a", V2_MOUNT, "/", {"a/memory.max": "max"}, None),
    "no limit in version 1": ("4:memory:/", V1_MOUNT, "/", {"memory/memory.limit_in_bytes": 2**33 - 1}, None),
    "version 1 of a hybrid machine": (
        "4:memory:/a\n1:cpu:/\n0::/wrong", BOTH, "/", {"wrong/memory.max": 1, "memory/a/memory.limit_in_bytes": 6}, 6),
    "a container that mounts only its own": (
        "4:memory:/docker/x/child", V1_MOUNT, "/docker/x", {"memory/memory.limit_in_bytes": 2}, 2),
    "outside of the namespace": ("0::/../other", V2_MOUNT, "/", {"memory.max": 2}, None),
    "outside of the mount": ("0::/other", V2_MOUNT, "/docker/x", {"memory.max": 2}, None),
    "a mount that covers another": (
        "0::/a", V2_MOUNT.format(inside="/a") + "\n" + V2_MOUNT, "/", {"memory.max": 3, "a/memory.max": 2}, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", LIMITS)
def test_limit_is_the_lowest_of_the_own_cgroup_and_its_parents(root: Path, case: str) -> None:
    own, mounts, inside, files, expected = LIMITS[case]
    place(root, own, mounts, inside)
    for name, limit in files.items():
        write(root / "sys/fs/cgroup" / name, limit * GB if isinstance(limit, int) else limit)
    assert host_resources.cgroup_limit_bytes(root) == (None if expected is None else expected * GB)


def test_peak_is_that_of_the_cgroup_whose_limit_binds_or_the_own(root: Path) -> None:
    place(root, "0::/job/step")
    for name, gb in (("job", 3), ("job/step", 1)):
        write(root / "sys/fs/cgroup" / name / "memory.peak", gb * GB)
    assert host_resources.cgroup_peak_bytes(root) == 1 * GB
    write(root / "sys/fs/cgroup/job/memory.max", 4 * GB)
    assert host_resources.cgroup_peak_bytes(root) == 3 * GB


def test_oom_kills_are_those_of_the_nearest_cgroup_that_counts_and_of_the_host(root: Path) -> None:
    place(root, "0::/job/step")
    write(root / "sys/fs/cgroup/job/memory.events", "low 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0")
    write(root / "proc/vmstat", "nr_free_pages 7\noom_kill 5")
    assert host_resources.read_oom_kill_count(root) == 7


def test_available_memory_is_what_limit_and_host_leave_with_droppable_pages(root: Path) -> None:
    place(root, "0::/job")
    write(root / "sys/fs/cgroup/job/memory.stat", f"anon {5 * GB}\ninactive_file {1 * GB}")
    for limit, current, available in ((8, 6, 3), (200, 1, 40), (8, 10, 0)):
        write(root / "sys/fs/cgroup/job/memory.max", limit * GB)
        write(root / "sys/fs/cgroup/job/memory.current", current * GB)
        assert host_resources.available_host_bytes(root) == available * GB
    place(root, "4:memory:/a", V1_MOUNT)
    write(root / "sys/fs/cgroup/memory/a/memory.limit_in_bytes", 6 * GB)
    write(root / "sys/fs/cgroup/memory/a/memory.usage_in_bytes", 5 * GB)
    # Groups below count in the use of a group, and in version 1 only in the totals of its statistics.
    write(root / "sys/fs/cgroup/memory/a/memory.stat", f"inactive_file {1 * GB}\ntotal_inactive_file {2 * GB}")
    assert host_resources.available_host_bytes(root) == 3 * GB


def test_cpu_quota_is_in_cores(root: Path) -> None:
    place(root, "0::/job")
    for quota, cores in (("max 100000", None), ("250000 100000", 2.5), ("0 0", None), ("", None)):
        write(root / "sys/fs/cgroup/job/cpu.max", quota)
        assert host_resources.cgroup_cpu_cores(root) == cores


def test_missing_and_torn_files_give_none_and_not_zero(tmp_path: Path) -> None:
    place(tmp_path / "torn", "garbage\n0::/job\n:", "1 2\n - \n" + V2_MOUNT)
    write(tmp_path / "torn/proc/meminfo", "MemTotal:\nMemAvailable: many kB\n\x00")
    for name in ("memory.max", "memory.peak", "memory.events", "cpu.max"):
        write(tmp_path / "torn/sys/fs/cgroup/job" / name, "not a number")
    for name in ("torn", "empty"):
        readers = (
            host_resources.available_host_bytes, host_resources.cgroup_cpu_cores, host_resources.cgroup_limit_bytes,
            host_resources.cgroup_peak_bytes, host_resources.host_memory_bytes,
        )  # fmt: skip
        assert [reader.__name__ for reader in readers if reader(tmp_path / name) is not None] == []
        assert host_resources.swap_bytes(tmp_path / name) == (None, None)
    write(tmp_path / "proc/meminfo", "SwapTotal: 100 kB\nSwapFree: 40 kB\n")
    assert host_resources.swap_bytes(tmp_path) == (100 * 1024, 60 * 1024)


def test_lists_of_the_kernel_include_both_ends_and_nonsense_is_refused() -> None:
    assert host_resources.parse_numbers("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert host_resources.parse_numbers(None) == set()
    for text in ("x", "3-1", "-1", "0-99999999999", "1--2"):
        with pytest.raises(ValueError, match=r".+"):
            host_resources.parse_numbers(text)
