"""What to do about a row that failed: one line for each way a trial can end, with the numbers its record has.

What would make it fit is computed by ``fitting``; here the record is read and the line is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .. import record
from ..compare import Comparison, StrategyResult
from ..models import ModelFacts
from ..prediction.modelstates import model_states
from ..record import TrialRecord
from ..units import format_bytes, format_duration
from .changes import Change, changes, largest_saving, smallest_fit
from .fitting import Shortage, parameters_of, pool_of, predicted_shortage, setting_of, shortage_of

MEMORY_STATUSES = (record.OOM, record.OOM_HOST)
RAN_OUT = (*MEMORY_STATUSES, record.OOM_DISK)
_LONGEST_CAUSE = 200
_MOST_ROWS = 20
"""Rows among which the smallest change is looked for: a sweep may have thousands."""
_MORE = "more GPUs, a shorter --seq-length or a smaller model"


def failed_run(row: StrategyResult) -> TrialRecord | None:
    """The run that tells why: the first that ran out of memory or disk, else the first that failed."""
    runs = [each.record for each in row.summaries if not each.record.outcome.success]
    short = (run for run in runs if run.outcome.status in RAN_OUT)
    return next(short, None) or next(iter(runs), None)


def remedy(row: StrategyResult, comparison: Comparison, facts: ModelFacts | None = None) -> str | None:
    """What happened to the row and what to try; None where no run of it failed."""
    run = failed_run(row)
    if run is None:
        return None
    if run.outcome.status in MEMORY_STATUSES:
        return _out_of_memory(row, run, comparison, facts)
    return _BY_STATUS.get(run.outcome.status, _raised)(row, run, comparison, facts)


def smallest_change(comparison: Comparison, facts: ModelFacts | None = None) -> str | None:
    """Of all rows that ran out of memory or were predicted to, the least intrusive change predicted to make one fit.

    None without such rows. Where none is predicted to: the largest saving, beside what was missing.
    """
    runs = [(row, run) for row in comparison.results if (run := failed_run(row)) is not None]
    lacking = [(row, run, short) for row, run in runs if (short := _shortage(run, comparison)) is not None]
    cases = [
        (row, short, changes(setting_of(run, comparison, facts), short)) for row, run, short in lacking[:_MOST_ROWS]
    ]
    fits = [(fit, row) for row, missing, options in cases if (fit := smallest_fit(options, missing)) is not None]
    if fits:
        change, row = min(fits, key=lambda pair: (pair[0].intrusion, pair[0].frees_bytes or 0))
        return f"smallest change predicted to fit: {change.line}, starting from {row.label}"
    return _no_fit(cases)


def _shortage(run: TrialRecord, comparison: Comparison) -> Shortage | None:
    return shortage_of(run) if run.outcome.status in MEMORY_STATUSES else predicted_shortage(run, comparison)


def _no_fit(cases: Sequence[tuple[StrategyResult, Shortage, list[Change]]]) -> str | None:
    savings = [(most, row, short) for row, short, options in cases if (most := largest_saving(options)) is not None]
    if savings:
        most, row, short = max(savings, key=lambda entry: entry[0].frees_bytes or 0)
        saving = f"the largest saving is {most.line}, starting from {row.label}"
        return f"no single change is predicted to be enough: {saving}, {short.text}; try it with {_MORE}"
    return (
        f"no change can be predicted to fit from these records: try a smaller micro-batch, {_MORE}" if cases else None
    )


def _out_of_memory(row: StrategyResult, run: TrialRecord, comparison: Comparison, facts: ModelFacts | None) -> str:
    shortage = shortage_of(run)
    pool = pool_of(run)
    what = "device memory" if pool == "device" else "host memory"
    head = " ".join(filter(None, [f"{row.label} ran out of {what}", shortage.where]))
    parts = [f"{head}, {shortage.text}"]
    if pool != "device":
        parts += _host_numbers(run, comparison, facts)
    if shortage.fragmented and pool == "device":
        return "; ".join([*parts, "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower --batch-size"])
    options = changes(setting_of(run, comparison, facts), shortage)
    return f"{'; '.join(parts)}: {suggestion(options, shortage)}"


def suggestion(options: Sequence[Change], shortage: Shortage) -> str:
    """The least intrusive change that is predicted to be enough, and one of another kind beside it."""
    fit, need = smallest_fit(options, shortage), shortage.target_bytes or 0
    if fit is not None:
        other = next((each for each in options if each.intrusion != fit.intrusion and each.may_free(need)), None)
        return f"try {fit.line}" + (f" or {other.line}" if other is not None else "")
    unknown = next((each for each in options if each.frees_bytes is None), None)
    most = largest_saving(options)
    if shortage.target_bytes is None and options:
        return "try " + " or ".join(each.line for each in _one_of_each(options)[:2])
    if most is not None:
        also = f"; or try {unknown.line}" if unknown is not None else ""
        return f"no single change is predicted to be enough, the most is {most.line}; try it with {_MORE}{also}"
    return f"try {unknown.line}, {_MORE}" if unknown is not None else f"try {_MORE}"


def _one_of_each(options: Sequence[Change]) -> list[Change]:
    return list({change.intrusion: change for change in reversed(options)}.values())[::-1]


def _host_numbers(run: TrialRecord, comparison: Comparison, facts: ModelFacts | None) -> list[str]:
    """What of the host's memory the model states take, by formula, and what there is."""
    found = []
    size = _states(run, comparison, facts, ("gpu", "cpu") if pool_of(run) == "both" else ("cpu",))
    if size:
        found.append(f"its model states take {format_bytes(size)} of it by formula")
    if comparison.host_capacity_bytes is not None:
        found.append(f"the host has {format_bytes(comparison.host_capacity_bytes)}")
    limit = run.trial.placement.cpu_memory_limit_bytes
    if limit is not None:
        found.append(f"--cpu-memory-limit allows each rank {format_bytes(limit)}")
    return found


def _states(run: TrialRecord, comparison: Comparison, facts: ModelFacts | None, tiers: Sequence[str]) -> int | None:
    """Model states of all ranks in these tiers, by formula; None where the model's size is unknown."""
    parameters, ranks = parameters_of(comparison, run, facts), run.trial.placement.num_gpus
    if parameters is None:
        return None
    ledger = model_states(parameters, ranks, run.trial.strategy, run.trial.workload.precision)
    return ranks * sum(size for tier in tiers for size in ledger.get(tier, {}).values())


def cause(run: TrialRecord) -> str:
    """The outcome's own line, cut where it is long."""
    text = " ".join((run.outcome.error or run.outcome.status).split())
    return text if len(text) <= _LONGEST_CAUSE else f"{text[: _LONGEST_CAUSE - 1]}…"


def _where(run: TrialRecord) -> str:
    return f" in phase {run.outcome.phase}" if run.outcome.phase else ""


_Remedy = Callable[[StrategyResult, TrialRecord, Comparison, ModelFacts | None], str]


def _disk(row: StrategyResult, run: TrialRecord, comparison: Comparison, facts: ModelFacts | None) -> str:
    size = _states(run, comparison, facts, ("nvme",))
    need = f"its swap files take {format_bytes(size)} by formula" if size else "how much its swap files take is unknown"
    return f"{row.label} filled the disk ({need}): free that much, give another --nvme-path, or try cpu_full"


def _timeout(row: StrategyResult, run: TrialRecord, *_: object) -> str:
    after = f" after {format_duration(run.wall_seconds)}" if run.wall_seconds is not None else ""
    steps = run.trial.workload.num_steps + run.trial.workload.warmup_steps
    if run.outcome.phase in ("hello", "import", "build", "init"):
        todo = "it had not begun to train, so fewer steps do not help: raise --timeout; if it hung, see the stacks"
    else:
        todo = f"give fewer than its {steps} steps (--num-steps, --warmup-steps) or raise --timeout"
        todo += "; if it hung, see the stacks"
    return f"{row.label} timed out{after}{_where(run)} ({cause(run)}): {todo}"


def _killed(row: StrategyResult, run: TrialRecord, *_: object) -> str:
    return (
        f"{row.label} was killed{_where(run)} ({cause(run)}): look who sent it (the scheduler's limits, dmesg), "
        "then run the row again with --resume and --retry Killed"
    )


def _crashed(row: StrategyResult, run: TrialRecord, *_: object) -> str:
    return (
        f"{row.label} crashed{_where(run)} ({cause(run)}): read the end of its log, "
        "build the ops anew (python -m ds_bench ops), then run this row alone"
    )


def _unsupported(row: StrategyResult, run: TrialRecord, *_: object) -> str:
    return f"{row.label} cannot run here: {cause(run)}"


def _skipped(row: StrategyResult, run: TrialRecord, comparison: Comparison, facts: ModelFacts | None) -> str:
    why, try_it = cause(run), "leave out --skip-predicted-oom to try it"
    told = try_it in why or "--force" in why
    head = f"{row.label} was skipped, not run: {why}" + ("" if told else f"; {try_it}")
    shortage = predicted_shortage(run, comparison)
    if shortage is None:
        return f"{head}, or try a smaller micro-batch, {_MORE}"
    return f"{head}; or {suggestion(changes(setting_of(run, comparison, facts), shortage), shortage)}"


def _interrupted(row: StrategyResult, run: TrialRecord, *_: object) -> str:
    return f"{row.label} was interrupted{_where(run)}: --resume with the run's folder goes on from there"


def _raised(row: StrategyResult, run: TrialRecord, comparison: Comparison, facts: ModelFacts | None) -> str:
    """An exception of some class in a rank."""
    line = f"{row.label} failed with {run.outcome.status}{_where(run)} ({cause(run)}): read the traceback in its log"
    if run.trial.strategy.uses_nvme:
        size = _states(run, comparison, facts, ("nvme",))
        need = f" with {format_bytes(size)} free" if size else ""
        line += f"; check that --nvme-path is a writable folder on a real disk{need}"
    return line


_BY_STATUS: Mapping[str, _Remedy] = {
    record.OOM_DISK: _disk,
    record.TIMEOUT: _timeout,
    record.KILLED: _killed,
    record.CRASHED: _crashed,
    record.UNSUPPORTED: _unsupported,
    record.SKIPPED: _skipped,
    record.INTERRUPTED: _interrupted,
}
