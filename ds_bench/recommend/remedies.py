"""What to do about a row: one line for each way to fail, for a row that is too full, and for one with memory left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..prediction.memory import Alternative
from ..records import schema
from ..system import invocation
from ..units import format_bytes, format_duration, format_items, format_percent
from .decision import COMFORTABLE_FRACTION
from .shortage import (
    LAST_RESORTS,
    FailedSetup,
    Shortage,
    describe_change,
    failed_setup,
    measured_activations,
    out_of_pool,
    predicted_bytes,
    predicted_shortage,
    shortage_of,
    smallest_fit,
    suggest_change,
)

if TYPE_CHECKING:
    from ..analysis.row import Run

MEMORY_STATUSES = (schema.OOM, schema.OOM_HOST)
RAN_OUT = (*MEMORY_STATUSES, schema.OOM_DISK)
MORE_STEPS = 50
"""Measured steps of a run that is to decide between rows."""
_MAX_CAUSE_LENGTH = 200
_MAX_ROWS = 20
"""Rows among which the smallest change is looked for: a sweep may have thousands."""
_LEAVE_FREE = 0.10
"""Fraction of the GPU that a suggested micro-batch leaves free, for memory that is not linear in it."""


def failed_run(row: ComparisonRow) -> Run | None:
    """The first run that ran out of memory or disk, else the first that failed; None if every run succeeded."""
    runs = [run for run in row.runs if not run.outcome.success]
    short = (run for run in runs if run.outcome.status in RAN_OUT)
    # Memory first: its remedies have numbers.
    return next(short, None) or next(iter(runs), None)


def remedy(row: ComparisonRow, comparison: Comparison) -> str | None:
    """How the row failed and what to try; None if no run of it failed."""
    run = failed_run(row)
    if run is not None and run.outcome.kind in _ACTIONS_BY_KIND:
        return f"{row.label} failed{run.outcome.where} ({cause(run)}): {action(run)}"
    return None if run is None else _REMEDIES.get(run.outcome.status, _exception_remedy)(row, run, comparison)


def smallest_change(comparison: Comparison) -> str | None:
    """The least change predicted to make one of the rows fit that ran, or were predicted to run, out of memory.

    None without such rows. If no change is predicted to fit: a line that says so, with the numbers of the first row.
    """
    rows = _rows_short_of_memory(comparison)
    if not rows:
        return None
    if (smallest := find_smallest_change(comparison)) is not None:
        change, row, setup = smallest
        return f"smallest change predicted to fit: {describe_change(change, setup)}, starting from {row.label}"
    known = [(row, setup) for row, setup in rows if setup is not None and setup.prediction.alternatives]
    if not known:
        return f"no change can be predicted to fit from these records: {suggest_change(None)}"
    return f"{known[0][0].label}: {suggest_change(known[0][1])}"


def find_smallest_change(comparison: Comparison) -> tuple[Alternative, ComparisonRow, FailedSetup] | None:
    """The least change predicted to fit of all rows short of memory, its row, and how that row was set up."""
    rows = _rows_short_of_memory(comparison)
    changes = [(fit, row, setup) for row, setup in rows if setup and (fit := smallest_fit(setup)) is not None]
    # A text joins its changes by ", ": the fewest changes first, then the rank of what_if.
    return min(changes, key=lambda entry: (entry[0].text.count(", "), entry[0].rank), default=None)


def _rows_short_of_memory(comparison: Comparison) -> list[tuple[ComparisonRow, FailedSetup | None]]:
    """The first rows that ran, or were predicted to run, out of memory, each with its setup."""
    rows = (row for row in comparison.rows if (run := failed_run(row)) and _shortage(run, comparison))
    return [(row, setup_of(row, comparison)) for row in islice(rows, _MAX_ROWS)]


def setup_of(row: ComparisonRow, comparison: Comparison) -> FailedSetup | None:
    """How a row that is short of memory was set up; None if it is not, or if its record has no prediction."""
    run = failed_run(row)
    shortage = None if run is None else _shortage(run, comparison)
    return None if run is None or shortage is None else failed_setup(run, comparison, shortage)


def short_of_memory(run: Run) -> bool:
    """Whether a run failed for lack of memory that less work or another strategy would free."""
    return run.outcome.status in MEMORY_STATUSES and run.outcome.kind not in _ACTIONS_BY_KIND


def _shortage(run: Run, comparison: Comparison) -> Shortage | None:
    return shortage_of(run) if short_of_memory(run) else predicted_shortage(run, comparison)


def _out_of_memory_remedy(row: ComparisonRow, run: Run, comparison: Comparison) -> str:
    shortage, on_device = shortage_of(run), out_of_pool(run) == "device"
    head = f"{row.label} ran out of {'device' if on_device else 'host'} memory{run.outcome.where}"
    parts = [f"{head}, {shortage.text}", *([] if on_device else _host_numbers(run, comparison))]
    # Enough was free, but not in one piece: what PyTorch's own message of the error advises.
    if shortage.fragmented and on_device:
        return "; ".join([*parts, "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower --batch-size"])
    return f"{'; '.join(parts)}: {suggest_change(failed_setup(run, comparison, shortage))}"


def _host_numbers(run: Run, comparison: Comparison) -> list[str]:
    """Host memory that the run was predicted to take, and that there is."""
    numbers = []
    if size := predicted_bytes(run, "cpu"):
        numbers.append(f"it is predicted to take {format_bytes(size)} of it")
    limit, ranks = run.trial.placement.cpu_memory_limit_bytes, run.trial.placement.ranks_per_node
    if limit is not None:
        numbers.append(f"--cpu-memory-limit allows {format_items(ranks, 'rank')} {format_bytes(limit * ranks)}")
    elif comparison.host_capacity_bytes is not None:
        numbers.append(f"the host has {format_bytes(comparison.host_capacity_bytes)}")
    return numbers


def cause(run: Run) -> str:
    """The error line of the outcome, shortened to 200 characters."""
    text = " ".join((run.outcome.error or run.outcome.status).split())
    return text if len(text) <= _MAX_CAUSE_LENGTH else f"{text[: _MAX_CAUSE_LENGTH - 1]}…"


def _disk_full_remedy(row: ComparisonRow, run: Run, *_: object) -> str:
    if not run.trial.configuration.uses_nvme:
        return f"{row.label} filled a disk{run.outcome.where} ({cause(run)}): free space where it wrote"
    size = predicted_bytes(run, "nvme")
    predicted = f"its swap files are predicted to take {format_bytes(size)}"
    need = predicted if size else "how much its swap files take is unknown"
    return f"{row.label} filled the disk ({need}): free that much, give another --nvme-path, or try cpu_full"


def _timeout_remedy(row: ComparisonRow, run: Run, *_: object) -> str:
    after = f" after {format_duration(run.row.wall_seconds)}" if run.row.wall_seconds is not None else ""
    steps = run.trial.workload.num_steps + run.trial.workload.warmup_steps
    if run.outcome.phase in ("hello", "import", "build", "init"):
        remedy = "it had not begun to train, so fewer steps do not help: raise --timeout"
        if run.trial.placement.num_nodes > 1:  # NCCL may have taken a bridge of containers or of virtual machines
            remedy += ", or name the interface between the hosts (export NCCL_SOCKET_IFNAME=…)"
    else:
        remedy = f"give fewer than its {steps} steps (--num-steps, --warmup-steps) or raise --timeout"
    return f"{row.label} timed out{after}{run.outcome.where} ({cause(run)}): {remedy}; if it hung, see the stacks"


def _killed_remedy(row: ComparisonRow, run: Run, *_: object) -> str:
    return (
        f"{row.label} was killed{run.outcome.where} ({cause(run)}): look who sent it (the scheduler's limits, dmesg), "
        "then run the row again with --resume and --retry Killed"
    )


def _crashed_remedy(row: ComparisonRow, run: Run, *_: object) -> str:
    return (
        f"{row.label} crashed{run.outcome.where} ({cause(run)}): read the end of its log, "
        f"build the ops anew ({invocation.command('ops')}), then run this row alone"
    )


def _unsupported_remedy(row: ComparisonRow, run: Run, *_: object) -> str:
    return f"{row.label} cannot run here: {cause(run)}"


def _skipped_remedy(row: ComparisonRow, run: Run, comparison: Comparison) -> str:
    reason, try_it = cause(run), "leave out --skip-predicted-oom to try it"
    has_remedy = try_it in reason or "--force" in reason
    head = f"{row.label} was skipped, not run: {reason}" + ("" if has_remedy else f"; {try_it}")
    shortage = predicted_shortage(run, comparison)
    if shortage is None:
        return f"{head}, or try a smaller micro-batch, {LAST_RESORTS}"
    return f"{head}; or {suggest_change(failed_setup(run, comparison, shortage))}"


def _interrupted_remedy(row: ComparisonRow, run: Run, *_: object) -> str:
    return f"{row.label} was interrupted{run.outcome.where}: --resume with the run's folder goes on from there"


def _exception_remedy(row: ComparisonRow, run: Run, *_: object) -> str:
    """An exception of some class in a rank."""
    line = (
        f"{row.label} failed with {run.outcome.status}{run.outcome.where} ({cause(run)}): read the traceback in its log"
    )
    if run.trial.configuration.uses_nvme:
        size = predicted_bytes(run, "nvme")
        need = f" with {format_bytes(size)} free" if size else ""
        line += f"; check that --nvme-path is a writable folder on a real disk{need}"
    return line


_REMEDIES: Mapping[str, Callable[[ComparisonRow, Run, Comparison], str]] = {
    **dict.fromkeys(MEMORY_STATUSES, _out_of_memory_remedy),
    schema.OOM_DISK: _disk_full_remedy,
    schema.TIMEOUT: _timeout_remedy,
    schema.KILLED: _killed_remedy,
    schema.CRASHED: _crashed_remedy,
    schema.UNSUPPORTED: _unsupported_remedy,
    schema.SKIPPED: _skipped_remedy,
    schema.INTERRUPTED: _interrupted_remedy,
}


_SHARED_MEMORY = "give the container more shared memory: --shm-size=8g or --ipc=host (docker), or a larger /dev/shm"
_ACTIONS_BY_KIND: Mapping[str | None, str] = {
    "shared_memory": _SHARED_MEMORY,
    "bus_error": f"most often /dev/shm is full; {_SHARED_MEMORY}",
    "pinned_memory": "leave host memory unpinned: --axis pin_memory=false",
    "memlock": "raise the limit of locked memory: ulimit -l unlimited (limits.conf; UsePAM yes for sshd)",
    "peer_access": "set NCCL_P2P_DISABLE=1: these GPUs cannot access each other's memory",
    "fabric_manager": "start the GPUs' fabric manager: systemctl start nvidia-fabricmanager",
    "collective_timeout": "read what the late ranks did last in their logs; for a mixture of experts at ZeRO-3 "
    "name its expert block in zero_optimization.leaf_module.classes",
}
"""``Outcome.kind`` → what to do, of causes that no other strategy or smaller workload helps."""
ACTIONS: Mapping[str, str] = {
    schema.OOM_DISK: "free space on the disk, or another --nvme-path for swap files",
    schema.TIMEOUT: "fewer --num-steps, or a larger --timeout",
    schema.KILLED: "see who ended it (dmesg, the scheduler), then --resume with --retry Killed",
    schema.CRASHED: f"{invocation.command('ops')}, then this row alone",
    schema.UNSUPPORTED: "another configuration: this machine or these versions cannot run it",
    schema.SKIPPED: "without --skip-predicted-oom",
    schema.INTERRUPTED: "--resume with the run's folder: rows are missing",
}
"""The same in a few words, but for memory, which is helped by less work."""


def action(run: Run) -> str:
    """Return what to do about a failed run, in a few words."""
    by_status = ACTIONS.get(run.outcome.status, "read the traceback in its log (--verbose names it)")
    return _ACTIONS_BY_KIND.get(run.outcome.kind, by_status)


def more_repeats(row: ComparisonRow) -> int:
    """Number of runs of each row that is to tell the row from others, where those it has do not."""
    return max(5, 2 * len(row.successes))


def suggest_larger_batch(row: ComparisonRow, comparison: Comparison) -> str | None:
    """A line on the micro-batch of ``larger_batch``; None without one."""
    larger = larger_batch(row, comparison)
    if larger is None:
        return None
    size, share = larger
    predicted = f"about {format_percent(share, digits=0)} of the card by {row.label}'s ledger"
    return f"there is room for more: try micro-batch {size} ({predicted})"


def larger_batch(row: ComparisonRow, comparison: Comparison) -> tuple[int, float] | None:
    """The largest micro-batch, by doubling, predicted to leave memory free, and the share of the card it would take.

    None if not known or if none does. Activations are taken to grow linearly and everything else not at all; they must
    have been measured for this row. A row at its own largest micro-batch is not extended: the search has tried more.
    """
    capacity, fraction = comparison.device_capacity_bytes, row.gpu_fraction
    if capacity is None or fraction is None or fraction >= COMFORTABLE_FRACTION or row.fills_memory:
        return None
    run = row.successes[0]
    batch = run.row.batch_size
    activation_bytes = measured_activations(comparison, run, batch)
    if not activation_bytes:
        return None
    factor = 1
    # One batch of activations is in the fraction already: twice the factor adds 2 * factor - 1 of them.
    while fraction * capacity + activation_bytes * (2 * factor - 1) <= (1 - _LEAVE_FREE) * capacity:
        factor *= 2
    if factor == 1:
        return None
    return batch * factor, fraction + activation_bytes * (factor - 1) / capacity


def suggest_for_full_row(row: ComparisonRow, comparison: Comparison) -> str | None:
    """The change predicted to bring a row that used more than ``NEAR_CAPACITY`` of the GPU back under that.

    None if its share or the GPU's size is not known, as on the CPU accelerator.
    """
    capacity = comparison.device_capacity_bytes
    if row.gpu_fraction is None or capacity is None:
        return None
    excess = int((row.gpu_fraction - NEAR_CAPACITY) * capacity)
    # Nothing failed: the excess stands for what a change must free.
    setup = failed_setup(row.successes[0], comparison, Shortage(requested_bytes=excess, free_bytes=0))
    head = f"{row.label} is {format_bytes(excess)} over {format_percent(NEAR_CAPACITY, digits=0)} of the card"
    return f"{head}: {suggest_change(setup)}"
