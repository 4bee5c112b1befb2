"""The memory of this rank's card: the storages on it, the segments that torch's caching allocator would reserve for
them, and its error if they do not fit.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
import weakref
from typing import Any

from ds_bench.prediction.torch_allocators import Block, CachingAllocator, OutOfMemoryError

from . import CardPlan, read_plans, simulated_folder, usage_file, visible_cards
from .nvml import SimulatedCard

_READ_SECONDS = 0.2
"""How often the memory of other processes is read; always before an out-of-memory error."""


class CardMemory:
    """The card that this process uses."""

    def __init__(self) -> None:
        self.index, self.fraction = 0, 1.0
        self.plan, self.capacity = CardPlan(), 0
        self.allocator = CachingAllocator()
        self.stream = self.operations = 0
        """The stream that memory is allocated for now, 0 for the default one, and how many operations there were."""
        self.events: list[tuple[Any, ...]] | None = None
        """A program that wants them sets a list: ``(block, bytes, stream)`` of each allocation, ``(block,)`` of each
        free, and ``()`` when the cache is released. A block's number may be used again once it is free."""
        self.live: dict[int, tuple[Block | None, int, weakref.ref[Any]]] = {}
        """Address of each storage on the card → its block, its bytes, and the reference that notices its end."""
        self.pinned: dict[int, weakref.ref[Any]] = {}
        """The same for page-locked storages of the host."""
        self._nvml: SimulatedCard | None = None
        self._published: mmap.mmap | None = None
        self._others_bytes, self._others_read = 0, 0.0

    def use(self, index: int) -> None:
        """Make a card this process's own, as the creation of a CUDA context does. ``index``: among the visible ones."""
        if self._nvml is not None and index == self.index:
            return
        self.index, card = index, visible_cards()[index]
        self.plan = read_plans(simulated_folder())[card]
        settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        self.allocator = CachingAllocator(expandable_segments="expandable_segments:True" in settings)
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
        """Bytes of the card that no process uses."""
        self._read_others(0.0)
        return max(0, self.capacity - self._others_bytes - self._own_bytes())

    def add(self, storage: Any, size: int | None = None) -> None:
        """Count a storage that is new on the card or has another size. Raises torch.OutOfMemoryError."""
        key, size = storage._cdata, storage.nbytes() if size is None else size
        known = self.live.get(key)
        if known is not None and known[1] == size:
            return
        block, _, reference = known or (None, 0, weakref.ref(storage, lambda _: self._remove(key)))
        self.release(block)
        self.live[key] = None, 0, reference
        if size:
            self.live[key] = self.take(size), size, reference

    def take(self, size: int) -> Block:
        """Allocate memory on the card. Raises torch.OutOfMemoryError."""
        block = self._allocate(size)
        if self.events is not None:
            self.events.append((id(block), size, self.stream))
        self._publish()
        return block

    def release(self, *blocks: Block | None) -> None:
        for block in blocks:
            if block is not None:
                if self.events is not None:
                    self.events.append((id(block),))
                self.allocator.free(block)
        self._publish()

    def empty_cache(self) -> None:
        if self.events is not None:
            self.events.append(())
        self.allocator.empty_cache()
        self._publish()

    def check_room(self, size: int) -> None:
        """Raise torch.OutOfMemoryError if a block of this size does not fit."""
        self.allocator.free(self._allocate(size))

    def run_into_errors(self) -> None:
        """Raise the error that the card's plan sets for this moment. Called before each operation."""
        self.operations += 1
        if self.plan.error is not None and self.operations > self.plan.error_after:
            import torch

            raise torch.AcceleratorError(self.plan.error)

    def pin(self, storage: Any) -> None:
        key = storage._cdata
        self.pinned[key] = weakref.ref(storage, lambda _: self.pinned.pop(key, None))

    def reset_peaks(self) -> None:
        self.allocator.peak_allocated_bytes = self.allocator.allocated_bytes
        self.allocator.peak_reserved_bytes = self.allocator.reserved_bytes

    def _allocate(self, size: int) -> Block:
        for seconds in (_READ_SECONDS, 0.0):
            self._read_others(seconds)
            self.allocator.capacity_bytes = self._limit()
            with contextlib.suppress(OutOfMemoryError):
                return self.allocator.allocate(size, self.stream)
        raise self._out_of_memory(size)

    def _limit(self) -> int:
        """Bytes that the allocator may reserve."""
        return min(int(self.capacity * self.fraction), self.capacity - self._others_bytes - self.plan.context_bytes)

    def _read_others(self, seconds: float) -> None:
        """Read how much other processes use on the card, unless that was done within the last ``seconds``."""
        if self._nvml is not None and time.monotonic() - self._others_read >= seconds:
            self._others_bytes = sum(size for process, size in self._nvml.processes if process != os.getpid())
            self._others_read = time.monotonic()

    def _remove(self, key: int) -> None:
        self.release(self.live.pop(key, (None,))[0])

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
