"""Text of users, models and machines inside Markdown."""

from __future__ import annotations

from ..system.terminal import plain


def escape(text: str) -> str:
    """One line of Markdown that can open no cell, no tag and no link, and steers no terminal."""
    text = plain(text).replace("\\", "\\\\")
    for sign in "|*`":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("<", "&lt;").replace("](", "]\\(")


def fenced(text: str) -> str:
    """A shell code block whose fence no text can close."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}sh\n{plain(text)}\n{fence}"
