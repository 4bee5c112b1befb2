"""Reads the configurations of ``--configs``: DeepSpeed JSON, Accelerate YAML, and Trainer arguments.

``"auto"`` is kept (``automatic_values`` resolves it). Files may come from anywhere: they are read as data only, up to a
maximum size and depth. JSON is read with hjson, as DeepSpeed reads it: comments, trailing commas and text without
quotes are allowed, duplicate keys are not (``runtime/config_utils.py``).

Sources: DeepSpeed 0.19.8, ``runtime/config.py``; Accelerate 1.15, ``utils/launch.py``, ``utils/dataclasses.py``
(``DeepSpeedPlugin``); Transformers 5.23, ``training_args.py``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import UsageError
from ..system import files, invocation, redaction
from .automatic_values import TRAINING_DEFAULTS
from .deepspeed_config import AUTO, Config, json_values
from .spec import Precision
from .strategies import STRATEGY_NAMES

FileKind = Literal["deepspeed", "accelerate", "trainer"]

MAX_BYTES = 2**18
"""Maximum size of a file; configurations take up a few kilobytes."""
_MAX_VALUES = 10_000
"""Maximum number of values in a YAML file; those behind an alias count wherever it is used."""
_MAX_LEVELS = 32
MAX_FILES = 500
"""Maximum number of files in a folder."""
_MAX_NAME_LENGTH = 120
_SUFFIXES = (".json", ".yaml", ".yml", ".config", "")
_DEEPSPEED_MARKS = {
    *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "fp16", "bf16"),
    *("steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer"),
}
"""Top-level keys of DeepSpeed: every configuration has at least one of them. A Trainer's arguments may too, so
``kind_of`` checks for those first."""
_YAML_KEY = re.compile(r"^(distributed_type|deepspeed_config|deepspeed):", re.MULTILINE)
"""A key of an Accelerate or Trainer file in YAML."""
_ARGUMENTS = (*TRAINING_DEFAULTS, "max_steps")
"""TrainingArguments that replace "auto", except those of the workload."""
_BATCH_ARGUMENTS = ("per_device_train_batch_size", "gradient_accumulation_steps")
_ACCELERATE_CONFLICTS = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_param_nvme_path", "zero3_save_16bit_model"),
)
"""Keys that Accelerate rejects with ``deepspeed_config_file`` (``DeepSpeedPlugin._deepspeed_config_checks``)."""


class ConfigSyntaxError(Exception):
    """DeepSpeed cannot read the text; ``line`` and ``column`` count from 1."""

    def __init__(self, problem: str, line: int, column: int | None = None) -> None:
        super().__init__(problem)
        self.problem, self.line, self.column = problem, line, column


class ConfigurationFileError(UsageError):
    """A file of ``--configs`` that cannot be used. ``reason`` does not name it."""

    syntax_error: ConfigSyntaxError | None = None

    def __init__(self, path: Path, reason: str, *, remedy: str = "correct the file") -> None:
        super().__init__(f"--configs {path}: {reason}", remedy=remedy)
        self.path, self.reason = path, reason


class NotAConfigurationError(ConfigurationFileError):
    """The file was read, but is not a configuration."""


class MissingFileError(ConfigurationFileError):
    """The DeepSpeed configuration file that another file names does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationFile:
    """One of the user's own configurations, as written in its file."""

    path: Path
    kind: FileKind
    name: str
    """Name of its row: the file name without its suffix, made unique and machine-readable."""
    text: str
    """Text of the file and of the DeepSpeed configuration that it names; credentials redacted."""
    config: Mapping[str, Any]
    """The DeepSpeed configuration, "auto" included."""
    arguments: Mapping[str, float] = field(default_factory=dict)
    """TrainingArguments in the file that replace "auto", such as ``learning_rate``."""
    batch_arguments: Mapping[str, int] = field(default_factory=dict)
    """``per_device_train_batch_size`` and ``gradient_accumulation_steps`` of a Trainer's file."""
    precision: Precision | None = None
    """Number format of a Trainer's or Accelerate's file; None if it names none."""
    activation_checkpointing: bool = False
    """Whether a Trainer's file turns ``gradient_checkpointing`` on."""
    zero_init: bool = True
    """Whether Accelerate builds a stage 3 model under ``deepspeed.zero.Init`` (its ``zero3_init_flag``)."""
    deepspeed_file: Path | None = None
    """The file that an Accelerate or Trainer file names for its DeepSpeed configuration."""
    deepspeed_name: str = ""
    """That file's name in the text."""
    conflicts: tuple[str, ...] = ()
    """Keys that Accelerate rejects together with that file."""
    lax_line: int | None = None
    """Line where a JSON file is not strict JSON; None if it is."""
    lax_file: Path | None = None
    """The DeepSpeed file that this line is in; None for the file itself."""

    @property
    def notes(self) -> list[str]:
        """Notes for the user, one line each, without the name of the file."""
        notes = [conflict_text(self.conflicts)] if self.conflicts else []
        notes += [f"its DeepSpeed configuration is {self.deepspeed_file}"] if self.deepspeed_file else []
        where = f"line {self.lax_line}{f' of {self.lax_file}' if self.lax_file else ''}"
        lax = f"not strict JSON at {where}: read as DeepSpeed reads it (hjson)"
        return [*notes, f"{lax}; the Trainer and Accelerate reject the file"] if self.lax_line else notes


def conflict_text(keys: Sequence[str]) -> str:
    """Say which keys Accelerate rejects together with a DeepSpeed file."""
    return f"Accelerate rejects {', '.join(keys)} together with deepspeed_config_file; the values of that file are used"


def check_remedy(paths: Sequence[Path]) -> str:
    """Return the remedy for rejected files; empty for configurations inside a recipe."""
    return f"for details, run {invocation.command('check', *map(str, paths))}" if paths else ""


def read_configuration_files(paths: Sequence[Path]) -> tuple[list[ConfigurationFile], list[str]]:
    """Read the files and folders of ``--configs``. Return the configurations, and lines for the user.

    Raises UsageError for a file that is not a configuration; in a folder, such a file is left out, and a line says so.
    """
    found: dict[Path, ConfigurationFile] = {}
    lines: list[str] = []
    for path in paths:
        for file in _read_folder(path, lines) if path.is_dir() else [read_configuration_file(path)]:
            if file.path.resolve() in found:
                lines.append(f"{file.path} is given twice and compared once")
            else:
                found[file.path.resolve()] = file
    read = list(found.values())
    names = [file.name for file in read]
    folders = [list(file.path.resolve().parts[1:-1]) for file in read]
    # Folder names are prepended, the nearest first, until every name is unique and none is a strategy's.
    while clashing := [index for index, name in enumerate(names) if name in STRATEGY_NAMES or names.count(name) > 1]:
        for index in clashing:
            if not folders[index]:
                reason = f"another row has the name {names[index]}"
                raise ConfigurationFileError(read[index].path, reason, remedy="rename the file")
            names[index] = _machine_name(f"{folders[index].pop()}_{names[index]}")
    for file, name in zip(read, names, strict=True):
        if name != file.name:
            other = "a strategy" if file.name in STRATEGY_NAMES else "another row"
            lines.append(f"{file.path} is the row {name}, since {file.name} is the name of {other}")
    lines += [f"{file.path}: {note}" for file in read for note in file.notes]
    return [replace(file, name=name) for file, name in zip(read, names, strict=True)], lines


def files_in(folder: Path) -> list[Path]:
    """Return the files of a folder that may be configurations, judging by their names.

    Raises UsageError if there are too many.
    """
    paths = [path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")]
    suffixed = sorted(path for path in paths if path.suffix and not path.is_dir())
    if len(suffixed) > MAX_FILES:
        raise UsageError(f"{folder} has {len(suffixed)} files", remedy=f"give {MAX_FILES} files or fewer")
    bare = [path for path in paths if not path.suffix and not path.is_dir()]
    return sorted(suffixed + bare) if len(suffixed + bare) <= MAX_FILES else suffixed  # a folder of data


def _read_folder(folder: Path, lines: list[str]) -> list[ConfigurationFile]:
    read, left_out = [], []
    for path in files_in(folder):
        try:
            read.append(read_configuration_file(path))
        except ConfigurationFileError as error:
            if path.suffix:  # nobody expects files such as LICENSE to be read
                own, named = path.relative_to(folder), error.path
                left_out.append(f"{own}{'' if named == path else f' names {named}'}: {error.reason}")
    if not read:
        reason = "; ".join(["holds no configuration", *left_out[:3]])
        raise ConfigurationFileError(folder, reason, remedy="give a folder with DeepSpeed *.json or Accelerate *.yaml")
    lines += [f"left out of {folder}: {reason}" for reason in left_out]
    return read


def read_configuration_file(path: Path, text: str | None = None) -> ConfigurationFile:
    """Read one file. Raises ConfigurationFileError if it cannot be read or is not a configuration.

    ``text``: the file's content, if it was already read.
    """
    text, data, line = _read(path, text)
    kind = kind_of(data)
    if "deepspeed" in data and data["deepspeed"] is None:
        remedy = "give the DeepSpeed configuration itself, or the arguments of a run with it"
        raise NotAConfigurationError(path, "Trainer arguments without DeepSpeed: deepspeed is null", remedy=remedy)
    if kind is None:
        reason = f"not a DeepSpeed configuration (its first keys: {', '.join(map(str, list(data)[:4])) or 'none'})"
        remedy = "give a DeepSpeed JSON, an Accelerate YAML, or Trainer arguments with a deepspeed key"
        raise NotAConfigurationError(path, reason, remedy=remedy)
    file = ConfigurationFile(path=path, kind=kind, name=_machine_name(path.stem), text=text, config=data, lax_line=line)
    if kind == "deepspeed":
        return file
    return _accelerate(file) if kind == "accelerate" else _trainer(file)


def looks_like_configuration(text: str) -> bool:
    """Return whether a text that cannot be parsed has a key of a configuration."""
    return any(re.search(rf"\b{key}[\"']?\s*:", text) for key in (*_DEEPSPEED_MARKS, "deepspeed_config", "deepspeed"))


def kind_of(data: Mapping[str, Any]) -> FileKind | None:
    """Return which program's format the file has; None if it is not a configuration."""
    if isinstance(data.get("deepspeed_config"), Mapping) or data.get("distributed_type") == "DEEPSPEED":
        return "accelerate"
    # Before DeepSpeed's own form, since Trainer arguments have keys such as fp16 and bf16 too.
    if isinstance(data.get("deepspeed"), (str, Mapping)):
        return "trainer"
    return "deepspeed" if _DEEPSPEED_MARKS & data.keys() else None


def _accelerate(file: ConfigurationFile) -> ConfigurationFile:
    """Return the configuration that ``accelerate launch`` makes from its YAML."""
    data = file.config
    block = data.get("deepspeed_config") or {}
    if not isinstance(block, Mapping):
        raise ConfigurationFileError(file.path, "deepspeed_config is not a block", remedy="write its keys below it")
    requested = data.get("mixed_precision")
    known: dict[str, Precision] = {"no": "fp32", "False": "fp32", "bf16": "bf16", "fp16": "fp16"}  # YAML's no is false
    if requested is not None and str(requested) not in known:
        reason = f"mixed_precision {requested} is not supported"
        raise ConfigurationFileError(file.path, reason, remedy="use bf16, fp16 or no")
    file = replace(
        file,
        precision=known.get(str(requested)),
        # A string or a boolean; Accelerate's default is true at stage 3, and the flag has an effect only there.
        zero_init=str(block.get("zero3_init_flag")).lower() != "false",
    )
    if (other := block.get("deepspeed_config_file")) is not None:
        conflicts = [key for key in _ACCELERATE_CONFLICTS if key in block]
        conflicts += ["mixed_precision"] if "mixed_precision" in data else []
        if conflicts:
            file = replace(file, precision=None, conflicts=tuple(conflicts))
        file = _with_deepspeed_file(file, other, "deepspeed_config_file")
        return replace(file, config={"gradient_accumulation_steps": 1, **file.config})  # as DeepSpeedPlugin does
    # The configuration that DeepSpeedPlugin makes from Accelerate's own keys; its default stage is 2, DeepSpeed's is 0.
    zero: Config = {"stage": block.get("zero_stage", 2)}
    for kind in ("optimizer", "param"):
        device = str(block.get(f"offload_{kind}_device") or "none").lower()
        folder = block.get(f"offload_{kind}_nvme_path") if device == "nvme" else None
        zero[f"offload_{kind}"] = {"device": device} if folder is None else {"device": device, "nvme_path": folder}
    zero["stage3_gather_16bit_weights_on_model_save"] = block.get("zero3_save_16bit_model", False)
    config = {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": block.get("gradient_accumulation_steps", AUTO),
        "gradient_clipping": block.get("gradient_clipping", AUTO),
        "zero_optimization": zero,
    }
    return replace(file, config=config)


def _trainer(file: ConfigurationFile) -> ConfigurationFile:
    """Return the configuration that the Trainer makes from its arguments."""
    data = file.config

    def number(name: str) -> float:
        value = data[name]  # YAML reads 1e-4 as text
        with contextlib.suppress(ValueError, OverflowError):
            if isinstance(value, (int, float, str)) and not isinstance(value, bool) and math.isfinite(float(value)):
                return value if isinstance(value, int) else float(value)
        raise ConfigurationFileError(file.path, f"{name} is {value!r}, not a number", remedy="give a number")

    def count(name: str) -> int:
        if (value := number(name)) < 1 or value % 1:
            reason = f"{name} is {data[name]!r}"
            raise ConfigurationFileError(file.path, reason, remedy="give a whole number of 1 or more")
        return int(value)

    arguments = {name: number(name) for name in _ARGUMENTS if data.get(name) is not None}
    if data.get("warmup_ratio") is not None and not arguments.get("warmup_steps"):
        arguments["warmup_steps"] = number("warmup_ratio")  # from Transformers 4
    if arguments.get("max_steps", 0) <= 0:  # -1: the number of epochs decides
        arguments.pop("max_steps", None)
    if data.get("bf16") is True and data.get("fp16") is True:
        reason = "bf16 and fp16 are both true, which Transformers rejects"
        raise ConfigurationFileError(file.path, reason, remedy="keep one")
    formats: tuple[Precision, ...] = ("bf16", "fp16")
    # Either of the two keys, as in transformers/integrations/deepspeed.py.
    requested = [name for name in formats if data.get(name) is True or data.get(f"{name}_full_eval") is True]
    in_fp32 = data.get("bf16") is False and data.get("fp16") is False
    file = replace(
        file,
        arguments=arguments,
        batch_arguments={name: count(name) for name in _BATCH_ARGUMENTS if data.get(name) is not None},
        precision=requested[0] if requested else "fp32" if in_fp32 else None,
        activation_checkpointing=data.get("gradient_checkpointing") is True,
    )
    deepspeed = data["deepspeed"]
    if isinstance(deepspeed, str) and deepspeed.lstrip().startswith("{"):  # Transformers also accepts JSON text
        with contextlib.suppress(ValueError):
            deepspeed = json.loads(deepspeed)
    if isinstance(deepspeed, Mapping):
        return replace(file, config=dict(deepspeed))
    return _with_deepspeed_file(file, deepspeed, "deepspeed")


def _with_deepspeed_file(file: ConfigurationFile, name: object, key: str) -> ConfigurationFile:
    """Return the file with the configuration of the file that it names.

    The name may be relative to the file's own folder, to the current folder, or to a folder above the file, where
    Accelerate or the Trainer may have been started.
    """
    here, *above = file.path.absolute().parents
    folders = [file.path.parent, Path(), *above]
    # Not Path.is_file(), which raises OSError for a name that is too long.
    path = next((folder / str(name) for folder in folders if os.path.isfile(folder / str(name))), None)  # noqa: PTH113
    if path is None:
        reason = f"{name} was not found below {here}, the folders above it or the current folder {Path.cwd()}"
        raise MissingFileError(file.path, reason, remedy=f"correct the path of {key}, or give the JSON file itself")
    text, config, line = _read(path)
    if kind_of(config) != "deepspeed":  # a file may name itself
        reason = f"{key} {path} is not a DeepSpeed configuration"
        raise ConfigurationFileError(file.path, reason, remedy=f"correct the path of {key}")
    return replace(
        file,
        config=config,
        text=f"{file.text.rstrip()}\n\n# {key}: {name}\n{text}",
        deepspeed_file=path,
        deepspeed_name=str(name),
        lax_line=line or file.lax_line,
        lax_file=path if line else None,
    )


def _machine_name(stem: str) -> str:
    """Return a file's name as the name of a row: letters and digits of any script, dots, dashes and underscores."""
    name = re.sub(r"[^\w.-]+", "_", unicodedata.normalize("NFC", stem)).strip("._-")
    return name[:_MAX_NAME_LENGTH] or "configuration"


# Text


def _read(path: Path, text: str | None = None) -> tuple[str, Config, int | None]:
    """Return a file's text without credentials, its values, and the line where it is not strict JSON."""
    text = read_text(path) if text is None else text
    data, line = parse(path, text)
    try:
        values = json_values(data)
    except UsageError as error:  # a date in YAML
        raise ConfigurationFileError(path, error.problem, remedy=error.remedy) from None
    secrets = redaction.secrets_of(values)
    if all(secret in text for secret in secrets):
        return redaction.without(text, secrets), values, line
    return json.dumps(redaction.redacted_config(values), indent=2), values, line  # the file has them escaped


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigurationFileError."""
    try:
        return files.read_bytes(path, MAX_BYTES).decode("utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationFileError(path, reason, remedy="give a readable JSON or YAML file") from None
    except UnicodeDecodeError:
        raise ConfigurationFileError(path, "not UTF-8 text", remedy="give a JSON or YAML file") from None


def parse(path: Path, text: str) -> tuple[Config, int | None]:
    """Return the values of a file, and the line where it is not strict JSON; None if it is, and for YAML.

    JSON objects become LocatedObjects. Raises ConfigurationFileError.
    """

    def refuse_constant(name: str) -> Any:  # Python's json would accept NaN and Infinity
        raise ConfigurationFileError(path, f"{name} is not a JSON number")

    lax_line = None
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        # Accelerate reads JSON under any name. Standard input has no suffix, and hjson would read most YAML wrongly.
        is_yaml = path.suffix.lower() in (".yaml", ".yml") or (not path.suffix and _YAML_KEY.search(text))
        if is_yaml and not isinstance(error, RecursionError):
            return _parse_yaml(path, text), None
        if not isinstance(error, json.JSONDecodeError):  # Python reads no integer of more than 4,300 digits
            reason = "a number has too many digits" if isinstance(error, ValueError) else "nested too deeply"
            raise ConfigurationFileError(path, reason) from None
        lax_line = error.lineno
    try:
        return _require_bounded(path, parse_hjson(text)), lax_line
    except ConfigSyntaxError as error:
        refusal = ConfigurationFileError(path, f"DeepSpeed cannot read it, line {error.line}: {error.problem}")
        refusal.syntax_error = error
        raise refusal from None
    except RecursionError:
        raise ConfigurationFileError(path, "nested too deeply") from None


def _parse_yaml(path: Path, text: str) -> Config:
    import yaml

    try:
        # Nodes are counted before values are made, since merge keys (<<) copy what an alias refers to.
        waiting, count = [yaml.compose(text, Loader=yaml.SafeLoader)], 0
        while waiting:
            node = waiting.pop()
            count += 1
            # The limit also ends the walk if an alias refers to a block around it.
            if count > _MAX_VALUES:
                reason = f"more than {_MAX_VALUES:,} values, aliases counted wherever they are used"
                raise ConfigurationFileError(path, reason)
            if isinstance(node, yaml.MappingNode):
                names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
                if twice := [name for name in names if names.count(name) > 1]:
                    raise ConfigurationFileError(path, f"the key {twice[0]!r} appears twice in one block")
                waiting += [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                waiting += node.value
        return _require_bounded(path, yaml.safe_load(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigurationFileError(path, f"not YAML{place}") from None
    except (ValueError, TypeError) as error:  # an impossible date, a list as a key
        raise ConfigurationFileError(path, f"cannot be read as YAML: {error}") from None
    except RecursionError:
        raise ConfigurationFileError(path, "nested too deeply") from None


def _require_bounded(path: Path, data: Any) -> Config:
    """Return the data if it is an object that is not nested too deeply."""
    if not isinstance(data, dict):
        raise ConfigurationFileError(path, "not an object with keys")
    # Level by level: a recursive walk would fail on a file that is nested too deeply.
    level: list[Any] = [data]
    for _ in range(_MAX_LEVELS):
        inner = [each for value in level for each in (value.values() if isinstance(value, dict) else value)]
        level = [each for each in inner if isinstance(each, (dict, list))]
        if not level:
            return data
    raise ConfigurationFileError(path, f"more than {_MAX_LEVELS} levels")


class LocatedObject(dict[str, Any]):
    """A JSON object that knows where in the text each key begins."""

    offsets: dict[str, int]


def parse_hjson(text: str) -> Any:
    """Return the value of a JSON or hjson text; its objects are LocatedObjects. Raises ConfigSyntaxError."""
    import hjson
    from hjson import decoder

    def parse_object(state: Any, encoding: Any, strict: Any, scan: Callable[..., Any], *rest: Any) -> Any:
        """hjson's own parser. It passes the pairs of an object to ``located``; values are scanned in the same order."""
        starts: list[int] = []

        def scan_noting_start(string: str, start: int) -> Any:
            starts.append(start)
            return scan(string, start)

        def located(pairs: list[tuple[str, Any]]) -> LocatedObject:
            found = LocatedObject()
            found.offsets = {}
            for (name, value), start in zip(pairs, starts, strict=True):
                # hjson notes only the start of the value; a key with escapes does not appear literally in the text.
                offset = text.rfind(name, 0, start)
                offset = start if offset < 0 else offset - (text[offset - 1 : offset] in ("'", '"'))
                if name in found:
                    raise ConfigSyntaxError(f"the key {name!r} appears twice in one block", *_position(text, offset))
                found[name], found.offsets[name] = value, offset
            return found

        return decoder.JSONObject(state, encoding, strict, scan_noting_start, None, located, *rest[2:])

    reader = decoder.HjsonDecoder()
    reader.parse_object = parse_object
    # After parse_object is set, since make_scanner keeps the function that it finds there.
    reader.scan_once, reader.scan_object_once = decoder.make_scanner(reader)
    try:
        return reader.decode(text)
    except hjson.HjsonDecodeError as error:
        problem = error.msg.replace(" %r", "").removesuffix(" at")
        raise ConfigSyntaxError(problem, error.lineno, error.colno) from None
    except (IndexError, OverflowError, ValueError) as error:  # an open comment, 1e999, a number of thousands of digits
        raise ConfigSyntaxError(f"cannot be read: {error}", text.count("\n") + 1) from None


def _position(text: str, offset: int) -> tuple[int, int]:
    """Return line and column, from 1."""
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def position_of(text: str, data: Any, path: str) -> tuple[int, int] | None:
    """Return line and column of a key, or of the innermost block around it; None without either.

    ``data``: the values that :func:`parse` returned for the text.
    """
    position = None
    if isinstance(data, LocatedObject):
        for name in path.split("."):
            if not isinstance(data, LocatedObject) or name not in data:
                break
            position, data = _position(text, data.offsets[name]), data[name]
        return position
    import yaml

    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for name in path.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = [(key, value) for key, value in pairs if key.value == name]
        if not found:
            break
        mark, node = found[0][0].start_mark, found[0][1]
        position = mark.line + 1, mark.column + 1
    return position
