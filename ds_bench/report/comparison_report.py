"""What a set of rows comes to: the comparison, the recommendation, and where they come from; as text for a console
or as a Markdown block for an issue. A run ends with it, and ``report`` makes it again from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from ..analysis import comparison as compare
from ..analysis import provenance
from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.summary import TrialSummary
from ..recommend import recommendation as recommend
from ..recommend.recommendation import Recommendation
from ..system import terminal
from ..system.environment import Environment
from . import table
from .markdown import escape, fenced


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One table and what to make of it."""

    title: str
    """What was trained on what."""
    comparison: Comparison
    recommendation: Recommendation
    goal: str
    """speed, balanced or memory."""
    notes: tuple[str, ...] = ()
    """Of the run as a whole."""
    commands: tuple[str, ...] = ()
    """The lines that were typed; empty where the files do not tell."""
    environments: tuple[Environment, ...] = ()
    sources: tuple[str, ...] = ()
    """The files it was made from; empty at the end of a run."""

    @property
    def chosen(self) -> ComparisonRow | None:
        """The recommended row."""
        key = self.recommendation.key
        return None if key is None else self.comparison.result(key)

    def recommendation_facts(self) -> dict[str, Any]:
        """The recommendation with its goal in plain JSON values: decided or not, and the tied rows."""
        return {"goal": self.goal, **self.recommendation.to_dict()}


def of(
    summaries: Sequence[TrialSummary],
    *,
    goal: str = "balanced",
    relative_to: str | None = None,
    notes: Sequence[str] = (),
    commands: Sequence[str] = (),
    environments: Sequence[Environment] = (),
    sources: Sequence[str] = (),
    heading: str | None = None,
) -> Answer:
    """The answer that rows of one workload give.

    Raises UsageError where ``relative_to`` names no row.
    """
    comparison = compare.compare(summaries, relative_to, environments=environments)
    return Answer(
        title=heading or provenance.title(summaries),
        comparison=comparison,
        recommendation=recommend.recommend(comparison, goal),
        goal=goal,
        notes=tuple(notes),
        commands=tuple(dict.fromkeys(filter(None, commands))),
        environments=tuple(environments),
        sources=tuple(sources),
    )


def print_answer(answer: Answer, stream: IO[str]) -> None:
    """The table, its notes and the recommendation."""
    table.print_table(answer.title, answer.comparison, answer.notes, stream)
    terminal.print_text("", stream)
    for line in recommend.lines(answer.recommendation, answer.goal):
        terminal.print_text(line, stream)


def markdown(answer: Answer) -> str:
    """A block to paste into an issue: table, recommendation, set-up, exact command, versions."""
    parts = [table.markdown(answer.title, answer.comparison, answer.notes).rstrip()]
    parts += [
        "**Recommendation**\n\n"
        + "\n".join(f"- {escape(line)}" for line in recommend.lines(answer.recommendation, answer.goal))
    ]
    for environment in answer.environments:
        parts.append("**Set-up** " + escape(provenance.one_line(environment)))
    for line in answer.commands:
        parts.append(f"**Command**\n\n{fenced(line)}")
    return "\n\n".join(parts) + "\n"
