"""Several comparisons in one table: throughput of models by strategy, times of passes by model, answers of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..analysis.comparison import ComparisonRow
from ..analysis.provenance import STEP_NAMES
from ..analysis.trial_caveats import UNSTABLE_CV
from ..config.spec import PASS_TYPES, Workload, point_text
from ..records.schema import measured_values
from ..system import environment
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
from .table import Column, Table, make_table
from .table_columns import failure_text

SIZE_PREFIX = "size-"
"""Beginning of the names of the models of the model-size benchmark."""
_INVALID = "*"
_POINT_SECTIONS = ("dataset.path", "dataset.vocab_size", "dataloader.", "optimizer.", "configurations.")
"""Beginnings of the key paths of a sweep that no other fact of a row's name shows."""


def common_facts(reports: Sequence[ComparisonReport]) -> tuple[str, ...]:
    """The facts of all comparisons, such as ``tiny``, ``2 CPU ranks``, ``bf16``."""
    return tuple(fact for fact in reports[0].facts if all(fact in report.facts for report in reports))


def summary_lines(reports: Sequence[ComparisonReport]) -> list[str]:
    """The answer of each point of a sweep in one line, after the facts of all points."""
    common = common_facts(reports)
    lines = [" · ".join([f"{len(reports)} points", *common]), ""]
    for report in reports:
        own = " · ".join(fact for fact in report.facts if fact not in common) or report.title
        lines.append(f"{'★' if report.recommendation.decided else '?'} {own}: {report.recommendation.headline}")
    provisional = [report.recommendation.try_next for report in reports if report.recommendation.provisional]
    return lines + [f"  To decide: {command}" for command in dict.fromkeys(provisional)]


# ------------------------------------------------------------------ models by strategy


def model_tables(reports: Sequence[ComparisonReport]) -> list[Table]:
    """Throughput, models down and strategies across: a table for each machine with two reports or more."""
    groups: list[list[ComparisonReport]] = []
    for report in reports:
        # All members, because a report without a device agrees with reports that do not agree with each other.
        group = next((group for group in groups if all(_same_machine(member, report) for member in group)), None)
        if group is None:
            groups.append(group := [])
        group.append(report)
    return [_model_table(group) for group in groups if len(group) > 1]


def _same_machine(a: ComparisonReport, b: ComparisonReport) -> bool:
    """Whether accelerator, device and environment agree; a report without a measured device agrees with any device."""
    if len({report.first_trial.placement.accelerator for report in (a, b)}) > 1:
        return False
    if len({_device(a), _device(b)} - {None}) > 1:
        return False
    if a.environments and b.environments:
        return not environment.comparability_differences(a.environments[0], b.environments[0])
    return not a.environments and not b.environments


def _device(report: ComparisonReport) -> str | None:
    """Name of the device of the first row that has one."""
    runs = (run for row in report.comparison.rows for run in row.runs)
    return next((rank.device_name for run in runs for rank in run.ranks), None)


def _model_table(group: Sequence[ComparisonReport]) -> Table:
    labels = list(dict.fromkeys(row.label for report in group for row in report.comparison.rows))
    device = next(filter(None, map(_device, group)), group[0].first_trial.placement.accelerator)
    rows = []
    for name, report in zip(_row_names(group), group, strict=True):
        cells = {row.label: _throughput(row) for row in report.comparison.rows}
        rows.append([name, *(cells.get(label, "") for label in labels)])
    invalid = any(cell.endswith(_INVALID) for row in rows for cell in row[1:])
    return Table(
        title=(f"Tokens/s of the whole job, models side by side ({device})",),
        columns=[Column(heading=heading) for heading in ("Model", *labels)],
        rows=rows,
        notes=[f"Rows with {_INVALID} are disqualified: their own table says why."] if invalid else [],
    )


def _throughput(row: ComparisonRow) -> str:
    """Tokens/s, with an asterisk if the row is disqualified; the status if it has no throughput."""
    if row.tokens_per_second is None:
        return row.last_run.outcome.status
    return format_count(row.tokens_per_second) + ("" if row.invalid_reason is None else _INVALID)


def _row_names(group: Sequence[ComparisonReport]) -> list[str]:
    """The models, with what else the reports differ in; whole titles if that does not distinguish them all."""
    trials = [report.first_trial for report in group]
    facts = []
    paths = dict.fromkeys(path for trial in trials for path in trial.point if path.startswith(_POINT_SECTIONS))
    for trial in trials:
        work, placement = trial.workload, trial.placement
        largest = work.batch_policy == "largest"
        facts.append(
            (
                "largest micro-batch" if largest else f"micro-batch {work.batch_size}",
                "longest sequence" if work.seq_policy == "longest" else f"{work.seq_length} tokens",
                f"{work.grad_accum} accumulated",
                work.precision,
                f"checkpointing {'on' if work.activation_checkpointing else 'off'}",
                f"dropout {'of the model' if work.dropout is None else work.dropout}",
                f"{work.warmup_steps} + {work.num_steps} steps",
                f"seed {work.seed}",
                f"{placement.ranks_text} {'GPU' if placement.accelerator == 'cuda' else 'CPU rank'}(s)",
                *(point_text({path: trial.point[path]}) if path in trial.point else "" for path in paths),
            )
        )
    differing = [index for index, values in enumerate(zip(*facts, strict=True)) if len(set(values)) > 1]
    names = [
        ", ".join([trial.workload.model, *(own[index] for index in differing if own[index])])
        for trial, own in zip(trials, facts, strict=True)
    ]
    return names if len(set(names)) == len(names) else [report.title for report in group]


# ------------------------------------------------------------------ models by pass type


_PASS_TEXTS = {"forward": "forward", "forward_backward": "forward + backward", "train": "training step"}
_SHAPE_KEYS = {
    "d_model": ("n_embd", "hidden_size"),
    "d_ff": ("n_inner", "intermediate_size", "ffn_dim"),
    "layers": ("n_layer", "num_hidden_layers"),
    "heads": ("n_head", "num_attention_heads"),
    "vocabulary": ("vocab_size",),
}
"""Dimension of a model → its names in models' configurations."""
_NOT_SYNCHRONIZED = (
    "NOT SYNCHRONISED, wrong on purpose: the clock was read without waiting for the device. On a GPU these are the "
    "times of launching the work, and every figure that follows from them is wrong."
)


def has_passes(reports: Sequence[ComparisonReport]) -> bool:
    """Whether passes other than training steps were timed, or models of the model-size benchmark trained."""
    workloads = [report.first_trial.workload for report in reports if report.comparison.rows]
    sizes = bool(workloads) and all(workload.model.startswith(SIZE_PREFIX) for workload in workloads)
    return sizes or any(workload.pass_type != "train" for workload in workloads)


def pass_tables(reports: Sequence[ComparisonReport]) -> list[Table]:
    """Times of every pass of every model; with several pass types also models down and passes across.

    Models are in order of appearance, pass types in the order of a training step.
    """
    reports = [report for report in reports if report.comparison.rows]
    common = common_facts(reports)
    names = [_model_name(report, common) for report in reports]
    order = list(dict.fromkeys(names))
    by_pass = sorted(
        zip(names, reports, strict=True),
        key=lambda pair: (order.index(pair[0]), PASS_TYPES.index(pair[1].first_trial.workload.pass_type)),
    )
    several = len({row.label for report in reports for row in report.comparison.rows}) > 1
    rows = [
        (f"{name}, {row.label}" if several else name, row) for name, report in by_pass for row in report.comparison.rows
    ]
    title = (f"Passes of {format_items(len(order), 'model')}", *common)
    models = [*dict.fromkeys(map(_model_line, reports))]
    columns = [(Column(heading="Model"), _cell(lambda name, _: name)), *_PASS_COLUMNS]
    times = make_table(columns, rows, always=len(columns))
    overview = [_overview(rows)] if len({row.trial.workload.pass_type for _, row in rows}) > 1 else []
    notes = [*_failures(rows), *_pass_notes(reports)]
    tables = [Table(title=title, notes=models), times, *overview]
    return [*tables[:-1], Table(columns=tables[-1].columns, rows=tables[-1].rows, notes=notes)]


NamedRow = tuple[str, ComparisonRow]


def _cell(text: Callable[[str, ComparisonRow], str]) -> Callable[[NamedRow], str]:
    return lambda named: text(*named)


def _measured(text: Callable[[ComparisonRow], str]) -> Callable[[NamedRow], str]:
    return lambda named: MISSING if named[1].mean_step_seconds is None else text(named[1])


def _variation(row: ComparisonRow) -> float | None:
    if row.step_seconds_std is None or row.mean_step_seconds is None:
        return None
    return row.step_seconds_std / row.mean_step_seconds


def _stable(row: ComparisonRow) -> str:
    variation = _variation(row)
    return MISSING if variation is None else "stable" if variation < UNSTABLE_CV else "unstable"


def _mean_ms(row: ComparisonRow) -> str:
    failed = f"✗ {row.runs[-1].outcome.status}"
    return failed if row.mean_step_seconds is None else format_ms(row.mean_step_seconds)


def _tflops(row: ComparisonRow) -> str:
    return format_significant(
        next((run.row.model_tflops_per_gpu for run in row.successes if run.row.model_tflops_per_gpu), None)
    )


_PASS_COLUMNS: tuple[tuple[Column, Callable[[NamedRow], str]], ...] = (
    (Column(heading="Pass", left=True), _cell(lambda _, row: _PASS_TEXTS[row.trial.workload.pass_type])),
    (Column(heading="mean ms"), _cell(lambda _, row: _mean_ms(row))),
    (Column(heading="mean s", priority=3), _measured(lambda row: f"{row.mean_step_seconds:.5f}")),
    (Column(heading="std ms", priority=2), _measured(lambda row: format_ms(row.step_seconds_std))),
    (Column(heading="CV", priority=1), _measured(lambda row: format_percent(_variation(row), digits=2))),
    (Column(heading="under 5 %"), _measured(_stable)),
    (Column(heading="tok/s"), _measured(lambda row: format_count(row.tokens_per_second))),
    (Column(heading="TFLOP/s"), _measured(_tflops)),
    (
        Column(heading="peak GB"),
        _measured(
            lambda row: f"{format_gb(row.host_peak_bytes)} host" if row.on_cpu else format_gb(row.gpu_peak_bytes)
        ),
    ),
)


def _overview(rows: Sequence[NamedRow]) -> Table:
    """Mean milliseconds, models down and pass types across."""
    times: dict[str, dict[str, str]] = {}
    for name, row in rows:
        unit = "" if row.mean_step_seconds is None else " ms"
        times.setdefault(name, {})[row.trial.workload.pass_type] = _mean_ms(row) + unit
    shown = [each for each in PASS_TYPES if any(each in own for own in times.values())]
    return Table(
        columns=[Column(heading=heading) for heading in ("Model", *(_PASS_TEXTS[each] for each in shown))],
        rows=[(name, *(own.get(each, MISSING) for each in shown)) for name, own in times.items()],
    )


def _model_name(report: ComparisonReport, common: Sequence[str]) -> str:
    """The model, with what else of its facts is not common to all, but for the number and kind of steps."""
    model, *others = report.facts
    return " · ".join([model, *(f for f in others if f not in common and not f.endswith(tuple(STEP_NAMES.values())))])


def _model_line(report: ComparisonReport) -> str:
    """``size-small: d_model 768 · … · 94,298,112 parameters (94.3 M)``; parameters as counted in the built model."""
    workload = report.first_trial.workload
    counts = measured_values([run.row for row in report.comparison.rows for run in row.successes], "parameter_count")
    shape = [f"{name} {format_count(size)}" for name, size in _shape(workload).items()]
    counted = (
        f"{format_count(counts[0])} parameters ({format_millions(counts[0])})" if counts else "parameters not counted"
    )
    return f"{workload.model}: {' · '.join([*shape, counted])}"


def _shape(workload: Workload) -> Mapping[str, int]:
    sizes = {}
    for name, keys in _SHAPE_KEYS.items():
        size = next((workload.model_config[key] for key in keys if key in workload.model_config), None)
        if isinstance(size, int):  # None where the model derives it, such as n_inner of GPT-2
            sizes[name] = size
    return sizes


def _failures(rows: Sequence[NamedRow]) -> Iterator[str]:
    for name, row in rows:
        if not row.succeeded:
            run = row.runs[-1]
            yield f"{name}, {_PASS_TEXTS[run.trial.workload.pass_type]}: {failure_text(run.outcome)}."


def _pass_notes(reports: Sequence[ComparisonReport]) -> Iterator[str]:
    trials = [report.first_trial for report in reports]
    if any(trial.placement.accelerator == "cpu" for trial in trials):
        yield "CPU: these times say nothing about GPUs, and the memory is the host memory of the process."
    if any(not trial.workload.synchronized for trial in trials):
        yield _NOT_SYNCHRONIZED
    if any(trial.workload.pass_type != "train" for trial in trials):
        yield "Forward and backward passes are of the model without DeepSpeed; training steps are DeepSpeed's."
