"""Escapes of Markdown: text of users and models stays text."""

from __future__ import annotations

import json
import re

from ..system.terminal import escape_controls

_MARKUP = re.compile(r"[\\|*`~]|(?<=\])\(|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)|^[#>]")
"""Characters that open a cell, a span, a link, an entity or a block. An underscore between letters opens nothing."""


def escape(text: str) -> str:
    """One line of Markdown that shows ``text`` and opens no cell, tag, link or emphasis; control characters spelled
    out."""
    line = escape_unprintable(escape_controls(" ".join(text.split())))
    return _MARKUP.sub(r"\\\g<0>", line).replace("<", "&lt;")


def escape_unprintable(text: str) -> str:
    """Control and other invisible characters, line breaks included, as JSON spells them."""
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


def inline_code(text: str) -> str:
    """A code span on one line: nothing in it is markup, and no text can close it."""
    line = escape_unprintable(text)
    fence = _fence(line, 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def shell_block(command: str, indent: str = "") -> str:
    """A shell code block that no text can close. ``indent``: put in front of each line, as inside a list."""
    fence = _fence(command, 3)
    return "\n".join(indent + line for line in (f"{fence}sh", escape_controls(command), fence))


def text_block(text: str) -> str:
    """A code block that no text can close."""
    fence = _fence(text, 3)
    return "\n".join((f"{fence}text", *map(escape_unprintable, text.splitlines()), fence))


def _fence(text: str, shortest: int) -> str:
    """A fence of more backticks than the longest run of them in the text."""
    return "`" * max(shortest, *(len(run) + 1 for run in re.findall("`+", text)), 0)
