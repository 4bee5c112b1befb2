"""The profile ``memory``: what allocates memory, and how much is allocated at most.

On GPUs torch's allocator records every allocation with its stack, for torch's memory viewer. The CPU has no such
allocator: there torch.profiler sees the bytes that each operator allocates and frees.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.profiler_util import EventList

from . import memory
from .profiled_steps import MOST_ROWS, Findings, ProfiledSteps
from .torch_profile import export_timeline, profile_memory

_MOST_EVENTS = 100_000
"""Allocations that torch's allocator keeps, the last ones; each takes some KB."""
_ROWS_IN_FILE = 100


def observe(steps: ProfiledSteps) -> Findings:
    """Takes the steps while allocations are recorded."""
    return _observe_gpu(steps) if steps.on_cuda else _observe_cpu(steps)


def _observe_gpu(steps: ProfiledSteps) -> Findings:
    lines = ["step  allocated MB  peak MB  reserved MB"]
    torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
    try:
        for number in range(steps.count):
            torch.cuda.reset_peak_memory_stats()
            steps.step()
            steps.synchronize()
            allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            sizes = [size / 2**20 for size in (allocated, peak, torch.cuda.memory_reserved())]
            lines.append(f"{number + 1:4}  {sizes[0]:12,.1f}  {sizes[1]:7,.1f}  {sizes[2]:11,.1f}")
        steps.trainer.heartbeat.beat("inspect")
        torch.cuda.memory._dump_snapshot(str(steps.file("snapshot.pickle")))  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    steps.file("txt").write_text("\n".join([*lines, "", torch.cuda.memory_summary()]), encoding="utf-8")
    return Findings(lines=tuple(lines))


def _observe_cpu(steps: ProfiledSteps) -> Findings:
    memory.reset_host_peak()
    with profile_memory() as profiler:
        for _ in range(steps.count):
            steps.step()
    steps.trainer.heartbeat.beat("inspect")
    resident = memory.peak_resident_bytes()
    # Stacks make events of Python's functions, which the timeline needs and a table of operators does not.
    operators = [event for event in profiler.key_averages() if ".py(" not in event.key]
    event_list: Any = EventList  # torch does not type it
    table = event_list(operators, profile_memory=True).table(
        sort_by="self_cpu_memory_usage", row_limit=_ROWS_IN_FILE, max_name_column_width=80
    )
    steps.file("txt").write_text(table, encoding="utf-8")
    lines = [export_timeline(profiler, steps), *_lines_by_bytes(operators, steps.count)]
    if resident is not None:
        lines.insert(
            1, f"peak of the process, with what the profiler itself keeps: {resident / 2**20:,.1f} MB resident"
        )
    return Findings(lines=tuple(lines))


def _lines_by_bytes(operators: Iterable[Any], step_count: int) -> tuple[str, ...]:
    """The operators that allocate most and do not free it themselves: MB per step, calls per step, name."""
    first = sorted(operators, key=lambda event: event.self_cpu_memory_usage, reverse=True)[:MOST_ROWS]
    return (
        "MB/step  calls/step  operator",
        *(
            f"{event.self_cpu_memory_usage / 2**20 / step_count:7,.1f}  {event.count / step_count:10,.0f}  {event.key}"
            for event in first
            if event.self_cpu_memory_usage > 0
        ),
    )
