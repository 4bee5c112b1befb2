"""The end of a run: the answer on standard output, the chosen configuration on disk, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..analysis import summary as analysis
from ..analysis.comparison import StrategyResult
from ..config.options import Options
from ..recommend import recommendation
from ..records.rank_files import write_json
from ..records.schema import INTERRUPTED
from ..system import signals, terminal
from ..system.environment import Environment
from . import comparison_report, export, table
from .comparison_report import Answer

OK, NONE_SUCCEEDED, INTERRUPTED_CODE = 0, 1, 130


def show(options: Options, found: Answer, rows: Sequence[dict[str, Any]]) -> None:
    """The answer on standard output, in the format asked for."""
    with terminal.pipe_may_close():
        if options.format == "json":
            terminal.print_json(table.as_json(rows))
        elif options.format == "markdown":
            terminal.print_text(comparison_report.markdown(found))
        else:
            comparison_report.print_answer(found, sys.stdout)


def write_configuration(options: Options, found: Answer, run_folder: Path, facts: Environment) -> Path | None:
    """The recommended row's configuration, or that of ``--export``, ready to be used; its folder, None without one."""
    row = _asked(options, found) if options.export else found.chosen
    if row is None:
        return None
    folder = run_folder / (f"export_{row.strategy.name}" if options.export else "recommended")
    folder.mkdir(exist_ok=True)
    doubt = None
    if not options.export and not found.recommendation.decided:
        doubt = recommendation.lines(found.recommendation, found.goal)[0]
    export.write_exports((row.successes or row.summaries)[-1].record, folder, facts, doubt)
    if not options.export:
        write_json(folder / "recommendation.json", found.recommendation_facts())
    return folder


def _asked(options: Options, found: Answer) -> StrategyResult | None:
    """None where an interruption came before that row."""
    return next((row for row in found.comparison.results if row.strategy.name == options.export), None)


def exit_code(options: Options, summaries: Sequence[analysis.Summary]) -> int:
    """0 a row succeeded, 1 none did, 130 interrupted; with --strict 1 when any failed."""
    outcomes = [summary.record.outcome for summary in summaries]
    if signals.asked() or any(outcome.status == INTERRUPTED for outcome in outcomes):
        return INTERRUPTED_CODE
    if options.strict and not all(outcome.success for outcome in outcomes):
        return NONE_SUCCEEDED
    return OK if any(outcome.success for outcome in outcomes) else NONE_SUCCEEDED
