"""When to use each strategy, what it saves and costs for a model and number of GPUs, and rules of thumb for the stage.

Bytes are computed by formula for AdamW (``prediction.model_states``), per rank and without activations. The rules of
thumb look only at the user's priority and at how full a card is, and hold for any model; ``remedies`` has predictions
for a given one.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config.spec import Configuration, Precision
from ..config.strategies import ZERO_STAGES, make_configuration
from ..prediction.inputs import times_sent
from ..prediction.model_states import FP32_BYTES, element_bytes, model_states
from ..units import format_bytes, format_percent
from .decision import COMFORTABLE_FRACTION

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
        "there is one GPU, or many micro-batches are accumulated over a slow link: each of them reduces gradients",
        "optimizer states and gradients are partitioned over the GPUs; parameters stay whole on each",
    ),
    3: (
        "the parameters in training precision do not fit on one GPU, or stage 2 runs out of memory",
        "a lower stage fits, or the link between the GPUs is slow: each pass waits for parameters that it gathers",
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
        "a ZeRO stage below 3 fits, or offload is needed",
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
        "the optimizer alone can be offloaded: parameters cross the link to the host for every forward and backward "
        "pass",
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
        extra = f"nothing; it needs {format_bytes(held - whole)} more" if held > whole else format_bytes(whole - held)
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
    configuration: Configuration, parameters: int, num_gpus: int, precision: Precision, grad_accum: int
) -> str:
    """Return the traffic of a configuration per optimizer step, by formula: ``≈ 7.62 GB through each GPU's links``."""
    # Gradients of DDP are fp32.
    size = FP32_BYTES if configuration.engine == "ddp" else element_bytes(precision)
    costs = []
    if num_gpus > 1:
        gathered, updated = times_sent(configuration, parameters, grad_accum)
        # A rank passes on (n - 1) / n of the bytes (Patarasuk and Yuan, 2009).
        sent = size * (gathered + updated) * parameters * (num_gpus - 1) // num_gpus
        costs.append(f"≈ {format_bytes(sent)} through each GPU's links per optimizer step")
    if configuration.offloads:
        # Parameters go up to the GPU once after a step on the CPU, or in each pass if offloaded; gradients go down.
        steps_there = configuration.offloads_optimizer
        held = parameters if configuration.offload_param == "none" else 2 * grad_accum * parameters
        moved = format_bytes(-(-size * ((parameters if steps_there else 0) + held) // num_gpus))
        where = ", which runs on the CPU" if steps_there else ""
        costs.append(f"≥ {moved} between GPU and host per rank in each optimizer step{where}")
    states = model_states(parameters, num_gpus, configuration, precision).get("nvme", {}).get("optimizer_states", 0)
    if states:
        # Each state is read from the disk and written back.
        costs.append(f"{format_bytes(2 * states)} of optimizer states read and written per rank in each step")
    return "; ".join(costs) or "no traffic: there is one GPU and nothing is offloaded"


# ------------------------------------------------------------------ rules of thumb


_COMFORTABLE = format_percent(COMFORTABLE_FRACTION, digits=0)
RULES = {
    "speed is critical": "the lowest stage that fits",
    "memory is critical": "stage 3 with offload",
    "out of memory at stage 2": "stage 3, or offload",
    f"fits comfortably (under {_COMFORTABLE} of the card)": "stage 0 or 1",
    "barely fits (80 % of the card or more)": "stage 2",
}
"""What a run shows → the strategy to choose."""


def general_lines(num_gpus: int) -> list[str]:
    """Return the rules for any model, for use before anything has been measured."""
    lines = ["Rules of thumb:", *(f"  {when}: {then}" for when, then in RULES.items())]
    if num_gpus == 1:
        lines += [
            "On one GPU stages 1 to 3 partition nothing: instead of a higher stage use activation checkpointing, a",
            "smaller micro-batch or offload.",
        ]
    return lines
