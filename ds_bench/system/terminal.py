"""Prints text without control characters, with replacements for characters that the stream cannot show.

Everything that the parent prints goes through :func:`print_text` or :func:`print_json`, except Parquet, argparse's
``--help`` and ``--version``, "interrupted" while modules load, and what a ``rich`` console draws (escaped).
"""

from __future__ import annotations

import codecs
import json
import os
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

_ASCII = {
    "✅": "[ok]", "❌": "[failed]", "⏹": "[stopped]", "⏭": "[skipped]", "\ufe0f": "", "—": "-", "–": "-", "−": "-",
    "→": "->", "×": "x", "÷": "/", "±": "+/-", "…": "...", "≈": "~", "≥": ">=", "·": "|", "★": "*", "✓": "ok", "✗": "x",
}  # fmt: skip
_PLAIN_CHARACTERS = "ds_bench_plain_characters"


def _replace_characters(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_ASCII.get(each, "?") for each in error.object[error.start : error.end]), error.end


codecs.register_error(_PLAIN_CHARACTERS, _replace_characters)


def _encoding(stream: IO[str]) -> str:
    encoding = getattr(stream, "encoding", None) or "ascii"
    try:
        return codecs.lookup(encoding).name
    except LookupError:
        return "ascii"


def can_encode(text: str, stream: IO[str]) -> bool:
    """Return whether the stream's encoding has all characters of the text."""
    try:
        text.encode(_encoding(stream))
    except UnicodeEncodeError:
        return False
    return True


def to_ascii(text: str) -> str:
    """Return the text in ASCII; characters without a replacement become ``?``."""
    return text.encode("ascii", _PLAIN_CHARACTERS).decode("ascii")


def width_of(stream: IO[str]) -> int:
    """Return the number of columns to print in: ``COLUMNS``, or else the terminal's, or 100 for a file."""
    columns = os.environ.get("COLUMNS", "")
    # At most five digits: int() of a very long text raises, and no terminal is that wide.
    if columns.isdecimal() and 0 < len(columns) < 6 and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        # A terminal of unknown size may be narrow; a file has no width.
        return 80 if stream.isatty() else 100


def escape_controls(text: str) -> str:
    """Return the text with control characters escaped and line breaks as spaces: a name must not control the terminal.

    Direction marks, other invisible characters and surrogates are escaped too, but not U+200D, which joins emoji.
    """
    if text.isprintable():
        return text
    return "".join(
        f"\\x{ord(each):02x}" if unicodedata.category(each) in ("Cc", "Cf", "Cs") and each != "\u200d" else each
        for each in " ".join(text.splitlines())
    )


def ensure_streams() -> None:
    """Open /dev/null for each standard stream that was closed at the start (``>&-``), for child processes too."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # the system gives the lowest free number, which is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


@contextmanager
def ignoring_broken_stderr() -> Iterator[None]:
    """Within this context, a failed write to standard error (``2>&1 | head``, a full disk) raises nothing."""
    before = sys.stderr
    sys.stderr = cast(TextIO, _DroppingStream(before))
    try:
        yield
    finally:
        sys.stderr = before


class _DroppingStream:
    """Writes to a stream until the first failure; drops the text from then on."""

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
    """Send buffered and later text of the stream to /dev/null; otherwise it would fail again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def print_text(text: str, stream: IO[str] | None = None) -> None:
    """Print lines without control characters. ``stream``: standard output by default."""
    stream = sys.stdout if stream is None else stream
    shown = "\n".join(map(escape_controls, text.split("\n")))
    print(_shown_on(stream, shown), file=stream, flush=stream is not sys.stdout)


def _shown_on(stream: IO[str], text: str) -> str:
    """The text with replacements for characters that the stream cannot show."""
    return text.encode(_encoding(stream), _PLAIN_CHARACTERS).decode(_encoding(stream))


class StatusLine:
    """Prints lines that stay, and below them one line that is redrawn on a terminal.

    On any other stream the redrawn line is a plain line every 15 seconds. ``quiet``: nothing is printed.
    """

    _REDRAW_SECONDS, _PLAIN_SECONDS = 1.0, 15.0

    def __init__(self, stream: IO[str], *, quiet: bool = False) -> None:
        self.stream, self.quiet = stream, quiet
        self._is_terminal = stream.isatty()
        self._shown_at = time.monotonic()
        self._live: Any = None

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if not self.quiet:
            self.close()
            print_text(text, self.stream)
            # On a terminal the redrawn line follows immediately; in a log it would only add a line.
            self._shown_at = 0.0 if self._is_terminal else time.monotonic()

    def show(self, text: str) -> None:
        """Redraw the last line, at most once a second."""
        now = time.monotonic()
        wait_seconds = self._REDRAW_SECONDS if self._is_terminal else self._PLAIN_SECONDS
        if self.quiet or now - self._shown_at < wait_seconds:
            return
        self._shown_at = now
        if not self._is_terminal:
            print_text(text, self.stream)
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        line = Text(_shown_on(self.stream, escape_controls(text)), no_wrap=True, overflow="ellipsis")
        if self._live is None:
            console = Console(file=self.stream, highlight=False)
            # No automatic refresh: rich would start a thread that draws while trials are measured.
            self._live = Live(line, console=console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(line, refresh=True)

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the redrawn line; the next :meth:`show` starts a new one."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def print_json(text: str) -> None:
    """Print JSON text on standard output; control characters are written as JSON escapes."""
    ascii_only = not can_encode(text, sys.stdout)

    def must_escape(character: str) -> bool:
        return (character != "\n" and not character.isprintable()) or (ascii_only and not character.isascii())

    print("".join(json.dumps(each)[1:-1] if must_escape(each) else each for each in text))


@contextmanager
def ignoring_broken_pipe() -> Iterator[None]:
    """Within this context ignore a closed pipe (``| head``), but no other failure to write to standard output."""
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
