"""Profiles of further steps after the measured window: ``torch``, ``memory`` and ``nsys``.

Every rank takes the same steps, whether it is observed or not, so that collectives match and all rows train alike. A
profiler that fails leaves a caveat; if a training step fails, so does the rank.

``torch`` leaves a trace and a table, taken without stacks and shapes, which slow a step down. One more step, with both,
yields the memory of each category. ``memory`` shows what allocates memory. On GPUs torch's allocator records every
allocation with its stack, for torch's memory viewer; the CPU has no such allocator, and there torch.profiler sees the
bytes that each operator allocates and frees. ``nsys`` opens a window for Nsight Systems.
"""

from __future__ import annotations

import gzip
import itertools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # documented by torch, missing in its types
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity

from ..config.caveat_texts import Caveat
from ..config.spec import ProfileName, Trial
from ..records.schema import Profile
from . import measured_memory, training_loop

MAX_FILE_BYTES = 2**29
"""Profile files larger than this are removed."""
_MAX_LINE_LENGTH = 200
MAX_ROWS = 10
"""Rows of a table that the record and the report hold; the file has more."""
_MAX_EVENTS = 100_000
"""Maximum number of allocations and frees in the recorded history, which keeps the latest; each takes a few KB."""
_ROWS_IN_FILE = 100
_STEP = "optimizer step"
"""Marks each step in the trace. Its self time is the time spent outside operators."""
_OUTSIDE = "(Python and waiting, outside operators)"
_NO_OPERATOR = "(kernels that no operator launched)"
"""Kernels of DeepSpeed's own ops and of compiled code, among others."""
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


class ProfiledSteps:
    """The steps of one profiler on one rank, and the files that it writes."""

    def __init__(self, name: str, trainer: training_loop.Trainer, trial: Trial, folder: Path, total_steps: int) -> None:
        """``folder``: the trial's. ``total_steps``: steps that every rank takes."""
        self.trainer = trainer
        self.trial = trial
        self.observed_steps = trial.inspection.profile_steps
        """Steps to observe."""
        self.rank = torch.distributed.get_rank()
        self.left = total_steps
        """Steps still to be taken, including the profiler's extra ones."""
        self.is_training = False
        """Whether a step is being taken: an exception then comes from training, not from the profiler."""
        self.files: list[Path] = []
        self.name = name
        self._folder = folder / "profiles"

    @property
    def on_cuda(self) -> bool:
        return self.trainer.accelerator == "cuda"

    def step(self) -> None:
        """Take one optimizer step. Raises whatever training raises."""
        self.left -= 1
        # No finally: if the step raises, this stays True and says where the exception came from.
        self.is_training = True
        self.trainer.step()
        self.is_training = False

    def synchronize(self) -> None:
        training_loop.synchronize(self.trainer.accelerator)

    def file(self, ending: str) -> Path:
        """A file to write, ``profiles/<profiler>_rank<N>.<ending>`` in the trial's folder."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{self.name}_rank{self.rank}.{ending}"
        self.files.append(path)
        return path


def take_profiles(
    trainer: training_loop.Trainer, trial: Trial, folder: Path, notes: Sequence[str | Caveat]
) -> dict[str, Any]:
    """Run the profilers that the trial requests, one after another.

    Return the fields ``profiles`` and ``notes`` of a RankMeasurement. ``folder``: the trial's.
    """
    profiles, all_notes = [], list(notes)
    for name in trial.inspection.profiles:
        trainer.heartbeat.beat("inspect")
        observe, further_steps = PROFILERS[name]
        steps = ProfiledSteps(name, trainer, trial, folder, trial.inspection.profile_steps + further_steps)
        lines: Sequence[str] = ()
        if steps.rank in trial.inspection.profile_ranks:
            try:
                lines = observe(steps)
            except Exception as error:
                if steps.is_training:  # the other ranks cannot go on without this one
                    raise
                for path in steps.files:
                    path.unlink(missing_ok=True)
                steps.files.clear()
                reason = " ".join(str(error).split())[:_MAX_LINE_LENGTH]
                all_notes.append(f"the {name} profile failed on rank {steps.rank}: {type(error).__name__}: {reason}")
        # Steps that no profiler took on this rank: the other ranks wait for this one in their collectives.
        while steps.left > 0:
            steps.step()
        steps.synchronize()
        files = []
        for path in filter(Path.exists, steps.files):
            if 0 < (size := path.stat().st_size) <= MAX_FILE_BYTES:
                files.append(path.relative_to(folder.parents[1]).as_posix())
                continue
            path.unlink()
            if size:
                limit = f"{MAX_FILE_BYTES / 2**20:.0f} MB; use fewer --profile-steps"
                all_notes.append(f"a file of the {name} profile was removed: {path.name} was larger than {limit}")
        if files or lines:
            kept = tuple(line[:_MAX_LINE_LENGTH] for line in lines)
            profiles.append(asdict(Profile(name=name, files=tuple(files), lines=kept)))
    return {"profiles": profiles, "notes": list(dict.fromkeys(all_notes))}


def observe_time(steps: ProfiledSteps) -> Sequence[str]:
    """Take the steps under torch.profiler, and one further step for the memory timeline."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if steps.on_cuda else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps.observed_steps):
            with torch.profiler.record_function(_STEP):
                steps.step()
        steps.synchronize()
    # A heartbeat before the trace is written, which may take a long time.
    steps.trainer.heartbeat.beat("inspect")
    profiler.export_chrome_trace(str(steps.file("trace.json.gz")))
    device = "device" if steps.on_cuda else "cpu"
    averages = profiler.key_averages()
    table = averages.table(
        sort_by=f"self_{device}_time_total", row_limit=_ROWS_IN_FILE, max_name_column_width=80, max_src_column_width=80
    )
    steps.file("txt").write_text(table, encoding="utf-8")
    lines = lines_by_time(averages, "device" if steps.on_cuda else "CPU", steps.observed_steps)
    with profile_memory(activities) as profiler:
        steps.step()
        steps.synchronize()
    return (*lines, export_timeline(profiler, steps))


def profile_memory(activities: Any = None) -> torch.profiler.profile:
    """A profiler that sees every allocation, and the code that makes it."""
    return torch.profiler.profile(
        activities=activities or [ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_stack=True
    )


def export_timeline(profiler: torch.profiler.profile, steps: ProfiledSteps) -> str:
    """Write the bytes of each category over time, as torch exports them. Return a line about the peak.

    torch refuses if operators write to the same tensor twice, as at stage 3; the bytes then have no categories.
    """
    path = steps.file("memory_timeline.json.gz")
    device = steps.trainer.first_device
    try:
        with warnings.catch_warnings():  # deprecated, but without a successor for the CPU
            warnings.simplefilter("ignore", FutureWarning)
            profiler.export_memory_timeline(str(path), str(device))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            _, sizes = json.load(file)
    except AssertionError:
        # Microseconds, and bytes allocated minus bytes freed since the profiler began.
        found: Any = profiler.profiler
        events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
        events = [event for event in events if event.device_type().name == device.type.upper()]
        events.sort(key=lambda event: event.start_ns())
        times = [event.start_ns() // 1000 for event in events]
        totals = list(itertools.accumulate(event.nbytes() for event in events))
        with gzip.open(path, "wt", encoding="utf-8") as file:
            # In the form of torch's own file, with a single category.
            json.dump([times, [[0, size] for size in totals]], file)
        return f"peak of tensors above the initial level: {max(totals, default=0) / 2**20:,.1f} MB"
    highest: list[int] = max(sizes, key=sum, default=[])
    # The first number of each row is 0: categories begin with the second (_coalesce_timeline).
    by_category = sorted(zip(_CATEGORIES, highest[1:], strict=False), key=lambda pair: -pair[1])
    parts = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in by_category if size >= 2**20 / 20)
    return f"peak of tensors {sum(highest) / 2**20:,.1f} MB: {parts}"


def lines_by_time(averages: Sequence[Any], device: str, step_count: int) -> tuple[str, ...]:
    """The operators with the most self time: milliseconds per step, share, calls per step, name."""
    on_device = device == "device"

    def milliseconds(event: Any) -> float:
        return float(event.self_device_time_total if on_device else event.self_cpu_time_total) / 1000

    # A kernel is listed on its own, and counted in the time of the operator that launched it; a mark is listed with
    # the time of all kernels within it (torch/autograd/profiler_util.py, _build_table).
    operators = [event for event in averages if event.device_type == DeviceType.CPU]
    kernels = [event for event in averages if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    rows = [
        (milliseconds(event), f"{event.count / step_count:10,.0f}", _OUTSIDE if event.key == _STEP else event.key)
        for event in operators
        if milliseconds(event) or not on_device
    ]
    total = sum(own for own, _, _ in rows)
    # The two sums differ only by rounding if operators launched every kernel.
    if on_device and (further := sum(map(milliseconds, kernels)) - total) > 1e-6 * total:
        rows.append((further, f"{'':10}", _NO_OPERATOR))
        total += further
    rows.sort(key=lambda row: row[0], reverse=True)
    return (
        f"{device} ms/step  share  calls/step  operator",
        *(
            f"{own / step_count:{len(device) + 8},.2f}  {own / (total or 1.0):5.1%}  {calls}  {name}"
            for own, calls, name in rows[:MAX_ROWS]
        ),
    )


def observe_memory(steps: ProfiledSteps) -> Sequence[str]:
    """Take the steps while allocations are recorded."""
    if steps.on_cuda:
        return _observe_gpu(steps)
    measured_memory.reset_host_peak()
    with profile_memory() as profiler:
        for _ in range(steps.observed_steps):
            steps.step()
    steps.trainer.heartbeat.beat("inspect")
    resident = measured_memory.peak_resident_bytes()
    # Stacks add events for Python functions, which the timeline needs and a table of operators does not.
    operators = [event for event in profiler.key_averages() if ".py(" not in event.key]
    event_list: Any = EventList  # torch does not type it
    table = event_list(operators, profile_memory=True).table(
        sort_by="self_cpu_memory_usage", row_limit=_ROWS_IN_FILE, max_name_column_width=80
    )
    steps.file("txt").write_text(table, encoding="utf-8")
    lines = [export_timeline(profiler, steps)]
    if resident is not None:
        lines.append(f"peak of the process, including the profiler's own memory: {resident / 2**20:,.1f} MB resident")
    lines.append("MB/step  calls/step  operator")
    for event in sorted(operators, key=lambda event: event.self_cpu_memory_usage, reverse=True)[:MAX_ROWS]:
        if event.self_cpu_memory_usage > 0:  # allocated and not freed by the operator itself
            megabytes = event.self_cpu_memory_usage / 2**20 / steps.observed_steps
            lines.append(f"{megabytes:7,.1f}  {event.count / steps.observed_steps:10,.0f}  {event.key}")
    return lines


def _observe_gpu(steps: ProfiledSteps) -> Sequence[str]:
    lines = ["step  allocated MB  peak MB  reserved MB"]
    torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS)
    try:
        for number in range(steps.observed_steps):
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
    return lines


def observe_nsys(steps: ProfiledSteps) -> Sequence[str]:
    """Take the steps, and open and close a window of them through CUDA's profiler API, for a run under Nsight Systems.

    ``nsys profile --capture-range=cudaProfilerApi`` records what is in the window. Without nsys the calls do nothing.
    """
    if not steps.on_cuda:
        return ()
    api: Any = torch.cuda.profiler
    workload, inspection = steps.trial.workload, steps.trial.inspection
    steps_before = workload.warmup_steps + workload.num_steps
    window = inspection.nsys_window(steps_before)
    for number in inspection.profiled_steps(steps_before):
        # Synchronized at both ends: kernels run later than they are launched, and would cross the window's bounds.
        if number == window.start:
            steps.synchronize()
            api.start()
        steps.step()
        if number == window.stop - 1:
            steps.synchronize()
            api.stop()
    return (f"the nsys window held steps {window.start} to {window.stop - 1}",)


Observe = Callable[[ProfiledSteps], Sequence[str]]
"""Takes the steps under a profiler, on a rank that writes a profile. Returns lines for the report."""
PROFILERS: Mapping[ProfileName, tuple[Observe, int]] = {
    "torch": (observe_time, 1),
    "memory": (observe_memory, 0),
    "nsys": (observe_nsys, 0),
}
"""Profiler → how it observes, and its steps in addition to ``--profile-steps``."""
