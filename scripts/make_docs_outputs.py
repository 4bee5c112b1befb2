#!/usr/bin/env python3
"""Runs the commands in README and docs whose output is shown below them, and replaces it with what they print today.

Such a command is the last line of a ``sh`` block that is directly followed by a block without a language. ``…``
stands for omitted lines: the line after it is found again by similarity, and the lines up to the next ``…`` follow it.
A command that reads ``ds_config.json`` gets the ``json`` block before it.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ds_bench.cli import commands  # noqa: E402

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$\n*", re.MULTILINE | re.DOTALL)
OURS = re.compile(r"(?:ds-compare|python -m ds_bench) ")
WIDTH = "100"


def page_text(page: Path) -> str:
    """The page with today's outputs, if ``COLUMNS`` is ``WIDTH``. Raises ValueError if a shown line is gone."""
    text = page.read_text(encoding="utf-8")
    parts, end = [], 0
    for command, config, shown in examples(text):
        printed = _refreshed(shown[2].splitlines(), _output(command, config))
        parts += [text[end : shown.start(2)], *(f"{line}\n" for line in printed)]
        end = shown.end(2)
    return "".join([*parts, text[end:]])


def examples(text: str) -> Iterator[tuple[str, str, re.Match[str]]]:
    """Each command's arguments, the configuration that it may read, and the block that shows its output."""
    config = ""
    for block, after in pairwise(BLOCK.finditer(text)):
        config = block[2] if block[1] == "json" else config
        command = block[2].rstrip().rpartition("\n")[2]
        if block[1] == "sh" and not after[1] and after.start() == block.end() and OURS.match(command):
            yield OURS.sub("", command), config, after


def _output(command: str, config: str) -> list[str]:
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("results").symlink_to(ROOT / "results")
        Path("ds_config.json").write_text(config, encoding="utf-8")
        with contextlib.redirect_stdout(printed):
            commands.main(shlex.split(command))
    printed.flush()
    return printed.buffer.getvalue().decode().splitlines()


def _refreshed(shown: list[str], printed: list[str]) -> list[str]:
    lines, at, after_gap = [], 0, False
    for line in shown:
        if line.strip() == "…":
            lines.append(line)
            after_gap = True
            continue
        if after_gap:
            near = difflib.get_close_matches(line, printed[at:], n=1, cutoff=0.5)
            if not near:
                raise ValueError(f"nothing like this line is printed any more: {line}")
            at = printed.index(near[0], at)
        lines += printed[at : at + 1]
        at, after_gap = at + 1, False
    return lines if after_gap else lines + printed[at:]


if __name__ == "__main__":
    os.environ["COLUMNS"] = WIDTH
    for page in PAGES:
        page.write_text(page_text(page), encoding="utf-8")
