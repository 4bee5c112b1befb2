"""Whether rows trained alike: their losses, weights and optimizers compared with those of a reference row.

A strategy must not change what is learned. Two rows of one workload see the same batches from the same initial
weights, so that a difference beyond rounding shows a wrong configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..units import format_ratio
from .caveats import Caveat, CaveatKind, CaveatText
from .summary import TrialSummary
from .trial_caveats import optimizer_family

_LOSS_STEPS = 10
_LOSS_TOLERANCE = {"fp32": 2e-4, "bf16": 5e-3, "fp16": 5e-3}
"""Relative difference of the losses that rounding explains in the first ten steps, by precision."""
_QUIRK_TOLERANCE = 2e-5
_QUIRK_LIMIT = 0.02
"""Beyond this the one Adam step too many does not explain a difference."""
_QUIRK = (
    "a known quirk: at stage 0 in 16 bit DeepSpeed takes an Adam step on zero gradients at initialisation "
    "(fp16/fused_optimizer.py)"
)
_WEIGHT_TOLERANCE = {"fp32": 2e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Distance of two rows' changes of the weights, relative to the reference's, that rounding explains in 25 steps.

Seen on the CPU (``tiny``, 12 steps, stages 0 to 3 and offload): at most 6.5e-5 in fp32, 0.015 in bf16. Beta 1 of 0.8
for 0.9 gives 0.105, a doubled learning rate 1.0. Smaller mistakes (beta 2, weight decay) are lost in the rounding of
bf16 and show in the optimizer's settings alone.
"""
_WEIGHT_STEPS = 25
"""Beyond so many steps the tolerances grow with their number, as rounding goes on to part right rows."""
_QUIRK_WEIGHTS_APART = 0.3
"""The same for the quirk of stage 0: its first update is 0.74 of the right one, the next 0.86, 0.91 (0.26 apart after
one step, 0.10 after twelve)."""
_STAGE0_WRAPPERS = ("FP16_UnfusedOptimizer", "FP16_Optimizer")
_DO_NOT_USE = "; do not use this row before you know why"


def with_loss_caveats(summaries: Sequence[TrialSummary]) -> list[TrialSummary]:
    """The summaries with the caveats and cosines that need the other rows; one caveat about its loss at most."""
    compared = list(summaries)
    for group in _rows_of_equal_batches(summaries):
        reference = _reference(group)
        if reference is None:
            continue
        for index, summary in group:
            compared[index] = replace(summary, weight_change_cosine=_cosine(reference, summary))
        if len({each.record.trial.strategy.name for _, each in group}) > 1 and all(
            each.record.trial.strategy.stage == 3 for _, each in group
        ):
            first = group[0][0]
            only = CaveatText.LOSS_PARITY_STAGE_3_ALONE.caveat(
                " among rows of stage 3 alone, not against another stage"
            )
            if only not in compared[first].caveats:
                compared[first] = replace(compared[first], caveats=(*compared[first].caveats, only))
        for index, caveat in _other_adam_implementations(group):
            if caveat not in compared[index].caveats:
                compared[index] = replace(compared[index], caveats=(*compared[index].caveats, caveat))
    for index, caveat in compare_losses(summaries).items():
        if not any(each.kind is CaveatKind.LOSS_DIFFERS for each in compared[index].caveats):
            compared[index] = replace(compared[index], caveats=(*compared[index].caveats, caveat))
    return compared


def _other_adam_implementations(group: Sequence[tuple[int, TrialSummary]]) -> Iterator[tuple[int, Caveat]]:
    """Caveats of rows on the CPU accelerator that use another implementation of Adam than the first row.

    On the CPU accelerator offload moves nothing, and the implementation of Adam alone can make a row faster.
    """
    form = CaveatText.OTHER_ADAM
    first = group[0][1].record
    theirs = first.ranks[0].optimizer_class
    if first.trial.placement.accelerator != "cpu" or optimizer_family(theirs) != "adam":
        return
    for index, summary in group:
        own = summary.record.ranks[0].optimizer_class
        if own != theirs and optimizer_family(own) == "adam":
            text = (
                f"{own}{form.contains}{theirs} in {first.trial.strategy.label}: a difference in speed is partly theirs"
            )
            yield index, form.caveat(f"{text}; {form.next_step}")


def compare_losses(summaries: Sequence[TrialSummary]) -> dict[int, Caveat]:
    """Caveats by index, for rows that did not train as the reference row of their workload did.

    The reference is the row with which most other strategies agree; among equals one that is not of stage 3, then the
    first. A row with the known quirk of stage 0 is the reference only if no other row exists.
    """
    found = {}
    for group in _rows_of_equal_batches(summaries):
        reference = _reference(group)
        for index, summary in group:
            caveat = None if reference is None or summary is reference else _training_difference(reference, summary)
            if caveat is not None:
                found[index] = caveat
    return found


def _rows_of_equal_batches(summaries: Sequence[TrialSummary]) -> list[list[tuple[int, TrialSummary]]]:
    """Groups of rows with equal batches, with their indices; rows without finite losses are in no group."""
    groups: list[list[tuple[int, TrialSummary]]] = []
    for index, summary in enumerate(summaries):
        if not summary.losses or None in summary.losses:
            continue
        same = next((group for group in groups if _equal_batches(group[0][1], summary)), None)
        if same is None:
            groups.append(same := [])
        same.append((index, summary))
    return groups


def _equal_batches(a: TrialSummary, b: TrialSummary) -> bool:
    return (a.micro_batch_size, a.grad_accum, a.data_parallel_size, a.record.trial.workload) == (
        b.micro_batch_size,
        b.grad_accum,
        b.data_parallel_size,
        b.record.trial.workload,
    )


def _reference(group: Sequence[tuple[int, TrialSummary]]) -> TrialSummary | None:
    """The reference row, see ``compare_losses``; one run per strategy counts. None if every row has the quirk."""
    first_of: dict[str, TrialSummary] = {}
    for _, summary in group:
        if not _has_stage0_quirk(summary):
            first_of.setdefault(summary.record.trial.strategy.name, summary)
    rows = list(first_of.values())
    if len(rows) < 2:
        return rows[0] if rows else None
    agreeing = [sum(_training_difference(a, b) is None for b in rows) for a in rows]
    return max(
        zip(rows, agreeing, strict=True),
        key=lambda pair: (pair[1], pair[0].record.trial.strategy.stage != 3),
    )[0]


def _training_difference(reference: TrialSummary, summary: TrialSummary) -> Caveat | None:
    """How a row trained differently from the reference; None if rounding explains all differences."""
    quirk = _has_stage0_quirk(summary)
    precision = summary.record.trial.workload.precision
    label = reference.record.trial.strategy.label
    difference = _loss_difference(reference, summary)
    if difference > (_QUIRK_LIMIT if quirk else _LOSS_TOLERANCE[precision]):
        return CaveatText.LOSS_DIFFERS.caveat(
            f"{difference:.2%} from {label}'s: more than rounding explains{_DO_NOT_USE}"
        )
    settings = _other_settings(reference, summary)
    if settings is not None:
        return CaveatText.TRAINED_DIFFERENTLY.caveat(f"{label}: {settings}{_DO_NOT_USE}")
    apart = _weights_apart(reference, summary) or 0.0
    growth = max(1.0, len(summary.losses) / _WEIGHT_STEPS)
    explained = _WEIGHT_TOLERANCE[precision] * growth
    moved = f"{label}: its weights moved {_times_as_far(reference, summary)} as far"
    if apart > (_QUIRK_WEIGHTS_APART if quirk else explained):
        cosine = _cosine(reference, summary)
        direction = "" if cosine is None else f" (the cosine of the two changes is {cosine:.4f})"
        return CaveatText.TRAINED_DIFFERENTLY.caveat(f"{moved}{direction}; rounding does not explain it{_DO_NOT_USE}")
    if quirk:
        if difference > _QUIRK_TOLERANCE:
            return CaveatText.LOSS_DIFFERS_KNOWN_QUIRK.caveat(f"{difference:.3%}, {_QUIRK}")
        return CaveatText.TRAINED_DIFFERENTLY_KNOWN_QUIRK.caveat(f"{moved}, {_QUIRK}") if apart > explained else None
    repeated = _repeated_loss_difference(reference, summary) or 0.0
    if repeated > _LOSS_TOLERANCE[precision] * growth:
        text = f"its loss on the first batch after training differs by {repeated:.2%}, more than rounding explains"
        return CaveatText.TRAINED_DIFFERENTLY.caveat(f"{label}: {text}{_DO_NOT_USE}")
    return None


def _has_stage0_quirk(summary: TrialSummary) -> bool:
    stage = summary.record.trial.strategy.stage
    rank = summary.record.ranks[0]
    adam = "adam" in rank.optimizer_class.lower()
    return stage == 0 and adam and rank.engine_optimizer_class in _STAGE0_WRAPPERS


def _loss_difference(a: TrialSummary, b: TrialSummary) -> float:
    """Largest relative difference of the losses in the first ten steps."""
    pairs = list(zip(a.losses, b.losses, strict=False))[:_LOSS_STEPS]
    return max((abs(x - y) / max(abs(x), 1e-12) for x, y in pairs if x is not None and y is not None), default=0.0)


def _repeated_loss_difference(a: TrialSummary, b: TrialSummary) -> float | None:
    """Difference of the losses on the first batch after training, relative to the first loss; None if unknown."""
    if a.repeated_loss is None or b.repeated_loss is None or len(a.losses) != len(b.losses):
        return None
    return abs(a.repeated_loss - b.repeated_loss) / max(abs(a.losses[0] or 0.0), 1e-12)


def _other_settings(reference: TrialSummary, summary: TrialSummary) -> str | None:
    """The first setting of the optimizer that differs from the reference's; None if none is known to differ."""
    classes = [each.record.ranks[0].optimizer_class for each in (reference, summary)]
    families = [optimizer_family(name) for name in classes]
    if None not in families and families[0] != families[1]:
        return f"{classes[1]} stepped, not {classes[0]}"
    theirs, own = (each.record.ranks[0].optimizer_settings or () for each in (reference, summary))
    if len(theirs) != len(own) or len(reference.losses) != len(summary.losses):
        return None
    for before, now in zip(theirs, own, strict=True):
        for name in before.keys() & now.keys():
            if not _same_setting(before[name], now[name]):
                return f"its optimizer has {name} {now[name]}, not {before[name]}"
    return None


def _same_setting(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same_setting, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _weights_apart(a: TrialSummary, b: TrialSummary) -> float | None:
    """Norm of the difference of the two changes of the weights, relative to the norm of the change of ``a``.

    0 for equal changes, 1 if the weights of ``b`` did not move. None if either was not measured or the numbers of steps
    differ.
    """
    if a.weight_change is None or b.weight_change is None or len(a.losses) != len(b.losses):
        return None
    if len(a.weight_change) != len(b.weight_change):
        return None
    distance = math.dist(a.weight_change, b.weight_change)
    norm = math.hypot(*a.weight_change)
    if norm == 0.0:
        return 0.0 if distance == 0.0 else math.inf
    return distance / norm


def _times_as_far(reference: TrialSummary, summary: TrialSummary) -> str:
    norms = [each.weight_change_norm or 0.0 for each in (reference, summary)]
    return format_ratio(norms[1] / norms[0]) if norms[0] > 0 else "infinitely"


def _cosine(reference: TrialSummary, summary: TrialSummary) -> float | None:
    """Cosine between the two changes of the weights; None if either is unknown or zero."""
    if _weights_apart(reference, summary) is None:
        return summary.weight_change_cosine
    a, b = reference.weight_change or (), summary.weight_change or ()
    product = math.hypot(*a) * math.hypot(*b)
    if product == 0.0:
        return None
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / product
