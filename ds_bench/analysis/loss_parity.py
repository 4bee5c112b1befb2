"""Checks that rows trained alike: compares losses, weights and optimizers with a reference row.

A strategy must not change what is learned. Two rows of one workload train on the same batches from the same initial
weights, so a difference too large to be rounding means that a configuration is wrong.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..config.axes import changed_arithmetic
from ..config.caveat_texts import LOSS_KINDS, Caveat, CaveatKind, has_kind, note
from ..config.spec import SAME_TRAINING_FIELDS, Configuration, Workload
from ..records.schema import TrialRecord
from ..units import format_ratio
from .script_work import with_work_caveats
from .trial_caveats import optimizer_family

if TYPE_CHECKING:
    from .row import Run

_EARLY_STEPS = 10
"""Number of initial steps whose losses and gradient norms are compared: later on, rounding makes even correct rows
diverge."""
_LOSS_TOLERANCE = {"fp32": 2e-4, "bf16": 5e-3, "fp16": 5e-3}
"""Relative difference of the losses that rounding explains in the first ten steps, by precision."""
_GRAD_NORM_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 3e-2}
"""The same for the gradient norms; measured like ``_WEIGHT_TOLERANCE``: at most 3e-6 in fp32, 1.2e-3 in bf16."""
_OTHER_FORMAT_TOLERANCE = 0.02
"""Relative difference of the losses that a different number format or compressed communication explains."""
_STAGE0_WRAPPERS = ("FP16_UnfusedOptimizer", "FP16_Optimizer")
"""Classes of DeepSpeed's optimizer wrapper that have the quirk (``CaveatKind.LOSS_QUIRK``)."""
_QUIRK_MIN_DIFFERENCE = 2e-5
"""Relative difference of the losses above which the quirk of a row is reported."""
_QUIRK_LOSS_TOLERANCE = 0.02
"""Relative difference of the losses that is too large for the quirk's one extra Adam step to explain."""
_QUIRK_WEIGHT_TOLERANCE = 0.3
"""The same for the weights (see ``_WEIGHT_TOLERANCE``).

The first three updates of a row with the quirk are 0.74, 0.86 and 0.91 times the correct ones: its weight change is
off by 0.26 after one step and by 0.10 after twelve.
"""
_SHORT_STEPS = 25
"""A trial without warm-up has no early window; if it has at most this many steps, its total weight change is compared
instead."""
_WINDOW_STEPS = 5
"""Steps of an early window (worker/weight_change.py) if the warm-up is long enough; tolerances are for this many."""
_WEIGHT_TOLERANCE = {"fp32": 2e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Distance between two rows' weight changes in the early window, relative to the reference's, that rounding explains.

Measured on the CPU (``bench/training_mutants.py``: ``tiny``, stages 0 to 3, offload, DDP, FSDP2): at most 3.4e-5 in
fp32; in bf16 8e-3 with DeepSpeed's CPU Adam and 3.6e-2 with DDP, which trains under autocast. A doubled learning rate
gives 1.0; betas of 0.8 and 0.99 instead of 0.9 and 0.999 give 0.054. A different weight decay (4.7e-3 in fp32, 1.3e-2
in bf16) and no clipping (7.6e-3, 1.6e-2) are lost in bf16 rounding; there only the settings read back reveal them.
"""
_LATE_TOLERANCE = {"fp32": 1e-2, "bf16": 2e-2, "fp16": 2e-2}
"""Relative difference up to which figures of the whole run never count as different. After 705 steps correct rows
differed by 2.6e-5 in fp32 and 1.3e-3 in bf16 at most."""
_SPREADS = 3.0
"""A row may be this many times as far from the reference as the other correct rows are (their median)."""
_COMMON_VALUES: dict[str, Any] = {
    each.name: each.default for each in fields(Workload) if each.name in (*SAME_TRAINING_FIELDS, "precision")
}
"""Defaults of the workload fields that may differ between compared rows, since they do not change the batches."""

_Group = dict[int, "Run"]
"""Runs on equal batches, by their index in the given sequence."""


def with_loss_caveats(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with the caveats and cosines found by comparing them.

    A run that has a caveat about its loss gets no second one.
    """
    compared = with_work_caveats(runs)
    # Flat rows hold no losses, and the run that wrote them has compared its trials.
    if not any(isinstance(run.stored, TrialRecord) for run in runs):
        return compared
    for index, caveat in _other_training(runs).items():
        if caveat not in runs[index].caveats:
            compared[index] = runs[index].with_row(caveats=(*runs[index].caveats, caveat))
    for group in _group_equal_batches(compared):
        reference = _reference_row(group)
        if reference is None:
            continue
        first = next(iter(group))
        strategies = [run.trial.configuration for run in group.values()]
        several = len({strategy.name for strategy in strategies}) > 1
        differences = _differences(reference, group)
        for index, run in group.items():
            caveats = [_other_adam_implementation(group[first], run)]
            if index == first and several and all(map(_is_stage_3, strategies)):
                caveats.insert(0, Caveat(CaveatKind.STAGE_3_ALONE))
            if not has_kind(run.caveats, *LOSS_KINDS):
                caveats.append(differences.get(index))
            added = [caveat for caveat in caveats if caveat is not None and caveat not in run.caveats]
            cosine = run.row.weight_change_cosine
            known, change = reference.weight_change, run.weight_change
            if known and change and len(known) == len(change) and _took_equal_steps(reference, run):
                cosine = _cosine(known, change)
            if added or cosine != run.row.weight_change_cosine:  # copying every row would cost more than the rest
                compared[index] = run.with_row(weight_change_cosine=cosine, caveats=(*run.caveats, *added))
    return compared


def compare_losses(runs: Sequence[Run]) -> dict[int, Caveat]:
    """Return caveats by index, for rows that did not train as the reference row of their workload did.

    The reference is the row with which most other strategies agree; among equals, one that is not at stage 3, then the
    first. A row with the known quirk of stage 0 is never the reference.
    """
    caveats = dict[int, Caveat]()
    for group in _group_equal_batches(runs):
        if (reference := _reference_row(group)) is not None:
            caveats |= _differences(reference, group)
    return caveats


def _differences(reference: Run, group: _Group) -> dict[int, Caveat]:
    """Caveats, by index, for rows that differ from the reference early in the run, then for rows that differ later."""
    early = {index: _early_difference(reference, run) for index, run in group.items()}
    alike_early = {index: run for index, run in group.items() if early[index] is None}
    found = {index: caveat for index, caveat in early.items() if caveat is not None}
    return found | _late_differences(reference, alike_early)


def _group_equal_batches(runs: Sequence[Run]) -> list[_Group]:
    """Group rows that should train alike, on the same batches; rows without finite losses are in no group."""
    groups: list[tuple[tuple[object, ...], _Group]] = []
    # By id: thousands of records share only a few workloads, and making a copy validates it again.
    common: dict[int, Workload] = {}
    for index, run in enumerate(runs):
        # Rows of a script were compared before (script_work).
        if not run.losses or None in run.losses or run.trial.workload.script is not None:
            continue
        row, trial = run.row, run.trial
        if id(trial.workload) not in common:
            common[id(trial.workload)] = replace(trial.workload, **_COMMON_VALUES)
        other = changed_arithmetic(trial.configuration.axis_values), trial.common_settings
        batch = row.batch_size, row.grad_accum, row.data_parallel_size, common[id(trial.workload)], other
        # A workload holds mappings, so it cannot be a dictionary key.
        group = next((group for known, group in groups if known == batch), None)
        if group is None:
            groups.append((batch, group := {}))
        group[index] = run
    return [part for _, group in groups for part in _split_by_settings(group, _is_of_file)]


def _split_by_settings(group: _Group, is_free: Callable[[Run], bool]) -> list[_Group]:
    """Split rows by the training that they request; only rows for which ``is_free`` holds may request something
    different.

    In any other row, different settings are a mistake that the comparison should find, so the row stays with the
    others.
    """
    bound = [run for run in group.values() if not is_free(run)]
    common = next(filter(_trained_as_requested, bound), bound[0] if bound else None)
    parts: list[tuple[Run, _Group]] = []
    for index, run in group.items():
        requested = run if common is None or is_free(run) else common
        part = next((part for known, part in parts if _requested_difference(known, requested) is None), None)
        if part is None:
            parts.append((requested, part := {}))
        part[index] = run
    return [part for _, part in parts]


def _is_of_file(run: Run) -> bool:
    return run.trial.configuration.source == "file"


def _requested_difference(a: Run, b: Run, *, learning: bool = False) -> str | None:
    """Return the first difference between the training requested for ``a`` and for ``b``; None if they are equal.

    Optimizer settings read back from the run take precedence, because a file may omit defaults.
    ``learning``: ignore number formats and compressed communication.
    """
    if a is b:
        return None
    known = all(each.ranks[0].optimizer_settings for each in (a, b))
    theirs, own = (_arithmetic_settings(each.trial.ds_config) for each in (a, b))
    names = [name for name in own if own[name] != theirs[name] and (name in _LEARNING or not learning)]
    if known and theirs["optimizer"][0] == own["optimizer"][0]:
        names = [name for name in names if name != "optimizer"]
    read_back = all("gradient_clipping" in each.ranks[0].resolved_config for each in (a, b))
    if "gradient_clipping" in names and read_back and (_known_norms(a) or _known_norms(b)):
        names.remove("gradient_clipping")  # it counts only if it took effect

    def short(value: Any) -> str:
        shown = value[0] if isinstance(value, tuple) else value  # for an optimizer, only its kind
        text = "unset" if shown in (None, {}) else str(shown)
        return text if len(text) <= 60 else f"{text[:57]}…"

    other = [f"its {name} is {short(own[name])}, not {short(theirs[name])}" for name in names]
    return next(filter(None, [_differing_setting(a, b), _differing_clipping(a, b), *other]), None)


def _arithmetic_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a DeepSpeed configuration says about arithmetic, besides batch and precision."""
    optimizer, zero, bf16 = (config.get(name) or {} for name in ("optimizer", "zero_optimization", "bf16"))
    kind, params = str(optimizer.get("type")).lower(), optimizer.get("params") or {}
    # DeepSpeed turns Adam into AdamW unless ``adam_w_mode`` is off (engine.py).
    if kind == "adam" and params.get("adam_w_mode", True):
        kind = "adamw"
    return {
        "optimizer": (kind, {key: value for key, value in params.items() if key not in _IMPLEMENTATION}),
        # 1.0 has been DeepSpeed's default since 0.19.3.
        "gradient_clipping": config.get("gradient_clipping", 1.0),
        "bf16": {key: value for key, value in bf16.items() if key.startswith(("bf16", "immediate")) and value},
        **{key: config.get(key) or None for key in _ARITHMETIC},
        **{key: zero.get(key) or None for key in _ZERO_ARITHMETIC},
    }


_IMPLEMENTATION = ("torch_adam", "foreach", "fused", "adam_w_mode", "fp32_optimizer_states")
"""Parameters of an optimizer that choose its implementation."""
_LEARNING = ("optimizer", "gradient_clipping", "scheduler")
_ARITHMETIC = ("scheduler", "torch_autocast", "communication_data_type", "data_types")
_ZERO_ARITHMETIC = ("zenflow", "zero_quantized_weights", "zero_quantized_gradients")


def _other_training(runs: Sequence[Run]) -> dict[int, Caveat]:
    """Return caveats by index for rows of files or of the axis ``optimizer`` that request unusual training.

    All other rows define the usual training; without any, the largest group with the same request does. If two groups
    tie, none does.
    """
    points: dict[str, _Group] = {}
    if any(map(_may_train_otherwise, runs)):  # rare, and the rest takes time with thousands of records
        for index, run in enumerate(runs):
            if run.losses and run.row.weight_change_norm != 0.0 and run.trial.workload.script is None:
                points.setdefault(str(run.trial.common_settings), {})[index] = run
    caveats = dict[int, Caveat]()
    for group in points.values():
        parts = _split_by_settings(group, _may_train_otherwise)
        # All rows that cannot train differently are in one part, which wins whatever its size.
        sizes = [(not all(map(_may_train_otherwise, part.values())), len(part)) for part in parts]
        usual = parts[sizes.index(max(sizes))] if sizes.count(max(sizes)) == 1 else None
        for part in (each for each in parts if each is not usual):
            other = usual or next(each for each in parts if each is not part)
            known = next(iter(other.values()))
            for index, run in part.items():
                apart = _greatest_difference(known.losses, run.losses)
                if difference := _requested_difference(known, run, learning=True):
                    caveats[index] = Caveat(CaveatKind.OTHER_TRAINING, {"how": difference})
                elif apart > _OTHER_FORMAT_TOLERANCE:
                    label = known.trial.configuration.label
                    caveats[index] = Caveat(CaveatKind.LOSS_OF_FORMAT_DIFFERS, {"difference": apart, "row": label})
                else:
                    how = _requested_difference(known, run)
                    caveats[index] = note(f"its losses are compared only with rows that train alike: {how}")
    return caveats


def _may_train_otherwise(run: Run) -> bool:
    other = changed_arithmetic(run.trial.configuration.axis_values)
    return _is_of_file(run) or "optimizer" in other


def _is_stage_3(configuration: Configuration) -> bool:
    """Whether DeepSpeed's stage 3 trained the row; FSDP2 shares no code with it."""
    return configuration.stage == 3 and not configuration.is_reference


def _other_adam_implementation(first: Run, run: Run) -> Caveat | None:
    """The caveat of a row on the CPU accelerator that uses a different implementation of Adam from the first row.

    On the CPU accelerator offload moves nothing, and only the implementation of Adam can make a row faster.
    """
    theirs, own = (each.ranks[0].optimizer_class for each in (first, run))
    if first.trial.placement.accelerator != "cpu" or own == theirs:
        return None
    if not optimizer_family(own) == optimizer_family(theirs) == "adam":
        return None
    row = first.trial.configuration.label
    return Caveat(CaveatKind.OTHER_ADAM, {"used": own, "other": theirs, "row": row})


def _reference_row(group: _Group) -> Run | None:
    """Return the reference row, see ``compare_losses``; None if every row has the quirk.

    A row that did not train, or did not use the requested settings, is the reference only if that is true of every row.
    """
    rows: dict[str, list[Run]] = {}
    for run in group.values():
        # Compared with a row that has the quirk, every correct row would look wrong.
        if not _has_stage0_quirk(run):
            rows.setdefault(run.trial.configuration.name, []).append(run)
    # More runs of a row say nothing new, and comparing every run with every other would take too long.
    rows = {name: own[:3] for name, own in rows.items()}
    candidates = [run for own in rows.values() for run in own]
    right = [run for run in candidates if run.row.weight_change_norm != 0.0 and _trained_as_requested(run)]
    candidates = right or candidates
    if len(candidates) < 2:
        return next(iter(candidates), None)

    def support(run: Run) -> tuple[float, int, bool]:
        votes, both_known = 0.0, 0
        for own in rows.values():  # each row has one vote, however often it was run
            others = [other for other in own if other is not run]
            agreeing = [other for other in others if _early_difference(run, other) is None]
            votes += len(agreeing) / len(others) if others else 1.0
            # Rows without a gradient norm agree with any norm, so they count less.
            norms_known = any(None not in (run.row.first_grad_norm, other.row.first_grad_norm) for other in agreeing)
            both_known += norms_known and len(others) == len(own)
        return votes + both_known, both_known, not _is_stage_3(run.trial.configuration)

    return max(candidates, key=support)


def _trained_as_requested(run: Run) -> bool:
    """Whether the optimizer settings read back agree with the configuration wherever both are known."""
    config = run.trial.ds_config
    requested = (config.get("optimizer") or {}).get("params") or {}
    changing = {"lr"} if config.get("scheduler") else set()
    return all(
        _same_setting(requested[name], settings[name])
        for settings in run.ranks[0].optimizer_settings or ()
        for name in (requested.keys() & settings.keys()) - changing
    )


def _early_difference(reference: Run, run: Run) -> Caveat | None:
    """How a row trained differently from the reference in its first steps; None if rounding explains it."""
    if run is reference:
        return None
    quirk = _has_stage0_quirk(run)
    theirs, own = (each.trial.workload.precision for each in (reference, run))
    # The coarser of the two precisions.
    precision = max(theirs, own, key=_LOSS_TOLERANCE.__getitem__)
    label = reference.trial.configuration.label
    # Checked first, because a differing setting explains every other difference.
    setting = _differing_setting(reference, run) or _differing_clipping(reference, run)
    if setting is not None:
        return Caveat(CaveatKind.TRAINED_DIFFERENTLY, {"row": label, "how": setting})
    difference = _greatest_difference(reference.losses, run.losses)
    if difference > (_QUIRK_LOSS_TOLERANCE if quirk else _LOSS_TOLERANCE[precision]):
        return Caveat(CaveatKind.LOSS_DIFFERS, {"difference": difference, "row": label})
    norm = _unexplained_norm(reference, run, _GRAD_NORM_TOLERANCE[precision], quirk=quirk)
    if norm:
        how = f"the norm of its gradients differs by {norm:.2%}, more than rounding explains"
        return Caveat(CaveatKind.TRAINED_DIFFERENTLY, {"row": label, "how": how})
    # The norm of the difference between the two weight changes, relative to the norm of the reference's change: 1 if
    # the row's weights did not move, infinite if only the reference's did not. A different precision loses different
    # small gradients, and Adam turns even small gradients into updates of normal size.
    known, change = _compared_changes(reference, run) or ((), ())
    distance, moved = math.dist(known, change) if theirs == own else 0.0, math.hypot(*known)
    distance = distance / moved if moved else math.inf if distance else 0.0
    window = run.early_window
    # The signs of small gradients, which rounding decides, weigh more in a shorter window.
    weight_tolerance = _WEIGHT_TOLERANCE[precision] * (_WINDOW_STEPS / window.steps if window else 1.0)
    if distance > (_QUIRK_WEIGHT_TOLERANCE if quirk else weight_tolerance):
        how = f"{_moved(reference, run)}; rounding does not explain it"
        return Caveat(CaveatKind.TRAINED_DIFFERENTLY, {"row": label, "how": how})
    if quirk and difference > _QUIRK_MIN_DIFFERENCE:
        return Caveat(CaveatKind.LOSS_QUIRK, {"difference": difference})
    if quirk and distance > weight_tolerance:
        return Caveat(CaveatKind.WEIGHTS_QUIRK, {"row": label, "how": _moved(reference, run)})
    return None


def _late_differences(reference: Run, alike_early: _Group) -> dict[int, Caveat]:
    """Caveats, by index, for rows that trained alike in the first steps and then drifted unusually far apart.

    Rows are compared with the one that most others agree with over the whole run; if several tie, with the reference.
    The usual drift is the median over the other rows, each represented by the mean of its runs. A row's own repeats do
    not count, since they share its error.
    """
    rows: dict[str, list[int]] = {}
    # Over a long run the quirk's extra step, or a different precision, leads to different weights.
    precision = reference.trial.workload.precision
    for index, run in alike_early.items():
        alike = run.trial.workload.precision == precision and _took_equal_steps(reference, run)
        if alike and not _has_stage0_quirk(run):
            rows.setdefault(run.trial.configuration.name, []).append(index)
    if len(rows) < 2:
        return {}
    figures = {index: _late_figures(alike_early[index]) for own in rows.values() for index in own}
    means: dict[str, _Figures] = {}
    for name, own in rows.items():
        first, *others = (figures[index] for index in own)
        means[name] = {
            figure: tuple(map(statistics.fmean, zip(*(each[figure] for each in (first, *others)), strict=True)))
            for figure in first
            if all(figure in each for each in others)
        }
    tolerance = _LATE_TOLERANCE[precision]

    def agreeing(name: str) -> tuple[int, bool]:
        distances = (_late_distances(means[name], means[other]) for other in means)
        is_reference = name == reference.trial.configuration.name
        return sum(max(each.values(), default=0.0) <= tolerance for each in distances), is_reference

    usual = max(means, key=agreeing)
    label = alike_early[rows[usual][0]].trial.configuration.label
    of_rows = {name: _late_distances(means[usual], own) for name, own in means.items() if name != usual}
    caveats = dict[int, Caveat]()
    for name, own in rows.items():
        for index in own:
            for figure, distance in _late_distances(means[usual], figures[index]).items():
                other_rows = [each[figure] for other, each in of_rows.items() if other != name and figure in each]
                spread = statistics.median_low(other_rows) if other_rows else 0.0
                if distance > (limit := max(tolerance, _SPREADS * spread)):
                    how = f"{figure} differs by {distance:.1%}, where up to {limit:.1%} is usual"
                    caveats[index] = Caveat(CaveatKind.TRAINED_DIFFERENTLY, {"row": label, "how": how})
    return caveats


_Figures = dict[str, tuple[float, ...]]
"""A figure of the whole run → its value, and the value that differences are relative to."""


def _late_figures(run: Run) -> _Figures:
    """Return the figures of the whole run; those that training may bring near 0 are relative to the first step's."""
    norms = [norm for norm in (run.row.first_grad_norm, run.row.grad_norm) if norm is not None]
    later = [loss for loss in run.losses[_EARLY_STEPS:] if loss is not None]
    mean, moved = statistics.fmean(later) if later else None, run.row.weight_change_norm
    figures = {
        "its mean loss after the first ten steps": (mean, mean),
        "its loss on the first batch at the end": (run.row.repeated_loss, run.losses[0]),
        "the distance that its weights moved": (moved, moved),
        "the norm of its gradients at the end": (run.row.grad_norm, max(norms, default=None)),
    }
    return {name: (value, scale) for name, (value, scale) in figures.items() if value is not None and scale is not None}


def _late_distances(known: _Figures, figures: _Figures) -> dict[str, float]:
    """Return how far each figure that both have is from the known one."""
    return {name: _relative(figures[name][0], *known[name]) for name in known if name in figures}


def _has_stage0_quirk(run: Run) -> bool:
    """True for Adam at stage 0 in a wrapper of DeepSpeed's that has the quirk (``CaveatKind.LOSS_QUIRK``)."""
    rank = run.ranks[0]
    return (
        run.trial.configuration.stage == 0
        and "adam" in rank.optimizer_class.lower()
        and rank.engine_optimizer_class in _STAGE0_WRAPPERS
    )


def _relative(value: float, reference: float, scale: float) -> float:
    return abs(value - reference) / max(abs(scale), 1e-12)


def _greatest_difference(a: Sequence[float | None], b: Sequence[float | None]) -> float:
    """Largest relative difference in the first steps; 0 if there is nothing to compare."""
    pairs = zip(a[:_EARLY_STEPS], b[:_EARLY_STEPS], strict=False)
    return max((_relative(y, x, x) for x, y in pairs if x is not None and y is not None), default=0.0)


def _unexplained_norm(reference: Run, run: Run, tolerance: float, *, quirk: bool) -> float:
    """Largest relative difference of the gradient norms that is above the limit for its step; 0 if there is none.

    A row with the quirk starts from the same weights and then lags behind by less than one step: by 0.26 after the
    first, by 0.67 after ten. The first norm is the same up to rounding, and a later one may also differ by as much as
    the reference's has changed from any step to the next.
    """
    found, limit, before = 0.0, tolerance, None
    norms = (each.ranks[0].grad_norms[:_EARLY_STEPS] for each in (reference, run))
    for known, norm in zip(*norms, strict=False):
        if known is None:
            continue
        if quirk and before is not None:
            limit = max(limit, tolerance + _relative(before, known, known))
        if norm is not None and (difference := _relative(norm, known, known)) > limit:
            found = max(found, difference)
        before = known
    return found


def _took_equal_steps(a: Run, b: Run) -> bool:
    """Whether two rows trained for the same number of steps, including profiled ones after the measured window."""
    return len(a.losses) == len(b.losses) and a.trial.inspection == b.trial.inspection


def _differing_setting(reference: Run, run: Run) -> str | None:
    """The first setting of the optimizer that differs from the reference's; None if no difference is known."""
    theirs, own = (each.ranks[0] for each in (reference, run))
    families = [optimizer_family(rank.optimizer_class) for rank in (theirs, own)]
    if None not in families and families[0] != families[1]:
        return f"it used {own.optimizer_class}, not {theirs.optimizer_class}"
    groups_before, groups = theirs.optimizer_settings or (), own.optimizer_settings or ()
    if len(groups_before) != len(groups):
        return None
    # After a different number of steps, a scheduler may have set a different learning rate.
    changing = {"lr"} if len(reference.losses) != len(run.losses) else set()
    for before, now in zip(groups_before, groups, strict=True):
        for name in (before.keys() & now.keys()) - changing:
            if not _same_setting(before[name], now[name]):
                return f"its optimizer has {name} {now[name]}, not {before[name]}"
    return None


def _differing_clipping(reference: Run, run: Run) -> str | None:
    """How gradient clipping differs from the reference's, if either took effect; None if they are equal or unknown."""
    theirs, own = (each.ranks[0].resolved_config.get("gradient_clipping") for each in (reference, run))
    limits = [limit for limit in (theirs, own) if limit]
    norms = _known_norms(reference) + _known_norms(run)
    if theirs is None or own is None or _same_setting(theirs, own) or max(norms, default=0.0) <= min(limits):
        return None
    return f"it clips gradients at {own}, not {theirs}"


def _known_norms(run: Run) -> list[float]:
    return [norm for norm in run.ranks[0].grad_norms if norm is not None]


def _same_setting(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same_setting, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _compared_changes(a: Run, b: Run) -> tuple[Sequence[float], Sequence[float]] | None:
    """Return the changes of the weights of two rows over the same steps: of the early window, or of a short trial.

    None if they cannot be compared.
    """
    before, now = a.early_window, b.early_window
    if before is None and now is None and len(a.losses) <= _SHORT_STEPS and _took_equal_steps(a, b):
        known, change = a.weight_change, b.weight_change
    elif before is None or now is None or replace(before, weight_change=now.weight_change) != now:
        return None
    else:
        known, change = before.weight_change, now.weight_change
    return (known, change) if known and change and len(known) == len(change) else None


def _moved(reference: Run, run: Run) -> str:
    """How far the weights of a row moved in the early steps, compared with the reference's, and in what direction."""
    label = reference.trial.configuration.label
    known, change = _compared_changes(reference, run) or ((), ())
    before, norm = math.hypot(*known), math.hypot(*change)
    if before == 0.0:
        return f"its weights moved, and {label}'s did not"
    cosine = _cosine(known, change)
    direction = "" if cosine is None else f" (the cosine of the two changes is {cosine:.4f})"
    return f"its weights moved {format_ratio(norm / before)} as far{direction}"


def _cosine(a: Sequence[float], b: Sequence[float]) -> float | None:
    norms = math.hypot(*a) * math.hypot(*b)
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else None
