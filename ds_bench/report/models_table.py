"""Several comparisons of one machine side by side: a table of throughput, models down and strategies across."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..analysis.comparison import ComparisonRow
from ..config.spec import point_text
from ..system import environment
from ..system.terminal import aligned_lines, escape_controls
from ..units import format_count
from .comparison_report import ComparisonReport
from .markdown import escape, table_lines

_TITLE = "Tokens/s of the whole job, models side by side"
_POINT_SECTIONS = ("dataset.path", "dataset.vocab_size", "dataloader.", "optimizer.", "configurations.")
"""Beginnings of the key paths of a sweep that no other fact of a row's name shows."""
_INVALID_FOOTNOTE = "* not to be used: its own table says why"


def render_text(reports: Sequence[ComparisonReport]) -> str:
    """Tables aligned by spaces, one per machine with two reports or more; empty without any."""
    tables = []
    for device, group in _group_by_machine(reports):
        rows = _table(group)
        lines = [f"{_TITLE} ({escape_controls(device)})", *aligned_lines(rows)]
        tables.append("\n".join([*lines, *([_INVALID_FOOTNOTE] if _has_invalid(rows) else [])]))
    return "\n\n".join(tables)


def render_markdown(reports: Sequence[ComparisonReport]) -> str:
    """The same as Markdown."""
    tables = []
    for device, group in _group_by_machine(reports):
        rows = _table(group)
        lines = table_lines(rows, ["---", *("---:" for _ in rows[0][1:])])
        footnote = [f"\n\\{_INVALID_FOOTNOTE}"] if _has_invalid(rows) else []  # a bare asterisk would begin a list
        tables.append("\n".join([f"### {_TITLE} ({escape(device)})", "", *lines, *footnote]))
    return "\n\n".join(tables)


def _group_by_machine(reports: Sequence[ComparisonReport]) -> Iterator[tuple[str, list[ComparisonReport]]]:
    """Groups of two reports or more whose throughputs may be read beside each other, each with its device."""
    groups: list[list[ComparisonReport]] = []
    for report in reports:
        # All members, because a report without a device agrees with reports that do not agree with each other.
        group = next((group for group in groups if all(_same_machine(member, report) for member in group)), None)
        if group is None:
            groups.append(group := [])
        group.append(report)
    for group in groups:
        if len(group) > 1:
            yield next(filter(None, map(_device, group)), group[0].first_trial.placement.accelerator), group


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
    runs = (run for row in report.comparison.rows for run in row.summaries)
    return next((rank.device_name for run in runs for rank in run.record.ranks), None)


def _table(group: Sequence[ComparisonReport]) -> list[list[str]]:
    """Headings, then a row for each report; cells of strategies that it did not run are empty."""
    labels = list(dict.fromkeys(row.label for report in group for row in report.comparison.rows))
    rows = [["Model", *labels]]
    for name, report in zip(_row_names(group), group, strict=True):
        cells = {row.label: _cell(row) for row in report.comparison.rows}
        rows.append([name, *(cells.get(label, "") for label in labels)])
    return rows


def _cell(row: ComparisonRow) -> str:
    """Tokens/s, with an asterisk if the row is disqualified; the status if there are none."""
    if row.tokens_per_second is None:
        return row.last_record.outcome.status
    return format_count(row.tokens_per_second) + ("" if row.invalid_reason is None else "*")


def _has_invalid(rows: Sequence[Sequence[str]]) -> bool:
    return any(cell.endswith("*") for row in rows[1:] for cell in row[1:])


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
