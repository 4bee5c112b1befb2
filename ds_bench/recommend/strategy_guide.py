"""When to use each strategy, what it moves where, and what it saves and costs for a model on a number of GPUs.

Bytes are computed by formula for AdamW (``prediction.model_states``), per rank and without activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..config.spec import Configuration, Precision
from ..config.strategies import ZERO_STAGES, make_configuration
from ..prediction.communication import times_sent
from ..prediction.model_states import FP32_BYTES, element_bytes, model_states
from ..units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guidance:
    """Text about one strategy."""

    use_when: str
    avoid_when: str
    moves: str


_STAGES: Mapping[int, _Guidance] = {
    0: _Guidance(
        use_when="the whole model with its optimizer states fits on each GPU with room to spare",
        avoid_when="model states fill the card: every GPU holds all of them",
        moves="nothing is partitioned; gradients are all-reduced once per optimizer step",
    ),
    1: _Guidance(
        use_when="there are two GPUs or more and optimizer states are what fills the card",
        avoid_when="there is one GPU, or gradients and parameters alone do not fit",
        moves="optimizer states are partitioned over the GPUs; parameters and gradients stay whole on each",
    ),
    2: _Guidance(
        use_when="stage 1 barely fits or does not: gradients no longer need to be whole on each GPU",
        avoid_when="there is one GPU, or accumulation is long on a slow link: each micro-batch reduces gradients",
        moves="optimizer states and gradients are partitioned over the GPUs; parameters stay whole on each",
    ),
    3: _Guidance(
        use_when="the parameters in training precision do not fit on one GPU, or stage 2 runs out of memory",
        avoid_when="a lower stage fits, or the link between the GPUs is slow: parameters are gathered for every pass",
        moves="parameters, gradients and optimizer states are partitioned; each layer is gathered when it is needed",
    ),
}
_REFERENCES: Mapping[str, _Guidance] = {
    "ddp": _Guidance(
        use_when="you want to know what DeepSpeed's stage 0 costs or gains against plain torch",
        avoid_when="model states fill the card: every GPU holds all of them",
        moves="nothing is partitioned; fp32 gradients are all-reduced in buckets while backward runs",
    ),
    "fsdp2": _Guidance(
        use_when="you choose between ZeRO-3 and torch's own sharding: a reference, no DeepSpeed configuration",
        avoid_when="a lower stage fits, or offload is needed",
        moves="fp32 parameters, gradients and optimizer states are partitioned; each block is gathered when needed",
    ),
}
_OFFLOADS: Mapping[tuple[str, str], _Guidance] = {
    ("cpu", "none"): _Guidance(
        use_when="optimizer states are what does not fit, and the host has memory and cores to spare",
        avoid_when="it fits without: the optimizer step waits for the CPU and for the link to the host",
        moves="optimizer states live in host memory, where the CPU steps; gradients go there, parameters return",
    ),
    ("cpu", "cpu"): _Guidance(
        use_when="not even the partitioned parameters fit, and the host has the memory",
        avoid_when="cpu_optimizer fits: parameters cross the link to the host for every forward and backward pass",
        moves="optimizer states and parameters live in host memory; layers come up when needed, gradients go down",
    ),
    ("none", "cpu"): _Guidance(
        use_when="the partitioned parameters do not fit beside the optimizer states, and the host has the memory",
        avoid_when="it fits without: parameters cross the link to the host for every forward and backward pass",
        moves="parameters live in host memory and come up when needed; optimizer states stay on the GPUs",
    ),
    ("nvme", "none"): _Guidance(
        use_when="host memory does not hold the optimizer states, and there is a fast local NVMe disk",
        avoid_when="host memory suffices, or the disk is slow, shared or nearly full: it bounds every step",
        moves="optimizer states live on the disk and pass through host memory; parameters stay on the GPUs",
    ),
    ("nvme", "nvme"): _Guidance(
        use_when="host memory does not hold the model states either, and there is a fast local NVMe disk",
        avoid_when="host memory suffices, or the disk is slow, shared or nearly full: it bounds every step",
        moves="optimizer states and parameters live on the disk and pass through host memory",
    ),
}


_PLACES = {
    "none": "stay on the GPUs",
    "cpu": "live in host memory",
    "nvme": "live on the disk and pass through host memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyAdvice:
    """About one strategy, for one model on so many GPUs. Bytes are per rank, model states only, by formula."""

    configuration: Configuration
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


def advise(
    configuration: Configuration, *, parameters: int, num_gpus: int, precision: Precision, grad_accum: int = 1
) -> StrategyAdvice:
    """The advice for a configuration. ``parameters``: elements of the whole model."""
    offloads = configuration.layout[1:]
    stage = _REFERENCES[configuration.engine] if configuration.is_reference else _STAGES[configuration.stage]
    # Files may also keep parameters alone on the disk, or one part there and one in host memory.
    rare = "optimizer states {}; parameters {}".format(*(_PLACES[device] for device in offloads))
    guide = _OFFLOADS.get(offloads, replace(_OFFLOADS["nvme", "nvme"], moves=rare))
    guide = stage if offloads == ("none", "none") else guide
    ledger = model_states(parameters, num_gpus, configuration, precision)
    bytes_by_tier = {tier: sum(ledger.get(tier, {}).values()) for tier in ("gpu", "cpu", "nvme")}
    whole = sum(model_states(parameters, num_gpus, make_configuration(ZERO_STAGES[0]), precision)["gpu"].values())
    return StrategyAdvice(
        configuration=configuration,
        use_when=guide.use_when,
        avoid_when=guide.avoid_when,
        moves=guide.moves if guide is stage else f"{guide.moves}; at this stage {stage.moves}",
        cost=traffic_text(configuration, parameters, num_gpus, precision, grad_accum),
        saving=_saving_text(configuration, whole, bytes_by_tier["gpu"], num_gpus),
        device_bytes=bytes_by_tier["gpu"],
        host_bytes=bytes_by_tier["cpu"],
        nvme_bytes=bytes_by_tier["nvme"],
        saving_bytes=whole - bytes_by_tier["gpu"],
    )


def advice_lines(advice: StrategyAdvice) -> list[str]:
    """For a console: the strategy, then one line for each thing to know."""
    return [
        advice.configuration.label,
        f"  use when: {advice.use_when}",
        f"  avoid when: {advice.avoid_when}",
        f"  moves: {advice.moves}",
        f"  saves: {advice.saving}",
        f"  costs: {advice.cost}",
    ]


def _saving_text(configuration: Configuration, whole: int, held: int, num_gpus: int) -> str:
    where = "on one GPU" if num_gpus == 1 else f"on each of {num_gpus} GPUs"
    if configuration.stage == 0:
        return f"nothing: {format_bytes(whole)} of model states {where}"
    if held == whole:
        return f"nothing {where}: {format_bytes(0)} of {format_bytes(whole)}, as there is nobody to partition with"
    both = f"{format_bytes(held)} against {format_bytes(whole)} at ZeRO-0"
    if held > whole:
        return f"nothing, it needs {format_bytes(held - whole)} more {where}: {both}"
    return f"{format_bytes(whole - held)} {where}: {both}"


def traffic_text(
    configuration: Configuration,
    parameters: int,
    num_gpus: int,
    precision: Precision,
    grad_accum: int,
    trained: int | None = None,
) -> str:
    """What a configuration moves per optimizer step, by formula: ``≈ 7.62 GB through each GPU's links …``.

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
    if configuration.offloads_optimizer:
        # A rank's parameters are copied to the GPU once after the step, offloaded ones in each pass.
        copies = 1 if configuration.offload_param == "none" else 2 * grad_accum
        held = trained if configuration.offload_param == "none" else parameters
        moved = -(-size * (trained + copies * held) // num_gpus)
        costs.append(f"≥ {format_bytes(moved)} between GPU and host per rank and optimizer step, which runs on the CPU")
    if configuration.uses_nvme:
        states = model_states(trained, num_gpus, configuration, precision).get("nvme", {}).get("optimizer_states", 0)
        # Each state is read from the disk and written back.
        costs.append(f"{format_bytes(2 * states)} of optimizer states read and written per rank and step")
    return "; ".join(costs) or "no traffic: there is one GPU and nothing is offloaded"
