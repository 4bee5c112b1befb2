"""One comparison as a part of a report: its texts, its footnotes and its configurations, ready to be laid out.

Plain text throughout: whoever renders escapes it. Columns are in ``columns``, charts in ``chart_data``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..analysis.caveats import Caveat
from ..analysis.comparison import Comparison, ComparisonRow
from ..config.deepspeed_config import is_full_config
from ..units import MISSING


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """One workload on one placement. Texts are plain: whoever renders escapes them."""

    title: str
    """What was trained on what."""
    comparison: Comparison
    recommendation: tuple[str, ...] = ()
    """Ready lines, the choice first."""
    notes: tuple[str, ...] = ()
    """Of the run as a whole."""
    sources: tuple[str, ...] = ()
    """Files it was made from; empty at the end of a run."""
    environments: tuple[Mapping[str, str], ...] | None = None
    """Label → text of each, where they are not those of the whole page; empty where they are not known."""


def status(row: ComparisonRow) -> str:
    """Of the first run that failed, else success; with how many of its runs failed where some did not."""
    bad = [run for run in row.summaries if not run.record.outcome.success]
    if not row.summaries:
        return MISSING
    word = (bad or row.summaries)[0].record.outcome.status
    told = f"{'✗' if bad else '✓'} {word}"  # not every machine has a font with the emoji of the console
    return f"{told} ({len(bad)} of {len(row.summaries)})" if bad and row.succeeded else told


@dataclass(frozen=True, slots=True, kw_only=True)
class Footnote:
    """One numbered note under the table: a caveat, a cause of failure or a reason not to compare."""

    kind: str
    text: str
    next_step: str | None
    rows: tuple[str, ...]
    """Labels of the rows it is about; empty where it is about all."""
    serious: bool


def footnotes(comparison: Comparison) -> tuple[Footnote, ...]:
    """Those of all rows first, then of rows in order, each once."""
    found: dict[Footnote, list[str]] = {_of_caveat(caveat): [] for caveat in comparison.caveats}
    for row in comparison.results:
        for footnote in _of_row(row):
            if row.label not in (labels := found.setdefault(footnote, [])):
                labels.append(row.label)
    shared = {_of_caveat(caveat) for caveat in comparison.caveats}
    return tuple(
        replace(footnote, rows=() if footnote in shared else tuple(labels)) for footnote, labels in found.items()
    )


def _of_caveat(caveat: Caveat) -> Footnote:
    kind = caveat.kind.value.replace("_", " ")
    return Footnote(
        kind=kind, text=caveat.text, next_step=caveat.next_step_if_not_in_text, rows=(), serious=caveat.disqualifying
    )


def _of_row(row: ComparisonRow) -> list[Footnote]:
    found = [_of_caveat(caveat) for caveat in row.caveats]
    if row.differences:
        text = f"no ratio, as rows differ: {'; '.join(row.differences)}"
        found.append(Footnote(kind="not comparable", text=text, next_step=None, rows=(), serious=False))
    for run in row.summaries:
        outcome = run.record.outcome
        if not outcome.success and (told := outcome.details or outcome.error):
            found.append(Footnote(kind="failed", text=told, next_step=None, rows=(), serious=True))
    return found


def config(row: ComparisonRow) -> str | None:
    """The DeepSpeed configuration as JSON; None where the result does not hold it, as a flat JSON does not."""
    if not row.summaries or not is_full_config(trial := row.summaries[-1].record.trial):
        return None
    return json.dumps(trial.ds_config, indent=2, ensure_ascii=False, default=str)
