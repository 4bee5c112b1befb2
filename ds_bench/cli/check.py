"""The command ``check``: reports what is wrong, ineffective or unset in DeepSpeed configurations, line by line.

It reads a DeepSpeed JSON as DeepSpeed does, and an Accelerate YAML or Trainer arguments as ``--configs`` does. It
needs no GPU, but looks for one to learn its compute capability; it loads neither torch nor DeepSpeed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config import configuration_files, deepspeed_keys, lint
from ..config.configuration_files import ConfigurationFileError, LocatedObject, MissingFileError, NotAConfigurationError
from ..config.lint import Finding
from ..config.placement import default_placement
from ..config.rule_explanations import explain, file_finding, rule_table
from ..config.rules import ModelSize
from ..errors import UsageError
from ..models import presets
from ..system import invocation, redaction, terminal
from ..system.gpu_state import read_gpus
from ..units import format_items
from .script import report_error

_REMEDY = "give a DeepSpeed JSON, an Accelerate YAML, or Trainer arguments"
_GITHUB_LEVELS = {"error": "error", "warning": "warning", "hint": "notice"}
STANDARD_INPUT = Path("-")
_UNREAD = ("syntax", "missing-file")
"""Rules that end the check of a file; ``--select`` does not leave them out."""
_EXCERPT_WIDTH = 120
"""In characters."""
_ACCELERATE_KEYS = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer": "offload_optimizer_device",
    "zero_optimization.offload_param": "offload_param_device",
    "zero_optimization": "zero_stage",
}
"""DeepSpeed key → the key of Accelerate's ``deepspeed_config`` that sets it, if the names differ."""


def show_findings(
    paths: Sequence[Path],
    *,
    num_gpus: int | None,
    model: str | None,
    deepspeed_version: str | None,
    select: Sequence[str],
    ignore: Sequence[str],
    rule: str | None,
    output_format: str,
    as_json: bool,
) -> int:
    """Print the findings. Return 0 without errors or warnings, 1 with any, 2 if a file is not a configuration.

    ``deepspeed_version``: such as ``0.18`` or ``0.18.2``; None for the installed one. ``select`` and ``ignore``: names
    of rules or levels. ``rule``: a rule to explain, or ``all``; nothing is checked then.
    """
    named = [(name, (*rule_table(), *_GITHUB_LEVELS)) for name in (*select, *ignore)]
    named += [(rule, (*rule_table(), "all"))] if rule is not None else []
    for name, allowed in named:
        if name not in allowed:
            near = deepspeed_keys.nearest_key(name, allowed)
            every = f"list the rules with {invocation.command('check', '--explain', 'all')}"
            raise UsageError(f"Unknown rule {name!r}", remedy=f"did you mean {near!r}?" if near else every)
    if rule is not None:
        _print_explanations([*rule_table()] if rule == "all" else [rule], brief=rule == "all", as_json=as_json)
        return 0
    if not paths:
        raise UsageError("no file to check", remedy="give a file, a folder, - for standard input, or --explain RULE")
    capability = default_placement(os.environ, read_gpus()).compute_capability
    size = None
    if model is not None:
        facts = presets.find_preset(model)
        if facts is None:
            raise UsageError(f"--model {model} is not a built-in model", remedy=presets.preset_remedy(model))
        size = ModelSize(name=facts.name, parameters=facts.parameters, largest_parameter=facts.largest_parameter)
    check = partial(lint.check_config, num_gpus=num_gpus, model=size, compute_capability=capability)
    with deepspeed_keys.use_version(deepspeed_version):
        reports = check_files(paths, check)

    def is_shown(finding: Finding) -> bool:
        named = {finding.rule, finding.level}
        # A file with a syntax error must not pass just because other rules are selected.
        selected = not select or named & {*select, *_UNREAD}
        return bool(selected) and not named & {*ignore}

    reports = [replace(report, findings=[*filter(is_shown, report.findings)]) for report in reports]
    findings = [finding for report in reports for finding in report.findings]
    if as_json:
        entries = [
            {
                "file": str(report.path),
                "problem": report.problem,
                # The text of a finding already says when DeepSpeed stops.
                "findings": [
                    {name: value for name, value in asdict(each).items() if name != "stops_when"}
                    | {"reason": each.text}
                    for each in report.findings
                ],
            }
            for report in reports
        ]
        terminal.print_json(json.dumps(entries, indent=1))
    else:
        for report in reports:
            for finding in report.findings:
                place = ":".join(str(part) for part in (report.path, finding.line, finding.column) if part)
                key = f"{finding.path}: " if finding.path else ""
                remedy = f"    → {finding.remedy} [{finding.rule}, {finding.source}]"
                excerpt = _excerpt(report.lines, finding)
                lines = [f"{place}: {finding.level}: {key}{finding.text}", *excerpt, remedy]
                if output_format == "github":
                    lines = [_annotation(report.path, finding)]
                # Escaped: GitHub could read what follows a line break in a key as a command.
                for line in lines:
                    terminal.print_text(terminal.escape_controls(line))
    unchecked = [report for report in reports if report.problem is not None]
    checked = len(reports) - len(unchecked)
    if not as_json and output_format != "github" and checked:
        counts = Counter(finding.level for finding in findings)
        levels = [format_items(counts[level], level) for level in ("error", "warning", "hint") if counts[level]]
        terminal.print_text(f"{format_items(checked, 'file')} checked: {', '.join(levels) or 'nothing found'}")
    for report in unchecked:
        report_error(UsageError(f"{report.path}: {report.problem}", remedy=_REMEDY))
    # 2 tells CI that the check itself failed, whatever it found.
    return 2 if unchecked else int(any(finding.level != "hint" for finding in findings))


def _annotation(path: Path, finding: Finding) -> str:
    """Return the GitHub Actions workflow command that shows the finding next to its line."""

    def escaped(text: object, more: str = "") -> str:
        # As GitHub's toolkit escapes: %, CR and LF everywhere, : and , in properties (packages/core/src/command.ts).
        return "".join(f"%{ord(sign):02X}" if sign in f"%\r\n{more}" else sign for sign in str(text))

    title = f"{finding.rule}: {finding.path}".rstrip(": ")
    properties = {"file": path, "line": finding.line, "col": finding.column, "title": title}
    named = ",".join(f"{name}={escaped(value, ':,')}" for name, value in properties.items() if value is not None)
    return f"::{_GITHUB_LEVELS[finding.level]} {named}::{escaped(f'{finding.text} → {finding.remedy}')}"


def _excerpt(lines: Sequence[str], finding: Finding) -> list[str]:
    """Return the line of a finding with carets under its key; empty if there is no line to show."""
    if finding.line is None or finding.line > len(lines) or not lines[finding.line - 1].strip():
        return []
    line = lines[finding.line - 1].replace("\t", " ")
    start = (finding.column or 1) - 1
    word = re.match(r'"(?:[^"\\]|\\.)*"|[\w.-]+|.?', line[start:])
    end = start + len(word[0] if word else "")
    first = max(0, start - _EXCERPT_WIDTH // 2)  # the whole file may be one line
    before, marked, after = map(
        terminal.escape_controls, (line[first:start], line[start:end], line[end : first + _EXCERPT_WIDTH])
    )
    shown = [f"{finding.line:>6} | {before}{marked}{after}".rstrip()]
    return shown if finding.column is None else [*shown, f"       | {' ' * len(before)}{'^' * len(marked)}"]


def _print_explanations(rules: Sequence[str], *, brief: bool, as_json: bool) -> None:
    """Print what each rule is about. ``brief``: one line for each."""
    explained = [explain(rule) for rule in rules]
    if as_json:
        terminal.print_json(json.dumps([each for _, each in explained], indent=1))
        return
    for finding, each in explained:
        if brief:
            terminal.print_text(f"{finding.rule} ({finding.level}): {each['what']}")
            continue
        lines = each["example"].split("\n")
        example = [f"{number:>6} | {line}" for number, line in enumerate(lines, 1)]
        example[finding.line or 0 : finding.line or 0] = _excerpt(lines, finding)[1:]
        texts = [f"{finding.rule} ({finding.level})", f"what: {each['what']}", f"why: {each['why']}"]
        texts += [f"versions: DeepSpeed {each['versions']}"] if each["versions"] else []
        texts += [f"example, with {each['given']}:" if each["given"] else "example:", *example]
        terminal.print_text("\n".join([*texts, f"remedy: {finding.remedy}", f"source: {finding.source}"]))


# Files


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """The findings in one file."""

    path: Path
    findings: Sequence[Finding] = ()
    problem: str | None = None
    """Why the file could not be checked; None if it was."""
    is_configuration: bool | None = True
    """None if its text could not be read."""
    lines: Sequence[str] = ()
    """The file's lines; any that may hold a credential are empty."""


Check = Callable[[lint.Config], list[Finding]]
PositionOf = Callable[[str], tuple[int, int] | None]


def check_files(paths: Sequence[Path], check: Check) -> list[FileReport]:
    """Check files, the configurations directly inside folders, and standard input for ``-``. Raises UsageError.

    Other files in a folder are left out; a line on standard error names those that could not be read. A given file that
    another one names as well gets only one report, under the path that was given.
    """
    reports: list[FileReport] = []
    given: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            given.setdefault(path.resolve(), path)
            reports += _check_file(path, check)
            continue
        checked = []
        for file in configuration_files.files_in(path):
            given.setdefault(file.resolve(), file)
            read = _check_file(file, check)
            # Nobody expects LICENSE or Makefile to be read.
            syntax_errors = [found for report in read for found in report.findings if found.rule == "syntax"]
            if not file.suffix and (syntax_errors or any(report.problem for report in read)):
                continue
            checked += [report for report in read if report.is_configuration]
            for report in read:
                if report.is_configuration is None:
                    terminal.print_text(f"left out of {path}: {report.path.name}: {report.problem}", sys.stderr)
        if not checked:
            raise UsageError(f"{path} has no DeepSpeed configuration", remedy="give a file, or a folder that has one")
        reports += checked
    once: dict[Path, FileReport] = {}
    for report in reports:
        place = report.path.resolve()
        once.setdefault(place, replace(report, path=given.get(place, report.path)))
    return [*once.values()]


def _check_file(path: Path, check: Check) -> list[FileReport]:
    """Return a report on a file, and one on the JSON file that it names."""
    text = ""
    try:
        text = _standard_input() if path == STANDARD_INPUT else configuration_files.read_text(path)
        data, lax_line = configuration_files.parse(path, text)
        position_of = partial(configuration_files.position_of, text, data)
        lines = _lines_without_secrets(text, data)
        if not isinstance(data, LocatedObject) or configuration_files.kind_of(data) in ("accelerate", "trainer"):
            own, *others = _check_accelerate_or_trainer_file(path, text, position_of, check)
            return [replace(own, lines=lines), *others]
    except ConfigurationFileError as error:
        if error.syntax_error is None:
            looks_like_one = configuration_files.looks_like_configuration(text)
            is_other = isinstance(error, NotAConfigurationError) or not looks_like_one
            return [FileReport(path=path, problem=error.reason, is_configuration=not is_other if text else None)]
        syntax = error.syntax_error
        found = [file_finding("syntax", f"DeepSpeed cannot read it: {syntax.problem}", "", syntax.line, syntax.column)]
        return [FileReport(path=path, findings=found, lines=_lines_without_secrets(text, {}))]
    known = deepspeed_keys.top_level_keys() | deepspeed_keys.removed_keys()
    # Fuzzy matching is slow, and other JSON may have thousands of keys.
    if not known & data.keys() and not any(deepspeed_keys.nearest_key(key, known, 0.85) for key in list(data)[:50]):
        problem = f"not a DeepSpeed configuration (its first keys: {', '.join(list(data)[:4]) or 'none'})"
        return [FileReport(path=path, problem=problem, is_configuration=False)]
    found = check(data)
    if lax_line:
        reason = "not strict JSON: DeepSpeed reads it, but the Trainer and Accelerate reject it"
        found.append(file_finding("not-strict-json", reason, "", lax_line))
    return [FileReport(path=path, findings=_located(found, position_of), lines=lines)]


def _lines_without_secrets(text: str, data: Mapping[str, Any]) -> list[str]:
    secrets = redaction.secrets_of(data)
    if not all(secret in text for secret in secrets):  # they are escaped in the file
        return []
    lines = text.split("\n")
    return ["" if redaction.looks_secret("", line) or any(map(line.__contains__, secrets)) else line for line in lines]


def _standard_input() -> str:
    data = sys.stdin.buffer.read(configuration_files.MAX_BYTES + 1)  # the extra byte reveals a longer file
    if len(data) > configuration_files.MAX_BYTES:
        raise ConfigurationFileError(STANDARD_INPUT, f"larger than {configuration_files.MAX_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigurationFileError(STANDARD_INPUT, "not UTF-8 text") from None


def _check_accelerate_or_trainer_file(path: Path, text: str, position_of: PositionOf, check: Check) -> list[FileReport]:
    """Return a report on an Accelerate or Trainer file, and one on the JSON file that it names."""

    def at_name(rule: str, reason: str) -> Finding:
        """Return a finding at the key that names the JSON file."""
        key = "deepspeed" if position_of("deepspeed") else "deepspeed_config.deepspeed_config_file"
        return file_finding(rule, reason, key).at(position_of(key))

    try:
        file = configuration_files.read_configuration_file(path, text)
    except MissingFileError as error:
        return [FileReport(path=path, findings=[at_name("missing-file", error.reason)])]
    if file.deepspeed_file is not None:
        found = []
        if file.conflicts:
            found.append(at_name("accelerate-conflict", configuration_files.conflict_text(file.conflicts)))
        if file.deepspeed_file.resolve() != Path(file.deepspeed_name).resolve():
            reason = f"found as {file.deepspeed_file}; the training program looks in the folder it is started in"
            found.append(at_name("relative-file", reason))
        return [FileReport(path=path, findings=found), *_check_file(file.deepspeed_file, check)]

    def position_in_block(key: str) -> tuple[int, int] | None:
        if file.kind == "trainer":
            return position_of(f"deepspeed.{key}".rstrip("."))
        return position_of(f"deepspeed_config.{_ACCELERATE_KEYS.get(key, key.rpartition('.')[2])}".rstrip("."))

    # The Trainer and Accelerate fill in "auto".
    found = [finding for finding in check(file.config) if finding.rule != "automatic-value"]
    return [FileReport(path=path, findings=_located(found, position_in_block))]


def _located(found: Iterable[Finding], position_of: PositionOf) -> list[Finding]:
    """Return the findings with their positions, sorted by level and then by line."""
    located = [finding if finding.line else finding.at(position_of(finding.path)) for finding in found]
    order = ("error", "warning", "hint")
    return sorted(located, key=lambda finding: (order.index(finding.level), finding.line or 0))
