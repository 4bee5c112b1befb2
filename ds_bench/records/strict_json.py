"""Reading JSON that somebody else may have written, cut off or edited: what is wrong with it is said in one line.

Only text and JSON values are known here; what they mean is for :mod:`shapes` and :mod:`load`.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UsageError
from ..system import files

LARGEST_FILE_BYTES = 2**30
"""No result is near it: fifty thousand records of two ranks each."""
_MOST_SHARED = 64
_GIVE = "give a run folder, or a result's .json"
_BLANKS = " \t\n\r"
_STAND_IN, _STAND_IN_TEXT = {"": 0}, '{"": 0}'
_CONTAINERS = frozenset((dict, list))
_LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")


class NotJsonError(ValueError):
    """The text is no JSON; ``str()`` says where and why, for the end of a sentence."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file. Raises UsageError for anything else; never waits for a pipe or a device."""
    try:
        with files.opened(path, LARGEST_FILE_BYTES) as file:
            yield file
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", remedy=_GIVE) from None
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise UsageError(f"{path} is larger than any result", remedy=_GIVE) from None
        if error.errno == errno.EINVAL:
            raise UsageError(f"{path} {error.strerror}", remedy=_GIVE) from None
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy="give a file that you may read") from None


def read_bytes(path: Path) -> bytes:
    """The contents of a regular file. Raises UsageError."""
    with opened(path) as file:
        return file.read()


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a regular file, one in memory at a time. Raises UsageError."""
    with opened(path) as file:
        yield from file


def decode(data: bytes) -> str:
    """UTF-8 with or without a byte order mark. Raises NotJsonError for other encodings."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise NotJsonError("is UTF-16, not UTF-8")
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotJsonError(f"is not UTF-8 text (byte {error.start})") from None


def read_json(path: Path, notes: list[str], shared: Sequence[str] = ()) -> Any:
    """The one JSON value in a file. Raises UsageError; ``notes`` receives what had to be mended.

    ``shared``: as of :class:`Reader`, keys that come again and again.
    """
    try:
        return Reader(shared, shared).parse(decode(read_bytes(path)), str(path), notes)
    except NotJsonError as error:
        raise UsageError(f"{path} {error}", remedy="give a result as ds_bench wrote it, or copy it again") from None


class _NotFinite:
    """Stands for a NaN or Infinity token until its place is known."""


_NOT_FINITE = _NotFinite()


class Reader:
    """Parses many texts alike. Objects under ``shared`` keys whose text is equal become one object, parsed once.

    Records repeat their configurations word for word: most of their text need not be parsed again, nor be kept twice.
    ``shared`` names the keys in the order in which the writer puts them; those in ``again`` (if not given, the last)
    come as often as they like. A key in another place is only not shared.
    """

    def __init__(self, shared: Sequence[str] = (), again: Sequence[str] | None = None) -> None:
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=self._constant)
        self._known: dict[str, dict[str, Any]] = {f' "{key}": {{': {} for key in shared}
        self._again = frozenset(f' "{key}": {{' for key in (shared[-1:] if again is None else again))
        self._parse = _quick_parser() or (self._unmended if shared else None)
        self._repeated: list[str] = []
        self._constants = 0

    def parse(self, text: str, where: str, notes: list[str]) -> Any:
        """The value of one text. Raises NotJsonError.

        What had to be mended is said in ``notes``: NaN and Infinity become null, of a repeated key the last counts,
        and half a surrogate pair, which no terminal can print, becomes U+FFFD.
        """
        found = self._sharing(text)
        return self._plain(text, where, notes) if found is None else found[0]

    def _plain(self, text: str, where: str, notes: list[str]) -> Any:
        value = self._whole(text)
        if self._repeated:
            keys = ", ".join(repr(_printable(key)) for key in dict.fromkeys(self._repeated))
            notes.append(f"{where}: {keys} given more than once: the last counts")
        if not (self._constants or _may_hold_surrogates(text)):
            return value
        try:
            return _mended(value, where, "", notes)
        except RecursionError:
            raise NotJsonError("is nested too deeply") from None

    def _whole(self, text: str) -> Any:
        start = len(text) - len(text.lstrip(_BLANKS))
        try:
            value, end = self._decoded(text, start)
        except RecursionError:
            raise NotJsonError("is nested too deeply") from None
        except json.JSONDecodeError as error:
            raise NotJsonError(_reason(text, error)) from None
        except ValueError:
            raise NotJsonError("holds a number of thousands of digits") from None
        more = len(text) - len(text[end:].lstrip(_BLANKS))
        if more < len(text):
            raise NotJsonError(f"has more text after its end ({_place(text, more)})")
        return value

    def _sharing(self, text: str) -> tuple[Any] | None:
        """The value, known objects in it taken from memory; None where the text needs the plain way.

        That is where it is no JSON, where something must be mended, and where neither can be told at a glance: the
        plain way then says it better. A key that is given twice is one less in the value than there are in the text.
        """
        if self._parse is None:
            return None
        try:
            rest, objects = self._cut(text)
            value = self._parse(rest)
            keys = _put_back(value, objects)
        except (ValueError, LookupError, RecursionError):
            return None
        if objects or keys != rest.count('":') or any(mark in rest and f"{mark}:" in rest for mark in _BLANKS):
            return None
        return (value,)

    def _cut(self, text: str) -> tuple[str, list[Any]]:
        """The text with a stand-in for each shared object, and those objects, the first last."""
        parts, objects, at = [], [], 0
        needles = list(self._known)
        while needles:
            met = []
            for needle in needles:
                if (found := text.find(needle, at)) >= 0:
                    start = found + len(needle) - 1
                    end, value = self._object_at(self._known[needle], text, start)
                    parts += [text[at:start], _STAND_IN_TEXT]
                    objects.append(value)
                    at = end
                    met.append(needle)
            needles = [needle for needle in met if needle in self._again]
        return "".join([*parts, text[at:]]), objects[::-1]

    def _object_at(self, known: dict[str, Any], text: str, start: int) -> tuple[int, Any]:
        """Where the object that begins there ends, and its value. Raises ValueError where it needs mending."""
        for candidate, value in known.items():
            if text.startswith(candidate, start):  # a whole object: nothing that follows can belong to it
                return start + len(candidate), value
        value, end = self._decoded(text, start)
        if self._repeated or self._constants or _may_hold_surrogates(text[start:end]):
            raise NotJsonError("needs mending")
        if len(known) >= _MOST_SHARED:
            known.clear()
        known[text[start:end]] = value
        return end, value

    def _unmended(self, text: str) -> Any:
        """Raises ValueError where the value needs mending."""
        value = self._whole(text)
        if self._repeated or self._constants or _may_hold_surrogates(text):
            raise NotJsonError("needs mending")
        return value

    def _decoded(self, text: str, start: int) -> tuple[Any, int]:
        self._repeated, self._constants = [], 0
        return self._decoder.raw_decode(text, start)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            keys = [key for key, _ in pairs]
            self._repeated += [key for key in made if keys.count(key) > 1]
        return made

    def _constant(self, _token: str) -> Any:
        self._constants += 1
        return _NOT_FINITE


@cache
def _quick_parser() -> Callable[[str], Any] | None:
    """A parser several times faster than the standard one, which it agrees with wherever it does not refuse.

    It raises ValueError for NaN, Infinity and half surrogate pairs, and says nothing of repeated keys. DeepSpeed
    brings it; None where it is missing.
    """
    try:
        from pydantic_core import from_json
    except ImportError:
        return None
    return partial(from_json, allow_inf_nan=False)


def _put_back(value: Any, objects: list[Any]) -> int:
    """Puts the objects, from the last on, in the places of their stand-ins; returns the number of keys met.

    Lists that do not begin with an object or a list are passed by: what is missed there is missing in the number.
    Raises IndexError where there are more stand-ins than objects.
    """
    if type(value) is list:
        return sum(_put_back(item, objects) for item in value if type(item) in _CONTAINERS)
    if type(value) is not dict:
        return 0
    keys = len(value)
    for key, item in value.items():
        if type(item) in _CONTAINERS:
            if type(item) is list:
                keys += _put_back(item, objects) if item and type(item[0]) in _CONTAINERS else 0
            elif item == _STAND_IN:
                value[key] = objects.pop()
                keys += 1
            else:
                keys += _put_back(item, objects)
    return keys


def _may_hold_surrogates(text: str) -> bool:
    return "\\ud" in text or "\\uD" in text


def _reason(text: str, error: json.JSONDecodeError) -> str:
    if not text.strip():
        return "is empty"
    rest = text[error.pos :].rstrip()
    cut = (
        not rest
        or error.msg.startswith("Unterminated")
        or (error.msg.startswith("Invalid \\") and len(rest) < len("\\u0000") + 1)
        or any(word.startswith(rest) for word in _LITERALS)
        or (rest[0] in ".eE" and not rest.strip(".eE+-"))  # of a number
    )
    return "ends in the middle: it was cut off" if cut else f"is not JSON: {error.msg} ({_place(text, error.pos)})"


def _place(text: str, at: int) -> str:
    return f"line {text.count(chr(10), 0, at) + 1} column {at - text.rfind(chr(10), 0, at)}"


def _mended(value: Any, where: str, path: str, notes: list[str]) -> Any:
    """The same with null for what is not finite and U+FFFD for half a surrogate pair."""
    if isinstance(value, dict):
        return {
            _printable(key): _mended(item, where, f"{path}.{key}" if path else key, notes)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_mended(item, where, f"{path}[{index}]", notes) for index, item in enumerate(value)]
    if value is _NOT_FINITE:
        notes.append(f"{where}: {_printable(path) or 'the value'} is not a finite number: taken as null")
        return None
    return _printable(value) if isinstance(value, str) else value


def _printable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
