"""Two results row by row, before and after a change: what forbids a ratio of throughputs, what may explain it.

Versions may differ, since an upgrade is what such a comparison is about; they are named. A ratio is given only where
hardware, workload and method agree and neither row has a disqualifying caveat.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.deepspeed_config import is_full_config
from ..records.schema import TrialRecord
from ..system import environment
from . import comparability, comparison, flat_reader
from .caveats import Caveat
from .comparison import ComparisonRow
from .flat_rows import COLUMNS
from .intervals import RatioInterval
from .load_results import Result
from .loss_parity import compare_losses
from .summary import TrialSummary

ABSENT = "absent"
_CHANGES = ("num_steps", "warmup_steps", "launch", "torch", "deepspeed")
"""Names of differences that the change itself may consist of: they forbid no ratio."""
_IRRELEVANT_FIELDS = ("launcher", "hostfile", "nvme_path", "supported_precisions")
"""Fields that ``launch`` or the configuration already shows, or that do not change what runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChange:
    """One row of both results."""

    label: str
    before: ComparisonRow | None
    after: ComparisonRow | None
    ratio: float | None = None
    """Throughput after to before; None where the two do not compare or one has no numbers."""
    interval: RatioInterval | None = None
    """95 % on per-run means; None below three runs on either side ("not tested")."""
    incomparable_reasons: tuple[str, ...] = ()
    """Why there is no ratio."""
    changes: tuple[str, ...] = ()
    """Differences of the DeepSpeed configuration, as written and as resolved: they may explain a change of speed."""
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
        silent = " and ".join(str(result.source) for result in (before, after) if result.environment is None)
        hardware: tuple[str, ...] = (f"hardware and versions are not known of {silent}; give the run folder",)
        software: tuple[str, ...] = ()
        settings: tuple[str, ...] = ()
    else:
        hardware = tuple(environment.hardware_differences(a, b))
        software = tuple(environment.software_differences(a, b))
        settings = tuple(environment.setting_differences(a, b))
    rows = tuple(pair_rows(before.summaries, after.summaries, hardware, software))
    return BeforeAfter(
        rows=rows,
        hardware=hardware,
        software=software,
        settings=settings,
        environment_unknown=a is None or b is None,
        configs_unknown=any(
            row.before and row.after and not both_have_config_hash(row.before, row.after) for row in rows
        ),
    )


def pair_rows(
    before: Sequence[TrialSummary], after: Sequence[TrialSummary], hardware: Sequence[str], software: Sequence[str]
) -> Iterator[RowChange]:
    """Rows paired by model and strategy, in the order of ``before``; then the rows that only ``after`` has.

    ``hardware``, ``software``: differences of the environments; differences of hardware forbid every ratio.
    """
    right = list(comparison.compare(after).results)
    for row in comparison.compare(before).results:
        same = [other for other in right if _same_row(row, other)]
        partner = min(same, key=lambda other: len(_differences(row, other)), default=None)
        if partner is None:
            yield RowChange(label=row.label, before=row, after=None, incomparable_reasons=("after: no such row",))
        else:
            right.remove(partner)
            yield _pair(row, partner, hardware, software)
    for row in right:
        yield RowChange(label=row.label, before=None, after=row, incomparable_reasons=("before: no such row",))


def _same_row(a: ComparisonRow, b: ComparisonRow) -> bool:
    def name(row: ComparisonRow) -> tuple[object, ...]:
        return row.strategy.name, row.strategy.stage, row.summaries[0].record.trial.workload.model

    return name(a) == name(b)


def _pair(before: ComparisonRow, after: ComparisonRow, hardware: Sequence[str], software: Sequence[str]) -> RowChange:
    differences = _differences(before, after)
    different = [*hardware, *(text for text in differences if _name(text) not in _CHANGES)]
    caveats_by_side = _sided_caveats(before, after, alike=not different)
    incomparable_reasons = (
        *different,
        *(f"{side}: {caveat.text}" for side, caveat in caveats_by_side if caveat.disqualifying),
    )
    configuration = list(_changes(_representative_run(before), _representative_run(after)))
    changed = [text for text in differences if _name(text) in _CHANGES and text not in software]
    pair = RowChange(
        label=before.label,
        before=before,
        after=after,
        incomparable_reasons=incomparable_reasons,
        changes=(*changed, *configuration),
        same_settings=not (differences or configuration),
        caveats=tuple(f"{side}: {caveat.line}" for side, caveat in caveats_by_side if not caveat.disqualifying),
    )
    if incomparable_reasons or not before.tokens_per_second or not after.tokens_per_second:
        return pair
    ratio = after.tokens_per_second / before.tokens_per_second
    return replace(pair, ratio=ratio, interval=comparison.ratio_between(after, before))


def _sided_caveats(before: ComparisonRow, after: ComparisonRow, *, alike: bool) -> list[tuple[str, Caveat]]:
    """The caveats of both rows, each with its side; if the rows are ``alike``, also a caveat on their losses."""
    sides = {"before": before.caveats, "after": after.caveats}
    own = [(side, caveat) for side, caveats in sides.items() for caveat in caveats]
    loss = _loss_caveat(before, after) if alike else None
    return own if loss is None else [*own, ("after against before", loss)]


def _representative_run(row: ComparisonRow) -> TrialSummary:
    """The first run that succeeded, or if none did, the first run."""
    return (row.successes or row.summaries)[0]


def both_have_config_hash(before: ComparisonRow, after: ComparisonRow) -> bool:
    """True if the hash of the DeepSpeed configuration is known for both rows."""
    return all(_representative_run(row).config_hash is not None for row in (before, after))


def _both_have_full_config(before: ComparisonRow, after: ComparisonRow) -> bool:
    return all(is_full_config(_representative_run(row).record.trial) for row in (before, after))


def _name(difference: str) -> str:
    """``model_config`` of ``model_config.n_layer 2 against 4``."""
    return difference.partition(" ")[0].partition(".")[0]


def _differences(before: ComparisonRow, after: ComparisonRow) -> list[str]:
    """Differences that forbid a ratio. If one row is from a flat JSON, only fields that flat rows have are compared."""
    a, b = _representative_run(before), _representative_run(after)
    records = (a.record, b.record) if _both_have_full_config(before, after) else (_as_flat(a), _as_flat(b))
    return [text for text in comparability.incomparable_fields(*records) if _name(text) not in _IRRELEVANT_FIELDS]


def _as_flat(summary: TrialSummary) -> TrialRecord:
    """The record as it would be read back from its flat row."""
    with contextlib.suppress(ValueError):  # values that no flat row can hold: then the record itself is compared
        return flat_reader.summary({name: get(summary) for name, get in COLUMNS}).record
    return summary.record


def _loss_caveat(before: ComparisonRow, after: ComparisonRow) -> Caveat | None:
    """The caveat on the losses of two rows that differ at most in the number of steps; None if the losses agree."""
    a, b = _representative_run(before), _representative_run(after)
    trial = replace(b.record.trial, workload=a.record.trial.workload)
    pair = [a, replace(b, record=replace(b.record, trial=trial))]
    if len({rank.engine_optimizer_class for each in pair for rank in each.record.ranks}) == 1:
        pair = [_without_optimizer_wrapper(each) for each in pair]
    return next(iter(compare_losses(pair).values()), None)


def _without_optimizer_wrapper(summary: TrialSummary) -> TrialSummary:
    """Clears the optimizer wrapper. If both rows use the same wrapper, its known effect on the loss is the same in
    both, so their losses can be compared."""
    ranks = tuple(replace(rank, engine_optimizer_class="") for rank in summary.record.ranks)
    return replace(summary, record=replace(summary.record, ranks=ranks))


def _changes(before: TrialSummary, after: TrialSummary) -> Iterator[str]:
    """Differences of the optimizers and of each key of the configurations."""
    a, b = before.record, after.record
    optimizers = [record.ranks[0].optimizer_class if record.ranks else "" for record in (a, b)]
    if all(optimizers) and optimizers[0] != optimizers[1]:
        yield f"optimizer {optimizers[0]} against {optimizers[1]}"
    if not (is_full_config(a.trial) and is_full_config(b.trial)):
        hashes = before.config_hash, after.config_hash
        if None not in hashes and hashes[0] != hashes[1]:
            yield "the DeepSpeed configuration (its hash alone is known)"
        return
    written = list(_config_changes("", a.trial.ds_config, b.trial.ds_config))
    yield from written
    if a.ranks and b.ranks:
        written_keys = {line.split()[0] for line in written}
        for line in _config_changes("", a.ranks[0].resolved_config, b.ranks[0].resolved_config):
            if line.split()[0] not in written_keys:
                yield f"{line} (as DeepSpeed resolved it)"


def _config_changes(path: str, a: Any, b: Any) -> Iterator[str]:
    """``zero_optimization.overlap_comm true against false``, key by key."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _config_changes(f"{path}.{key}" if path else str(key), a.get(key), b.get(key))
    elif a != b:
        yield f"{path} {_value(a)} against {_value(b)}"


def _value(value: Any) -> str:
    if value is None:
        return ABSENT
    return str(value).lower() if isinstance(value, bool) else str(value)
