"""Memory and I/O of this rank, from torch's allocator and from the kernel.

Peak host memory is counted by the kernel (VmHWM in /proc/self/status, proc(5)): samples would miss short peaks. On the
CPU accelerator there is no device memory: DeepSpeed's ``memory_allocated`` is the resident size there
(accelerator/cpu_accelerator.py) and is not used.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _read_sizes(path: str) -> dict[str, int]:
    """The lines ``name: n kB`` of a file under /proc, in bytes; none where it cannot be read."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                sizes[name] = int(value.removesuffix(" kB")) * 1024
    return sizes


def peak_resident_bytes() -> int | None:
    """Peak resident memory of this process since it began or :func:`reset_host_peak` was called."""
    return _read_sizes("/proc/self/status").get("VmHWM")


def reset_host_peak() -> bool:
    """Resets the peak resident memory (proc(5), clear_refs 5). False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def io_bytes() -> tuple[int, int] | None:
    """(read, written) bytes of this process that reached block devices; None where unreadable."""
    try:
        values = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(values["read_bytes"]), int(values["write_bytes"])
    except (OSError, ValueError, KeyError):
        return None


def limit_data_segment(limit_bytes: int) -> None:
    """Limits the private writable memory of this process (setrlimit(2), RLIMIT_DATA)."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def device_free_bytes() -> int | None:
    """Free memory of this rank's GPU as the driver reports it; None before CUDA is used, or where CUDA calls fail."""
    torch = sys.modules.get("torch")  # a rank that failed before it was imported has no GPU
    try:
        return int(torch.cuda.mem_get_info()[0]) if torch is not None and torch.cuda.is_initialized() else None
    except Exception:  # after some errors every call into CUDA fails
        return None


def reset_device_peak(accelerator: str) -> int | None:
    """Peak bytes allocated on the GPU so far, which is reset; None on the CPU accelerator."""
    if accelerator != "cuda":
        return None
    import torch

    peak = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()  # blocks cached while building would count as reserved in the steps
    torch.cuda.reset_peak_memory_stats()
    return peak


def alloc_retries(accelerator: str) -> int:
    """How often torch's allocator has freed its cached blocks to try again; 0 on the CPU accelerator."""
    if accelerator != "cuda":
        return 0
    import torch

    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def device_facts(accelerator: str, retries_before: int, limit_bytes: int | None) -> Mapping[str, Any]:
    """The ``gpu_*`` fields of a RankMeasurement after the last measured step; empty without a GPU.

    ``limit_bytes``: memory of the emulated GPU, which then counts as the total.
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


def host_facts(peak_before_reset: int | None) -> Mapping[str, Any]:
    """The ``host_*`` fields of a RankMeasurement after the last measured step.

    ``peak_before_reset``: peak resident memory when the peak was reset, at the end of initialisation.
    """
    steps_peak, sums = peak_resident_bytes(), _read_sizes("/proc/self/smaps_rollup")
    peaks = [peak for peak in (peak_before_reset, steps_peak) if peak is not None]
    shared = [sums[name] for name in ("Shared_Clean", "Shared_Dirty") if name in sums]
    return {
        "host_peak_bytes": max(peaks, default=None),
        "host_peak_steps_bytes": steps_peak,
        "host_pss_bytes": sums.get("Pss"),
        "host_shared_bytes": sum(shared) if shared else None,
    }
