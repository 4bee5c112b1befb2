"""The command ``completion``: a script that makes a shell complete ``ds-compare``, its commands, flags and files."""

from __future__ import annotations

import argparse

from ..system import terminal
from ..system.optional_packages import require_installed
from .argument_types import path


def show_script(parser: argparse.ArgumentParser, shell: str) -> int:
    """Prints the script of a shell. Returns 0. ``parser``: of all commands."""
    require_installed("shtab", "completion")
    import shtab

    _complete_files(parser, shtab.FILE)
    terminal.print_text(shtab.complete(parser, shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, how: object) -> None:
    """Marks what is a path, for every command."""
    for action in parser._actions:
        if action.type is path:
            action.complete = how  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _complete_files(subparser, how)
