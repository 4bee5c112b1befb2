"""The GPUs: free memory and who uses it, persistence mode, clocks and what lowers them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from ..config.spec import gpu_precisions
from ..system.gpus import GpuFacts, GpuInventory, select_visible, throttle_faults
from ..system.host_memory import ROOT, read_text
from ..units import format_bytes
from .findings import Finding, SystemAccess, ok, problem, unreadable, warning

_DRIVER_FRACTION = 0.05
"""Fraction of a GPU's memory that the driver may take for itself. More is used by a process that is not visible."""
NO_ROCM = "found an AMD GPU, but ROCm is not supported"
_HOST_PID_NAMESPACE = f"pid:[{0xEFFFFFFC}]"
"""Linux gives this number to the host's process namespace (PROC_PID_INIT_INO)."""


def has_amd_gpu(root: Path = ROOT) -> bool:
    """Return whether the kernel offers an AMD GPU for computing (``/dev/kfd``)."""
    return (root / "dev/kfd").exists()


def check(
    system: SystemAccess, inventory: GpuInventory, torch_cuda: str | None, slots: Collection[int] | None = None
) -> Iterator[Finding]:
    """Yield findings for each GPU that ``CUDA_VISIBLE_DEVICES`` leaves, or why no GPU is visible.

    ``slots``: the numbers of those that are used; None for all.
    """
    visible = select_visible(system.environ, inventory.gpus)
    visible = tuple(gpu for number, gpu in enumerate(visible) if slots is None or number in slots)
    if not visible:
        yield _none_visible(system, inventory)
        return
    if torch_cuda is None:
        text = f"{len(visible)} visible, but torch is a CPU build: comparisons run on the CPU"
        yield problem("GPUs", text, "install torch for CUDA (pytorch.org/get-started), or hide the GPUs")
    names = sorted({gpu.name or "unnamed" for gpu in visible})
    if len(names) > 1:
        text = f"different models ({', '.join(names)}): the slowest sets the pace"
        yield warning("GPUs", text, "choose GPUs of one model with CUDA_VISIBLE_DEVICES")
    for gpu in visible:
        yield _check_memory(system, gpu)
        if gpu.mig:
            text = "divided into MIG instances, which comparisons do not use"
            yield problem(f"GPU {gpu.index} MIG", text, f"choose another GPU, or nvidia-smi -i {gpu.index} -mig 0")
        if "bf16" not in gpu_precisions(gpu.compute_capability):
            text = f"{gpu.name or 'unnamed'} has no bf16 units: rows in bf16 are refused"
            yield warning(f"GPU {gpu.index} bf16", text, "--precision fp16, which auto takes here")
        name = f"GPU {gpu.index} persistence mode"
        if gpu.persistence_mode is None:
            yield unreadable(name)
        elif gpu.persistence_mode:
            yield ok(name, "on")
        else:
            text = "off: the driver unloads when no process uses the GPU, and each cold start waits for it"
            yield warning(name, text, f"nvidia-smi -i {gpu.index} -pm 1, as root; it changes no clock")
        yield _check_clocks(gpu)


def _none_visible(system: SystemAccess, inventory: GpuInventory) -> Finding:
    remedy = "run on a machine with an NVIDIA GPU"
    if inventory.gpus:
        text = f"CUDA_VISIBLE_DEVICES={system.environ.get('CUDA_VISIBLE_DEVICES')!r} hides all {len(inventory.gpus)}"
        remedy = "unset it, or name GPUs by index or UUID"
    elif has_amd_gpu(system.root):
        text = NO_ROCM
    elif (system.root / "proc/driver/nvidia/version").exists():
        text, remedy = "the driver is loaded, but NVML finds none", "run nvidia-smi; start a container with --gpus all"
    else:
        text, remedy = "none found", f"{remedy}; nvidia-smi shows whether the driver finds one"
    return warning("GPUs", f"{text}: comparisons run on the CPU", remedy)


def _check_memory(system: SystemAccess, gpu: GpuFacts) -> Finding:
    name, total, used = f"GPU {gpu.index} memory", gpu.memory_total_bytes, gpu.memory_used_bytes
    if total is None or used is None:
        return unreadable(name)
    text = f"{gpu.name or 'unnamed'}, {format_bytes(max(0, total - used))} of {format_bytes(total)} free"
    remedy = "end the other processes, or choose a free GPU with CUDA_VISIBLE_DEVICES"
    if gpu.other_processes:
        users = ", ".join(_describe_process(system, pid, used_bytes) for pid, used_bytes in gpu.other_processes)
        return warning(name, f"{text}; used by {users}", remedy)
    # Processes of other containers may be missing from NVML's list; their memory is not.
    if used > _DRIVER_FRACTION * total:
        return warning(name, f"{text}; used by processes outside this container", remedy)
    return ok(name, f"{text}, no other process")


def _describe_process(system: SystemAccess, pid: int, used_bytes: int | None) -> str:
    command = ""
    # In a container the process id may be the host's, and belong to another process here.
    namespace = system.root / "proc/self/ns/pid"
    if namespace.is_symlink() and str(namespace.readlink()) == _HOST_PID_NAMESPACE:
        command = (read_text(system.root / f"proc/{pid}/comm") or "").strip()
    facts = [command, "" if used_bytes is None else format_bytes(used_bytes)]
    return f"process {pid} ({', '.join(filter(None, facts)) or 'details not visible'})"


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
