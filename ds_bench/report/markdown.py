"""A report as a Markdown block for an issue; and the escapes by which text of users and models stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from ..analysis import provenance
from ..system.terminal import escape_controls
from .comparison_report import ComparisonReport
from .profile_text import report_profiles
from .row_details import detail_tables, row_texts
from .table import HEADINGS, general_notes, measured_indices, numbered_notes, table_rows

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
    """More backticks than stand beside each other anywhere in the text."""
    return "`" * max(shortest, *(len(run) + 1 for run in re.findall("`+", text)), 0)


def table_lines(rows: Sequence[Sequence[str]], rule: Sequence[str]) -> list[str]:
    """The lines of a table. ``rows``: headings first, not escaped; ``rule``: the line below them."""
    escaped = [[escape(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [escaped[0], rule, *escaped[1:]]]


def render_markdown(report: ComparisonReport) -> str:
    """A block to paste into an issue: table, notes, recommendation, differences, machines, commands."""
    rows = table_rows(report)
    shown = measured_indices(rows)
    table = [[cells[i] for i in shown] for cells in (HEADINGS, *(row.cells for row in rows))]
    row_notes, other_notes = numbered_notes(report), general_notes(report)
    said = "\n".join((*row_notes, *other_notes))  # what a note ends with is no next step again
    lines = [line for line in report.recommendation.lines if line.removeprefix("Next: ") not in said]
    parts = [
        f"### {escape(report.title)}",
        "\n".join(table_lines(table, ["---"] * len(shown))),
        "\n".join(f"{number}. {escape(note)}" for number, note in enumerate(row_notes, 1)),
        "\n".join(f"- {escape(note)}" for note in other_notes),
        *(
            f"**{escape(details.heading)}**: {escape(details.meaning)}\n\n"
            + "\n".join(table_lines([details.headings, *details.rows], ["---"] * len(details.headings)))
            for details in detail_tables(report.comparison)
        ),
        "**Recommendation**",
        "\n".join(f"- {escape(line)}" for line in lines),
        *(
            f"**{escape(heading)}**\n\n" + "\n".join(f"- **{escape(label)}**: {escape(text)}" for label, text in texts)
            for heading, texts in row_texts(report)
        ),
        *(f"**{escape(heading)}**\n\n{text_block(text)}" for heading, text in report_profiles(report)),
        *(f"**Set-up** {escape(provenance.one_line(environment))}" for environment in report.environments),
        *(f"**Command**\n\n{shell_block(command)}" for command in report.commands),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"
