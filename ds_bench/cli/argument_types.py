"""What a flag's text may be, checked one flag at a time, with one line for what it may not be."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from ..errors import UsageError

_LARGEST = 10**9
"""Beyond it lies no batch, step count, time in seconds or memory in GB; clocks and kernel limits overflow later."""
MOST_RANKS = 2**16
MOST_REPEATS = 1000


def whole(minimum: int, maximum: int = _LARGEST) -> Callable[[str], int]:
    """A whole number of ``minimum`` or more, up to ``maximum``."""

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


AUTO = "auto"


def whole_or_auto(minimum: int) -> Callable[[str], int | str]:
    """A whole number of ``minimum`` or more, or ``auto``."""
    number = whole(minimum)
    return lambda text: AUTO if text == AUTO else number(text)


def positive(text: str) -> float:
    """A number above 0 and of a size that seconds, GB and TFLOP/s can have."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
    if value > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is more than {_LARGEST}")
    return value


def factory(text: str) -> str:
    """``package.module:function``."""
    module, _, function = text.partition(":")
    if not module or not function:
        raise argparse.ArgumentTypeError(f"{text!r} is not package.module:function")
    return text


def names_of(*choices: str) -> Callable[[str], tuple[str, ...]]:
    """Names out of ``choices``, with commas between them."""

    def convert(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        if not names:
            raise argparse.ArgumentTypeError(f"{text!r} names none of {', '.join(choices)}")
        return names

    return convert


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything else does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=f"see {self.prog} --help")


def fraction(text: str) -> float:
    """A number from 0 up to, not including, 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value
