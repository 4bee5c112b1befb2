"""Baselines by name, and the verdict on a result held against its own: passed, a regression, or not comparable.

A change counts as a regression when it is beyond the entry's tolerance and, where three runs or more on both sides
allow a test, larger than the noise between runs. ``baselines.json`` is the file (:mod:`baselinefile`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import units
from ..errors import UsageError
from ..records.schema import INTERRUPTED, SKIPPED
from ..system.environment import comparable
from . import store
from .entry import DEFAULT_TOLERANCE, BaselineEntry
from .measures import Measure, measures
from .result import BenchmarkResult

__all__ = [
    "DEFAULT_PATH",
    "BaselineComparison",
    "BaselineEntry",
    "compare_to_baseline",
    "load_baseline",
    "missing_baselines",
    "save_baseline",
    "save_results",
]

DEFAULT_PATH = Path("baselines.json")
_ANY_RISE, _ANY_FALL = 100.0, 0.9995
"""Fractions of the baseline: where no smaller rise of memory, or fall of throughput, is seen, a number says no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineComparison:
    """One verdict, of three kinds."""

    name: str
    passed: bool | None
    """False: a regression. None: not comparable, which is neither a pass nor a regression."""
    message: str
    """One line: the figures and why."""
    baseline: BaselineEntry | None = None
    """None where there is none of that name: passed, with that notice."""
    throughput_ratio: float | None = None
    """Tokens/s to the baseline's."""
    memory_ratio: float | None = None
    """Peak memory to the baseline's."""
    regressions: tuple[str, ...] = ()
    """Of ``throughput``, ``memory``, ``status`` (it no longer runs, or its loss is not finite and the like) and
    ``missing`` (the result has no such row)."""
    unmatched: bool = False
    """The row trained and has no baseline of its name: nothing guards it. A row that failed needs none."""
    noisy: bool = False
    """Passed, but its runs or the baseline's vary so much that a regression beyond the tolerance would go unseen."""

    @property
    def comparable(self) -> bool:
        """Whether hardware, versions and workload allow a verdict."""
        return self.passed is not None

    @property
    def failed(self) -> bool:
        """Whether it is a regression."""
        return self.passed is False


def save_baseline(entry: BaselineEntry, path: Path | str = DEFAULT_PATH) -> None:
    """Puts the entry in the place of any of its name; keys of that entry unknown here stay. Raises UsageError."""
    store.edit(Path(path), lambda entries: {**entries, entry.name: _over(entries.get(entry.name, {}), entry)})


def save_results(
    results: Iterable[BenchmarkResult], path: Path | str = DEFAULT_PATH, tolerance: float | None = None
) -> list[BaselineEntry]:
    """All of them in one change of the file. ``tolerance``: None keeps that of an earlier entry, else 0.05."""
    saved: list[BaselineEntry] = []

    def change(entries: store.Entries) -> store.Entries:
        changed = dict(entries)
        for result in results:
            before = changed.get(result.name)
            entry = BaselineEntry.of(result, _tolerance(result.name, before, tolerance, path))
            changed[result.name] = _over(before or {}, entry)
            saved.append(entry)
        return changed

    store.edit(Path(path), change)
    return saved


def _tolerance(name: str, before: dict[str, object] | None, asked: float | None, path: Path | str) -> float:
    if asked is not None:
        return asked
    return DEFAULT_TOLERANCE if before is None else _entry(name, before, path).tolerance


def _over(before: dict[str, object], entry: BaselineEntry) -> dict[str, object]:
    return {**entry.to_dict(), **{key: value for key, value in before.items() if key not in BaselineEntry.KEYS}}


def load_baseline(name: str, path: Path | str = DEFAULT_PATH) -> BaselineEntry | None:
    """The entry of that name; None where there is none, or no file. Raises UsageError where it cannot be used."""
    entries = store.read(Path(path)) or {}
    return _entry(name, entries[name], path) if name in entries else None


def missing_baselines(results: Sequence[BenchmarkResult], path: Path | str = DEFAULT_PATH) -> list[BaselineEntry]:
    """The entries of the file that belong with these results and that none of them is named as.

    An entry belongs with a result where both are of one saved run (``BaselineEntry.run_id``), or, in files that do not
    tell, where both are of one script and one workload. A limit set by hand belongs with nothing. Raises UsageError
    where the file cannot be used.
    """
    entries = [_entry(name, data, path) for name, data in (store.read(Path(path)) or {}).items()]
    names = {result.name for result in results}
    runs = {entry.run_id for entry in entries if entry.name in names and entry.run_id}
    workloads = [_common_workload(result.workload) for result in results if result.workload]
    return [
        entry
        for entry in entries
        if entry.name not in names
        and (
            entry.run_id in runs
            or (entry.run_id is None and entry.workload and _common_workload(entry.workload) in workloads)
        )
    ]


def _common_workload(workload: Mapping[str, Any]) -> tuple[object, ...]:
    """What rows of one result share: the script, and what was trained by how many."""
    shared = ("model", "batch_size", "seq_length", "grad_accum", "precision", "activation_checkpointing", "num_gpus")
    by_stage = workload.get("strategy") == f"zero{workload.get('stage')}"
    return (by_stage, *(workload.get(key) for key in shared))


def _entry(name: str, data: dict[str, object], path: Path | str) -> BaselineEntry:
    try:
        return BaselineEntry.from_dict({**data, "name": name})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: baseline {name!r}: {error}", remedy="correct it, or save it anew") from None


def compare_to_baseline(
    result: BenchmarkResult, baseline: BaselineEntry | None = None, *, path: Path | str = DEFAULT_PATH
) -> BaselineComparison:
    """The verdict on a result. ``baseline``: None takes the entry of the result's name from ``path``.

    Raises UsageError where the file cannot be used.
    """
    baseline = load_baseline(result.name, path) if baseline is None else baseline
    if baseline is None:
        ended = f"; {_unusable(result)}" if _unusable(result) else ""
        return BaselineComparison(
            name=result.name, passed=True, message=f"no baseline of this name{ended}", unmatched=not ended
        )
    differences = [*_obstacles(result, baseline)]
    if differences:
        text = f"not comparable with the baseline: {'; '.join(differences)}"
        return BaselineComparison(name=result.name, passed=None, message=text, baseline=baseline)
    return _spoiled(result, baseline) if _unusable(result) else _judged(result, baseline)


def _unusable(result: BenchmarkResult) -> str | None:
    """Why the result has no figures to judge: it failed, or a caveat says that they are not to be used."""
    if not result.succeeded:
        return f"it ended with {result.status}{f': {result.error}' if result.error else ''}"
    return f"its figures are not to be used: {'; '.join(result.doubts)}" if result.doubts else None


def _obstacles(result: BenchmarkResult, baseline: BaselineEntry) -> Iterator[str]:
    """What of hardware, versions and workload differs; of the workload what both sides tell."""
    if result.status in (INTERRUPTED, SKIPPED):
        yield f"it ended with {result.status}"
    if not baseline.set_by_hand:
        if result.environment is None or baseline.environment is None:
            silent = "result" if result.environment is None else "baseline"
            yield f"the {silent} does not tell its hardware and versions"
        else:
            yield from comparable(result.environment, baseline.environment)
    for key, ours in {**result.workload, "memory": result.memory}.items():
        theirs = baseline.memory if key == "memory" else baseline.workload.get(key)
        if key != "ds_config" and None not in (ours, theirs) and ours != theirs:
            yield f"{key} {ours} against {theirs}"
    if result.succeeded and not measures(result, baseline):
        yield "no figure is known on both sides"


def _spoiled(result: BenchmarkResult, baseline: BaselineEntry) -> BaselineComparison:
    """The baseline trained as it should, and this did not: worse than any figure could say."""
    text = f"regression: {_unusable(result)}; the baseline ran"
    return BaselineComparison(name=result.name, passed=False, message=text, baseline=baseline, regressions=("status",))


def _judged(result: BenchmarkResult, baseline: BaselineEntry) -> BaselineComparison:
    found = measures(result, baseline)
    regressions = tuple(each.kind for each in found if each.regressed(baseline.tolerance))
    ratios = {each.kind: each.ratio for each in found}
    noisy = [each for each in found if each.noisy(baseline.tolerance)] if not regressions else []
    parts = [each.text(baseline.tolerance) + _unseen(each if each in noisy else None) for each in found]
    parts += _remarks(result, baseline, found)
    return BaselineComparison(
        name=result.name,
        passed=not regressions,
        message=f"{'regression' if regressions else 'passed'}: {'; '.join(parts)}",
        baseline=baseline,
        throughput_ratio=ratios.get("throughput"),
        memory_ratio=ratios.get("memory"),
        regressions=regressions,
        noisy=bool(noisy),
    )


def _unseen(noisy: Measure | None) -> str:
    """What a figure's noise hides; empty for one that is not noisy."""
    if noisy is None or noisy.unseen is None:
        return ""
    if noisy.unseen > (_ANY_RISE if noisy.more_is_worse else _ANY_FALL):
        return ", cannot see any change"
    return f", cannot see changes below {units.format_percent(noisy.unseen)}"


def _remarks(result: BenchmarkResult, baseline: BaselineEntry, found: Sequence[Measure]) -> Iterator[str]:
    """What the verdict does not weigh and its reader should know."""
    if any(each.interval is None for each in found):
        varied = max((each for each in (result.step_variation, baseline.step_variation) if each), default=None)
        guide = f" (steps vary by {units.format_percent(varied)}, a rough guide only)" if varied else ""
        yield f"not tested against noise: fewer than three runs on a side{guide}"
    configs = result.workload.get("ds_config"), baseline.workload.get("ds_config")
    if None not in configs and configs[0] != configs[1]:
        yield "the DeepSpeed configuration is not the baseline's"
    if result.failed_runs:
        yield f"{result.failed_runs} run(s) failed"
