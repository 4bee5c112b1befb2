"""Rows of two results held against each other, before and after a change: what forbids a ratio, what may explain one.

Which row differs from which in what is for ``likeness`` to say, here only what of that a change may be about.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.minimal_config import knows_config
from ..records.schema import TrialRecord
from . import comparability, comparison, flat_reader
from .caveats import Caveat
from .comparison import StrategyResult
from .flat_rows import COLUMNS
from .intervals import RatioInterval
from .summary import Summary, compare_losses

ABSENT = "absent"
_CHANGES = ("num_steps", "warmup_steps", "launch", "torch", "deepspeed")
"""Differences by name that a comparison before and after may be about: they forbid no ratio."""
_OF_NO_MATTER = ("launcher", "hostfile", "nvme_path", "supported_precisions")
"""Told by ``launch``, by the configuration, or no difference of what ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One row of both results."""

    label: str
    before: StrategyResult | None
    after: StrategyResult | None
    ratio: float | None = None
    """Throughput after to before; None where the two do not compare or one has no numbers."""
    interval: RatioInterval | None = None
    """95 % on per-run means; None below three runs on either side ("not tested")."""
    obstacles: tuple[str, ...] = ()
    """Why there is no ratio."""
    changes: tuple[str, ...] = ()
    """Of the DeepSpeed configuration and of what was resolved from it: what may explain a difference."""
    caveats: tuple[str, ...] = ()
    """Ready lines of what to know of either row, and of their losses beside each other."""
    same_settings: bool = False
    """Whether both results have the row, and nothing of its workload, placement and configuration differs."""


def pairs(
    before: Sequence[Summary], after: Sequence[Summary], hardware: Sequence[str], software: Sequence[str]
) -> Iterator[Pair]:
    """Rows paired by model and strategy, in order of the first result; then what only the second has.

    ``hardware``, ``software``: differences of the environments; the former forbid every ratio.
    """
    right = list(comparison.build(after).results)
    for row in comparison.build(before).results:
        same = [other for other in right if _same_row(row, other)]
        partner = min(same, key=lambda other: len(_differences(row, other)), default=None)
        if partner is None:
            yield Pair(label=row.label, before=row, after=None, obstacles=("after: no such row",))
        else:
            right.remove(partner)
            yield _pair(row, partner, hardware, software)
    for row in right:
        yield Pair(label=row.label, before=None, after=row, obstacles=("before: no such row",))


def _same_row(a: StrategyResult, b: StrategyResult) -> bool:
    def name(row: StrategyResult) -> tuple[object, ...]:
        return row.strategy.name, row.strategy.stage, row.summaries[0].record.trial.workload.model

    return name(a) == name(b)


def _pair(before: StrategyResult, after: StrategyResult, hardware: Sequence[str], software: Sequence[str]) -> Pair:
    found = _differences(before, after)
    different = [*hardware, *(text for text in found if _name(text) not in _CHANGES)]
    doubts = _doubts(before, after, alike=not different)
    obstacles = (*different, *(f"{side}: {caveat.text}" for side, caveat in doubts if caveat.disqualifying))
    configuration = list(_changes(_spokesman(before), _spokesman(after)))
    changed = [text for text in found if _name(text) in _CHANGES and text not in software]
    pair = Pair(
        label=before.label,
        before=before,
        after=after,
        obstacles=obstacles,
        changes=(*changed, *configuration),
        same_settings=not (found or configuration),
        caveats=tuple(f"{side}: {caveat.line}" for side, caveat in doubts if not caveat.disqualifying),
    )
    if obstacles or not before.tokens_per_second or not after.tokens_per_second:
        return pair
    ratio = after.tokens_per_second / before.tokens_per_second
    return replace(pair, ratio=ratio, interval=comparison.ratio_between(after, before))


def _doubts(before: StrategyResult, after: StrategyResult, *, alike: bool) -> list[tuple[str, Caveat]]:
    """The caveats of both rows, each with its side; of rows that are ``alike`` also what their losses say."""
    sides = {"before": before.caveats, "after": after.caveats}
    found = [(side, caveat) for side, caveats in sides.items() for caveat in caveats]
    loss = _loss_caveat(before, after) if alike else None
    return found if loss is None else [*found, ("after against before", loss)]


def _spokesman(row: StrategyResult) -> Summary:
    """The run that stands for its row: the first that was measured."""
    return (row.successes or row.summaries)[0]


def both_tell_config(before: StrategyResult, after: StrategyResult) -> bool:
    """Whether the DeepSpeed configurations of both rows, or at least their hashes, are known."""
    return all(_spokesman(row).config_hash is not None for row in (before, after))


def _both_know(before: StrategyResult, after: StrategyResult) -> bool:
    return all(knows_config(_spokesman(row).record.trial) for row in (before, after))


def _name(difference: str) -> str:
    """``model_config`` of ``model_config.n_layer 2 against 4``."""
    return difference.partition(" ")[0].partition(".")[0]


def _differences(before: StrategyResult, after: StrategyResult) -> list[str]:
    """What ``likeness`` finds between the rows; where one is of a flat JSON, in what flat rows tell of both."""
    a, b = _spokesman(before), _spokesman(after)
    told = (a.record, b.record) if _both_know(before, after) else (_as_flat(a), _as_flat(b))
    return [text for text in comparability.differences(*told) if _name(text) not in _OF_NO_MATTER]


def _as_flat(summary: Summary) -> TrialRecord:
    """The record as it would be read back from its flat row."""
    with contextlib.suppress(ValueError):  # figures of no sense, which are different whichever way one looks
        return flat_reader.summary({name: get(summary) for name, get in COLUMNS}).record
    return summary.record


def _loss_caveat(before: StrategyResult, after: StrategyResult) -> Caveat | None:
    """What the losses of two rows that differ in no more than their number of steps say of each other."""
    a, b = _spokesman(before), _spokesman(after)
    trial = replace(b.record.trial, workload=a.record.trial.workload)
    pair = [a, replace(b, record=replace(b.record, trial=trial))]
    if len({rank.engine_optimizer_class for each in pair for rank in each.record.ranks}) == 1:
        pair = [_without_wrapper(each) for each in pair]
    return next(iter(compare_losses(pair).values()), None)


def _without_wrapper(summary: Summary) -> Summary:
    """What DeepSpeed's wrapper does oddly, it does on both sides alike: no reason to leave them uncompared."""
    ranks = tuple(replace(rank, engine_optimizer_class="") for rank in summary.record.ranks)
    return replace(summary, record=replace(summary.record, ranks=ranks))


def _changes(before: Summary, after: Summary) -> Iterator[str]:
    """What may explain a change and is known of each row alone: its optimizer, each key of its configuration."""
    a, b = before.record, after.record
    optimizers = [record.ranks[0].optimizer_class if record.ranks else "" for record in (a, b)]
    if all(optimizers) and optimizers[0] != optimizers[1]:
        yield f"optimizer {optimizers[0]} against {optimizers[1]}"
    if not (knows_config(a.trial) and knows_config(b.trial)):
        hashes = before.config_hash, after.config_hash
        if None not in hashes and hashes[0] != hashes[1]:
            yield "the DeepSpeed configuration (its hash alone is known)"
        return
    asked = list(_config_changes("", a.trial.ds_config, b.trial.ds_config))
    yield from asked
    if a.ranks and b.ranks:
        known = {line.split()[0] for line in asked}
        for line in _config_changes("", a.ranks[0].resolved_config, b.ranks[0].resolved_config):
            if line.split()[0] not in known:
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
