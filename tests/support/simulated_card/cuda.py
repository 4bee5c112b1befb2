"""torch.cuda on a simulated card, gloo in place of NCCL, and whatever else in torch requires a GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import visible_cards
from .memory import CARD
from .nvml import simulated_card


class Event:
    """A moment on the host's clock, since operations have ended when their call returns."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._is_timed, self._moment = enable_timing, -1.0

    def record(self, *_: Any) -> None:
        self._moment = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        if not (self._is_timed and end_event._is_timed) or -1.0 in (self._moment, end_event._moment):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True' and recorded.")
        return (end_event._moment - self._moment) * 1000.0

    def query(self) -> bool:
        return True

    def wait(self, *_: Any) -> None: ...

    synchronize = wait


_stream_numbers = itertools.count()


class Stream:
    """Runs everything immediately; memory that is allocated within its context belongs to it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = self.stream_id = next(_stream_numbers)
        self._outer: list[int] = []

    def __enter__(self) -> Stream:
        self._outer.append(CARD.stream)
        CARD.stream = self.stream_id
        return self

    def __exit__(self, *_: object) -> None:
        CARD.stream = self._outer.pop()

    def synchronize(self, *_: Any) -> None: ...

    wait_event = wait_stream = synchronize

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True


class Device:
    """The context manager ``torch.cuda.device``: a rank has one card."""

    def __init__(self, *_: Any) -> None: ...

    __enter__ = __exit__ = __init__


def _always(value: Any) -> Callable[..., Any]:
    """A separate function for each use, since torch._dynamo has a table of torch.cuda's functions."""
    return lambda *_, **__: value


def _calling(function: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *_, **__: function()


def install(torch: Any) -> None:
    torch.version.cuda = "13.0"
    for name, value in {**_devices(torch), **_memory(), **_random_numbers(torch)}.items():
        for module in (torch.cuda, torch.cuda.memory):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    memory = torch.cuda.memory
    memory._record_memory_history = _always(None)
    memory._set_allocator_settings = _always(None)
    memory._snapshot = _always({"segments": [], "device_traces": [[]]})
    memory._dump_snapshot = lambda filename="dump_snapshot.pickle": Path(filename).write_bytes(b"simulated")
    torch.cuda.profiler.start, torch.cuda.profiler.stop = _always(None), _always(None)
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = _always(0), _always(0)
    torch.cuda.nccl.version = _always((2, 27, 5))
    _replace_nccl(torch)
    profile = torch.profiler.profile.__init__

    def profile_without_kernels(self: Any, *args: Any, activities: Any = None, **kwargs: Any) -> None:
        profile(self, *args, activities=activities and [torch.profiler.ProfilerActivity.CPU], **kwargs)

    torch.profiler.profile.__init__ = profile_without_kernels

    class autocast(torch.autocast):  # type: ignore[misc,name-defined]  # noqa: N801
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast = torch.amp.autocast = torch.amp.autocast_mode.autocast = autocast


def _devices(torch: Any) -> dict[str, Any]:
    stream = Stream()

    def index_of(device: Any) -> int:
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        return CARD.index if index is None else int(index)

    def properties(device: Any = None) -> Any:
        card = simulated_card(visible_cards()[index_of(device)])
        major, minor = card.recorded("nvmlDeviceGetCudaComputeCapability")
        return SimpleNamespace(
            name=card.recorded("nvmlDeviceGetName"), total_memory=card.capacity, major=major, minor=minor,
            multi_processor_count=132, warp_size=32, gcnArchName="",
        )  # fmt: skip

    def set_device(device: Any) -> None:
        if index_of(device) >= len(visible_cards()):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        CARD.use(index_of(device))
        torch.cuda._enter_simulation()

    return {
        "is_available": lambda: bool(visible_cards()),
        "device_count": lambda: len(visible_cards()),
        "current_device": lambda: CARD.index,
        "set_device": set_device,
        "is_initialized": lambda: CARD.is_used,
        "get_device_properties": properties,
        "synchronize": _calling(CARD.run_into_errors),
        "_lazy_call": lambda call, **_: call(),
        "init": _always(None),
        "_lazy_init": _always(None),
        "_is_in_bad_fork": _always(False),
        "get_arch_list": _always(["sm_80", "sm_90"]),
        "is_bf16_supported": _always(True),
        "Event": Event,
        "Stream": Stream,
        "stream": lambda given: given or stream,
        "set_stream": _always(None),
        "current_stream": _always(stream),
        "default_stream": _always(stream),
        "is_current_stream_capturing": _always(False),
        "device": Device,
        "_DeviceGuard": Device,
        "device_of": Device,
    }


def _memory() -> dict[str, Any]:
    """Only what torch calls in C++; its other functions read these statistics (torch/cuda/memory.py)."""

    def statistics(*_: Any, **__: Any) -> dict[str, Any]:
        sizes = {
            "allocated_bytes": (CARD.allocator.allocated_bytes, CARD.allocator.peak_allocated_bytes),
            "reserved_bytes": (CARD.allocator.reserved_bytes, CARD.allocator.peak_reserved_bytes),
        }
        found = {name: {"all": {"current": now, "peak": peak}} for name, (now, peak) in sizes.items()}
        return {**found, "num_alloc_retries": CARD.allocator.retries}

    def limit(fraction: float, *_: Any, **__: Any) -> None:
        CARD.fraction = fraction

    return {
        "mem_get_info": lambda *_, **__: (CARD.free_bytes, CARD.capacity),
        "memory_stats_as_nested_dict": statistics,
        "reset_peak_memory_stats": _calling(CARD.reset_peaks),
        "memory_summary": lambda *_, **__: f"{CARD.allocator.allocated_bytes} bytes allocated",
        "set_per_process_memory_fraction": limit,
        "empty_cache": CARD.empty_cache,
    }


def _random_numbers(torch: Any) -> dict[str, Any]:
    return {
        "manual_seed": _always(None),  # torch.manual_seed has set the only generator
        "manual_seed_all": _always(None),
        "initial_seed": _calling(torch.initial_seed),
        "get_rng_state": _calling(torch.get_rng_state),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "default_generators": tuple(torch.default_generator for _ in visible_cards()),
    }


def _replace_nccl(torch: Any) -> None:
    groups = torch.distributed.distributed_c10d

    def with_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None)
            kwargs |= {"backend": "gloo"} if kwargs.get("backend") == "nccl" else {}
            return original(*("gloo" if each == "nccl" else each for each in args), **kwargs)

        return make

    for name in ("init_process_group", "new_group"):
        replaced = with_gloo(getattr(groups, name))
        setattr(groups, name, replaced)
        setattr(torch.distributed, name, replaced)
    groups.is_nccl_available = torch.distributed.is_nccl_available = _always(True)
    groups._get_object_coll_device = _always("cuda")
