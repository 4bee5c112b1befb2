"""When each strategy is worth it, what it moves where, and what it saves and costs for a model on so many GPUs.

Bytes are formulas for AdamW (``modelstates``), per rank and without activations; nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .advising.rule import COMFORTABLE
from .doubts import NEAR_CAPACITY
from .prediction.modelstates import element_bytes, model_states
from .spec import Precision, Strategy
from .strategies import ZERO_STAGES
from .units import format_bytes, format_percent

BARELY = 0.80
"""Fraction of the card from which a configuration barely fits (acceptance A23)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guide:
    """What is known of a strategy before any number."""

    use_when: str
    avoid_when: str
    moves: str


_STAGES: Mapping[int, _Guide] = {
    0: _Guide(
        use_when="the whole model with its optimizer states fits on each GPU with room to spare",
        avoid_when="model states fill the card: every GPU holds all of them",
        moves="nothing is partitioned; gradients are all-reduced once per optimizer step",
    ),
    1: _Guide(
        use_when="there are two GPUs or more and optimizer states are what fills the card",
        avoid_when="there is one GPU, or gradients and parameters alone do not fit",
        moves="optimizer states are partitioned over the GPUs; parameters and gradients stay whole on each",
    ),
    2: _Guide(
        use_when="stage 1 barely fits or does not: gradients no longer need to be whole on each GPU",
        avoid_when="there is one GPU, or accumulation is long on a slow link: each micro-batch reduces gradients",
        moves="optimizer states and gradients are partitioned over the GPUs; parameters stay whole on each",
    ),
    3: _Guide(
        use_when="the parameters in training precision do not fit on one GPU, or stage 2 runs out of memory",
        avoid_when="a lower stage fits, or the link between the GPUs is slow: parameters are gathered for every pass",
        moves="parameters, gradients and optimizer states are partitioned; each layer is gathered when it is needed",
    ),
}
_OFFLOADS: Mapping[tuple[str, str], _Guide] = {
    ("cpu", "none"): _Guide(
        use_when="optimizer states are what does not fit, and the host has memory and cores to spare",
        avoid_when="it fits without: the optimizer step waits for the CPU and for the link to the host",
        moves="optimizer states live in host memory, where the CPU steps; gradients go there, parameters return",
    ),
    ("cpu", "cpu"): _Guide(
        use_when="not even the partitioned parameters fit, and the host has the memory",
        avoid_when="cpu_optimizer fits: parameters cross the link to the host for every forward and backward pass",
        moves="optimizer states and parameters live in host memory; layers come up when needed, gradients go down",
    ),
    ("nvme", "nvme"): _Guide(
        use_when="host memory does not hold the model states either, and there is a fast local NVMe disk",
        avoid_when="host memory suffices, or the disk is slow, shared or nearly full: it bounds every step",
        moves="optimizer states and parameters live on the disk and pass through host memory",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """About one strategy, for one model on so many GPUs. Bytes are per rank, model states only, by formula."""

    strategy: Strategy
    use_when: str
    avoid_when: str
    moves: str
    """What is partitioned, or moved where."""
    cost: str
    """What to expect it to cost, with bytes moved per optimizer step."""
    saving: str
    """The saving in words, with its number; that there is none, where there is none."""
    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    saving_bytes: int
    """On the device against ZeRO-0 on as many GPUs; negative where it needs more."""


def advise(strategy: Strategy, *, parameters: int, num_gpus: int, precision: Precision, grad_accum: int = 1) -> Advice:
    """The advice for a strategy of the catalogue. ``parameters``: elements of the whole model.

    Raises KeyError for a combination of offloads that the catalogue does not have.
    """
    offloads = strategy.offload_optimizer, strategy.offload_param
    stage = _STAGES[strategy.stage]
    guide = stage if offloads == ("none", "none") else _OFFLOADS[offloads]
    ledger = model_states(parameters, num_gpus, strategy, precision)
    held = {tier: sum(ledger.get(tier, {}).values()) for tier in ("gpu", "cpu", "nvme")}
    whole = sum(model_states(parameters, num_gpus, ZERO_STAGES[0], precision)["gpu"].values())
    return Advice(
        strategy=strategy,
        use_when=guide.use_when,
        avoid_when=guide.avoid_when,
        moves=guide.moves if guide is stage else f"{guide.moves}; at this stage {stage.moves}",
        cost=_cost(strategy, parameters, num_gpus, precision, grad_accum),
        saving=_saving(strategy, whole, held["gpu"], num_gpus),
        device_bytes=held["gpu"],
        host_bytes=held["cpu"],
        nvme_bytes=held["nvme"],
        saving_bytes=whole - held["gpu"],
    )


def lines(advice: Advice) -> list[str]:
    """For a console: the strategy, then one line for each thing to know."""
    return [
        advice.strategy.label,
        f"  use when: {advice.use_when}",
        f"  avoid when: {advice.avoid_when}",
        f"  moves: {advice.moves}",
        f"  saves: {advice.saving}",
        f"  costs: {advice.cost}",
    ]


def _saving(strategy: Strategy, whole: int, held: int, num_gpus: int) -> str:
    where = "on one GPU" if num_gpus == 1 else f"on each of {num_gpus} GPUs"
    if strategy.stage == 0:
        return f"nothing: {format_bytes(whole)} of model states {where}"
    if held == whole:
        return f"nothing {where}: {format_bytes(0)} of {format_bytes(whole)}, as there is nobody to partition with"
    both = f"{format_bytes(held)} against {format_bytes(whole)} at ZeRO-0"
    if held > whole:
        return f"nothing, it needs {format_bytes(held - whole)} more {where}: {both}"
    return f"{format_bytes(whole - held)} {where}: {both}"


def _cost(strategy: Strategy, parameters: int, num_gpus: int, precision: Precision, grad_accum: int) -> str:
    size = element_bytes(precision) * parameters
    found = []
    if num_gpus > 1:
        sent = _passes(strategy.stage, grad_accum) * size * (num_gpus - 1) // num_gpus
        found.append(f"≈ {format_bytes(sent)} through each GPU's links per optimizer step")
    if strategy.offloads_optimizer:
        share = -(-size // num_gpus)
        moved = share * (1 + _fetches(strategy, grad_accum))
        found.append(f"≥ {format_bytes(moved)} between GPU and host per rank and optimizer step, which runs on the CPU")
    if strategy.uses_nvme:
        states = model_states(parameters, num_gpus, strategy, precision).get("nvme", {}).get("optimizer_states", 0)
        found.append(f"{format_bytes(2 * states)} of optimizer states read and written per rank and step")
    return "; ".join(found) or "no traffic: there is one GPU and nothing is offloaded"


def _passes(stage: int, grad_accum: int) -> int:
    """Model-sizes sent per optimizer step; without accumulation 2, 2, 2, 3 (Rajbhandari et al., ZeRO, section 7).

    DeepSpeed reduces gradients once per optimizer step at stages 0 and 1, and after every micro-batch at 2 and 3.
    """
    return {0: 2, 1: 2, 2: grad_accum + 1, 3: 3 * grad_accum}[stage]


def _fetches(strategy: Strategy, grad_accum: int) -> int:
    """How often a rank's parameters come up: updated ones once, offloaded ones for forward and backward."""
    return 1 if strategy.offload_param == "none" else 2 * grad_accum


def pattern(
    fraction: float | None,
    *,
    goal: str = "balanced",
    num_gpus: int = 1,
    out_of_memory_stage: int | None = None,
) -> str | None:
    """The rule of thumb for this situation; None where the situation is not known.

    ``fraction``: of the card, taken by the fastest row without offload. ``out_of_memory_stage``: the highest stage
    without offload that ran out of device memory.
    """
    alone = num_gpus == 1
    tail = " (on one GPU stages 1 to 3 partition nothing)" if alone else ""
    if goal == "speed":
        return f"speed is critical: the lowest stage that fits{tail}"
    if goal == "memory":
        return f"memory is critical: stage 3 with offload, cpu_optimizer first, then cpu_full and nvme{tail}"
    if out_of_memory_stage is not None and (out_of_memory_stage >= 2 or alone):
        what = "offload, cpu_optimizer first" if alone or out_of_memory_stage == 3 else "stage 3, or offload"
        return f"stage {out_of_memory_stage} ran out of memory: {what}{tail}"
    return None if fraction is None else _by_fraction(fraction, alone, tail)


def _by_fraction(fraction: float, alone: bool, tail: str) -> str:
    share = f"{format_percent(fraction)} of the card"
    if fraction < COMFORTABLE:
        return f"fits comfortably ({share}): {'stage 0' if alone else 'stage 0 or 1'} is enough{tail}"
    if fraction < BARELY:
        return f"fits ({share}): keep the lowest stage that does{tail}"
    remedy = "--activation-checkpointing, a smaller micro-batch or cpu_optimizer" if alone else "stage 2"
    words = "barely fits" if fraction <= NEAR_CAPACITY else "is about to run out"
    return f"{words} ({share}): {remedy}{tail}"
