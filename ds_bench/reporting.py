"""The verb ``report``: results read back from files, merged where they may be, shown again without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from . import __version__, answer, compare, console, export, load, merging, provenance, recommend
from .analysis import Summary
from .answer import Answer
from .contract import write_text
from .errors import UsageError
from .render import html_report


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What ``report`` was asked for; field names are those of the flags."""

    results: tuple[Path, ...]
    html: Path | None = None
    markdown: bool = False
    plots: Path | None = None
    relative_to: str | None = None
    goal: str = "balanced"
    export: str | None = None


def report(options: ReportOptions) -> int:
    """Shows the results on standard output and writes what was asked for. Raises UsageError; returns 0."""
    _check_targets(options)
    answers = gather(options.results, options.relative_to, options.goal)
    for number, entry in enumerate(answers):
        if number:
            print()
        _show(entry, options.markdown)
    if options.html is not None:
        write_html(answers, options.html)
        _say(f"HTML {options.html}")
    if options.plots is not None:
        from .render.plots import save_plots

        for number, entry in enumerate(answers):
            folder = options.plots if len(answers) == 1 else options.plots / f"{number + 1:02d}"
            for path in save_plots(_section(entry), _made(folder)):
                _say(f"plot {path}")
    if options.export is not None:
        _export(answers, options.export)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _show(entry: Answer, as_markdown: bool) -> None:
    if as_markdown:
        console.print_text(answer.markdown(entry))
    else:
        answer.print_answer(entry, sys.stdout)


def _check_targets(options: ReportOptions) -> None:
    """Paths that cannot be written are told before anything is read."""
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


def gather(paths: Sequence[Path], relative_to: str | None = None, goal: str = "balanced") -> list[Answer]:
    """One answer per workload and machine, repeats from several files taken together. Raises UsageError."""
    results = [load.load(path) for path in paths]
    families = {result.arguments: result.family for result in results}
    groups = merging.merge(results)
    has_row = [_has_row(group.summaries, relative_to) for group in groups]
    return [
        answer.of(
            group.summaries,
            goal=goal,
            relative_to=relative_to if has_row[number] or not any(has_row) else None,
            notes=group.notes,
            commands=[provenance.command(families.get(line), line) for line in group.arguments],
            environments=group.environments,
            sources=[str(source) for source in group.sources],
            heading=group.title,
        )
        for number, group in enumerate(groups)
    ]


def _has_row(summaries: Sequence[Summary], name: str | None) -> bool:
    return name is not None and any(compare.is_called(entry.record.trial.strategy, name) for entry in summaries)


def write_html(answers: Sequence[Answer], path: Path) -> None:
    """One self-contained page. Raises UsageError where it cannot be written."""
    environment = next((entry.environments[0] for entry in answers if entry.environments), None)
    page = html_report.render(
        html_report.Report(
            title=answers[0].title if len(answers) == 1 else f"{len(answers)} comparisons",
            sections=tuple(_section(entry) for entry in answers),
            command="\n".join(dict.fromkeys(line for entry in answers for line in entry.commands)),
            environment=provenance.machine(environment) if environment else {},
            generated=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, ds_bench {__version__}",
        )
    )
    try:
        write_text(path, page)
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}", remedy="give a file that you may write") from None


def _section(entry: Answer) -> html_report.ReportSection:
    return html_report.ReportSection(
        title=entry.title,
        comparison=entry.comparison,
        recommendation=tuple(recommend.lines(entry.recommendation, entry.goal)),
        notes=entry.notes,
        sources=entry.sources,
    )


def _export(answers: Sequence[Answer], name: str) -> None:
    """The configuration of that row, of the first answer that has it."""
    for entry in answers:
        for row in entry.comparison.results:
            if name in (row.strategy.name, row.label):
                record = (row.successes or row.summaries)[-1].record
                environment = entry.environments[0] if entry.environments else None
                folder = Path(f"ds_config_{row.strategy.name}")
                for path in export.write_exports(record, _made(folder), environment):
                    _say(f"config {path}")
                return
    names = dict.fromkeys(row.strategy.name for entry in answers for row in entry.comparison.results)
    raise UsageError(f"--export {name}: no such row", remedy=f"one of {', '.join(names)}")
