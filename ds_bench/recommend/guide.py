"""When to use each strategy, what it saves and costs for a model on a number of GPUs, and rules of thumb for the stage.

Bytes are computed by formula for AdamW (``prediction.model_states``), per rank and without activations. The rules of
thumb hold for any model, by how full a card is; ``remedies`` has what is predicted for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..analysis.comparison import Comparison
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..config.spec import Configuration, Precision
from ..config.strategies import OFFLOAD_NAMES, ZERO_STAGES, make_configuration
from ..prediction.inputs import times_sent
from ..prediction.model_states import FP32_BYTES, element_bytes, model_states
from ..records.schema import OOM
from ..units import format_bytes, format_percent
from .decision import COMFORTABLE_FRACTION, ON_HOST, RAN_OUT, EligibleRows, Speeds, decide_for_speed, intervals
from .remedies import failed_run
from .words import Fact, format_list

BARELY_FITS_FRACTION = 0.80
"""A configuration that uses more than this fraction of the card barely fits."""


_Texts = tuple[str, str, str]
"""When to use a strategy, when to avoid it, and what it moves where."""
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
        "you choose between ZeRO-3 and torch's own sharding: a reference, no DeepSpeed configuration",
        "a lower stage fits, or offload is needed",
        "fp32 parameters, gradients and optimizer states are partitioned; each block is gathered when needed",
    ),
}
_OFFLOADS: Mapping[tuple[str, str], _Texts] = {
    ("cpu", "none"): (
        "optimizer states are what does not fit, and the host has memory and cores to spare",
        "it fits without: the optimizer step waits for the CPU and for the link to the host",
        "optimizer states live in host memory, where the CPU steps; gradients go there, parameters return",
    ),
    ("cpu", "cpu"): (
        "not even the partitioned parameters fit, and the host has the memory",
        "cpu_optimizer fits: parameters cross the link to the host for every forward and backward pass",
        "optimizer states and parameters live in host memory; layers come up when needed, gradients go down",
    ),
    ("none", "cpu"): (
        "the partitioned parameters do not fit next to the optimizer states, and the host has the memory",
        "it fits without: parameters cross the link to the host for every forward and backward pass",
        "parameters live in host memory and come up when needed; optimizer states stay on the GPUs",
    ),
    ("nvme", "none"): (
        "host memory does not hold the optimizer states, and there is a fast local NVMe disk",
        "host memory suffices, or the disk is slow, shared or nearly full: it bounds every step",
        "optimizer states live on the disk and pass through host memory; parameters stay on the GPUs",
    ),
    ("nvme", "nvme"): (
        "host memory does not hold the model states either, and there is a fast local NVMe disk",
        "host memory suffices, or the disk is slow, shared or nearly full: it bounds every step",
        "optimizer states and parameters live on the disk and pass through host memory",
    ),
}
# fmt: on
_PLACES = {
    "none": "stay on the GPUs",
    "cpu": "live in host memory",
    "nvme": "live on the disk and pass through host memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyAdvice:
    """Advice on one strategy, for one model on a number of GPUs. Bytes are model states of one rank, by formula."""

    label: str
    use_when: str
    avoid_when: str
    moves: str
    """The tensors that are partitioned or moved, and where to."""
    saving: str
    """Memory saved against ZeRO-0 on as many GPUs."""
    cost: str
    """Bytes moved per optimizer step."""
    bytes_by_tier: Mapping[str, int]
    """``gpu``, ``cpu`` and ``nvme`` → bytes."""
    saving_bytes: int
    """GPU memory saved against ZeRO-0; negative if it needs more."""

    @property
    def lines(self) -> list[str]:
        """For a console: the strategy, then one line for each thing to know."""
        return [
            self.label,
            f"  use when: {self.use_when}",
            f"  avoid when: {self.avoid_when}",
            f"  moves: {self.moves}",
            f"  saves: {self.saving}",
            f"  costs: {self.cost}",
        ]


def advise(
    configuration: Configuration, *, parameters: int, num_gpus: int, precision: Precision, grad_accum: int = 1
) -> StrategyAdvice:
    """Return the advice on a configuration. ``parameters``: elements of the whole model."""
    offloads = configuration.layout[1:]
    stage = _REFERENCES[configuration.engine] if configuration.is_reference else _STAGES[configuration.stage]
    if offloads == ("none", "none"):
        use_when, avoid_when, moves = stage
    else:
        # Files may also keep only the parameters on the disk, or one part there and one in host memory.
        rare = "optimizer states {}; parameters {}".format(*(_PLACES[device] for device in offloads))
        use_when, avoid_when, moves = _OFFLOADS.get(offloads, (*_OFFLOADS["nvme", "nvme"][:2], rare))
        moves = f"{moves}; at this stage {stage[2]}"
    ledger = model_states(parameters, num_gpus, configuration, precision)
    bytes_by_tier = {tier: sum(ledger.get(tier, {}).values()) for tier in ("gpu", "cpu", "nvme")}
    held = bytes_by_tier["gpu"]
    whole = sum(model_states(parameters, num_gpus, make_configuration(ZERO_STAGES[0]), precision)["gpu"].values())
    where = "on one GPU" if num_gpus == 1 else f"on each of {num_gpus} GPUs"
    both = f"{where}: {format_bytes(held)} against {format_bytes(whole)} at ZeRO-0"
    if configuration.stage == 0:
        saving = f"nothing: {format_bytes(whole)} of model states {where}"
    elif held == whole:
        saving = f"nothing {where}: {format_bytes(0)} of {format_bytes(whole)}; one GPU has nothing to partition"
    else:
        extra = f"nothing, it needs {format_bytes(held - whole)} more" if held > whole else format_bytes(whole - held)
        saving = f"{extra} {both}"
    return StrategyAdvice(
        label=configuration.label,
        use_when=use_when,
        avoid_when=avoid_when,
        moves=moves,
        saving=saving,
        cost=traffic_text(configuration, parameters, num_gpus, precision, grad_accum),
        bytes_by_tier=bytes_by_tier,
        saving_bytes=whole - held,
    )


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


# ------------------------------------------------------------------ rules of thumb


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStages:
    """How the rows without offload ended, by stage, and which offload strategies failed."""

    fastest: int | None = None
    """Stage of the fastest row that trained; None if no row trained."""
    label: str | None = None
    """Label of that row; None names it by its stage."""
    fraction: float | None = None
    """Fraction of the GPU that it used; None if unknown, or if its micro-batch fills the GPU on purpose."""
    trained: frozenset[int] = frozenset()
    """Stages that trained with GPU memory left."""
    full: frozenset[int] = frozenset()
    """Stages that trained but left too little GPU memory; never suggested."""
    out_of_memory: frozenset[int] = frozenset()
    """Stages that ran out of device memory; never suggested unless another row of the stage trained."""
    failed_offloads: frozenset[str] = frozenset()
    """Offload strategies that ran out of memory or disk."""

    @property
    def failed(self) -> frozenset[int]:
        """Stages without a row that trained."""
        return self.out_of_memory - self.trained - {self.fastest}

    @property
    def offloads(self) -> list[str]:
        """Offload strategies that have not failed, the one that moves least first."""
        return [name for name in OFFLOAD_NAMES[1:] if name not in self.failed_offloads]

    def next_stage(self, above: int) -> int | None:
        """Return the lowest higher stage that has not failed and is not too full."""
        return next((stage for stage in range(above + 1, 4) if stage not in self.failed | self.full), None)


def rule_for(comparison: Comparison, eligible: EligibleRows, goal: str) -> Fact | None:
    """Return the rule of thumb for a comparison; None if no rule applies, as on the CPU accelerator."""
    rows = [row for row in comparison.rows if not row.differences and not row.configuration.is_reference]
    without_offload = [row for row in rows if not row.configuration.offloads_optimizer]
    if not without_offload or eligible.terms is ON_HOST:
        return None
    candidates = [each for each in eligible.candidates if each.offload_level[0] == "none"]
    # For speed the rule names a row to use, which must leave room; otherwise it says how full the fastest is.
    compared = [each for each in candidates if each.fits] if goal == "speed" else candidates
    best = None
    if compared:
        best = decide_for_speed(Speeds(candidates=compared, interval_of=intervals(comparison))).simplest_tied
    trained = frozenset(each.stage for each in candidates if each.fits)
    failed = [(row.configuration, run.outcome.status) for row in rows if (run := failed_run(row))]
    observed = ObservedStages(
        fastest=None if best is None else best.stage,
        label=None if best is None else best.label,
        fraction=None if best is None or best.fills_memory else best.fraction,
        trained=trained,
        full=frozenset(each.stage for each in candidates) - trained,
        out_of_memory=frozenset(each.stage for each, status in failed if status == OOM and not each.offloads_optimizer),
        failed_offloads=frozenset(
            each.name for each, status in failed if status in RAN_OUT and each.offloads_optimizer
        ),
    )
    text = rule_of_thumb(observed, goal=goal, num_gpus=without_offload[0].trial.placement.num_gpus)
    return None if text is None else Fact("rule", {"text": text})


def rule_of_thumb(stages: ObservedStages, *, goal: str = "balanced", num_gpus: int = 1) -> str | None:
    """Return the rule of thumb that applies, if one does."""
    if goal == "speed":
        text: str | None = "speed is critical: the lowest stage that fits"
        if stages.fastest is not None and any(stage < stages.fastest for stage in stages.trained):
            # Not "the fastest": a higher stage may tie with it and have been ahead within the noise.
            text = f"speed is critical: stage {stages.fastest}, the lowest that is tied with the fastest"
    elif goal == "memory":
        then = f" first, then {format_list(stages.offloads[1:])}" if stages.offloads[1:] else ""
        text = f"memory is critical: stage 3 with offload, {stages.offloads[0]}{then}" if stages.offloads else None
    else:
        text = _balanced_rule(stages, one_gpu=num_gpus == 1)
    return f"{text} (on one GPU stages 1 to 3 partition nothing)" if text and num_gpus == 1 else text


def _balanced_rule(stages: ObservedStages, *, one_gpu: bool) -> str | None:
    highest, fastest, fraction = max(stages.failed, default=None), stages.fastest, stages.fraction
    offload = f"offload, {stages.offloads[0]} first" if stages.offloads else None
    if highest is not None and (fastest is None or (not one_gpu and 2 <= highest < fastest)):
        stage = None if one_gpu else stages.next_stage(highest)
        remedy = offload if stage is None else f"stage {stage}, or offload"
        return f"stage {highest} ran out of memory: {remedy}" if remedy else None
    if fastest is None or fraction is None or COMFORTABLE_FRACTION <= fraction < BARELY_FITS_FRACTION:
        return None
    row, share = stages.label or f"ZeRO-{fastest}", f"{format_percent(fraction)} of the card"
    if fraction < COMFORTABLE_FRACTION:
        if fastest == 0 and not one_gpu and 1 not in stages.failed:
            return f"{row} fits comfortably ({share}): stage 0 or 1 is enough"
        stage = 0 if one_gpu and 0 not in stages.failed else fastest
        lower = [str(failed) for failed in sorted(stages.failed) if failed < stage]
        reason = f"; stage{'s'[: len(lower) > 1]} {format_list(lower)} ran out of memory" if lower else ""
        return f"{row} fits comfortably ({share}): stage {stage} is enough{reason}"
    # Stage 2 at least, which docs/choosing.md names for a row that barely fits.
    higher = stages.next_stage(max(fastest, 1))
    remedy = offload if higher is None else f"stage {higher}"
    if one_gpu:
        *others, last = ["--activation-checkpointing", "a smaller micro-batch", *stages.offloads[:1]]
        remedy = f"{', '.join(others)} or {last}"
    verdict = "barely fits" if fraction <= NEAR_CAPACITY else "is about to run out of memory"
    return f"{row} {verdict} ({share}): {remedy}" if remedy else None


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
            "On one GPU stages 1 to 3 partition nothing: instead of a higher stage use activation checkpointing, a",
            "smaller micro-batch or offload.",
        ]
    return lines
