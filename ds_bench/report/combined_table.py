"""Tables across several comparisons: by model and strategy for a sweep, by size and pass for ``model-size``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..analysis.comparison import ComparisonRow
from ..analysis.provenance import STEP_NAMES
from ..analysis.trial_caveats import UNSTABLE_CV
from ..config.spec import PASS_TYPES
from ..system import environment
from ..units import (
    MISSING,
    format_count,
    format_gb,
    format_items,
    format_ms,
    format_percent,
    format_rate,
    format_significant,
    format_with_suffix,
)
from .comparison_columns import failure_text
from .comparison_report import ComparisonReport
from .table_layout import Column, Table, make_table

CPU_LINE = "CPU ranks: these figures say nothing about GPUs."

SIZE_PREFIX = "size-"
"""Prefix of the model names of the model-size benchmark."""
_INVALID = "*"


def common_facts(reports: Sequence[ComparisonReport]) -> tuple[str, ...]:
    """Return the facts that all comparisons share, such as ``tiny``, ``2 CPU ranks``, ``bf16``."""
    return tuple(fact for fact in reports[0].facts if all(fact in report.facts for report in reports))


def _name(report: ComparisonReport, common: Sequence[str]) -> str:
    """Return the model with the report's other facts that are not common to all, except the steps."""
    model, *others = report.facts
    return " · ".join([model, *(f for f in others if f not in common and not f.endswith(tuple(STEP_NAMES.values())))])


def summary_lines(reports: Sequence[ComparisonReport]) -> list[str]:
    """Return the facts shared by all points of a sweep, then the answer of each point in one line."""
    common = common_facts(reports)
    lines = [" · ".join([f"{len(reports)} points", *common]), ""]
    for report in reports:
        own = " · ".join(fact for fact in report.facts if fact not in common) or report.title
        lines.append(f"{'★' if report.recommendation.decided else '?'} {own}: {report.recommendation.headline}")
    provisional = [str(report.recommendation.try_next) for report in reports if report.recommendation.provisional]
    lines += [f"  To decide: {command}" for command in dict.fromkeys(provisional)]
    on_cpu = any(report.first_trial.placement.accelerator == "cpu" for report in reports)
    return [*lines, *([f"  {CPU_LINE}"] if on_cpu else [])]


# ------------------------------------------------------------------ models by strategy


def model_tables(reports: Sequence[ComparisonReport]) -> list[Table]:
    """Return throughput with models down and strategies across: a table for each machine with two or more reports."""
    groups: list[list[ComparisonReport]] = []
    for report in reports:
        # All members, because a report without a device agrees with reports that disagree with each other.
        group = next((group for group in groups if all(_same_machine(member, report) for member in group)), None)
        if group is None:
            groups.append(group := [])
        group.append(report)
    return [_model_table(group) for group in groups if len(group) > 1]


def _same_machine(a: ComparisonReport, b: ComparisonReport) -> bool:
    """Return whether accelerator, device and environment agree; a report without a device agrees with any."""
    if a.first_trial.placement.accelerator != b.first_trial.placement.accelerator:
        return False
    if len({_device(a), _device(b)} - {None}) > 1:
        return False
    if a.environments and b.environments:
        return not environment.comparability_differences(a.environments[0], b.environments[0])
    return not a.environments and not b.environments


def _device(report: ComparisonReport) -> str | None:
    """Return the device of the first row that has one."""
    runs = (run for row in report.comparison.rows for run in row.runs)
    return next((rank.device_name for run in runs for rank in run.ranks), None)


def _model_table(group: Sequence[ComparisonReport]) -> Table:
    labels = list(dict.fromkeys(row.label for report in group for row in report.comparison.rows))
    device = next(filter(None, map(_device, group)), group[0].first_trial.placement.accelerator)
    common = common_facts(group)
    names = [_name(report, common) for report in group]
    if len(set(names)) < len(names):
        names = [report.title for report in group]

    def throughput(row: ComparisonRow) -> str:
        """Return the throughput, with an asterisk if the row is not valid; the status if it has no throughput."""
        if row.tokens_per_second is None:
            return row.last_run.outcome.status
        unit = f" {row.rate_unit}" if len(units) > 1 else ""
        return format_rate(row.tokens_per_second) + unit + ("" if row.invalid_reason is None else _INVALID)

    units = list(dict.fromkeys(row.rate_unit for report in group for row in report.comparison.rows if row.succeeded))
    what = f"{units[0][0].upper()}{units[0][1:]}" if len(units) == 1 else "Throughput"
    rows = []
    for name, report in zip(names, group, strict=True):
        cells = {row.label: throughput(row) for row in report.comparison.rows}
        rows.append([name, *(cells.get(label, "") for label in labels)])
    invalid = any(cell.endswith(_INVALID) for row in rows for cell in row[1:])
    note = f"Rows with {_INVALID} are in doubt or disqualified: the notes of their own report say why."
    return Table(
        title=(f"{what} of the whole job, side by side ({device})",),
        columns=[Column(heading) for heading in ("Workload", *labels)],
        rows=rows,
        notes=[note] if invalid else [],
    )


# ------------------------------------------------------------------ models by pass type


_PASS_TEXTS = {"forward": "forward", "forward_backward": "forward + backward", "train": "training step"}
_SHAPE_KEYS = {
    "d_model": ("n_embd", "hidden_size"),
    "d_ff": ("n_inner", "intermediate_size", "ffn_dim"),
    "layers": ("n_layer", "num_hidden_layers"),
    "heads": ("n_head", "num_attention_heads"),
    "vocabulary": ("vocab_size",),
}
"""Dimension of a model → its config keys."""
_NOT_SYNCHRONIZED = (
    "NOT SYNCHRONIZED, wrong on purpose: the clock was read without waiting for the device. On a GPU these are the "
    "times taken to launch the work, so every figure derived from them is wrong."
)


class _NamedRow(NamedTuple):
    """A row with the name of its model."""

    name: str
    row: ComparisonRow

    @property
    def pass_text(self) -> str:
        return _PASS_TEXTS[self.row.trial.workload.pass_type]

    @property
    def mean_ms(self) -> str:
        """The mean time, or the status of a failed row."""
        failed = f"✗ {self.row.runs[-1].outcome.status}"
        return failed if self.row.mean_step_seconds is None else format_ms(self.row.mean_step_seconds)

    @property
    def variation(self) -> float | None:
        """Standard deviation as a fraction of the mean."""
        std, mean = self.row.step_seconds_std, self.row.mean_step_seconds
        return None if std is None or mean is None else std / mean

    @property
    def stability(self) -> str:
        return MISSING if self.variation is None else "stable" if self.variation < UNSTABLE_CV else "unstable"

    @property
    def tflops(self) -> float | None:
        return next((run.row.model_tflops_per_gpu for run in self.row.successes if run.row.model_tflops_per_gpu), None)

    @property
    def peak_gb(self) -> str:
        size = self.row.host_peak_bytes if self.row.on_cpu else self.row.gpu_peak_bytes
        return format_gb(size) + (" host" if self.row.on_cpu and size is not None else "")


_PASS_COLUMNS: tuple[Column[_NamedRow], ...] = (
    Column("Model", lambda named: named.name),
    Column("Pass", lambda named: named.pass_text, left=True),
    Column("mean ms", lambda named: named.mean_ms),
    Column("mean s", lambda named: f"{named.row.mean_step_seconds or 0:.5f}" if named.row.succeeded else MISSING, 5),
    Column("std ms", lambda named: format_ms(named.row.step_seconds_std), 4),
    Column("CV", lambda named: format_percent(named.variation, digits=2), 3),
    Column("under 5 %", lambda named: named.stability),
    Column("tok/s", lambda named: format_rate(named.row.tokens_per_second), 2),
    Column("TFLOP/s", lambda named: format_significant(named.tflops), 1),
    Column("peak GB", lambda named: named.peak_gb),
)


def has_passes(reports: Sequence[ComparisonReport]) -> bool:
    """Return whether passes other than training steps were timed, or all models belong to the model-size benchmark."""
    workloads = [report.first_trial.workload for report in reports if report.comparison.rows]
    sizes = bool(workloads) and all(workload.model.startswith(SIZE_PREFIX) for workload in workloads)
    return sizes or any(workload.pass_type != "train" for workload in workloads)


def pass_tables(reports: Sequence[ComparisonReport]) -> list[Table]:
    """Return the times of every pass of every model and, if there are several passes, a table of models by pass.

    Models are in order of appearance, passes in the order of a training step.
    """
    reports = [report for report in reports if report.comparison.rows]
    common = common_facts(reports)
    names = [_name(report, common) for report in reports]
    order = list(dict.fromkeys(names))
    by_pass = sorted(
        zip(names, reports, strict=True),
        key=lambda pair: (order.index(pair[0]), PASS_TYPES.index(pair[1].first_trial.workload.pass_type)),
    )
    several = len({row.label for report in reports for row in report.comparison.rows}) > 1
    rows = [
        _NamedRow(f"{name}, {row.label}" if several else name, row)
        for name, report in by_pass
        for row in report.comparison.rows
    ]
    title = (f"Passes of {format_items(len(order), 'model')}", *common)
    tables = [
        Table(title=title, notes=[*dict.fromkeys(map(_model_line, reports))]),
        make_table(_PASS_COLUMNS, rows, always=len(_PASS_COLUMNS)),
    ]
    shown = [each for each in PASS_TYPES if any(named.row.trial.workload.pass_type == each for named in rows)]
    if len(shown) > 1:
        # Mean milliseconds, models down and pass types across.
        times: dict[str, dict[str, str]] = {}
        for named in rows:
            unit = " ms" if named.row.succeeded else ""
            times.setdefault(named.name, {})[named.row.trial.workload.pass_type] = named.mean_ms + unit
        columns = [Column[str](heading) for heading in ("Model", *(_PASS_TEXTS[each] for each in shown))]
        cells = [(name, *(own.get(each, MISSING) for each in shown)) for name, own in times.items()]
        tables.append(Table(columns=columns, rows=cells))
    notes = [
        f"{named.name}, {named.pass_text}: {failure_text(named.row.runs[-1])}."
        for named in rows
        if not named.row.succeeded
    ]
    trials = [report.first_trial for report in reports]
    if any(trial.placement.accelerator == "cpu" for trial in trials):
        notes.append("CPU: these times say nothing about GPUs, and the memory is the host memory of the process.")
    if any(not trial.workload.synchronized for trial in trials):
        notes.append(_NOT_SYNCHRONIZED)
    if any(trial.workload.pass_type != "train" for trial in trials):
        notes.append("Forward and backward passes run the model without DeepSpeed; training steps use DeepSpeed.")
    return [*tables[:-1], replace(tables[-1], notes=notes)]


def _model_line(report: ComparisonReport) -> str:
    """``size-small: d_model 768 · … · 94,298,112 parameters (94.3 M)``; parameters as counted in the built model."""
    workload = report.first_trial.workload
    counts = [count for row in report.comparison.rows for count in row.measured("parameter_count")]
    parts = []
    for name, keys in _SHAPE_KEYS.items():
        size = next((workload.model_config[key] for key in keys if key in workload.model_config), None)
        if isinstance(size, int):  # None if the model derives it, such as GPT-2's n_inner
            parts.append(f"{name} {format_count(size)}")
    parts.append(
        f"{format_count(counts[0])} parameters ({format_with_suffix(counts[0])})"
        if counts
        else "parameters not counted"
    )
    return f"{workload.model}: {' · '.join(parts)}"
