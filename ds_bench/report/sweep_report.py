"""What ends a run of many points: the answer of each point in one line, and their throughput side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from ..system.terminal import can_encode, print_text, to_ascii
from . import models_table
from .comparison_report import ComparisonReport


def print_summary(reports: Sequence[ComparisonReport], stream: IO[str]) -> None:
    """Prints one line for each point and a table of all of them."""
    for line in summary_lines(reports):
        print_text(line if can_encode(line, stream) else to_ascii(line), stream)


def summary_lines(reports: Sequence[ComparisonReport]) -> list[str]:
    """The lines of the summary."""
    titles = [report.title.split(" · ") for report in reports]
    common = [part for part in titles[0] if all(part in title for title in titles)]
    lines = [f"{len(reports)} points · {' · '.join(common)}", ""]
    for title, report in zip(titles, reports, strict=True):
        own = " · ".join(part for part in title if part not in common) or report.title
        mark = "★" if report.recommendation.decided else "?"
        lines.append(f"{mark} {own}: {report.recommendation.headline}")
    return [*lines, "", *models_table.render_text(reports).split("\n")]
