"""What ends a run of many points: the answer of each point in one line, and their throughput side by side."""

from __future__ import annotations

from collections.abc import Sequence

from . import models_table
from .comparison_report import ComparisonReport


def common_title(reports: Sequence[ComparisonReport]) -> str:
    """The parts that the titles of all comparisons have: ``tiny · 2 CPU ranks · bf16``."""
    titles = [report.title.split(" · ") for report in reports]
    return " · ".join(part for part in titles[0] if all(part in title for title in titles))


def summary_lines(reports: Sequence[ComparisonReport]) -> list[str]:
    """The lines of the summary."""
    common = common_title(reports)
    lines = [f"{len(reports)} points · {common}", ""]
    for report in reports:
        own = " · ".join(part for part in report.title.split(" · ") if part not in common.split(" · ")) or report.title
        mark = "★" if report.recommendation.decided else "?"
        lines.append(f"{mark} {own}: {report.recommendation.headline}")
    provisional = [report.recommendation.try_next for report in reports if report.recommendation.provisional]
    lines += [f"  To decide: {command}" for command in dict.fromkeys(provisional)]
    return [*lines, "", *models_table.render_text(reports).split("\n")]
