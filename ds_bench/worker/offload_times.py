"""What offloading costs in a step: CPU Adam, waiting for the disk, copies between host and device.

DeepSpeed's own code is observed, not replaced: while an :class:`OffloadTimer` is active, the methods through which it
offloads are timed. Used only in steps after the measured window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any, Self
from unittest import mock

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from ..records.schema import OffloadTimes

_COPY_METHODS = ("copy_", "to", "cpu", "cuda")
_READS = ("async_pread", "sync_pread", "pread")
_WRITES = ("async_pwrite", "sync_pwrite", "pwrite")


class DiskUse:
    """Bytes that DeepSpeed's swapping asked the disk for, and the time that it took."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.written_bytes = 0
        self.wait_seconds = 0.0
        """Time that training stood still: in calls that start operations or wait for them."""
        self.busy_seconds = 0.0
        """Time with operations under way, each moment once."""
        self._outstanding: set[int] = set()
        self._busy_since = 0.0

    def begin(self, handle: int, now: float) -> None:
        if not self._outstanding:
            self._busy_since = now
        self._outstanding.add(handle)

    def end(self, handle: int, now: float) -> None:
        if handle in self._outstanding:
            self._outstanding.remove(handle)
            if not self._outstanding:
                self.busy_seconds += now - self._busy_since

    def end_all(self, now: float) -> None:
        for handle in list(self._outstanding):
            self.end(handle, now)


class TimedHandle:
    """Stands for a handle of DeepSpeed's async_io op, and counts what is asked of it in a :class:`DiskUse`."""

    def __init__(self, handle: Any, disk: DiskUse) -> None:
        self._handle, self._disk = handle, disk

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._handle, name)
        if name not in (*_READS, *_WRITES, "wait"):
            return method

        def timed(*arguments: Any, **keywords: Any) -> Any:
            disk, start = self._disk, time.perf_counter()
            if name != "wait":
                disk.begin(id(self), start)
                size = arguments[0].nbytes
                if name in _READS:
                    disk.read_bytes += size
                else:
                    disk.written_bytes += size
            result = method(*arguments, **keywords)
            end = time.perf_counter()
            # An asynchronous operation ends when its handle is waited for.
            if name == "wait" or name.startswith("sync"):
                disk.end(id(self), end)
            disk.wait_seconds += end - start
            return result

        return timed


class OffloadTimer:
    """Times CPU Adam, the disk and, where asked, copies between host and device, while it is active.

    ``synchronize``: waits for the device; each copy between host and device is then made synchronous, so that its time
    is its own. None: copies are not timed.
    """

    def __init__(self, engine: Any, synchronize: Callable[[], None] | None = None) -> None:
        self._engine = engine
        self._synchronize = synchronize
        self._stack = ExitStack()
        self.disk = DiskUse()
        self.swaps = False
        """Whether DeepSpeed swaps to a disk here."""
        self.cpu_adam_seconds = 0.0
        self.cpu_adam_bytes = 0
        self.copy_seconds = 0.0
        """In copies between host and device."""

    def __enter__(self) -> Self:
        optimizer = getattr(self._engine.optimizer, "optimizer", None)
        if isinstance(optimizer, DeepSpeedCPUAdam):
            for name in ("step", "step_subgroup"):
                timed = self._timed_adam(optimizer, getattr(optimizer, name))
                self._stack.enter_context(mock.patch.object(optimizer, name, timed))
        timed_handles: dict[int, TimedHandle] = {}
        for owner in _swappers(self._engine):
            for name, value in list(vars(owner).items()):
                if not isinstance(value, type) and hasattr(value, "async_pread"):
                    # One stand-in per handle, however many attributes hold it: a wait ends what any of them began.
                    handle = timed_handles.setdefault(id(value), TimedHandle(value, self.disk))
                    self._stack.enter_context(mock.patch.object(owner, name, handle))
        self.swaps = bool(timed_handles)
        if self._synchronize is not None:
            for name in _COPY_METHODS:
                timed = self._timed_copy(name, getattr(torch.Tensor, name), self._synchronize)
                self._stack.enter_context(mock.patch.object(torch.Tensor, name, timed))
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()
        # Operations that nobody has waited for yet count until here.
        self.disk.end_all(time.perf_counter())

    def times(self, steps: int) -> OffloadTimes:
        """Return the mean of each of ``steps`` steps."""
        disk, found = self.disk, dict[str, float]()
        if self.cpu_adam_bytes:
            found |= {"cpu_adam_seconds": self.cpu_adam_seconds, "cpu_adam_bytes": self.cpu_adam_bytes}
        if self.swaps:
            found |= {"disk_read_bytes": disk.read_bytes, "disk_written_bytes": disk.written_bytes}
            found |= {"disk_wait_seconds": disk.wait_seconds, "disk_busy_seconds": disk.busy_seconds}
        return OffloadTimes(**{name: value / steps for name, value in found.items()})

    def _timed_adam(self, optimizer: DeepSpeedCPUAdam, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            size = cpu_adam_bytes(optimizer)
            start = time.perf_counter()
            result = step(*arguments, **keywords)
            self.cpu_adam_seconds += time.perf_counter() - start
            self.cpu_adam_bytes += size
            return result

        return timed

    def _timed_copy(self, name: str, method: Callable[..., Any], synchronize: Callable[[], None]) -> Callable[..., Any]:
        @wraps(method)
        def timed(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            if not _changes_device(name, tensor, arguments, keywords):
                return method(tensor, *arguments, **keywords)
            synchronize()
            start = time.perf_counter()
            result = method(tensor, *arguments, **keywords)
            synchronize()
            self.copy_seconds += time.perf_counter() - start
            return result

        return timed


def cpu_adam_bytes(optimizer: DeepSpeedCPUAdam) -> int:
    """Bytes that the optimizer's next step moves between memory and processor.

    Per element it reads weight, gradient and both moments and writes weight and moments
    (csrc/adam/cpu_adam_impl.cpp): 28 bytes where all are fp32.
    """
    total = 0
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                moment = 4 if optimizer.fp32_optimizer_states else weight.element_size()
                each = 2 * weight.element_size() + weight.grad.element_size() + 4 * moment
                total += each * weight.numel()
    return total


def _swappers(engine: Any) -> Iterator[Any]:
    """The objects of the engine through which DeepSpeed swaps optimizer states, gradients and parameters."""
    optimizer_swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    if optimizer_swapper is not None:
        yield optimizer_swapper
        yield optimizer_swapper.gradient_swapper
    swappers = (getattr(parameter, "nvme_swapper", None) for parameter in engine.module.parameters())
    yield from {id(swapper): swapper for swapper in swappers if swapper is not None}.values()


def _changes_device(name: str, tensor: torch.Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether a method of a tensor copies it to, or from, a device of another type."""
    if name == "copy_":
        source = arguments[0] if arguments else keywords["src"]
        return isinstance(source, torch.Tensor) and source.device.type != tensor.device.type
    if name == "to":
        # torch's own parser: a device may come by place, by name, or with another tensor.
        device, *_ = torch._C._nn._parse_to(*arguments, **keywords)
        return device is not None and device.type != tensor.device.type
    return tensor.device.type != name
