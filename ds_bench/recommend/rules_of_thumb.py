"""Rules of thumb for the stage to take, by how much of the GPU a row without offload used or which rows ran out of it.

They hold for any model; what is predicted for this one is in ``shortage``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.comparison import Comparison
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..config.strategies import OFFLOAD_NAMES
from ..records.schema import OOM
from ..units import format_percent
from . import remedies
from .decision import COMFORTABLE_FRACTION, Speeds, decide_for_speed
from .eligibility import ON_DEVICE, candidate_of, intervals, on_cpu, reason_not_eligible

BARELY_FITS_FRACTION = 0.80
"""Fraction of the card from which a configuration barely fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRows:
    """Outcomes of the rows that were tried, by stage without offload and by offload configuration."""

    fastest_stage: int | None = None
    """Stage of the fastest row that trained; None if none did."""
    fastest_label: str | None = None
    """Label of that row; None: named by its stage."""
    fraction: float | None = None
    """Fraction of the GPU that this row used; None if unknown, or if its micro-batch fills the GPU on purpose."""
    trained_stages: frozenset[int] = frozenset()
    """Stages that trained with GPU memory left."""
    out_of_memory_stages: frozenset[int] = frozenset()
    """Stages that ran out of device memory; they are never suggested."""
    full_stages: frozenset[int] = frozenset()
    """Stages that trained but left too little GPU memory; they are never suggested."""
    failed_offloads: frozenset[str] = frozenset()
    """Names of offload strategies that ran out of memory or disk."""

    @property
    def failed(self) -> frozenset[int]:
        """Stages of which no row trained."""
        return self.out_of_memory_stages - self.trained_stages - {self.fastest_stage}

    @property
    def offloads(self) -> list[str]:
        """Offload strategies that have not failed, the one that moves least first."""
        return [name for name in OFFLOAD_NAMES[1:] if name not in self.failed_offloads]

    def next_stage(self, above: int) -> int | None:
        """The lowest stage above that has not failed and is not too full; None if there is none."""
        return next((stage for stage in range(above + 1, 4) if stage not in self.failed | self.full_stages), None)


def rule_for(comparison: Comparison, goal: str) -> str | None:
    """The rule of thumb for a comparison; None if none applies, as on the CPU accelerator."""
    comparable = [row for row in comparison.rows if not row.differences and not row.configuration.is_reference]
    without_offload = [row for row in comparable if not row.configuration.offloads_optimizer]
    if not without_offload or on_cpu(comparison):
        return None
    trained = [row for row in without_offload if row.tokens_per_second is not None and reason_not_eligible(row) is None]
    fitting = [row for row in trained if row.leaves_room]
    # For speed the rule names a row to use, which must leave room; else it speaks of how full the fastest is.
    rows = fitting if goal == "speed" else trained
    fastest = None
    if rows:
        speeds = Speeds(
            candidates=[candidate_of(row, comparison, ON_DEVICE) for row in rows], interval_of=intervals(comparison)
        )
        fastest = comparison.row(decide_for_speed(speeds).simplest_tied.key)
    outcomes = [(row.configuration, run.outcome.status) for row in comparable if (run := remedies.failed_run(row))]
    observed = ObservedRows(
        fastest_stage=None if fastest is None else fastest.configuration.stage,
        fastest_label=None if fastest is None else fastest.label,
        fraction=None if fastest is None or fastest.fills_memory else fastest.gpu_fraction,
        trained_stages=frozenset(row.configuration.stage for row in fitting),
        out_of_memory_stages=frozenset(
            strategy.stage for strategy, status in outcomes if status == OOM and not strategy.offloads_optimizer
        ),
        full_stages=frozenset(row.configuration.stage for row in trained)
        - {row.configuration.stage for row in fitting},
        failed_offloads=frozenset(
            strategy.name for strategy, status in outcomes if status in remedies.RAN_OUT and strategy.offloads_optimizer
        ),
    )
    num_gpus = without_offload[0].trial.placement.num_gpus
    return rule_of_thumb(observed, goal=goal, num_gpus=num_gpus)


def rule_of_thumb(rows: ObservedRows, *, goal: str = "balanced", num_gpus: int = 1) -> str | None:
    """The rule of thumb for these rows; None if none applies."""
    one_gpu = num_gpus == 1
    text: str | None
    if goal == "speed":
        text = _rule_for_speed(rows)
    elif goal == "memory":
        text = _rule_for_memory(rows)
    else:
        text = _balanced_rule(rows, one_gpu)
    return f"{text} (on one GPU stages 1 to 3 partition nothing)" if text and one_gpu else text


def _rule_for_speed(rows: ObservedRows) -> str:
    fastest = rows.fastest_stage
    if fastest is not None and any(stage < fastest for stage in rows.trained_stages):
        # Not "the fastest": a higher stage may tie with it and have been ahead within the noise.
        return f"speed is critical: stage {fastest}, the lowest that cannot be told from the fastest"
    return "speed is critical: the lowest stage that fits"


def _rule_for_memory(rows: ObservedRows) -> str | None:
    if not rows.offloads:
        return None
    first, *later = rows.offloads
    then = f" first, then {' and '.join(later)}" if later else ""
    return f"memory is critical: stage 3 with offload, {first}{then}"


def _balanced_rule(rows: ObservedRows, one_gpu: bool) -> str | None:
    highest, fastest = max(rows.failed, default=None), rows.fastest_stage
    if highest is not None and (fastest is None or (not one_gpu and 2 <= highest < fastest)):
        stage = None if one_gpu else rows.next_stage(highest)
        remedy = _try_offload(rows) if stage is None else f"stage {stage}, or offload"
        return f"stage {highest} ran out of memory: {remedy}" if remedy else None
    if fastest is None or rows.fraction is None or COMFORTABLE_FRACTION <= rows.fraction < BARELY_FITS_FRACTION:
        return None
    label, share = rows.fastest_label or f"ZeRO-{fastest}", f"{format_percent(rows.fraction)} of the card"
    if rows.fraction < COMFORTABLE_FRACTION:
        return f"{label} fits comfortably ({share}): {_enough_text(rows, fastest, one_gpu)}"
    if one_gpu:
        smaller = ["--activation-checkpointing", "a smaller micro-batch", *rows.offloads[:1]]
        remedy = f"{', '.join(smaller[:-1])} or {smaller[-1]}"
    else:
        # Stage 2 at least, which docs/choosing.md names for a row that barely fits.
        stage = rows.next_stage(max(fastest, 1))
        remedy = _try_offload(rows) if stage is None else f"stage {stage}"
    verdict = "barely fits" if rows.fraction <= NEAR_CAPACITY else "is about to run out of memory"
    return f"{label} {verdict} ({share}): {remedy}" if remedy else None


def _enough_text(rows: ObservedRows, fastest: int, one_gpu: bool) -> str:
    """The lowest stage that is enough, and which lower stages ran out of memory."""
    if fastest == 0 and not one_gpu and 1 not in rows.failed:
        return "stage 0 or 1 is enough"
    if one_gpu and 0 not in rows.failed:
        return "stage 0 is enough"
    lower = [str(stage) for stage in sorted(rows.failed) if stage < fastest]
    reason = f"; stage{'s'[: len(lower) > 1]} {' and '.join(lower)} ran out of memory" if lower else ""
    return f"stage {fastest} is enough{reason}"


def _try_offload(rows: ObservedRows) -> str:
    return f"offload, {rows.offloads[0]} first" if rows.offloads else ""


def general_lines(num_gpus: int) -> list[str]:
    """The rules for any model, before anything was measured."""
    comfortable, barely, near = (
        format_percent(share, digits=0) for share in (COMFORTABLE_FRACTION, BARELY_FITS_FRACTION, NEAR_CAPACITY)
    )
    lines = [
        "Rules of thumb, by what a measured run shows:",
        f"  fits comfortably (under {comfortable} of the card): stage 0 or 1",
        f"  barely fits ({barely} to {near}): stage 2",
        "  out of memory at stage 2: stage 3, or offload",
        "  speed is critical: the lowest stage that fits",
        "  memory is critical: stage 3 with offload",
    ]
    if num_gpus == 1:
        lines += [
            "On one GPU stages 1 to 3 partition nothing: activation checkpointing, a smaller micro-batch or offload",
            "take the place of a higher stage there.",
        ]
    return lines
