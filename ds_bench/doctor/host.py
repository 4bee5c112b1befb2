"""The host: memory and its limits, swap, shared memory, locked memory, cores, NUMA."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from ..analysis.caveats import NEXT_STEPS, CaveatKind
from ..config.spec import Placement
from ..system import host_memory
from ..system.host_memory import read_text
from ..units import format_bytes
from .findings import Finding, SystemAccess, ok, one_by_one, problem, unreadable, warning

# csrc/cpu/comm/shm.cpp, allreduce_workspace: two buffers of 1 MiB and two of 32 MiB for every rank.
SHM_BYTES_PER_CPU_RANK = 2 * 2**20 + 2 * 32 * 2**20
# What NCCL's user guide has containers started with ("Troubleshooting", shared memory: --shm-size=1g).
SHM_BYTES_FOR_NCCL = 2**30
_LITTLE_LEFT = 0.25
"""Share of the memory this process may use below which somebody else is using the host."""
_CAP_IPC_LOCK = 1 << 14
_MOST_CPUS = 2**16


def check(machine: SystemAccess, place: Placement, need_bytes: int | None = None) -> Iterator[Finding]:
    """``need_bytes``: host memory that the plan is predicted to take on this node; None without a plan."""
    yield from one_by_one(
        {
            "host memory": lambda: _memory(machine, need_bytes),
            "swap": lambda: _swap(machine),
            "shared memory": lambda: _shared_memory(machine, place),
            "locked memory": lambda: _locked_memory(machine),
            "cores": lambda: _cores(machine),
            "NUMA": lambda: _numa(machine),
        }
    )


def _memory(machine: SystemAccess, need_bytes: int | None) -> Finding:
    total, limit = host_memory.host_memory_bytes(machine.root), host_memory.cgroup_limit_bytes(machine.root)
    free = host_memory.available_host_bytes(machine.root)
    if total is None or free is None:
        return unreadable("host memory")
    granted = total if limit is None else min(total, limit)
    text = f"{format_bytes(free)} of {format_bytes(total)} can be used"
    text += "" if limit is None or limit >= total else f"; the cgroup allows this job {format_bytes(limit)}"
    if need_bytes is not None and need_bytes > free:
        remedy = "offload less, use fewer ranks, or ask the scheduler or container for more memory"
        return warning("host memory", f"{text}; the plan needs about {format_bytes(need_bytes)}", remedy)
    if free < _LITTLE_LEFT * granted:
        return warning(
            "host memory", f"{text}: others take the rest", "end what else runs, before offload rows above all"
        )
    return ok("host memory", text)


def _swap(machine: SystemAccess) -> Finding:
    total, used = host_memory.swap_total_bytes(machine.root), host_memory.swap_used_bytes(machine.root)
    if total is None or used is None or used < 0:
        return unreadable("swap")
    if used:
        return warning(
            "swap", f"{format_bytes(used)} of {format_bytes(total)} in use", NEXT_STEPS[CaveatKind.SWAP_USED]
        )
    return ok("swap", "none in use" if total else "none")


def _shared_memory(machine: SystemAccess, place: Placement) -> Finding:
    try:
        facts = os.statvfs(machine.root / "dev/shm")
    except OSError as error:
        return unreadable("shared memory", f"/dev/shm: {error.strerror}")
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    text = f"/dev/shm has {format_bytes(free)} of {format_bytes(size)} free"
    bigger = "start the container with --shm-size=1g or more, or --ipc=host; or remove old files from /dev/shm"
    if not os.access(machine.root / "dev/shm", os.W_OK):
        writable = "mount it writable: start the container without --read-only, or with --tmpfs /dev/shm:rw,size=1g"
        if place.accelerator == "cpu":
            return problem("shared memory", "/dev/shm cannot be written: CPU ranks would wait for each other", writable)
        if place.num_gpus > 1:
            return warning("shared memory", "/dev/shm cannot be written, which NCCL may need", writable)
    ranks = place.num_gpus if place.hostfile is None else 1  # how many of them run on this node is not known here
    need = ranks * SHM_BYTES_PER_CPU_RANK
    if place.accelerator == "cpu" and free < need:
        return problem("shared memory", f"{text}; {ranks} CPU rank(s) need {format_bytes(need)}", bigger)
    if place.accelerator == "cuda" and place.num_gpus > 1 and free < SHM_BYTES_FOR_NCCL:
        return warning("shared memory", f"{text}; NCCL asks for {format_bytes(SHM_BYTES_FOR_NCCL)}", bigger)
    return ok("shared memory", text)


def _locked_memory(machine: SystemAccess) -> Finding:
    """DeepSpeed locks the buffers that it reads and writes files with (csrc/pin_memory/page_alloc.cpp, mlock)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    if int(_status(machine).get("CapEff", "0"), 16) & _CAP_IPC_LOCK:
        return ok("locked memory", "no limit for this user (CAP_IPC_LOCK)")
    text = f"limited to {format_bytes(limit)}: buffers for NVMe and NCCL may be refused"
    return warning("locked memory", text, "ulimit -l unlimited, or start the container with --ulimit memlock=-1")


def _status(machine: SystemAccess) -> dict[str, str]:
    lines = (line.partition(":") for line in (read_text(machine.root / "proc/self/status") or "").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _cores(machine: SystemAccess) -> Finding:
    allowed = numbers(_status(machine).get("Cpus_allowed_list"))
    online = numbers(read_text(machine.root / "sys/devices/system/cpu/online"))
    if not allowed:
        return unreadable("cores")
    usable = allowed & online or allowed
    text = f"{len(usable)} hardware thread(s)"
    text += f" of the machine's {len(online)} (affinity)" if len(usable) < len(online) else ""
    quota = host_memory.cgroup_cpu_cores(machine.root)
    if quota is not None and quota < len(usable):
        text += f", but the CPU quota grants only {quota:.2f} cores' worth of time: offloaded optimizers are held up"
        return warning("cores", text, f"raise the quota, or export OMP_NUM_THREADS={max(1, int(quota))}")
    return ok("cores", text)


def _numa(machine: SystemAccess) -> Finding:
    folder = machine.root / "sys/devices/system/node"
    nodes = {int(path.name[4:]): path for path in folder.glob("node*") if path.name[4:].isdecimal()}
    if not nodes:
        return unreadable("NUMA")
    if len(nodes) == 1:
        return ok("NUMA", "one node")
    status = _status(machine)
    mine = numbers(status.get("Cpus_allowed_list"))
    near = {node for node, path in nodes.items() if numbers(read_text(path / "cpulist")) & mine}
    memory = numbers(status.get("Mems_allowed_list")) & nodes.keys()
    text = f"{len(nodes)} nodes; cores of {_listed(near)}, memory of {_listed(memory)} may be used"
    if near and memory and not near <= memory:
        return warning("NUMA", f"{text}: some cores have no memory of their own", "let the job have both of one node")
    return ok("NUMA", text)


def _listed(values: set[int]) -> str:
    return f"node {', '.join(map(str, sorted(values)))}" if values else "no node known"


def numbers(text: str | None) -> set[int]:
    """``0-3,8`` → {0, 1, 2, 3, 8}, as the kernel writes lists. Raises ValueError on anything else."""
    found: set[int] = set()
    for part in filter(None, (text or "").strip().split(",")):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if not 0 <= first <= last < _MOST_CPUS:
            raise ValueError(f"{part!r} is no range of numbers")
        found.update(range(first, last + 1))
    return found
