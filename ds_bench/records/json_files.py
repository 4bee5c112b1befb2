"""Reads JSON that somebody else may have written, cut off or edited, as checked values and dataclasses; writes JSON.

A file that is read must be regular and of limited size; a text is limited in depth (by the parser: 200 levels), a
number in magnitude. Every error is one line that names the place. pydantic parses, checks and builds; only the
functions that need it import it, because most commands read no result.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

from ..errors import UsageError
from ..system import files
from ..units import format_place

if TYPE_CHECKING:
    from pydantic import TypeAdapter

LARGEST_FILE_BYTES = 2**30
"""Far more than any result has: fifty thousand records of two ranks each."""
LARGEST_NUMBER = 1e60
"""Far more than any figure of a record; the product of four such numbers is still a finite float."""
_REMEDY = "give a run folder, or a result's .json"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_AS_ZEROS = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE_EXPONENT = re.compile(rb"0e\+?00+(?:[\],}\s]|\Z)")
_TENS = re.compile(rb"[0-9][eE]\+?0*[1-9][0-9]+(?:[\],}\s]|\Z)")
"""An exponent of 10 or more. Texts in DeepSpeed's settings have ``1.024000e+03,``, which is none of these."""
_EXTREME = (b"0" * 50, b"NaN", b"Infinity")
"""Together with the exponents these find every number that is not finite or above 1e59, in a text whose digits
are replaced by zeros."""

T = TypeVar("T")
Place = tuple[str | int, ...]
UnknownKeys = Literal["forbid", "ignore"]


class InvalidJsonError(ValueError):
    """The text is not JSON. ``str()`` continues a sentence: ``is empty``, ``is not JSON: … (line 1 column 5)``."""


class InvalidValueError(ValueError):
    """A value is not one that its field may hold. ``str()`` names the place and the reason."""

    def __init__(self, place: Place, reason: str) -> None:
        super().__init__(f"{format_place(place)} {reason}".strip())
        self.place, self.reason = place, reason


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file. Raises UsageError for anything else; never waits for a pipe or a device."""
    try:
        with files.opened(path, LARGEST_FILE_BYTES) as file:
            yield file
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", remedy=_REMEDY) from None
    except OSError as error:
        raise unreadable(path, error, "result", _REMEDY) from None


def unreadable(path: Path, error: OSError, kind: str, remedy: str) -> UsageError:
    """What the user is told of a file that cannot be read. ``kind``: of file; ``remedy``: for one of another kind."""
    # files.opened tells a file that is too large, and one that is not regular, by these two numbers.
    if error.errno == errno.EFBIG:
        return UsageError(f"{path} is larger than any {kind}", remedy=remedy)
    if error.errno == errno.EINVAL:
        return UsageError(f"{path} {error.strerror}", remedy=remedy)
    return UsageError(f"{path} cannot be read: {error.strerror}", remedy="give a file that you may read")


def read_bytes(path: Path) -> bytes:
    """Reads a regular file. Raises UsageError."""
    with opened(path) as file:
        return file.read()


def parse_json(data: bytes) -> Any:
    """Parses a JSON text in UTF-8. Raises InvalidJsonError.

    Half of a surrogate pair, which no terminal can print, becomes U+FFFD. NaN and infinities are accepted;
    :func:`check_numbers` refuses them and names their place.
    """
    from pydantic_core import from_json

    # RFC 8259, section 8.1: no part of the text, and a reader may ignore it.
    data = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        return from_json(data)
    except ValueError as error:
        reason = _reason(data, str(error))
    if b"\\ud" in data.lower():  # an escaped surrogate, which Python's parser accepts and pydantic's refuses
        # Where this fails too, the text has another fault: the reason that was found above is told.
        with contextlib.suppress(ValueError, RecursionError):
            text = json.dumps(json.loads(data), ensure_ascii=False)
            # Through UTF-16, where half of a pair becomes one U+FFFD; through UTF-8 each of its three bytes would.
            return from_json(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    raise InvalidJsonError(reason)


def _reason(data: bytes, message: str) -> str:
    if not data.strip():
        return "is empty"
    # The words of pydantic's parser (jiter) for a text that ends within a value.
    if message.startswith(("EOF while", "unexpected end of hex")):
        return "ends in the middle: it was cut off"
    problem, _, place = message.rpartition(" at ")
    return f"is nested too deeply ({place})" if "recursion" in problem else f"is not JSON: {problem} ({place})"


def check_numbers(value: Any, place: Place = ()) -> None:
    """Raises InvalidValueError if a number in a JSON value is not finite or beyond :data:`LARGEST_NUMBER`."""
    if isinstance(value, dict):
        for name, item in value.items():
            check_numbers(item, (*place, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_numbers(item, (*place, index))
    # A negated comparison, because NaN compares as neither smaller nor larger.
    elif isinstance(value, (int, float)) and not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
        raise InvalidValueError(place, "is not a finite number, or above 1e60")


def validate(kind: type[T], data: bytes, unknown_keys: UnknownKeys = "forbid") -> T | None:
    """Reads a JSON text as a ``kind`` in one pass; None if it is none, for which :func:`parse` says why."""
    from pydantic import ValidationError

    # The parser takes NaN and numbers of any size; None leads to build(), which names the place of such a number.
    zeros = data.translate(_AS_ZEROS)  # a search for digits in the text itself takes ten times as long
    if (_LARGE_EXPONENT.search(zeros) and _TENS.search(data)) or any(mark in zeros for mark in _EXTREME):
        return None
    try:
        # strict: otherwise the text "5" would be taken for a number, and the number 1 for true.
        return adapter(kind).validate_json(data, strict=True, extra=unknown_keys)
    except ValidationError:
        return None


def build(kind: type[T], value: Any, unknown_keys: dict[str, None] | None = None) -> T:
    """Builds a ``kind`` from a JSON value. Raises InvalidValueError.

    ``unknown_keys`` receives the places of keys that no field has; if None, such keys are refused.
    """
    from pydantic import ValidationError
    from pydantic_core import to_json

    check_numbers(value)
    # Back to text: strict validation takes a list for a tuple only where it reads JSON.
    data = to_json(value)
    try:
        return adapter(kind).validate_json(data, strict=True, extra="forbid")
    except ValidationError as error:
        # pydantic's name of the error for a key that is no field of a dataclass.
        unknown = [each["loc"] for each in error.errors() if each["type"] == "unexpected_keyword_argument"]
        if unknown_keys is None or not unknown:
            raise invalid_value(error) from None
    try:
        # Read again without the unknown keys: what is wrong then is an error in any case.
        built = adapter(kind).validate_json(data, strict=True, extra="ignore")
    except ValidationError as error:
        raise invalid_value(error) from None
    # Without the indices of lists, so that a key of every rank is named once.
    unknown_keys |= dict.fromkeys(format_place([name for name in place if isinstance(name, str)]) for place in unknown)
    return built


def parse(kind: type[T], data: bytes) -> T:
    """Reads a JSON text as a ``kind``. Raises InvalidJsonError or InvalidValueError."""
    parsed = validate(kind, data)
    return build(kind, parse_json(data)) if parsed is None else parsed


def read_lines(kind: type[T], path: Path, most_bytes: int) -> list[T]:
    """The lines of a file that are a ``kind``; others, as a crash may leave, are left out.

    Empty if the file cannot be read or has more than ``most_bytes``.
    """
    read = []
    with contextlib.suppress(OSError):
        for line in files.read_bytes(path, most_bytes).splitlines():
            with contextlib.suppress(ValueError):
                read.append(parse(kind, line))
    return read


_adapters: dict[Any, TypeAdapter[Any]] = {}


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """pydantic's reader of a dataclass. It is kept, as making it takes longer than reading hundreds of records."""
    from pydantic import TypeAdapter

    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def invalid_value(error: Any) -> InvalidValueError:
    """Converts the first error of a pydantic ValidationError."""
    first = error.errors()[0]
    if first["type"] == "missing":
        return InvalidValueError(first["loc"], "is missing")
    if first["type"] == "value_error":
        return InvalidValueError(first["loc"], f"is not usable: {first['ctx']['error']}")
    if first["type"] == "json_invalid":
        return InvalidValueError((), f"is not JSON: {first['ctx']['error']}")
    value = first["input"]
    shown = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else json.dumps(value)
    shown = shown if len(shown) <= 40 else f"{shown[:36]} …"
    return InvalidValueError(first["loc"], f"is {shown}: {first['msg'][:1].lower()}{first['msg'][1:]}")


# ------------------------------------------------------------------ writing


def write_json(path: Path, data: object, mode: int = 0o666) -> None:
    """Writes a JSON file as :func:`files.write_text` does. Raises ValueError for NaN and infinities."""
    files.write_text(path, json_text(data), mode)


def json_text(data: object) -> str:
    """Formats the text of a JSON file. Raises ValueError for NaN and infinities."""
    return json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def json_line(data: object) -> bytes:
    """Formats a JSON line without its end; a dataclass as an object. Raises ValueError for NaN and infinities."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, default=asdict)
    return text.encode("utf-8", "backslashreplace")


def append_line(path: Path, data: object) -> None:
    """Appends a JSON line and syncs it to disk. Raises ValueError for NaN and infinities.

    Raises OSError naming the file if the disk does not take the whole line; the file is then as it was before.
    """
    line = json_line(data) + b"\n"
    # O_NOFOLLOW: in a run folder of somebody else a link would redirect what is written.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    try:
        start = os.fstat(descriptor).st_size
        try:
            rest = memoryview(line)
            while rest:  # a full disk takes a part of the line, and only the next call fails
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                # A part of the line would run into the next one. Only one process appends to a file.
                os.ftruncate(descriptor, start)
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)
