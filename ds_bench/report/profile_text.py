"""What profilers found in each row, as text, and the command that makes Nsight Systems record a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..records.schema import Profile, RankMeasurement
from ..system import invocation
from ..units import format_bytes, format_items
from .comparison_report import ComparisonReport

if TYPE_CHECKING:
    from ..analysis.row import Run

HEADING = "Profiles"
_NSYS_VARIABLE = "NSYS_PROFILING_SESSION_ID"
"""Set by nsys in the processes that it records."""


def profiles_of(ranks: Sequence[RankMeasurement]) -> Iterator[tuple[int, Profile]]:
    """Every profile of a trial with its rank."""
    for rank in ranks:
        for profile in rank.profiles:
            yield rank.rank, profile


def report_profiles(report: ComparisonReport) -> list[tuple[str, str]]:
    """A heading and a text of several lines for each profile of the row's run that is shown (``nearest_to_mean``)."""
    texts = []
    for row in report.comparison.rows:
        profiled = [list(profiles_of(run.ranks)) for run in row.nearest_to_mean]
        for rank, profile in next(filter(None, profiled), []):
            texts.append((f"{row.label}: {profile.name}, rank {rank}", "\n".join([*profile.lines, *profile.files])))
    return texts


def files_line(runs: Sequence[Run], folder: Path) -> str | None:
    """``Profiles: 6 files, 4.31 MB, in <run>/trials/*/profiles``; None without any. ``folder``: of the run."""
    names = [name for run in runs for _, profile in profiles_of(run.ranks) for name in profile.files]
    # Files of profiles may have been deleted since the run.
    sizes = [path.stat().st_size for path in (folder / name for name in names) if path.is_file()]
    if not sizes:
        return None
    return f"Profiles: {format_items(len(sizes), 'file')}, {format_bytes(sum(sizes))}, in {folder}/trials/*/profiles"


def nsys_command(family: str, arguments: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The command that repeats a run under nsys, to record its windows; None where it runs under nsys already.

    Ranks are started cold, as nsys records no process that was forked without an exec. Each window becomes a file.
    """
    if environ.get(_NSYS_VARIABLE):
        return None
    launcher = [] if "--launcher" in arguments else ["--launcher", "deepspeed"]
    flags = "--trace=cuda,nvtx,cublas --sample=none --capture-range=cudaProfilerApi --capture-range-end=repeat"
    # A dry run prints this command too, which is meant to run.
    asked = [argument for argument in arguments if argument != "--dry-run"]
    command = invocation.comparison(family, [*asked, *launcher])
    return f"nsys profile {flags} --output=nsys_window {command}"
