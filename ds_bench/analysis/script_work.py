"""Checks that rows of a user's script did the same work: parameters, tokens, data, losses, in this order.

A script may draw its data after it has built its model, and so train on different data at stages 2 and 3 with losses
that hardly differ. Times are comparable only between equal steps, so different parameters or tokens disqualify a row.
Data and losses may differ on purpose, for example when training on generated text, so those differences do not
disqualify it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..config.caveat_texts import Caveat, CaveatKind
from ..config.identity import work_key
from ..records.schema import RankMeasurement

if TYPE_CHECKING:
    from .row import Run

_FIRST_LOSS_TOLERANCE = 2e-3
"""Relative difference between first losses that rounding explains: one forward pass in 16-bit precision."""
_LOSS_TOLERANCE = 0.02
"""The same for the losses of the first ten steps, whatever the number format."""
_EARLY_STEPS = 10


def with_work_caveats(runs: Sequence[Run]) -> list[Run]:
    """Return the runs. Runs of a script get the caveats found by comparing them with each other."""
    compared, groups = list(runs), dict[str, list[int]]()
    for index, run in enumerate(runs):
        if run.trial.workload.script is not None and run.ranks:
            key = work_key(run.trial, leave_out=("config", "name", "variables", "repeat", "inspection"))
            groups.setdefault(key, []).append(index)
    for indices in groups.values():
        # The first run of each row, in order; the reference is the one whose work matches the most rows.
        rows: dict[str, Run] = {}
        for index in indices:
            rows.setdefault(runs[index].trial.configuration.name, runs[index])
        reference = max(rows.values(), key=lambda run: sum(not any(_differences(run, row)) for row in rows.values()))
        for index in indices:
            found = [caveat for caveat in _differences(reference, runs[index]) if caveat not in runs[index].caveats]
            if found:
                compared[index] = runs[index].with_row(caveats=(*runs[index].caveats, *found))
    return compared


def _differences(reference: Run, run: Run) -> Iterator[Caveat]:
    row = reference.trial.configuration.label
    for theirs, own in zip(reference.ranks, run.ranks, strict=True):
        sizes = [(each.trainable_parameter_count, each.parameter_count) for each in (own, theirs)]
        if sizes[0] != sizes[1]:
            texts = [f"{trained:,} of {count:,}" for trained, count in sizes]
            yield Caveat(CaveatKind.OTHER_PARAMETERS, {"own": texts[0], "theirs": texts[1], "row": row})
            return
        # A row with a different micro-batch or accumulation is compared by its tokens per second.
        if (own.micro_batch_size, own.grad_accum) != (theirs.micro_batch_size, theirs.grad_accum):
            return
        if caveat := _other_step(theirs, own, row):
            yield caveat
            return
    every = zip(reference.losses, run.losses, strict=False)
    pairs = [(theirs, own) for theirs, own in every if theirs and own][:_EARLY_STEPS]
    apart = [abs(own - theirs) / max(abs(theirs), 1e-9) for theirs, own in pairs]
    if apart and apart[0] > _FIRST_LOSS_TOLERANCE:
        yield Caveat(CaveatKind.OTHER_FIRST_LOSS, {"own": pairs[0][1], "theirs": pairs[0][0], "row": row})
    elif apart and max(apart) > _LOSS_TOLERANCE:
        yield Caveat(CaveatKind.OTHER_LOSSES, {"difference": max(apart), "row": row})


def _other_step(theirs: RankMeasurement, own: RankMeasurement, row: str) -> Caveat | None:
    """Return the caveat for the first step whose tokens, micro-steps or data differ; None if all are equal."""
    mine, other = own.script, theirs.script
    assert mine is not None
    assert other is not None
    steps = range(min(len(mine.tokens), len(other.tokens)))
    for step in steps:
        samples = [each.samples[step : step + 1] or (0,) for each in (mine, other)]
        works = [
            (each.tokens[step], *own, each.micro_steps[step]) for each, own in zip((mine, other), samples, strict=True)
        ]
        if works[0] != works[1]:
            names = "tokens" if any(each[0] for each in works) else "samples"
            texts = [f"{tokens or own:,} {names} in {count} micro-batches" for tokens, own, count in works]
            place = {"step": step + 1, "rank": own.rank}
            return Caveat(CaveatKind.OTHER_TOKENS, {**place, "own": texts[0], "theirs": texts[1], "row": row})
    for step in steps:
        if mine.id_sums[step] != other.id_sums[step]:
            return Caveat(CaveatKind.OTHER_DATA, {"step": step + 1, "rank": own.rank, "row": row})
    return None
