"""Reads the text of a recipe: YAML as plain values, with the line of each key.

Of YAML only what a recipe needs is read. Anchors and aliases, tags, several documents and keys given twice are refused,
as is a file that is too large or nested too deeply, so that a short file cannot become a huge value. Plain scalars are
read as YAML 1.2 does: ``1e-4`` is a number, and ``no`` and ``on`` are texts.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ..errors import UsageError
from ..system import files

LARGEST_FILE_BYTES = 2**17
MOST_LEVELS = 20
"""Nested blocks; a recipe with whole DeepSpeed configurations has eight."""
_MOST_DIGITS = 40
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_REMEDY = "docs/recipes.md has examples"

KeyPath = tuple[str | int, ...]
Data = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeText:
    """The values of a recipe as they were written, before any of them is checked."""

    name: str
    """The file, for messages; empty for a recipe without a file."""
    folder: Path
    """Its folder, to which paths in the recipe are relative."""
    data: Data
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """Path of each key and list item → its line, from 1."""

    def place(self, path: KeyPath) -> str:
        """``recipe.yaml, line 4: `` for a key path, or for the nearest block around it; empty where no line is known.

        Continues with the message of an error.
        """
        while path and path not in self.lines:
            path = path[:-1]
        line = f", line {self.lines[path]}" if path else ""
        return f"{self.name}{line}: " if self.name else ""


def read_recipe(path: Path) -> RecipeText:
    """Reads a recipe. Raises UsageError with the file and the line."""
    try:
        text = files.read_text(path, LARGEST_FILE_BYTES)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", remedy="give the YAML file of a recipe") from None
    except ValueError:
        raise UsageError(f"{path} is not text in UTF-8", remedy="give the YAML file of a recipe") from None
    return parse_recipe(text, str(path), path.parent)


def parse_recipe(text: str, name: str = "", folder: Path = Path()) -> RecipeText:
    """Reads the text of a recipe. ``name``: for messages. Raises UsageError with the line."""
    reader = _Reader(name)
    try:
        data = reader.read(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{name}{line}: not YAML: {error.problem or error.context}", remedy=_REMEDY) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{name}: not YAML: {error}", remedy=_REMEDY) from None
    if not isinstance(data, dict):
        what = "is empty" if data is None else "holds no keys"
        raise UsageError(f"{name} {what}", remedy=f"write sections such as model: and training:; {_REMEDY}")
    return RecipeText(name=name, folder=folder, data=data, lines=reader.lines)


def parse_setting(text: str) -> tuple[KeyPath, Any]:
    """Reads ``training.seq_len=2048``: a key path and a value as a recipe has it. Raises UsageError."""
    path, separator, value = text.partition("=")
    names = tuple(path.split("."))
    if not separator or not all(names) or len(names) > MOST_LEVELS:
        raise UsageError(f"--set {text[:60]!r} is not key.path=value", remedy="e.g. --set training.seq_len=2048")
    try:
        return names, _Reader(f"--set {path}").read(value, names)
    except (yaml.YAMLError, RecursionError):
        remedy = "give a number, a text, true, false, null, or a list [1024, 2048]"
        raise UsageError(f"--set {text[:60]!r} has a value that is not YAML", remedy=remedy) from None


def with_value(text: RecipeText, path: KeyPath, value: Any) -> RecipeText:
    """The recipe with another value at a key path, which then has no line any more. Raises UsageError.

    A list that the sweep has for this path is dropped.
    """
    data = copy.deepcopy(text.data)
    block: Any = data
    for step in path[:-1]:
        block = block.setdefault(step, {}) if isinstance(block, dict) else None
    if not isinstance(block, dict):
        problem = f"{'.'.join(map(str, path))} cannot be set: {'.'.join(map(str, path[:-1]))} is no section"
        raise UsageError(problem, remedy=_REMEDY)
    block[path[-1]] = value
    sweep = data.get("sweep")
    matrix = sweep.get("matrix") if isinstance(sweep, dict) else None
    if isinstance(matrix, dict):
        matrix.pop(".".join(map(str, path)), None)
    return replace(text, data=data, lines={key: line for key, line in text.lines.items() if key[: len(path)] != path})


class _Reader:
    """Builds the values of one document from the events of the YAML parser."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.lines: dict[KeyPath, int] = {}

    def read(self, text: str, path: KeyPath = ()) -> Any:
        """The value of a document. ``path``: where the recipe has it."""
        # Events and not values: they have lines, and an anchor is refused before an alias multiplies anything.
        events = self._checked(yaml.parse(text, Loader=yaml.SafeLoader))
        first = next(events, None)
        value = None if first is None else self._value(first, events, path)
        if next(events, None) is not None:
            raise UsageError(f"{self._name} holds several documents (---)", remedy="keep one")
        return value

    def _checked(self, events: Iterator[Any]) -> Iterator[Any]:
        """The events of nodes; refuses those of YAML's features that a recipe must not use."""
        depth = 0
        for event in events:
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                self._refuse(event, "anchors and aliases (& and *) are not read", "write the value out")
            tag = getattr(event, "tag", None)
            if tag not in (None, "!"):
                self._refuse(event, f"the tag {tag} is not read", "write the value alone")
            if isinstance(event, (yaml.CollectionStartEvent, yaml.CollectionEndEvent)):
                depth += 1 if isinstance(event, yaml.CollectionStartEvent) else -1
                if depth > MOST_LEVELS:
                    self._refuse(event, f"nested deeper than {MOST_LEVELS} levels", _REMEDY)
            if isinstance(event, (yaml.NodeEvent, yaml.CollectionEndEvent)):
                yield event

    def _refuse(self, event: Any, problem: str, remedy: str) -> None:
        raise UsageError(f"{self._name}, line {event.start_mark.line + 1}: {problem}", remedy=remedy)

    def _value(self, event: Any, events: Iterator[Any], path: KeyPath) -> Any:
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._items(events, path)
        return self._mapping(events, path)

    def _items(self, events: Iterator[Any], path: KeyPath) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            self.lines[*path, len(items)] = event.start_mark.line + 1
            items.append(self._value(event, events, (*path, len(items))))
        return items

    def _mapping(self, events: Iterator[Any], path: KeyPath) -> Data:
        values: Data = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self._refuse(event, "a key must be a word", _REMEDY)
            key = event.value
            if key in values:
                first = self.lines[*path, key]
                self._refuse(event, f"{key!r} is given twice, first in line {first}", "keep one of them")
            self.lines[*path, key] = event.start_mark.line + 1
            values[key] = self._value(next(events), events, (*path, key))
        return values

    def _scalar(self, event: Any, path: KeyPath) -> Any:
        text: str = event.value
        if event.style is not None:  # quoted, or a block of text
            return text
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if not FLOAT.fullmatch(text) and not _INTEGER.fullmatch(text):
            return text
        if len(text) > _MOST_DIGITS or not math.isfinite(number := float(text)):
            self._refuse(event, f"{text[:20]}… is no number that a recipe can use", "give a smaller one")
        if _INTEGER.fullmatch(text):
            return int(text)
        return text if path[:1] == ("axes",) else number  # rows of axes are named after the text: 1e8
