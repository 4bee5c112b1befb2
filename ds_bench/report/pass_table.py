"""Models × pass types: the times of forward passes, forward and backward passes, and training steps side by side.

It is shown for results of the model-size benchmark, and wherever other passes than training steps were timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..analysis.comparison import ComparisonRow
from ..analysis.provenance import STEP_NAMES
from ..analysis.summary import TrialSummary
from ..analysis.trial_caveats import UNSTABLE_CV
from ..config.spec import PASS_TYPES, Workload
from ..system.terminal import aligned_lines, escape_controls
from ..units import (
    MISSING,
    format_count,
    format_gb,
    format_items,
    format_millions,
    format_ms,
    format_percent,
    format_significant,
)
from .comparison_report import ComparisonReport
from .markdown import escape, table_lines
from .sweep_report import common_title
from .table_columns import failure_text

SIZE_PREFIX = "size-"
"""Beginning of the names of the models of the model-size benchmark."""
_PASS_TEXTS = {"forward": "forward", "forward_backward": "forward + backward", "train": "training step"}
_SHAPE_KEYS = {
    "d_model": ("n_embd", "hidden_size"),
    "d_ff": ("n_inner", "intermediate_size", "ffn_dim"),
    "layers": ("n_layer", "num_hidden_layers"),
    "heads": ("n_head", "num_attention_heads"),
    "vocabulary": ("vocab_size",),
}
"""What is shown of a model's shape → its names in models' configurations."""
_NOT_SYNCHRONIZED = (
    "NOT SYNCHRONISED, wrong on purpose: the clock was read without waiting for the device. On a GPU these are the "
    "times of launching the work, not of doing it, and every figure that follows from them is wrong"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTable:
    """The tables as texts, without escapes."""

    title: str
    """What all rows have in common."""
    models: tuple[str, ...]
    """One line for each model: its shape and its counted parameters."""
    rows: tuple[tuple[str, ...], ...]
    """Headings, then one row for each model and pass type."""
    overview: tuple[tuple[str, ...], ...]
    """Headings, then the mean time of each pass type, models down; empty for a single pass type."""
    notes: tuple[str, ...]
    """What a reader must know of all rows."""


def is_wanted(reports: Sequence[ComparisonReport]) -> bool:
    """Whether passes other than training steps were timed, or models of the model-size benchmark trained."""
    workloads = [report.first_trial.workload for report in reports if report.comparison.rows]
    sizes = bool(workloads) and all(workload.model.startswith(SIZE_PREFIX) for workload in workloads)
    return sizes or any(workload.pass_type != "train" for workload in workloads)


def build_table(reports: Sequence[ComparisonReport]) -> PassTable:
    """The tables of these reports, models in order of appearance, pass types in that of a training step."""
    reports = [report for report in reports if report.comparison.rows]
    common = common_title(reports)
    names = [_row_name(report, common) for report in reports]
    order = list(dict.fromkeys(names))
    pass_of = [report.first_trial.workload.pass_type for report in reports]
    sorted_reports = sorted(
        zip(names, reports, strict=True),
        key=lambda pair: (order.index(pair[0]), PASS_TYPES.index(pair[1].first_trial.workload.pass_type)),
    )
    cells = [(name, row) for name, report in sorted_reports for row in report.comparison.rows]
    several = len({row.label for _, row in cells}) > 1
    rows = [_cells(name + (f", {row.label}" if several else ""), row) for name, row in cells]
    return PassTable(
        title=f"Passes of {format_items(len(order), 'model')} · {common}".rstrip(" ·"),
        models=tuple(dict.fromkeys(map(_model_line, reports))),
        rows=(_HEADINGS, *rows),
        overview=_overview(cells, several) if len(set(pass_of)) > 1 else (),
        notes=(*_failures(cells), *_notes(reports)),
    )


_HEADINGS = ("Model", "Pass", "mean ms", "mean s", "std ms", "CV", "under 5 %", "tok/s", "TFLOP/s", "peak GB")


def _cells(name: str, row: ComparisonRow) -> tuple[str, ...]:
    what = _PASS_TEXTS[row.trial.workload.pass_type]
    if row.mean_step_seconds is None:
        return (name, what, f"✗ {row.summaries[-1].record.outcome.status}", *[MISSING] * (len(_HEADINGS) - 3))
    variation = None if row.step_seconds_std is None else row.step_seconds_std / row.mean_step_seconds
    stable = MISSING if variation is None else "stable" if variation < UNSTABLE_CV else "unstable"
    return (
        name,
        what,
        format_ms(row.mean_step_seconds),
        f"{row.mean_step_seconds:.5f}",
        format_ms(row.step_seconds_std),
        format_percent(variation, digits=2),
        stable,
        format_count(row.tokens_per_second),
        format_significant(_first(row.successes, "model_tflops_per_gpu")),
        f"{format_gb(row.host_peak_bytes)} host" if row.on_cpu else format_gb(row.gpu_peak_bytes),
    )


def _overview(cells: Sequence[tuple[str, ComparisonRow]], several: bool) -> tuple[tuple[str, ...], ...]:
    """Mean milliseconds, models down and pass types across."""
    times: dict[str, dict[str, str]] = {}
    for name, row in cells:
        label = name + (f", {row.label}" if several else "")
        workload = row.trial.workload
        failed = f"✗ {row.summaries[-1].record.outcome.status}"
        text = failed if row.mean_step_seconds is None else f"{format_ms(row.mean_step_seconds)} ms"
        times.setdefault(label, {})[workload.pass_type] = text
    shown = [each for each in PASS_TYPES if any(each in own for own in times.values())]
    heading = ("Model", *(_PASS_TEXTS[each] for each in shown))
    return (heading, *((name, *(own.get(each, MISSING) for each in shown)) for name, own in times.items()))


def _first(summaries: Sequence[TrialSummary], name: str) -> Any:
    return next((value for each in summaries if (value := getattr(each, name)) is not None), None)


def _row_name(report: ComparisonReport, common: str) -> str:
    """The model, with what else of its title is not common to all, but for the number and kind of steps."""
    model, *others = report.title.split(" · ")
    left_out = (*common.split(" · "), *(part for part in others if part.endswith(tuple(STEP_NAMES.values()))))
    return " · ".join([model, *(part for part in others if part not in left_out)])


def _model_line(report: ComparisonReport) -> str:
    """``size-small: d_model 768 · … · 94,298,112 parameters (94.3 M)``; parameters as counted in the built model."""
    workload = report.first_trial.workload
    counts = [
        rank.parameter_count for row in report.comparison.rows for run in row.successes for rank in run.record.ranks
    ]
    shape = " · ".join(f"{name} {format_count(size)}" for name, size in _shape(workload))
    counted = (
        f"{format_count(counts[0])} parameters ({format_millions(counts[0])})" if counts else "parameters not counted"
    )
    return f"{workload.model}: {' · '.join(filter(None, [shape, counted]))}"


def _shape(workload: Workload) -> Iterator[tuple[str, int]]:
    for name, keys in _SHAPE_KEYS.items():
        size = next((workload.model_config[key] for key in keys if key in workload.model_config), None)
        # None where the model derives it, such as n_inner of GPT-2.
        if isinstance(size, int):
            yield name, size


def _failures(cells: Sequence[tuple[str, ComparisonRow]]) -> Iterator[str]:
    for name, row in cells:
        if not row.succeeded:
            record = row.summaries[-1].record
            yield f"{name}, {_PASS_TEXTS[record.trial.workload.pass_type]}: {failure_text(record)}."


def _notes(reports: Sequence[ComparisonReport]) -> Iterator[str]:
    trials = [report.first_trial for report in reports]
    if any(trial.placement.accelerator == "cpu" for trial in trials):
        yield "CPU: these times say nothing about GPUs, and the memory is the host memory of the process."
    if any(not trial.workload.synchronized for trial in trials):
        yield f"{_NOT_SYNCHRONIZED}."
    if any(trial.workload.pass_type != "train" for trial in trials):
        yield "Forward and backward passes are those of the model alone; training steps are DeepSpeed's."


def render_text(reports: Sequence[ComparisonReport]) -> str:
    """The tables aligned by spaces."""
    table = build_table(reports)
    parts = [
        escape_controls(table.title),
        "\n".join(map(escape_controls, table.models)),
        "\n".join(aligned_lines(table.rows, left=(0, 1))),
        "\n".join(aligned_lines(table.overview)),
        "\n".join(map(escape_controls, table.notes)),
    ]
    return "\n\n".join(filter(None, parts))


def render_markdown(reports: Sequence[ComparisonReport]) -> str:
    """The same as Markdown."""
    table = build_table(reports)
    parts = [
        f"### {escape(table.title)}",
        "\n".join(f"- {escape(line)}" for line in table.models),
        *("\n".join(table_lines(rows, ["---"] * len(rows[0]))) for rows in (table.rows, table.overview) if rows),
        "\n".join(f"- {escape(note)}" for note in table.notes),
    ]
    return "\n\n".join(filter(None, parts))
