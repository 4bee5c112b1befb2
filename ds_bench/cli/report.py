"""The command ``report``: results read from files, pooled if they are repeats, and shown again without a GPU."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..analysis import load_results, merge_results, provenance
from ..analysis.comparison import ComparisonRow, rows_called
from ..analysis.merge_results import ResultGroup
from ..config import strategies
from ..config.options import GOALS, ROW_FORMATS
from ..errors import UsageError
from ..records.json_files import json_text
from ..records.run_folder import RUN_FILE, csv_text
from ..report import configuration_export, html_report
from ..report.comparison_report import ComparisonReport, build_report
from ..report.data_frame import parquet_bytes
from ..report.terminal_report import print_reports
from ..system import invocation, terminal
from ..system.environment import require_installed
from ..system.files import write_text
from . import arguments

if TYPE_CHECKING:
    from ..analysis.row import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Flags of ``report``; the fields have the flags' names."""

    results: tuple[Path, ...]
    html: Path | None = None
    format: str = "table"
    """``table``, ``markdown``, or the flat rows: ``json``, ``csv``, ``parquet``."""
    output: Path | None = None
    """File of the flat rows; None: standard output."""
    plots: Path | None = None
    relative_to: str | None = None
    """None: the row that the run itself referred to, else the first."""
    goal: str | None = None
    """None: the run's own, else balanced."""
    export: str | None = None
    verbose: bool = False
    to: str | None = None
    """Tracker that gets the runs: one of ``options.TRACKERS``."""


def report(*, markdown: bool = False, **flags: Any) -> int:
    """Prints the results and writes the files that the flags name. Returns 0; raises UsageError."""
    options = ReportOptions(**flags)
    if markdown:
        if options.format not in ("table", "markdown"):
            raise UsageError(f"--markdown and --format {options.format} together", remedy="give one of them")
        options = replace(options, format="markdown")
    _check_targets(options)

    def tell(line: str) -> None:
        terminal.print_text(f"note: {terminal.escape_controls(line)}", sys.stderr)

    reports = build_reports(options.results, options.relative_to, options.goal, tell)
    # Before anything is printed: a whole table would hide why there is no configuration.
    exported = None if options.export is None else _row_to_export(reports, options.export)
    # The results are printed before any file is written: a disk that is full does not hide the answer.
    if options.format in ROW_FORMATS:
        _write_rows(reports, options)
    else:
        print_reports(reports, sys.stdout, as_markdown=options.format == "markdown", verbose=options.verbose)
    if options.html is not None:
        _write_html(reports, options.html)
    if options.plots is not None:
        _write_charts(reports, options.plots)
    if exported is not None:
        _export(*exported)
    if options.to is not None:
        _write_tensorboard(options.results)
    return 0


def check_output(flag: str, path: Path) -> None:
    """Raises UsageError for a path that cannot be a file, before anything is read."""
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a folder", remedy="give a file name")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: no folder {path.parent}", remedy="make it first")


def write_output(flag: str, path: Path, content: str | bytes) -> None:
    """Writes the file. Raises UsageError where it cannot be written."""
    try:
        # Text replaces the file at once, by a rename; a Parquet file is written in its place.
        if isinstance(content, str):
            write_text(path, content)
        else:
            path.write_bytes(content)
    except OSError as error:
        problem = f"{flag} {path}: {error.strerror or error}"
        raise UsageError(problem, remedy="give a file that you may write") from None


def flat_rows_of(reports: Sequence[ComparisonReport]) -> list[dict[str, Any]]:
    """The flat row of every trial, row by row of each report."""
    return [run.row.values() for each in reports for row in each.comparison.rows for run in row.runs]


def _write_rows(reports: Sequence[ComparisonReport], options: ReportOptions) -> None:
    """Writes the flat rows to the file of ``--output``, else to standard output. Raises UsageError.

    In JSON each row has the recommendation of its comparison too.
    """
    if options.format == "json":
        rows = [
            {**row, "recommendation": each.recommendation.to_dict()} for each in reports for row in flat_rows_of([each])
        ]
    else:
        rows = flat_rows_of(reports)
    content: str | bytes
    if options.format == "parquet":
        content = parquet_bytes(rows)
    else:
        content = json_text(rows) if options.format == "json" else csv_text(rows)
    if options.output is not None:
        write_output("--output", options.output, content)
        terminal.print_text(f"rows {options.output}", sys.stderr)
    # Bytes bypass the text layer of standard output.
    elif isinstance(content, bytes):
        sys.stdout.buffer.write(content)
    elif options.format == "json":
        terminal.print_json(content.removesuffix("\n"))
    else:
        terminal.print_text(content.removesuffix("\n"))


def _check_targets(options: ReportOptions) -> None:
    """Raises UsageError for a path that cannot be written, before anything is read."""
    if options.output is not None and options.format not in ROW_FORMATS:
        raise UsageError("--output is a file of rows", remedy=f"add --format, one of {', '.join(ROW_FORMATS)}")
    if options.format == "parquet" and options.output is None and sys.stdout.isatty():
        raise UsageError("--format parquet writes no text", remedy="give --output FILE")
    if options.to is not None:
        require_installed(options.to, f"--to {options.to}")
    for flag, path in (("--output", options.output), ("--html", options.html)):
        if path is not None:
            check_output(flag, path)
    if options.plots is not None and options.plots.exists() and not options.plots.is_dir():
        raise UsageError(f"--plots {options.plots} is not a folder", remedy="give a folder")


def build_reports(
    paths: Sequence[Path],
    relative_to: str | None = None,
    goal: str | None = None,
    tell: Callable[[str], None] = lambda _line: None,
) -> list[ComparisonReport]:
    """One report per workload and machine; repeats from several files are pooled. Raises UsageError.

    If ``relative_to`` or ``goal`` is None, the run's own is used; of several runs, the first known one.
    ``tell``: called with each note on a result that is left out; every report has these notes too.
    """
    results, notes = _load_all(paths)
    groups = merge_results.merge(results)
    for line in notes:
        tell(line)
    nowhere = relative_to is not None and not any(_has_row(group.runs, relative_to) for group in groups)
    reports = []
    for group in groups:
        own_goal, own_row, resume = _flags_of_run(group)
        row = own_row if relative_to is None else relative_to
        reports.append(
            build_report(
                group.runs,
                goal=goal or own_goal or "balanced",
                relative_to=row if nowhere or _has_row(group.runs, row) else None,  # a row found nowhere raises
                notes=[*notes, *group.notes],
                commands=group.commands,
                environments=group.environments,
                sources=[str(source) for source in group.sources],
                facts=group.facts,
                resume=resume,
            )
        )
    return reports


def _load_all(paths: Sequence[Path]) -> tuple[list[load_results.Result], list[str]]:
    """The results, and a note for each run without a finished trial. Raises UsageError."""
    results, notes = [], []
    for path in paths:
        try:
            results.append(load_results.load(path))
        except load_results.NoTrialsError as error:
            # Alone a result without trials is an error; among several, as of results/runs/*, the others are shown.
            if len(paths) == 1:
                raise
            notes.append(f"{error.problem}: left out")
    if not results:
        raise UsageError(notes[0].removesuffix(": left out"), remedy="give a result with a finished trial")
    return results, notes


def _flags_of_run(group: ResultGroup) -> tuple[str | None, str | None, str | None]:
    """Goal and baseline row from the flags or the recipe of the run, and the command that goes on with it.

    None for what the run does not record; the command only if all rows come from one run folder.
    """
    folder = group.sources[0] if len(group.sources) == 1 and (group.sources[0] / RUN_FILE).is_file() else None
    if group.recipe:
        goal = load_results.recipe_value(group.recipe, "output", "goal")
        row = load_results.recipe_value(group.recipe, "configurations", "relative_to")
        resume = None if folder is None else invocation.comparison("recipe", ["--resume", str(folder)])
        return goal if goal in GOALS else None, row if isinstance(row, str) else None, resume
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # --help, which an edited file may hold, prints
            options = arguments.parse("offload" if group.family == "offload" else "zero", "run", group.arguments)
    except (UsageError, ValueError, SystemExit):  # of another version, or edited by hand
        return None, None, None
    return options.goal, options.relative_to, None if folder is None else provenance.resume_command(options, folder)


def _has_row(runs: Sequence[Run], name: str | None) -> bool:
    return name is not None and any(strategies.matches(run.trial.configuration, name) for run in runs)


def _write_html(reports: Sequence[ComparisonReport], path: Path) -> None:
    """Raises UsageError where the page cannot be written."""
    page = html_report.render_page(reports, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, ds_bench {__version__}")
    write_output("--html", path, page)
    terminal.print_text(f"HTML {path}", sys.stderr)


def _write_tensorboard(paths: Sequence[Path]) -> None:
    from ..report import trackers

    line = trackers.write_tensorboard(trackers.tracked_runs([load_results.load(path) for path in paths]))
    terminal.print_text(terminal.escape_controls(line), sys.stderr)


def _write_charts(reports: Sequence[ComparisonReport], folder: Path) -> None:
    """Raises UsageError where the charts cannot be written."""
    from ..report.charts import save_charts

    try:
        paths = []
        for number, comparison_report in enumerate(reports, 1):
            paths += save_charts(
                comparison_report.title,
                comparison_report.comparison,
                folder if len(reports) == 1 else folder / f"{number:02d}",
                recommended=comparison_report.recommendation.key,
            )
    except OSError as error:
        problem = f"--plots {folder}: {error.strerror or error}"
        raise UsageError(problem, remedy="give a folder that you may write to") from None
    for path in paths:
        terminal.print_text(f"plot {path}", sys.stderr)


def _row_to_export(reports: Sequence[ComparisonReport], name: str) -> tuple[ComparisonReport, ComparisonRow]:
    """The row of that name, in the first report that holds its configuration.

    Says on standard error which one it is, if several rows are called that. Raises UsageError if none can be exported.
    """
    rows = _rows_called(reports, name)
    for comparison_report, row in rows:
        if row.last_run.record is not None:
            configuration_export.require_deepspeed(row.configuration)
            if len(rows) > 1:
                origin = f"{row.label} of {comparison_report.title} ({', '.join(comparison_report.sources)})"
                problem = f"--export {name}: {len(rows)} rows are called that; taken from {origin}"
                terminal.print_text(problem, sys.stderr)
            return comparison_report, row
    raise UsageError(
        f"--export {name}: a flat JSON does not have the configuration that ran", remedy="give the run folder"
    )


def _export(comparison_report: ComparisonReport, row: ComparisonRow) -> None:
    """Writes the configuration of the row. Raises UsageError."""
    folder = Path(configuration_export.folder_name(row.configuration.name))
    # The last run that trained; a row without any is exported as it was tried, and its README says so.
    environment = next(iter(comparison_report.environments), None)
    assert row.last_run.record is not None, "_row_to_export chose a row with a record"
    for path in configuration_export.write_exports(row.last_run.record, folder, environment):
        terminal.print_text(f"config {path}", sys.stderr)


def _rows_called(reports: Sequence[ComparisonReport], name: str) -> list[tuple[ComparisonReport, ComparisonRow]]:
    """The rows that the text means (``comparison.rows_called``). Raises UsageError if there are none."""
    rows = [row for report in reports for row in report.comparison.rows]
    # Over all reports together, so that an exact name in one goes before a similar name in another; by identity,
    # since reports may have equal rows.
    called = {id(row) for row in rows_called(rows, name)}
    matching = [(report, row) for report in reports for row in report.comparison.rows if id(row) in called]
    if not matching:
        names = dict.fromkeys(row.configuration.name for row in rows)
        raise UsageError(f"--export {name}: no such row", remedy=f"one of {', '.join(names)}")
    return matching
