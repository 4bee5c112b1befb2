"""Memory and I/O of this rank, from torch's allocator and from the kernel.

Peak host memory is counted by the kernel (VmHWM in /proc/self/status, proc(5)): samples would miss short peaks. On the
CPU accelerator there is no device memory: DeepSpeed's ``memory_allocated`` is the resident size there
(accelerator/cpu_accelerator.py) and is not used.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..system.host_resources import read_table

_PROCESS = Path("/proc/self")


def peak_resident_bytes() -> int | None:
    """Peak resident memory of this process since it began or :func:`reset_host_peak` was last called."""
    return read_table(_PROCESS / "status").get("VmHWM")


def reset_host_peak() -> bool:
    """Reset the peak resident memory (proc(5), clear_refs 5). Return False if the kernel does not allow it."""
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


class PhaseMeter:
    """Measures the memory of this rank in one phase of the trial after another.

    Each peak is the kernel's high-water mark, which is reset between phases; nothing is sampled. Where the kernel does
    not allow the reset, the peak of a phase is known only if it exceeds those of all earlier phases.
    """

    def __init__(self, accelerator: str) -> None:
        self.accelerator = accelerator
        self.phases: dict[str, dict[str, int | None]] = {}
        """Phase → the fields of its PhaseMemory."""
        self.can_reset = True
        """Whether every reset so far was allowed."""
        self._highest_before = 0

    def begin(self) -> None:
        """Begin a phase: earlier use no longer counts."""
        self.can_reset = reset_host_peak() and self.can_reset
        self._highest_before = 0 if self.can_reset else peak_resident_bytes() or 0
        if self.accelerator == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def end(self, phase: str) -> None:
        """Store the memory of the current phase, and begin the next."""
        resident = read_table(_PROCESS / "status")  # peak and end at the same moment
        peak = resident.get("VmHWM")
        self.phases[phase] = {
            "host_peak_bytes": peak if peak is not None and peak > self._highest_before else None,
            "host_end_bytes": resident.get("VmRSS"),
            "host_end_pss_bytes": _proportional_bytes(),
        }
        if self.accelerator == "cuda":
            self.phases[phase]["gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
        self.begin()

    def highest(self, name: str, *phases: str) -> int | None:
        """The highest value of a field in those phases that were measured; None if all are unknown."""
        measured = (self.phases[phase].get(name) for phase in phases if phase in self.phases)
        return max((size for size in measured if size is not None), default=None)


def io_bytes() -> tuple[int, int] | None:
    """(read, written) bytes of this process that reached block devices; None where unreadable."""
    counters = read_table(_PROCESS / "io")
    return (counters["read_bytes"], counters["write_bytes"]) if "write_bytes" in counters else None


def empty_device_cache(accelerator: str) -> None:
    """Release the unused blocks of torch's allocator, which would count as reserved during the steps."""
    if accelerator == "cuda":
        # Tensors in reference cycles keep their blocks in use until they are collected.
        gc.collect()
        torch.cuda.empty_cache()


def alloc_retries(accelerator: str) -> int:
    """How often torch's allocator has freed its cached blocks to try again; 0 on the CPU accelerator."""
    if accelerator != "cuda":
        return 0
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def device_facts(accelerator: str, retries_before: int, limit_bytes: int | None) -> Mapping[str, Any]:
    """The ``gpu_*`` fields of a RankMeasurement after the last measured step; empty without a GPU.

    ``limit_bytes``: memory of the emulated GPU, which then counts as the total.
    """
    if accelerator != "cuda":
        return {}
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


def _proportional_bytes() -> int | None:
    """Memory of this rank and its data loader's workers, each shared page divided among the processes that map it."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    own, *others = (read_table(Path(f"/proc/{pid}/smaps_rollup")).get("Pss") for pid in pids)
    return None if own is None else own + sum(size or 0 for size in others)


def host_facts(meter: PhaseMeter) -> Mapping[str, Any]:
    """The ``host_*`` fields of a RankMeasurement after the last measured step, after ``meter`` has ended its phase."""
    return {
        "host_peak_bytes": meter.highest("host_peak_bytes", *meter.phases),
        # Without resets the high-water mark may date from building the model.
        "host_peak_steps_bytes": (
            meter.highest("host_peak_bytes", "first_step", "warm_up", "steady") if meter.can_reset else None
        ),
        "phase_memory": meter.phases,
        "host_pss_bytes": _proportional_bytes(),
    }
