"""Checks the host (memory and its limits, swap, shared and locked memory, cores) and its GPUs.

For each GPU: free memory and the processes that use the rest, persistence mode, clocks and what lowers them.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Iterator
from pathlib import Path

from ..config.caveat_texts import CaveatKind
from ..config.spec import Placement, gpu_precisions
from ..system import host_resources
from ..system.gpu_state import GpuFacts, GpuInventory, select_visible, throttle_faults
from ..system.host_resources import ROOT, is_wsl, parse_numbers, read_text
from ..units import format_bytes, format_items
from .findings import Finding, SystemAccess, ok, problem, run_checks, unreadable, warning

SHM_BYTES_PER_CPU_RANK = 2 * 2**20 + 2 * 32 * 2**20
"""Two buffers of 1 MiB and two of 32 MiB (csrc/cpu/comm/shm.cpp, allreduce_workspace)."""
SHM_BYTES_FOR_NCCL = 2**30
"""From NCCL's user guide ("Troubleshooting", shared memory: --shm-size=1g)."""
_LOW_FREE_FRACTION = 0.25
"""If a smaller part of the memory that this process may use is free, other programs are using the host."""
_CAP_IPC_LOCK = 1 << 14
"""Bit of an effective set of capabilities (linux/capability.h)."""
_DRIVER_FRACTION = 0.05
"""Fraction of a GPU's memory that the driver may take for itself. More means that a hidden process uses the GPU."""
NO_ROCM = "found an AMD GPU, but ROCm is not supported"


def check(system: SystemAccess, placement: Placement, need_bytes: int | None = None) -> Iterator[Finding]:
    """Yield one finding per resource. ``need_bytes``: host memory predicted for this node; None without a plan."""
    yield from run_checks(
        {
            "host memory": lambda: _check_memory(system, need_bytes),
            "swap": lambda: _check_swap(system),
            "shared memory": lambda: _check_shared_memory(system, placement),
            "locked memory": lambda: _check_locked_memory(system),
            "cores": lambda: _check_cores(system),
        }
    )


def _check_memory(system: SystemAccess, need_bytes: int | None) -> Finding:
    name = "host memory"
    total, limit = host_resources.host_memory_bytes(system.root), host_resources.cgroup_limit_bytes(system.root)
    free = host_resources.available_host_bytes(system.root)
    if total is None or free is None:
        return unreadable(name)
    granted = total if limit is None else min(total, limit)
    text = f"{format_bytes(free)} of {format_bytes(total)} available"
    text += f"; the cgroup allows this job {format_bytes(limit)}" if granted < total else ""
    if need_bytes is not None and need_bytes > free:
        remedy = "offload less, use fewer ranks, or request more memory from the scheduler or container"
        return warning(name, f"{text}; the plan needs about {format_bytes(need_bytes)}", remedy)
    if free < _LOW_FREE_FRACTION * granted:
        return warning(name, f"{text}: other programs use the rest", "end them, especially before offload rows")
    return ok(name, text)


def _check_swap(system: SystemAccess) -> Finding:
    total, used = host_resources.swap_bytes(system.root)
    if total is None or used is None:
        return unreadable("swap")
    if used:
        text = f"{format_bytes(used)} of {format_bytes(total)} in use"
        return warning("swap", text, CaveatKind.SWAP_USED.remedy)
    return ok("swap", "none in use" if total else "none")


def _check_shared_memory(system: SystemAccess, placement: Placement) -> Finding:
    name, folder, on_cpu = "shared memory", system.root / "dev/shm", placement.accelerator == "cpu"
    uses_nccl = not on_cpu and placement.num_gpus > 1
    status = os.statvfs(folder)
    if not os.access(folder, os.W_OK) and (on_cpu or uses_nccl):
        remedy = "mount it writable: start the container without --read-only, or with --tmpfs /dev/shm:rw,size=1g"
        if on_cpu:
            return problem(name, "/dev/shm is not writable: CPU ranks would wait for each other forever", remedy)
        return warning(name, "/dev/shm is not writable, and NCCL may need it", remedy)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"/dev/shm has {format_bytes(free)} of {format_bytes(size)} free"
    remedy = "start the container with --shm-size=1g or more, or --ipc=host; or remove old files from /dev/shm"
    # The number of ranks on this node is not known for a job on several nodes.
    ranks = placement.num_gpus if placement.is_on_this_host else 1
    need = ranks * SHM_BYTES_PER_CPU_RANK
    if on_cpu and free < need:
        return problem(name, f"{text}; {ranks} CPU rank(s) need {format_bytes(need)}", remedy)
    if uses_nccl and free < SHM_BYTES_FOR_NCCL:
        return warning(name, f"{text}; NCCL recommends {format_bytes(SHM_BYTES_FOR_NCCL)}", remedy)
    return ok(name, text)


def _check_locked_memory(system: SystemAccess) -> Finding:
    """DeepSpeed locks the buffers that it reads and writes files with (csrc/pin_memory/page_alloc.cpp, mlock)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    # The kernel applies no limit to a process with this capability (mlock(2), "Limits and permissions").
    if int(_process_status(system).get("CapEff", "0"), 16) & _CAP_IPC_LOCK:
        return ok("locked memory", "no limit for this user (CAP_IPC_LOCK)")
    text = f"limited to {format_bytes(limit)}: buffers for NVMe and NCCL may be refused"
    return warning("locked memory", text, "ulimit -l unlimited, or start the container with --ulimit memlock=-1")


def _process_status(system: SystemAccess) -> dict[str, str]:
    lines = (line.partition(":") for line in (read_text(system.root / "proc/self/status") or "").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _check_cores(system: SystemAccess) -> Finding:
    allowed = parse_numbers(_process_status(system).get("Cpus_allowed_list"))
    online = parse_numbers(read_text(system.root / "sys/devices/system/cpu/online"))
    if not allowed:
        return unreadable("cores")
    # The mask may name processors that are offline. If the list of those online is not readable, only the mask counts.
    usable = allowed & online or allowed
    text = format_items(len(usable), "hardware thread")
    text += f" of the machine's {len(online)} (affinity)" if len(usable) < len(online) else ""
    quota = host_resources.cgroup_cpu_cores(system.root)
    if quota is not None and quota < len(usable):
        text += f", but the CPU quota grants only {quota:.2f} cores' worth of time: offloaded optimizers wait"
        return warning("cores", text, f"raise the quota, or export OMP_NUM_THREADS={max(1, int(quota))}")
    return ok("cores", text)


# ------------------------------------------------------------------ GPUs


def has_amd_gpu(root: Path = ROOT) -> bool:
    """Return whether the kernel offers an AMD GPU for computing (``/dev/kfd``)."""
    return (root / "dev/kfd").exists()


def check_gpus(
    system: SystemAccess, inventory: GpuInventory, torch_cuda: str | None, slots: Collection[int] | None = None
) -> Iterator[Finding]:
    """Yield findings for each GPU that ``CUDA_VISIBLE_DEVICES`` leaves visible, or why no GPU is visible.

    ``slots``: the numbers of those that are used; None for all.
    """
    visible = select_visible(system.environ, inventory.gpus)
    visible = tuple(gpu for number, gpu in enumerate(visible) if slots is None or number in slots)
    if not visible:
        remedy = "run on a machine with an NVIDIA GPU"
        if inventory.gpus:
            text = (
                f"CUDA_VISIBLE_DEVICES={system.environ.get('CUDA_VISIBLE_DEVICES')!r} hides all {len(inventory.gpus)}"
            )
            remedy = "unset it, or name GPUs by index or UUID"
        elif has_amd_gpu(system.root):
            text = NO_ROCM
        elif (system.root / "proc/driver/nvidia/version").exists():
            text = "the driver is loaded, but NVML finds none"
            remedy = "run nvidia-smi; start a container with --gpus all"
        else:
            text, remedy = "none found", f"{remedy}; nvidia-smi shows whether the driver finds one"
        yield warning("GPUs", f"{text}: comparisons run on the CPU", remedy)
        return
    if torch_cuda is None:
        text = f"{len(visible)} visible, but torch is a CPU build: comparisons run on the CPU"
        yield problem("GPUs", text, "install torch for CUDA (pytorch.org/get-started), or hide the GPUs")
    if is_wsl(read_text(system.root / "proc/sys/kernel/osrelease")):
        text = "the driver moves GPU memory to the host instead of failing, and page-locked host memory is limited"
        remedy = "each rank is limited to the GPU memory that is free at its start; close programs that use the GPU"
        yield warning("WSL", text, remedy)
    names = sorted({gpu.name or "unnamed" for gpu in visible})
    if len(names) > 1:
        text = f"different models ({', '.join(names)}): the slowest sets the pace"
        yield warning("GPUs", text, "choose GPUs of one model with CUDA_VISIBLE_DEVICES")
    for gpu in visible:
        yield _check_gpu_memory(gpu)
        if gpu.mig:
            text = "divided into MIG instances, which comparisons do not use"
            yield problem(f"GPU {gpu.index} MIG", text, f"choose another GPU, or nvidia-smi -i {gpu.index} -mig 0")
        if "bf16" not in gpu_precisions(gpu.compute_capability):
            text = f"{gpu.name or 'unnamed'} has no bf16 units: rows in bf16 are refused"
            yield warning(f"GPU {gpu.index} bf16", text, "--precision fp16, which auto selects here")
        name = f"GPU {gpu.index} persistence mode"
        if gpu.persistence_mode is None:
            yield unreadable(name)
        elif gpu.persistence_mode:
            yield ok(name, "on")
        else:
            text = "off: the driver unloads when no process uses the GPU, and each cold start waits for it"
            yield warning(name, text, f"nvidia-smi -i {gpu.index} -pm 1, as root; it changes no clock")
        yield _check_clocks(gpu)


def _check_gpu_memory(gpu: GpuFacts) -> Finding:
    name, total, used = f"GPU {gpu.index} memory", gpu.memory_total_bytes, gpu.memory_used_bytes
    if total is None or used is None:
        return unreadable(name)
    text = f"{gpu.name or 'unnamed'}, {format_bytes(max(0, total - used))} of {format_bytes(total)} free"
    remedy = "end the other processes, or choose a free GPU with CUDA_VISIBLE_DEVICES"
    if gpu.other_processes:
        # In a container the process ids may be the host's.
        users = [
            f"process {pid} ({'bytes not visible' if used_bytes is None else format_bytes(used_bytes)})"
            for pid, used_bytes in gpu.other_processes
        ]
        return warning(name, f"{text}; used by {', '.join(users)}", remedy)
    # Processes of other containers may be missing from NVML's list; their memory is not.
    if used > _DRIVER_FRACTION * total:
        return warning(name, f"{text}; used by processes that NVML does not list, perhaps in a container", remedy)
    return ok(name, f"{text}, no other process")


def _check_clocks(gpu: GpuFacts) -> Finding:
    name = f"GPU {gpu.index} clocks"
    if gpu.throttle_reasons is None:
        return unreadable(name)
    now, highest = ("unknown" if mhz is None else str(mhz) for mhz in (gpu.sm_clock_mhz, gpu.max_sm_clock_mhz))
    text = f"{now} of {highest} MHz" + (", idle" if "gpu_idle" in gpu.throttle_reasons else "")
    faults = throttle_faults(gpu)
    if not faults:
        return ok(name, f"{text}, not throttled")
    text += f", lowered by {', '.join(faults)}"
    text += "" if gpu.temperature_celsius is None else f" at {gpu.temperature_celsius} degrees Celsius"
    text += "" if gpu.power_limit_watts is None else f", power limit {gpu.power_limit_watts:.0f} W"
    look = f"see nvidia-smi -i {gpu.index} -q -d PERFORMANCE,TEMPERATURE,POWER"
    return warning(name, text, f"{look}; measure when the GPU is cool and free")
