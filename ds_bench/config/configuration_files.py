"""Reads the configurations of ``--configs``: DeepSpeed JSON, Accelerate YAML, and a Trainer's arguments.

What a file says is kept as it is, ``"auto"`` included (``automatic_values`` resolves it). DeepSpeed reads its JSON with
hjson, which allows comments and trailing commas; Trainer and Accelerate read strict JSON. A file may come from
elsewhere: it is read as data only, up to a size and depth.

Sources: DeepSpeed 0.19.8, ``runtime/config.py``; Accelerate 1.15, ``utils/launch.py``, ``utils/dataclasses.py``
(``DeepSpeedPlugin``); Transformers 5.23, ``training_args.py``.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
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

MOST_BYTES = 2**18
"""Size of a file; configurations have a few kilobytes."""
_MOST_VALUES = 10_000
"""Values in a file, those behind a YAML alias counted wherever it stands."""
_DEEPEST = 32
"""Levels of blocks within blocks."""
MOST_FILES = 500
"""Files of one folder."""
_LONGEST_NAME = 120
_SUFFIXES = (".json", ".yaml", ".yml", ".config", "")
_DEEPSPEED_MARKS = frozenset(
    {
        "zero_optimization",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_clipping",
        "fp16",
        "bf16",
        "steps_per_print",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
    }
)
"""Top-level keys of which a DeepSpeed configuration has at least one, and a file that is no configuration has none."""
_ARGUMENTS = (*TRAINING_DEFAULTS, "max_steps")
"""TrainingArguments that "auto" stands for, apart from those that are the workload's."""
_BATCH_ARGUMENTS = ("per_device_train_batch_size", "gradient_accumulation_steps")
_ACCELERATE_CONFLICTS = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
"""Keys that Accelerate refuses beside ``deepspeed_config_file`` (``DeepSpeedPlugin._deepspeed_config_checks``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationFile:
    """A configuration of the user's own, as its file says it."""

    path: Path
    kind: FileKind
    name: str
    """Name of its row, unique and machine readable: the name of the file without its ending."""
    text: str
    """Literal text of the file and, where it names another file with the DeepSpeed configuration, of that one.

    Where a text may be a credential, the file is written anew without it.
    """
    config: Mapping[str, Any]
    """The DeepSpeed configuration, with "auto" where the file says so."""
    arguments: Mapping[str, float] = field(default_factory=dict)
    """TrainingArguments that the file gives and "auto" stands for, such as ``learning_rate``."""
    batch_arguments: Mapping[str, int] = field(default_factory=dict)
    """``per_device_train_batch_size`` and ``gradient_accumulation_steps`` of a Trainer's file."""
    precision: Precision | None = None
    """Number format that a Trainer's or Accelerate's file asks for; None where it leaves it open."""
    activation_checkpointing: bool = False
    """Whether a Trainer's file turns ``gradient_checkpointing`` on."""
    zero_init: bool = True
    """Whether Accelerate builds a model of stage 3 under ``deepspeed.zero.Init`` (its ``zero3_init_flag``)."""
    deepspeed_file: Path | None = None
    """The file that an Accelerate or Trainer file names for its DeepSpeed configuration; None where it has none."""
    deepspeed_name: str = ""
    """How it names that file."""
    notes: tuple[str, ...] = ()
    """What the user must know about reading it, one line each, without the name of the file."""


def explain_files(paths: Sequence[Path]) -> str:
    """The remedy for files that are refused; empty for the configurations that a recipe holds itself."""
    return f"{invocation.command('check', *map(str, paths))} explains it" if paths else ""


def read_configuration_files(paths: Sequence[Path]) -> tuple[list[ConfigurationFile], list[str]]:
    """Reads the files, and those of the folders, of ``--configs``. Returns them with lines for the user.

    Raises UsageError for a file that is no configuration; in a folder such a file is left out with a line. Files of
    one name are told apart by the names of their folders.
    """
    found: dict[Path, ConfigurationFile] = {}
    lines: list[str] = []
    for path in paths:
        read = _read_folder(path, lines) if path.is_dir() else [read_configuration_file(path)]
        for file in read:
            if file.path.resolve() in found:
                lines.append(f"{file.path} is given twice and compared once")
            else:
                found[file.path.resolve()] = file
    named = _with_unique_names(list(found.values()), lines)
    lines += [f"{file.path}: {note}" for file in named for note in file.notes]
    return named, lines


def files_in(folder: Path) -> list[Path]:
    """Returns the files of a folder that may be configurations by their names. Raises UsageError for too many."""
    paths = [path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")]
    names = sorted(path for path in paths if path.suffix and not path.is_dir())
    if len(names) > MOST_FILES:
        raise UsageError(f"{folder} has {len(names)} files", remedy=f"give {MOST_FILES} files or fewer")
    bare = [path for path in paths if not path.suffix and not path.is_dir()]
    return sorted(names + bare) if len(names + bare) <= MOST_FILES else names  # so many are data


def _read_folder(folder: Path, lines: list[str]) -> list[ConfigurationFile]:
    read, left_out = [], []
    for path in files_in(folder):
        try:
            read.append(read_configuration_file(path))
        except UsageError as error:
            if path.suffix:  # of files such as LICENSE nobody expects that they are read
                left_out.append(error.problem.removeprefix(f"--configs {folder}/"))
    if not read:
        reasons = "; ".join(left_out[:3])
        raise UsageError(
            f"--configs {folder} has no configuration{': ' if reasons else ''}{reasons}",
            remedy="give a folder with DeepSpeed *.json or Accelerate *.yaml",
        )
    lines += [f"left out of {folder}: {reason}" for reason in left_out]
    return read


def read_configuration_file(path: Path) -> ConfigurationFile:
    """Reads one file. Raises UsageError if it cannot be read or is no configuration."""
    text = _read_text(path)
    data, notes = _parse(path, text)
    kind = kind_of(data)
    if "deepspeed" in data and data["deepspeed"] is None:
        problem = f"--configs {path} holds a Trainer's arguments without DeepSpeed: deepspeed is null"
        raise UsageError(problem, remedy="give the DeepSpeed configuration itself, or the arguments of a run with it")
    if kind is None:
        known = ", ".join(map(str, list(data)[:4])) or "nothing"
        raise UsageError(
            f"--configs {path} is no DeepSpeed configuration: it has {known}",
            remedy="give a DeepSpeed JSON, an Accelerate YAML, or a Trainer's arguments with a deepspeed key",
        )
    file = ConfigurationFile(
        path=path, kind=kind, name=_machine_name(path.stem), text=_redacted(text, data), config={}, notes=notes
    )
    if kind == "deepspeed":
        return replace(file, config=data)
    return _read_accelerate(file, data) if kind == "accelerate" else _read_trainer(file, data)


def kind_of(data: Mapping[str, Any]) -> FileKind | None:
    """Whose form the file has; None if it is no configuration."""
    if isinstance(data.get("deepspeed_config"), Mapping) or data.get("distributed_type") == "DEEPSPEED":
        return "accelerate"
    # Asked before DeepSpeed's own form, since a Trainer's arguments have keys such as fp16 and bf16 too.
    if isinstance(data.get("deepspeed"), (str, Mapping)):
        return "trainer"
    return "deepspeed" if _DEEPSPEED_MARKS & data.keys() else None


def _read_accelerate(file: ConfigurationFile, data: Config) -> ConfigurationFile:
    """The configuration that ``accelerate launch`` makes of its YAML."""
    block = data.get("deepspeed_config") or {}
    if not isinstance(block, Mapping):
        raise UsageError(f"--configs {file.path}: deepspeed_config is no block", remedy="write its keys below it")
    # A text or a truth value; left out, Accelerate takes it for true at stage 3, and it acts there alone.
    split = str(block.get("zero3_init_flag")).lower() != "false"
    file = replace(file, precision=_accelerate_precision(file.path, data), zero_init=split)
    other = block.get("deepspeed_config_file")
    if other is None:
        return replace(file, config=_accelerate_config(block))
    beside = [key for key in _ACCELERATE_CONFLICTS if key in block]
    beside += ["mixed_precision"] if "mixed_precision" in data else []
    if beside:
        note = f"Accelerate refuses {', '.join(beside)} beside deepspeed_config_file; the values of that file are used"
        file = replace(file, precision=None, notes=(*file.notes, note))
    file = _with_deepspeed_file(file, other, "deepspeed_config_file")
    return replace(file, config={"gradient_accumulation_steps": 1, **file.config})  # as DeepSpeedPlugin does


def _accelerate_config(block: Mapping[str, Any]) -> Config:
    """What ``DeepSpeedPlugin`` makes of Accelerate's own keys."""

    def offload(kind: str) -> Config:
        device = str(block.get(f"offload_{kind}_device") or "none").lower()
        path = block.get(f"offload_{kind}_nvme_path")
        return {"device": device, **({"nvme_path": path} if device == "nvme" and path is not None else {})}

    return {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": block.get("gradient_accumulation_steps", AUTO),
        "gradient_clipping": block.get("gradient_clipping", AUTO),
        "zero_optimization": {
            # Accelerate's own default, unlike DeepSpeed's 0 (DeepSpeedPlugin).
            "stage": block.get("zero_stage", 2),
            "offload_optimizer": offload("optimizer"),
            "offload_param": offload("param"),
            "stage3_gather_16bit_weights_on_model_save": block.get("zero3_save_16bit_model", False),
        },
    }


def _accelerate_precision(path: Path, data: Mapping[str, Any]) -> Precision | None:
    asked = data.get("mixed_precision")
    known: dict[str, Precision] = {"no": "fp32", "False": "fp32", "bf16": "bf16", "fp16": "fp16"}  # YAML's no is false
    if asked is None:
        return None
    if str(asked) not in known:
        raise UsageError(f"--configs {path}: mixed_precision {asked} is not trained here", remedy="bf16, fp16 or no")
    return known[str(asked)]


def _read_trainer(file: ConfigurationFile, data: Config) -> ConfigurationFile:
    """The configuration that the Trainer makes of its arguments."""
    arguments = {name: _number(file.path, name, data[name]) for name in _ARGUMENTS if data.get(name) is not None}
    if data.get("warmup_ratio") is not None and not arguments.get("warmup_steps"):
        arguments["warmup_steps"] = _number(file.path, "warmup_ratio", data["warmup_ratio"])  # of Transformers 4
    batch = {name: int(_number(file.path, name, data[name])) for name in _BATCH_ARGUMENTS if data.get(name) is not None}
    if arguments.get("max_steps", 0) <= 0:  # -1: as many as the epochs have
        arguments.pop("max_steps", None)
    file = replace(
        file,
        arguments=arguments,
        batch_arguments=batch,
        precision=_trainer_precision(file.path, data),
        activation_checkpointing=data.get("gradient_checkpointing") is True,
    )
    deepspeed = data["deepspeed"]
    if isinstance(deepspeed, Mapping):
        return replace(file, config=dict(deepspeed))
    return _with_deepspeed_file(file, deepspeed, "deepspeed")


def _trainer_precision(path: Path, data: Mapping[str, Any]) -> Precision | None:
    if data.get("bf16") is True and data.get("fp16") is True:
        raise UsageError(
            f"--configs {path}: bf16 and fp16 are both true, which Transformers refuses", remedy="keep one"
        )
    for name in ("bf16", "fp16"):
        # Either of the two, as in transformers/integrations/deepspeed.py.
        if data.get(name) is True or data.get(f"{name}_full_eval") is True:
            return "bf16" if name == "bf16" else "fp16"
    return "fp32" if data.get("bf16") is False and data.get("fp16") is False else None


def _number(path: Path, name: str, value: object) -> float:
    """A number of a Trainer's arguments, which YAML reads as text when it is written like 1e-4."""
    try:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return value if isinstance(value, int) else float(value)
    except ValueError:
        pass
    raise UsageError(f"--configs {path}: {name} is {value!r}, no number", remedy="give a number")


class MissingFileError(UsageError):
    """A file names another one for its DeepSpeed configuration that is not there."""

    def __init__(self, path: Path, reason: str, remedy: str) -> None:
        super().__init__(f"--configs {path}: {reason}", remedy=remedy)
        self.reason = reason


def _with_deepspeed_file(file: ConfigurationFile, name: object, key: str) -> ConfigurationFile:
    """The file with the configuration of another file that it names: beside it, in the current folder, or below a
    folder above it, from which Accelerate or the Trainer may have been started.
    """
    here, *above = file.path.absolute().parents
    folders = [file.path.parent, Path(), *above]
    path = next((folder / str(name) for folder in folders if (folder / str(name)).is_file()), None)
    if path is None:
        raise MissingFileError(
            file.path,
            f"{key} {name} is not below {here} or a folder above it, nor below the current folder {Path.cwd()}",
            remedy=f"correct the path of {key}, or give the JSON file itself",
        )
    text = _read_text(path)
    config, notes = _parse(path, text)
    if kind_of(config) != "deepspeed":  # a file may name itself
        problem = f"--configs {file.path}: {key} {path} is no DeepSpeed configuration"
        raise UsageError(problem, remedy=f"correct the path of {key}")
    return replace(
        file,
        config=config,
        text=f"{file.text.rstrip()}\n\n# {key}: {name}\n{_redacted(text, config)}",
        deepspeed_file=path,
        deepspeed_name=str(name),
        notes=(*file.notes, f"its DeepSpeed configuration is {path}", *notes),
    )


def _read_text(path: Path) -> str:
    try:
        return files.read_text(path, MOST_BYTES)
    except OSError as error:
        raise UsageError(f"--configs {path}: {error.strerror}", remedy="give a readable JSON or YAML file") from None
    except UnicodeDecodeError:
        raise UsageError(f"--configs {path} is not UTF-8 text", remedy="give a JSON or YAML file") from None


def _parse(path: Path, text: str) -> tuple[Config, tuple[str, ...]]:
    """The values of a file, and lines about its form. Raises UsageError where it is not a JSON or YAML object."""
    try:
        data, notes = (_parse_yaml(text), ()) if is_yaml(path, text) else _parse_json(text)
        if not isinstance(data, dict):
            raise FormError("is no JSON object")
        require_bounded(data)
        return json_values(data), notes
    except FormError as error:
        raise UsageError(f"--configs {path} {error}", remedy="correct the file") from None
    except UsageError as error:  # of json_values, which does not know the file: 1e400, a date of YAML
        raise UsageError(f"--configs {path}: {error.problem}", remedy=error.remedy) from None
    except RecursionError:
        raise UsageError(f"--configs {path} is nested too deeply", remedy="give a DeepSpeed configuration") from None


def is_yaml(path: Path, text: str) -> bool:
    """Whether a file is read as YAML: by its ending, unless it holds JSON, as Accelerate reads it whatever its name."""
    if path.suffix.lower() not in (".yaml", ".yml"):
        return False
    try:
        json.loads(text)
    except ValueError:
        return True
    return False


class FormError(Exception):
    """The file has not the form of JSON or YAML; the text goes on after the name of the file."""


def _parse_json(text: str) -> tuple[Any, tuple[str, ...]]:
    """As DeepSpeed reads its JSON: hjson, with duplicate keys refused. A line says where it is not strict JSON."""
    try:
        # Strict JSON first: where it fails is the place that the note names.
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant), ()
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise FormError("holds a number of too many digits") from None
    import hjson

    try:
        data = hjson.loads(text, object_pairs_hook=_unique_keys)
    except ValueError:  # HjsonDecodeError, and a number of too many digits
        raise FormError(f"is neither JSON nor hjson: {place}") from None
    note = f"not strict JSON at {place}: read as DeepSpeed reads it (hjson); Trainer and Accelerate refuse the file"
    return data, (note,)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FormError(f"has the key {twice!r} twice in one block, which DeepSpeed refuses")
    return values


def _refuse_constant(name: str) -> Any:
    # Python's json would take NaN and Infinity.
    raise FormError(f"holds {name}, which is no JSON number")


def _parse_yaml(text: str) -> Any:
    """YAML without objects; refused where its aliases stand for more values than a configuration has."""
    import yaml

    try:
        # Nodes are counted before values are made of them, since merge keys (<<) copy what an alias stands for.
        document = yaml.compose(text, Loader=yaml.SafeLoader)
        if document is not None:
            _check_yaml_nodes(document)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f": line {mark.line + 1}, column {mark.column + 1}"
        raise FormError(f"is no YAML{place}") from None
    except (ValueError, TypeError) as error:  # an impossible date, a list as key
        raise FormError(f"cannot be read as YAML: {error}") from None


def _check_yaml_nodes(document: Any) -> None:
    """Refuses a YAML document whose aliases would expand to too many values, and duplicate keys."""
    import yaml

    waiting, count = [document], 0
    while waiting:
        node = waiting.pop()
        count += 1
        # The limit also ends the walk where an alias stands for a block around it.
        if count > _MOST_VALUES:
            raise FormError(f"has more than {_MOST_VALUES:,} values, aliases counted wherever they stand")
        if isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            _unique_keys([(name, None) for name in names])
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def require_bounded(data: Any) -> None:
    """Raises FormError for a file of more values or levels than a configuration has."""
    # Level by level: a recursive walk would fail on a file that is nested too deeply.
    count, level = 0, [data]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for value in level:
            inner += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += len(inner)
        if count > _MOST_VALUES:
            raise FormError(f"has more than {_MOST_VALUES:,} values")
        if not inner:
            return
        level = inner
    raise FormError(f"has more than {_DEEPEST} levels")


def _redacted(text: str, data: Mapping[str, Any]) -> str:
    """The text of a file without what may be credentials in its values."""
    secrets = redaction.secrets_of(data)
    if all(secret in text for secret in secrets):
        return redaction.without(text, secrets)
    return json.dumps(redaction.redacted_config(data), indent=2)  # the file writes them with escapes


def _machine_name(stem: str) -> str:
    """A file's name as a row's: letters and digits of any script, dots, dashes and underscores."""
    return re.sub(r"[^\w.-]+", "_", unicodedata.normalize("NFC", stem)).strip("._-")[:_LONGEST_NAME] or "configuration"


def _with_unique_names(read: list[ConfigurationFile], lines: list[str]) -> list[ConfigurationFile]:
    """The files with names that differ from each other and from those of strategies, by their folders' names."""
    names = [file.name for file in read]
    folders = [list(file.path.resolve().parts[1:-1]) for file in read]
    # Names of folders are put before, the nearest first, until no name is taken twice.
    while clashing := [index for index, name in enumerate(names) if name in STRATEGY_NAMES or names.count(name) > 1]:
        for index in clashing:
            if not folders[index]:
                problem = f"--configs {read[index].path}: another row has the name {names[index]}"
                raise UsageError(problem, remedy="rename the file")
            names[index] = _machine_name(f"{folders[index].pop()}_{names[index]}")
    for file, name in zip(read, names, strict=True):
        if name != file.name:
            other = "a strategy" if file.name in STRATEGY_NAMES else "another row"
            lines.append(f"{file.path} is the row {name}, since {file.name} is the name of {other}")
    return [replace(file, name=name) for file, name in zip(read, names, strict=True)]
