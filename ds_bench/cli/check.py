"""The command ``check``: what is wrong, ineffective or left open in DeepSpeed configurations, each with its line.

Needs no GPU, asks the driver for those that are here, and loads neither torch nor DeepSpeed.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..config.file_check import FileReport, check_files
from ..config.lint import Finding
from ..config.placement import default_placement
from ..config.rules import ModelSize
from ..errors import UsageError
from ..models import presets
from ..system import invocation, terminal
from ..system.gpus import read_gpus
from ..units import format_items

_REMEDY = "give a DeepSpeed JSON, an Accelerate YAML, or a Trainer's arguments"
_GITHUB_LEVELS = {"error": "error", "warning": "warning", "hint": "notice"}


def show_findings(
    paths: Sequence[Path], *, num_gpus: int | None, model: str | None, output_format: str, as_json: bool
) -> int:
    """Print the findings. Return 0 without errors and warnings, 1 with any, 2 if a file could not be checked."""
    capability = default_placement(os.environ, read_gpus()).compute_capability
    size = None if model is None else _model_size(model)
    reports = check_files(paths, num_gpus=num_gpus, model=size, compute_capability=capability)
    findings = [finding for report in reports for finding in report.findings]
    if as_json:
        terminal.print_json(json.dumps([_json_entry(report) for report in reports], indent=1))
    else:
        line_of = _annotation if output_format == "github" else _lines
        for report in reports:
            for finding in report.findings:
                # A line break in a key would make a second line, which GitHub could take for a command.
                for line in line_of(report.path, finding):
                    terminal.print_text(terminal.escape_controls(line))
    unchecked = [report for report in reports if report.problem is not None]
    checked = len(reports) - len(unchecked)
    if not as_json and output_format != "github" and checked:
        counts = Counter(finding.level for finding in findings)
        levels = [format_items(counts[level], level) for level in ("error", "warning", "hint") if counts[level]]
        terminal.print_text(f"{format_items(checked, 'file')} checked: {', '.join(levels) or 'nothing found'}")
    for report in unchecked:
        terminal.print_text(f"ds_bench: {report.path}: {report.problem} ({_REMEDY})", sys.stderr)
    # 2 tells CI that the check itself failed, whatever was found.
    return 2 if unchecked else int(any(finding.level != "hint" for finding in findings))


def _model_size(name: str) -> ModelSize:
    """Return the sizes of a built-in model. Raises UsageError for any other."""
    facts = presets.find_preset(name)
    if facts is None:
        similar = presets.similar_presets(name)
        remedy = f"nearest: {', '.join(similar)}" if similar else f"{invocation.command('models')} lists them"
        raise UsageError(f"--model {name} is not a built-in model", remedy=remedy)
    return ModelSize(name=facts.name, parameters=facts.parameters, largest_parameter=facts.largest_parameter)


def _lines(path: Path, finding: Finding) -> list[str]:
    place = f"{path}:{finding.line}" if finding.line else f"{path}"
    key = f"{finding.path}: " if finding.path else ""
    remedy = f"    → {finding.remedy} [{finding.rule}, {finding.source}]"
    return [f"{place}: {finding.level}: {key}{finding.text}", remedy]


def _annotation(path: Path, finding: Finding) -> list[str]:
    """Return a workflow command of GitHub Actions, which shows the finding next to its line."""

    def escaped(text: object, more: str = "") -> str:
        # As GitHub's toolkit escapes: %, CR and LF everywhere, : and , in properties (packages/core/src/command.ts).
        return "".join(f"%{ord(sign):02X}" if sign in f"%\r\n{more}" else sign for sign in str(text))

    title = f"{finding.rule}: {finding.path}".rstrip(": ")
    properties = {"file": path, "line": finding.line, "title": title}
    named = ",".join(f"{name}={escaped(value, ':,')}" for name, value in properties.items() if value is not None)
    return [f"::{_GITHUB_LEVELS[finding.level]} {named}::{escaped(f'{finding.text} → {finding.remedy}')}"]


def _json_entry(report: FileReport) -> dict[str, object]:
    findings = [{**asdict(finding), "reason": finding.text} for finding in report.findings]
    for finding in findings:
        del finding["stops_when"]  # said by the reason
    return {"file": str(report.path), "problem": report.problem, "findings": findings}
