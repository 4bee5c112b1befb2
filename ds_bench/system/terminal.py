"""Prints text: control characters from files do not reach the terminal, and a stream of ASCII gets ASCII.

Everything the parent prints goes through :func:`print_text` or :func:`print_json`, but for the tables that ``rich``
draws from cells which :func:`plain` has made.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

_ASCII = {
    "✅": "[ok]",
    "❌": "[failed]",
    "⏹️": "[stopped]",
    "⏭️": "[skipped]",
    "—": "-",
    "→": "->",
    "×": "x",
    "±": "+/-",
    "…": "...",
    "≈": "~",
    "·": "|",
}


def prints(text: str, stream: IO[str]) -> bool:
    """Whether the stream's encoding can show the text."""
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def ascii_only(text: str) -> str:
    """The same in ASCII, for terminals that print nothing else."""
    for sign, plain_sign in _ASCII.items():
        text = text.replace(sign, plain_sign)
    return text.encode("ascii", "replace").decode("ascii")


def plain(text: str) -> str:
    """Control characters spelled out, line breaks as spaces: a model's name must not steer the terminal."""
    if text.isprintable():
        return text
    return "".join(f"\\x{ord(sign):02x}" if _is_control(sign) else sign for sign in " ".join(text.splitlines()))


def _is_control(sign: str) -> bool:
    """Control, direction and other invisible characters, half surrogates, line separators; not what joins emoji."""
    return unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp") and sign != "\u200d"


def have_streams() -> None:
    """A process started with its input or output closed (``>&-``) gets /dev/null there, and so do its children."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # the lowest free number is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


@contextmanager
def stderr_may_break() -> Iterator[None]:
    """Progress that nobody reads any more (``2>&1 | head``, a full disk) is dropped and ends nothing."""
    before = sys.stderr
    sys.stderr = cast(TextIO, _DroppingStream(before))
    try:
        yield
    finally:
        sys.stderr = before


class _DroppingStream:
    """Passes text on until the first failure; from then on to /dev/null."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _discard_writes(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _discard_writes(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _discard_writes(stream: TextIO) -> None:
    """Sends what the stream still holds, and all that follows, to /dev/null: it would fail again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def print_text(text: str, stream: IO[str] | None = None) -> None:
    """Prints lines, each as :func:`plain` shows it, in ASCII where the stream prints nothing else.

    ``stream``: None is standard output.
    """
    stream = sys.stdout if stream is None else stream
    shown = "\n".join(map(plain, text.split("\n")))
    print(shown if prints(shown, stream) else ascii_only(shown), file=stream, flush=stream is not sys.stdout)


def print_json(text: str) -> None:
    """Prints JSON text on standard output; control characters are written as JSON escapes."""
    escape = not prints("é", sys.stdout)
    print(
        "".join(
            json.dumps(sign)[1:-1]
            if (sign != "\n" and not sign.isprintable()) or (escape and not sign.isascii())
            else sign
            for sign in text
        )
    )


@contextmanager
def pipe_may_close() -> Iterator[None]:
    """A reader that closes the pipe (``| head``) is no error; any other failure to write is raised."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_writes(sys.stdout)
    except OSError:
        try:
            sys.stdout.flush()
        except OSError:
            _discard_writes(sys.stdout)
        raise
