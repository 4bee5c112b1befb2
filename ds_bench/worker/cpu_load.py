"""Measures how much CPU time other programs took while a rank trained, and how often a quota stopped it.

That time is the kernel's CPU time for all processes on the processors that this rank may use, minus the time of this
trial's processes and of the programs that started it. The load average would still contain our own previous trial.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..system import host_resources
from ..system.processes import stat_values

ROOT_VARIABLE = "DS_BENCH_CPU_ROOT"
"""Variable with a folder whose ``proc`` is read instead of the kernel's, for tests of an idle or a busy machine."""
MIN_SECONDS = 0.2
"""Shorter intervals are not measured: the kernel counts in ticks of 10 ms on each processor."""


@dataclass(frozen=True)
class CpuReading:
    """The kernel's counters at one moment."""

    monotonic_seconds: float
    busy_seconds: float | None
    own_seconds: float
    periods: tuple[int, int] | None

    @classmethod
    def read(cls) -> CpuReading:
        root = Path(os.environ.get(ROOT_VARIABLE, "/"))
        cpus = os.sched_getaffinity(0)
        return cls(
            monotonic_seconds=time.monotonic(),
            busy_seconds=host_resources.busy_cpu_seconds(cpus, root),
            own_seconds=own_cpu_seconds(cpus),
            periods=host_resources.cgroup_cpu_periods(root),
        )


def load_between(before: CpuReading, after: CpuReading) -> dict[str, Any]:
    """Return the ``cpu_*`` fields of a RankMeasurement; only those for cores and threads if the load is unknown."""
    seconds = after.monotonic_seconds - before.monotonic_seconds
    own = after.own_seconds - before.own_seconds
    fields: dict[str, Any] = {
        "cpu_cores": host_resources.usable_cores(),
        "cpu_threads": torch.get_num_threads(),
    }
    if seconds < MIN_SECONDS or before.busy_seconds is None or after.busy_seconds is None:
        return fields
    fields["cpu_own_cores"] = own / seconds
    # Not below 0, because the counters are read at different moments.
    fields["cpu_other_cores"] = max(0.0, after.busy_seconds - before.busy_seconds - own) / seconds
    if before.periods is not None and after.periods is not None:
        periods = after.periods[0] - before.periods[0]
        fields["cpu_throttled_fraction"] = (after.periods[1] - before.periods[1]) / periods if periods > 0 else 0.0
    return fields


def own_cpu_seconds(cpus: Collection[int]) -> float:
    """Return the CPU time so far of this trial's processes (this session) that may run on these processors, and of the
    programs that started the trial. Ranks bound to other processors are left out.
    """
    session, own = os.getsid(0), os.getpid()
    parents: dict[int, int] = {}
    ticks: dict[int, tuple[int, int]] = {}
    in_session = set()
    for entry in Path("/proc").glob("[0-9]*"):
        if values := stat_values(entry / "stat"):  # 1 ppid, 3 session, 11 to 14 utime, stime, cutime, cstime
            pid = int(entry.name)
            parents[pid] = int(values[1])
            ticks[pid] = int(values[11]) + int(values[12]), int(values[13]) + int(values[14])
            if int(values[3]) == session:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    if not os.sched_getaffinity(pid).isdisjoint(cpus):
                        in_session.add(pid)
    # With ended children (cutime), which have no entry of their own.
    total = sum(sum(ticks[pid]) for pid in in_session)
    ancestor = parents.get(own, 0)
    while ancestor in parents:
        # Without cutime: ended children, of a shell for example, include other programs.
        total += ticks[ancestor][0] if ancestor not in in_session else 0
        ancestor = parents[ancestor]
    return total / os.sysconf("SC_CLK_TCK")
