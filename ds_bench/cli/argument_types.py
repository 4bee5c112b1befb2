"""What the text of one flag may be. A text that it may not be is refused in one line."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from ..config.option_declaration import MAX_NUMBER
from ..config.options import EMPTY_PATH
from ..config.shard import Shard
from ..errors import UsageError

AUTO = "auto"


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError, which is printed in one line like every other error.

    The line names the nearest flag or value where one is near. Flags cannot be abbreviated, and ``--num-gpus`` has the
    aliases that other launchers use. Lists of values may be separated by commas too. Where ``typed`` has a default, it
    holds the arguments as they were typed.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **arguments})

    def error(self, message: str, near: str | None = None) -> NoReturn:
        """Raises UsageError. ``near``: what was probably meant."""
        raise UsageError(message, remedy=f"{f'did you mean {near}? ' if near else ''}see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses what it does not know, where argparse would leave that to the parser above a subcommand's."""
        if num_gpus := self._option_string_actions.get("--num-gpus"):
            self._option_string_actions |= {"--gpus": num_gpus, "--num_gpus": num_gpus}
        values, unknown = super().parse_known_args(args, namespace)
        # Only the parser of run has this default: its arguments are kept in run.json.
        if self.get_default("typed") is not None:
            values.typed = list(args)
        if unknown:
            shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
            flags = [flag for action in shown for flag in action.option_strings]
            self.error(f"unrecognized arguments: {' '.join(unknown)}", _nearest(unknown[0].partition("=")[0], flags))
        return values, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse drops the value of --flag=-- and checks neither its type nor how many are left.
        if action.option_strings and "--" in arg_strings:
            self.error(f"{'/'.join(action.option_strings)} -- has no value")
        # Split before argparse checks each word against the choices. A text of commas alone stays, to be refused there.
        if action.nargs == "+" and action.choices is not None:
            arg_strings = [part for text in arg_strings for part in text.split(",") if part] or arg_strings
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = " or ".join(action.option_strings) or action.metavar or action.dest
            choices = ", ".join(map(str, action.choices))
            self.error(f"{name} {value} is none of {choices}", _nearest(str(value), map(str, action.choices)))


def _nearest(text: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that ``text`` is most likely a misspelling of; None if none is near."""
    by_lower_case = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(text.casefold(), by_lower_case, n=1, cutoff=0.7)
    return by_lower_case[near[0]] if near else None


def integer(minimum: int, maximum: int = MAX_NUMBER) -> Callable[[str], int]:
    """A whole number from ``minimum`` to ``maximum``."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            # A text that is no number gets the same answer as a number that is too small.
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of {minimum} or more")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is more than {maximum}")
        return value

    return convert


def integer_or_auto(minimum: int, maximum: int = MAX_NUMBER) -> Callable[[str], int | str]:
    """A whole number from ``minimum`` to ``maximum``, or ``auto``."""
    number = integer(minimum, maximum)
    return lambda text: AUTO if text == AUTO else number(text)


def positive_float(text: str) -> float:
    """A number above 0 that seconds, GB and TFLOP/s can have."""
    value = _to_float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
    if value > MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is more than {MAX_NUMBER}")
    return value


def fraction(text: str) -> float:
    """A number from 0 to below 1."""
    value = _to_float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value


def _to_float(text: str) -> float:
    """NaN, which is outside of every range, if the text is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def path(text: str) -> Path:
    """A path. An empty text, which a shell variable without value leaves, would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(EMPTY_PATH)
    return Path(text)


def absolute_path(text: str) -> str:
    """A path from the root, as text."""
    return str(path(text).absolute())


def factory(text: str) -> str:
    """``package.module:function``."""
    module, _, function = text.partition(":")
    if not module or not function:
        raise argparse.ArgumentTypeError(f"{text!r} is not package.module:function")
    return text


def shard(text: str) -> Shard:
    """A part of a plan: ``3/8``."""
    try:
        return Shard.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def split_names(text: str) -> tuple[str, ...]:
    """The names in a text, separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def names_from(*choices: str) -> Callable[[str], tuple[str, ...]]:
    """Some of ``choices``, separated by commas."""

    def convert(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(split_names(text)))
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        if not names:
            raise argparse.ArgumentTypeError(f"{text!r} names none of {', '.join(choices)}")
        return names

    return convert
