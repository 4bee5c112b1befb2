"""Columns of the tables that people read: the short table, the whole one, and tables of details.

The columns of the JSON and CSV files are in ``analysis.row``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..analysis.comparison import Comparison, ComparisonRow, ratio_between
from ..analysis.step_costs import PARTS, step_parts
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..recommend.remedies import failed_run
from ..records.schema import INTERRUPTED, STATUSES, TrialRecord
from ..units import (
    MISSING,
    format_bytes,
    format_count,
    format_gb,
    format_gigabytes,
    format_ms,
    format_percent,
    format_rate,
    format_ratio,
    format_significant,
    in_bytes,
    in_seconds,
    to_gb,
)
from .comparison_report import ComparisonReport
from .table_layout import Column, Table, make_table

if TYPE_CHECKING:
    from ..analysis.row import Row, Run

NOT_TESTED = "not tested"
Cell = Callable[[ComparisonRow], str]
Value = Callable[[ComparisonRow], float | None]


@dataclass(frozen=True, kw_only=True)
class TableColumn(Column[ComparisonRow]):
    """One measured or derived column of the whole table."""

    meaning: str
    """Unit and scope; the page shows it with the heading."""
    value: Value
    """What the column is sorted by; None sorts last."""
    page_only: bool = False


def row_status(row: ComparisonRow, with_sign: Callable[[str], str]) -> str:
    """The status of the first failed run, or of the first run if none failed; with how many failed if not all did.

    ``with_sign`` puts a sign in front of a status: not every font has the emoji of the terminal.
    """
    failed = [run for run in row.runs if not run.outcome.success]
    text = with_sign((failed or row.runs)[0].outcome.status)
    return f"{text} ({len(failed)} of {len(row.runs)})" if failed and row.succeeded else text


def failure_text(run: Run | TrialRecord) -> str:
    """How a run failed and where, in one line: ``OOM in init, requested 50.2 GB, 3.60 GB free``."""
    outcome, where = run.outcome, run.outcome.where
    if outcome.requested_bytes is not None or outcome.free_bytes is not None:
        size = "" if outcome.requested_bytes is None else f", requested {format_gigabytes(outcome.requested_bytes)}"
        free = "" if outcome.free_bytes is None else f", {format_gigabytes(outcome.free_bytes)} free"
        return f"{outcome.status}{where}{size}{free}"
    cause = " ".join((outcome.error or "").split())
    # A status that is not ours is an exception's class, and the error already names it with its phase. Only a script
    # that exits with a code raised nothing.
    exited = outcome.status == "SystemExit" and run.trial.workload.script is not None
    if cause and outcome.status not in STATUSES and not exited:
        return cause
    if outcome.status == INTERRUPTED:
        return f"{outcome.status}{where}"
    return f"{outcome.status}{where}{': ' if cause else ''}{cause}"


def signed(value: float, text: Callable[[float], str] = format_bytes) -> str:
    """``+1.86 GB``, ``−2.24 GB``, ``0 B``."""
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{text(abs(value))}"


def failure_sentence(row: ComparisonRow) -> str:
    """``ZeRO-1 did not train in 1 of 3 runs: OOM in forward.``; empty if every run succeeded."""
    run = failed_run(row)
    count = sum(not each.outcome.success for each in row.runs)
    some = f" in {count} of {len(row.runs)} runs" if row.succeeded else ""
    return "" if run is None else f"{row.label} did not train{some}: {failure_text(run)}."


# ------------------------------------------------------------------ the whole table


def _throughput_interval(row: ComparisonRow) -> str:
    if row.rate_unit != "tokens/s":
        return MISSING
    if row.interval is None:
        return NOT_TESTED if row.succeeded else MISSING
    return f"{format_rate(row.interval[0])} to {format_rate(row.interval[1])}"


def _ratio_interval(row: ComparisonRow) -> str:
    if row.ratio is None or row.is_baseline:
        return MISSING
    interval = row.ratio_interval
    if interval is None:
        return NOT_TESTED
    return f"[{interval.low:.2f}, {interval.high:.2f}]{' too wide' if interval.too_wide else ''}"


def _first(column: str) -> Value:
    """The flat column of the first successful run that measured it."""
    return lambda row: next(iter(row.measured(column)), None)


def _max_of_runs(row: ComparisonRow, column: str) -> float | None:
    """The largest value of the runs that measured it."""
    return max(row.measured(column), default=None)


def _number(heading: str, meaning: str, value: Value, text: Callable[[float | None], str], **more: Any) -> TableColumn:
    """A column of formatted numbers."""
    return TableColumn(heading=heading, meaning=meaning, value=value, cell=lambda row: text(value(row)), **more)


# fmt: off
TABLE_COLUMNS: tuple[TableColumn, ...] = (
    _number("Step ms", "milliseconds per optimizer step, slowest rank, geometric mean of the runs",
            lambda row: row.mean_step_seconds, format_ms),
    _number("± ms", "standard deviation between runs, or between the steps of a single run",
            lambda row: row.step_seconds_std, format_ms),
    _number("Tokens/s", "throughput of the whole job, geometric mean of the runs",
            lambda row: row.tokens_per_second if row.rate_unit == "tokens/s" else None, format_rate),
    _number("Samples/s", "samples per second of the whole job, if a sample is not a sequence of the given length",
            lambda row: row.samples_per_second, format_significant, page_only=True),
    TableColumn(heading="Tokens/s, 95 %",
                meaning="95 % confidence interval of the mean tokens/s, with three or more runs",
                cell=_throughput_interval, value=lambda row: None if row.interval is None else row.interval[0],
                page_only=True),
    _number("Relative", "throughput as a multiple of the baseline row's", lambda row: row.ratio, format_ratio),
    TableColumn(heading="95 % interval", meaning="95 % confidence interval of the multiple, with three or more runs",
                cell=_ratio_interval, value=lambda row: None if row.ratio_interval is None else row.ratio_interval.low,
                priority=1),
    _number("GPU peak GB", "peak allocated device memory of the fullest rank, worst run",
            lambda row: row.gpu_peak_bytes, format_gb),
    _number("of card", "peak reserved device memory as a share of the card",
            lambda row: row.gpu_fraction, lambda fraction: format_percent(fraction, digits=0)),
    _number("Tok/s/GB", "tokens per second for each GB of peak device memory",
            lambda row: row.tokens_per_second_per_gb, format_rate, priority=2),
    _number("CPU GB", "peak resident host memory of a node's ranks, worst run",
            lambda row: row.host_peak_bytes, format_gb),
    _number("MFU", "model FLOPs utilization, dense peak", _first("mfu"), format_percent, page_only=True),
    _number("Final loss", "mean over ranks, last step", _first("final_loss"),
            lambda loss: MISSING if loss is None else f"{loss:.4f}", page_only=True),
    _number("Predicted", "predicted peak memory as a multiple of the measured one",
            lambda row: row.predicted_over_measured, format_ratio, priority=3),
)
# fmt: on


def measured_columns(comparison: Comparison) -> tuple[TableColumn, ...]:
    """The columns that the page shows: throughput, and all others for which some row has a value."""
    empty = (MISSING, NOT_TESTED)
    return tuple(
        column
        for column in TABLE_COLUMNS
        if column.heading == "Tokens/s" or any(column.cell(row) not in empty for row in comparison.rows)
    )


# ------------------------------------------------------------------ the short table


def short_columns(report: ComparisonReport) -> list[Column[ComparisonRow]]:
    """Columns of the table that ends a run. A run on GPUs and one on CPU ranks have different ones."""
    rows, chosen = report.comparison.rows, report.recommended_row
    speed = Column[ComparisonRow]("tok/s", lambda row: format_significant(row.tokens_per_second))
    if any(row.samples_per_second is not None for row in rows):
        speed = Column("samples/s", lambda row: format_significant(row.samples_per_second))
    elif unit := next((row.rate_unit for row in rows if row.rate_unit != "tokens/s"), None):
        speed = Column(unit, lambda row: format_significant(row.tokens_per_second))
    host = Column[ComparisonRow]("host GB", lambda row: format_significant(to_gb(row.host_peak_bytes)), priority=3)
    if all(row.gpu_peak_bytes is None for row in rows):
        capacity = report.comparison.host_capacity_bytes or math.inf
        share = lambda row: _share((row.host_peak_bytes or 0) / capacity or None, warns=True)  # noqa: E731
        memory = [host, Column("of host", share, priority=1)]
    else:
        memory = [
            Column("GPU GB", lambda row: format_significant(to_gb(row.gpu_peak_bytes)), priority=2),
            Column("of card", lambda row: _share(row.gpu_fraction, warns=not row.fills_memory)),
            host,
        ]
    return [
        Column("batch", lambda row: _searched(row, "batch_policy", "batch_size")),
        Column("sequence", lambda row: _searched(row, "seq_policy", "seq_length")),
        speed,
        Column("95 % CI", _relative_margin, priority=4),
        *([] if chosen is None else [Column[ComparisonRow]("vs ★", lambda row: _against(row, chosen))]),
        *memory,
        Column("NVMe GB", lambda row: format_significant(_max_of_runs(row, "nvme_stored_gb") or None), priority=1),
    ]


def _searched(row: ComparisonRow, policy: str, size: str) -> str:
    """The micro-batch or sequence length that was found for the row."""
    workload = row.trial.workload
    return MISSING if getattr(workload, policy) == "given" else format_count(getattr(workload, size))


def _relative_margin(row: ComparisonRow) -> str:
    """How far the 95 % interval reaches from the mean: ``±9.6 %``, or ``×÷ 3.3`` if that is more than a factor of 2."""
    if row.interval is None or row.interval[0] <= 0:
        return MISSING
    factor = math.sqrt(row.interval[1] / row.interval[0])
    return f"×÷ {float(f'{factor:.2g}'):,g}" if factor > 2 else f"±{float(f'{100 * (factor - 1):.2g}'):,g} %"


def _against(row: ComparisonRow, chosen: ComparisonRow) -> str:
    """``1.13× faster`` than the chosen row; with ``?`` if that was not tested for lack of runs."""
    if row.key == chosen.key or row.tokens_per_second is None or not chosen.tokens_per_second:
        return MISSING
    if row.differences or chosen.differences:
        return "no ratio"
    ratio, interval = row.tokens_per_second / chosen.tokens_per_second, ratio_between(row, chosen)
    if interval is not None and not interval.distinguishable:
        return "within noise"
    factor = format_significant(max(ratio, 1 / ratio))
    text = "as fast" if factor == "1.00" else f"{factor}× {'faster' if ratio > 1 else 'slower'}"
    return text if interval is not None else f"{text} ?"


def _share(fraction: float | None, *, warns: bool) -> str:
    """A share of the memory, with ``!`` above 95 %."""
    if fraction is None:
        return MISSING
    # Whole percents, but tenths below 10 % and near the limit, where "95 %" could be on either side.
    digits = 0 if fraction >= 0.1 and not 0.95 <= fraction < 0.955 else 1
    return format_percent(fraction, digits=digits) + (" !" if fraction > NEAR_CAPACITY and warns else "")


# ------------------------------------------------------------------ tables of details


PHASE_HEADINGS = {
    "import": "Import",
    "build": "Model build",
    "initialize": "Initialize",
    "first_step": "First step",
    "steady": "Measured steps",
}
_ACTIONS = {"save": "Save", "load": "Load", "model_16bit": "16-bit model"}
_PART_HEADINGS = {"step": "optimizer step", "data_wait": "waiting for data"}
_LABEL: Column[ComparisonRow] = Column("Strategy", lambda row: row.label)


def detail_tables(comparison: Comparison) -> list[Table]:
    """Small tables, each about one thing that was observed; rows, columns and tables without values are left out."""
    rows = [row for row in comparison.rows if row.succeeded]

    def host(row: ComparisonRow, phase: str) -> str:
        peak, end = (_max_of_runs(row, f"cpu_{phase}_{moment}_gb") for moment in ("peak", "end"))
        return MISSING if peak is end is None else f"{format_significant(peak)} → {format_significant(end)}"

    def gpu(row: ComparisonRow, phase: str) -> str:
        return format_significant(to_gb(row.largest_in_phase(phase, "gpu_peak_bytes")))

    of_node = "GB on the fullest node: peak within the phase → at its end; shared pages count once"
    of_gpu = "GB, peak allocated within the phase on the fullest GPU"
    tables = [
        make_table(
            _columns(PHASE_HEADINGS, cell),
            rows,
            title=(f"{what} memory by phase",),
            meaning=meaning,
            drop_empty_rows=True,
        )
        for what, meaning, cell in (("Host", of_node, host), ("GPU", of_gpu, gpu))
    ]
    tables += [_checkpoint_table(rows), _step_table(rows)]
    return [table for table in tables if table.rows]


def _columns(headings: Mapping[str, str], cell: Callable[[ComparisonRow, str], str]) -> list[Column[ComparisonRow]]:
    """The label, and a column for each key of ``headings``; ``cell`` gets a row and the key."""

    def of_key(key: str) -> Cell:
        return lambda row: cell(row, key)

    return [_LABEL, *(Column(heading, of_key(key)) for key, heading in headings.items())]


def _checkpoint_table(rows: Sequence[ComparisonRow]) -> Table:
    def cell(row: ComparisonRow, action: str) -> str:
        seconds, memory = (_max_of_runs(row, f"checkpoint_{action}_{name}") for name in ("seconds", "cpu_peak_gb"))
        size = None if action == "load" else _max_of_runs(row, f"checkpoint_{action}_gb")
        written = "" if size is None else f", {format_significant(size)} GB"
        return (
            MISSING if seconds is None else f"{format_significant(seconds)} s{written} ({format_significant(memory)})"
        )

    def restored(row: ComparisonRow) -> str:
        known = row.measured("checkpoint_restored")
        return MISSING if not known else "yes" if all(known) else "NO"

    meaning = "seconds on the slowest rank, GB of files, in parentheses peak GB of host memory on the fullest node"
    columns = [*_columns(_ACTIONS, cell), Column("Restored", restored)]
    return make_table(columns, rows, title=("Checkpoint",), meaning=meaning, drop_empty_rows=True)


def _step_table(rows: Sequence[ComparisonRow]) -> Table:
    """Parts of a step, as shares of their sum, and its costs."""

    def has_parts(run: Run) -> bool:
        row = run.row
        costs = (row.phase_communication_ms, row.phase_transfer_ms, row.cpu_adam_gb_per_sec, row.disk_bound)
        return bool(step_parts(run.ranks)) or any(value is not None for value in costs)

    runs = {row.key: next(filter(has_parts, row.nearest_to_mean), None) for row in rows}
    parts = {key: {} if run is None else step_parts(run.ranks) for key, run in runs.items()}
    totals = {key: sum(own.values()) for key, own in parts.items()}

    def share(row: ComparisonRow, part: str) -> str:
        total, seconds = totals[row.key], parts[row.key].get(part)
        return format_percent(seconds / total, digits=0) if total and seconds is not None else MISSING

    def of_costs(text: Callable[[Row], str]) -> Cell:
        return lambda row: MISSING if (run := runs[row.key]) is None else text(run.row)

    costs: dict[str, Callable[[Row], str]] = {
        "communication ms": lambda row: format_ms(in_seconds(row.phase_communication_ms)),
        "waiting ms": lambda row: format_ms(in_seconds(row.communication_wait_ms)),
        "sent": lambda row: format_bytes(in_bytes(row.communication_gb_per_step)),
        "transfers ms": lambda row: format_ms(in_seconds(row.phase_transfer_ms)),
        "CPU Adam /s": lambda row: format_bytes(in_bytes(row.cpu_adam_gb_per_sec)),
        "disk /s": lambda row: format_bytes(in_bytes(row.nvme_measured_gb_per_sec)),
        "needed /s": lambda row: format_bytes(in_bytes(row.nvme_needed_gb_per_sec)),
        "disk-bound": lambda row: {None: MISSING, True: "yes", False: "no"}[row.disk_bound],
    }
    dropped_first = {"needed /s": 5, "disk /s": 4, "CPU Adam /s": 3, "sent": 2, "waiting ms": 1}
    columns = [
        *_columns({part: _PART_HEADINGS.get(part, part) for part in PARTS}, share),
        Column("step ms", lambda row: format_ms(totals[row.key] or None)),
        *(Column(heading, of_costs(text), priority=dropped_first.get(heading, 0)) for heading, text in costs.items()),
    ]
    meaning = "parts of a synchronized step, from the run nearest to the row's mean; communication includes waiting"
    return make_table(columns, rows, title=("Where the time of a step goes",), meaning=meaning, drop_empty_rows=True)
