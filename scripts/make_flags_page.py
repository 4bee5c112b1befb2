#!/usr/bin/env python3
"""Writes docs/flags.md: the flags of both scripts and of every command, taken from their parsers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ds_bench.cli import arguments, commands  # noqa: E402

INTRODUCTION = """# Flags

Made by `scripts/make_flags_page.py`; each command's `--help` says the same. Flags cannot be abbreviated. `--gpus` and
`--num_gpus` are aliases of `--num-gpus`.

| exit code | meaning |
|---|---|
| 0 | success; for a comparison, at least one row trained |
| 1 | no row trained, or with `--strict` one failed; `check` found an error or warning; `plan` found nothing that \
fits; `ops` could not build any op |
| 2 | a wrong command or file, or a machine that is not ready |
| 3 | `baseline check` failed |
| 130 | interrupted |
"""


def flags_page() -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION, *_script_sections()]
    for name, parser in _leaf_commands("ds-compare", commands.build_parser()):
        rows = list(_rows(parser._actions))
        parts.append(f"## {name}\n\n" + ("\n".join([*HEADER, *rows]) if rows else "No flags.") + "\n")
    return "\n".join(parts)


HEADER = ("| flag | meaning |", "|---|---|")


def _script_sections() -> Iterator[str]:
    """Flags of both scripts, by the groups of ``--help``; flags that only one script has are marked."""
    zero = arguments.build_parser("zero", "zero_stage_comparison.py")
    offload = arguments.build_parser("offload", "offload_comparison.py")
    yield "## zero_stage_comparison.py and offload_comparison.py\n"
    for zero_group, offload_group in zip(zero._action_groups, offload._action_groups, strict=True):
        zero_rows, offload_rows = list(_rows(zero_group._group_actions)), list(_rows(offload_group._group_actions))
        rows = [row if row in offload_rows else _marked(row, "zero_stage_comparison.py") for row in zero_rows]
        rows += [_marked(row, "offload_comparison.py") for row in offload_rows if row not in zero_rows]
        if rows:
            yield "\n".join([f"### {zero_group.title}\n", *HEADER, *rows]) + "\n"


def _marked(row: str, script: str) -> str:
    return row.removesuffix(" |") + f" · `{script}` only |"


def _leaf_commands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Commands without subcommands, by the words that a user types."""
    subparsers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not subparsers:
        yield name, parser
    for action in subparsers:
        for word, subparser in action.choices.items():
            yield from _leaf_commands(f"{name} {word}", subparser)


def _rows(actions: list[argparse.Action]) -> Iterator[str]:
    for action in actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        choices = "\\|".join(map(str, action.choices)) if action.choices else ""
        value = "" if action.nargs == 0 else action.metavar or choices or action.dest
        several = "…" if action.nargs == "+" else ""
        flag = " ".join(filter(None, [", ".join(action.option_strings), f"{value}{several}"]))
        meaning = str(action.help).replace("*", r"\*").replace("|", r"\|")
        yield f"| `{flag}` | {meaning} |"


if __name__ == "__main__":
    (ROOT / "docs" / "flags.md").write_text(flags_page(), encoding="utf-8")
