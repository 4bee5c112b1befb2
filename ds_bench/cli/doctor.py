"""The command ``doctor``: is this machine ready? Prints the findings of all checks, each with its remedy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..config.configuration_files import read_configuration_files
from ..doctor import checks
from ..doctor.findings import Groups, SystemAccess, format_count, format_finding
from ..system import terminal

READY, NOT_READY = 0, 2


def show_findings(
    nvme_path: Path | None, build: bool, as_json: bool, configs: Sequence[Path] = (), hostfile: Path | None = None
) -> int:
    """Runs all checks and prints their findings. Returns 2 if there is a problem, else 0; a warning is no problem.

    ``build``: also build the ops that are not built yet. ``configs``: files and folders of configurations that are to
    run here. ``hostfile``: of hosts that are checked too. Raises UsageError for a file that is no configuration or no
    hostfile.
    """
    # Read first: a file that is no configuration is refused before checks that may take minutes.
    files, file_lines = read_configuration_files(configs)
    groups = checks.run_all_checks(
        SystemAccess(), nvme_path=nvme_path, build=build, files=files, file_lines=file_lines, hostfile=hostfile
    )
    with terminal.ignoring_broken_pipe():
        if as_json:
            entries = [
                {"group": heading, **dataclasses.asdict(finding)}
                for heading, findings in groups.items()
                for finding in findings
            ]
            terminal.print_json(json.dumps(entries, indent=1))
        else:
            for line in lines(groups):
                terminal.print_text(line)
    return exit_code(groups)


def exit_code(groups: Groups) -> int:
    """2 if any finding is a problem, else 0."""
    return NOT_READY if _count(groups, "problem") else READY


def lines(groups: Groups) -> Iterator[str]:
    """A heading per group, a line per finding, and the number of problems and warnings at the end."""
    width = max((len(finding.name) for findings in groups.values() for finding in findings), default=0)
    for heading, findings in groups.items():
        yield heading
        for finding in findings:
            yield format_finding(finding, width)
        yield ""
    counts = [format_count(_count(groups, level), level) for level in ("problem", "warning")]
    yield f"{'not ready' if exit_code(groups) else 'ready'}: {', '.join(counts)}"


def _count(groups: Groups, level: str) -> int:
    return sum(finding.level == level for findings in groups.values() for finding in findings)
