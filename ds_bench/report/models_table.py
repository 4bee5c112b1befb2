"""Several comparisons of one machine side by side: a table of throughput, models down and strategies across.

Each comparison keeps a table of its own, with its notes and memory; here is only what those tables have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .. import units
from ..analysis.comparison import Comparison, ComparisonRow
from ..records.schema import TrialRecord
from ..system import environment, terminal
from ..system.environment import Environment
from .markdown import escape

_HEADING = "Tokens/s of the whole job, models side by side"
_INVALID_FOOTNOTE = "* not to be used: its own table says why"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One comparison that has a table of its own."""

    title: str
    comparison: Comparison
    environment: Environment | None
    """None where the result does not tell it."""


def text(entries: Sequence[Entry]) -> str:
    """Aligned by spaces; empty where no two comparisons are of one machine."""
    return "\n\n".join(_aligned(machine, _grid(group)) for machine, group in _machines(entries))


def markdown(entries: Sequence[Entry]) -> str:
    """The same as Markdown."""
    return "\n\n".join(_marked(machine, _grid(group)) for machine, group in _machines(entries))


# ------------------------------------------------------------------ who stands side by side


def _machines(entries: Sequence[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """Groups of two comparisons or more whose throughputs may be read beside each other, each with its device."""
    groups: list[list[Entry]] = []
    for entry in entries:
        found = next((group for group in groups if all(_same_machine(each, entry) for each in group)), None)
        if found is None:
            groups.append(found := [])
        found.append(entry)
    for group in groups:
        if len(group) > 1:
            yield next(filter(None, map(_device, group)), _accelerator(group[0])), group


def _same_machine(a: Entry, b: Entry) -> bool:
    """A comparison whose rows all failed before a device was seen stands with the others of its machine."""
    if _accelerator(a) != _accelerator(b) or len({_device(a), _device(b)} - {None}) > 1:
        return False
    if a.environment is not None and b.environment is not None:
        return not environment.comparable(a.environment, b.environment)
    return a.environment is b.environment


def _device(entry: Entry) -> str | None:
    """Of the first row that tells it."""
    return next((rank.device_name for record in _records(entry) for rank in record.ranks), None)


def _accelerator(entry: Entry) -> str:
    return next(_records(entry)).trial.placement.accelerator


def _records(entry: Entry) -> Iterator[TrialRecord]:
    return (run.record for row in entry.comparison.results for run in row.summaries)


# ------------------------------------------------------------------ one table


def _grid(group: Sequence[Entry]) -> list[list[str]]:
    """Headings, then a line for each comparison; what a comparison has no row for stays empty."""
    labels = list(dict.fromkeys(row.label for entry in group for row in entry.comparison.results))
    body = []
    for name, entry in zip(_names(group), group, strict=True):
        cells = {row.label: _cell(row) for row in entry.comparison.results}
        body.append([name, *(cells.get(label, "") for label in labels)])
    return [[terminal.plain(cell) for cell in line] for line in [["Model", *labels], *body]]


def _cell(row: ComparisonRow) -> str:
    if row.tokens_per_second is None:
        return (row.successes or row.summaries)[-1].record.outcome.status
    spoiled = "*" if any(caveat.disqualifying for caveat in row.caveats) else ""
    return units.format_count(row.tokens_per_second) + spoiled


def _names(group: Sequence[Entry]) -> list[str]:
    """The model, with what else the comparisons differ in; their whole titles where that tells not all apart."""
    firsts = [next(_records(entry)) for entry in group]
    facts = [_facts(record) for record in firsts]
    telling = [place for place, values in enumerate(zip(*facts, strict=True)) if len(set(values)) > 1]
    names = [
        ", ".join([record.trial.workload.model, *(told[place] for place in telling)])
        for record, told in zip(firsts, facts, strict=True)
    ]
    return names if len(set(names)) == len(names) else [entry.title for entry in group]


def _facts(record: TrialRecord) -> tuple[str, ...]:
    work, place = record.trial.workload, record.trial.placement
    batch = "largest micro-batch" if work.batch_policy == "largest" else f"micro-batch {work.batch_size}"
    return (
        batch,
        f"{work.seq_length} tokens",
        f"{work.grad_accum} accumulated",
        work.precision,
        f"{place.num_gpus} {'GPU' if place.accelerator == 'cuda' else 'CPU rank'}(s)",
    )


def _footnote(grid: Sequence[Sequence[str]]) -> list[str]:
    return [_INVALID_FOOTNOTE] if any(cell.endswith("*") for line in grid[1:] for cell in line[1:]) else []


def _aligned(machine: str, grid: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[place]) for line in grid) for place in range(len(grid[0]))]
    shown = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in grid
    ]
    return "\n".join([f"{_HEADING} ({terminal.plain(machine)})", *shown, *_footnote(grid)])


def _marked(machine: str, grid: Sequence[Sequence[str]]) -> str:
    escaped = [[escape(cell) for cell in line] for line in grid]
    rule = ["---", *("---:" for _ in grid[0][1:])]
    lines = ["| " + " | ".join(line) + " |" for line in [escaped[0], rule, *escaped[1:]]]
    footnote = [f"\n\\{line}" for line in _footnote(grid)]  # a bare asterisk would begin a list
    return "\n".join([f"### {_HEADING} ({escape(machine)})", "", *lines, *footnote])
