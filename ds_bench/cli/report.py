"""The command ``report``: read results from files, pool repeats, and show the report again without a GPU."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import __version__
from ..analysis import load_results, merge_results, provenance
from ..analysis.comparison import ComparisonRow, pooled_rows, rows_called
from ..analysis.load_results import Result
from ..analysis.merge_results import ResultGroup
from ..config.options import ROW_FORMATS
from ..errors import UsageError
from ..records.json_files import json_text
from ..records.result_files import csv_text
from ..records.run_folder import RUN_FILE, latest_run
from ..report.comparison_report import ComparisonReport, build_report
from ..report.data_frames import parquet_bytes
from ..report.tensorboard_export import tracked_runs, write_tensorboard
from ..report.terminal_report import print_reports
from ..system import terminal
from ..system.environment import require_installed
from ..system.files import write_text
from ..system.invocation import OpenCommand
from . import arguments


def report(
    *,
    results: Sequence[Path] = (),
    html: Path | None = None,
    markdown: bool = False,
    output_format: str = "table",
    output: Path | None = None,
    plots: Path | None = None,
    relative_to: str | None = None,
    goal: str | None = None,
    export: str | None = None,
    verbose: bool = False,
    to: str | None = None,
) -> int:
    """Print the results, or the latest run, and write the files that the flags name. Return 0; raises UsageError.

    ``output_format``: ``table``, ``markdown``, or flat rows, which go to ``output`` or standard output.
    ``relative_to`` and ``goal``: see :func:`build_reports`. ``to``: the tracker that receives the runs.
    """
    if markdown:
        if output_format not in ("table", "markdown"):
            raise UsageError(f"--markdown and --format {output_format} cannot be combined", remedy="give one of them")
        output_format = "markdown"
    # Refuse paths that cannot be written before reading anything.
    if output is not None and output_format not in ROW_FORMATS:
        raise UsageError("--output needs a row format", remedy=f"add --format, one of {', '.join(ROW_FORMATS)}")
    if output_format == "parquet" and output is None and sys.stdout.isatty():
        raise UsageError("--format parquet is binary and cannot be printed to a terminal", remedy="give --output FILE")
    if to is not None:
        require_installed(to, f"--to {to}")
    for flag, path in (("--output", output), ("--html", html)):
        if path is not None:
            check_output(flag, path)
    if plots is not None and plots.exists() and not plots.is_dir():
        raise UsageError(f"--plots {plots} is not a folder", remedy="give a folder")

    # With thousands of objects that stay alive, garbage collection would take a third of the time.
    gc.disable()
    try:
        reports = build_reports(
            results,
            relative_to,
            goal,
            lambda line: terminal.print_text(f"note: {terminal.escape_controls(line)}", sys.stderr),
        )
    finally:
        gc.freeze()
        gc.enable()
    # Before anything is printed: below a whole table, nobody would see why no configuration is written.
    exported = None if export is None else _row_to_export(reports, export)
    # Print the results before writing any file, so that a full disk does not hide the answer.
    if output_format in ROW_FORMATS:
        _write_rows(reports, output_format, output)
    else:
        print_reports(reports, sys.stdout, as_markdown=output_format == "markdown", verbose=verbose)
    if html is not None:
        from ..report import html_report  # like plots and exports: most reports need none

        page = html_report.render_page(reports, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, ds_bench {__version__}")
        write_output("--html", html, page)
        terminal.print_text(f"HTML report: {html}", sys.stderr)
    if plots is not None:
        _write_charts(reports, plots)
    if exported is not None:
        of, row = exported
        from ..report import exported_configuration

        folder = Path(exported_configuration.folder_name(row.configuration.name))
        assert row.last_run.record is not None, "_row_to_export chose a row with a record"
        # The last run that trained. If none did, the row is exported as it was tried, and its README says so.
        environment = next(iter(of.environments), None)
        for path in exported_configuration.write_exports(row.last_run.record, folder, environment):
            terminal.print_text(f"config {path}", sys.stderr)
    if to is not None:
        line = write_tensorboard(tracked_runs(_load_finished(results)[0]))
        terminal.print_text(terminal.escape_controls(line), sys.stderr)
    return 0


def check_output(flag: str, path: Path) -> None:
    """Raise UsageError for a path that cannot be a file, before anything is read."""
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a folder", remedy="give a file name")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: no folder {path.parent}", remedy="create it first")


def write_output(flag: str, path: Path, content: str | bytes) -> None:
    """Write the file. Raises UsageError if it cannot be written."""
    try:
        # Text replaces the file atomically, by a rename; Parquet is written in place.
        if isinstance(content, str):
            write_text(path, content)
        else:
            path.write_bytes(content)
    except OSError as error:
        problem = f"{flag} {path}: {error.strerror or error}"
        raise UsageError(problem, remedy="give a file that you can write to") from None


def flat_rows_of(reports: Sequence[ComparisonReport]) -> list[dict[str, Any]]:
    """Return the flat row of every trial, row by row of each report."""
    return [run.row.values() for each in reports for row in each.comparison.rows for run in row.runs]


def _write_rows(reports: Sequence[ComparisonReport], output_format: str, output: Path | None) -> None:
    """Write the flat rows to the file, or to standard output without one. Raises UsageError.

    In JSON each row also has the recommendation of its comparison.
    """
    rows = flat_rows_of(reports)
    content: str | bytes
    if output_format == "parquet":
        content = parquet_bytes(rows)
    elif output_format == "csv":
        content = csv_text(rows)
    else:
        content = json_text(
            [
                {**row, "recommendation": each.recommendation.to_dict()}
                for each in reports
                for row in flat_rows_of([each])
            ]
        )
    if output is not None:
        write_output("--output", output, content)
        terminal.print_text(f"rows {output}", sys.stderr)
    # Bytes bypass the text layer of standard output.
    elif isinstance(content, bytes):
        sys.stdout.buffer.write(content)
    else:
        show = terminal.print_json if output_format == "json" else terminal.print_text
        show(content.removesuffix("\n"))


def build_reports(
    paths: Sequence[Path],
    relative_to: str | None = None,
    goal: str | None = None,
    on_note: Callable[[str], None] = lambda _line: None,
) -> list[ComparisonReport]:
    """Return one report per workload and machine, with repeats from several files pooled. Raises UsageError.

    ``paths``: if empty, the latest run below ``results``.
    If ``relative_to`` or ``goal`` is None, the run's own is used; with several runs, the first one known.
    ``on_note``: called with a note on each result that is left out; every report has these notes too.
    """
    results, notes = _load_finished(paths, whole=len(paths) > 1)
    for line in notes:
        on_note(line)
    groups = merge_results.merge(results)

    def has_row(group: ResultGroup, name: str | None) -> bool:
        return name is not None and bool(rows_called(pooled_rows(group.runs), name))

    nowhere = relative_to is not None and not any(has_row(group, relative_to) for group in groups)
    reports = []
    for group in groups:
        own_goal, own_row, resume = _flags_of_run(group)
        row = own_row if relative_to is None else relative_to
        is_there = has_row(group, row)
        notes_of_group = [*notes, *group.notes]
        # The row equals another one and was left out, or the run ended before it.
        if relative_to is None and row is not None and not is_there:
            notes_of_group.append(f"the result has no row {row}; ratios are relative to the first usable row")
        reports.append(
            build_report(
                group.runs,
                goal=goal or own_goal or "balanced",
                relative_to=row if nowhere or is_there else None,  # a row found nowhere raises
                notes=notes_of_group,
                commands=group.commands,
                environments=group.environments,
                sources=[str(source) for source in group.sources],
                facts=group.facts,
                resume=resume,
            )
        )
    return reports


def _load_finished(paths: Sequence[Path], *, whole: bool = True) -> tuple[list[Result], list[str]]:
    """Load the results, by default the latest run; a result without trials only adds a note. Raises UsageError."""
    results, left_out = [], []
    for path in (paths := paths or [latest_run()]):
        try:
            results.append(load_results.load(path, whole=whole))
        except load_results.NoTrialsError as error:
            # A single result without trials is an error. Among several, as with results/runs/*, show the others.
            if len(paths) == 1:
                raise
            left_out.append(error.problem)
    if not results:
        raise UsageError(left_out[0], remedy="give a result with a finished trial")
    return results, [f"{problem}: left out" for problem in left_out]


def _flags_of_run(group: ResultGroup) -> tuple[str | None, str | None, OpenCommand | None]:
    """Return goal and baseline row from the run's flags or recipe, and the command that resumes it.

    None for what the run does not record; no command unless all rows come from one run folder.
    """
    folder = group.sources[0] if len(group.sources) == 1 and (group.sources[0] / RUN_FILE).is_file() else None
    try:
        if group.recipe:
            from ..config.recipe import check_recipe, options_of
            from ..config.recipe_file import RecipeText
            from ..config.sweep import find_sweep

            text = RecipeText.of_stored(group.recipe)
            sweep = find_sweep(text)
            options = options_of(check_recipe(text, sweep.data_of(sweep.first_point)), text.folder)
        else:
            with contextlib.redirect_stdout(io.StringIO()):  # --help, which an edited file may hold, prints
                options = arguments.parse("offload" if group.family == "offload" else "zero", "run", group.arguments)
    # The file was written by a different version, or edited by hand.
    except (UsageError, ValueError, TypeError, KeyError, AttributeError, SystemExit):
        return None, None, None
    return options.goal, options.relative_to, None if folder is None else provenance.resume_command(options, folder)


def _write_charts(reports: Sequence[ComparisonReport], folder: Path) -> None:
    """Write the charts. Raises UsageError if they cannot be written."""
    from ..report.chart_drawing import save_charts
    from ..report.comparison_charts import charts_of

    try:
        paths = []
        for number, comparison_report in enumerate(reports, 1):
            paths += save_charts(
                comparison_report.title,
                charts_of(comparison_report.comparison, comparison_report.recommendation.key)[0],
                folder if len(reports) == 1 else folder / f"{number:02d}",
            )
    except OSError as error:
        problem = f"--plots {folder}: {error.strerror or error}"
        raise UsageError(problem, remedy="give a folder that you can write to") from None
    for path in paths:
        terminal.print_text(f"Plot: {path}", sys.stderr)


def _row_to_export(reports: Sequence[ComparisonReport], name: str) -> tuple[ComparisonReport, ComparisonRow]:
    """Return the row of that name, from the first report that holds its configuration.

    If several rows match the name, print to standard error which one it is. Raises UsageError if none can be exported.
    """
    rows = [row for each in reports for row in each.comparison.rows]
    # Search all reports together, so that an exact name in one beats a similar name in another. Compare by identity,
    # since reports may have equal rows.
    called = {id(row) for row in rows_called(rows, name)}
    matching = [(each, row) for each in reports for row in each.comparison.rows if id(row) in called]
    if not matching:
        names = dict.fromkeys(row.configuration.name for row in rows)
        raise UsageError(f"--export {name}: no such row", remedy=f"choose from {', '.join(names)}")
    for each, row in matching:
        if row.last_run.has_record:
            from ..report import exported_configuration

            exported_configuration.require_deepspeed(row.configuration)
            if len(matching) > 1:
                origin = f"{row.label} of {each.title} ({', '.join(each.sources)})"
                text = f"--export {name}: {len(matching)} rows match that name; taken from {origin}"
                terminal.print_text(text, sys.stderr)
            return each, row
    raise UsageError(
        f"--export {name}: a flat JSON does not have the configuration that ran", remedy="give the run folder"
    )
