"""Communication of DeepSpeed's engine: time, bytes and number of its operations, each timed by itself.

DeepSpeed's own communication logger (``deepspeed.comm.comms_logger``, 0.19.8) is not used for times. Its time of an
operation is the sum of all so far of that name (``Timer.elapsed(reset=False)`` in comm/comm.py); it does not see
``all_gather_coalesced``; it ends the process with exit code 0 at an operation that it does not know, such as
``all_gather_object``; and on the CPU accelerator it times only the launch of an operation that overlaps with
training, as at stage 3. Counted here is what passes through DeepSpeed's backend, below that logger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any, Self
from unittest import mock

import deepspeed.comm.comm
import torch
import torch.distributed

from ..records.schema import CommunicationOperation

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
"""Methods of DeepSpeed's backend (comm/torch.py). Sends and receives are left out: waiting for each would lock two
ranks that send to each other."""


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    bytes: int
    seconds: float


class CommunicationTimer:
    """Times every collective operation of DeepSpeed while it is active.

    Each is waited for, including operations that DeepSpeed overlaps with training, so that its time is its own and
    nothing overlaps. ``synchronize`` waits for the device.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._stack = ExitStack()
        self._inside = False
        self._calls: list[_Call] = []
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
                self._synchronize()
                # Only after the device has finished what came before, which is not the operation's time.
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
            self._calls.append(_Call(name, operation_bytes(name, [*arguments, *keywords.values()]), seconds))
            return work

        return timed

    def operations(self, steps: int, device: torch.device) -> tuple[CommunicationOperation, ...]:
        """What each kind of operation took in a step, on average; the largest number of bytes first.

        Every rank must call it: a rank waited for others as long as it took longer than the fastest rank.
        """
        fastest = _fastest_of_ranks([call.seconds for call in self._calls], device)
        return summarise_calls(self._calls, fastest, steps)


def summarise_calls(
    calls: Sequence[_Call], fastest: Sequence[float] | None, steps: int
) -> tuple[CommunicationOperation, ...]:
    """Sums up calls by kind. ``fastest``: seconds of each call on the rank that took least; None if not known."""
    operations = []
    for name in dict.fromkeys(call.name for call in calls):
        own = [index for index, call in enumerate(calls) if call.name == name]
        seconds = sum(calls[index].seconds for index in own) / steps
        operations.append(
            CommunicationOperation(
                name=name,
                count=len(own) / steps,
                bytes=sum(calls[index].bytes for index in own) / steps,
                seconds=seconds,
                wait_seconds=None
                if fastest is None
                else sum(calls[index].seconds - fastest[index] for index in own) / steps,  # none of them below 0
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


def _fastest_of_ranks(seconds: list[float], device: torch.device) -> list[float] | None:
    """The least of all ranks, call by call; None if ranks made different numbers of calls."""
    # One reduction gives both ends: the largest of the negated numbers is the smallest number. They add up to 0 only if
    # all ranks made equally many calls, so that calls can be compared by their place.
    counts = torch.tensor([len(seconds), -len(seconds)], device=device)
    torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)
    if counts.sum().item() != 0:
        return None
    least = torch.tensor(seconds, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    values: list[float] = least.tolist()
    return values
