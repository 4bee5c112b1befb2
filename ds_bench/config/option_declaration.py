"""One option of a run: what value it has, which key of a recipe gives it, and which flag.

``Options`` (``config.options``) declares each of its fields as one. The parser of the flags (``cli.arguments``) and the
model of recipes (``config.recipe``) are made of these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

MAX_NUMBER = 10**9
"""More than any batch, step count, time in seconds or memory in GB; with more, clocks and kernel limits overflow."""
COUNT: Mapping[str, Any] = {"ge": 1, "le": MAX_NUMBER}
AMOUNT: Mapping[str, Any] = {"gt": 0, "le": MAX_NUMBER}


class Value(NamedTuple):
    """What an option may be."""

    kind: type
    """bool, int, float, str or Path, or a class of which ``cli.arguments`` and ``config.recipe`` know the form."""
    default: Any = None
    """None: the option may be left open."""
    limits: Mapping[str, Any] = MappingProxyType({})
    """As pydantic names them: ``ge``, ``gt``, ``le``, ``lt`` of a number, ``min_length``, ``pattern`` of a text."""
    choices: Sequence[Any] = ()
    """All that it may be; empty where the limits say so."""
    auto: bool = False
    """Whether ``auto`` is allowed too."""
    many: bool = False
    """Whether it is a list; one with a default that is not empty cannot be empty."""


class Key(NamedTuple):
    """The key of a recipe that gives an option."""

    path: str
    """``training.steps``."""
    description: str
    """For the JSON Schema of recipes."""


class Flag:
    """The flag that gives an option."""

    def __init__(self, text: str, metavar: str | None = None, *, name: str = "", **arguments: Any) -> None:
        """``text``: for ``--help``. ``name``: where it is not that of the field. ``arguments``: those of
        ``add_argument`` that do not follow from the value.
        """
        self.text, self.metavar, self.name, self.arguments = text, metavar, name, arguments


class Option(NamedTuple):
    """What a user may say of one field of ``Options``."""

    value: Value
    key: Key | None
    """None: no recipe gives it, since it says how this one command behaves."""
    flag: Flag | None
    """None: recipes alone give it."""


def option(value: Value, *ways: Key | Flag) -> Any:
    """Declares a field of a dataclass that users give by these ways; its default is that of the value."""
    key = next((way for way in ways if isinstance(way, Key)), None)
    flag = next((way for way in ways if isinstance(way, Flag)), None)
    return field(default=value.default, metadata={"option": Option(value, key, flag)})


def options_of(declaration: type) -> dict[str, Option]:
    """The options that a dataclass declares, by the names of their fields, in order."""
    options: dict[str, Option] = {
        each.name: each.metadata["option"] for each in fields(declaration) if "option" in each.metadata
    }
    for name, declared in options.items():
        if declared.flag is not None:
            declared.flag.name = declared.flag.name or f"--{name.replace('_', '-')}"
    return options
