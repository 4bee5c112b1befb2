"""What the text of one flag may be. A text that it may not be is refused in one line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from ..errors import UsageError

_MAX_NUMBER = 10**9
"""More than any batch, step count, time in seconds or memory in GB; with more, clocks and kernel limits overflow."""
MAX_RANKS = 2**16
MAX_REPEATS = 1000
AUTO = "auto"


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError, which is printed in one line like every other error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=f"see {self.prog} --help")


def integer(minimum: int, maximum: int = _MAX_NUMBER) -> Callable[[str], int]:
    """A whole number from ``minimum`` to ``maximum``."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of {minimum} or more")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is more than {maximum}")
        return value

    return convert


def integer_or_auto(minimum: int) -> Callable[[str], int | str]:
    """A whole number of ``minimum`` or more, or ``auto``."""
    number = integer(minimum)
    return lambda text: AUTO if text == AUTO else number(text)


def positive_float(text: str) -> float:
    """A number above 0 that seconds, GB and TFLOP/s can have."""
    value = _to_float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
    if value > _MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is more than {_MAX_NUMBER}")
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


def factory(text: str) -> str:
    """``package.module:function``."""
    module, _, function = text.partition(":")
    if not module or not function:
        raise argparse.ArgumentTypeError(f"{text!r} is not package.module:function")
    return text


def names_from(*choices: str) -> Callable[[str], tuple[str, ...]]:
    """Some of ``choices``, separated by commas."""

    def convert(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        if not names:
            raise argparse.ArgumentTypeError(f"{text!r} names none of {', '.join(choices)}")
        return names

    return convert
