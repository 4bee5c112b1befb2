"""The memory of this rank's card: the storages on it, their bytes and peaks, and the error of torch at its limit."""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import time
import weakref
from typing import Any

from . import CardPlan, read_plans, simulated_folder, usage_file, visible_cards
from .nvml import SimulatedCard

_READ_SECONDS = 0.2
"""How often the memory of other processes is read; always before an out-of-memory error."""


class Allocator:
    """Rounds each block up to 512 bytes (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize) and caches no freed one.

    A model of torch's caching allocator has the same methods and keeps ``reserved_bytes`` of its own.
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._blocks: dict[int, int] = {}
        self._numbers = itertools.count()

    @property
    def reserved_bytes(self) -> int:
        return self.allocated_bytes

    def allocate(self, size: int, limit: int) -> int | None:
        """Return the number of a new block; None where more than ``limit`` bytes would be reserved."""
        size = -(-size // 512) * 512
        if self.allocated_bytes + size > limit:
            return None
        number = next(self._numbers)
        self._blocks[number] = size
        self.allocated_bytes += size
        return number

    def free(self, block: int) -> None:
        self.allocated_bytes -= self._blocks.pop(block)

    def empty_cache(self) -> None: ...


class CardMemory:
    """The card that this process uses."""

    def __init__(self) -> None:
        self.index, self.fraction = 0, 1.0
        self.plan, self.capacity = CardPlan(), 0
        self.allocator = Allocator()
        self.peak_allocated = self.peak_reserved = self.retries = self.operations = 0
        self.live: dict[int, tuple[int | None, weakref.ref[Any]]] = {}
        """Address of each storage on the card → its block, and what notices its end."""
        self.pinned: dict[int, weakref.ref[Any]] = {}
        """The same of page-locked storages of the host."""
        self._nvml: SimulatedCard | None = None
        self._published: mmap.mmap | None = None
        self._others_bytes, self._others_read = 0, 0.0

    def use(self, index: int) -> None:
        """Make a card this process's own, as the creation of a CUDA context does. ``index``: of the visible ones."""
        if self._nvml is not None and index == self.index:
            return
        self.index, card = index, visible_cards()[index]
        self.plan = read_plans(simulated_folder())[card]
        self._nvml = SimulatedCard(card, self.plan)
        self.capacity = self._nvml.capacity
        file = os.open(usage_file(card), os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, 8)
        self._published = mmap.mmap(file, 8)
        os.close(file)
        self._publish()

    @property
    def is_used(self) -> bool:
        return self._nvml is not None

    @property
    def free_bytes(self) -> int:
        """Bytes of the card that no process has."""
        self._read_others(0.0)
        return max(0, self.capacity - self._others_bytes - self._own_bytes())

    def add(self, storage: Any, size: int | None = None) -> None:
        """Count a storage that is new on the card or has another size. Raises torch.OutOfMemoryError."""
        key, size = storage._cdata, storage.nbytes() if size is None else size
        block, reference = self.live.get(key) or (None, weakref.ref(storage, lambda _: self._remove(key)))
        if block is not None:
            self.allocator.free(block)
        self.live[key] = None, reference
        if size:
            self.live[key] = self._allocate(size), reference
        self.peak_allocated = max(self.peak_allocated, self.allocator.allocated_bytes)
        self.peak_reserved = max(self.peak_reserved, self.allocator.reserved_bytes)
        self._publish()

    def check_room(self, size: int) -> None:
        """Raise torch.OutOfMemoryError if a block of this size has no room."""
        self.allocator.free(self._allocate(size))

    def run_into_errors(self) -> None:
        """Raise the error that the plan of the card has for this moment. Called before each operation."""
        self.operations += 1
        if self.plan.error is not None and self.operations > self.plan.error_after:
            import torch

            raise torch.AcceleratorError(self.plan.error)

    def pin(self, storage: Any) -> None:
        key = storage._cdata
        self.pinned[key] = weakref.ref(storage, lambda _: self.pinned.pop(key, None))

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocator.allocated_bytes, self.allocator.reserved_bytes

    def _allocate(self, size: int) -> int:
        self._read_others(_READ_SECONDS)
        block = self.allocator.allocate(size, self._limit())
        if block is None:  # torch frees what it caches and tries again
            self.retries += 1
            self.allocator.empty_cache()
            self._read_others(0.0)
            block = self.allocator.allocate(size, self._limit())
        if block is None:
            raise self._out_of_memory(size)
        return block

    def _limit(self) -> int:
        """Bytes that the allocator may reserve."""
        return min(int(self.capacity * self.fraction), self.capacity - self._others_bytes - self.plan.context_bytes)

    def _read_others(self, seconds: float) -> None:
        """Read what other processes have on the card, unless that was done within the last ``seconds``."""
        if self._nvml is not None and time.monotonic() - self._others_read >= seconds:
            self._others_bytes = sum(size for process, size in self._nvml.processes if process != os.getpid())
            self._others_read = time.monotonic()

    def _remove(self, key: int) -> None:
        block, _ = self.live.pop(key, (None, None))
        if block is not None:
            self.allocator.free(block)
            self._publish()

    def _own_bytes(self) -> int:
        return self.plan.context_bytes + self.allocator.reserved_bytes

    def _publish(self) -> None:
        if self._published is not None:
            self._published[:] = self._own_bytes().to_bytes(8, sys.byteorder)

    def _out_of_memory(self, size: int) -> Exception:
        """c10/cuda/CUDACachingAllocator.cpp, malloc: the text of torch 2.11 to 2.13."""
        import torch

        allocated, reserved = self.allocator.allocated_bytes, self.allocator.reserved_bytes
        allowed = f"{_in_units(int(self.capacity * self.fraction))} allowed; " if self.fraction < 1 else ""
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {_in_units(size)}. GPU {self.index} has a total capacity of "
            f"{_in_units(self.capacity)} of which {_in_units(self.free_bytes)} is free. Including non-PyTorch memory, "
            f"this process has {_in_units(self._own_bytes())} memory in use. {allowed}Of the allocated memory "
            f"{_in_units(allocated)} is allocated by PyTorch, and {_in_units(reserved - allocated)} is reserved by "
            "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
            "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


def _in_units(size: int) -> str:
    """c10/cuda/CUDACachingAllocator.cpp, format_size."""
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size > 2**exponent:
            return f"{size / 2**exponent:.2f} {unit}"
    return f"{size} bytes"


CARD = CardMemory()
