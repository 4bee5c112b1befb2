"""The GPUs: free memory and who uses it, persistence mode, clocks and what holds them down. Read only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..system.gpus import GpuFacts, GpuInventory, select_visible, throttle_faults
from ..system.host_memory import ROOT, read_text
from ..units import format_bytes
from .findings import Finding, SystemAccess, ok, problem, unreadable, warning

_MOST_UNSEEN = 0.05
"""Share of a card that the driver may take for itself; beyond, somebody uses it whom we cannot see."""


NO_ROCM = "an AMD GPU is here, and ROCm is not supported"


def has_amd_gpu(root: Path = ROOT) -> bool:
    """Whether the kernel offers an AMD GPU for computing (``/dev/kfd``)."""
    return (root / "dev/kfd").exists()


def check(machine: SystemAccess, inventory: GpuInventory, torch_cuda: str | None) -> Iterator[Finding]:
    """The cards that ``CUDA_VISIBLE_DEVICES`` leaves, or why there are none."""
    visible = select_visible(machine.environ, inventory.gpus)
    if not visible:
        yield _none_visible(machine, inventory)
        return
    if torch_cuda is None:
        text = f"{len(visible)} visible, but torch is a CPU build: comparisons run on the CPU"
        yield problem("GPUs", text, "install torch for CUDA (pytorch.org/get-started), or hide the GPUs")
    names = sorted({gpu.name or "unnamed" for gpu in visible})
    if len(names) > 1:
        text = f"not all alike ({', '.join(names)}): the slowest sets the pace"
        yield warning("GPUs", text, "choose cards of one kind with CUDA_VISIBLE_DEVICES")
    for gpu in visible:
        yield from _card(machine, gpu)


def _none_visible(machine: SystemAccess, inventory: GpuInventory) -> Finding:
    if has_amd_gpu(machine.root) and not inventory.gpus:
        return warning("GPUs", f"{NO_ROCM}: comparisons run on the CPU", "run where there is an NVIDIA GPU")
    if inventory.gpus:
        text = f"CUDA_VISIBLE_DEVICES={machine.environ.get('CUDA_VISIBLE_DEVICES')!r} hides all {len(inventory.gpus)}"
        return warning("GPUs", f"{text}: comparisons run on the CPU", "unset it, or name cards by index or UUID")
    if (machine.root / "proc/driver/nvidia/version").exists():
        text = "the driver is loaded, yet NVML shows none: comparisons run on the CPU"
        return warning("GPUs", text, "see what nvidia-smi says; in a container, start it with --gpus all")
    text = "none is found: comparisons run on the CPU, and say nothing about GPUs"
    return warning("GPUs", text, "run where there is a GPU; nvidia-smi shows whether the driver sees one")


def _card(machine: SystemAccess, gpu: GpuFacts) -> Iterator[Finding]:
    yield _memory(machine, gpu)
    if gpu.mig:
        text = "the card is cut into MIG instances, which comparisons do not use"
        yield problem(f"GPU {gpu.index} MIG", text, f"choose another card, or nvidia-smi -i {gpu.index} -mig 0")
    yield _persistence(gpu)
    yield _clocks(gpu)


def _memory(machine: SystemAccess, gpu: GpuFacts) -> Finding:
    name, total, used = f"GPU {gpu.index} memory", gpu.memory_total_bytes, gpu.memory_used_bytes
    if total is None or used is None:
        return unreadable(name)
    text = f"{gpu.name or 'unnamed'}, {format_bytes(max(0, total - used))} of {format_bytes(total)} free"
    free_it = "end the other processes, or choose a free card with CUDA_VISIBLE_DEVICES"
    if gpu.other_processes:
        listed = ", ".join(_process(machine, pid, held) for pid, held in gpu.other_processes)
        return warning(name, f"{text}; used by {listed}", free_it)
    if used > _MOST_UNSEEN * total:
        return warning(name, f"{text}; used by processes that cannot be seen from here", free_it)
    return ok(name, f"{text}, no other process")


def _process(machine: SystemAccess, pid: int, held_bytes: int | None) -> str:
    """With its name, but not in a container: there the number may be the host's, and mean another process."""
    command = (read_text(machine.root / f"proc/{pid}/comm") or "").strip() if _sees_host_processes(machine) else ""
    facts = [command] if command else []
    facts += [] if held_bytes is None else [format_bytes(held_bytes)]
    return f"process {pid} ({', '.join(facts) or 'nothing known of it'})"


def _sees_host_processes(machine: SystemAccess) -> bool:
    """Whether this is the host's own process namespace, which Linux numbers so (proc_ns.h, PROC_PID_INIT_INO)."""
    try:
        return str((machine.root / "proc/self/ns/pid").readlink()) == f"pid:[{0xEFFFFFFC}]"
    except OSError:
        return False


def _persistence(gpu: GpuFacts) -> Finding:
    name = f"GPU {gpu.index} persistence mode"
    if gpu.persistence_mode is None:
        return unreadable(name)
    if gpu.persistence_mode:
        return ok(name, "on")
    text = "off: the driver unloads when nobody uses the card, and each cold start waits for it"
    return warning(name, text, f"nvidia-smi -i {gpu.index} -pm 1, as root; it changes no clock")


def _clocks(gpu: GpuFacts) -> Finding:
    name = f"GPU {gpu.index} clocks"
    if gpu.throttle_reasons is None:
        return unreadable(name)
    now = "unknown" if gpu.sm_clock_mhz is None else f"{gpu.sm_clock_mhz}"
    highest = "unknown" if gpu.max_sm_clock_mhz is None else f"{gpu.max_sm_clock_mhz}"
    text = f"{now} of {highest} MHz" + (", idle" if "gpu_idle" in gpu.throttle_reasons else "")
    faults = throttle_faults(gpu)
    if not faults:
        return ok(name, f"{text}, not throttled")
    heat = "" if gpu.temperature_celsius is None else f" at {gpu.temperature_celsius} degrees Celsius"
    power = "" if gpu.power_limit_watts is None else f", power limit {gpu.power_limit_watts:.0f} W"
    remedy = (
        f"see nvidia-smi -i {gpu.index} -q -d PERFORMANCE,TEMPERATURE,POWER; measure when the card is cool and free"
    )
    return warning(name, f"{text}, held down by {', '.join(faults)}{heat}{power}", remedy)
