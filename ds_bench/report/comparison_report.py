"""One comparison with everything that the terminal, Markdown, the HTML page and the exports report about it.

A run ends with one; the command ``report`` makes it again from files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..analysis import provenance
from ..analysis.comparison import Comparison, ComparisonRow, compare
from ..config.caveat_texts import Caveat, CaveatKind
from ..config.spec import Trial
from ..recommend.recommendation import Recommendation, recommend
from ..system.environment import Environment
from ..system.invocation import OpenCommand

if TYPE_CHECKING:
    from ..analysis.row import Run


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """The rows of one workload on one placement, which to use, and where the figures come from."""

    facts: tuple[str, ...]
    """Model, devices, precision and so on, each a few words."""
    comparison: Comparison
    recommendation: Recommendation
    notes: tuple[str, ...] = ()
    """Notes of the run as a whole."""
    commands: tuple[str, ...] = ()
    """The command lines that were typed; empty if the files do not hold them."""
    environments: tuple[Environment, ...] = ()
    sources: tuple[str, ...] = ()
    """The files that it was made from; empty at the end of a run."""
    files: str = ""
    """Where a run that has just ended wrote its files; empty for one that is read again."""
    page_command: str = ""
    """The command that writes its HTML page, at the end of a run."""

    @property
    def title(self) -> str:
        """The facts in one line."""
        return " · ".join(self.facts)

    @property
    def recommended_row(self) -> ComparisonRow | None:
        """None if no row is recommended."""
        key = self.recommendation.key
        return None if key is None else self.comparison.row(key)

    @property
    def first_trial(self) -> Trial:
        """The first row's trial; all rows share its workload and placement, except for what a row itself sets."""
        return self.comparison.rows[0].trial

    @cached_property
    def row_notes(self) -> Mapping[str, tuple[Caveat, ...]]:
        """The caveats of each row, by its key, and why it has no ratio or failed; one caveat for each text."""
        found: dict[str, tuple[Caveat, ...]] = {}
        first: dict[str, Caveat] = {}
        for row in self.comparison.rows:
            notes = [*row.caveats]
            if row.differences:
                notes.append(Caveat(CaveatKind.NOT_COMPARABLE, {"differences": "; ".join(row.differences)}))
            for outcome in (run.outcome for run in row.runs):
                if not outcome.success and (text := outcome.details or outcome.error):
                    notes.append(Caveat(CaveatKind.FAILED, {"text": text}))
            found[row.key] = tuple(dict.fromkeys(first.setdefault(note.line, note) for note in notes))
        return found

    @cached_property
    def labels_by_note(self) -> Mapping[Caveat, Sequence[str]]:
        """Every note once, with the labels of its rows; notes on the whole comparison come first, without labels."""
        general = dict.fromkeys(self.comparison.caveats, ())
        labels: dict[Caveat, list[str]] = {}
        for row in self.comparison.rows:
            for note in self.row_notes[row.key]:
                labels.setdefault(note, []).append(row.label)
        return {**general, **{note: rows for note, rows in labels.items() if note not in general}}

    @cached_property
    def numbered_notes(self) -> tuple[str, ...]:
        """The notes of rows, each once; their number is their position from 1."""
        return tuple(dict.fromkeys(note.line for notes in self.row_notes.values() for note in notes))

    @property
    def general_lines(self) -> tuple[str, ...]:
        """The notes on the whole comparison and on the run."""
        general = (note.line for note, labels in self.labels_by_note.items() if not labels)
        return tuple(dict.fromkeys([*general, *self.notes]))

    @property
    def profiles(self) -> list[tuple[str, str]]:
        """A heading and several lines of text for each profile, from the run that represents its row."""
        texts = []
        for row in self.comparison.rows:
            profiled = (
                [(rank.rank, each) for rank in run.ranks for each in rank.profiles] for run in row.nearest_to_mean
            )
            for rank, profile in next(filter(None, profiled), []):
                texts.append((f"{row.label}: {profile.name}, rank {rank}", "\n".join([*profile.lines, *profile.files])))
        return texts


def build_report(
    runs: Sequence[Run],
    *,
    goal: str = "balanced",
    relative_to: str | None = None,
    notes: Sequence[str] = (),
    commands: Sequence[str] = (),
    environments: Sequence[Environment] = (),
    sources: Sequence[str] = (),
    facts: tuple[str, ...] | None = None,
    resume: OpenCommand | None = None,
) -> ComparisonReport:
    """Compares rows of one workload and recommends one for the goal.

    ``facts``: None derives them from the runs. ``resume``: the command that continues the run; None without one.
    Raises UsageError if ``relative_to`` names no row.
    """
    comparison = compare(runs, relative_to, environments=environments)
    return ComparisonReport(
        facts=facts or provenance.facts(runs),
        comparison=comparison,
        recommendation=recommend(comparison, goal, resume),
        notes=tuple(dict.fromkeys(notes)),
        commands=tuple(dict.fromkeys(filter(None, commands))),
        environments=tuple(environments),
        sources=tuple(sources),
    )
