"""Reads and writes recipes: YAML as plain values, with the line of each key.

It reads only the YAML that a recipe needs, so that a short file cannot become a huge value: anchors and aliases, tags,
several documents, repeated keys, and large or deeply nested files are rejected. Plain scalars follow YAML 1.2:
``1e-4`` is a number; ``no``, ``on`` and ``1_000`` are strings.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ..errors import UsageError
from ..system import files, invocation
from ..system.redaction import redacted_config

LARGEST_FILE_BYTES = 2**17
MAX_LEVELS = 20
"""Maximum depth of nested blocks; a recipe with whole DeepSpeed configurations has eight levels."""
_MAX_DIGITS = 40
_INTEGER = re.compile(r"[-+]?[0-9]+")
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_REMEDY = "see docs/recipes.md for examples"

KeyPath = tuple[str | int, ...]
Data = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeText:
    """The values of a recipe as written, unchecked."""

    name: str
    """The file, for messages; empty without a file."""
    folder: Path
    """Its folder; paths in the recipe are relative to it."""
    data: Data
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """Path of each key and list item → its line, from 1; 0 for a value from the command line."""

    @classmethod
    def of_stored(cls, stored: Mapping[str, Any]) -> RecipeText:
        """Return the recipe stored in a run's ``run.json``."""
        return cls(name="", folder=Path(str(stored.get("folder"))), data=stored["values"])

    def to_stored(self) -> Data:
        """Return the part of the recipe that run.json keeps for ``--resume`` and reports; credentials are redacted."""
        values = {section: keys for section, keys in self.data.items() if section != "output"}
        output = self.data.get("output")
        if isinstance(output, dict):
            # the run already has its folder
            values["output"] = {key: value for key, value in output.items() if key != "dir"}
        return {"name": self.name, "folder": str(self.folder.absolute()), "values": redacted_config(values)}

    def place(self, path: KeyPath) -> str:
        """Return ``recipe.yaml, line 4: `` for a key path or the nearest block around it; empty if not from a file."""
        while path and path not in self.lines:
            path = path[:-1]
        line = f", line {self.lines[path]}" if path else ""
        return f"{self.name}{line}: " if self.name and self.lines.get(path) != 0 else ""

    def error(self, path: KeyPath, problem: str, remedy: str) -> UsageError:
        """Return the error about a key path, with its place."""
        return UsageError(f"{self.place(path)}{problem}", remedy=remedy)


def read_recipe(path: Path) -> RecipeText:
    """Read a recipe. Raises UsageError with the file and the line."""
    if path.suffix == ".py":
        remedy = f"did you mean {invocation.command('run', '--configs', 'FILE', '--', str(path))}?"
        raise UsageError(f"{path} is a script, not a recipe", remedy=remedy)
    try:
        text = files.read_bytes(path, LARGEST_FILE_BYTES).decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", remedy="give the YAML file of a recipe") from None
    except ValueError:
        raise UsageError(f"{path} is not UTF-8 text", remedy="give the YAML file of a recipe") from None
    return parse_recipe(text, str(path), path.parent)


def parse_recipe(text: str, name: str = "", folder: Path = Path()) -> RecipeText:
    """Parse a recipe. ``name``: for messages. Raises UsageError with the line."""
    lines: dict[KeyPath, int] = {}
    try:
        data = _read_yaml(text, name, lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        problem = ", ".join(filter(None, [error.context, error.problem]))
        raise UsageError(f"{name}{line}: not YAML: {problem}", remedy=_REMEDY) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{name}: not YAML: {error}", remedy=_REMEDY) from None
    if not isinstance(data, dict):
        what = "is empty" if data is None else "holds no keys"
        raise UsageError(f"{name} {what}", remedy=f"write sections such as model: and training:; {_REMEDY}")
    return RecipeText(name=name, folder=folder, data=data, lines=lines)


def parse_setting(text: str) -> tuple[KeyPath, Any]:
    """Parse ``training.seq_len=2048`` into a key path and a value. Raises UsageError."""
    path, separator, value = text.partition("=")
    names = tuple(path.split("."))
    if not separator or not all(names) or len(names) > MAX_LEVELS:
        raise UsageError(
            f"--set {text[:60]!r} is not key.path=value", remedy="for example, --set training.seq_len=2048"
        )
    try:
        return names, _read_yaml(value, f"--set {path}", {}, names)
    except (yaml.YAMLError, RecursionError):
        remedy = "give a number, a string, true, false, null, or a list such as [1024, 2048]"
        raise UsageError(f"--set {text[:60]!r} has a value that is not YAML", remedy=remedy) from None


def with_value(text: RecipeText, path: KeyPath, value: Any) -> RecipeText:
    """Return the recipe with this value at a key path; it also replaces the sweep's list for that path.

    Raises UsageError.
    """
    data = copy.deepcopy(text.data)
    block: Any = data
    for step in path[:-1]:
        if isinstance(block, dict) and block.get(step) is None:  # a section without keys
            block[step] = {}
        block = block[step] if isinstance(block, dict) else None
    if not isinstance(block, dict):
        problem = f"{'.'.join(map(str, path))} cannot be set: {'.'.join(map(str, path[:-1]))} is not a section"
        raise UsageError(problem, remedy=_REMEDY)
    block[path[-1]] = value
    sweep = data.get("sweep")
    if isinstance(sweep, dict) and isinstance(matrix := sweep.get("matrix"), dict):
        matrix.pop(".".join(map(str, path)), None)
    lines = {key: line for key, line in text.lines.items() if key[: len(path)] != path}
    return replace(text, data=data, lines={**lines, path: 0})


def _refuse(name: str, place: Any, problem: str, remedy: str) -> NoReturn:
    raise UsageError(f"{name}, line {place.start_mark.line + 1}: {problem}", remedy=remedy)


def _read_yaml(text: str, name: str, lines: dict[KeyPath, int], path: KeyPath = ()) -> Any:
    """Return the value of a document and fill in ``lines``. ``path``: the document's place in the recipe."""

    def value_of(node: Any, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return _scalar(name, node, path)
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                lines[*path, number] = item.start_mark.line + 1
            return [value_of(item, (*path, number)) for number, item in enumerate(node.value)]
        values: Data = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                _refuse(name, key, "a key must be a word", _REMEDY)
            if key.value in values:
                first = lines[*path, key.value]
                _refuse(name, key, f"{key.value!r} is given twice, first on line {first}", "keep one of them")
            lines[*path, key.value] = key.start_mark.line + 1
            values[key.value] = value_of(value, (*path, key.value))
        return values

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):  # before an alias multiplies anything
        if getattr(event, "anchor", None):
            _refuse(name, event, "anchors and aliases (& and *) are not supported", "write the value out")
        if (tag := getattr(event, "tag", None)) not in (None, "!"):
            _refuse(name, event, f"the tag {tag} is not supported", "write the value without it")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_LEVELS:
            _refuse(name, event, f"nested deeper than {MAX_LEVELS} levels", _REMEDY)
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    return None if node is None else value_of(node, path)


def _scalar(name: str, node: Any, path: KeyPath) -> Any:
    text: str = node.value
    if node.style is not None:  # quoted, or a block of text
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if not FLOAT.fullmatch(text):
        return text
    if len(text) > _MAX_DIGITS or not math.isfinite(number := float(text)):
        shown = text if len(text) <= 20 else f"{text[:20]}…"
        _refuse(name, node, f"{shown} is not a number that a recipe can use", "give a smaller one")
    if _INTEGER.fullmatch(text):
        return int(text)
    return text if path[:1] == ("axes",) else number  # names of axis rows keep the text: 1e8


# Writing


def yaml_text(data: Data) -> str:
    """Return a recipe as YAML that :func:`parse_recipe` reads back to the same values."""
    return str(
        yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=100, allow_unicode=True)
    )


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes strings that YAML 1.2 reads as numbers, writes lists on one line, and uses no anchors."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


_Dumper.add_representer(
    list, lambda dumper, values: dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)
)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
