"""When to use each strategy, what it saves and costs for a model on a number of GPUs, and rules of thumb for the stage.

Bytes are computed by formula for AdamW (``prediction.model_states``), per rank and without activations. The rules of
thumb look only at how full a card is and hold for any model; ``remedies`` has predictions for a given one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..analysis.comparison import Comparison
from ..config.spec import Configuration, Precision
from ..config.strategies import OFFLOAD_NAMES, ZERO_STAGES, make_configuration
from ..prediction.inputs import times_sent
from ..prediction.model_states import FP32_BYTES, element_bytes, model_states
from ..records.schema import OOM
from ..units import format_bytes, format_percent, format_series
from .decision import COMFORTABLE_FRACTION, ON_HOST, RAN_OUT, EligibleRows, Speeds, decide_for_speed, intervals
from .message_templates import Fact
from .remedies import failed_run, less_work

BARELY_FITS_FRACTION = 0.80
"""A configuration that uses at least this fraction of the card barely fits."""

_Texts = tuple[str, str, str]
"""When to use a strategy, when to avoid it, and where its model states are."""
# fmt: off
_STAGES: Mapping[int, _Texts] = {
    0: (
        "the whole model with its optimizer states fits on each GPU with room to spare",
        "model states fill the card: every GPU holds all of them",
        "nothing is partitioned; gradients are all-reduced once per optimizer step",
    ),
    1: (
        "there are two GPUs or more and optimizer states are what fills the card",
        "there is one GPU, or gradients and parameters do not fit even by themselves",
        "optimizer states are partitioned over the GPUs; parameters and gradients stay whole on each",
    ),
    2: (
        "stage 1 barely fits or does not: gradients no longer need to be whole on each GPU",
        "there is one GPU, or accumulation is long on a slow link: each micro-batch reduces gradients",
        "optimizer states and gradients are partitioned over the GPUs; parameters stay whole on each",
    ),
    3: (
        "the parameters in training precision do not fit on one GPU, or stage 2 runs out of memory",
        "a lower stage fits, or the link between the GPUs is slow: parameters are gathered for every pass",
        "parameters, gradients and optimizer states are partitioned; each layer is gathered when it is needed",
    ),
}
_REFERENCES: Mapping[str, _Texts] = {
    "ddp": (
        "you want to know what DeepSpeed's stage 0 costs or gains against plain torch",
        "model states fill the card: every GPU holds all of them",
        "nothing is partitioned; fp32 gradients are all-reduced in buckets while backward runs",
    ),
    "fsdp2": (
        "you are choosing between ZeRO-3 and torch's own sharding; it is not a DeepSpeed configuration",
        "a lower stage fits, or offload is needed",
        "fp32 parameters, gradients and optimizer states are partitioned; each block is gathered when needed",
    ),
}
_DISK = "host memory suffices, or the disk is slow, shared or nearly full: it bounds every step"
_OFFLOADS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("cpu", "none"): (
        "optimizer states are what does not fit, and the host has memory and cores to spare",
        "it fits without offload: the optimizer step waits for the CPU and for the link to the host",
    ),
    ("cpu", "cpu"): (
        "not even the partitioned parameters fit, and the host has the memory",
        "cpu_optimizer fits: parameters cross the link to the host for every forward and backward pass",
    ),
    ("none", "cpu"): (
        "the partitioned parameters do not fit next to the optimizer states, and the host has the memory",
        "it fits without offload: parameters cross the link to the host for every forward and backward pass",
    ),
    ("nvme", "none"): (
        "host memory does not hold the optimizer states, and there is a fast local NVMe disk", _DISK,
    ),
}
"""Offload devices of optimizer and parameters → when to use that offload, and when to avoid it."""
_OFFLOAD_TO_DISK = (
    "host memory does not hold the model states either, and there is a fast local NVMe disk", _DISK,
)
# fmt: on
_PLACES = {
    "none": "stay on the GPUs",
    "cpu": "live in host memory",
    "nvme": "live on the disk and pass through host memory",
}


def advice_lines(
    configuration: Configuration, *, parameters: int, num_gpus: int, precision: Precision, grad_accum: int
) -> list[str]:
    """Return the label of a configuration, then lines on when to use it, its placement, and what it saves and costs.

    Bytes are model states of one rank. ``parameters``: elements of the whole model.
    """
    optimizer, params = offloads = configuration.layout[1:]
    stage = _REFERENCES[configuration.engine] if configuration.is_reference else _STAGES[configuration.stage]
    use_when, avoid_when, placement = stage
    if configuration.offloads:
        # Only a file may keep just the parameters on disk, or one part there and the other in host memory.
        use_when, avoid_when = _OFFLOADS.get(offloads, _OFFLOAD_TO_DISK)
        apart = f"optimizer states {_PLACES[optimizer]}; parameters {_PLACES[params]}"
        together = f"optimizer states and parameters {_PLACES[params]}"
        placement = f"{together if optimizer == params else apart}; at this stage {stage[2]}"
    held = sum(model_states(parameters, num_gpus, configuration, precision).get("gpu", {}).values())
    whole = sum(model_states(parameters, num_gpus, make_configuration(ZERO_STAGES[0]), precision)["gpu"].values())
    where = "on one GPU" if num_gpus == 1 else f"on each of {num_gpus} GPUs"
    if configuration.stage == 0:
        saving = f"nothing: {format_bytes(whole)} of model states {where}"
    elif held == whole:
        saving = "nothing: one GPU has nothing to partition"
    else:
        extra = f"nothing, it needs {format_bytes(held - whole)} more" if held > whole else format_bytes(whole - held)
        saving = f"{extra} {where}: {format_bytes(held)} against {format_bytes(whole)} at ZeRO-0"
    return [
        configuration.label,
        f"  use when: {use_when}",
        f"  avoid when: {avoid_when}",
        f"  placement: {placement}",
        f"  saves: {saving}",
        f"  costs: {traffic_text(configuration, parameters, num_gpus, precision, grad_accum)}",
    ]


def traffic_text(
    configuration: Configuration,
    parameters: int,
    num_gpus: int,
    precision: Precision,
    grad_accum: int,
    trained: int | None = None,
) -> str:
    """Return the traffic of a configuration per optimizer step, by formula: ``≈ 7.62 GB through each GPU's links …``.

    ``trained``: elements that are trained; None for all of them.
    """
    trained = parameters if trained is None else trained
    # Gradients of DDP are fp32.
    size = FP32_BYTES if configuration.engine == "ddp" else element_bytes(precision)
    costs = []
    if num_gpus > 1:
        gathered, updated = times_sent(configuration, parameters, grad_accum)
        # A rank passes on (n - 1) / n of the bytes (Patarasuk and Yuan, 2009).
        sent = size * (gathered * parameters + updated * trained) * (num_gpus - 1) // num_gpus
        costs.append(f"≈ {format_bytes(sent)} through each GPU's links per optimizer step")
    if configuration.offloads:
        # Parameters go up to the GPU once after a step on the CPU, or in each pass if offloaded; gradients go down.
        steps_there = configuration.offloads_optimizer
        held = trained if configuration.offload_param == "none" else 2 * grad_accum * parameters
        moved = format_bytes(-(-size * ((trained if steps_there else 0) + held) // num_gpus))
        where = ", which runs on the CPU" if steps_there else ""
        costs.append(f"≥ {moved} between GPU and host per rank and optimizer step{where}")
    if states := model_states(trained, num_gpus, configuration, precision).get("nvme", {}).get("optimizer_states", 0):
        # Each state is read from the disk and written back.
        costs.append(f"{format_bytes(2 * states)} of optimizer states read and written per rank and step")
    return "; ".join(costs) or "no traffic: there is one GPU and nothing is offloaded"


# ------------------------------------------------------------------ rules of thumb


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """How the rows without offload ended, by stage, and which offload strategies failed."""

    goal: str = "balanced"
    one_gpu: bool = False
    less_work: Sequence[str] = ("a smaller micro-batch", "--activation-checkpointing")
    """What a row could still do to keep fewer activations."""
    fastest: int | None = None
    """Stage of the fastest row; None if no row trained."""
    row: str = ""
    """Label of that row."""
    fraction: float | None = None
    """Fraction of the GPU that it used; None if unknown, or if its micro-batch fills the GPU on purpose."""
    avoided: frozenset[int] = frozenset()
    """Stages whose rows all ran out of device memory or left too little of it; never suggested."""
    failed_offloads: frozenset[str] = frozenset()
    """Offload strategies that ran out of memory or disk."""

    @property
    def offloads(self) -> list[str]:
        """Offload strategies that have not failed, the one that moves least first."""
        return [name for name in OFFLOAD_NAMES[1:] if name not in self.failed_offloads]

    def uses(self, low: float, high: float) -> bool:
        """Whether the fastest row uses at least ``low`` and less than ``high`` of the GPU."""
        return self.fraction is not None and low <= self.fraction < high

    @property
    def enough(self) -> str:
        """The stage that suffices if the fastest row fits comfortably."""
        if self.one_gpu and 0 not in self.avoided:
            return "stage 0 is enough"
        return f"stage {'0 or 1' if self.fastest == 0 and 1 not in self.avoided else self.fastest} is enough"

    @property
    def less_memory(self) -> str:
        """What takes less of a GPU: a higher stage that has not failed, else offload; empty if there is neither."""
        if self.one_gpu:
            ways = [*self.less_work, *self.offloads[:1]]
            return format_series(ways) if ways else ""
        # At least stage 2, which shards gradients too, for a row that barely fits.
        below = max(self.avoided) if self.fastest is None else max(self.fastest, 1)
        stage = next((each for each in range(below + 1, 4) if each not in self.avoided), None)
        if stage is not None:
            return f"stage {stage}"
        return f"offload, {self.offloads[0]} first" if self.offloads else ""


class Rule(NamedTuple):
    """A rule of thumb, in general words and in words about a run."""

    when: str
    then: str
    applies: Callable[[Observed], bool]
    seen: str
    """``when`` about a run, as a template."""
    advice: Callable[[Observed], str]
    """``then`` about a run; empty if nothing is left to suggest."""


_COMFORTABLE, _BARELY = (format_percent(share, digits=0) for share in (COMFORTABLE_FRACTION, BARELY_FITS_FRACTION))
# fmt: off
RULES = (
    Rule("speed is critical", "the lowest stage that fits",
         lambda seen: seen.goal == "speed",
         # Not "the fastest": a tied higher stage may have been ahead within the noise.
         "speed is critical", lambda seen: "the lowest stage that fits" if seen.fastest is None
         else f"stage {seen.fastest}, the lowest that is tied with the fastest"),
    Rule("memory is critical", "stage 3 with offload",
         lambda seen: seen.goal == "memory",
         "memory is critical", lambda seen: f"stage 3 with {', then '.join(seen.offloads)}" if seen.offloads else ""),
    Rule("out of memory at stage 2", "stage 3, or offload",
         lambda seen: seen.fastest is None and bool(seen.avoided),
         "stage {failed} ran out of memory", lambda seen: seen.less_memory),
    Rule(f"fits comfortably (under {_COMFORTABLE} of the card)", "stage 0 or 1",
         lambda seen: seen.uses(0, COMFORTABLE_FRACTION),
         "{row} fits comfortably ({share} of the card)", lambda seen: seen.enough),
    Rule(f"barely fits (from {_BARELY} of the card)", "stage 2",
         lambda seen: seen.uses(BARELY_FITS_FRACTION, math.inf),
         "{row} barely fits ({share} of the card)", lambda seen: seen.less_memory),
)
# fmt: on


def rule_of_thumb(seen: Observed) -> str | None:
    """Return the first rule that applies, in words about this run; None if none does."""
    rule = next((rule for rule in RULES if rule.applies(seen)), None)
    if rule is None or not (advice := rule.advice(seen)):
        return None
    failed = max(seen.avoided, default=None)
    what = rule.seen.format(row=seen.row, share=format_percent(seen.fraction), failed=failed)
    return f"{what}: {advice}{' (on one GPU stages 1 to 3 partition nothing)' if seen.one_gpu else ''}"


def rule_for(comparison: Comparison, eligible: EligibleRows, goal: str) -> Fact | None:
    """Return the rule of thumb for a comparison; None if no rule applies, as on the CPU accelerator."""
    rows = [row for row in comparison.rows if not row.differences and not row.configuration.is_reference]
    without_offload = [row for row in rows if not row.configuration.offloads_optimizer]
    if not without_offload or eligible.terms is ON_HOST:
        return None
    candidates = [each for each in eligible.candidates if each.offload_level[0] == "none"]
    # For speed the rule names a row to use, which must leave room; for other goals it says how full the fastest is.
    compared = [each for each in candidates if each.fits] if goal == "speed" else candidates
    best = None
    if compared:
        best = decide_for_speed(Speeds(candidates=compared, interval_of=intervals(comparison))).simplest_tied
    failed = [(row.configuration, run.outcome.status) for row in rows if (run := failed_run(row))]
    avoided = {each.stage for each in candidates if not each.fits}
    avoided |= {each.stage for each, status in failed if status == OOM and not each.offloads_optimizer}
    avoided -= {each.stage for each in candidates if each.fits or each == best}
    text = rule_of_thumb(
        Observed(
            goal=goal,
            one_gpu=without_offload[0].trial.placement.num_gpus == 1,
            less_work=less_work(without_offload[0].trial.workload),
            fastest=None if best is None else best.stage,
            row="" if best is None else best.label,
            fraction=None if best is None or best.fills_memory else best.fraction,
            avoided=frozenset(avoided),
            failed_offloads=frozenset(
                each.name for each, status in failed if status in RAN_OUT and each.offloads_optimizer
            ),
        )
    )
    return None if text is None else Fact("rule", {"text": text})


def general_lines(num_gpus: int) -> list[str]:
    """Return the rules for any model, before anything was measured."""
    lines = ["Rules of thumb, by what a measured run shows:", *(f"  {rule.when}: {rule.then}" for rule in RULES)]
    if num_gpus == 1:
        lines += [
            "On one GPU stages 1 to 3 partition nothing: instead of a higher stage use activation checkpointing, a",
            "smaller micro-batch or offload.",
        ]
    return lines
