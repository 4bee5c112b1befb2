"""What a report says of its rows beside the table: small tables, each about one thing that was observed, and texts.

They are the same in the terminal (``--verbose``), in Markdown and in the HTML page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..analysis.checkpoints import CheckpointCost, is_restored
from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.phase_memory import NodePhaseMemory, largest_of_runs
from ..units import MISSING, format_significant, to_gb
from . import row_explanation, step_time
from .comparison_report import ComparisonReport

_PHASES = {
    "import": "Import",
    "build": "Model build",
    "initialize": "Initialize",
    "first_step": "First step",
    "steady": "Measured steps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DetailTable:
    """A table with a heading and a sentence that says what its cells are."""

    heading: str
    meaning: str
    headings: tuple[str, ...]
    """The first is that of the rows' labels."""
    rows: tuple[tuple[str, ...], ...]


def row_texts(report: ComparisonReport) -> list[tuple[str, list[tuple[str, str]]]]:
    """Headings, each with labels and texts: why rows differ, and where the time of a step goes."""
    texts = [
        (row_explanation.HEADING, row_explanation.report_paragraphs(report)),
        (step_time.HEADING, step_time.step_time_texts(report)),
    ]
    return [each for each in texts if each[1]]


def detail_tables(comparison: Comparison) -> list[DetailTable]:
    """The tables that some row has values for; columns without any are left out."""
    return [table for make in _TABLES for table in make(comparison)]


def _phase_memory_tables(comparison: Comparison) -> Iterator[DetailTable]:
    def host(memory: NodePhaseMemory) -> str:
        peak, end = to_gb(memory.host_peak_bytes), to_gb(memory.host_end_bytes)
        return MISSING if peak is end is None else f"{format_significant(peak)} → {format_significant(end)}"

    yield from _of_phases(
        comparison,
        "Host memory by phase",
        "GB of the fullest node: peak within the phase → at its end; pages that ranks share count once",
        host,
    )
    yield from _of_phases(
        comparison,
        "GPU memory by phase",
        "GB, peak allocated within the phase on the fullest GPU",
        lambda memory: format_significant(to_gb(memory.gpu_peak_bytes)),
    )


def _of_phases(
    comparison: Comparison, heading: str, meaning: str, cell: Callable[[NodePhaseMemory], str]
) -> Iterator[DetailTable]:
    def cells(row: ComparisonRow) -> Mapping[str, str]:
        phases = largest_of_runs([run.phase_memory for run in row.successes])
        return {title: cell(phases.get(phase, NodePhaseMemory())) for phase, title in _PHASES.items()}

    yield from _table(heading, meaning, {row.label: cells(row) for row in comparison.rows})


_ACTIONS = {"save": "Save", "universal": "To universal", "load": "Load", "model_16bit": "16-bit model"}


def _checkpoint_tables(comparison: Comparison) -> Iterator[DetailTable]:
    def cell(cost: CheckpointCost) -> str:
        if cost.seconds is None:
            return MISSING
        written = "" if cost.written_bytes is None else f", {format_significant(to_gb(cost.written_bytes))} GB"
        return f"{format_significant(cost.seconds)} s{written} ({format_significant(to_gb(cost.host_peak_bytes))})"

    def cells(row: ComparisonRow) -> Mapping[str, str]:
        costs = largest_of_runs([run.checkpoint for run in row.successes])
        restored = {None: MISSING, True: "yes", False: "NO"}[is_restored(row.successes)]
        return {title: cell(costs.get(action, CheckpointCost())) for action, title in _ACTIONS.items()} | {
            "Restored": restored
        }

    yield from _table(
        "Checkpoint",
        "seconds on the slowest rank, GB of files, in brackets GB of host memory at the peak on the fullest node",
        {row.label: cells(row) for row in comparison.rows},
    )


def _table(heading: str, meaning: str, cells: Mapping[str, Mapping[str, str]]) -> Iterator[DetailTable]:
    """``cells``: label of a row → heading of a column → text. No table if no cell has a value."""
    # Every row has the same headings, with or without values.
    titles = [title for title in next(iter(cells.values()), {}) if any(row[title] != MISSING for row in cells.values())]
    labels = [label for label, row in cells.items() if any(text != MISSING for text in row.values())]
    if labels:
        yield DetailTable(
            heading=heading,
            meaning=meaning,
            headings=("Strategy", *titles),
            rows=tuple((label, *(cells[label][title] for title in titles)) for label in labels),
        )


_TABLES: tuple[Callable[[Comparison], Iterator[DetailTable]], ...] = (_phase_memory_tables, _checkpoint_tables)
