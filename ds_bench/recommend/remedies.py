"""What to do about a row: one line for each way a trial can fail, for a row that is too full, and for one with room."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..records import schema
from ..records.schema import TrialRecord
from ..units import format_bytes, format_duration, format_percent
from .rule import COMFORTABLE_FRACTION
from .shortage import (
    FailedSetup,
    Shortage,
    describe_change,
    failed_setup,
    least_intrusive,
    measured_activations,
    pool_of,
    predicted_shortage,
    shortage_of,
    suggest_change,
)

MEMORY_STATUSES = (schema.OOM, schema.OOM_HOST)
RAN_OUT = (*MEMORY_STATUSES, schema.OOM_DISK)
_LONGEST_CAUSE = 200
_MOST_ROWS = 20
"""Rows among which the smallest change is looked for: a sweep may have thousands."""
_LEAVE_FREE = 0.10
"""Fraction of the GPU that a suggested micro-batch leaves free, for memory that is not linear in it."""
_MORE = "more GPUs, a shorter --seq-length or a smaller model"


def failed_run(row: ComparisonRow) -> TrialRecord | None:
    """The first run that ran out of memory or disk, else the first that failed; None if every run succeeded."""
    runs = [each.record for each in row.summaries if not each.record.outcome.success]
    short = (run for run in runs if run.outcome.status in RAN_OUT)
    return next(short, None) or next(iter(runs), None)


def remedy(row: ComparisonRow, comparison: Comparison) -> str | None:
    """How the row failed and what to try; None if no run of it failed."""
    run = failed_run(row)
    if run is None:
        return None
    if run.outcome.status in MEMORY_STATUSES:
        return _out_of_memory(row, run, comparison)
    return _BY_STATUS.get(run.outcome.status, _raised)(row, run, comparison)


def smallest_change(comparison: Comparison) -> str | None:
    """The least change predicted to make one of the rows fit that ran, or were predicted to run, out of memory.

    None without such rows. If no change is predicted to fit: a line that says so, with the numbers of the first row.
    """
    runs = [(row, run) for row in comparison.results if (run := failed_run(row)) is not None]
    lacking = [(row, run, short) for row, run in runs if (short := _shortage(run, comparison)) is not None]
    if not lacking:
        return None
    found = [(row, failed_setup(run, comparison, short)) for row, run, short in lacking[:_MOST_ROWS]]
    cases = [(row, case) for row, case in found if case is not None]
    if best := least_intrusive(cases):
        change, row, case = best
        return f"smallest change predicted to fit: {describe_change(change, case)}, starting from {row.label}"
    if not any(case.alternatives for _, case in cases):
        return f"no change can be predicted to fit from these records: {suggested(None)}"
    row, case = cases[0]
    return f"{row.label}: {suggested(case)}"


def suggested(case: FailedSetup | None) -> str:
    """The changes predicted to make a configuration fit; general ones if its record has no prediction."""
    if case is not None:
        return suggest_change(case, _MORE)
    return (
        f"try a smaller micro-batch, --activation-checkpointing, a higher stage, offload, {_MORE} "
        "(what each would free is not known: the record carries no prediction)"
    )


def _shortage(run: TrialRecord, comparison: Comparison) -> Shortage | None:
    return shortage_of(run) if run.outcome.status in MEMORY_STATUSES else predicted_shortage(run, comparison)


def _out_of_memory(row: ComparisonRow, run: TrialRecord, comparison: Comparison) -> str:
    shortage = shortage_of(run)
    pool = pool_of(run)
    what = "device memory" if pool == "device" else "host memory"
    head = " ".join(filter(None, [f"{row.label} ran out of {what}", shortage.where]))
    parts = [f"{head}, {shortage.text}"]
    if pool != "device":
        parts += _host_numbers(run, comparison)
    if shortage.fragmented and pool == "device":
        return "; ".join([*parts, "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower --batch-size"])
    return f"{'; '.join(parts)}: {suggested(failed_setup(run, comparison, shortage))}"


def _host_numbers(run: TrialRecord, comparison: Comparison) -> list[str]:
    """Host memory that the run was predicted to take, and that there is."""
    numbers = []
    if size := _predicted(run, "host"):
        numbers.append(f"it is predicted to take {format_bytes(size)} of it")
    if comparison.host_capacity_bytes is not None:
        numbers.append(f"the host has {format_bytes(comparison.host_capacity_bytes)}")
    limit = run.trial.placement.cpu_memory_limit_bytes
    if limit is not None:
        numbers.append(f"--cpu-memory-limit allows each rank {format_bytes(limit)}")
    return numbers


def _predicted(run: TrialRecord, tier: str) -> int | None:
    """Bytes that the record's prediction has for ``gpu``, ``host`` or ``nvme`` of a node; None without one."""
    row = (run.trial.prediction or {}).get(tier)
    sizes = list(row.values()) if isinstance(row, Mapping) else []
    return sum(sizes) if sizes and all(isinstance(size, int) for size in sizes) else None


def cause(run: TrialRecord) -> str:
    """The error line of the outcome, shortened to 200 characters."""
    text = " ".join((run.outcome.error or run.outcome.status).split())
    return text if len(text) <= _LONGEST_CAUSE else f"{text[: _LONGEST_CAUSE - 1]}…"


def _where(run: TrialRecord) -> str:
    return f" in phase {run.outcome.phase}" if run.outcome.phase else ""


_Remedy = Callable[[ComparisonRow, TrialRecord, Comparison], str]


def _disk(row: ComparisonRow, run: TrialRecord, *_: object) -> str:
    size = _predicted(run, "nvme")
    need = (
        f"its swap files are predicted to take {format_bytes(size)}"
        if size
        else "how much its swap files take is unknown"
    )
    return f"{row.label} filled the disk ({need}): free that much, give another --nvme-path, or try cpu_full"


def _timeout(row: ComparisonRow, run: TrialRecord, *_: object) -> str:
    after = f" after {format_duration(run.wall_seconds)}" if run.wall_seconds is not None else ""
    steps = run.trial.workload.num_steps + run.trial.workload.warmup_steps
    if run.outcome.phase in ("hello", "import", "build", "init"):
        todo = "it had not begun to train, so fewer steps do not help: raise --timeout; if it hung, see the stacks"
    else:
        todo = f"give fewer than its {steps} steps (--num-steps, --warmup-steps) or raise --timeout"
        todo += "; if it hung, see the stacks"
    return f"{row.label} timed out{after}{_where(run)} ({cause(run)}): {todo}"


def _killed(row: ComparisonRow, run: TrialRecord, *_: object) -> str:
    return (
        f"{row.label} was killed{_where(run)} ({cause(run)}): look who sent it (the scheduler's limits, dmesg), "
        "then run the row again with --resume and --retry Killed"
    )


def _crashed(row: ComparisonRow, run: TrialRecord, *_: object) -> str:
    return (
        f"{row.label} crashed{_where(run)} ({cause(run)}): read the end of its log, "
        "build the ops anew (python -m ds_bench ops), then run this row alone"
    )


def _unsupported(row: ComparisonRow, run: TrialRecord, *_: object) -> str:
    return f"{row.label} cannot run here: {cause(run)}"


def _skipped(row: ComparisonRow, run: TrialRecord, comparison: Comparison) -> str:
    why, try_it = cause(run), "leave out --skip-predicted-oom to try it"
    has_remedy = try_it in why or "--force" in why
    head = f"{row.label} was skipped, not run: {why}" + ("" if has_remedy else f"; {try_it}")
    shortage = predicted_shortage(run, comparison)
    if shortage is None:
        return f"{head}, or try a smaller micro-batch, {_MORE}"
    return f"{head}; or {suggested(failed_setup(run, comparison, shortage))}"


def _interrupted(row: ComparisonRow, run: TrialRecord, *_: object) -> str:
    return f"{row.label} was interrupted{_where(run)}: --resume with the run's folder goes on from there"


def _raised(row: ComparisonRow, run: TrialRecord, *_: object) -> str:
    """An exception of some class in a rank."""
    line = f"{row.label} failed with {run.outcome.status}{_where(run)} ({cause(run)}): read the traceback in its log"
    if run.trial.strategy.uses_nvme:
        size = _predicted(run, "nvme")
        need = f" with {format_bytes(size)} free" if size else ""
        line += f"; check that --nvme-path is a writable folder on a real disk{need}"
    return line


_BY_STATUS: Mapping[str, _Remedy] = {
    schema.OOM_DISK: _disk,
    schema.TIMEOUT: _timeout,
    schema.KILLED: _killed,
    schema.CRASHED: _crashed,
    schema.UNSUPPORTED: _unsupported,
    schema.SKIPPED: _skipped,
    schema.INTERRUPTED: _interrupted,
}


# ------------------------------------------------------------------ room on the GPU


def suggest_larger_batch(row: ComparisonRow, comparison: Comparison) -> str | None:
    """The largest micro-batch, by doubling, that is predicted to leave room; None if unknown or if none does.

    Activations are taken to grow linearly and everything else not at all; they must have been measured for this row. A
    row at its own largest micro-batch is not extended: the search has tried a larger one.
    """
    capacity, fraction = comparison.device_capacity_bytes, row.gpu_fraction
    if capacity is None or fraction is None or fraction >= COMFORTABLE_FRACTION or row.at_largest_batch:
        return None
    run = row.successes[0].record
    batch = run.ranks[0].micro_batch_size
    each = measured_activations(comparison, run, batch)
    if not each:
        return None
    factor = 1
    while fraction * capacity + each * (2 * factor - 1) <= (1 - _LEAVE_FREE) * capacity:
        factor *= 2
    if factor == 1:
        return None
    share = fraction + each * (factor - 1) / capacity
    grown = f"about {format_percent(share, digits=0)} of the card by {row.label}'s ledger"
    return f"there is room for more: try micro-batch {batch * factor} ({grown})"


def suggest_for_full_row(row: ComparisonRow, comparison: Comparison) -> str | None:
    """The change predicted to bring a row that used more than ``NEAR_CAPACITY`` of the GPU back under that.

    None if its share or the GPU's size is not known, as on the CPU accelerator.
    """
    capacity = comparison.device_capacity_bytes
    if row.gpu_fraction is None or capacity is None:
        return None
    excess = int((row.gpu_fraction - NEAR_CAPACITY) * capacity)
    case = failed_setup(row.successes[0].record, comparison, Shortage(requested_bytes=excess, free_bytes=0))
    head = f"{row.label} is {format_bytes(excess)} over {format_percent(NEAR_CAPACITY, digits=0)} of the card"
    return f"{head}: {suggested(case)}"
