"""What the kernel lets this process use of the host, memory and cores, and how much of it is in use.

Every figure is read from small files under ``/proc`` and ``/sys``; a figure the kernel does not tell is ``None``.
Each function takes the root of the file system, so that a test can build a small one of its own.

A limit may stand on any cgroup from the process's own up to the top of the mounted hierarchy, and the tightest
binds. Above that (outside a container) nothing can be seen from here, so nothing is claimed about it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")

# Version 1 writes "no limit" as the largest page-aligned long; no machine has a quarter of that.
_NO_LIMIT_BYTES = 2**62


class _Names(NamedTuple):
    """What the files of a memory cgroup are called in one version of the interface."""

    limit: str
    usage: str
    peak: str
    events: str
    reclaimable: str


_V1 = _Names(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    peak="memory.max_usage_in_bytes",
    events="memory.oom_control",
    reclaimable="total_inactive_file",
)
_V2 = _Names(
    limit="memory.max", usage="memory.current", peak="memory.peak", events="memory.events", reclaimable="inactive_file"
)


def host_memory_bytes(root: Path = ROOT) -> int | None:
    """Memory of the whole machine, whatever a cgroup may allow of it."""
    return _table(root / "proc/meminfo").get("MemTotal")


def swap_total_bytes(root: Path = ROOT) -> int | None:
    """Swap space of the whole machine."""
    return _table(root / "proc/meminfo").get("SwapTotal")


def swap_used_bytes(root: Path = ROOT) -> int | None:
    """Swap space in use, by every process of the machine."""
    table = _table(root / "proc/meminfo")
    if "SwapTotal" not in table or "SwapFree" not in table:
        return None
    return table["SwapTotal"] - table["SwapFree"]


def available_host_bytes(root: Path = ROOT) -> int | None:
    """Memory that can still be taken without swapping or meeting a cgroup's limit.

    The least of the kernel's ``MemAvailable`` and, on every cgroup with a limit, the limit less what is in use.
    Inactive file pages count as free: the kernel drops them before it kills. An estimate, not a promise.
    """
    names, groups = _memory_groups(root)
    rooms = [_room(group, names) for group in groups]
    known = [room for room in (_table(root / "proc/meminfo").get("MemAvailable"), *rooms) if room is not None]
    return min(known, default=None)


def cgroup_limit_bytes(root: Path = ROOT) -> int | None:
    """The tightest memory limit on this process's cgroup and its parents; ``None`` where nothing limits it."""
    names, groups = _memory_groups(root)
    return min((limit for _, limit in _limits(groups, names)), default=None)


def cgroup_peak_bytes(root: Path = ROOT) -> int | None:
    """The most memory ever held by the cgroup whose limit binds, or by the process's own where none does.

    Of every process in that cgroup, page cache included, since the cgroup was made: near the limit it is evidence
    of pressure, but it is never the use of one trial. ``None`` before Linux 5.19 (version 2).
    """
    names, groups = _memory_groups(root)
    bound = min(_limits(groups, names), key=lambda pair: pair[1], default=None)
    if bound is not None:
        return _number(bound[0] / names.peak)
    return next((peak for group in groups if (peak := _number(group / names.peak)) is not None), None)


def cgroup_oom_kill_count(root: Path = ROOT) -> int | None:
    """How many processes of this cgroup the kernel has killed for memory so far; a rise is evidence of a host OOM.

    Version 2 counts the cgroups below as well, version 1 only the process's own.
    """
    names, groups = _memory_groups(root)
    counts = (_table(group / names.events).get("oom_kill") for group in groups)
    return next((count for count in counts if count is not None), None)


def host_oom_kill_count(root: Path = ROOT) -> int | None:
    """How many processes the kernel of this host has killed for memory since it started (/proc/vmstat, oom_kill)."""
    return _table(root / "proc/vmstat").get("oom_kill")


def cgroup_cpu_cores(root: Path = ROOT) -> float | None:
    """Cores' worth of time the tightest CPU quota grants; ``None`` without one. Says nothing of affinity."""
    _, groups = _groups(root, "cpu")
    return min((cores for group in groups if (cores := _quota_cores(group)) is not None), default=None)


def usable_cores(root: Path = ROOT) -> float:
    """Cores' worth of time this process may use: its affinity mask, and the CPU quota where that is less."""
    allowed = float(len(os.sched_getaffinity(0)))
    return min(allowed, cgroup_cpu_cores(root) or allowed)


def cgroup_cpu_periods(root: Path = ROOT) -> tuple[int, int] | None:
    """Periods in which a CPU quota was enforced so far, and in how many of them it stopped the cgroup.

    Of the nearest cgroup with a quota; ``None`` without one.
    """
    _, groups = _groups(root, "cpu")
    for group in groups:
        counts = _table(group / "cpu.stat")
        if _quota_cores(group) is not None and "nr_periods" in counts and "nr_throttled" in counts:
            return counts["nr_periods"], counts["nr_throttled"]
    return None


def busy_cpu_seconds(cpus: Set[int], root: Path = ROOT) -> float | None:
    """CPU time spent on these processors since the machine started, by every process and by the kernel.

    What a hypervisor withheld from them (steal) counts as spent (/proc/stat, proc_stat(5)).
    """
    ticks = 0
    found = set()
    for line in (read_text(root / "proc/stat") or "").splitlines():
        name, *values = line.split()
        number = name.removeprefix("cpu")
        if number.isdecimal() and int(number) in cpus and len(values) >= 8 and all(v.isdecimal() for v in values[:8]):
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, values[:8])
            ticks += user + nice + system + irq + softirq + steal
            found.add(int(number))
    return ticks / os.sysconf("SC_CLK_TCK") if found == cpus else None


def _quota_cores(group: Path) -> float | None:
    # Version 2 keeps "quota period" in one file, version 1 one number in each of two; no quota is "max" or -1.
    words = (read_text(group / "cpu.max") or "").split() or [
        (read_text(group / f"cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")
    ]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _limits(groups: list[Path], names: _Names) -> list[tuple[Path, int]]:
    """The cgroups that have a limit, with it."""
    values = ((group, _number(group / names.limit)) for group in groups)
    return [(group, value) for group, value in values if value is not None and value < _NO_LIMIT_BYTES]


def _room(group: Path, names: _Names) -> int | None:
    """What is left under the limit of one cgroup."""
    limits, usage = _limits([group], names), _number(group / names.usage)
    if not limits or usage is None:
        return None
    reclaimable = _table(group / "memory.stat").get(names.reclaimable, 0)
    return max(0, limits[0][1] - max(0, usage - reclaimable))


def _memory_groups(root: Path) -> tuple[_Names, list[Path]]:
    version, groups = _groups(root, "memory")
    return (_V1 if version == 1 else _V2), groups


def _groups(root: Path, controller: str) -> tuple[int, list[Path]]:
    """The interface's version for one controller, and this process's cgroups in it: its own first, then parents."""
    lines = [line.split(":", 2) for line in (read_text(root / "proc/self/cgroup") or "").splitlines()]
    paths = {name: line[2] for line in lines if len(line) == 3 for name in line[1].split(",")}
    # A hybrid machine mounts both versions; the controller is where version 1 names it. Version 2 has no name.
    version, own = (1, paths[controller]) if controller in paths else (2, paths.get("", ""))
    # The last mount covers earlier ones at the same place.
    for mounted_path, mount_point in reversed(list(_mounts(root, version, controller))):
        if groups := _ancestry(own, mounted_path, root / mount_point.lstrip("/")):
            return version, groups
    return version, []


def _mounts(root: Path, version: int, controller: str) -> Iterator[tuple[str, str]]:
    """Mounted cgroup hierarchies: the path inside the hierarchy that is mounted, and the mount point."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        mount, _, file_system = line.partition(" - ")
        place, kind = mount.split(), file_system.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" if version == 2 else kind[0] == "cgroup" and controller in kind[2].split(","):
            yield place[3], place[4]


def _ancestry(own: str, mounted_path: str, mount_point: Path) -> list[Path]:
    """Directories of a cgroup and its parents, up to the mount point; none where the cgroup lies outside the mount."""
    path = PurePosixPath(own)
    # "/../other" is how a cgroup namespace shows a process that lives outside it.
    if not own or ".." in path.parts or not path.is_relative_to(mounted_path):
        return []
    inner = path.relative_to(mounted_path)
    return [mount_point / level for level in (inner, *inner.parents)]


def _table(path: Path) -> dict[str, int]:
    """Lines of ``name value`` or ``name: value kB``, in bytes where the kernel says kB; empty if unreadable."""
    rows = [line.split() for line in (read_text(path) or "").splitlines()]
    return {
        row[0].rstrip(":"): int(row[1]) * (1024 if row[2:] == ["kB"] else 1)
        for row in rows
        if len(row) >= 2 and row[1].isdecimal()
    }


def _number(path: Path) -> int | None:
    """The one number a file holds; ``None`` for ``max`` or no file."""
    text = (read_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def read_text(path: Path) -> str | None:
    """A small file's text; ``None`` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
