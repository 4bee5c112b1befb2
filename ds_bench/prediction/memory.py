"""Predicts, without running anything, how many bytes a trial takes per GPU, per node's host memory and on NVMe.

Model states and DeepSpeed's buffers follow DeepSpeed's code (``stages_0_to_2``, ``stage_3``), activations were measured
(``model_profile``). Two terms are assumptions: the memory of the CUDA context and NCCL outside torch's allocator, and
that of a process for its libraries. What would make a trial fit is in ``what_if``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from ..config.deepspeed_config import PRECISION_BLOCKS, is_deepcompiled, sequence_parallel_size
from ..config.spec import Engine, Placement, Precision, Workload, block_of
from ..records.schema import Tier
from ..units import from_gb
from . import reference_engines, stage_3, stages_0_to_2
from .inputs import MemoryInputs, Phases, ZeroSettings
from .model_profile import ModelProfile, variant_of
from .model_states import FP32_BYTES, Ledger, LedgerBuilder

CONTEXT_BYTES = from_gb(0.75)
"""Assumed per GPU: CUDA context and kernels, outside torch's allocator."""
_WORKSPACES = 2
"""Of cuBLAS, which torch's allocator holds: one for each thread that uses it, that of forward and that of backward
(aten/src/ATen/cuda/CublasHandlePool.cpp)."""
_WORKSPACE_BYTES, _HOPPER_WORKSPACE_BYTES = 8_519_680, 32 * 2**20
"""Of one: 8.125 MiB, but on GPUs of compute capability 9."""
NCCL_BYTES = from_gb(1.2)
"""Assumed per GPU if there are several: channels and buffers of one NCCL communicator. It depends on the number of
ranks, their links and NCCL's version."""
NCCL_RANGE_BYTES = from_gb(0.7), from_gb(1.6)
"""Range that users have reported per communicator; ``NCCL_BYTES`` is in the middle."""
PROCESS_BYTES = from_gb(1.5)
"""Assumed host memory per rank of a GPU job: Python, torch and CUDA's libraries before the model is built."""
CPU_PROCESS_BYTES = from_gb(0.4)
"""Assumed host memory per rank on the CPU accelerator, without CUDA's libraries; measured in runs."""
CPU_PROCESS_DATA_BYTES = from_gb(0.6)
"""Likewise under ``--cpu-memory-limit``, which also counts memory that is mapped and not touched, or kept by malloc."""
TIGHT_FRACTION = 0.9
"""A prediction above this share of the memory is ``tight``: fragmentation and what a layer needs while it runs are not
in the prediction."""

FITS, TIGHT, DOES_NOT_FIT, UNKNOWN = "fits", "tight", "does not fit", "not known"

UNCOUNTED = ("temporaries", "gathered_parameters", "logits_and_loss", "pinned_rounding", "workspaces", "overhead")
"""Categories that the ledger of a run does not hold: temporary tensors, and memory outside tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another configuration of the same work: the memory it leads to, whatever the machine has."""

    settings: Mapping[str, Any]
    """What changes (``what_if.Settings``)."""
    rank: int
    """Position in the order of cost, 0 for the change that costs least."""
    gpu_bytes: int
    host_bytes: int
    """Per node."""
    layout: tuple[int, str, str]
    """Stage and both offload devices afterwards, as ``Configuration.layout``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What one named change of a configuration would save at the fullest moment, alone."""

    name: str
    """``small_buffers`` (a value of the axis ``buffers``), ``activation checkpointing``, ``optimizer offload``."""
    changes: Mapping[str, Any]
    """Key path, or field of the workload → its value after the change."""
    gpu_bytes: int
    """Per GPU; 0 on the CPU accelerator."""
    host_bytes: int
    """Per node; negative where the change moves bytes to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted memory of one trial, of the rank with the most."""

    gpu: Mapping[str, int]
    """Category → bytes per GPU at its fullest moment; empty on the CPU accelerator."""
    host: Mapping[str, int]
    """Category → bytes of one node's host memory at its fullest moment."""
    nvme: Mapping[str, int]
    """Category → bytes of one node's swap files."""
    phase: str
    """The fullest moment on the GPU (of host memory on the CPU accelerator): ``loss`` (all activations, logits and
    their temporaries), ``enter`` and ``leave`` (backward at the last and at the first layer), ``reduce``, ``flatten``,
    ``update``, or ``build`` where every rank builds the model whole."""
    ledger: Mapping[str, Mapping[str, int]]
    """Tier → category → bytes of one rank, comparable with ``RankMeasurement.ledger``."""
    activation_bytes: int | None
    """Saved for backward per GPU without activation checkpointing; None where they are not known."""
    checkpointed_activation_bytes: int | None
    """Likewise with it; None also for a model that cannot checkpoint."""
    logits_and_loss_bytes: int | None
    """Temporaries of logits and loss per GPU, beside the activations; None where they are not known."""
    unknown: str | None = None
    """Why activations, logits and loss are not in the figures; None where they are."""
    alternatives: tuple[Alternative, ...] = ()
    """For advice after the run; ``what_if`` finds them."""
    savings: tuple[Saving, ...] = ()
    """For explanations after the run; ``what_if`` finds them."""

    @property
    def gpu_bytes(self) -> int:
        """Per GPU, everything at the fullest moment."""
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> int:
        """Per node."""
        return sum(self.host.values())

    @property
    def nvme_bytes(self) -> int:
        """Per node."""
        return sum(self.nvme.values())

    def in_tier(self, tier: Tier) -> Mapping[str, int]:
        """Category → bytes in a tier of the ledger: per GPU, or per node in ``cpu`` and ``nvme``."""
        return {"gpu": self.gpu, "cpu": self.host, "nvme": self.nvme}[tier]

    def biggest_in(self, tier: str) -> tuple[str, int]:
        """The category that takes most of the ``gpu`` or of the ``host``, and its bytes."""
        row = self.gpu if tier == "gpu" else self.host
        return max(row.items(), key=lambda item: item[1])

    def decisive_tiers(self, gpu_capacity_bytes: int | None, host_capacity_bytes: int | None = None) -> tuple[str, ...]:
        """Of ``gpu`` and ``host`` those that alone would give the verdict; none where it ``fits``."""
        verdict = self.verdict(gpu_capacity_bytes, host_capacity_bytes)
        alone = {"gpu": self.verdict(gpu_capacity_bytes), "host": self.verdict(None, host_capacity_bytes)}
        return tuple(tier for tier, found in alone.items() if found == verdict != FITS)

    def verdict(self, gpu_capacity_bytes: int | None, host_capacity_bytes: int | None = None) -> str:
        """``fits``, ``tight`` (above 90 %) or ``does not fit``, by the worse of the two; a capacity of None is none.

        ``not known`` where what is known would fit, and activations are not known.
        """
        shares = [
            used / capacity
            for used, capacity in ((self.gpu_bytes, gpu_capacity_bytes), (self.host_bytes, host_capacity_bytes))
            if capacity is not None
        ]
        share = max(shares, default=0.0)
        # Activations that are not known could still decide, unless the rest is too much already.
        if share <= 1 and self.unknown is not None:
            return UNKNOWN
        return DOES_NOT_FIT if share > 1 else TIGHT if share > TIGHT_FRACTION else FITS

    def to_dict(self) -> dict[str, Any]:
        """Converts to JSON values, which ``trial_predictions.stored_prediction`` reads."""
        return asdict(self)


def predict(
    profile: ModelProfile,
    workload: Workload,
    placement: Placement,
    ds_config: Mapping[str, Any],
    *,
    engine: Engine = "deepspeed",
    ranks_per_node: int | None = None,
) -> Prediction:
    """Predicts the memory of a trial. Micro-batch, accumulation and precision of ``ds_config`` override the workload's.

    ``ranks_per_node``: None if all ranks are on one node.
    """
    inputs = _make_inputs(profile, workload, placement, ds_config, engine)
    sizes = _activations(inputs, workload, ds_config)
    moments = _moments(inputs, sizes)
    if placement.accelerator == "cpu":
        moments = {name: _as_host_memory(ledger) for name, ledger in moments.items()}
    tier = "cpu" if placement.accelerator == "cpu" else "gpu"

    def fullest_moment() -> str:
        return max(moments, key=lambda name: sum(moments[name].get(tier, {}).values()))

    ledger, in_step = _largest_by_category(moments), fullest_moment()  # as in a run, whose ledger is counted in a step
    moments |= _build_moment(inputs, workload)
    phase = fullest_moment()
    overhead = CONTEXT_BYTES + (NCCL_BYTES if placement.num_gpus > 1 else 0)
    cpu_process = CPU_PROCESS_BYTES if placement.cpu_memory_limit_bytes is None else CPU_PROCESS_DATA_BYTES
    process = cpu_process if tier == "cpu" else PROCESS_BYTES
    ranks = min(placement.num_gpus, ranks_per_node or placement.num_gpus)
    # The host may be fullest at another moment than the GPU.
    fullest_host = max((ledger.get("cpu", {}) for ledger in moments.values()), key=lambda row: sum(row.values()))
    # The ledger of a run counts as activations what its forward pass saved (worker/measure.py), not what is left later.
    if sizes.unknown is None:
        ledger.setdefault(tier, {})["activations"] = sizes.saved
    return Prediction(
        gpu={} if tier == "cpu" else {**moments[phase]["gpu"], **_workspaces(placement, phase), "overhead": overhead},
        host={name: ranks * size for name, size in {**fullest_host, "overhead": process}.items()},
        nvme={name: ranks * size for name, size in moments[in_step].get("nvme", {}).items()},
        phase=phase,
        ledger=ledger,
        activation_bytes=None if sizes.unknown else sizes.plain,
        checkpointed_activation_bytes=sizes.checkpointed,
        logits_and_loss_bytes=None if sizes.unknown else sizes.logits_and_loss,
        unknown=sizes.unknown,
    )


def gpu_bytes_by_moment(
    profile: ModelProfile,
    workload: Workload,
    placement: Placement,
    ds_config: Mapping[str, Any],
    *,
    engine: Engine = "deepspeed",
) -> dict[str, Mapping[str, int]]:
    """Moment (``Prediction.phase``) → category → bytes per GPU, without ``workspaces`` and ``overhead``.

    Empty where nothing is on the GPU. ``Prediction.gpu`` has the fullest of them. For a GPU, not the CPU accelerator.
    """
    inputs = _make_inputs(profile, workload, placement, ds_config, engine)
    moments = _moments(inputs, _activations(inputs, workload, ds_config))
    return {moment: ledger.get("gpu", {}) for moment, ledger in moments.items()}


def _workspaces(placement: Placement, phase: str) -> dict[str, int]:
    """None while the model is built, before the first matrix product."""
    on_hopper = placement.compute_capability is not None and placement.compute_capability[0] == 9
    size = _HOPPER_WORKSPACE_BYTES if on_hopper else _WORKSPACE_BYTES
    return {} if phase == "build" else {"workspaces": _WORKSPACES * size}


@lru_cache(maxsize=512)
def _phases(inputs: MemoryInputs) -> Phases:
    """One rank's ledgers without activations; cached for searches over micro-batches, so do not modify them."""
    if inputs.engine != "deepspeed" or inputs.pass_type != "train":
        return reference_engines.ledger_by_phase(inputs)
    return stage_3.ledger_by_phase(inputs) if inputs.settings.stage == 3 else stages_0_to_2.ledger_by_phase(inputs)


def _with_frozen(inputs: MemoryInputs, ledger: Ledger) -> Ledger:
    """Adds parameters that are not trained, which every rank holds whole: below stage 3, and with DDP."""
    if inputs.settings.stage == 3 or inputs.engine == "fsdp2":
        return ledger
    # DDP trains fp32 weights in every precision; what is frozen is fp32 with them.
    element = inputs.element if inputs.engine == "deepspeed" else FP32_BYTES
    return LedgerBuilder(ledger).plus(parameters=element * inputs.profile.frozen_parameters)


def _make_inputs(
    profile: ModelProfile,
    workload: Workload,
    placement: Placement,
    ds_config: Mapping[str, Any],
    engine: Engine = "deepspeed",
) -> MemoryInputs:
    return MemoryInputs(
        profile=profile.for_variant(variant_of(workload, ds_config, engine)),
        precision=_precision(workload, ds_config),
        data_parallel_size=placement.num_gpus,
        grad_accum=int(ds_config.get("gradient_accumulation_steps", workload.grad_accum)),
        accelerator=placement.accelerator,
        settings=ZeroSettings.from_config(ds_config),
        engine=engine,
        pass_type=workload.pass_type,
    )


def _precision(workload: Workload, ds_config: Mapping[str, Any]) -> Precision:
    if block_of(ds_config, "bf16").get("enabled"):
        return "bf16"
    if block_of(ds_config, "fp16").get("enabled"):
        return "fp16"
    # Under torch_autocast alone, parameters are in fp32.
    # A block that is present but not enabled means fp32 too: ``complete_config`` adds none beside it.
    return "fp32" if any(name in ds_config for name in PRECISION_BLOCKS) else workload.precision


@dataclass(frozen=True, slots=True, kw_only=True)
class _Activations:
    """Bytes of the activations of one micro-batch on one rank; 0 if they are not known."""

    plain: int = 0
    checkpointed: int | None = None
    saved: int = 0
    """``checkpointed`` or ``plain``, as the workload trains."""
    logits_and_loss: int = 0
    layers: int = 0
    """The part of ``saved`` that the layers hold while backward runs through the last of them."""
    one_layer: int = 0
    """Of one layer without checkpointing: what exists while a layer is recomputed, or the first is left."""
    unknown: str | None = None

    @classmethod
    def for_batch(cls, inputs: MemoryInputs, batch: int, sequence: int, *, checkpointed: bool) -> _Activations:
        efficient_linear = inputs.settings.efficient_linear and inputs.engine == "deepspeed"
        measured = inputs.profile.activations_in(inputs.precision, efficient_linear=efficient_linear)
        layers = inputs.profile.layers
        if inputs.settings.autocast and inputs.settings.stage == 3 and inputs.engine == "deepspeed":
            return cls(unknown="torch_autocast at stage 3 gathers weights in 16 bit, which was not measured")
        if measured is None:
            return cls(unknown=inputs.profile.unknown or f"not measured in {inputs.precision}")
        saved = measured.checkpointed if checkpointed else measured.plain
        if saved is None:
            return cls(unknown="this model has no activation checkpointing")
        largest = measured.largest_layer
        # The largest layer is fitted as one block of the whole model: all its bytes are in the fixed terms.
        one_layer = largest.fixed_bytes(batch, sequence) if largest else measured.plain.layer_bytes(batch, sequence)
        plain = measured.plain.bytes(layers, batch, sequence)
        return cls(
            plain=plain,
            checkpointed=None
            if measured.checkpointed is None
            else measured.checkpointed.bytes(layers, batch, sequence),
            saved=saved.bytes(layers, batch, sequence),
            logits_and_loss=max(0, measured.loss_bytes(layers, batch, sequence) - plain),
            layers=layers * saved.layer_bytes(batch, sequence) + (one_layer if checkpointed else 0),
            one_layer=one_layer,
        )


def _activations(inputs: MemoryInputs, workload: Workload, ds_config: Mapping[str, Any]) -> _Activations:
    if sequence_parallel_size(ds_config) > 1:
        return _Activations(unknown="what sequence parallelism exchanges is not counted")
    if workload.compile != "none" or is_deepcompiled(ds_config):
        return _Activations(unknown="the compiler decides what a compiled model keeps for its backward pass")
    batch = int(ds_config.get("train_micro_batch_size_per_gpu", workload.batch_size))
    return _Activations.for_batch(inputs, batch, workload.seq_length, checkpointed=workload.activation_checkpointing)


def _moments(inputs: MemoryInputs, sizes: _Activations) -> dict[str, Ledger]:
    """The phases of DeepSpeed's memory with the activations that exist at the same time."""
    # With tied embeddings, autograd keeps the gradient of the LM head until that of the embedding exists, and sums both
    # into a new tensor.
    tied_bytes = 2 * inputs.element * inputs.profile.tensors[0] if inputs.profile.trains_tied_embeddings else 0
    bare = {name: _with_frozen(inputs, ledger) for name, ledger in _phases(inputs).items()}
    loss = _plus(bare["forward"], activations=sizes.saved, logits_and_loss=sizes.logits_and_loss)
    if inputs.pass_type == "forward":
        return {"loss": loss}
    return {
        "loss": loss,
        "enter": _plus(_entering(inputs, bare), activations=sizes.layers),
        "leave": _plus(bare["backward"], activations=sizes.one_layer, temporaries=tied_bytes),
        # Backward has ended: no activations are left.
        "reduce": bare["reduced"],
        "flatten": bare["flatten"],
        "update": bare["update"],
    }


def _build_moment(inputs: MemoryInputs, workload: Workload) -> dict[str, Ledger]:
    """Without zero.Init: the whole model in every rank's host memory, and whole on its GPU before it is split."""
    if workload.zero_init or inputs.settings.stage != 3 or inputs.engine != "deepspeed":
        return {}
    whole = inputs.element * (inputs.profile.parameters + inputs.profile.frozen_parameters)
    tiers = ("cpu",) if inputs.accelerator == "cpu" else ("gpu", "cpu")
    return {"build": {tier: {"parameters": whole} for tier in tiers}}


def _plus(ledger: Ledger, **categories: int) -> Ledger:
    """Returns the ledger with further bytes on the GPU."""
    row = dict(ledger.get("gpu", {}))
    for name, size in categories.items():
        row[name] = row.get(name, 0) + size
    return {**ledger, "gpu": row}


def _entering(inputs: MemoryInputs, bare: Phases) -> Ledger:
    """Memory when backward enters the last layer. At stages 0 and 1 the LM head's is the only gradient so far, or, of a
    later micro-batch of the step, a second one until it is added to the first."""
    if inputs.settings.stage >= 2 or inputs.engine != "deepspeed":
        return bare["backward"]
    tensors = inputs.profile.tensors
    # A tied LM head is listed as the embedding, which comes first.
    head = tensors[0] if inputs.profile.trains_tied_embeddings else tensors[-1]
    buckets = bare["backward"].get("gpu", {}).get("deepspeed_buffers", 0)
    own = {"gradients" if inputs.grad_accum == 1 else "temporaries": inputs.element * head}
    return _plus(bare["forward"], deepspeed_buffers=buckets, **own)


def _as_host_memory(ledger: Ledger) -> Ledger:
    """Moves what is on the GPU to host memory, where the CPU accelerator has it."""
    row = dict(ledger.get("cpu", {}))
    for name, size in ledger.get("gpu", {}).items():
        row[name] = row.get(name, 0) + size
    return {"cpu": row, **({"nvme": ledger["nvme"]} if "nvme" in ledger else {})}


def _largest_by_category(moments: Mapping[str, Ledger]) -> Ledger:
    """The largest value of each category at any moment, of those categories that the ledger of a run holds."""
    peak: Ledger = {}
    for ledger in moments.values():
        for tier, row in ledger.items():
            for name, size in row.items():
                if name not in UNCOUNTED and size:
                    peak.setdefault(tier, {})[name] = max(size, peak.get(tier, {}).get(name, 0))
    return peak
