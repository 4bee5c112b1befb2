"""Compares two results row by row, before and after a change: ratios of throughputs, and differences that explain them.

A ratio is given only if hardware, workload and method agree and neither row has a disqualifying caveat. Versions may
differ, as the change may be an upgrade; they are reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..config.caveats import Caveat
from ..system import environment
from . import comparability, comparison
from .comparison import ComparisonRow
from .intervals import RatioInterval
from .load_results import Result, flat_run
from .loss_parity import compare_losses

if TYPE_CHECKING:
    from .row import Run

ABSENT = "absent"
_CHANGES = ("num_steps", "warmup_steps", "launch", "torch", "deepspeed")
"""Fields in which the change itself may consist: differences in them do not forbid a ratio."""
_IRRELEVANT_FIELDS = ("launcher", "hostfile", "nvme_path", "supported_precisions")
"""Fields that do not change what runs, or whose effect ``launch`` or the configuration shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChange:
    """One row of both results."""

    label: str
    before: ComparisonRow | None
    after: ComparisonRow | None
    ratio: float | None = None
    """Throughput after divided by before; None if the rows do not compare or one has no numbers."""
    interval: RatioInterval | None = None
    """95 % interval of ``ratio``, from per-run means; None below three runs of either row ("not tested")."""
    incomparable_reasons: tuple[str, ...] = ()
    """Why there is no ratio."""
    changes: tuple[str, ...] = ()
    """Differences that may explain a change of speed: versions, steps, the DeepSpeed configuration."""
    caveats: tuple[str, ...] = ()
    """One line per caveat of either row, and one if their losses differ."""
    same_settings: bool = False
    """True if both results have the row, with equal workload, placement and configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """Two results side by side."""

    rows: tuple[RowChange, ...]
    hardware: tuple[str, ...]
    """Differences of the hosts, or one line if the host of a result is not known: they forbid every ratio."""
    software: tuple[str, ...]
    """Versions that differ."""
    settings: tuple[str, ...]
    """Other differences of the environments."""
    environment_unknown: bool
    """True if a result has no record of its environment."""
    configs_unknown: bool = False
    """True if a row has no record of its DeepSpeed configuration, so that changes of it are not known."""


def compare_before_after(before: Result, after: Result) -> BeforeAfter:
    """Every row of either result, and the differences of their environments."""
    a, b = before.environment, after.environment
    if a is None or b is None:
        unknown = " and ".join(str(result.source) for result in (before, after) if result.environment is None)
        hardware = [f"hardware and versions are not known of {unknown}; give the run folder"]
        software, settings = list[str](), list[str]()
    else:
        hardware, software = environment.hardware_differences(a, b), environment.software_differences(a, b)
        settings = environment.setting_differences(a, b)
    rows = tuple(_pair_rows(before.runs, after.runs, hardware, software))
    return BeforeAfter(
        rows=rows,
        hardware=tuple(hardware),
        software=tuple(software),
        settings=tuple(settings),
        environment_unknown=a is None or b is None,
        configs_unknown=any(
            side.representative.row.config_hash is None
            for row in rows
            if row.before and row.after
            for side in (row.before, row.after)
        ),
    )


def _pair_rows(
    before: Sequence[Run], after: Sequence[Run], hardware: Sequence[str], software: Sequence[str]
) -> Iterator[RowChange]:
    """Pairs rows by model and strategy, in the order of ``before``; then the rows that only ``after`` has.

    ``hardware``, ``software``: differences of the environments; differences of hardware forbid every ratio.
    """

    def name(row: ComparisonRow) -> tuple[object, ...]:
        return row.configuration.name, row.configuration.stage, row.trial.workload.model

    unpaired = list(comparison.compare(after).rows)
    for row in comparison.compare(before).rows:
        same_name = [other for other in unpaired if name(other) == name(row)]
        # Of several rows of one name, as at other batches, the one that differs least.
        partner = min(same_name, key=lambda other: len(_differences(row, other)), default=None)
        if partner is None:
            yield RowChange(label=row.label, before=row, after=None, incomparable_reasons=("after: no such row",))
        else:
            unpaired.remove(partner)
            yield _pair(row, partner, hardware, software)
    for row in unpaired:
        yield RowChange(label=row.label, before=None, after=row, incomparable_reasons=("before: no such row",))


def _pair(before: ComparisonRow, after: ComparisonRow, hardware: Sequence[str], software: Sequence[str]) -> RowChange:
    differences = _differences(before, after)
    reasons = [*hardware, *(text for text in differences if _field(text) not in _CHANGES)]
    caveats = [("before", caveat) for caveat in before.caveats] + [("after", caveat) for caveat in after.caveats]
    # Rows that do not compare have other losses for that reason.
    if not reasons and (loss_caveat := _loss_caveat(before, after)):
        caveats.append(("after against before", loss_caveat))
    reasons += [f"{side}: {caveat.text}" for side, caveat in caveats if caveat.disqualifying]
    config_changes = list(_config_changes(before.representative, after.representative))
    # Versions are named once for both results (BeforeAfter.software).
    changes = [text for text in differences if _field(text) in _CHANGES and text not in software]
    ratio, interval = None, None
    if not reasons and before.tokens_per_second and after.tokens_per_second:
        ratio = after.tokens_per_second / before.tokens_per_second
        interval = comparison.ratio_between(after, before)
    return RowChange(
        label=before.label,
        before=before,
        after=after,
        ratio=ratio,
        interval=interval,
        incomparable_reasons=tuple(reasons),
        changes=(*changes, *config_changes),
        caveats=tuple(f"{side}: {caveat.line}" for side, caveat in caveats if not caveat.disqualifying),
        same_settings=not (differences or config_changes),
    )


def _field(difference: str) -> str:
    """``model_config`` of ``model_config.n_layer 2 against 4``."""
    return difference.partition(" ")[0].partition(".")[0]


def _differences(before: ComparisonRow, after: ComparisonRow) -> list[str]:
    """Differences of workload, placement and run. If a row is from a flat JSON, only its fields are compared."""
    runs = before.representative, after.representative
    if any(run.record is None for run in runs):
        runs = flat_run(runs[0].row), flat_run(runs[1].row)
    return [text for text in comparability.incomparable_fields(*runs) if _field(text) not in _IRRELEVANT_FIELDS]


def _loss_caveat(before: ComparisonRow, after: ComparisonRow) -> Caveat | None:
    """The caveat on the losses of two rows that differ at most in the number of steps; None if the losses agree."""
    runs = [before.representative, after.representative]
    workload = runs[0].trial.workload
    wrappers = {rank.engine_optimizer_class for run in runs for rank in run.ranks}
    for index, run in enumerate(runs):
        ranks = run.ranks
        if run.record is None:
            continue
        if len(wrappers) == 1:  # the known effect of a wrapper on the loss is then the same in both rows
            ranks = tuple(replace(rank, engine_optimizer_class="") for rank in ranks)
        # compare_losses groups rows by workload: with one for both, another number of steps does not part them.
        trial = replace(run.trial, workload=workload)
        runs[index] = replace(run, record=replace(run.record, trial=trial, ranks=ranks))
    return next(iter(compare_losses(runs).values()), None)


def _config_changes(before: Run, after: Run) -> Iterator[str]:
    """Differences of the optimizers, and of each key of the configurations as written and as DeepSpeed resolved it."""
    a, b = before, after
    optimizers = [run.row.optimizer for run in (a, b)]
    if None not in optimizers and optimizers[0] != optimizers[1]:
        yield f"optimizer {optimizers[0]} against {optimizers[1]}"
    if a.record is None or b.record is None:
        hashes = a.row.config_hash, b.row.config_hash
        if None not in hashes and hashes[0] != hashes[1]:
            yield "the DeepSpeed configuration (its hash alone is known)"
        return
    written = comparability.differing({"": [a.trial.ds_config, b.trial.ds_config]})
    for key, values in written.items():
        yield f"{key} {' against '.join(map(_text, values))}"
    if a.ranks and b.ranks:
        resolved = comparability.differing({"": [a.ranks[0].resolved_config, b.ranks[0].resolved_config]})
        for key, values in resolved.items():
            # What was written differently is told above; these are defaults that differ, as between versions.
            if key not in written:
                yield f"{key} {' against '.join(map(_text, values))} (as DeepSpeed resolved it)"


def _text(value: Any) -> str:
    if value is None:
        return ABSENT
    return str(value).lower() if isinstance(value, bool) else str(value)
