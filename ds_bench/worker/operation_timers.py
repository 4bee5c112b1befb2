"""Timers for the collectives, CPU Adam, disk I/O and host-device copies within a step.

DeepSpeed's own code is observed, not replaced: while a timer is active, the methods through which DeepSpeed
communicates or offloads are timed. Used only in steps after the measured window.

DeepSpeed's own communication logger (``deepspeed.comm.comms_logger``, 0.19.8) is not used. Its time for an operation
is the running total of all operations with that name (``Timer.elapsed(reset=False)`` in comm/comm.py); it does not see
``all_gather_coalesced``; it ends the process with exit code 0 when it meets an operation that it does not know, such as
``all_gather_object``; and on the CPU accelerator it times only the launch of an operation that overlaps with
training, as at stage 3. The timers here cover everything that passes through DeepSpeed's backend, below that logger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any, Self
from unittest import mock

import deepspeed.comm.comm
import torch
import torch.distributed
from deepspeed.ops.adam import DeepSpeedCPUAdam

from ..records.schema import CommunicationOperation, OffloadTimes
from .library_versions import step_methods

_COLLECTIVES = (
    "all_reduce",
    "inference_all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "broadcast",
    "broadcast_object_list",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_base",
    "all_gather_coalesced",
    "all_gather_object",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
)
"""Methods of DeepSpeed's backend (comm/torch.py). Sends and receives are left out: waiting for each would deadlock
two ranks that send to each other."""
_COPY_METHODS = ("copy_", "to", "cpu", "cuda")
_READS = ("async_pread", "sync_pread", "pread")
_WRITES = ("async_pwrite", "sync_pwrite", "pwrite")


class CommunicationTimer:
    """Times every collective operation of DeepSpeed while it is active.

    Each is waited for, including operations that DeepSpeed overlaps with training, so that its time includes nothing
    else. ``synchronize`` waits for the device.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._stack = ExitStack()
        self._inside = False
        self._calls: list[tuple[str, int, float]] = []  # name, bytes, seconds
        self.seconds = 0.0

    def __enter__(self) -> Self:
        backend = deepspeed.comm.comm.cdb
        for name in _COLLECTIVES:
            if hasattr(backend, name):
                timed = self._timed(name, getattr(backend, name))
                self._stack.enter_context(mock.patch.object(backend, name, timed))
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _timed(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            if self._inside:
                return operation(*arguments, **keywords)
            self._inside = True
            try:
                # Wait for the device's earlier work, which is not part of the operation's time.
                self._synchronize()
                start = time.perf_counter()
                work = operation(*arguments, **keywords)
                # Asynchronous operations return a handle, synchronous ones None.
                if hasattr(work, "wait"):
                    work.wait()
                self._synchronize()
                seconds = time.perf_counter() - start
            finally:
                self._inside = False
            self.seconds += seconds
            self._calls.append((name, operation_bytes(name, [*arguments, *keywords.values()]), seconds))
            return work

        return timed

    def operations(self, steps: int, device: torch.device) -> tuple[CommunicationOperation, ...]:
        """Return the mean of each kind of operation per step, the largest number of bytes first.

        Every rank must call it. A rank's wait is the sum over calls of how much longer it took than the fastest
        rank; unknown if ranks made different numbers of calls.
        """
        # One reduction gives both ends: the largest of the negated counts is the smallest count, negated. They add up
        # to 0 only if all ranks made the same number of calls.
        counts = torch.tensor([len(self._calls), -len(self._calls)], device=device)
        torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)
        waits: list[float] | None = None
        if counts.sum().item() == 0:
            seconds = torch.tensor([seconds for _, _, seconds in self._calls], dtype=torch.float64, device=device)
            fastest = seconds.clone()
            torch.distributed.all_reduce(fastest, torch.distributed.ReduceOp.MIN)
            waits = (seconds - fastest).tolist()
        operations = []
        for name in dict.fromkeys(name for name, _, _ in self._calls):
            own = [index for index, call in enumerate(self._calls) if call[0] == name]
            operations.append(
                CommunicationOperation(
                    name=name,
                    count=len(own) / steps,
                    bytes=sum(self._calls[index][1] for index in own) / steps,
                    seconds=sum(self._calls[index][2] for index in own) / steps,
                    wait_seconds=None if waits is None else sum(waits[index] for index in own) / steps,
                )
            )
        return tuple(sorted(operations, key=lambda operation: operation.bytes, reverse=True))


def operation_bytes(name: str, arguments: Iterable[Any]) -> int:
    """Size of the whole tensor of an operation: all ranks' parts, the largest of its arguments.

    An all-reduce counts twice, as a reduce-scatter and an all-gather of the same tensor (Rajbhandari et al., "ZeRO",
    2020, section 7). 0 for objects and barriers.
    """
    whole = max(map(_size, arguments), default=0)
    return 2 * whole if "all_reduce" in name else whole


def _size(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.nbytes
    return sum(map(_size, argument)) if isinstance(argument, (list, tuple)) else 0


class DiskUse:
    """Bytes that DeepSpeed's swapping reads from and writes to the disk, and the time that it takes."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.written_bytes = 0
        self.wait_seconds = 0.0
        """Time during which training stood still: in calls that start operations or wait for them."""
        self.busy_seconds = 0.0
        """Time with operations under way, each moment counted once."""
        self._outstanding: set[int] = set()
        self._busy_since = 0.0

    def begin(self, handle: int, now: float) -> None:
        if not self._outstanding:
            self._busy_since = now
        self._outstanding.add(handle)

    def end(self, handle: int | None, now: float) -> None:
        """End the operations that a handle began; None for all handles."""
        left = self._outstanding - {handle} if handle is not None else set[int]()
        if self._outstanding and not left:
            self.busy_seconds += now - self._busy_since
        self._outstanding = left


class TimedHandle:
    """Stands in for a handle of DeepSpeed's async_io op, and records its operations in a :class:`DiskUse`."""

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
    """Times CPU Adam, the disk and, if requested, copies between host and device, while it is active.

    ``synchronize``: waits for the device; each copy between host and device is then made synchronous, so that its time
    includes nothing else. None: copies are not timed.
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
            for name in step_methods(optimizer):
                timed = self._timed_adam(optimizer, getattr(optimizer, name))
                self._stack.enter_context(mock.patch.object(optimizer, name, timed))
        timed_handles: dict[int, TimedHandle] = {}
        # The objects through which DeepSpeed swaps optimizer states, gradients and parameters.
        swappers = [getattr(each, "nvme_swapper", None) for each in self._engine.module.parameters()]
        if (swapper := getattr(self._engine.optimizer, "optimizer_swapper", None)) is not None:
            swappers += [swapper, swapper.gradient_swapper]
        for owner in {id(each): each for each in swappers if each is not None}.values():
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
        # Operations that nobody has waited for yet count as busy up to this moment.
        self.disk.end(None, time.perf_counter())

    def _timed_adam(self, optimizer: DeepSpeedCPUAdam, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            size, start = cpu_adam_bytes(optimizer), time.perf_counter()
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

    def times(self, steps: int) -> OffloadTimes:
        """Return the means per step, over ``steps`` steps."""
        disk, found = self.disk, dict[str, float]()
        if self.cpu_adam_bytes:
            found |= {"cpu_adam_seconds": self.cpu_adam_seconds, "cpu_adam_bytes": self.cpu_adam_bytes}
        if self.swaps:
            found |= {"disk_read_bytes": disk.read_bytes, "disk_written_bytes": disk.written_bytes}
            found |= {"disk_wait_seconds": disk.wait_seconds, "disk_busy_seconds": disk.busy_seconds}
        return OffloadTimes(**{name: value / steps for name, value in found.items()})


def cpu_adam_bytes(optimizer: DeepSpeedCPUAdam) -> int:
    """Bytes that the optimizer's next step moves between memory and processor.

    Per element it reads weight, gradient and both moments and writes weight and moments
    (csrc/adam/cpu_adam_impl.cpp): 28 bytes if all are fp32.
    """
    total = 0
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                moment = 4 if optimizer.fp32_optimizer_states else weight.element_size()
                each = 2 * weight.element_size() + weight.grad.element_size() + 4 * moment
                total += each * weight.numel()
    return total


def _changes_device(name: str, tensor: torch.Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether a tensor method copies between devices of different types."""
    if name == "copy_":
        source = arguments[0] if arguments else keywords["src"]
        return isinstance(source, torch.Tensor) and source.device.type != tensor.device.type
    if name == "to":
        # torch's own parser: a device may be given by position, by keyword, or by another tensor.
        device, *_ = torch._C._nn._parse_to(*arguments, **keywords)
        return device is not None and device.type != tensor.device.type
    return tensor.device.type != name
