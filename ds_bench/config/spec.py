"""What is asked: a Workload, trained with a Strategy, on a Placement, as one Trial.

Nothing here knows how a trial is run or what came of it (``record``). All four are frozen and
hold JSON values only, so that the rank processes receive them as a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..system.redaction import redacted_config

Device = Literal["none", "cpu", "nvme"]
Accelerator = Literal["cuda", "cpu"]
Precision = Literal["bf16", "fp16", "fp32"]
LauncherName = Literal["warm", "deepspeed"]
BatchPolicy = Literal["given", "largest"]
ModelSource = Literal["preset", "local", "hub", "factory"]

PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp32")


def _require(condition: bool, field_name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{field_name} is {value!r}: {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained, the same for every strategy of a comparison."""

    model: str
    """The name the user gave: a preset, a local path, a Hub name or ``pkg.mod:function``."""
    model_source: ModelSource
    """Where the model comes from; a preset is built from ``model_config`` without any look-up."""
    model_type: str | None = None
    """Transformers' architecture name (``gpt2``); None for a factory."""
    model_config: Mapping[str, Any] = field(default_factory=dict)
    """A preset's arguments for ``AutoConfig.for_model``; a local model's ``path``; else empty."""
    batch_size: int = 4
    """Micro-batch: sequences per GPU in one forward pass."""
    batch_policy: BatchPolicy = "given"
    """``largest``: each strategy at its own largest micro-batch that trains, which such rows are compared at."""
    seq_length: int = 512
    """Tokens per sequence."""
    grad_accum: int = 1
    """Micro-batches per optimizer step."""
    num_steps: int = 20
    """Optimizer steps that are measured."""
    warmup_steps: int = 5
    """Optimizer steps run first and left out of every statistic."""
    precision: Precision = "bf16"
    """Number format of parameters and activations."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass (Transformers' gradient checkpointing)."""
    seed: int = 42
    """Seed of weights and data; the same in every trial."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the model."""
    dropout: float | None = None
    """Probability of every dropout in the model, from 0 to below 1; None: the model's own."""

    def __post_init__(self) -> None:
        _require(bool(self.model), "model", self.model, "must not be empty")
        for name in ("batch_size", "seq_length", "grad_accum", "num_steps"):
            value = getattr(self, name)
            _require(value >= 1, name, value, "must be 1 or more")
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "must be 0 or more")
        _require(self.precision in PRECISIONS, "precision", self.precision, f"must be one of {PRECISIONS}")
        _require(self.dropout is None or 0 <= self.dropout < 1, "dropout", self.dropout, "must be from 0 to below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Where parameters, gradients and optimizer states live."""

    name: str
    """Stable key: ``zero2``, ``cpu_optimizer``; what ``--strategies`` takes."""
    label: str
    """Short text for tables: ``ZeRO-2``."""
    stage: int
    """ZeRO stage, 0 to 3."""
    offload_optimizer: Device = "none"
    """Where optimizer states and the optimizer step live when not on the accelerator."""
    offload_param: Device = "none"
    """Where parameters live between uses when not on the accelerator; stage 3 only."""

    def __post_init__(self) -> None:
        _require(self.stage in (0, 1, 2, 3), "stage", self.stage, "must be 0, 1, 2 or 3")

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.offload_optimizer, self.offload_param)

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload_optimizer != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """On what it runs."""

    accelerator: Accelerator
    """``cuda`` (ROCm included) or DeepSpeed's CPU accelerator."""
    num_gpus: int = 1
    """Ranks in the whole job: GPUs, or processes on the CPU accelerator."""
    launcher: LauncherName = "warm"
    """How the ranks are started."""
    hostfile: str | None = None
    """DeepSpeed hostfile of a job on several nodes."""
    nvme_path: str | None = None
    """Folder on the NVMe disk; each trial uses a private sub-folder."""
    cpu_memory_limit_bytes: int | None = None
    """Limit on each rank's data segment (RLIMIT_DATA)."""
    gpu_memory_limit_bytes: int | None = None
    """Smaller card emulated through the caching allocator's fraction, per rank."""
    supported_precisions: tuple[Precision, ...] = PRECISIONS
    """Number formats this accelerator trains in."""

    def __post_init__(self) -> None:
        _require(self.num_gpus >= 1, "num_gpus", self.num_gpus, "must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One strategy, once: the unit that is launched, recorded and resumed."""

    trial_id: str
    """Folder name inside the run: ``03_zero2_r1``."""
    repeat: int
    """0-based number of the repetition."""
    strategy: Strategy
    workload: Workload
    placement: Placement
    ds_config: Mapping[str, Any]
    """The DeepSpeed configuration as given to ``deepspeed.initialize``, but for the swap folder."""
    unsupported: str | None = None
    """Why this cannot run here, with the remedy; such a trial is recorded and not launched."""
    skipped: str | None = None
    """Why it is predicted not to fit, where the user asked to leave such rows out; recorded and not launched."""
    caveats: tuple[str, ...] = ()
    """What is known about this row before it runs (an overlay file system, a fallback)."""
    prediction: Mapping[str, Any] | None = None
    """The memory it is predicted to take, as ``prediction.memory.Prediction.to_dict`` gives it."""
    round_position: int | None = None
    """0-based place in the order of its round; None where it was not recorded."""

    @property
    def not_launched(self) -> bool:
        """Whether it is known before it runs that it will not be."""
        return self.unsupported is not None or self.skipped is not None

    @property
    def key(self) -> str:
        """Hash over everything that decides the measurement; ``--resume`` matches by it. Credentials do not."""
        facts = {
            "repeat": self.repeat,
            "strategy": asdict(self.strategy),
            "workload": asdict(self.workload),
            "placement": asdict(self.placement),
            "ds_config": redacted_config(self.ds_config),
        }
        text = json.dumps(facts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for files: credentials in the configuration are redacted."""
        return {**asdict(self), "ds_config": redacted_config(self.ds_config)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """The inverse of :meth:`to_dict`. Raises TypeError, KeyError or ValueError on other shapes."""
        values = dict(data)
        values["strategy"] = Strategy(**values["strategy"])
        values["workload"] = Workload(**values["workload"])
        placement = dict(values["placement"])
        placement["supported_precisions"] = tuple(placement.get("supported_precisions", PRECISIONS))
        values["placement"] = Placement(**placement)
        values["caveats"] = tuple(values.get("caveats", ()))
        return cls(**values)
