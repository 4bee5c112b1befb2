"""Rows as the JSON of github-action-benchmark, a GitHub action that draws figures over commits.

It takes lists of ``name``, ``unit``, ``value``, ``range`` and ``extra``, where either more is better or less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ..analysis.caveats import Caveat, CaveatKind
from ..analysis.comparison import ComparisonRow
from ..baselines.result import baseline_name
from ..units import format_items, to_gb
from .comparison_report import ComparisonReport

Entry = dict[str, Any]


def throughput_entries(reports: Sequence[ComparisonReport]) -> list[Entry]:
    """For the tool ``customBiggerIsBetter``: tokens/s of each valid row."""
    entries = []
    for name, row in _named_rows(reports):
        if row.tokens_per_second is not None:
            entry = {"name": name, "unit": "tokens/s", "value": row.tokens_per_second, "extra": _extra(row)}
            if row.interval is not None:
                entry["range"] = f"{row.interval[0]:.6g} to {row.interval[1]:.6g}"
            entries.append(entry)
    return entries


def memory_entries(reports: Sequence[ComparisonReport]) -> list[Entry]:
    """For the tool ``customSmallerIsBetter``: peak memory of each valid row."""
    entries = []
    for name, row in _named_rows(reports):
        on_gpu = row.gpu_peak_bytes is not None
        peak = row.gpu_peak_bytes if on_gpu else row.host_peak_bytes
        if peak is not None:
            memory = f"{name} peak {'GPU' if on_gpu else 'CPU'} memory"
            entries.append({"name": memory, "unit": "GB", "value": to_gb(peak), "extra": _extra(row)})
    return entries


def find_doubt(reports: Sequence[ComparisonReport]) -> tuple[str, Caveat] | None:
    """The first row that trained and is left out all the same: its label and the reason; None if there is none."""
    rows = (row for report in reports for row in report.comparison.rows if row.succeeded)
    return next(((row.label, doubt) for row in rows for doubt in _doubts(row)), None)


def _named_rows(reports: Sequence[ComparisonReport]) -> Iterator[tuple[str, ComparisonRow]]:
    """The valid rows with the names of their baselines, which stay the same from run to run; with the label of the row
    too where several have one name."""
    rows = [row for report in reports for row in report.comparison.rows if row.succeeded and not _doubts(row)]
    names = [baseline_name(row.representative) for row in rows]
    # The action tells lines by their names alone and would draw two rows of one name as one.
    counts = Counter(names)
    for name, row in zip(names, rows, strict=True):
        yield (name if counts[name] == 1 else f"{name} ({row.label})"), row


def _doubts(row: ComparisonRow) -> list[Caveat]:
    """The caveats that disqualify its figures; a busy processor, usual on shared runners, is told beside them."""
    return [caveat for caveat in row.caveats if caveat.disqualifying and caveat.kind is not CaveatKind.CPU_BUSY]


def _extra(row: ComparisonRow) -> str:
    """What is shown beside the figure: the device, how many runs it is the mean of, and a busy processor."""
    record = row.representative.record
    runs = len(row.successes)
    device = record.ranks[0].device_name if record.ranks else record.trial.placement.accelerator
    known = {"torch": record.ranks[0].torch_version, "DeepSpeed": record.ranks[0].deepspeed_version}
    versions = ", ".join(f"{package} {version}" for package, version in known.items() if version)
    facts = [f"{record.trial.placement.ranks_text} × {device}", versions, format_items(runs, "run")]
    return "; ".join(
        [*filter(None, facts), *(caveat.text for caveat in row.caveats if caveat.kind is CaveatKind.CPU_BUSY)]
    )
