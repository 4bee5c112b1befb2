"""One comparison as a part of a report: its words, its table and its configurations, ready to be laid out.

Plain text throughout: whoever renders escapes it. The charts are ``pictures``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..analysis.caveats import Caveat
from ..analysis.comparison import Comparison, StrategyResult
from ..config.deepspeed_config import is_full_config
from ..units import MISSING, format_bytes, format_count, format_gb, format_ms, format_percent, format_ratio

NOT_TESTED = "not tested"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """One workload on one placement. Texts are plain: whoever renders escapes them."""

    title: str
    """What was trained on what."""
    comparison: Comparison
    recommendation: tuple[str, ...] = ()
    """Ready lines, the choice first."""
    notes: tuple[str, ...] = ()
    """Of the run as a whole."""
    sources: tuple[str, ...] = ()
    """Files it was made from; empty at the end of a run."""
    environments: tuple[Mapping[str, str], ...] | None = None
    """Label → text of each, where they are not those of the whole page; empty where they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the sortable table."""

    heading: str
    meaning: str
    """Unit and scope, for whoever rests on the heading or listens to it."""
    text: Callable[[StrategyResult], str]
    number: Callable[[StrategyResult], float | None] | None
    """What it is sorted by; None for a column of words."""
    relative: bool = False
    """Compares with the baseline, and so says nothing of the baseline's own row."""


def _gain(value: int | None) -> str:
    """A difference of bytes with its sign."""
    return MISSING if value is None else f"{'+' if value > 0 else '−' if value < 0 else ''}{format_bytes(abs(value))}"


def _interval(row: StrategyResult) -> str:
    if row.interval is None:
        return NOT_TESTED if row.succeeded else MISSING
    return f"{format_count(row.interval[0])} to {format_count(row.interval[1])}"


def _ratio_interval(row: StrategyResult) -> str:
    if row.ratio is None:
        return MISSING
    found = row.ratio_interval
    if found is None:
        return NOT_TESTED
    return f"{found.low:.3f} to {found.high:.3f}{', too wide' if found.too_wide else ''}"


def _final_loss(row: StrategyResult) -> float | None:
    return next((run.losses[-1] for run in row.successes if run.losses), None)


def _per_gb(row: StrategyResult) -> str:
    return format_count(row.tokens_per_second_per_gb)


def _loss_text(row: StrategyResult) -> str:
    loss = _final_loss(row)
    return MISSING if loss is None else f"{loss:.4f}"


def _mfu(row: StrategyResult) -> float | None:
    return next((run.mfu for run in row.successes if run.mfu is not None and run.mfu <= 1), None)


COLUMNS: tuple[Column, ...] = (
    Column(
        heading="Step\u00a0ms",
        meaning="milliseconds per optimizer step, slowest rank, geometric mean of the runs",
        text=lambda row: format_ms(row.step_seconds),
        number=lambda row: row.step_seconds,
    ),
    Column(
        heading="±\u00a0ms",
        meaning="standard deviation between runs, or between the steps of a single run",
        text=lambda row: format_ms(row.step_seconds_spread),
        number=lambda row: row.step_seconds_spread,
    ),
    Column(
        heading="Tokens/s",
        meaning="throughput of the whole job, geometric mean of the runs",
        text=lambda row: format_count(row.tokens_per_second),
        number=lambda row: row.tokens_per_second,
    ),
    Column(
        heading="Tokens/s, 95\u00a0%",
        meaning="of the mean tokens/s, from three runs on",
        text=_interval,
        number=lambda row: None if row.interval is None else row.interval[0],
    ),
    Column(
        heading="Relative",
        meaning="throughput against the baseline row's",
        text=lambda row: format_ratio(row.ratio),
        number=lambda row: row.ratio,
    ),
    Column(
        heading="Ratio, 95\u00a0%",
        meaning="95 % confidence interval of the ratio, from three runs on",
        text=_ratio_interval,
        number=lambda row: None if row.ratio_interval is None else row.ratio_interval.low,
        relative=True,
    ),
    Column(
        heading="GPU peak GB",
        meaning="peak allocated device memory of the fullest rank, worst run",
        text=lambda row: format_gb(row.gpu_peak_bytes),
        number=lambda row: row.gpu_peak_bytes,
    ),
    Column(
        heading="of card",
        meaning="peak reserved device memory as a share of the card",
        text=lambda row: format_percent(row.gpu_fraction, digits=0),
        number=lambda row: row.gpu_fraction,
    ),
    Column(
        heading="GPU less baseline",
        meaning="peak device memory less the baseline's",
        text=lambda row: _gain(row.gpu_difference_bytes),
        number=lambda row: row.gpu_difference_bytes,
        relative=True,
    ),
    Column(
        heading="Tokens/s per GB",
        meaning="throughput per GB of peak device memory",
        text=_per_gb,
        number=lambda row: row.tokens_per_second_per_gb,
    ),
    Column(
        heading="CPU GB",
        meaning="peak resident host memory of a node's ranks, worst run",
        text=lambda row: format_gb(row.host_peak_bytes),
        number=lambda row: row.host_peak_bytes,
    ),
    Column(
        heading="MFU",
        meaning="model FLOPs utilisation, PaLM convention, dense peak",
        text=lambda row: format_percent(_mfu(row)),
        number=_mfu,
    ),
    Column(heading="Final loss", meaning="mean over ranks, last step", text=_loss_text, number=_final_loss),
)


def columns(comparison: Comparison) -> tuple[Column, ...]:
    """Those that somebody measured; throughput always."""
    empty = (MISSING, NOT_TESTED)
    return tuple(
        column
        for column in COLUMNS
        if column.heading == "Tokens/s" or any(column.text(row) not in empty for row in comparison.results)
    )


def cell(column: Column, row: StrategyResult, comparison: Comparison) -> tuple[str, float | None]:
    """Text and sort key."""
    if column.relative and comparison.baseline is not None and comparison.baseline.key == row.key:
        return MISSING, None
    return column.text(row), None if column.number is None else column.number(row)


def status(row: StrategyResult) -> str:
    """Of the first run that failed, else success; with how many of its runs failed where some did not."""
    bad = [run for run in row.summaries if not run.record.outcome.success]
    if not row.summaries:
        return MISSING
    word = (bad or row.summaries)[0].record.outcome.status
    told = f"{'✗' if bad else '✓'} {word}"  # not every machine has a font with the emoji of the console
    return f"{told} ({len(bad)} of {len(row.summaries)})" if bad and row.succeeded else told


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """One numbered note under the table: a caveat, a cause of failure or a reason not to compare."""

    kind: str
    text: str
    next_step: str | None
    rows: tuple[str, ...]
    """Labels of the rows it is about; empty where it is about all."""
    serious: bool


def doubts(comparison: Comparison) -> tuple[Doubt, ...]:
    """Those of all rows first, then of rows in order, each once."""
    found: dict[Doubt, list[str]] = {_of_caveat(caveat): [] for caveat in comparison.caveats}
    for row in comparison.results:
        for doubt in _of_row(row):
            if row.label not in (labels := found.setdefault(doubt, [])):
                labels.append(row.label)
    shared = {_of_caveat(caveat) for caveat in comparison.caveats}
    return tuple(_about(doubt, () if doubt in shared else tuple(labels)) for doubt, labels in found.items())


def _about(doubt: Doubt, rows: tuple[str, ...]) -> Doubt:
    return Doubt(kind=doubt.kind, text=doubt.text, next_step=doubt.next_step, serious=doubt.serious, rows=rows)


def _of_caveat(caveat: Caveat) -> Doubt:
    kind = caveat.kind.value.replace("_", " ")
    return Doubt(
        kind=kind, text=caveat.text, next_step=caveat.next_step_if_not_in_text, rows=(), serious=caveat.disqualifying
    )


def _of_row(row: StrategyResult) -> list[Doubt]:
    found = [_of_caveat(caveat) for caveat in row.caveats]
    if row.differences:
        text = f"no ratio, as rows differ: {'; '.join(row.differences)}"
        found.append(Doubt(kind="not comparable", text=text, next_step=None, rows=(), serious=False))
    for run in row.summaries:
        outcome = run.record.outcome
        if not outcome.success and (told := outcome.details or outcome.error):
            found.append(Doubt(kind="failed", text=told, next_step=None, rows=(), serious=True))
    return found


def config(row: StrategyResult) -> str | None:
    """The DeepSpeed configuration as JSON; None where the result does not hold it, as a flat JSON does not."""
    if not row.summaries or not is_full_config(trial := row.summaries[-1].record.trial):
        return None
    return json.dumps(trial.ds_config, indent=2, ensure_ascii=False, default=str)
