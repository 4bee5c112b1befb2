"""Checks that rows trained alike: compares losses, weights and optimizers with those of a reference row.

A strategy must not change what is learned. Two rows of one workload train on the same batches from the same initial
weights, so that a difference larger than rounding explains shows a wrong configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..config.axes import other_arithmetic
from ..config.spec import SAME_TRAINING_FIELDS, Configuration, Trial, Workload
from ..units import format_ratio
from .caveats import Caveat, CaveatKind, CaveatText, note
from .summary import TrialSummary
from .trial_caveats import optimizer_family

_LOSS_STEPS = 10
"""Number of first steps whose losses are compared; later on, rounding parts rows that are right."""
_LOSS_TOLERANCE = {"fp32": 2e-4, "bf16": 5e-3, "fp16": 5e-3}
"""Relative difference of the losses that rounding explains in the first ten steps, by precision."""
_QUIRK = (
    "a known quirk: at stage 0 in 16 bit DeepSpeed takes an Adam step on zero gradients at initialisation "
    "(fp16/fused_optimizer.py)"
)
_STAGE0_WRAPPERS = ("FP16_UnfusedOptimizer", "FP16_Optimizer")
"""Classes of DeepSpeed's optimizer wrapper that have the quirk."""
_QUIRK_MIN_DIFFERENCE = 2e-5
"""Relative difference of the losses above which a row with the quirk is said to differ by it."""
_QUIRK_LOSS_TOLERANCE = 0.02
"""Relative difference of the losses above which the one Adam step too many does not explain it."""
_QUIRK_WEIGHT_TOLERANCE = 0.3
"""The same for the weights (see ``_WEIGHT_TOLERANCE``).

The first update of a row with the quirk is 0.74 of the right one, the next are 0.86 and 0.91 of it: its change of the
weights is 0.26 away from the right one after one step, 0.10 after twelve.
"""
_WEIGHT_TOLERANCE = {"fp32": 2e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Distance of two rows' changes of the weights, relative to the reference's, that rounding explains in 25 steps.

Measured on the CPU (``tiny``, 12 steps, stages 0 to 3 and offload): at most 6.5e-5 in fp32, 0.015 in bf16. A beta 1 of
0.8 instead of 0.9 gives 0.105, a doubled learning rate 1.0. Smaller mistakes (beta 2, weight decay) are not larger than
the rounding of bf16 and are found in the settings of the optimizer alone.
"""
_WEIGHT_STEPS = 25
"""Number of steps above which these tolerances grow in proportion to it, as the effect of rounding does."""
_DO_NOT_USE = "; do not use this row before you know why"

_COMMON_VALUES: dict[str, Any] = {
    each.name: each.default for each in fields(Workload) if each.name in (*SAME_TRAINING_FIELDS, "precision")
}
"""Fields of a workload in which rows that are compared may differ: they train on the same batches."""

_Group = dict[int, TrialSummary]
"""Summaries of equal batches by their indices in the sequence that was given."""


def with_loss_caveats(summaries: Sequence[TrialSummary]) -> list[TrialSummary]:
    """The summaries, with the caveats and cosines that a comparison with the other rows gives.

    A summary that has a caveat about its loss gets no second one.
    """
    compared = list(summaries)
    for group in _group_equal_batches(summaries):
        reference = _reference_row(group)
        if reference is None:
            continue
        first = next(iter(group))
        stage_3_alone = _stage_3_alone(group)
        alone = _file_compared_with_none(summaries, group)
        for index, summary in group.items():
            once = [stage_3_alone if index == first else None, alone]
            caveats = [*once, _other_adam_implementation(group[first], summary)]
            if not any(caveat.kind is CaveatKind.LOSS_DIFFERS for caveat in summary.caveats):
                caveats.append(_training_difference(reference, summary))
            added = [caveat for caveat in caveats if caveat is not None and caveat not in summary.caveats]
            cosine = _weight_change_cosine(reference, summary)
            if added or cosine != summary.weight_change_cosine:  # copying every summary would cost more than the rest
                compared[index] = replace(summary, weight_change_cosine=cosine, caveats=(*summary.caveats, *added))
    return compared


def compare_losses(summaries: Sequence[TrialSummary]) -> dict[int, Caveat]:
    """Caveats by index, for rows that did not train as the reference row of their workload did.

    The reference is the row with which most other strategies agree; among equals one that is not of stage 3, then the
    first. A row with the known quirk of stage 0 is never the reference.
    """
    caveats = {}
    for group in _group_equal_batches(summaries):
        reference = _reference_row(group)
        for index, summary in group.items():
            caveat = None if reference is None else _training_difference(reference, summary)
            if caveat is not None:
                caveats[index] = caveat
    return caveats


def _group_equal_batches(summaries: Sequence[TrialSummary]) -> list[_Group]:
    """Groups rows that were to train alike, on the same batches; rows without finite losses are in no group."""
    groups: list[_Group] = []
    batches: list[tuple[object, ...]] = []
    # By id: thousands of records have few workloads, which are one object each (records.reader), and a copy is checked.
    common: dict[int, Workload] = {}
    for index, summary in enumerate(summaries):
        if not summary.losses or None in summary.losses:
            continue
        workload = summary.record.trial.workload
        if id(workload) not in common:
            common[id(workload)] = replace(workload, **_COMMON_VALUES)
        other = other_arithmetic(summary.record.trial.configuration.axis_values), summary.record.trial.common_settings
        batch = summary.micro_batch_size, summary.grad_accum, summary.data_parallel_size, common[id(workload)], other
        if batch not in batches:  # a workload holds mappings, so that it is no key of a dictionary
            batches.append(batch)
            groups.append({})
        groups[batches.index(batch)][index] = summary
    return [part for group in groups for part in _split_by_settings(group)]


def _split_by_settings(group: _Group) -> list[_Group]:
    """Splits off the rows of files that ask for other training on purpose, such as another learning rate."""
    trials = [summary.record.trial for summary in group.values()]
    common = next((_training_settings(trial.ds_config) for trial in trials if not _is_of_file(trial)), None)
    parts: list[tuple[dict[str, Any] | None, _Group]] = []
    for (index, summary), trial in zip(group.items(), trials, strict=True):
        # Other settings in a row of no file are a mistake that the comparison is to find: it stays with the others.
        settings = _training_settings(trial.ds_config) if _is_of_file(trial) else common
        part = next((part for known, part in parts if known == settings), None)
        if part is None:
            parts.append((settings, part := {}))
        part[index] = summary
    return [part for _, part in parts]


def _is_of_file(trial: Trial) -> bool:
    return trial.configuration.source == "file"


def _training_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a DeepSpeed configuration says about the arithmetic of training, apart from the batch and the precision."""
    optimizer, zero, bf16 = (config.get(name) or {} for name in ("optimizer", "zero_optimization", "bf16"))
    params = {key: value for key, value in (optimizer.get("params") or {}).items() if key not in _IMPLEMENTATION}
    return {
        "optimizer": (str(optimizer.get("type")).lower(), params),
        # DeepSpeed's default since 0.19.3.
        "clipping": config.get("gradient_clipping", 1.0),
        "bf16": {key: value for key, value in bf16.items() if key.startswith(("bf16", "immediate")) and value},
        **{key: config[key] for key in _ARITHMETIC if config.get(key)},
        **{key: zero[key] for key in _ZERO_ARITHMETIC if zero.get(key)},
    }


_IMPLEMENTATION = ("torch_adam", "foreach", "fused", "adam_w_mode", "fp32_optimizer_states")
"""Parameters of an optimizer that choose its implementation."""
_ARITHMETIC = ("scheduler", "torch_autocast", "communication_data_type", "data_types")
_ZERO_ARITHMETIC = ("zenflow", "zero_quantized_weights", "zero_quantized_gradients")


def _file_compared_with_none(summaries: Sequence[TrialSummary], group: _Group) -> Caveat | None:
    """The note of a file's row that no other row was asked to train like, where there are other rows."""
    names = {summary.record.trial.configuration.name for summary in group.values()}
    others = {summary.record.trial.configuration.name for summary in summaries if summary.losses} - names
    configuration = next(iter(group.values())).record.trial.configuration
    if len(names) > 1 or not others or configuration.source != "file":
        return None
    return note(
        "its losses are compared with no other row's: its file asks for other training (optimizer, scheduler, …)"
    )


def _stage_3_alone(group: _Group) -> Caveat | None:
    """The caveat that a group of several strategies, all of stage 3, was not held against another stage."""
    strategies = [summary.record.trial.configuration for summary in group.values()]
    if len({strategy.name for strategy in strategies}) < 2 or not all(map(_is_stage_3, strategies)):
        return None
    return CaveatText.LOSS_PARITY_STAGE_3_ALONE.caveat(" among rows of stage 3 alone, not against another stage")


def _is_stage_3(configuration: Configuration) -> bool:
    """Whether DeepSpeed's stage 3 trained the row; FSDP2 shares no code with it."""
    return configuration.stage == 3 and not configuration.is_reference


def _other_adam_implementation(first: TrialSummary, summary: TrialSummary) -> Caveat | None:
    """The caveat of a row on the CPU accelerator that uses another implementation of Adam than the first row.

    On the CPU accelerator offload moves nothing, and the implementation of Adam alone can make a row faster.
    """
    theirs, own = (each.record.ranks[0].optimizer_class for each in (first, summary))
    if first.record.trial.placement.accelerator != "cpu" or own == theirs:
        return None
    if not optimizer_family(own) == optimizer_family(theirs) == "adam":
        return None
    form = CaveatText.OTHER_ADAM
    label = first.record.trial.configuration.label
    text = f"{own}{form.contains}{theirs} in {label}: a difference in speed is partly theirs"
    return form.caveat(f"{text}; {form.next_step}")


def _reference_row(group: _Group) -> TrialSummary | None:
    """The reference row, see ``compare_losses``; one run per strategy counts. None if every row has the quirk."""
    first_runs: dict[str, TrialSummary] = {}
    for summary in group.values():
        # Held against it, every right row would look wrong.
        if not _has_stage0_quirk(summary):
            first_runs.setdefault(summary.record.trial.configuration.name, summary)
    rows = list(first_runs.values())
    if len(rows) < 2:
        return rows[0] if rows else None

    def rank(row: TrialSummary) -> tuple[int, bool]:
        agreeing = sum(_training_difference(row, other) is None for other in rows)
        return agreeing, not _is_stage_3(row.record.trial.configuration)

    return max(rows, key=rank)


def _training_difference(reference: TrialSummary, summary: TrialSummary) -> Caveat | None:
    """How a row trained differently from the reference; None if rounding explains all differences."""
    if summary is reference:
        return None
    quirk = _has_stage0_quirk(summary)
    theirs, own = (each.record.trial.workload.precision for each in (reference, summary))
    # The coarser of the two precisions.
    precision = max(theirs, own, key=_LOSS_TOLERANCE.__getitem__)
    label = reference.record.trial.configuration.label
    difference = _loss_difference(reference, summary)
    if difference > (_QUIRK_LOSS_TOLERANCE if quirk else _LOSS_TOLERANCE[precision]):
        text = f"{difference:.2%} from {label}'s: more than rounding explains{_DO_NOT_USE}"
        return CaveatText.LOSS_DIFFERS.caveat(text)
    # Before the weights: a setting that differs says why they do.
    setting = _differing_setting(reference, summary)
    if setting is not None:
        return CaveatText.TRAINED_DIFFERENTLY.caveat(f"{label}: {setting}{_DO_NOT_USE}")
    # In another precision other small gradients are lost, of which Adam makes updates as large as of any.
    distance = (_weight_distance(reference, summary) or 0.0) if theirs == own else 0.0
    # See _WEIGHT_STEPS; the losses of the first ten steps need no such allowance.
    growth = max(1.0, len(summary.losses) / _WEIGHT_STEPS)
    weight_tolerance = _WEIGHT_TOLERANCE[precision] * growth
    if distance > (_QUIRK_WEIGHT_TOLERANCE if quirk else weight_tolerance):
        cosine = _weight_change_cosine(reference, summary)
        direction = "" if cosine is None else f" (the cosine of the two changes is {cosine:.4f})"
        text = f"{_moved(reference, summary)}{direction}; rounding does not explain it{_DO_NOT_USE}"
        return CaveatText.TRAINED_DIFFERENTLY.caveat(text)
    if quirk:
        if difference > _QUIRK_MIN_DIFFERENCE:
            return CaveatText.LOSS_DIFFERS_KNOWN_QUIRK.caveat(f"{difference:.3%}, {_QUIRK}")
        if distance > weight_tolerance:
            return CaveatText.TRAINED_DIFFERENTLY_KNOWN_QUIRK.caveat(f"{_moved(reference, summary)}, {_QUIRK}")
        return None
    repeated = _repeated_loss_difference(reference, summary) or 0.0
    # It is taken after all steps, so that rounding has had as long to act as on the weights.
    if repeated > _LOSS_TOLERANCE[precision] * growth:
        text = f"its loss on the first batch after training differs by {repeated:.2%}, more than rounding explains"
        return CaveatText.TRAINED_DIFFERENTLY.caveat(f"{label}: {text}{_DO_NOT_USE}")
    return None


def _has_stage0_quirk(summary: TrialSummary) -> bool:
    """True for Adam at stage 0 in a wrapper of DeepSpeed's that has the quirk (see ``_QUIRK``)."""
    rank = summary.record.ranks[0]
    return (
        summary.record.trial.configuration.stage == 0
        and "adam" in rank.optimizer_class.lower()
        and rank.engine_optimizer_class in _STAGE0_WRAPPERS
    )


def _loss_difference(a: TrialSummary, b: TrialSummary) -> float:
    """Largest relative difference of the losses in the first ten steps."""
    pairs = zip(a.losses[:_LOSS_STEPS], b.losses[:_LOSS_STEPS], strict=False)
    return max((abs(x - y) / max(abs(x), 1e-12) for x, y in pairs if x is not None and y is not None), default=0.0)


def _repeated_loss_difference(a: TrialSummary, b: TrialSummary) -> float | None:
    """Difference of the losses on the first batch after training, relative to the first loss; None if unknown."""
    if a.repeated_loss is None or b.repeated_loss is None or not _took_equal_steps(a, b):
        return None
    return abs(a.repeated_loss - b.repeated_loss) / max(abs(a.losses[0] or 0.0), 1e-12)


def _took_equal_steps(a: TrialSummary, b: TrialSummary) -> bool:
    """Whether two rows trained for as many steps, those that were only observed after the measured ones included."""
    return len(a.losses) == len(b.losses) and a.record.trial.inspection == b.record.trial.inspection


def _differing_setting(reference: TrialSummary, summary: TrialSummary) -> str | None:
    """The first setting of the optimizer that differs from the reference's; None if none is known to differ."""
    theirs, own = (each.record.ranks[0] for each in (reference, summary))
    families = [optimizer_family(rank.optimizer_class) for rank in (theirs, own)]
    if None not in families and families[0] != families[1]:
        return f"{own.optimizer_class} stepped, not {theirs.optimizer_class}"
    groups_before, groups = theirs.optimizer_settings or (), own.optimizer_settings or ()
    # After another number of steps a scheduler may have set another learning rate.
    same_length = len(groups_before) == len(groups) and len(reference.losses) == len(summary.losses)
    if groups_before == groups or not same_length:
        return None
    for before, now in zip(groups_before, groups, strict=True):
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


def _weight_distance(a: TrialSummary, b: TrialSummary) -> float | None:
    """Norm of the difference of the two changes of the weights, relative to the norm of the change of ``a``.

    0 for equal changes, 1 if the weights of ``b`` did not move. None if either was not measured or the numbers of steps
    differ.
    """
    if a.weight_change is None or b.weight_change is None or not _took_equal_steps(a, b):
        return None
    if len(a.weight_change) != len(b.weight_change):
        return None
    distance, norm = math.dist(a.weight_change, b.weight_change), math.hypot(*a.weight_change)
    # The reference did not move: only a row that did not move either is like it.
    if norm == 0.0:
        return 0.0 if distance == 0.0 else math.inf
    return distance / norm


def _moved(reference: TrialSummary, summary: TrialSummary) -> str:
    """How far the weights of a row moved, compared with the reference's."""
    norm, norm_before = summary.weight_change_norm or 0.0, reference.weight_change_norm or 0.0
    times = format_ratio(norm / norm_before) if norm_before > 0 else "infinitely"
    return f"{reference.record.trial.configuration.label}: its weights moved {times} as far"


def _weight_change_cosine(reference: TrialSummary, summary: TrialSummary) -> float | None:
    """Cosine of the angle between the two changes of the weights; None if either is unknown or zero.

    If they cannot be compared here, the cosine that ``summary`` has already, as one read from a flat row.
    """
    if _weight_distance(reference, summary) is None:
        return summary.weight_change_cosine
    a, b = reference.weight_change or (), summary.weight_change or ()
    norms = math.hypot(*a) * math.hypot(*b)
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else None
