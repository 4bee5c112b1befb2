"""The command ``doctor``: checks whether this machine is ready."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from ..config.configuration_files import read_configuration_files
from ..config.deepspeed_keys import use_version
from ..config.training_script import find_python
from ..doctor import checks
from ..doctor.findings import Groups, SystemAccess, format_count, format_finding
from ..system import terminal
from ..system.environment import read_interpreter

READY, NOT_READY = 0, 2


def run_doctor(
    nvme_path: Path | None, build: bool, as_json: bool, configs: Sequence[Path] = (), hostfile: Path | None = None,
    python: str | None = None,
) -> int:  # fmt: skip
    """Run all checks and print their findings. Return 2 if there is a problem, else 0. Warnings do not count.

    ``build``: build missing ops first. ``configs``: files and folders of configurations to check. ``hostfile``: lists
    further hosts to check. ``python``: interpreter of a user's script, checked instead of this one. Raises UsageError
    for an invalid configuration or hostfile.
    """
    # First, so that an invalid file is refused before checks that may take minutes.
    files, file_lines = read_configuration_files(configs)
    interpreter = None if python is None else read_interpreter(find_python(python))
    with use_version(None if interpreter is None else interpreter.packages["deepspeed"]):
        groups = checks.run_all_checks(
            SystemAccess(),
            nvme_path=nvme_path,
            build=build,
            files=files,
            file_lines=file_lines,
            hostfile=hostfile,
            interpreter=interpreter,
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
    """Return 2 if any finding is a problem, else 0."""
    return NOT_READY if any(finding.level == "problem" for finding in chain(*groups.values())) else READY


def lines(groups: Groups) -> Iterator[str]:
    """Yield a heading per group, a line per finding, and the number of problems and warnings at the end."""
    every = [*chain(*groups.values())]
    width = max((len(finding.name) for finding in every), default=0)
    for heading, findings in groups.items():
        yield heading
        for finding in findings:
            yield format_finding(finding, width)
        yield ""
    verdict = "not ready" if exit_code(groups) else "ready"
    yield f"{verdict}: {format_count(every, 'problem')}, {format_count(every, 'warning')}"
