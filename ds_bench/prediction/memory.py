"""Predicts, without running anything, how many bytes a trial takes per GPU, per node's host memory and on NVMe.

Model states and DeepSpeed's buffers are its own arithmetic (``stages_0_to_2``, ``stage_3``), activations the model's
own (``model_profile``). Two terms are assumptions and named so: what the CUDA context and NCCL take beside torch's
allocator, and what a process takes for its libraries. Whether that fits, and what would make it fit, is for
``what_if``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from ..config.spec import Placement, Precision, Workload
from ..units import from_gb
from . import stage_3, stages_0_to_2
from .inputs import LedgerBuilder, MemoryInputs, Phases, ZeroSettings
from .model_profile import ModelProfile
from .model_states import Ledger

CONTEXT_BYTES = from_gb(0.75)
"""Assumed per GPU: CUDA context, kernels and cuBLAS workspaces, outside torch's allocator."""
NCCL_BYTES = from_gb(1.2)
"""Assumed per GPU where there are several: channels and buffers of one NCCL communicator. It depends on the number of
ranks, their links and NCCL's version."""
NCCL_RANGE_BYTES = from_gb(0.7), from_gb(1.6)
"""What users have reported per communicator; ``NCCL_BYTES`` lies in the middle."""
PROCESS_BYTES = from_gb(1.5)
"""Assumed host memory per rank of a GPU job: Python, torch and CUDA's libraries before the model is built."""
CPU_PROCESS_BYTES = from_gb(0.4)
"""Likewise on the CPU accelerator, without CUDA's; as seen in runs."""
TIGHT_FRACTION = 0.9
"""A prediction above this share of the memory is ``tight``: fragmentation and what a layer needs while it runs are not
in the prediction."""

FITS, TIGHT, DOES_NOT_FIT, UNKNOWN = "fits", "tight", "does not fit", "not known"

_UNSEEN = ("temporaries", "gathered_parameters", "logits_and_loss", "pinned_rounding", "overhead")
"""Categories that the ledger of a run does not have: too short-lived, or no tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The memory of one trial, on the fullest rank."""

    gpu: Mapping[str, int]
    """Category → bytes per GPU at its fullest moment; empty on the CPU accelerator."""
    host: Mapping[str, int]
    """Category → bytes of one node's host memory at its fullest moment."""
    nvme: Mapping[str, int]
    """Category → bytes of one node's swap files."""
    phase: str
    """That moment on the GPU (on the CPU accelerator, in host memory): ``loss`` (all activations, logits and their
    temporaries), ``enter`` and ``leave`` (backward at the last and at the first layer), ``reduce``, ``flatten`` or
    ``update``."""
    ledger: Mapping[str, Mapping[str, int]]
    """One rank's tier → category → bytes, to hold against ``RankMeasurement.ledger``."""
    activation_bytes: int | None
    """Saved for backward per GPU without activation checkpointing; None where they are not known."""
    checkpointed_activation_bytes: int | None
    """Likewise with it; None also for a model that cannot checkpoint."""
    logits_and_loss_bytes: int | None
    """Temporaries of logits and loss per GPU, beside the activations; None where they are not known."""
    unknown: str | None = None
    """Why activations, logits and loss are not in the figures; None where they are."""
    alternatives: tuple[Mapping[str, Any], ...] = ()
    """What other configurations of the same work would take, for advice after the run (``what_if.Alternative``)."""

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

    @property
    def biggest(self) -> tuple[str, int]:
        """The category that takes most per GPU, or in host memory where there is no GPU, and its bytes."""
        return self.biggest_in("gpu" if self.gpu else "host")

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
        if share <= 1 and self.unknown is not None:
            return UNKNOWN
        return DOES_NOT_FIT if share > 1 else TIGHT if share > TIGHT_FRACTION else FITS

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prediction:
        """The inverse of :meth:`to_dict`. Raises TypeError on other shapes."""
        return cls(**{**data, "alternatives": tuple(data.get("alternatives", ()))})


def predict(
    profile: ModelProfile,
    workload: Workload,
    placement: Placement,
    ds_config: Mapping[str, Any],
    *,
    ranks_per_node: int | None = None,
) -> Prediction:
    """The memory of a trial with this DeepSpeed configuration, whose batch and precision count where it has them.

    ``ranks_per_node``: all ranks on one node where None.
    """
    case = _case(profile, workload, placement, ds_config)
    sizes = _activations(case, workload, ds_config)
    moments = _moments(case, sizes)
    if placement.accelerator == "cpu":
        moments = {name: _as_host_memory(ledger) for name, ledger in moments.items()}
    tier = "cpu" if placement.accelerator == "cpu" else "gpu"
    phase = max(moments, key=lambda name: sum(moments[name].get(tier, {}).values()))
    process = CPU_PROCESS_BYTES if tier == "cpu" else PROCESS_BYTES
    ranks = min(placement.num_gpus, ranks_per_node or placement.num_gpus)
    fullest_host = max((ledger.get("cpu", {}) for ledger in moments.values()), key=lambda row: sum(row.values()))
    seen = _largest_by_category(moments)
    if sizes.unknown is None:
        seen.setdefault(tier, {})["activations"] = sizes.saved
    return Prediction(
        gpu={} if tier == "cpu" else {**moments[phase]["gpu"], "overhead": _overhead(placement)},
        host={name: ranks * size for name, size in {**fullest_host, "overhead": process}.items()},
        nvme={name: ranks * size for name, size in moments[phase].get("nvme", {}).items()},
        phase=phase,
        ledger=seen,
        activation_bytes=None if sizes.unknown else sizes.plain,
        checkpointed_activation_bytes=sizes.checkpointed,
        logits_and_loss_bytes=None if sizes.unknown else sizes.logits_and_loss,
        unknown=sizes.unknown,
    )


def gpu_bytes_by_moment(
    profile: ModelProfile, workload: Workload, placement: Placement, ds_config: Mapping[str, Any]
) -> dict[str, Mapping[str, int]]:
    """Moment (``Prediction.phase``) → category → bytes per GPU, without ``overhead``, which is always the same.

    ``Prediction.gpu`` has the fullest of them. For a GPU, not the CPU accelerator.
    """
    case = _case(profile, workload, placement, ds_config)
    moments = _moments(case, _activations(case, workload, ds_config))
    return {moment: ledger["gpu"] for moment, ledger in moments.items()}


@lru_cache(maxsize=512)
def _phases(case: MemoryInputs) -> Phases:
    """Remembered, because searches ask for many batches of the same case; not to be written to."""
    return stage_3.ledger_by_phase(case) if case.settings.stage == 3 else stages_0_to_2.ledger_by_phase(case)


def _with_frozen(case: MemoryInputs, ledger: Ledger) -> Ledger:
    """Parameters that are not trained are on every rank, at stage 3 split among the ranks, where the others are too."""
    count = case.profile.frozen_parameters
    part = -(-count // case.data_parallel_size) if case.settings.stage == 3 else count
    return LedgerBuilder(ledger).add(case.settings.offload_param or "gpu", "parameters", case.element * part).ledger


def _case(
    profile: ModelProfile, workload: Workload, placement: Placement, ds_config: Mapping[str, Any]
) -> MemoryInputs:
    return MemoryInputs(
        profile=profile,
        precision=_precision(workload, ds_config),
        data_parallel_size=placement.num_gpus,
        grad_accum=int(ds_config.get("gradient_accumulation_steps", workload.grad_accum)),
        accelerator=placement.accelerator,
        settings=ZeroSettings.from_config(ds_config),
    )


def _precision(workload: Workload, ds_config: Mapping[str, Any]) -> Precision:
    if (ds_config.get("bf16") or {}).get("enabled"):
        return "bf16"
    if (ds_config.get("fp16") or {}).get("enabled"):
        return "fp16"
    return "fp32" if "bf16" in ds_config or "fp16" in ds_config else workload.precision


@dataclass(frozen=True, slots=True, kw_only=True)
class _Activations:
    """One micro-batch on one rank, in bytes; 0 where they are not known."""

    plain: int = 0
    checkpointed: int | None = None
    saved: int = 0
    """The one of the two that the workload asks for."""
    logits_and_loss: int = 0
    layers: int = 0
    """Of ``saved``, what the layers hold while backward runs through the last of them."""
    one_layer: int = 0
    """One layer's without checkpointing: what is there while one is recomputed, or the last to be left."""
    unknown: str | None = None

    @classmethod
    def for_batch(cls, case: MemoryInputs, batch: int, sequence: int, *, checkpointed: bool) -> _Activations:
        found, layers = case.profile.activations_in(case.precision), case.profile.layers
        if found is None:
            return cls(unknown=case.profile.unknown or f"not measured in {case.precision}")
        kept = found.checkpointed if checkpointed else found.plain
        if kept is None:
            return cls(unknown="this model has no activation checkpointing")
        largest = found.largest_layer
        one_layer = largest.fixed_bytes(batch, sequence) if largest else found.plain.layer_bytes(batch, sequence)
        plain = found.plain.bytes(layers, batch, sequence)
        return cls(
            plain=plain,
            checkpointed=None if found.checkpointed is None else found.checkpointed.bytes(layers, batch, sequence),
            saved=kept.bytes(layers, batch, sequence),
            logits_and_loss=max(0, found.loss.bytes(layers, batch, sequence) - plain),
            layers=layers * kept.layer_bytes(batch, sequence) + (one_layer if checkpointed else 0),
            one_layer=one_layer,
        )


def _activations(case: MemoryInputs, workload: Workload, ds_config: Mapping[str, Any]) -> _Activations:
    batch = int(ds_config.get("train_micro_batch_size_per_gpu", workload.batch_size))
    return _Activations.for_batch(case, batch, workload.seq_length, checkpointed=workload.activation_checkpointing)


def _moments(case: MemoryInputs, sizes: _Activations) -> dict[str, Ledger]:
    """The phases of DeepSpeed's memory with the activations that lie beside them."""
    bare = {name: _with_frozen(case, ledger) for name, ledger in _phases(case).items()}
    return {
        "loss": _plus(bare["forward"], activations=sizes.saved, logits_and_loss=sizes.logits_and_loss),
        "enter": _plus(_entering(case, bare), activations=sizes.layers),
        "leave": _plus(bare["backward"], activations=sizes.one_layer, temporaries=_tied_sum(case)),
        "reduce": bare["reduced"],
        "flatten": bare["flatten"],
        "update": bare["update"],
    }


def _plus(ledger: Ledger, **categories: int) -> Ledger:
    """The ledger with further bytes on the GPU."""
    row = dict(ledger.get("gpu", {}))
    for name, size in categories.items():
        row[name] = row.get(name, 0) + size
    return {**ledger, "gpu": row}


def _entering(case: MemoryInputs, bare: Phases) -> Ledger:
    """Backward before the last layer: buckets are there, of the gradients only the LM head's at stages 0 and 1."""
    if case.settings.stage >= 2:
        return bare["backward"]
    tensors = case.profile.tensors
    head = tensors[0] if case.profile.tied_embeddings else tensors[-1]
    buckets = bare["backward"].get("gpu", {}).get("deepspeed_buffers", 0)
    return _plus(bare["forward"], deepspeed_buffers=buckets, gradients=case.element * head)


def _tied_sum(case: MemoryInputs) -> int:
    """Of a tied embedding the head's gradient waits for the look-up's, and autograd adds the two into a third."""
    return 2 * case.element * case.profile.tensors[0] if case.profile.tied_embeddings else 0


def _as_host_memory(ledger: Ledger) -> Ledger:
    """The CPU accelerator's memory is the host's."""
    row = dict(ledger.get("cpu", {}))
    for name, size in ledger.get("gpu", {}).items():
        row[name] = row.get(name, 0) + size
    return {"cpu": row, **({"nvme": ledger["nvme"]} if "nvme" in ledger else {})}


def _overhead(placement: Placement) -> int:
    return CONTEXT_BYTES + (NCCL_BYTES if placement.num_gpus > 1 else 0)


def _largest_by_category(moments: Mapping[str, Ledger]) -> Ledger:
    """Cell by cell the largest of all moments, as far as a run's ledger can see it."""
    peak: Ledger = {}
    for ledger in moments.values():
        for tier, row in ledger.items():
            for name, size in row.items():
                if name not in _UNSEEN and size:
                    peak.setdefault(tier, {})[name] = max(size, peak.get(tier, {}).get(name, 0))
    return peak
