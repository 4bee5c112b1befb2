"""Compares two results row by row, before and after a change.

A ratio is given only if hardware, workload and method agree and neither row has a disqualifying caveat. Versions may
differ, since the change may be an upgrade; they are reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..config.caveat_texts import Caveat
from ..config.deepspeed_config import REMOVED_BY_ENGINE
from ..config.identity import Difference, differences
from ..records.schema import TrialRecord
from ..system import environment
from .comparability import incomparable_facts
from .comparison import ComparisonRow, compare, ratio_between
from .intervals import RatioInterval
from .load_results import Result, flat_run
from .loss_parity import compare_losses

if TYPE_CHECKING:
    from .row import Run

_CHANGES = ("num_steps", "warmup_steps", "launch", "torch", "deepspeed", "script.python")
"""Facts that may be the change itself: they do not rule out a ratio."""
_IRRELEVANT = ("launcher", "nvme_path", "supported_precisions")
"""Facts that do not change what runs, or whose effect already shows in ``launch`` or the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChange:
    """A row that is in one result or in both."""

    label: str
    before: ComparisonRow | None
    after: ComparisonRow | None
    ratio: float | None = None
    """Throughput after divided by before; None if the rows are not comparable or one has no numbers."""
    interval: RatioInterval | None = None
    """95 % interval of ``ratio``, from per-run means; None if either row has fewer than three runs."""
    incomparable_reasons: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    """Differences that may explain a change in speed: versions, steps, the DeepSpeed configuration."""
    caveats: tuple[str, ...] = ()
    """Caveats that do not rule out a ratio, each with the side it applies to."""
    same_settings: bool = False
    """Whether both results have the row, with the same versions, steps, workload and configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """Two results side by side."""

    rows: tuple[RowChange, ...]
    hardware: tuple[str, ...]
    """Differences between the hosts, or one line if a result's host is unknown: any line rules out every ratio."""
    software: tuple[str, ...]
    settings: tuple[str, ...]
    """Other differences between the environments."""
    environment_unknown: bool
    configs_unknown: bool
    """Whether a row has no DeepSpeed configuration, so that changes to it are unknown."""


def compare_before_after(before: Result, after: Result) -> BeforeAfter:
    """Compare every row of either result, and the environments."""
    a, b = before.environment, after.environment
    if a is None or b is None:
        unknown = " and ".join(str(result.source) for result in (before, after) if result.environment is None)
        hardware = [f"hardware and versions of {unknown} are unknown; give the run folder"]
        software, settings = list[str](), list[str]()
    else:
        hardware, software = environment.hardware_differences(a, b), environment.software_differences(a, b)
        settings = environment.setting_differences(a, b)
    # Rows are paired by model and strategy, in the order of ``before``; then come the rows that only ``after`` has.
    rows: list[RowChange] = []

    def name(row: ComparisonRow) -> tuple[object, ...]:
        return row.configuration.name, row.configuration.stage, row.trial.workload.model

    olds, news = compare(before.runs).rows, compare(after.runs).rows
    named_alike = [(i, j) for i, old in enumerate(olds) for j, new in enumerate(news) if name(old) == name(new)]
    partners: dict[int, int] = {}
    # If several rows share the name, for example with different batch sizes, those that differ least are paired first.
    for i, j in sorted(named_alike, key=lambda pair: len(_differences(olds[pair[0]], news[pair[1]]))):
        if i not in partners and j not in partners.values():
            partners[i] = j
    for i, row in enumerate(olds):
        if i in partners:
            rows.append(_pair(row, news[partners[i]], hardware, versions_known=None not in (a, b)))
        else:
            rows.append(RowChange(label=row.label, before=row, after=None, incomparable_reasons=("only in BEFORE",)))
    for row in (row for j, row in enumerate(news) if j not in partners.values()):
        rows.append(RowChange(label=row.label, before=None, after=row, incomparable_reasons=("only in AFTER",)))
    pairs = [(each.before, each.after) for each in rows if each.before and each.after]
    return BeforeAfter(
        rows=tuple(rows),
        hardware=tuple(hardware),
        software=tuple(software),
        settings=tuple(settings),
        environment_unknown=None in (a, b),
        configs_unknown=any(side.representative.row.config_hash is None for pair in pairs for side in pair),
    )


def _pair(before: ComparisonRow, after: ComparisonRow, hardware: Sequence[str], *, versions_known: bool) -> RowChange:
    found = _differences(before, after)
    changed = [each for each in found if not {each.field, each.fact}.isdisjoint(_CHANGES)]
    reasons = [*hardware, *(each.text for each in found if each not in changed)]
    shared = [caveat for caveat in before.caveats if caveat in after.caveats]
    caveats = [
        *(("before and after", caveat) for caveat in shared),
        *(("before", caveat) for caveat in before.caveats if caveat not in shared),
        *(("after", caveat) for caveat in after.caveats if caveat not in shared),
    ]
    # Losses of rows that are not comparable differ for that reason; a different torch or DeepSpeed may change them too.
    same_versions = {"torch", "deepspeed"}.isdisjoint(each.field for each in changed)
    if not reasons and same_versions and (loss_caveat := _loss_caveat(before, after)):
        caveats.append(("after against before", loss_caveat))
    reasons += [f"{side}: {caveat.text}" for side, caveat in caveats if caveat.kind.disqualifies]
    config_changes = list(_config_changes(before.representative, after.representative))
    # Versions are reported once for both results (BeforeAfter.software).
    reported_once = ("torch", "deepspeed") if versions_known else ()
    changes = [each.text for each in changed if each.field not in reported_once]
    ratio, interval = None, None
    if not reasons and before.tokens_per_second and after.tokens_per_second:
        ratio = after.tokens_per_second / before.tokens_per_second
        interval = ratio_between(after, before)
    return RowChange(
        label=before.label,
        before=before,
        after=after,
        ratio=ratio,
        interval=interval,
        incomparable_reasons=tuple(reasons),
        changes=(*changes, *config_changes),
        caveats=tuple(f"{side}: {caveat.line}" for side, caveat in caveats if not caveat.kind.disqualifies),
        same_settings=not (found or config_changes),
    )


def _differences(before: ComparisonRow, after: ComparisonRow) -> list[Difference]:
    """Return differences in workload, placement and run; if either row is flat, only columns are compared."""
    runs = before.representative, after.representative
    if not all(run.has_record for run in runs):
        runs = flat_run(runs[0].row), flat_run(runs[1].row)
    return [each for each in incomparable_facts(*runs) if each.field not in _IRRELEVANT]


def _loss_caveat(before: ComparisonRow, after: ComparisonRow) -> Caveat | None:
    """Return the caveat on the losses of two comparable rows with the same torch and DeepSpeed; None if they agree."""
    runs = [before.representative, after.representative]
    wrappers = {rank.engine_optimizer_class for run in runs for rank in run.ranks}
    for index, run in enumerate(runs):
        if not isinstance(run.stored, TrialRecord):
            continue
        ranks = run.ranks
        if len(wrappers) == 1:  # the known effect of a wrapper on the loss is then the same in both rows
            ranks = tuple(replace(rank, engine_optimizer_class="") for rank in ranks)
        # compare_losses groups rows by workload: both get the same one, so that a different number of steps does
        # not separate them.
        trial = replace(run.trial, workload=runs[0].trial.workload)
        runs[index] = replace(run, stored=replace(run.stored, trial=trial, ranks=ranks))
    return next(iter(compare_losses(runs).values()), None)


def _config_changes(a: Run, b: Run) -> Iterator[str]:
    """Return differences in the optimizer, and in each configuration key as written and as DeepSpeed resolved it."""
    if None not in (a.row.optimizer, b.row.optimizer):
        yield from (each.text for each in differences({"optimizer": a.row.optimizer}, {"optimizer": b.row.optimizer}))
    if not (a.has_record and b.has_record):
        if None not in (a.row.config_hash, b.row.config_hash) and a.row.config_hash != b.row.config_hash:
            yield "the DeepSpeed configuration (only its hash is known)"
        return
    written = differences(a.trial.ds_config, b.trial.ds_config)
    yield from (each.text for each in written)
    if a.ranks and b.ranks:
        known = {each.fact for each in written}
        # The rest are defaults that differ, for example between versions.
        for each in differences(a.ranks[0].resolved_config, b.ranks[0].resolved_config):
            if each.fact not in known and not (each.fact in REMOVED_BY_ENGINE and None in (each.a, each.b)):
                yield f"{each.text} (as DeepSpeed resolved it)"
