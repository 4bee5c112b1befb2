"""Reads JSON as checked values and dataclasses, and writes it.

A file that is read must be regular and of limited size. pydantic parses, checks and builds; every error is one line
that names the place. Only the functions that need pydantic import it, because most commands read no result.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
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
"""Room for fifty thousand records of two ranks each, far more than any result has."""
_REMEDY = "give a run folder, or a result's .json"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

T = TypeVar("T")
Place = tuple[str | int, ...]
UnknownKeys = Literal["forbid", "ignore"]


class InvalidJsonError(ValueError):
    """The text is not JSON. ``str()`` continues a sentence: ``is empty``, ``is not JSON: … (line 1 column 5)``."""


class InvalidValueError(ValueError):
    """A field has a value that it may not hold. ``str()`` names the place and the reason."""

    def __init__(self, place: Place, reason: str) -> None:
        super().__init__(f"{format_place(place)} {reason}".strip())
        self.place, self.reason = place, reason


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file, without ever waiting for a pipe or a device. Raises UsageError."""
    try:
        with files.opened(path, LARGEST_FILE_BYTES) as file:
            yield file
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", remedy=_REMEDY) from None
    except OSError as error:
        raise unreadable(path, error, "result", _REMEDY) from None


def unreadable(path: Path, error: OSError, kind: str, remedy: str) -> UsageError:
    """Return the error for an unreadable file. ``kind``: what it should be; ``remedy``: if it is something else."""
    # files.opened reports a file that is too large, or not regular, with these two numbers.
    if error.errno == errno.EFBIG:
        return UsageError(f"{path} is larger than any {kind}", remedy=remedy)
    if error.errno == errno.EINVAL:
        return UsageError(f"{path} {error.strerror}", remedy=remedy)
    return UsageError(f"{path} cannot be read: {error.strerror}", remedy="give a file that you can read")


def read_bytes(path: Path) -> bytes:
    """Read a regular file. Raises UsageError."""
    with opened(path) as file:
        return file.read()


def parse_json(data: bytes) -> Any:
    """Parse a JSON text in UTF-8. Raises InvalidJsonError."""
    from pydantic_core import from_json

    try:
        # RFC 8259, section 8.1: a reader may ignore the byte order mark.
        return from_json(data.removeprefix(_BYTE_ORDER_MARK), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidJsonError(f"is not JSON: {error}" if data.strip() else "is empty") from None


def parse(kind: type[T], data: bytes, unknown_keys: UnknownKeys = "forbid") -> T:
    """Read a JSON text as a ``kind``. Raises InvalidJsonError or InvalidValueError."""
    from pydantic import ValidationError

    if b"NaN" in data or b"Infinity" in data:  # not JSON, but pydantic accepts them as numbers
        parse_json(data)
    try:
        # strict: otherwise the text "5" would be taken for a number, and the number 1 for true.
        return adapter(kind).validate_json(data.removeprefix(_BYTE_ORDER_MARK), strict=True, extra=unknown_keys)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise InvalidJsonError("is empty" if not data.strip() else f"is not JSON: {_json_problem(error)}") from None
        raise invalid_value(error) from None


def _json_problem(error: Any) -> str:
    return str(error.errors()[0]["ctx"]["error"])


def build(kind: type[T], value: Any, unknown_keys: UnknownKeys = "forbid") -> T:
    """Build a ``kind`` from a JSON value. Raises InvalidValueError."""
    from pydantic_core import to_json

    # Back to text: strict validation accepts a list as a tuple only when it reads JSON.
    return parse(kind, to_json(value), unknown_keys)


def read_lines(kind: type[T], path: Path, max_bytes: int) -> list[T]:
    """Return the lines of a file that are a ``kind``; others, which a crash may cause, are skipped.

    Empty if the file cannot be read or has more than ``max_bytes``.
    """
    read = []
    with contextlib.suppress(OSError):
        for line in files.read_bytes(path, max_bytes).splitlines():
            with contextlib.suppress(ValueError):
                read.append(parse(kind, line))
    return read


_adapters: dict[Any, TypeAdapter[Any]] = {}


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """pydantic's reader for a dataclass, cached because making it takes longer than reading hundreds of records."""
    from pydantic import TypeAdapter

    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def invalid_value(error: Any) -> InvalidValueError:
    """Convert the first error of a pydantic ValidationError."""
    first = error.errors()[0]
    if first["type"] == "missing":
        return InvalidValueError(first["loc"], "is missing")
    if first["type"] == "value_error":
        return InvalidValueError(first["loc"], f"is not usable: {first['ctx']['error']}")
    if first["type"] == "json_invalid":
        return InvalidValueError((), f"is not JSON: {_json_problem(error)}")
    value = first["input"]
    shown = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else json.dumps(value)
    shown = shown if len(shown) <= 40 else f"{shown[:36]} …"
    return InvalidValueError(first["loc"], f"is {shown}: {first['msg'][:1].lower()}{first['msg'][1:]}")


# ------------------------------------------------------------------ writing


def write_json(path: Path, data: object, mode: int = 0o666) -> None:
    """Write a JSON file as :func:`files.write_text` does. Raises ValueError for NaN and infinities."""
    files.write_text(path, json_text(data), mode)


def json_text(data: object) -> str:
    """Format the text of a JSON file, with dataclasses as objects. Raises ValueError for NaN and infinities."""
    return json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False, default=asdict) + "\n"


def json_line(data: object) -> bytes:
    """Format JSON as a line without a newline, dataclasses as objects. Raises ValueError for NaN and infinities."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, default=asdict)
    return text.encode("utf-8", "backslashreplace")


def append_line(path: Path, data: object) -> None:
    """Append a JSON line and sync it to disk. Raises ValueError for NaN and infinities.

    Raises OSError naming the file if the whole line cannot be written; the file is then as it was before.
    """
    line = json_line(data) + b"\n"
    # O_NOFOLLOW: a link in another user's run folder would redirect the write.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    try:
        start = os.fstat(descriptor).st_size
        try:
            rest = memoryview(line)
            while rest:  # a full disk accepts part of the line, and only the next call fails
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                # A partial line would run into the next one. Only one process appends to a file.
                os.ftruncate(descriptor, start)
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)
