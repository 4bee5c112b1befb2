"""Memory and I/O of this rank, from torch's allocator and from the kernel.

Host memory is the kernel's own high-water mark (VmHWM in /proc/self/status, proc(5)): nothing is
sampled. On the CPU accelerator there is no device memory: DeepSpeed's ``memory_allocated`` is the
resident size there (accelerator/cpu_accelerator.py) and is not used.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_KB = 1024


def status_bytes(field: str) -> int | None:
    """A ``VmX: n kB`` line of /proc/self/status, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * _KB
    except (OSError, ValueError):
        return None
    return None


def reset_host_peak() -> bool:
    """Starts VmHWM anew (proc(5), clear_refs 5). False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def read_smaps_rollup() -> dict[str, int]:
    """Sums over all mappings (smaps_rollup), in bytes: Rss, Pss, Shared_Clean, …; empty where unreadable."""
    sums: dict[str, int] = {}
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return sums
    for line in lines:
        name, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            sums[name] = int(value.split()[0]) * _KB
    return sums


def io_bytes() -> tuple[int, int] | None:
    """(read, written) bytes of this process that reached block devices; None where unreadable."""
    try:
        values = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(values["read_bytes"]), int(values["write_bytes"])
    except (OSError, ValueError, KeyError):
        return None


def limit_data_segment(limit_bytes: int) -> None:
    """Private writable memory of this process ends at ``limit_bytes`` (setrlimit(2), RLIMIT_DATA)."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def device_free_bytes() -> int | None:
    """Free on this rank's card now, as the driver tells; None without CUDA in use, or where CUDA no longer answers."""
    torch = sys.modules.get("torch")  # a rank that failed before importing it has no card
    try:
        return int(torch.cuda.mem_get_info()[0]) if torch is not None and torch.cuda.is_initialized() else None
    except Exception:  # after some errors every call into CUDA fails
        return None


def device_init_peak(accelerator: str) -> int | None:
    """Peak allocated so far on the device, and the peak starts anew."""
    if accelerator != "cuda":
        return None
    import torch

    peak = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()  # blocks cached while building would count as reserved in the steps
    torch.cuda.reset_peak_memory_stats()
    return peak


def alloc_retries(accelerator: str) -> int:
    """Allocator retries since the process began; 0 without a device allocator."""
    if accelerator != "cuda":
        return 0
    import torch

    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def device_facts(accelerator: str, retries_before: int, limit_bytes: int | None) -> Mapping[str, Any]:
    """The ``gpu_*`` fields of a RankMeasurement after the last measured step; empty without a GPU.

    ``limit_bytes``: size of the emulated card, which then counts as the card's.
    """
    if accelerator != "cuda":
        return {}
    import torch

    free, total = torch.cuda.mem_get_info()
    return {
        "gpu_total_bytes": min(total, limit_bytes or total),
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(),
        "gpu_peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "gpu_allocated_bytes": torch.cuda.memory_allocated(),
        "gpu_reserved_bytes": torch.cuda.memory_reserved(),
        "gpu_device_used_bytes": total - free,
        "gpu_alloc_retries": alloc_retries(accelerator) - retries_before,
    }


def host_facts(life_peak_before_reset: int | None) -> Mapping[str, Any]:
    """The ``host_*`` fields after the last measured step; the life's peak spans both sides of the reset."""
    steps_peak, sums = status_bytes("VmHWM"), read_smaps_rollup()
    peaks = [peak for peak in (life_peak_before_reset, steps_peak) if peak is not None]
    shared = [sums[name] for name in ("Shared_Clean", "Shared_Dirty") if name in sums]
    return {
        "host_peak_bytes": max(peaks, default=None),
        "host_peak_steps_bytes": steps_peak,
        "host_pss_bytes": sums.get("Pss"),
        "host_shared_bytes": sum(shared) if shared else None,
    }
