"""Several results as one: rows of the same workload, placement and method join, repeats counted as runs of one set.

Only what may be compared is put together. Results of environments that differ stay apart, and their titles say in
what; one run that was given twice counts once. What the rows of a group come to, their losses held against each other
too, is for :mod:`compare`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..config.spec import Placement, Workload
from ..system.environment import Environment, comparable, setting_differences
from . import provenance
from .comparability import row_key
from .load_results import Result, trial_identity
from .summary import TrialSummary

_MOST_NAMED = 3
"""Differences that a title names; a note has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultGroup:
    """Rows that may stand in one table."""

    title: str
    """What was trained on what; where another group would be called the same, what tells them apart."""
    summaries: tuple[TrialSummary, ...]
    """In order of the results; repeats of one configuration are numbered through."""
    environments: tuple[Environment, ...]
    """Of the results that tell theirs, each once."""
    commands: tuple[str, ...]
    """The lines that were typed, ready for a shell, of the results that tell theirs, each once."""
    family: str | None
    """``zero`` or ``offload``: whose flags ``arguments`` are; None where no result tells its arguments."""
    arguments: tuple[str, ...]
    """Of the first result that tells them; empty where none does."""
    notes: tuple[str, ...]
    sources: tuple[Path, ...]
    """What the user named, as far as rows of it are in here."""


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A group while it is filled."""

    workload: Workload
    placement: Placement
    method: int
    environment: Environment | None
    device: str | None
    summaries: list[TrialSummary] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """Of each summary: which result's round it ran in, and the number of that round there."""

    def add(self, summary: TrialSummary, result: Result) -> None:
        """``summary``: a row of ``result``, which comes after all rows of the results before it."""
        self.summaries.append(summary)
        if not self.results or self.results[-1] is not result:
            self.results.append(result)
        self.rounds.append((len(self.results), summary.record.trial.repeat))


def merge(results: Sequence[Result]) -> tuple[ResultGroup, ...]:
    """The groups in order of appearance; a single run is one group, as it is."""
    kept, notes = _each_run_once(results)
    drafts: list[_Draft] = []
    for result, summaries in kept:
        mine: dict[tuple[int, int, int], _Draft] = {}
        for summary in summaries:
            trial, method = summary.record.trial, summary.record.method_version
            look = id(trial.workload), id(trial.placement), method  # rows of one file share these objects
            if look not in mine:
                mine[look] = _draft_for(drafts, summary, result)
            mine[look].add(summary, result)
    titles = _titles(drafts)
    return tuple(
        _group(draft, title, [*_apart(draft, drafts), *notes]) for draft, title in zip(drafts, titles, strict=True)
    )


# ------------------------------------------------------------------ each run once


def _each_run_once(results: Sequence[Result]) -> tuple[list[tuple[Result, list[TrialSummary]]], list[str]]:
    """The summaries of each result less those that an earlier one tells too; a record is preferred to its flat row."""
    owners: dict[Any, int] = {}
    known = [[_name(summary) for summary in result.summaries] for result in results]
    for number in sorted(range(len(results)), key=lambda number: results[number].records is None):
        for name in known[number]:
            owners.setdefault(name, number)
    kept, notes = [], []
    for number, (result, names) in enumerate(zip(results, known, strict=True)):
        told: dict[int, int] = {}
        mine = []
        for name, summary in zip(names, result.summaries, strict=True):
            owner = owners[name]
            if owner == number:
                mine.append(summary)
            else:
                told[owner] = told.get(owner, 0) + 1
        notes += [f"{result.source}: {_rows(count)} already in {results[owner].source}: counted once"
                  for owner, count in told.items()]  # fmt: skip
        kept.append((result, mine))
    return kept, notes


def _rows(count: int) -> str:
    return "1 row is" if count == 1 else f"{count} rows are"


def _name(summary: TrialSummary) -> tuple[Any, ...]:
    """Within one result no two rows are the same, hence the repeat and the folder's name besides."""
    return *trial_identity(summary), summary.record.trial.trial_id


# ------------------------------------------------------------------ who belongs together


def _draft_for(drafts: list[_Draft], summary: TrialSummary, result: Result) -> _Draft:
    made = _Draft(
        workload=summary.record.trial.workload,
        placement=summary.record.trial.placement,
        method=summary.record.method_version,
        environment=result.environment,
        device=_device(result.summaries),
    )
    for draft in drafts:
        if draft.method == made.method and _alike(draft, made) and not _between(draft, made):
            return draft
    drafts.append(made)
    return made


def _device(summaries: Sequence[TrialSummary]) -> str | None:
    return next((rank.device_name for summary in summaries for rank in summary.record.ranks), None)


def _alike(a: _Draft, b: _Draft) -> bool:
    """Whether they ask for the same: the rows' own part of being comparable."""
    return _shared(a.workload) == _shared(b.workload) and a.placement == b.placement


def _between(a: _Draft, b: _Draft) -> list[str]:
    """Why measurements of the two are not pooled. What only one of them tells is a difference, as in ``comparable``."""
    if a.environment is not None and b.environment is not None:
        return comparable(a.environment, b.environment)
    if a.environment is not None or b.environment is not None:
        return [f"environment {_known(a.environment)} against {_known(b.environment)}"]
    return [] if a.device == b.device or None in (a.device, b.device) else [f"device {a.device} against {b.device}"]


def _known(environment: Environment | None) -> str:
    return f"of {environment.hostname}" if environment else "not known"


# ------------------------------------------------------------------ what tells groups apart


def _shared(workload: Workload) -> Workload:
    """What rows that belong together have in common: not the micro-batch where each has its own largest."""
    return replace(workload, batch_size=1) if workload.batch_policy == "largest" else workload


def _titles(drafts: Sequence[_Draft]) -> list[str]:
    """Each with what tells it from the first other group of the same name."""
    plain = [provenance.title(draft.summaries) for draft in drafts]
    made = []
    for number, name in enumerate(plain):
        other = next((index for index, same in enumerate(plain) if same == name and index != number), None)
        differences = list(_differences(drafts[number], drafts[other])) if other is not None else []
        more = [f"{len(differences) - _MOST_NAMED} more differences"] if len(differences) > _MOST_NAMED else []
        made.append(" · ".join([name, "; ".join([*differences[:_MOST_NAMED], *more])]) if differences else name)
    return made


def _differences(a: _Draft, b: _Draft) -> Iterator[str]:
    yield from _between(a, b)
    for left, right in ((a.workload, b.workload), (a.placement, b.placement)):
        for entry in fields(left):
            values = getattr(left, entry.name), getattr(right, entry.name)
            if values[0] != values[1]:
                yield " against ".join([f"{entry.name} {_text(values[0])}", _text(values[1])])
    if a.method != b.method:
        yield f"method of measurement {a.method} against {b.method}"


def _text(value: object) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _apart(draft: _Draft, drafts: Sequence[_Draft]) -> Iterator[str]:
    """Why rows of one workload were not pooled with another group's."""
    for other in drafts:
        if other is not draft and _alike(other, draft):
            found = "; ".join(_differences(draft, other))
            yield f"not pooled with {_listed(other)}, and no ratio is given between the two, as these differ: {found}"


def _listed(draft: _Draft) -> str:
    return ", ".join(dict.fromkeys(str(result.source) for result in draft.results))


# ------------------------------------------------------------------ a group


def _group(draft: _Draft, heading: str, notes: Iterable[str]) -> ResultGroup:
    results = draft.results
    summaries = draft.summaries
    if len(results) > 1:
        summaries = _numbered(summaries, draft.rounds)
    told = next((result for result in results if _command(result)), None)
    said = [f"{result.source}: {text}" if len(results) > 1 else text for result in results for text in result.notes]
    return ResultGroup(
        title=heading,
        summaries=tuple(summaries),
        environments=tuple(_distinct(result.environment for result in results if result.environment)),
        commands=tuple(dict.fromkeys(line for result in results if (line := _command(result)))),
        family=told.family if told else None,
        arguments=told.arguments if told else (),
        notes=tuple(dict.fromkeys([*said, *_pooled(draft), *notes])),
        sources=tuple(dict.fromkeys(result.source for result in results)),
    )


def _command(result: Result) -> str:
    return provenance.command(result.family, result.arguments) if result.arguments else ""


def _distinct(environments: Iterable[Environment]) -> list[Environment]:
    found: list[Environment] = []
    for environment in environments:
        if environment not in found:
            found.append(environment)
    return found


def _pooled(draft: _Draft) -> Iterator[str]:
    """What a reader must know of results that were put together."""
    if len(draft.results) < 2:
        return
    if draft.environment is None:
        yield f"{_listed(draft)} do not tell their environments: taken to be of one machine with the same versions"
        return
    first = draft.results[0].source
    for result in draft.results[1:]:
        if result.environment and (found := "; ".join(setting_differences(draft.environment, result.environment))):
            yield f"{result.source} is pooled with {first}, though these differ and may widen the spread: {found}"


def _numbered(summaries: Sequence[TrialSummary], rounds: Sequence[tuple[int, int]]) -> list[TrialSummary]:
    """Repeats of one configuration numbered through, so that no two trials have one key; rounds likewise.

    Rounds of two results are two rounds, as nothing else ran beside them.
    """
    round_numbers = {each: place for place, each in enumerate(sorted(set(rounds)))}
    seen: dict[str, int] = {}
    made = []
    for summary, its_round in zip(summaries, rounds, strict=True):
        summary = replace(summary, round=round_numbers[its_round])
        trial = summary.record.trial
        key = row_key(summary.record)
        repeat = seen[key] = seen.get(key, -1) + 1
        if repeat != trial.repeat:
            record = replace(summary.record, trial=replace(trial, repeat=repeat))
            summary = replace(summary, record=record)
        made.append(summary)
    return made
