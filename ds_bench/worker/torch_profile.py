"""The profile ``torch``: a trace, a table of operators by device time, and memory by category over one more step.

The trace and the table are of steps without stacks and shapes, which slow a step down; memory needs both and has a step
of its own.
"""

from __future__ import annotations

import gzip
import itertools
import json
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # whose documentation names it
from torch.profiler import ProfilerActivity

from .profiled_steps import MOST_ROWS, Findings, ProfiledSteps

_ROWS_IN_FILE = 100
_STEP = "optimizer step"
"""Marks each step in the trace. Its own time is that outside operators."""
_OUTSIDE = "(Python and waiting, outside operators)"
_NO_OPERATOR = "(kernels that no operator launched)"
"""Those of DeepSpeed's own ops and of compiled code among them."""
_CATEGORIES = (
    "parameters",
    "optimizer states",
    "inputs",
    "temporary",
    "activations",
    "gradients",
    "autograd",
    "unknown",
)
"""Categories of memory in the order of torch's timeline (torch/profiler/_memory_profiler.py)."""


def observe(steps: ProfiledSteps) -> Findings:
    """Takes the steps under torch.profiler, and one further step for the memory timeline."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if steps.on_cuda else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps.count):
            with torch.profiler.record_function(_STEP):
                steps.step()
        steps.synchronize()
    # A sign of life before the trace is written, which may take long.
    steps.trainer.heartbeat.beat("inspect")
    profiler.export_chrome_trace(str(steps.file("trace.json.gz")))
    device = "device" if steps.on_cuda else "cpu"
    averages = profiler.key_averages()
    table = averages.table(
        sort_by=f"self_{device}_time_total", row_limit=_ROWS_IN_FILE, max_name_column_width=80, max_src_column_width=80
    )
    steps.file("txt").write_text(table, encoding="utf-8")
    lines = lines_by_time(averages, "device" if steps.on_cuda else "CPU", steps.count)
    with profile_memory(activities) as profiler:
        steps.step()
        steps.synchronize()
    return Findings(lines=(*lines, export_timeline(profiler, steps)))


def profile_memory(activities: Any = None) -> torch.profiler.profile:
    """A profiler that sees every allocation, and who makes it."""
    return torch.profiler.profile(
        activities=activities or [ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_stack=True
    )


def export_timeline(profiler: torch.profiler.profile, steps: ProfiledSteps) -> str:
    """Writes the bytes of each category over time, as torch exports them. Returns a line with those of the peak.

    torch refuses where operators write to one tensor twice, as those of stage 3 do: then the bytes are not told apart.
    """
    path = steps.file("memory_timeline.json.gz")
    device = steps.trainer.first_device
    try:
        with warnings.catch_warnings():  # deprecated, and for the CPU without a successor
            warnings.simplefilter("ignore", FutureWarning)
            profiler.export_memory_timeline(str(path), str(device))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            _, sizes = json.load(file)
    except AssertionError:
        times, totals = _allocated_over_time(profiler, device)
        with gzip.open(path, "wt", encoding="utf-8") as file:
            # In the form of torch's own file, with a single category.
            json.dump([times, [[0, size] for size in totals]], file)
        return f"peak of tensors above what there was before: {max(totals, default=0) / 2**20:,.1f} MB"
    highest: list[int] = max(sizes, key=sum, default=[])
    # The first number of each row is 0: categories begin with the second (_coalesce_timeline).
    by_category = sorted(zip(_CATEGORIES, highest[1:], strict=False), key=lambda pair: -pair[1])
    parts = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in by_category if size >= 2**20 / 20)
    return f"peak of tensors {sum(highest) / 2**20:,.1f} MB: {parts}"


def _allocated_over_time(profiler: torch.profiler.profile, device: torch.device) -> tuple[list[int], list[int]]:
    """Microseconds, and bytes allocated less freed since the profiler began."""
    found: Any = profiler.profiler
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    events = [event for event in events if event.device_type().name == device.type.upper()]
    events.sort(key=lambda event: event.start_ns())
    totals = itertools.accumulate(event.nbytes() for event in events)
    return [event.start_ns() // 1000 for event in events], list(totals)


def lines_by_time(averages: Sequence[Any], device: str, step_count: int) -> tuple[str, ...]:
    """The operators that take most time of their own: milliseconds per step, share, calls per step, name."""
    on_device = device == "device"

    def milliseconds(event: Any) -> float:
        return float(event.self_device_time_total if on_device else event.self_cpu_time_total) / 1000

    # A kernel is in the list by itself, and in the time of the operator that launched it; a mark is there with the time
    # of all kernels within it (torch/autograd/profiler_util.py, _build_table).
    operators = [event for event in averages if event.device_type == DeviceType.CPU]
    kernels = [event for event in averages if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    rows = [
        (milliseconds(event), f"{event.count / step_count:10,.0f}", _OUTSIDE if event.key == _STEP else event.key)
        for event in operators
        if milliseconds(event) or not on_device
    ]
    total = sum(own for own, _, _ in rows)
    # The two sums differ by rounding where an operator launched every kernel.
    if on_device and (further := sum(map(milliseconds, kernels)) - total) > 1e-6 * total:
        rows.append((further, f"{'':10}", _NO_OPERATOR))
        total += further
    rows.sort(key=lambda row: row[0], reverse=True)
    return (
        f"{device} ms/step  share  calls/step  operator",
        *(
            f"{own / step_count:{len(device) + 8},.2f}  {own / (total or 1.0):5.1%}  {calls}  {name}"
            for own, calls, name in rows[:MOST_ROWS]
        ),
    )
