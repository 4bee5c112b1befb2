"""Results of the shards of one plan: their order, and which of them are missing or have trials left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..config.shard import ShardOfPlan
from ..system import invocation
from ..units import format_names
from . import provenance
from .load_results import Result, run_folder_of
from .merge_results import ResultGroup

_FLAG = "--shard"


def in_order_of_shards(results: Sequence[Result]) -> list[Result]:
    """The results with those of one plan beside each other, in the order of their shards, where the first one stands.

    Rows that were split among shards then stand in the order of the plan.
    """
    first: dict[object, int] = {}
    for place, result in enumerate(results):
        first.setdefault(result.shard.plan if result.shard else place, place)
    numbered = [
        (first[result.shard.plan if result.shard else place], result.shard.number if result.shard else 0, place)
        for place, result in enumerate(results)
    ]
    return [results[place] for _, _, place in sorted(numbered)]


def in_order_of_plan(groups: Sequence[ResultGroup], results: Sequence[Result]) -> list[ResultGroup]:
    """The groups of results that are all shards of one plan, in the order of its points; others as they are."""
    plans = {result.shard.plan if result.shard else None for result in results}
    if len(plans) != 1 or None in plans:
        return list(groups)
    return sorted(groups, key=lambda group: min(each.record.trial.trial_id.zfill(20) for each in group.summaries))


def missing_shards(results: Sequence[Result]) -> list[str]:
    """A line for the shards of each plan that have no result, and one for each that has trials left.

    Each line ends with the command that runs them.
    """
    of_plan: dict[tuple[str, int], list[tuple[ShardOfPlan, Result]]] = {}
    for result in results:
        if (shard := result.shard) is not None:
            of_plan.setdefault((shard.plan, shard.count), []).append((shard, result))
    return [line for shards in of_plan.values() for line in _lines_of_plan(shards, several=len(of_plan) > 1)]


def _lines_of_plan(shards: Sequence[tuple[ShardOfPlan, Result]], *, several: bool) -> Iterator[str]:
    """``several``: whether there are shards of other plans too, so that a line has to say of which plan it is."""
    best: dict[int, Result] = {}
    for shard, result in shards:
        # A shard may have been given twice, as before and after it was resumed elsewhere.
        if shard.number not in best or result.trials_left < best[shard.number].trials_left:
            best[shard.number] = result
    count, first = shards[0][0].count, shards[0][1]
    of = f"{count} of the plan of {first.source}" if several else str(count)
    missing = [number for number in range(1, count + 1) if number not in best]
    if missing:
        shown = format_names(missing, 20)
        names = f"shard {shown} of {of} is" if len(missing) == 1 else f"shards {shown} of {of} are"
        likewise = ", the others likewise" if len(missing) > 1 else ""
        yield f"{names} missing: {_command(first, f'{missing[0]}/{count}')}{likewise}"
    for number, result in sorted(best.items()):
        if left := result.trials_left:
            folder = run_folder_of(result.source) or result.source
            command = invocation.comparison(result.family, ["--resume", str(folder)])
            yield f"shard {number} of {of} has {left} trial{'s' if left > 1 else ''} left: {command}"


def _command(result: Result, shard: str) -> str:
    """The command that runs another shard of a result's plan. Values that were redacted must be put in again."""
    words = provenance.arguments_without(result.arguments, [_FLAG])
    return invocation.comparison(result.family, [_FLAG, shard, *words])  # not after a -- among the words
