"""Checks the files that the command ``check`` is given: reads them, finds the lines of what ``lint`` finds.

A DeepSpeed JSON is read as DeepSpeed reads it; an Accelerate YAML, or a Trainer's arguments, as ``configuration_files``
reads them for a comparison.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..errors import UsageError
from ..system import files
from . import configuration_files, deepspeed_keys, lint, located_json
from .lint import Finding
from .rules import ModelSize

STANDARD_INPUT = Path("-")
_ACCELERATE_KEYS = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer": "offload_optimizer_device",
    "zero_optimization.offload_param": "offload_param_device",
    "zero_optimization": "zero_stage",
}
"""Keys of DeepSpeed → those of Accelerate's ``deepspeed_config`` that set them, where the names differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """What was found in one file."""

    path: Path
    findings: Sequence[Finding] = ()
    problem: str | None = None
    """Why the file could not be checked; None if it was."""


Check = Callable[[lint.Config], list[Finding]]


def check_files(
    paths: Sequence[Path],
    *,
    num_gpus: int | None,
    model: ModelSize | None,
    compute_capability: tuple[int, int] | None = None,
) -> list[FileReport]:
    """Checks files, the configurations directly inside folders, and standard input for ``-``. Raises UsageError for a
    folder without a configuration.
    """
    check = partial(lint.check_config, num_gpus=num_gpus, model=model, compute_capability=compute_capability)
    reports: list[FileReport] = []
    for path in paths:
        reports += _check_folder(path, check) if path.is_dir() else _check_file(path, check)
    return reports


def _check_folder(folder: Path, check: Check) -> list[FileReport]:
    """Reports of the configurations in a folder; its other files are left out."""
    checked = []
    for path in configuration_files.files_in(folder):
        reports = [report for report in _check_file(path, check) if report.problem is None]
        # Nobody expects that LICENSE or Makefile is read.
        if path.suffix or not any(found.rule == "syntax" for report in reports for found in report.findings):
            checked += reports
    if not checked:
        raise UsageError(f"{folder} has no DeepSpeed configuration", remedy="give a file, or a folder that has one")
    return checked


def _check_file(path: Path, check: Check) -> list[FileReport]:
    """Reports of one file; one with a problem where it cannot be checked."""
    try:
        return _check_readable_file(path, check)
    except located_json.ConfigSyntaxError as error:
        reason = f"DeepSpeed cannot read it: {error.problem}"
        found = Finding("syntax", "error", "", reason, "correct it", "runtime/config.py", error.line)
        return [FileReport(path=path, findings=[found])]
    except UsageError as error:
        problem = error.problem.removeprefix(f"--configs {path}").removeprefix(":").strip()  # the report names the file
    except OSError as error:
        problem = error.strerror or str(error)
    except (configuration_files.FormError, RecursionError, UnicodeDecodeError) as error:
        texts = {RecursionError: "is nested too deeply", UnicodeDecodeError: "is not UTF-8 text"}
        problem = texts.get(type(error), str(error))
    return [FileReport(path=path, problem=problem)]


def _check_readable_file(path: Path, check: Check) -> list[FileReport]:
    text = _read(path)
    if configuration_files.is_yaml(path, text):
        return _check_read_by_others(path, _lines_of_yaml(text), check)
    data = located_json.parse(text)
    if not isinstance(data, dict):
        return [FileReport(path=path, problem="is no JSON object")]
    configuration_files.require_bounded(data)
    line_of = partial(located_json.line_of, text, data)
    if configuration_files.kind_of(data) in ("accelerate", "trainer"):
        return _check_read_by_others(path, line_of, check)
    if not _has_deepspeed_keys(data):
        keys = ", ".join(list(data)[:4]) or "no key"
        return [FileReport(path=path, problem=f"is no DeepSpeed configuration: it has {keys}")]
    return [FileReport(path=path, findings=_located([*check(data), *_strictness(text)], line_of))]


def _read(path: Path) -> str:
    most = configuration_files.MOST_BYTES
    if path != STANDARD_INPUT:
        return files.read_text(path, most)
    # One byte more than allowed shows that the input is longer.
    data = sys.stdin.buffer.read(most + 1)
    if len(data) > most:
        raise UsageError(f"is larger than {most} bytes")
    return data.decode("utf-8")


def _has_deepspeed_keys(data: lint.Config) -> bool:
    """Whether a key at the top level is DeepSpeed's, was, or is a misspelling of one."""
    known = deepspeed_keys.top_level_keys() | deepspeed_keys.removed_keys()
    # Similarity is asked of the first keys alone: it takes time for each, and other JSON may have thousands.
    return bool(known & data.keys()) or any(deepspeed_keys.nearest_key(key, known, 0.85) for key in list(data)[:50])


def _check_read_by_others(path: Path, line_of: Callable[[str], int | None], check: Check) -> list[FileReport]:
    """Reports of an Accelerate or Trainer file, and of the JSON that it names."""
    source = "Accelerate, utils/dataclasses.py"

    def key_of_json() -> str:
        """Return the key of whichever form the file has: the other is not there."""
        return "deepspeed" if line_of("deepspeed") else "deepspeed_config.deepspeed_config_file"

    try:  # first, as line_of raises for what is no YAML
        file = configuration_files.read_configuration_file(path)
    except configuration_files.MissingFileError as error:
        found = [Finding("missing-file", "error", key_of_json(), error.reason, error.remedy, source)]
        return [FileReport(path=path, findings=_located(found, line_of))]
    if file.deepspeed_file is not None:
        refused = [note for note in file.notes if note.startswith("Accelerate refuses")]
        found = [
            Finding("accelerate-conflict", "error", key_of_json(), note, "keep them in one of the two files", source)
            for note in refused
        ]
        if file.deepspeed_file.resolve() != Path(file.deepspeed_name).resolve():
            reason = f"found as {file.deepspeed_file}; the program that trains looks below the folder it is started in"
            remedy = "start it in the folder that the path is relative to, or write an absolute path"
            found.append(Finding("relative-file", "hint", key_of_json(), reason, remedy, source))
        return [FileReport(path=path, findings=_located(found, line_of)), *_check_file(file.deepspeed_file, check)]
    block = {"accelerate": "deepspeed_config", "trainer": "deepspeed"}.get(file.kind, "")

    def line_in_block(key: str) -> int | None:
        names = _ACCELERATE_KEYS.get(key, key.rpartition(".")[2]) if file.kind == "accelerate" else key
        return line_of(".".join(filter(None, [block, names])))

    found = [finding for finding in check(file.config) if finding.rule != "automatic-value"]  # they fill it in
    return [FileReport(path=path, findings=_located(found, line_in_block))]


def _located(found: Iterable[Finding], line_of: Callable[[str], int | None]) -> list[Finding]:
    """The findings with their lines, errors first, then by line."""
    located = [replace(finding, line=finding.line or line_of(finding.path)) for finding in found]
    order = ("error", "warning", "hint")
    return sorted(located, key=lambda finding: (order.index(finding.level), finding.line or 0))


def _lines_of_yaml(text: str) -> Callable[[str], int | None]:
    """Finds the line of a key in a YAML text, or of the innermost block above it."""
    import yaml

    def line_of(path: str) -> int | None:
        node, line = yaml.compose(text, Loader=yaml.SafeLoader), None
        for name in path.split("."):
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            found = [(key, value) for key, value in pairs if key.value == name]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        return line

    return line_of


def _strictness(text: str) -> list[Finding]:
    """A hint where DeepSpeed reads the text, and programs that read strict JSON do not."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"no strict JSON ({error.msg.lower()}), which DeepSpeed reads and Trainer and Accelerate refuse"
        remedy = "correct it if one of them reads the file"
        return [Finding("not-strict-json", "hint", "", reason, remedy, "runtime/config.py", error.lineno)]
    return []
