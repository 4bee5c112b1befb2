"""Memory and cores of the host: how much the kernel lets this process use, and how much of it is in use.

Most figures come from small files under ``/proc`` and ``/sys``; a figure that the kernel does not give is ``None``,
unless the function says otherwise. Functions that read such figures take the root of the file system, so that a test
can make one up.

Any cgroup from the process's own to the top of the mounted hierarchy can have a limit, and the lowest applies. Cgroups
above that, outside a container, are not visible. For version 1, only memory limits and usage are read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Set
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_NO_LIMIT_BYTES = 2**62
"""Version 1 writes "no limit" as the largest page-aligned long; no machine has half of that."""
_MAX_CPU_NUMBER = 2**16 - 1


def host_memory_bytes(root: Path = ROOT) -> int | None:
    """Return the memory of the whole machine, regardless of cgroups."""
    return read_table(root / "proc/meminfo").get("MemTotal")


def swap_bytes(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Return the swap space of the machine: its size, and how much of it is in use by all processes."""
    table = read_table(root / "proc/meminfo")
    total, free = table.get("SwapTotal"), table.get("SwapFree")
    return total, None if total is None or free is None else total - free


def available_host_bytes(root: Path = ROOT) -> int | None:
    """Return an estimate of the memory that can still be allocated without swapping or reaching a cgroup's limit.

    It is the minimum of the kernel's ``MemAvailable`` and, for every cgroup with a limit, the limit less the usage.
    Inactive file pages count as free, because the kernel drops them before it kills a process.
    """
    free = [read_table(root / "proc/meminfo").get("MemAvailable")]
    for group, limit in _memory_limits(root):
        usage = _read_number(group / "memory.current", group / "memory.usage_in_bytes")
        if usage is not None:
            counts = read_table(group / "memory.stat")
            # In cgroup v1 only the totals include the groups below.
            reclaimable = counts.get("total_inactive_file", counts.get("inactive_file", 0))
            free.append(max(0, limit - max(0, usage - reclaimable)))
    return min((count for count in free if count is not None), default=None)


def cgroup_limit_bytes(root: Path = ROOT) -> int | None:
    """Return the lowest memory limit of this process's cgroup and its parents; ``None`` without one."""
    return min((limit for _, limit in _memory_limits(root)), default=None)


def cgroup_peak_bytes(root: Path = ROOT) -> int | None:
    """Return the peak memory of the cgroup with the lowest limit or, without a limit, of the nearest that has a peak.

    It counts every process and the page cache since the cgroup was created: near the limit it shows that memory was
    short, but it is not one trial's usage. ``None`` before Linux 5.19 and in version 1.
    """
    lowest = min(_memory_limits(root), key=lambda pair: pair[1], default=None)
    groups = _cgroups(root, "memory") if lowest is None else [lowest[0]]
    return next((peak for group in groups if (peak := _read_number(group / "memory.peak")) is not None), None)


def is_wsl(kernel: str | None) -> bool:
    """Return whether a kernel release belongs to the Windows Subsystem for Linux (microsoft/WSL2-Linux-Kernel).

    Its GPU driver belongs to Windows. It moves GPU memory to host memory instead of failing (microsoft/WSL#11050), and
    NVML lists no processes.
    """
    return "microsoft" in (kernel or "").lower()


def read_oom_kill_count(root: Path = ROOT) -> int:
    """Return how many processes the kernel has killed so far because memory ran out. Only an increase means anything.

    Sums the count of the nearest cgroup with one (version 2, with the cgroups below it) and the host's since boot
    (/proc/vmstat). A kill may be counted in both, and either file may be missing.
    """
    counts = [read_table(group / "memory.events").get("oom_kill") for group in _cgroups(root, "memory")]
    in_cgroup = next((count for count in counts if count is not None), 0)
    return in_cgroup + read_table(root / "proc/vmstat").get("oom_kill", 0)


def cgroup_cpu_cores(root: Path = ROOT) -> float | None:
    """Return the lowest CPU quota in cores; ``None`` without one or in version 1. Affinity is not counted."""
    groups = _cgroups(root, "cpu")
    return min((cores for group in groups if (cores := _quota_cores(group)) is not None), default=None)


def usable_cores(root: Path = ROOT) -> float:
    """Return the cores that this process may use: its affinity mask, or the CPU quota if that is less."""
    allowed = float(len(os.sched_getaffinity(0)))
    return min(allowed, cgroup_cpu_cores(root) or allowed)


def numa_cpus(root: Path = ROOT) -> list[list[int]]:
    """Return the numbers of the processors of each NUMA node; one list of all if the kernel shows no nodes."""
    nodes = sorted(
        (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])
    )
    found = []
    for path in nodes:
        with contextlib.suppress(ValueError):
            found.append(sorted(parse_numbers(read_text(path))))
    return [cpus for cpus in found if cpus] or [list(range(os.cpu_count() or 1))]


def parse_numbers(text: str | None) -> set[int]:
    """``0-3,8`` → {0, 1, 2, 3, 8}, as the kernel writes lists. Raises ValueError on anything else."""
    numbers: set[int] = set()
    for part in filter(None, (text or "").strip().split(",")):
        first_text, _, last_text = part.partition("-")
        first, last = int(first_text), int(last_text or first_text)
        if not 0 <= first <= last <= _MAX_CPU_NUMBER:
            raise ValueError(f"expected a range of numbers such as 0-3; got {part!r}")
        numbers.update(range(first, last + 1))
    return numbers


def cgroup_cpu_periods(root: Path = ROOT) -> tuple[int, int] | None:
    """Return the number of periods in which a CPU quota was enforced so far, and in how many of them it throttled.

    They belong to the nearest cgroup with a quota; ``None`` without one.
    """
    for group in _cgroups(root, "cpu"):
        counts = read_table(group / "cpu.stat")
        if _quota_cores(group) is not None and "nr_periods" in counts and "nr_throttled" in counts:
            return counts["nr_periods"], counts["nr_throttled"]
    return None


def busy_cpu_seconds(cpus: Set[int], root: Path = ROOT) -> float | None:
    """CPU time used on these processors since the machine started, by every process and by the kernel.

    Time that a hypervisor gave to others (steal) is counted too (/proc/stat, proc_stat(5)). ``None`` if one of
    the processors is not listed.
    """
    ticks_by_cpu = {}
    for line in (read_text(root / "proc/stat") or "").splitlines():
        name, *values = line.split()
        number = name.removeprefix("cpu")
        if number.isdecimal() and int(number) in cpus and len(values) >= 8 and all(v.isdecimal() for v in values[:8]):
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, values[:8])
            ticks_by_cpu[int(number)] = user + nice + system + irq + softirq + steal
    return sum(ticks_by_cpu.values()) / os.sysconf("SC_CLK_TCK") if ticks_by_cpu.keys() == cpus else None


def _quota_cores(group: Path) -> float | None:
    words = (read_text(group / "cpu.max") or "").split()  # quota or "max", and period
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _memory_limits(root: Path) -> list[tuple[Path, int]]:
    """The cgroups with a memory limit, and that limit in bytes."""
    limits = [
        (group, _read_number(group / "memory.max", group / "memory.limit_in_bytes"))
        for group in _cgroups(root, "memory")
    ]
    return [(group, limit) for group, limit in limits if limit is not None and limit < _NO_LIMIT_BYTES]


def _cgroups(root: Path, controller: str) -> list[Path]:
    """This process's cgroup for one controller, followed by its parents."""
    lines = [line.split(":", 2) for line in (read_text(root / "proc/self/cgroup") or "").splitlines()]
    paths = {name: line[2] for line in lines if len(line) == 3 for name in line[1].split(",")}
    # A hybrid machine mounts both versions. A controller that version 1 names is in it; version 2 has an empty name.
    version, own = (1, paths[controller]) if controller in paths else (2, paths.get("", ""))
    # The last mount covers earlier ones at the same place.
    for line in reversed((read_text(root / "proc/self/mountinfo") or "").splitlines()):
        mount, _, file_system = line.partition(" - ")
        fields, kind = mount.split(), file_system.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if not (kind[0] == "cgroup2" if version == 2 else kind[0] == "cgroup" and controller in kind[2].split(",")):
            continue
        path, mounted_path, mount_point = PurePosixPath(own), fields[3], fields[4]
        # "/../other" is how a cgroup namespace shows a process that lives outside it.
        if own and ".." not in path.parts and path.is_relative_to(mounted_path):
            inner = path.relative_to(mounted_path)
            return [root / mount_point.lstrip("/") / level for level in (inner, *inner.parents)]
    return []


def read_table(path: Path) -> dict[str, int]:
    """Lines of ``name value`` or ``name: value kB``, in bytes where the kernel says kB; empty if unreadable."""
    rows = [line.split() for line in (read_text(path) or "").splitlines()]
    return {
        row[0].rstrip(":"): int(row[1]) * (1024 if row[2:] == ["kB"] else 1)
        for row in rows
        if len(row) >= 2 and row[1].isdecimal()
    }


def _read_number(*paths: Path) -> int | None:
    """The number in the first of these files that exists; ``None`` for ``max`` or without a file."""
    text = next((text for path in paths if (text := read_text(path)) is not None), "").strip()
    return int(text) if text.isdecimal() else None


def read_text(path: Path) -> str | None:
    """A small file's text; ``None`` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
