"""Text on its way to a terminal, a pipe or a file: what the stream cannot show is put otherwise."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

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
    return "".join(_spelled(sign) for sign in " ".join(text.splitlines()))


def _spelled(sign: str) -> str:
    return f"\\x{ord(sign):02x}" if unicodedata.category(sign) in ("Cc", "Cf", "Cs") and sign != "\u200d" else sign


def have_streams() -> None:
    """A process started with its output closed (``>&-``) gets one that swallows what is written."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for the process's life


def print_text(text: str) -> None:
    """On standard output, in ASCII where it prints nothing else."""
    print(text if prints(text, sys.stdout) else ascii_only(text))


@contextmanager
def pipe_may_close() -> Iterator[None]:
    """A reader that has seen enough (``| head``) is no error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
