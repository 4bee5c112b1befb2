"""The command ``report``: results read from files, pooled if they are repeats, and shown again without a GPU."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .. import __version__
from ..analysis import load_results, merge_results, provenance
from ..analysis.comparison import ComparisonRow
from ..analysis.merge_results import ResultGroup
from ..analysis.summary import TrialSummary
from ..config import strategies
from ..config.deepspeed_config import is_full_config
from ..errors import UsageError
from ..recommend import recommendation
from ..records.rank_files import write_text
from ..report import comparison_report, export, html_report, models_table
from ..report.comparison_report import Answer
from ..system import terminal
from . import arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Flags of ``report``; the fields have the flags' names."""

    results: tuple[Path, ...]
    html: Path | None = None
    markdown: bool = False
    plots: Path | None = None
    relative_to: str | None = None
    """None: the row that the run itself referred to, else the first."""
    goal: str | None = None
    """None: the run's own, else balanced."""
    export: str | None = None


def report(options: ReportOptions) -> int:
    """Prints the results and writes the files that the flags name. Returns 0; raises UsageError."""
    _check_targets(options)
    answers = gather(options.results, options.relative_to, options.goal)
    for number, entry in enumerate(answers):
        if number:
            terminal.print_text("")
        _show(entry, options.markdown)
    if side_by_side := _side_by_side(answers, options.markdown):
        terminal.print_text(f"\n{side_by_side}")
    if options.html is not None:
        write_html(answers, options.html)
        _say(f"HTML {options.html}")
    if options.plots is not None:
        _plot(answers, options.plots)
    if options.export is not None:
        _export(answers, options.export)
    return 0


def _plot(answers: Sequence[Answer], folder: Path) -> None:
    """Raises UsageError where the charts cannot be written."""
    from ..report.charts import save_charts

    for number, entry in enumerate(answers):
        mine = _made(folder if len(answers) == 1 else folder / f"{number + 1:02d}")
        try:
            written = save_charts(entry.title, entry.comparison, mine)
        except OSError as error:
            problem = f"--plots {mine}: {error.strerror or error}"
            raise UsageError(problem, remedy="give a folder that you may write to") from None
        for path in written:
            _say(f"plot {path}")


def _say(text: str) -> None:
    terminal.print_text(text, sys.stderr)


def _show(entry: Answer, as_markdown: bool) -> None:
    if as_markdown:
        terminal.print_text(comparison_report.markdown(entry))
    else:
        comparison_report.print_answer(entry, sys.stdout)


def _side_by_side(answers: Sequence[Answer], as_markdown: bool) -> str:
    entries = [
        models_table.Entry(
            title=entry.title, comparison=entry.comparison, environment=next(iter(entry.environments), None)
        )
        for entry in answers
    ]
    return models_table.markdown(entries) if as_markdown else models_table.text(entries)


def _check_targets(options: ReportOptions) -> None:
    """Raises UsageError for a path that cannot be written, before anything is read."""
    if options.html is not None:
        if options.html.is_dir():
            raise UsageError(f"--html {options.html} is a folder", remedy="give a file name")
        if not options.html.parent.is_dir():
            raise UsageError(f"--html {options.html}: no folder {options.html.parent}", remedy="make it first")
    if options.plots is not None and options.plots.exists() and not options.plots.is_dir():
        raise UsageError(f"--plots {options.plots} is not a folder", remedy="give a folder")


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}", remedy="give another folder") from None
    return folder


def gather(paths: Sequence[Path], relative_to: str | None = None, goal: str | None = None) -> list[Answer]:
    """One answer per workload and machine, repeats from several files taken together. Raises UsageError.

    If ``relative_to`` or ``goal`` is None, it is that of the run itself; of several runs, that of the first known.
    """
    groups = merge_results.merge([load_results.load(path) for path in paths])
    known = any(_has_row(group.summaries, relative_to) for group in groups)
    return [_answer(group, relative_to, goal, strict=not known) for group in groups]


def _answer(group: ResultGroup, relative_to: str | None, goal: str | None, *, strict: bool) -> Answer:
    """``strict``: a row that is not there is an error, since no other group has it either."""
    own_goal, own_row = _own(group)
    row = own_row if relative_to is None else relative_to
    return comparison_report.of(
        group.summaries,
        goal=goal or own_goal or "balanced",
        relative_to=row if _has_row(group.summaries, row) or (strict and relative_to is not None) else None,
        notes=group.notes,
        commands=group.commands,
        environments=group.environments,
        sources=[str(source) for source in group.sources],
        heading=group.title,
    )


def _own(group: ResultGroup) -> tuple[str | None, str | None]:
    """Goal and reference row from the flags of the run; None for both if the flags cannot be parsed."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a --help among them, which no run has
            options = arguments.parse("offload" if group.family == "offload" else "zero", "run", group.arguments)
    except (UsageError, ValueError, SystemExit):  # of another version, or edited by hand
        return None, None
    return options.goal, options.relative_to


def _has_row(summaries: Sequence[TrialSummary], name: str | None) -> bool:
    return name is not None and any(strategies.matches(entry.record.trial.strategy, name) for entry in summaries)


def write_html(answers: Sequence[Answer], path: Path) -> None:
    """One self-contained page. Raises UsageError where it cannot be written."""
    machines = [_machines(entry) for entry in answers]
    one = len(set(map(str, machines))) == 1 and len(machines[0]) < 2
    page = html_report.render(
        html_report.Report(
            title=answers[0].title if len(answers) == 1 else f"{len(answers)} comparisons",
            sections=tuple(
                _section(entry, None if one else mine) for entry, mine in zip(answers, machines, strict=True)
            ),
            command="\n".join(dict.fromkeys(line for entry in answers for line in entry.commands)),
            environment=next(iter(machines[0]), {}) if one else {},
            generated=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, ds_bench {__version__}",
        )
    )
    try:
        write_text(path, page)
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}", remedy="give a file that you may write") from None


def _machines(entry: Answer) -> tuple[dict[str, str], ...]:
    """What a reader needs to know of each machine that the rows were measured on."""
    machines: list[dict[str, str]] = []
    for environment in entry.environments:
        if (machine := provenance.machine(environment)) not in machines:
            machines.append(machine)
    return tuple(machines)


def _section(entry: Answer, machines: tuple[dict[str, str], ...] | None = None) -> html_report.ReportSection:
    return html_report.ReportSection(
        title=entry.title,
        comparison=entry.comparison,
        recommendation=tuple(recommendation.lines(entry.recommendation, entry.goal)),
        notes=entry.notes,
        sources=entry.sources,
        environments=machines,
    )


def _export(answers: Sequence[Answer], name: str) -> None:
    """The configuration of that row, of the first answer that tells it. Raises UsageError."""
    rows = _called([(entry, row) for entry in answers for row in entry.comparison.results], name)
    for entry, row in rows:
        record = (row.successes or row.summaries)[-1].record
        if is_full_config(record.trial):
            if len(rows) > 1:
                origin = f"{row.label} of {entry.title} ({', '.join(entry.sources)})"
                _say(f"--export {name}: {len(rows)} rows are called that; taken from {origin}")
            folder = _made(Path(export.folder_name(row.strategy.name)))
            for path in export.write_exports(record, folder, next(iter(entry.environments), None)):
                _say(f"config {path}")
            return
    raise UsageError(
        f"--export {name}: a flat JSON does not tell the configuration that ran", remedy="give the run folder"
    )


_Row = tuple[Answer, ComparisonRow]


def _called(rows: Sequence[_Row], name: str) -> list[_Row]:
    """Those of exactly that name, else those that a user may mean by it. Raises UsageError where there is none."""
    exact = [(entry, row) for entry, row in rows if name in (row.strategy.name, row.label)]
    meant = exact or [(entry, row) for entry, row in rows if strategies.matches(row.strategy, name)]
    if not meant:
        names = dict.fromkeys(row.strategy.name for _, row in rows)
        raise UsageError(f"--export {name}: no such row", remedy=f"one of {', '.join(names)}")
    return meant
