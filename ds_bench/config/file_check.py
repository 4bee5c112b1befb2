"""Checks the files of the command ``check``: reads them, and finds the lines of what ``lint`` finds.

A DeepSpeed JSON is read as DeepSpeed reads it; an Accelerate YAML, or a Trainer's arguments, as ``configuration_files``
reads them for a comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..errors import UsageError
from ..system import files
from . import configuration_files, deepspeed_keys, lint, located_json
from .configuration_files import ConfigurationFileError, FormError, MissingFileError
from .lint import Finding
from .rules import Level, ModelSize

STANDARD_INPUT = Path("-")
_ACCELERATE_KEYS = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer": "offload_optimizer_device",
    "zero_optimization.offload_param": "offload_param_device",
    "zero_optimization": "zero_stage",
}
"""Keys of DeepSpeed → those of Accelerate's ``deepspeed_config`` that set them, if the names differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """The findings in one file."""

    path: Path
    findings: Sequence[Finding] = ()
    problem: str | None = None
    """Why the file could not be checked; None if it was."""


Check = Callable[[lint.Config], list[Finding]]
LineOf = Callable[[str], int | None]


def check_files(
    paths: Sequence[Path],
    *,
    num_gpus: int | None,
    model: ModelSize | None,
    compute_capability: tuple[int, int] | None = None,
) -> list[FileReport]:
    """Check files, the configurations directly inside folders, and standard input for ``-``.

    Raises UsageError for a folder without a configuration.
    """
    check = partial(lint.check_config, num_gpus=num_gpus, model=model, compute_capability=compute_capability)
    reports: list[FileReport] = []
    for path in paths:
        reports += _check_folder(path, check) if path.is_dir() else _check_file(path, check)
    return reports


def _check_folder(folder: Path, check: Check) -> list[FileReport]:
    """Return the reports of the configurations in a folder, without those of other files."""
    checked = []
    for path in configuration_files.files_in(folder):
        reports = [report for report in _check_file(path, check) if report.problem is None]
        # Nobody expects LICENSE or Makefile to be read.
        if path.suffix or not any(found.rule == "syntax" for report in reports for found in report.findings):
            checked += reports
    if not checked:
        raise UsageError(f"{folder} has no DeepSpeed configuration", remedy="give a file, or a folder that has one")
    return checked


def _check_file(path: Path, check: Check) -> list[FileReport]:
    """Return the reports of one file; one with a problem if it cannot be checked."""
    try:
        return _check_readable_file(path, check)
    except located_json.ConfigSyntaxError as error:
        reason = f"DeepSpeed cannot read it: {error.problem}"
        found = Finding("syntax", "error", "", reason, "correct it", "runtime/config.py", error.line)
        return [FileReport(path=path, findings=[found])]
    except ConfigurationFileError as error:
        problem = error.reason
    except OSError as error:
        problem = error.strerror or str(error)
    except FormError as error:
        problem = str(error)
    except UnicodeDecodeError:
        problem = "not UTF-8 text"
    except RecursionError:
        problem = "nested too deeply"
    return [FileReport(path=path, problem=problem)]


def _check_readable_file(path: Path, check: Check) -> list[FileReport]:
    text = _read(path)
    if configuration_files.is_yaml(path, text):
        return _check_read_by_others(path, partial(_line_in_yaml, text), check)
    data = configuration_files.require_bounded(located_json.parse(text))
    line_of = partial(located_json.line_of, text, data)
    if configuration_files.kind_of(data) in ("accelerate", "trainer"):
        return _check_read_by_others(path, line_of, check)
    known = deepspeed_keys.top_level_keys() | deepspeed_keys.removed_keys()
    # Similarity is slow, and other JSON may have thousands of keys.
    if not known & data.keys() and not any(deepspeed_keys.nearest_key(key, known, 0.85) for key in list(data)[:50]):
        raise FormError(f"not a DeepSpeed configuration: it has {', '.join(list(data)[:4]) or 'no key'}")
    found = check(data)
    if lax_line := configuration_files.lax_line(text):
        reason = "not strict JSON, which DeepSpeed reads and Trainer and Accelerate refuse"
        remedy = "correct it if one of them reads the file"
        found.append(Finding("not-strict-json", "hint", "", reason, remedy, "runtime/config.py", lax_line))
    return [FileReport(path=path, findings=_located(found, line_of))]


def _read(path: Path) -> str:
    most = configuration_files.MOST_BYTES
    if path != STANDARD_INPUT:
        return files.read_text(path, most)
    data = sys.stdin.buffer.read(most + 1)  # one byte too many shows that the input is longer
    if len(data) > most:
        raise FormError(f"larger than {most} bytes")
    return data.decode("utf-8")


def _check_read_by_others(path: Path, line_of: LineOf, check: Check) -> list[FileReport]:
    """Return the reports of an Accelerate or Trainer file, and of the JSON that it names."""
    try:  # before line_of, which raises for what is not YAML
        file = configuration_files.read_configuration_file(path)
    except MissingFileError as error:
        found = [_about_named_file("missing-file", "error", error.reason, error.remedy, line_of)]
        return [FileReport(path=path, findings=found)]
    if file.deepspeed_file is not None:
        found = []
        if file.conflicts:
            reason, remedy = configuration_files.conflict_text(file.conflicts), "keep them in one of the two files"
            found.append(_about_named_file("accelerate-conflict", "error", reason, remedy, line_of))
        if file.deepspeed_file.resolve() != Path(file.deepspeed_name).resolve():
            reason = f"found as {file.deepspeed_file}; the program that trains looks below the folder it is started in"
            remedy = "start it in the folder that the path is relative to, or write an absolute path"
            found.append(_about_named_file("relative-file", "hint", reason, remedy, line_of))
        return [FileReport(path=path, findings=found), *_check_file(file.deepspeed_file, check)]

    def line_in_block(key: str) -> int | None:
        if file.kind == "trainer":
            return line_of(f"deepspeed.{key}".rstrip("."))
        return line_of(f"deepspeed_config.{_ACCELERATE_KEYS.get(key, key.rpartition('.')[2])}".rstrip("."))

    found = [finding for finding in check(file.config) if finding.rule != "automatic-value"]  # they fill it in
    return [FileReport(path=path, findings=_located(found, line_in_block))]


def _about_named_file(rule: str, level: Level, reason: str, remedy: str, line_of: LineOf) -> Finding:
    """Return a finding at the key that names the file, in whichever form the file has."""
    key = "deepspeed" if line_of("deepspeed") else "deepspeed_config.deepspeed_config_file"
    return Finding(rule, level, key, reason, remedy, "Accelerate, utils/dataclasses.py", line_of(key))


def _located(found: Iterable[Finding], line_of: LineOf) -> list[Finding]:
    """Return the findings with their lines, errors first, then by line."""
    located = [replace(finding, line=finding.line or line_of(finding.path)) for finding in found]
    order = ("error", "warning", "hint")
    return sorted(located, key=lambda finding: (order.index(finding.level), finding.line or 0))


def _line_in_yaml(text: str, path: str) -> int | None:
    """Return the line of a key in a YAML text, or of the innermost block above it."""
    import yaml

    node, line = yaml.compose(text, Loader=yaml.SafeLoader), None
    for name in path.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = [(key, value) for key, value in pairs if key.value == name]
        if not found:
            break
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return line
