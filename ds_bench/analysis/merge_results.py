"""Merges several results into groups of rows that can share a table, with their repeats pooled.

Rows of equal workload, placement and method form a group, and their repeats are runs of one row. Results of different
environments form groups of their own, whose notes name the differences; a run that was given twice counts once.
:mod:`comparison` compares the rows of a group, and :mod:`before_after` the rows of two results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.identity import differences, facts, format_fact, row_key, work_key
from ..system.environment import Environment, comparability_differences, setting_differences
from ..units import format_items
from . import provenance
from .comparability import may_differ
from .load_results import Result

if TYPE_CHECKING:
    from .row import Row, Run

_VARIED = ("ds_config", "name", "engine", "variables", "repeat", "inspection")
"""Facts and roles (``config.identity``) in which rows of one group may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultGroup:
    """Rows that can share a table."""

    facts: tuple[str, ...]
    """Workload and devices; if another group has the same, also the sources or, if those are the same too, the
    differences."""
    runs: tuple[Run, ...]
    """In the order of the results; repeats of one configuration have consecutive numbers."""
    environments: tuple[Environment, ...]
    """The known environments of the results, each once."""
    commands: tuple[str, ...]
    """The known command lines of the results, quoted for a shell, each once."""
    family: str | None
    """``zero``, ``offload`` or ``recipe``: the family of the flags in ``arguments``; None if there are none."""
    arguments: tuple[str, ...]
    """From the first result that holds any; empty if none does."""
    recipe: Mapping[str, Any]
    """From the same result; empty for a script's run."""
    notes: tuple[str, ...]
    sources: tuple[Path, ...]
    """Paths that the user named, without results that have no row in this group."""


@dataclass(slots=True, kw_only=True)
class _GroupBuilder:
    """A group while rows are added to it."""

    first: Run
    """The first run; the others request the same work."""
    environment: Environment | None
    device: str | None
    """Name of the first result's device; None if no row measured anything."""
    runs: list[Run] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """The round of each run: number of its result within this group, number of the round within that result."""

    def add(self, run: Run, result: Result) -> None:
        """Add a row of ``result``; all rows of one result come before the rows of the next."""
        self.runs.append(run)
        if not self.results or self.results[-1] is not result:
            self.results.append(result)
        self.rounds.append((len(self.results), run.trial.repeat))

    @property
    def sources(self) -> str:
        return ", ".join(dict.fromkeys(str(result.source) for result in self.results))

    def same_request(self, other: _GroupBuilder) -> bool:
        """Whether workload and placement are equal, apart from what may differ between rows of one comparison."""
        ours, theirs = self.first.trial, other.first.trial
        leave_out = (*_VARIED, *may_differ(ours, theirs))
        return work_key(ours, leave_out=leave_out) == work_key(theirs, leave_out=leave_out)

    def differences(self, other: _GroupBuilder) -> list[str]:
        """Return differences in hardware, versions and method, including an environment that only one side has."""
        ours, theirs = self.environment, other.environment
        found = []
        if ours is not None and theirs is not None:
            found = comparability_differences(ours, theirs)
        elif ours is not None or theirs is not None:
            # Unknown does not mean equal: if pooled, two machines might pass for one.
            names = [(each.hostname or "of an unnamed host") if each else "unknown" for each in (ours, theirs)]
            found = [f"environment {names[0]} vs {names[1]}"]
        elif self.device and other.device and self.device != other.device:
            found = [f"device {self.device} vs {other.device}"]
        methods = [each.first.row.method_version for each in (self, other)]
        return [*found, *([f"measurement method {methods[0]} vs {methods[1]}"] if len({*methods}) > 1 else [])]

    def build(self, facts: tuple[str, ...], notes: Iterable[str]) -> ResultGroup:
        """Return the finished group. ``notes`` follow the notes of the results."""
        results = self.results
        lines = [provenance.command(each.family, each.arguments) if each.arguments else "" for each in results]
        first = next((result for result, line in zip(results, lines, strict=True) if line), None)
        environments: list[Environment] = []  # unhashable, since they hold mappings
        for result in results:
            if result.environment and result.environment not in environments:
                environments.append(result.environment)
        own_notes = [f"{each.source}: {text}" if len(results) > 1 else text for each in results for text in each.notes]
        if len(results) > 1 and self.environment is None:
            text = "do not name their environments: assumed to come from one machine with the same versions"
            own_notes.append(f"{self.sources} {text}")
        elif len(results) > 1 and self.environment is not None:
            for each in results[1:]:
                if each.environment and (found := setting_differences(self.environment, each.environment)):
                    spread = f"although these settings differ, which may widen the spread: {'; '.join(found)}"
                    own_notes.append(f"{each.source} is pooled with {results[0].source}, {spread}")
        return ResultGroup(
            facts=facts,
            runs=tuple(_renumber(self.runs, self.rounds) if len(results) > 1 else self.runs),
            environments=tuple(environments),
            commands=tuple(dict.fromkeys(filter(None, lines))),
            family=first.family if first else None,
            arguments=first.arguments if first else (),
            recipe=first.recipe if first else {},
            notes=tuple(dict.fromkeys([*own_notes, *notes])),
            sources=tuple(dict.fromkeys(result.source for result in results)),
        )


def merge(results: Sequence[Result]) -> tuple[ResultGroup, ...]:
    """Merge results into groups, in order of appearance. A single result without a sweep is one group, unchanged."""
    builders: list[_GroupBuilder] = []
    notes: list[str] = []
    seen: set[tuple[Any, ...]] = set()
    kept: dict[int, list[Run]] = {}
    # Records first: if a run is given twice, its record is kept rather than its flat row.
    for number in sorted(range(len(results)), key=lambda number: not results[number].has_records):
        kept[number] = [run for run in results[number].runs if identity(run.row) not in seen]
        seen.update(identity(run.row) for run in kept[number])
    for number, result in enumerate(results):
        new = kept[number]
        if len(new) < len(result.runs):
            repeated = format_items(len(result.runs) - len(new), "row")
            notes.append(f"{result.source}: {repeated} also in another result, counted once")
        known: dict[tuple[object, ...], _GroupBuilder] = {}
        for run in new:
            trial, method_version = run.trial, run.row.method_version
            parts = id(trial.workload), id(trial.placement)  # rows of one file share these objects
            # Found once for each key: _find_group compares a row with every group.
            key = *parts, method_version, str(trial.common_settings) if trial.point else ""
            if key not in known:
                known[key] = _find_group(builders, run, result)
            known[key].add(run, result)
    titles = [provenance.facts(builder.runs) for builder in builders]
    groups = []
    for builder, title in zip(builders, titles, strict=True):
        own_facts: list[str] = []
        own_notes = []
        for other, other_title in zip(builders, titles, strict=True):
            if other is builder or not (title == other_title or other.same_request(builder)):
                continue
            settings = differences(*(facts(each.first.trial, leave_out=_VARIED) for each in (builder, other)))
            found = builder.differences(other)
            if other.sources == builder.sources:  # points of one sweep
                own_facts += [*found, *(f"{each.fact} {format_fact(each.a)}" for each in settings)]
                continue
            if title == other_title:
                own_facts.append(builder.sources)
            text = "; ".join([*found, *(each.text for each in settings)])
            own_notes.append(
                f"not pooled with {other.sources}, and no ratio is given between the two, as these differ: {text}"
            )
        groups.append(builder.build((*title, *dict.fromkeys(own_facts)), [*own_notes, *notes]))
    return tuple(groups)


def identity(row: Row) -> tuple[Any, ...]:
    """Return an identity that a record and its flat row share, and that two launched trials do not share."""
    # JSON from a different writer may round the throughput.
    rate = row.throughput_tokens_per_sec and f"{row.throughput_tokens_per_sec:.9g}"
    trial = row.model, row.strategy, row.stage, row.num_gpus, row.trial_id, row.repeat, row.warmup_steps, row.num_steps
    run = row.run_id if row.started_at is None else None  # a trial that was not launched has no times of its own
    return *trial, row.status, row.started_at, row.wall_seconds, rate, run


def _find_group(builders: list[_GroupBuilder], run: Run, result: Result) -> _GroupBuilder:
    """Return the group that the run belongs to; a new one is appended to ``builders``."""
    new = _GroupBuilder(
        first=run,
        environment=result.environment,
        device=next((each.row.device for each in result.runs if each.row.device), None),
    )
    for builder in builders:
        if builder.same_request(new) and not builder.differences(new):
            return builder
    builders.append(new)
    return new


def _renumber(runs: Sequence[Run], rounds: Sequence[tuple[int, int]]) -> Iterator[Run]:
    """Number the rounds, and the repeats of each configuration, consecutively, so that no two trials share a key.

    Rounds of different results stay separate, since their trials did not run side by side.
    """
    round_numbers = {each: number for number, each in enumerate(sorted(set(rounds)))}
    repeats: Counter[str] = Counter()
    for run, result_and_round in zip(runs, rounds, strict=True):
        key = row_key(run.trial)
        if repeats[key] != run.trial.repeat:
            trial = replace(run.trial, repeat=repeats[key])
            run = replace(run.with_row(repeat=repeats[key]), stored=replace(run.stored, trial=trial))
        repeats[key] += 1
        yield replace(run, round=round_numbers[result_and_round])
