"""The parts of a request: a Workload, trained with a Configuration, on a Placement, as one Trial.

All classes are frozen and hold only JSON values, because rank processes receive them in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from ..system.redaction import redacted_config
from .caveat_texts import Caveat
from .token_file import TokenType
from .training_script import Script

Device = Literal["none", "cpu", "nvme"]
Accelerator = Literal["cuda", "cpu"]
Precision = Literal["bf16", "fp16", "fp32"]
LauncherName = Literal["warm", "deepspeed"]
BatchPolicy = Literal["given", "largest"]
SequencePolicy = Literal["given", "longest"]
ModelSource = Literal["preset", "local", "hub", "factory", "script"]
LossName = Literal["model", "chunked", "tiled", "liger"]
CompileName = Literal["none", "torch"]
CpuBinding = Literal["none", "cores", "numa"]
Engine = Literal["deepspeed", "ddp", "fsdp2"]
ConfigurationSource = Literal["catalogue", "file", "axis", "recipe"]
ProfileName = Literal["torch", "memory", "nsys"]
Monitor = Literal["steps", "tensorboard"]
PassType = Literal["forward", "forward_backward", "train"]

PROFILES: tuple[ProfileName, ...] = get_args(ProfileName)
MONITORS: tuple[Monitor, ...] = get_args(Monitor)
ENGINES: tuple[Engine, ...] = get_args(Engine)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
CPU_BINDINGS: tuple[CpuBinding, ...] = get_args(CpuBinding)
PASS_TYPES: tuple[PassType, ...] = get_args(PassType)
LOSSES: tuple[LossName, ...] = get_args(LossName)
DEVICES: tuple[Device, ...] = get_args(Device)
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
MAX_PROFILE_STEPS = 50
"""Maximum number of steps that one profiler may observe: traces grow with each step."""
SEARCH_ACCURACY = 1 / 32
"""A search ends when the largest micro-batch or sequence length that trains is known to within this fraction."""
SAME_TRAINING_FIELDS = (
    *("activation_checkpointing", "attention", "loss", "tiled_mlp", "compile"),
    *("data_workers", "data_pin_memory", "data_prefetch", "cpu_binding", "zero_init"),
)
"""Fields of the Workload that change how a step is computed; what is learned stays the same except for rounding."""
OFFLOAD_BLOCKS = ("offload_optimizer", "offload_param")
"""Blocks of ``zero_optimization`` that move model states off the accelerator."""
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Batch keys of a DeepSpeed configuration: the first is the product of the others and the number of ranks."""
DEFAULT_PREFETCH = 2
MAX_DATA_WORKERS, MAX_PREFETCH = 256, 1024


def point_text(values: Mapping[str, Any]) -> str:
    """``gpt2, seq_len 1024``: key paths of a recipe and their values in one line."""
    short = {"optimizer.type": "optimizer", "dataset.path": "data", "dataloader.workers": "data workers"}
    short |= dict.fromkeys(("model.name", "model.factory"), "")
    words = {True: "on", False: "off", None: "none"}
    texts = []
    for path, value in values.items():
        # isinstance first, since 1 and 0 are equal to the keys True and False.
        shown = words[value] if isinstance(value, bool | None) else value
        texts.append(f"{short.get(path, path.rpartition('.')[2])} {shown}".strip())
    return ", ".join(texts)


def _require(condition: bool, field_name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{field_name} is {value!r}: {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and its training, or the user's own script, which provides both.

    Rows of a comparison share it, except for their ``workload_changes``. A field without a description is described by
    the option or axis of the same name (``options``, ``axes``).
    """

    model: str
    """Name that the user gave: a preset, a local path, a Hub name or ``pkg.mod:function``."""
    model_source: ModelSource
    model_type: str | None = None
    """Transformers' architecture name (``gpt2``); None for a factory."""
    model_config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``AutoConfig.for_model`` for a preset, ``path`` for a local model; otherwise empty."""
    batch_size: int = 4
    """Micro-batch: sequences per GPU in one forward pass."""
    batch_policy: BatchPolicy = "given"
    """``largest``: the row runs at its own largest micro-batch that trains, and is compared with other such rows."""
    seq_length: int = 512
    grad_accum: int = 1
    num_steps: int = 20
    warmup_steps: int = 5
    precision: Precision = "bf16"
    activation_checkpointing: bool = False
    seed: int = 42
    trust_remote_code: bool = False
    dropout: float | None = None
    """None: the model's own."""
    lora: str | None = None
    """LoRA adapters, the only weights that are trained if set (``trained_parameters.parse_lora``); None: none."""
    freeze: str | None = None
    """Substrings of the names of frozen parameters; None: none."""
    attention: str | None = None
    """None: Transformers' own choice."""
    loss: LossName = "model"
    tiled_mlp: bool = False
    compile: CompileName = "none"
    """``torch``: ``engine.compile()`` compiles the model, as it does if the DeepSpeed configuration enables
    ``compile.deepcompile``."""
    data_workers: int | None = None
    """None: no data loader; micro-batches are on the device before training begins."""
    data_pin_memory: bool = False
    data_prefetch: int = DEFAULT_PREFETCH
    cpu_binding: CpuBinding = "none"
    pass_type: PassType = "train"
    """Extent of a measured step: the ``forward`` pass with everything a backward pass would need, ``forward_backward``,
    or ``train``, which adds the optimizer's step. DeepSpeed runs only ``train``; the others time the model without
    an optimizer (``worker.reference_engines``)."""
    synchronized: bool = True
    zero_init: bool = True
    vocab_size: int | None = None
    """Exclusive upper bound of token ids, random or from a file; None: the model's number of ids."""
    data_path: str | None = None
    """File of token ids to train on; None: random ids."""
    data_dtype: TokenType | None = None
    """Type of the file's ids; None without a file."""
    data_tokens: int | None = None
    """Number of the file's ids, which every rank compares with its own file; None without a file."""
    data_digest: str | None = None
    """Hash of the file's content, so that different content is a different workload; None without a file."""
    seq_policy: SequencePolicy = "given"
    """``longest``: the row runs at its own longest sequence that trains, and is compared with other such rows."""
    script: Script | None = None
    """The user's own training script; with one, the numbers of steps are the only other fields that mean anything."""

    @property
    def fills_memory(self) -> bool:
        """Whether the micro-batch or sequence is the largest that trains, found by search."""
        return self.batch_policy == "largest" or self.seq_policy == "longest"

    def __post_init__(self) -> None:
        _require(bool(self.model), "model", self.model, "must not be empty")
        for name in ("batch_size", "seq_length", "grad_accum", "num_steps", "vocab_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "must be 1 or more")
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "must be 0 or more")
        known = self.attention is None or self.attention in ATTENTIONS
        _require(known, "attention", self.attention, f"must be one of {ATTENTIONS}")
        _require(
            self.dropout is None or 0 <= self.dropout < 1, "dropout", self.dropout, "must be at least 0 and below 1"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A named entry of the catalogue (``strategies``): a ZeRO stage with offloads, or a reference engine of torch."""

    name: str
    """Stable name, as in ``--strategies``: ``zero2``, ``cpu_optimizer``."""
    label: str
    """Short text for tables: ``ZeRO-2``."""
    stage: int
    """ZeRO stage, 0 to 3; for a reference engine, the stage with the same partitioning."""
    offload_optimizer: Device = "none"
    """Where optimizer states live and the optimizer steps; ``none``: on the accelerator."""
    offload_param: Device = "none"
    """Where parameters live between uses, at stage 3; ``none``: on the accelerator."""
    engine: Engine = "deepspeed"


def gpu_precisions(capability: tuple[int, int] | None) -> tuple[Precision, ...]:
    """Return the number formats that GPUs train in. ``capability``: the lowest in the job; None if unknown."""
    has_bf16 = capability is None or capability >= (8, 0)  # Ampere
    return ("bf16", "fp16", "fp32") if has_bf16 else ("fp16", "fp32")


def block_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a block of a DeepSpeed configuration; empty if it is missing."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def offload_device(config: Mapping[str, Any], block_name: str) -> str | None:
    """Return the device of an offload block of a DeepSpeed configuration: ``cpu``, ``nvme``; None without offload.

    ``block_name``: one of ``OFFLOAD_BLOCKS``.
    """
    device = block_of(block_of(config, "zero_optimization"), block_name).get("device", "none")
    return None if device in (None, "none") else str(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Needs of a configuration that its DeepSpeed configuration does not show."""

    ops: tuple[str, ...] = ()
    """Builder classes of DeepSpeed ops."""
    accelerator: Accelerator | None = None
    reason: str = ""
    """Why it needs that accelerator; may be empty."""
    min_ranks: int = 1
    min_nodes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One thing to compare, a row of the table: a named DeepSpeed configuration, and what it changes in the workload.

    Stage and offload devices are read from ``deepspeed_config`` and never stored separately.
    """

    name: str
    """Unique in a comparison and machine-readable: ``zero2``, ``cpu_optimizer``, ``my_config``."""
    label: str
    """Short text for tables: ``ZeRO-2``."""
    deepspeed_config: Mapping[str, Any]
    """From the catalogue, the user's function or file, and the flags, before ``complete_config``."""
    workload_changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Workload that this row sets, with their values."""
    engine: Engine = "deepspeed"
    """DeepSpeed or, in a reference row, torch's DistributedDataParallel or ``fully_shard``."""
    source: ConfigurationSource = "catalogue"
    requires: Requirements = Requirements()
    file_text: str | None = None
    """Literal text of its file, credentials redacted; None without a file."""
    resolved_values: Mapping[str, Any] = field(default_factory=dict)
    """Path of each key that was ``"auto"`` in the file → the value it got."""
    axis_values: Mapping[str, str] = field(default_factory=dict)
    """Name of each axis of this row → its value as the user gave it."""
    caveats: tuple[str | Caveat, ...] = ()
    """How the row differs from its file."""
    refusal: str | None = None
    """Why DeepSpeed or this program rejects its file, with the remedy; None if neither does."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of this row's ranks only."""

    def __post_init__(self) -> None:
        _require(bool(self.name), "name", self.name, "must not be empty")
        _require(type(self.stage) is int and 0 <= self.stage <= 3, "stage", self.stage, "must be 0, 1, 2 or 3")
        for block_name in OFFLOAD_BLOCKS:
            device = offload_device(self.deepspeed_config, block_name) or "none"
            _require(device in DEVICES, f"{block_name}.device", device, f"must be one of {DEVICES}")
        unknown = self.workload_changes.keys() - _WORKLOAD_FIELDS
        _require(not unknown, "workload_changes", sorted(unknown), "must be fields of the workload")

    @property
    def stage(self) -> int:
        """ZeRO stage, 0 to 3; 0 if the DeepSpeed configuration names none."""
        stage: int = block_of(self.deepspeed_config, "zero_optimization").get("stage", 0)
        return stage

    @property
    def offload_optimizer(self) -> Device:
        return offload_device(self.deepspeed_config, "offload_optimizer") or "none"  # type: ignore[return-value]

    @property
    def offload_param(self) -> Device:
        return offload_device(self.deepspeed_config, "offload_param") or "none"  # type: ignore[return-value]

    @property
    def layout(self) -> tuple[int, Device, Device]:
        """Stage and both offload devices, which decide where model states live."""
        return self.stage, self.offload_optimizer, self.offload_param

    @property
    def is_reference(self) -> bool:
        """Whether torch's own engine trains it; such a row is never recommended."""
        return self.engine != "deepspeed"

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.offload_optimizer, self.offload_param)

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload_optimizer != "none"

    @property
    def offloads(self) -> bool:
        return self.layout[1:] != ("none", "none")

    def applied_to(self, workload: Workload) -> Workload:
        """Return the workload as this row trains it."""
        return replace(workload, **self.workload_changes)


_WORKLOAD_FIELDS = frozenset(each.name for each in fields(Workload))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a trial runs."""

    accelerator: Accelerator
    """``cuda``, or ``cpu`` for DeepSpeed's CPU accelerator."""
    num_gpus: int = 1
    """Ranks in the whole job: GPUs, or processes on the CPU accelerator."""
    launcher: LauncherName = "warm"
    hostfile: str | None = None
    """DeepSpeed hostfile of a job on several nodes."""
    nvme_path: str | None = None
    """Folder on the NVMe disk; each trial uses a private sub-folder."""
    cpu_memory_limit_bytes: int | None = None
    """Limit of each rank's data segment (RLIMIT_DATA); None for no limit."""
    gpu_memory_limit_bytes: int | None = None
    """Memory of a smaller GPU that torch's allocator emulates, per rank; None for the real GPU."""
    supported_precisions: tuple[Precision, ...] = PRECISIONS
    """Number formats that this accelerator trains in."""
    compute_capability: tuple[int, int] | None = None
    """Of the oldest GPU; None on the CPU accelerator, or if unknown."""
    hosts: tuple[tuple[str, int], ...] = ()
    """Each host of the hostfile, or of a Slurm or torchrun job, with its number of ranks, in the order of the ranks;
    empty if the job runs on this machine."""
    include: str | None = None
    """The slots of the hostfile to use, in the form of DeepSpeed's ``--include``; None: all."""
    host_command: str | None = None
    """Command line that runs a program on ``{host}``; None on one host, or if a launcher has started the agents."""
    forwarded_variables: tuple[str, ...] = ()
    """Names of further environment variables for the ranks on other hosts."""
    master_addr: str | None = None
    """Address of the first host, where the ranks meet; None: its address on the route to the second host."""
    master_port: int | None = None
    """Port of rank 0 at that address; None: a free one."""

    def __post_init__(self) -> None:
        _require(self.num_gpus >= 1, "num_gpus", self.num_gpus, "must be 1 or more")

    @property
    def is_on_this_host(self) -> bool:
        return self.hostfile is None and not self.hosts

    @property
    def num_nodes(self) -> int:
        return max(1, len(self.hosts))

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on the host that has the most."""
        return max((slots for _, slots in self.hosts), default=self.num_gpus)

    def slots_of(self, host: str) -> list[int]:
        """Return the slots of a host that have ranks: those that ``include`` names, otherwise the first ones."""
        for part in (self.include or "").split("@"):
            name, _, slots = part.rpartition(":")
            if name == host:
                return [int(slot) for slot in slots.split(",")]
        return list(range(dict(self.hosts).get(host, 0)))

    def slots_of_node(self, number: int) -> list[int]:
        """Return the GPUs that have ranks on a node; none on the CPU accelerator or beyond the last node."""
        if self.accelerator != "cuda" or number >= self.num_nodes:
            return []
        return self.slots_of(self.hosts[number][0]) if self.hosts else list(range(self.num_gpus))

    @property
    def ranks_text(self) -> str:
        """``8``; on several nodes ``2 nodes × 8``, or ``2 nodes, 12`` if their numbers of ranks differ."""
        if self.num_nodes == 1:
            return str(self.num_gpus)
        alike = self.num_gpus == self.num_nodes * self.ranks_per_node
        return f"{self.num_nodes} nodes{f' × {self.ranks_per_node}' if alike else f', {self.num_gpus}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Observations besides the measured steps, outside the measured window except for ``monitor``.

    ``options`` describes the fields.
    """

    profiles: tuple[ProfileName, ...] = ()
    profile_steps: int = 2
    profile_ranks: tuple[int, ...] = (0,)
    nsys_start: int = -1
    nsys_end: int = -1
    checkpoint: bool = False
    checkpoint_path: str | None = None
    monitor: Monitor | None = None

    def profiled_steps(self, steps_before: int) -> range:
        """Return the steps that a profiler observes. ``steps_before``: number of warm-up and measured steps."""
        return range(steps_before, steps_before + self.profile_steps)

    def nsys_window(self, steps_before: int) -> range:
        """Return the steps that nsys records."""
        observed = self.profiled_steps(steps_before)
        first = observed.start if self.nsys_start < 0 else self.nsys_start
        return range(first, observed.stop if self.nsys_end < 0 else self.nsys_end + 1)


NO_INSPECTION = Inspection()
INSPECTION_FIELDS = tuple(each.name for each in fields(Inspection))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration run once: the unit that is launched, recorded and resumed."""

    trial_id: str
    """Folder name inside the run: ``03_zero2_r1``."""
    repeat: int
    """0-based number of the repetition."""
    configuration: Configuration
    workload: Workload
    """With the configuration's ``workload_changes``."""
    placement: Placement
    ds_config: Mapping[str, Any]
    """The DeepSpeed configuration as passed to ``deepspeed.initialize``, apart from the swap folder."""
    unsupported: str | None = None
    """Why this cannot run here, with the remedy; None if it can."""
    skipped: str | None = None
    """Why it is predicted not to fit and left out; None if it runs."""
    caveats: tuple[str | Caveat, ...] = ()
    """Caveats known before it runs."""
    prediction: Mapping[str, Any] | None = None
    """Predicted memory (``prediction.predicted_memory.Prediction.to_dict``); None without a prediction."""
    round_position: int | None = None
    """0-based position in its round; None if unknown."""
    inspection: Inspection = NO_INSPECTION
    point: Mapping[str, Any] = field(default_factory=dict)
    """Key paths of a recipe → their values at this trial's point of the sweep; empty without a sweep. Only
    its ``common_settings`` enter the work key; workload, placement and configuration already show the rest."""

    def __post_init__(self) -> None:
        # Not with pathlib, which takes longer than reading the row of a trial.
        is_name = "/" not in self.trial_id and self.trial_id not in ("", ".", "..")
        _require(is_name, "trial_id", self.trial_id, "must be the name of a folder")

    @property
    def common_settings(self) -> dict[str, Any]:
        """The values of its point that are set in every DeepSpeed configuration."""
        return {path: value for path, value in self.point.items() if path.startswith(("optimizer.", "configurations."))}

    @property
    def not_launched(self) -> bool:
        return self.unsupported is not None or self.skipped is not None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, with credentials redacted."""
        values = asdict(self)
        values["ds_config"] = redacted_config(self.ds_config)
        values["configuration"]["deepspeed_config"] = redacted_config(self.configuration.deepspeed_config)
        return values
