"""Predicts, without running anything, how many bytes a trial takes per GPU, in each node's host memory and on NVMe.

Model states and DeepSpeed's buffers follow DeepSpeed's code (``stages_0_to_2``, ``stage_3``). Activations come from the
profile of the model (``model_profile``), measured or by formula. Two terms are assumptions: the memory of the CUDA
context and NCCL outside torch's allocator, and the memory that a process needs for its libraries. ``fit_verdict``
judges whether a GPU is large enough; ``what_if`` finds what would make a trial fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from ..config.deepspeed_config import (
    is_deepcompiled,
    sequence_parallel_size,
    tensor_parallel_size,
    trained_precision,
)
from ..config.spec import Engine, Placement, Workload, block_of
from ..records.schema import Tier, largest_by_category
from ..units import from_gb
from . import stage_3, stages_0_to_2, torch_engines
from .fit_verdict import DOES_NOT_FIT, FITS, TIGHT, UNKNOWN, DecidingPhase, GpuNeed
from .inputs import MemoryInputs, Phases, ZeroSettings, unpredicted_settings
from .model_profile import ModelProfile, variant_of
from .model_states import FP32_BYTES, Ledger, LedgerBuilder, plus
from .torch_allocators import largest_rounded_bytes

CONTEXT_BYTES = from_gb(0.3)
"""Assumed per GPU: CUDA context and kernels, outside torch's allocator, with kernels loaded on first use (CUDA 11.7
and later; pytorch/pytorch#107667, #86509: 274 MiB)."""
WORKSPACES = 2
"""Workspaces of cuBLAS in torch's allocator: one for the thread of the forward pass and one for that of the backward
pass (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
_WORKSPACE_BYTES, _HOPPER_WORKSPACE_BYTES = 8_519_680, 32 * 2**20
"""Bytes of one workspace: 8.125 MiB, but 32 MiB on GPUs of compute capability 9."""
NCCL_PAIR_BYTES, NCCL_BYTES = 544 * 2**20, 688 * 2**20
"""Assumed per GPU and NCCL communicator of two ranks, and of more: channels and buffers, measured on A100 with NVLink
(NVIDIA/nccl#964). They depend on the links and on NCCL's version."""
NCCL_RANGE_BYTES = NCCL_PAIR_BYTES, from_gb(1.6)
"""Range that users have reported per communicator (NVIDIA/nccl#964, #864)."""
PROCESS_BYTES = from_gb(1.5)
"""Assumed host memory per rank of a GPU job: Python, torch and CUDA's libraries before the model is built."""
CPU_PROCESS_BYTES = from_gb(0.4)
"""Assumed host memory per rank on the CPU accelerator, without CUDA's libraries; measured in runs."""
CPU_PROCESS_DATA_BYTES = from_gb(0.6)
"""The same under ``--cpu-memory-limit``, which also counts memory that is mapped but untouched, or kept by malloc."""
TIGHT_FRACTION = 0.9
"""A prediction above this share of a node's host memory is ``tight``."""
_DECIDING_PHASES: Mapping[str, DecidingPhase] = {
    "build": "initialize",
    "initialize": "initialize",
    "loss": "forward",
    "enter": "backward",
    "leave": "backward",
    "reduce": "backward",
    "flatten": "step",
    "update": "step",
}

UNCOUNTED = (
    "temporaries",
    "square_roots",
    "attention_gradient",
    "gathered_parameters",
    "logits_and_loss",
    "pinned_rounding",
    "workspaces",
    "overhead",
)
"""Categories that the ledger of a run does not hold: temporary tensors, and memory outside tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A different configuration for the same work, and the memory that it would take, whatever the machine has."""

    settings: Mapping[str, Any]
    """What changes (``what_if.Settings``)."""
    rank: int
    """Position in the order of cost, 0 for the change that costs least."""
    gpu_bytes: int
    """As ``Prediction.gpu_bytes``; 0 on the CPU accelerator."""
    host_bytes: int
    """Per node."""
    layout: tuple[int, str, str]
    """Stage and both offload devices afterwards, as ``Configuration.layout``."""
    need: GpuNeed | None = None
    """As ``Prediction.need``."""

    @property
    def least_gpu_bytes(self) -> int:
        """Memory of the smallest GPU that it runs on; 0 on the CPU accelerator."""
        return self.gpu_bytes if self.need is None else self.need.least_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The memory that one named change of a configuration would save at the fullest moment."""

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
    """The predicted memory of one trial, on the rank with the most."""

    gpu: Mapping[str, int]
    """Category → bytes per GPU at its fullest moment; empty on the CPU accelerator."""
    host: Mapping[str, int]
    """Category → bytes of one node's host memory at its fullest moment."""
    nvme: Mapping[str, int]
    """Category → bytes of one node's swap files."""
    phase: str
    """The fullest moment on the GPU (of host memory on the CPU accelerator): ``loss`` (all activations, logits and
    their temporaries), ``enter`` and ``leave`` (backward at the last and at the first layer), ``reduce``, ``flatten``,
    ``update`` or, before the first step, ``build`` (every rank builds the whole model) and ``initialize``."""
    ledger: Mapping[str, Mapping[str, int]]
    """Tier → category → bytes of one rank, comparable with ``RankMeasurement.ledger``."""
    unknown: str | None = None
    """Why activations, logits and loss are not in the figures; None if they are."""
    alternatives: tuple[Alternative, ...] | None = None
    """For advice after the run; ``what_if`` finds them. None if they were not looked for."""
    savings: tuple[Saving, ...] = ()
    """For explanations after the run; ``what_if`` finds them."""
    host_phases: Mapping[str, int] = field(default_factory=dict)
    """Phase → bytes of one node's host memory: ``load`` if weights are loaded, ``initialize``, ``forward``,
    ``backward`` and ``step``; empty in older records."""
    need: GpuNeed | None = None
    """What decides whether a GPU is large enough; None on the CPU accelerator, and in older records."""
    terms: Mapping[str, int] = field(default_factory=dict)
    """Parts of categories: term → bytes per GPU at the moment when it exists. ``initialize_clone``, ``kept_logits``,
    ``attention_gradient``, ``square_roots``, ``workspaces``, ``context``, ``nccl``."""

    @property
    def gpu_bytes(self) -> int:
        """Per GPU, everything that is allocated at the fullest moment, and what is outside the allocator."""
        return sum(self.gpu.values())

    @property
    def gpu_need(self) -> GpuNeed:
        """``need``; for an older record, estimated by the rule."""
        outside = self.gpu.get("overhead", 0)
        phase = _DECIDING_PHASES.get(self.phase, "step")
        return self.need or GpuNeed.by_rule(self.gpu_bytes - outside, outside, phase)

    @property
    def least_gpu_bytes(self) -> int:
        """Memory of the smallest GPU that the trial runs on; 0 on the CPU accelerator."""
        return self.gpu_need.least_bytes if self.gpu else 0

    @property
    def host_bytes(self) -> int:
        """Per node."""
        return sum(self.host.values())

    @property
    def host_phase(self) -> str:
        """The phase with the highest host memory."""
        return max(self.host_phases, key=self.host_phases.__getitem__, default="step")

    @property
    def nvme_bytes(self) -> int:
        """Per node."""
        return sum(self.nvme.values())

    def in_tier(self, tier: Tier) -> Mapping[str, int]:
        """Category → bytes in a tier of the ledger: per GPU, or per node in ``cpu`` and ``nvme``."""
        return {"gpu": self.gpu, "cpu": self.host, "nvme": self.nvme}[tier]

    def biggest_in(self, tier: str) -> tuple[str, int]:
        """Return the category that takes the most ``gpu`` or ``host`` memory, and its bytes."""
        row = self.gpu if tier == "gpu" else self.host
        return max(row.items(), key=lambda item: item[1])

    def decisive_tiers(self, gpu_capacity_bytes: int | None, host_capacity_bytes: int | None = None) -> tuple[str, ...]:
        """Return which of ``gpu`` and ``host`` would give the verdict by itself; empty if it ``fits``."""
        verdict = self.verdict(gpu_capacity_bytes, host_capacity_bytes)
        alone = {"gpu": self.verdict(gpu_capacity_bytes), "host": self.verdict(None, host_capacity_bytes)}
        return tuple(tier for tier, found in alone.items() if found == verdict != FITS)

    def verdict(self, gpu_capacity_bytes: int | None, host_capacity_bytes: int | None = None) -> str:
        """Return ``fits``, ``tight`` or ``does not fit``, whichever is worse for GPU and host; None means no limit.

        The GPU is judged by ``GpuNeed.verdict``; host memory is tight above 90 %. The verdict is ``not known`` if the
        known part would fit, but another part is unknown.
        """
        found = FITS
        if gpu_capacity_bytes is not None and self.gpu:
            found = self.gpu_need.verdict(gpu_capacity_bytes)
        if host_capacity_bytes is not None:
            share = self.host_bytes / host_capacity_bytes
            of_host = DOES_NOT_FIT if share > 1 else TIGHT if share > TIGHT_FRACTION else FITS
            found = max(found, of_host, key=(FITS, TIGHT, DOES_NOT_FIT).index)
        # What is not known could still decide, unless the rest is too much already.
        is_open = self.unknown is not None or (gpu_capacity_bytes is not None and self.gpu_need.is_lower_bound)
        return UNKNOWN if found != DOES_NOT_FIT and is_open else found

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, which ``trial_predictions.stored_prediction`` reads."""
        return asdict(self)


def predict(
    profile: ModelProfile,
    workload: Workload,
    placement: Placement,
    ds_config: Mapping[str, Any],
    *,
    engine: Engine = "deepspeed",
    ranks_per_node: int | None = None,
    loads_weights: bool = False,
) -> Prediction:
    """Predict the memory of a trial. Micro-batch, accumulation and precision of ``ds_config`` override the workload's.

    ``ranks_per_node``: None if all ranks are on one node. ``loads_weights``: ``from_pretrained`` loads the model into
    host memory, on every rank; with zero.Init, only on rank 0 (Transformers, ``modeling_utils.py``,
    ``_load_pretrained_model``).
    """
    inputs = inputs_of(profile, workload, placement, ds_config, engine)
    sizes = _activations(inputs, workload, ds_config)
    moments = _moments(inputs, sizes)
    start = moments.pop("initialize", None)
    tier = "cpu" if placement.accelerator == "cpu" else "gpu"
    if tier == "cpu":  # the CPU accelerator holds in host memory what a GPU would hold
        for name, ledger in moments.items():
            builder = LedgerBuilder({each: row for each, row in ledger.items() if each != "gpu"})
            for category, size in ledger.get("gpu", {}).items():
                builder.add("cpu", category, size)
            moments[name] = builder.ledger

    def fullest_moment() -> str:
        return max(moments, key=lambda name: sum(moments[name].get(tier, {}).values()))

    # As in a run, whose ledger is counted in a step, without temporary tensors.
    counted = [
        {
            each: {name: size for name, size in row.items() if size and name not in UNCOUNTED}
            for each, row in held.items()
        }
        for held in moments.values()
    ]
    ledger, in_step = largest_by_category(*counted), fullest_moment()
    if inputs.settings.stage == 3 and engine == "deepspeed" and not workload.zero_init:
        # Every rank has the whole model in host memory, and on its GPU before it is split.
        whole = inputs.element * inputs.profile.all_parameters
        moments["build"] = {each: {"parameters": whole} for each in dict.fromkeys((tier, "cpu"))}
    elif tier == "gpu" and start is not None:
        moments["initialize"] = start
    phase = fullest_moment()
    gpu = dict(moments[phase].get("gpu", {}))
    terms: dict[str, int] = {}
    need = None
    if tier == "gpu":
        on_hopper = placement.compute_capability is not None and placement.compute_capability[0] == 9
        terms = _terms(inputs, sizes, moments, ds_config, on_hopper=on_hopper)
        deciding = _DECIDING_PHASES[phase]
        if deciding != "initialize":  # that is before the first matrix product
            gpu["workspaces"] = terms["workspaces"]
        allocated, outside = sum(gpu.values()), terms["context"] + terms["nccl"]
        # While backward runs, the training loop may still hold the output object and its logits.
        in_backward = max(sum(moments.get(name, {}).get("gpu", {}).values()) for name in ("enter", "leave"))
        kept = in_backward + terms["workspaces"] + terms["kept_logits"] - allocated
        need = replace(
            GpuNeed.by_rule(allocated, outside, deciding, kept_bytes=max(0, kept)),
            unknowns=tuple(unpredicted_settings(ds_config)),
            is_lower_bound=sizes.unknown is not None or bool(unpredicted_settings(ds_config, only_more=True)),
        )
        gpu["overhead"] = outside
    cpu_process = CPU_PROCESS_BYTES if placement.cpu_memory_limit_bytes is None else CPU_PROCESS_DATA_BYTES
    process = cpu_process if tier == "cpu" else PROCESS_BYTES
    ranks = min(placement.num_gpus, ranks_per_node or placement.num_gpus)
    # The host may be fullest at a different moment from the GPU.
    host = {name: {key: ranks * size for key, size in row.get("cpu", {}).items()} for name, row in moments.items()}
    if loads_weights and tier == "gpu":
        is_split = inputs.settings.stage == 3 and engine == "deepspeed" and workload.zero_init
        size = inputs.element if engine == "deepspeed" else FP32_BYTES
        whole = size * inputs.profile.all_parameters
        host["load"] = {"parameters": whole * (1 if is_split else ranks)}
    host_phases: dict[str, int] = {}
    for name, row in host.items():
        row["overhead"] = ranks * process
        host_phase = "load" if name == "load" else _DECIDING_PHASES[name]
        host_phases[host_phase] = max(host_phases.get(host_phase, 0), sum(row.values()))
    # In a run's ledger, activations are what its forward pass saved (worker/measure.py), not what is left later.
    if sizes.unknown is None:
        ledger.setdefault(tier, {})["activations"] = sizes.saved
    return Prediction(
        gpu=gpu,
        host=max(host.values(), key=lambda row: sum(row.values())),
        host_phases=host_phases,
        nvme={name: ranks * size for name, size in moments[in_step].get("nvme", {}).items()},
        phase=phase,
        ledger=ledger,
        unknown=sizes.unknown,
        need=need,
        terms=terms,
    )


def inputs_of(
    profile: ModelProfile, workload: Workload, placement: Placement, ds_config: Mapping[str, Any], engine: Engine
) -> MemoryInputs:
    """Return the inputs that decide the memory of one rank; see ``predict``."""
    # Under torch_autocast, parameters are in fp32, whatever the workload's precision.
    blocks = {name: block_of(ds_config, name) for name in ("bf16", "fp16") if name in ds_config}
    return MemoryInputs(
        profile=profile.for_variant(variant_of(workload, ds_config, engine)),
        precision=trained_precision(blocks, "fp32" if "torch_autocast" in ds_config else workload.precision),
        data_parallel_size=placement.num_gpus,
        grad_accum=int(ds_config.get("gradient_accumulation_steps", workload.grad_accum)),
        accelerator=placement.accelerator,
        settings=ZeroSettings.from_config(ds_config),
        engine=engine,
        pass_type=workload.pass_type,
    )


def _terms(
    inputs: MemoryInputs,
    sizes: _Activations,
    moments: Mapping[str, Ledger],
    ds_config: Mapping[str, Any],
    *,
    on_hopper: bool,
) -> dict[str, int]:
    """Bytes of the terms of ``Prediction.terms`` on a GPU, each where it is largest."""
    # DeepSpeed has the world's communicator and a clone of it (utils/groups.py, _clone_world_group), and one for each
    # further kind of group; torch's engines have one.
    groups = (inputs.settings.secondary_ranks, sequence_parallel_size(ds_config), tensor_parallel_size(ds_config))
    own = inputs.engine == "deepspeed" and inputs.pass_type == "train"
    communicators = 2 + sum(size > 1 for size in groups) if own else 1
    ranks = inputs.data_parallel_size
    each = 0 if ranks == 1 else NCCL_PAIR_BYTES if ranks == 2 else NCCL_BYTES
    return {
        "initialize_clone": moments.get("initialize", {}).get("gpu", {}).get("temporaries", 0),
        "kept_logits": sizes.kept_logits,
        "attention_gradient": sizes.attention_gradient,
        "square_roots": moments.get("update", {}).get("gpu", {}).get("square_roots", 0),
        "workspaces": WORKSPACES * (_HOPPER_WORKSPACE_BYTES if on_hopper else _WORKSPACE_BYTES),
        "context": CONTEXT_BYTES,
        "nccl": communicators * each,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Activations:
    """Bytes of the activations of one micro-batch on one rank; 0 if they are not known."""

    saved: int = 0
    """Saved for the backward pass, with or without checkpointing, depending on the workload."""
    logits_and_loss: int = 0
    layers: int = 0
    """Held by the layers while backward runs through the last of them, including what is recomputed there."""
    one_layer: int = 0
    """One layer without checkpointing: what exists while a layer is recomputed, or while backward leaves the first."""
    kept_logits: int = 0
    """The logits in 16-bit precision, if the training loop holds the model's output object while backward runs."""
    attention_gradient: int = 0
    """The query's gradient in fp32, which flash attention's backward pass accumulates for one layer, on GPUs (Dao,
    FlashAttention-2, algorithm 2; csrc/flash_attn/flash_api.cpp, ``dq_accum``)."""
    unknown: str | None = None


def _activations(inputs: MemoryInputs, workload: Workload, ds_config: Mapping[str, Any]) -> _Activations:
    if sequence_parallel_size(ds_config) > 1:
        return _Activations(unknown="the buffers that sequence parallelism exchanges are not modeled")
    if workload.compile != "none" or is_deepcompiled(ds_config):
        return _Activations(unknown="the compiler decides what a compiled model keeps for its backward pass")
    on_deepspeed = inputs.engine == "deepspeed"
    if inputs.settings.autocast and inputs.settings.stage == 3 and on_deepspeed:
        return _Activations(unknown="torch_autocast at stage 3 gathers 16-bit weights, which has not been measured")
    efficient_linear = inputs.settings.efficient_linear and on_deepspeed
    measured = inputs.profile.activations_in(inputs.precision, efficient_linear=efficient_linear)
    if measured is None:
        return _Activations(unknown=inputs.profile.unknown or f"not measured in {inputs.precision}")
    saved = measured.checkpointed if workload.activation_checkpointing else measured.plain
    if saved is None:
        return _Activations(unknown="this model has no activation checkpointing")
    batch = int(ds_config.get("train_micro_batch_size_per_gpu", workload.batch_size))
    size = (inputs.profile.layers, batch, workload.seq_length)
    # The largest layer is fitted as one block of the whole model: all its bytes are in the fixed terms.
    largest = measured.largest_layer
    one_layer = largest.fixed_bytes(*size[1:]) if largest else measured.plain.layer_bytes(*size[1:])
    recomputed = one_layer if workload.activation_checkpointing else 0
    tokens, profile = batch * workload.seq_length, inputs.profile
    flash = inputs.accelerator == "cuda" and workload.attention != "eager"
    return _Activations(
        kept_logits=2 * profile.vocabulary_size * tokens if workload.loss == "model" else 0,
        attention_gradient=FP32_BYTES * profile.attention_width * tokens if flash else 0,
        saved=saved.bytes(*size),
        logits_and_loss=max(0, measured.loss_bytes(*size) - measured.plain.bytes(*size)),
        layers=size[0] * saved.layer_bytes(*size[1:]) + recomputed,
        one_layer=one_layer,
    )


@lru_cache(maxsize=512)
def _phases(inputs: MemoryInputs, _rounded_bytes: float) -> Phases:
    """One rank's ledgers without activations; cached for searches over micro-batches, so do not modify them.

    ``_rounded_bytes``: ``largest_rounded_bytes`` of this process's environment, which the ledgers depend on."""
    if inputs.engine != "deepspeed" or inputs.pass_type != "train":
        return torch_engines.ledger_by_phase(inputs)
    return stage_3.ledger_by_phase(inputs) if inputs.settings.stage == 3 else stages_0_to_2.ledger_by_phase(inputs)


def _moments(inputs: MemoryInputs, sizes: _Activations) -> dict[str, Ledger]:
    """Return the ledger at each moment: DeepSpeed's memory, and the activations that exist at the same time."""
    profile, stage, bare = inputs.profile, inputs.settings.stage, _phases(inputs, largest_rounded_bytes())
    if stage != 3 and inputs.engine != "fsdp2":
        # Every rank holds all untrained parameters; DDP's weights are fp32 in every precision.
        frozen = (inputs.element if inputs.engine == "deepspeed" else FP32_BYTES) * profile.frozen_parameters
        bare = {name: plus(ledger, parameters=frozen) for name, ledger in bare.items()}
    queries = {"attention_gradient": sizes.attention_gradient}
    loss = plus(bare["forward"], activations=sizes.saved, logits_and_loss=sizes.logits_and_loss)
    if inputs.pass_type == "forward":
        return {"loss": loss}
    enter = bare["backward"]
    if stage < 2 and inputs.engine == "deepspeed":
        # When backward enters the last layer, the LM head's gradient is the only one or, in a later micro-batch, a
        # second one until it is added to the first. A tied LM head is listed as the embedding, which comes first.
        # Where gradients are reduced during backward, it goes into a bucket.
        head = inputs.element * profile.tensors[0 if profile.trains_tied_embeddings else -1]
        buckets = bare["backward"].get("gpu", {}).get("deepspeed_buffers", 0)
        stays = inputs.grad_accum == 1 and not stages_0_to_2.reduces_meanwhile(inputs)
        own = {"gradients" if stays else "temporaries": head}
        enter = plus(bare["forward"], deepspeed_buffers=buckets, **own)
    # Autograd keeps the gradient of a tied LM head until the embedding's exists, and sums both into a new tensor.
    tied = 2 * inputs.element * profile.tensors[0] if profile.trains_tied_embeddings else 0
    return {
        "loss": loss,
        "enter": plus(enter, activations=sizes.layers, **queries),
        "leave": plus(bare["backward"], activations=sizes.one_layer, temporaries=tied, **queries),
        # Backward has ended: no activations are left.
        "reduce": bare["reduced"],
        **{name: bare[name] for name in ("flatten", "update", "initialize") if name in bare},
    }
