"""All columns of a comparison as people read it: in the terminal with ``--verbose``, in Markdown, in the HTML page.

The columns of the JSON and CSV files are ``analysis.flat_rows``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..analysis import flops
from ..analysis.comparison import Comparison, ComparisonRow
from ..records.schema import INTERRUPTED, TrialRecord
from ..units import (
    BYTES_PER_GB,
    MISSING,
    format_bytes,
    format_count,
    format_gb,
    format_gigabytes,
    format_ms,
    format_percent,
    format_ratio,
    format_significant,
)

NOT_TESTED = "not tested"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """One measured or derived column."""

    heading: str
    meaning: str
    """Unit and scope; the page shows it with the heading."""
    text: Callable[[ComparisonRow], str]
    sort_key: Callable[[ComparisonRow], float | None]
    scale: float = 1.0
    """What the sort key is multiplied by to be the number that the text shows, of an interval the first."""
    page_only: bool = False
    """Shown where there is room: in the page alone."""
    against_baseline: bool = False
    """A comparison with the baseline, which therefore has none itself."""

    def cell(self, row: ComparisonRow, comparison: Comparison) -> tuple[str, float | None]:
        """The text, and the number that the column is sorted by; None sorts last."""
        if self.against_baseline and comparison.baseline is not None and comparison.baseline.key == row.key:
            return MISSING, None
        return self.text(row), self.sort_key(row)


def row_status(row: ComparisonRow, with_sign: Callable[[str], str]) -> str:
    """The status of the first run that failed, else of the first; with how many runs failed if not all did.

    ``with_sign`` puts a sign in front of a status: not every font has the emoji of the terminal.
    """
    failed = [run for run in row.summaries if not run.record.outcome.success]
    text = with_sign((failed or row.summaries)[0].record.outcome.status)
    return f"{text} ({len(failed)} of {len(row.summaries)})" if failed and row.succeeded else text


def failure_text(record: TrialRecord) -> str:
    """How a run failed and where, in one line: ``OOM in optimizer init, asked 50.2 GB, 3.60 GB free``."""
    outcome = record.outcome
    where = outcome.where
    if outcome.requested_bytes is not None or outcome.free_bytes is not None:
        asked = "" if outcome.requested_bytes is None else f", asked {format_gigabytes(outcome.requested_bytes)}"
        free = "" if outcome.free_bytes is None else f", {format_gigabytes(outcome.free_bytes)} free"
        return f"{outcome.status}{where}{asked}{free}"
    cause = " ".join((outcome.error or "").split())
    if cause.startswith(outcome.status):  # an exception's class, with its phase
        return cause
    if outcome.status == INTERRUPTED:
        return f"{outcome.status}{where}"
    return f"{outcome.status}{where}{': ' if cause else ''}{cause}"


def _throughput_interval(row: ComparisonRow) -> str:
    if row.interval is None:
        return NOT_TESTED if row.succeeded else MISSING
    return f"{format_count(row.interval[0])} to {format_count(row.interval[1])}"


def _ratio_interval(row: ComparisonRow) -> str:
    if row.ratio is None:
        return MISSING
    interval = row.ratio_interval
    if interval is None:
        return NOT_TESTED
    return f"[{interval.low:.2f}, {interval.high:.2f}]{' too wide' if interval.too_wide else ''}"


def _signed_bytes(size: int | None) -> str:
    return MISSING if size is None else f"{'+' if size > 0 else '−' if size < 0 else ''}{format_bytes(abs(size))}"


def _final_loss(row: ComparisonRow) -> float | None:
    """Of the first successful run that recorded losses."""
    return next((run.losses[-1] for run in row.successes if run.losses), None)


def _final_loss_text(row: ComparisonRow) -> str:
    loss = _final_loss(row)
    return MISSING if loss is None else f"{loss:.4f}"


def _mfu(row: ComparisonRow) -> float | None:
    """Of the first successful run that has a possible one: above 1 the peak of the device is not what was assumed."""
    return next((run.mfu for run in row.successes if run.mfu is not None and run.mfu <= 1), None)


_MFU_MEANING = "model FLOPs utilisation, dense peak"
_CONVENTION_TEXTS = {
    flops.MODEL_CONVENTION: "PaLM convention",
    flops.FORWARD_CONVENTION: "a third of the PaLM convention's FLOPs (forward passes)",
    flops.COUNTED_CONVENTION: "FLOPs counted on what ran forward and backward",
}


TABLE_COLUMNS: tuple[TableColumn, ...] = (
    TableColumn(
        heading="Step ms",
        meaning="milliseconds per optimizer step, slowest rank, geometric mean of the runs",
        text=lambda row: format_ms(row.mean_step_seconds),
        sort_key=lambda row: row.mean_step_seconds,
        scale=1000.0,
    ),
    TableColumn(
        heading="± ms",
        meaning="standard deviation between runs, or between the steps of a single run",
        text=lambda row: format_ms(row.step_seconds_std),
        sort_key=lambda row: row.step_seconds_std,
        scale=1000.0,
    ),
    TableColumn(
        heading="Tokens/s",
        meaning="throughput of the whole job, geometric mean of the runs",
        text=lambda row: format_count(row.tokens_per_second),
        sort_key=lambda row: row.tokens_per_second,
    ),
    TableColumn(
        heading="Samples/s",
        meaning="samples of the whole job, where a sample is no sequence of the given length",
        text=lambda row: format_significant(row.samples_per_second),
        sort_key=lambda row: row.samples_per_second,
        page_only=True,
    ),
    TableColumn(
        heading="Tokens/s, 95 %",
        meaning="95 % confidence interval of the mean tokens/s, from three runs on",
        text=_throughput_interval,
        sort_key=lambda row: None if row.interval is None else row.interval[0],
        page_only=True,
    ),
    TableColumn(
        heading="Relative",
        meaning="throughput as a multiple of the baseline row's",
        text=lambda row: format_ratio(row.ratio),
        sort_key=lambda row: row.ratio,
    ),
    TableColumn(
        heading="95 % interval",
        meaning="95 % confidence interval of the multiple, from three runs on",
        text=_ratio_interval,
        sort_key=lambda row: None if row.ratio_interval is None else row.ratio_interval.low,
        against_baseline=True,
    ),
    TableColumn(
        heading="GPU peak GB",
        meaning="peak allocated device memory of the fullest rank, worst run",
        text=lambda row: format_gb(row.gpu_peak_bytes),
        sort_key=lambda row: row.gpu_peak_bytes,
        scale=1 / BYTES_PER_GB,
    ),
    TableColumn(
        heading="of card",
        meaning="peak reserved device memory as a share of the card",
        text=lambda row: format_percent(row.gpu_fraction, digits=0),
        sort_key=lambda row: row.gpu_fraction,
        scale=100.0,
    ),
    TableColumn(
        heading="GPU less baseline",
        meaning="peak device memory less the baseline's",
        text=lambda row: _signed_bytes(row.gpu_difference_bytes),
        sort_key=lambda row: row.gpu_difference_bytes,
        scale=1 / BYTES_PER_GB,
        page_only=True,
        against_baseline=True,
    ),
    TableColumn(
        heading="Tok/s/GB",
        meaning="tokens per second for each GB of peak device memory",
        text=lambda row: format_count(row.tokens_per_second_per_gb),
        sort_key=lambda row: row.tokens_per_second_per_gb,
    ),
    TableColumn(
        heading="CPU GB",
        meaning="peak resident host memory of a node's ranks, worst run",
        text=lambda row: format_gb(row.host_peak_bytes),
        sort_key=lambda row: row.host_peak_bytes,
        scale=1 / BYTES_PER_GB,
    ),
    TableColumn(
        heading="MFU",
        meaning=_MFU_MEANING,
        text=lambda row: format_percent(_mfu(row)),
        sort_key=_mfu,
        scale=100.0,
        page_only=True,
    ),
    TableColumn(
        heading="Final loss",
        meaning="mean over ranks, last step",
        text=_final_loss_text,
        sort_key=_final_loss,
        page_only=True,
    ),
    TableColumn(
        heading="Predicted",
        meaning="predicted peak memory as a multiple of the measured one",
        text=lambda row: format_ratio(row.predicted_over_measured),
        sort_key=lambda row: row.predicted_over_measured,
    ),
)


def measured_columns(comparison: Comparison) -> tuple[TableColumn, ...]:
    """The columns that the page shows: throughput, and every other that some row has a value for."""
    empty = (MISSING, NOT_TESTED)
    conventions = dict.fromkeys(run.flops_convention or "" for row in comparison.rows for run in row.successes)
    how = " or ".join(text for convention, text in _CONVENTION_TEXTS.items() if convention in conventions)
    return tuple(
        replace(column, meaning=f"{_MFU_MEANING}; {how}") if column.heading == "MFU" and how else column
        for column in TABLE_COLUMNS
        if column.heading == "Tokens/s" or any(column.text(row) not in empty for row in comparison.rows)
    )
