"""The axes: named dimensions along which rows differ, as a table.

An axis says which values it takes, what each value sets, where it acts, what it is expected to change, and where that
is written. ``axis_rows`` reads values from text and makes rows of them. ``docs/axes.md`` is made of this table by
``scripts/make_axes_page.py``.

Sources are DeepSpeed 0.19.8 (paths below ``deepspeed/``) unless another project is named; ``#1234`` is a pull request
or issue of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .automatic_values import trainer_sizes
from .deepspeed_config import ADAMW_PARAMETERS, DEFAULT_SIZES, sizes_for
from .spec import ATTENTIONS, CPU_BINDINGS, ENGINES, LOSSES, MAX_DATA_WORKERS, MAX_PREFETCH, PRECISIONS, Requirements

Value = bool | int | float | str
"""A value of an axis: a truth value, a number, or a name."""
CHANGES = {
    "parameters": "ledger: parameters",
    "gradients": "ledger: gradients",
    "optimizer_states": "ledger: optimizer states",
    "deepspeed_buffers": "ledger: DeepSpeed's buffers",
    "activations": "ledger: activations",
    "nvme": "swapping",
    "peak": "peak memory within a step",
    "time": "step time",
    "optimizer": "optimizer class",
    "losses": "losses",
    "batch": "tokens per step",
    "build": "memory while the model is built and initialised",
    "nothing": "nothing in this version",
}
"""What an axis may change, with its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What decides whether an axis acts in a row."""

    stage: int
    offload_optimizer: str | None = None
    """``cpu``, ``nvme`` or None."""
    offload_param: str | None = None
    engine: str = "deepspeed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts(Layout):
    """What the settings of a value may depend on: the row that they are made for."""

    grad_accum: int
    ranks: int
    hidden_size: int | None = None
    """None where the model has none or it is not known."""
    parameters: int | None = None
    """Elements of the whole model; None where they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one value of an axis sets in a row."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the DeepSpeed configuration, block by block; None removes a key."""
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Workload with their values."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the row's ranks."""
    requires: Requirements = field(default_factory=Requirements)


class NotForThisRowError(ValueError):
    """A value that cannot be set in this row; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The numbers that an axis takes."""

    least: float
    most: float
    whole: bool = True
    """Only whole numbers, which may be written as ``5e8``."""


Compute = Callable[[Value, RowFacts], Setting]
"""(value, row) → what it sets there. Raises NotForThisRowError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A named dimension along which rows differ."""

    name: str
    """As in ``--axis NAME=VALUE``."""
    group: str
    """Heading under which it is listed."""
    meaning: str
    """What it is, in a sentence without its full stop."""
    label: str = ""
    """Short text for tables, before the value; empty: the name."""
    keys: tuple[str, ...] = ()
    """Paths of the DeepSpeed keys that it sets; each gets the value itself, unless ``settings`` says otherwise.

    A key inside an offload block is set only in rows that have the block.
    """
    fields: tuple[str, ...] = ()
    """Fields of the Workload that it sets; each gets the value itself, unless ``settings`` says otherwise."""
    variables: tuple[str, ...] = ()
    """Environment variables that it sets; each gets the value's text."""
    switch: bool = False
    """Takes ``true`` and ``false``."""
    numbers: Numbers | None = None
    names: tuple[str, ...] = ()
    """Named values."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Named value → what it sets, where that is not the value itself."""
    compute: Compute | None = None
    """What a value sets, where that depends on the row."""
    default: str = ""
    """What a row without it has."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages at which it acts."""
    offload: Literal["optimizer", "optimizer or parameters", "nvme"] | None = None
    """What a row must offload so that it acts; None: nothing."""
    engines: tuple[str, ...] = ("deepspeed",)
    changes: tuple[str, ...]
    """What it is expected to change, besides the configuration: keys of :data:`CHANGES`. With ``losses`` it changes the
    arithmetic, and a row is compared with rows of the same value alone."""
    same_losses: tuple[str, ...] = ()
    """With ``losses``: the values that leave the arithmetic as it is without the axis."""
    note: str = ""
    """What else a user must know."""
    cuda_only: str = ""
    """Why values other than the default are Unsupported on the CPU accelerator; empty where they run there."""
    requires: Mapping[str, Requirements] = field(default_factory=dict)
    """Value → what it needs besides."""
    source: str

    @property
    def title(self) -> str:
        return self.label or self.name

    @property
    def values(self) -> tuple[str, ...]:
        """The values that have a name, ``true`` and ``false`` among them."""
        return (*(("true", "false") if self.switch else ()), *self.names)


ZERO = "zero_optimization."
OPTIMIZER = ZERO + "offload_optimizer."
PARAM = ZERO + "offload_param."
_SIZES = Numbers(least=1, most=1e13)
_SIZES_OR_0 = Numbers(least=0, most=1e13)


def _known(size: int | None, what: str) -> int:
    if size is None:
        raise NotForThisRowError(f"needs the model's {what}, which is not known")
    return size


def small_sizes(hidden_size: int) -> dict[str, int]:
    """Return sizes of one to two decoder layers, by key of ``zero_optimization``.

    A layer has about 12 h² parameters. Buckets hold one matrix (h²); stage 3 gathers at most two layers and keeps none
    for a use further away than that.
    """
    matrix = hidden_size * hidden_size
    return {
        "reduce_bucket_size": matrix,
        "allgather_bucket_size": matrix,
        "stage3_prefetch_bucket_size": int(0.9 * matrix),
        "stage3_max_live_parameters": 24 * matrix,
        "stage3_max_reuse_distance": 24 * matrix,
    }


def _buffers(value: Value, row: RowFacts) -> Setting:
    if value == "default":
        sizes = DEFAULT_SIZES
    else:
        sizes_of = small_sizes if value == "small_buffers" else trainer_sizes
        sizes = sizes_of(_known(row.hidden_size, "hidden size"))
    return Setting(config={"zero_optimization": sizes_for(sizes, row.stage, row.offload_param)})


def _size_or_auto(key: str) -> Compute:
    """A size that is the Trainer's automatic one for ``auto``."""

    def compute(value: Value, row: RowFacts) -> Setting:
        size = trainer_sizes(_known(row.hidden_size, "hidden size"))[key] if value == "auto" else value
        return Setting(config={"zero_optimization": {key: size}})

    return compute


_SUB_GROUPS_PER_RANK = 8
"""Sub-groups into which a rank's part is split at least, so that a ratio moves about the part that it names."""


def _offload_ratio(value: Value, row: RowFacts) -> Setting:
    # DeepSpeed moves whole sub-groups to the host (runtime/zero/stage3.py): with one, a ratio has no effect.
    part = _known(row.parameters, "number of parameters") // row.ranks
    return Setting(
        config={
            "zero_optimization": {
                "offload_optimizer": {"ratio": value},
                "sub_group_size": max(1, part // _SUB_GROUPS_PER_RANK),
            }
        }
    )


def _zenflow(value: Value, row: RowFacts) -> Setting:
    if value == "off":
        return Setting(config={"zero_optimization": {"zenflow": None}})
    # DeepSpeed takes update_interval for the accumulation, and its "auto" as 0 (runtime/zenflow/engine.py).
    interval = row.grad_accum
    block = {
        "topk_ratio": 0.1,
        "select_strategy": "step",
        "select_interval": interval,
        "update_interval": interval,
        "full_warm_up_rounds": 0,
        "overlap_step": value == "overlap",
    }
    return Setting(config={"zero_optimization": {"zenflow": block}})


def _hpz(value: Value, row: RowFacts) -> Setting:
    ranks = int(value)
    if row.ranks % max(ranks, 1):
        raise NotForThisRowError(f"must divide the {row.ranks} ranks")
    return Setting(config={"zero_optimization": {"zero_hpz_partition_size": ranks}})


def _optimizer_block(kind: str, **params: Any) -> dict[str, Any]:
    """The block of an optimizer; parameters of others are removed."""
    # None removes what the row had: DeepSpeed stops for an argument that the other class does not take.
    all_params = {"betas": None, "eps": None, "torch_adam": None, "fused": None, "adam_w_mode": None} | params
    return {"optimizer": {"type": kind, "params": all_params}}


_ADAM = {key: ADAMW_PARAMETERS[key] for key in ("betas", "eps")}
_OPTIMIZER_CONFIGS: dict[str, dict[str, Any]] = {
    "adamw": _optimizer_block("AdamW", **_ADAM),
    "torch_adamw": _optimizer_block("AdamW", **_ADAM, torch_adam=True),
    "torch_fused_adamw": _optimizer_block("AdamW", **_ADAM, torch_adam=True, fused=True),
    "adam": _optimizer_block("Adam", **_ADAM, adam_w_mode=False),
    "lion": _optimizer_block("Lion"),
    "adagrad": _optimizer_block("Adagrad"),
    "muon": _optimizer_block("Muon"),
}


def _optimizer(value: Value, row: RowFacts) -> Setting:
    config = _OPTIMIZER_CONFIGS[str(value)]
    if value in ("torch_adamw", "torch_fused_adamw") and row.offload_optimizer:
        raise NotForThisRowError("does not step on the host; offloaded AdamW is DeepSpeed's own: optimizer=adamw")
    # DeepSpeed refuses Muon with reduce_scatter at stage 3 (runtime/zero/stage3.py).
    if value == "muon" and row.stage == 3:
        config = config | {"zero_optimization": {"reduce_scatter": False}}
    return Setting(config=config)


_PRECISIONS = {
    "bf16": Setting(config={"fp16": None, "bf16": {"enabled": True}}, workload={"precision": "bf16"}),
    "fp16": Setting(config={"bf16": None, "fp16": {"enabled": True}}, workload={"precision": "fp16"}),
    "fp32": Setting(config={"bf16": None, "fp16": None}, workload={"precision": "fp32"}),
}
_AUTOCAST = {
    "off": Setting(config={"torch_autocast": None}),
    "bf16": Setting(
        config={"bf16": None, "fp16": None, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        workload={"precision": "bf16"},
    ),
    "fp16": Setting(
        config={"bf16": None, "fp16": None, "torch_autocast": {"enabled": True, "dtype": "float16"}},
        workload={"precision": "fp16"},
    ),
}


def _bf16_block(master: bool, states: bool) -> Setting:
    # "enabled" too: a block without it would train in fp32.
    block = {"enabled": True, "bf16_master_weights_and_grads": master, "bf16_optimizer_states": states}
    return Setting(config={"bf16": block}, workload={"precision": "bf16"})


_PIPELINES = {
    name: Setting(
        config={
            "zero_optimization": {
                "offload_optimizer": {
                    "pipeline_read": name in ("read", "both"),
                    "pipeline_write": name in ("write", "both"),
                }
            }
        }
    )
    for name in ("off", "read", "write", "both")
}

_WORKLOAD = (
    Axis(
        name="activation_checkpointing",
        group="Workload",
        label="checkpointing",
        meaning="recomputes the activations of each layer in the backward pass instead of keeping them",
        fields=("activation_checkpointing",),
        switch=True,
        default="false",
        engines=ENGINES,
        changes=("activations", "time"),
        note="through Transformers' gradient_checkpointing_enable: DeepSpeed's activation_checkpointing block does "
        "nothing for its models",
        source="runtime/activation_checkpointing/checkpointing.py; transformers/modeling_utils.py",
    ),
    Axis(
        name="micro_batch",
        group="Workload",
        label="micro-batch",
        meaning="sequences per GPU in one forward pass",
        keys=("train_micro_batch_size_per_gpu",),
        fields=("batch_size",),
        numbers=Numbers(least=1, most=4096),
        default="--batch-size",
        engines=ENGINES,
        changes=("activations", "time", "batch"),
        note="rows are compared by tokens per second",
        source="runtime/config.py",
    ),
    Axis(
        name="grad_accum",
        group="Workload",
        label="accumulation",
        meaning="micro-batches per optimizer step",
        keys=("gradient_accumulation_steps",),
        fields=("grad_accum",),
        numbers=Numbers(least=1, most=4096),
        default="--grad-accum",
        engines=ENGINES,
        changes=("peak", "time", "batch"),
        note="rows are compared by tokens per second",
        source="runtime/config.py",
    ),
)

_PRECISION = (
    Axis(
        name="precision",
        group="Precision",
        meaning="number format of parameters and activations",
        keys=("bf16", "fp16"),
        fields=("precision",),
        names=PRECISIONS,
        settings=_PRECISIONS,
        default="--precision",
        engines=ENGINES,
        changes=("parameters", "gradients", "activations", "time", "losses"),
        source="runtime/precision_config.py",
    ),
    Axis(
        name="torch_autocast",
        group="Precision",
        label="autocast",
        meaning="keeps parameters in fp32 and lets torch choose the format of each operation",
        keys=("torch_autocast", "bf16", "fp16"),
        fields=("precision",),
        names=("off", "bf16", "fp16"),
        settings=_AUTOCAST,
        default="off",
        same_losses=("off",),
        changes=("parameters", "gradients", "optimizer_states", "activations", "time", "losses"),
        source="runtime/torch_autocast.py, since 0.17.2",
    ),
    Axis(
        name="bf16_states",
        group="Precision",
        label="bf16 states",
        meaning="keeps master weights and gradients (master), and the optimizer's moments too (all), in bf16 not fp32",
        keys=("bf16.enabled", "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
        fields=("precision",),
        names=("off", "master", "all"),
        settings={
            "off": _bf16_block(master=False, states=False),
            "master": _bf16_block(master=True, states=False),
            "all": _bf16_block(master=True, states=True),
        },
        default="off",
        same_losses=("off",),
        stages=(1, 2, 3),
        changes=("optimizer_states", "gradients", "time", "losses"),
        note="master alone needs the optimizer on the CPU. DeepSpeed's example keeps 16.2 instead of 25.7 GiB resident "
        "for 6.9 billion parameters on four GPUs. Small updates are lost in bf16: check the losses",
        source="runtime/base_optimizer.py, _configure_master_weights; since 0.18.3, with offload #8010",
    ),
)

_COMMUNICATION = (
    Axis(
        name="overlap_comm",
        group="Communication and buckets",
        meaning="reduces gradients while the backward pass goes on, through a second bucket at stages 1 and 2",
        keys=(ZERO + "overlap_comm",),
        switch=True,
        default="true at stage 3, else false",
        stages=(1, 2, 3),
        changes=("deepspeed_buffers", "time"),
        note="at stage 3 it adds no bucket",
        source="runtime/zero/stage_1_and_2.py, setup_buckets; runtime/zero/stage3.py, __init__",
    ),
    Axis(
        name="buffers",
        group="Communication and buckets",
        meaning="all buffer sizes together: those of about a layer, those of the Trainer's auto, or the defaults",
        keys=tuple(ZERO + key for key in DEFAULT_SIZES),
        names=("small_buffers", "trainer_auto", "default"),
        compute=_buffers,
        default="default",
        stages=(1, 2, 3),
        changes=("deepspeed_buffers", "peak", "time"),
        note="with h the hidden size: small_buffers has buckets of h², prefetch 0.9 h², live parameters and reuse "
        "distance 24 h²; trainer_auto has a reduce bucket of h², prefetch 0.9 h² and persistence 10 h; "
        "with parameters on NVMe prefetch and reuse distance stay 0",
        source="transformers/integrations/deepspeed.py, trainer_config_finalize; #4093, #5305",
    ),
    Axis(
        name="reduce_bucket_size",
        group="Communication and buckets",
        label="reduce bucket",
        meaning="elements of the buffer in which gradients are reduced; auto: h², h the hidden size",
        keys=(ZERO + "reduce_bucket_size",),
        numbers=_SIZES,
        names=("auto",),
        compute=_size_or_auto("reduce_bucket_size"),
        default="5e8",
        stages=(1, 2, 3),
        changes=("deepspeed_buffers", "time"),
        source="runtime/zero/stage_1_and_2.py, setup_buckets; #6351",
    ),
    Axis(
        name="allgather_bucket_size",
        group="Communication and buckets",
        label="allgather bucket",
        meaning="elements of updated parameters that are gathered at once after the step",
        keys=(ZERO + "allgather_bucket_size",),
        numbers=_SIZES,
        default="5e8",
        stages=(1, 2),
        changes=("nothing",),
        note="torch has all_gather_into_tensor, with which DeepSpeed gathers everything at once and reads no size",
        source="runtime/utils.py, all_gather_dp_groups",
    ),
    Axis(
        name="reduce_scatter",
        group="Communication and buckets",
        meaning="sends each rank its part of the gradients only, instead of reducing all on every rank",
        keys=(ZERO + "reduce_scatter",),
        switch=True,
        default="true",
        stages=(2, 3),
        changes=("peak", "time"),
        source="runtime/zero/stage_1_and_2.py, average_tensor; runtime/zero/stage3.py, __avg_scatter_grads",
    ),
    Axis(
        name="contiguous_gradients",
        group="Communication and buckets",
        meaning="copies gradients into one buffer as they are made, which avoids fragmentation",
        keys=(ZERO + "contiguous_gradients",),
        switch=True,
        default="true",
        stages=(1, 2, 3),
        changes=("deepspeed_buffers", "time"),
        note="rows that offload the optimizer at stages 1 and 2 have it always",
        source="runtime/zero/stage_1_and_2.py, setup_buckets",
    ),
    Axis(
        name="round_robin_gradients",
        group="Communication and buckets",
        label="round robin",
        meaning="orders parameters so that all ranks copy gradients at the same time",
        keys=(ZERO + "round_robin_gradients",),
        switch=True,
        default="false",
        stages=(1, 2),
        changes=("gradients", "time"),
        source="runtime/zero/stage_1_and_2.py, _round_robin_reorder",
    ),
    Axis(
        name="communication_data_type",
        group="Communication and buckets",
        label="communication",
        meaning="number format in which gradients are sent",
        keys=("communication_data_type",),
        names=("fp32", "bf16", "fp16"),
        default="that of the parameters",
        changes=("deepspeed_buffers", "peak", "time"),
        note="at stage 3 the bucket has this format too",
        source="runtime/engine.py, communication_data_type; runtime/zero/stage3.py, _setup_for_real_optimizer",
    ),
)

_STAGE_3 = (
    Axis(
        name="prefetch",
        group="Stage 3",
        meaning="elements of parameters that are gathered ahead of their use; auto: 0.9 h², h the hidden size",
        keys=(ZERO + "stage3_prefetch_bucket_size",),
        numbers=_SIZES_OR_0,
        names=("auto",),
        compute=_size_or_auto("stage3_prefetch_bucket_size"),
        default="5e7",
        stages=(3,),
        changes=("peak", "time"),
        source="runtime/zero/partitioned_param_coordinator.py, fetch_sub_module",
    ),
    Axis(
        name="persistence",
        group="Stage 3",
        meaning="tensors of up to this many elements stay gathered; auto: 10 h, h the hidden size",
        keys=(ZERO + "stage3_param_persistence_threshold",),
        numbers=_SIZES_OR_0,
        names=("auto",),
        compute=_size_or_auto("stage3_param_persistence_threshold"),
        default="1e5",
        stages=(3,),
        changes=("parameters", "time"),
        source="runtime/zero/parameter_offload.py, mark_persistent_parameters",
    ),
    Axis(
        name="live_parameters",
        group="Stage 3",
        label="live parameters",
        meaning="elements of gathered parameters above which none is prefetched",
        keys=(ZERO + "stage3_max_live_parameters",),
        numbers=_SIZES_OR_0,
        default="1e9",
        stages=(3,),
        changes=("peak", "time"),
        source="runtime/zero/partitioned_param_coordinator.py, fetch_sub_module; #4093, #4305",
    ),
    Axis(
        name="reuse_distance",
        group="Stage 3",
        label="reuse distance",
        meaning="elements until its next use within which a gathered parameter is kept",
        keys=(ZERO + "stage3_max_reuse_distance",),
        numbers=_SIZES_OR_0,
        default="1e9",
        stages=(3,),
        changes=("peak", "time"),
        source="runtime/zero/partitioned_param_coordinator.py, __params_to_release; #5305",
    ),
    Axis(
        name="allgather_sequential",
        group="Stage 3",
        meaning="gathers parameters one by one without a common buffer; sets the prefetch bucket to 1",
        keys=(ZERO + "stage3_allgather_sequential",),
        switch=True,
        default="false",
        stages=(3,),
        changes=("peak", "time"),
        source="runtime/engine.py, _configure_zero_optimizer; #7661, since 0.18.5",
    ),
    Axis(
        name="sub_group_size",
        group="Stage 3",
        meaning="elements of the rank's part that the optimizer updates at once",
        keys=(ZERO + "sub_group_size",),
        numbers=_SIZES,
        default="1e9",
        stages=(3,),
        changes=("peak", "time"),
        source="runtime/zero/stage3.py, _create_fp16_sub_groups",
    ),
    Axis(
        name="leaf_modules",
        group="Stage 3",
        label="leaf modules",
        meaning="gathers a mixture-of-experts block whole, whichever experts a rank uses",
        keys=(ZERO + "leaf_module",),
        names=("default", "off"),
        settings={
            "default": Setting(config={"zero_optimization": {"leaf_module": None}}),
            "off": Setting(config={"zero_optimization": {"leaf_module": {"classes": []}}}),
        },
        default="default: the blocks of Mixtral, Qwen2-MoE and Qwen3-MoE",
        stages=(3,),
        changes=("peak", "time"),
        note="only models with experts change; without it ranks that use other experts may wait for each other for "
        "ever (#4808)",
        source="runtime/zero/leaf_module_config.py, since 0.18.0",
    ),
    Axis(
        name="hpz",
        group="ZeRO++",
        meaning="ranks among which a second copy of the parameters is split, so that backward gathers within a node",
        keys=(ZERO + "zero_hpz_partition_size",),
        numbers=Numbers(least=1, most=4096),
        compute=_hpz,
        default="1",
        stages=(3,),
        changes=("parameters", "time"),
        note="a number that divides the ranks, usually those of one node",
        source="arXiv 2306.10209; runtime/zero/partition_parameters.py, _partition_param_sec",
    ),
    Axis(
        name="qwz",
        group="ZeRO++",
        meaning="sends parameters in 8 bits",
        keys=(ZERO + "zero_quantized_weights",),
        switch=True,
        default="false",
        stages=(3,),
        changes=("peak", "time", "losses"),
        same_losses=("false",),
        cuda_only="the op that quantises exists for CUDA alone",
        requires={"true": Requirements(ops=("QuantizerBuilder",))},
        source="arXiv 2306.10209; runtime/zero/partition_parameters.py, CUDAQuantizer",
    ),
    Axis(
        name="qgz",
        group="ZeRO++",
        meaning="sends gradients in 4 bits between nodes",
        keys=(ZERO + "zero_quantized_gradients",),
        switch=True,
        default="false",
        stages=(3,),
        changes=("peak", "time", "losses"),
        same_losses=("false",),
        cuda_only="the op that quantises exists for CUDA alone",
        requires={"true": Requirements(ops=("QuantizerBuilder",), min_nodes=2)},
        note="DeepSpeed ignores it on one node",
        source="arXiv 2306.10209; runtime/zero/stage3.py, __avg_scatter_grads",
    ),
)

_OFFLOAD = (
    Axis(
        name="offload_ratio",
        group="Offload",
        label="ratio",
        meaning="fraction of the optimizer that is offloaded (Twin-Flow); the rest steps on the accelerator",
        keys=(OPTIMIZER + "ratio", ZERO + "sub_group_size"),
        numbers=Numbers(least=0, most=1, whole=False),
        compute=_offload_ratio,
        default="1.0",
        stages=(3,),
        offload="optimizer",
        changes=("optimizer_states", "gradients", "time"),
        note="DeepSpeed splits by sub-group, so this also sets sub_group_size to an eighth of a rank's part; torch's "
        "AdamW steps the part on the accelerator",
        source="runtime/zero/stage3.py, _create_fp32_partitions; since 0.12.3",
    ),
    Axis(
        name="pin_memory",
        group="Offload",
        meaning="page-locks host memory, so that copies are faster and overlap",
        keys=(OPTIMIZER + "pin_memory", PARAM + "pin_memory"),
        switch=True,
        default="true",
        stages=(1, 2, 3),
        offload="optimizer or parameters",
        changes=("peak", "time"),
        cuda_only="on the CPU accelerator nothing is copied to a device, which is what pinned memory is for",
        source="runtime/zero/offload_config.py; default true since 0.19.5, #8207",
    ),
    Axis(
        name="pin_memory_backend",
        group="Offload",
        label="pinned by",
        meaning="what page-locks host memory: torch's allocator, which rounds up to powers of two, or DeepSpeed's op",
        variables=("DS_PIN_MEMORY_BACKEND",),
        names=("torch", "native"),
        default="torch",
        stages=(1, 2, 3),
        offload="optimizer or parameters",
        changes=("peak", "time"),
        cuda_only="on the CPU accelerator nothing is copied to a device, which is what pinned memory is for",
        requires={"native": Requirements(ops=("PinMemoryBuilder",))},
        source="utils/pin_memory.py, #8211",
    ),
    Axis(
        name="zenflow",
        group="Offload",
        meaning="steps the tenth of the gradients that matters most on the accelerator and the rest on the host; "
        "overlap: the host steps meanwhile",
        keys=(ZERO + "zenflow",),
        names=("off", "on", "overlap"),
        compute=_zenflow,
        default="off",
        same_losses=("off",),
        stages=(1, 2),
        offload="optimizer",
        changes=("deepspeed_buffers", "optimizer", "time", "losses"),
        note="DeepSpeed takes the update interval for the accumulation, so both intervals are set to the row's "
        "accumulation; with its auto the accumulation would be 0. At stage 3 DeepSpeed 0.19.8 transposes every matrix "
        "of the model, embeddings too, so that it trains wrongly or stops: refused",
        cuda_only="the first loss of its rows differs there and hardly falls",
        source="runtime/zenflow/engine.py, configure_zenflow; #7759, since 0.17.5",
    ),
    Axis(
        name="superoffload",
        group="Offload",
        meaning="steps on the host while backward goes on; made for superchips (GH200)",
        keys=(OPTIMIZER + "super_offload",),
        switch=True,
        default="false",
        stages=(3,),
        offload="optimizer",
        changes=("time",),
        note="it overlaps only with gradient_clipping 0, which --set gives; limited gains over PCIe (#7966)",
        cuda_only="its optimizer refuses the CPU accelerator",
        source="runtime/superoffload/superoffload_stage3.py, since 0.18.0",
    ),
    Axis(
        name="nvme_pipeline",
        group="NVMe",
        label="NVMe pipeline",
        meaning="reads the next, or writes the last, part of the optimizer while this part steps",
        keys=(OPTIMIZER + "pipeline_read", OPTIMIZER + "pipeline_write"),
        names=("off", "read", "write", "both"),
        settings=_PIPELINES,
        default="off",
        stages=(3,),
        offload="nvme",
        changes=("nvme", "time"),
        source="runtime/swap_tensor/pipelined_optimizer_swapper.py",
    ),
    Axis(
        name="aio_block_size",
        group="NVMe",
        label="aio block",
        meaning="bytes of one read or write; smaller tensors than this and 1 MiB stay in memory",
        keys=("aio.block_size",),
        numbers=Numbers(least=4096, most=2**30),
        default="1048576",
        stages=(3,),
        offload="nvme",
        changes=("nvme", "time"),
        source="runtime/swap_tensor/aio_config.py; optimizer_utils.py, MIN_AIO_BYTES",
    ),
    Axis(
        name="aio_queue_depth",
        group="NVMe",
        label="aio depth",
        meaning="reads and writes that are in the disk's queue at once",
        keys=("aio.queue_depth",),
        numbers=Numbers(least=1, most=1024),
        default="8",
        stages=(3,),
        offload="nvme",
        changes=("nvme", "time"),
        source="runtime/swap_tensor/aio_config.py",
    ),
)

_OPTIMIZERS = (
    Axis(
        name="optimizer",
        group="Optimizer",
        meaning="what steps: adamw is DeepSpeed's FusedAdam on a GPU and DeepSpeedCPUAdam where it is offloaded",
        keys=("optimizer", ZERO + "reduce_scatter"),
        names=tuple(_OPTIMIZER_CONFIGS),
        compute=_optimizer,
        default="adamw (--optimizer)",
        same_losses=("adamw", "torch_adamw", "torch_fused_adamw"),
        changes=("optimizer", "optimizer_states", "time", "losses"),
        note="muon trains matrices other than embeddings, and the rest with Adam; at stage 3 it needs reduce_scatter "
        "false, which is set. DeepSpeed has no CPU version of it. Before 0.19.8 it trained wrongly with offload "
        "(#8463) and at stage 3 with accumulation (#8443)",
        source="runtime/engine.py, _configure_basic_optimizer; runtime/zero/muon/",
    ),
)

PARALLEL_AXES = ("autotp", "sequence_parallel")
"""Axes with which ranks share data, so that fewer see different data; rows are compared by tokens per second."""

_COMPUTATION = (
    Axis(
        name="attention",
        group="Computation",
        meaning="attention implementation of Transformers; eager keeps the scores of every head",
        fields=("attention",),
        names=ATTENTIONS,
        default="sdpa, where the model has it",
        engines=ENGINES,
        changes=("activations", "time"),
        note="flash attention needs a GPU, 16 bit and its package (flash_attn, flash_attn_interface); flex_attention "
        "needs a GPU",
        source="transformers/modeling_utils.py, attn_implementation",
    ),
    Axis(
        name="loss",
        group="Computation",
        meaning="how logits and loss are computed: as the model does, with its logits in fp32; chunked: DeepSpeed's "
        "cross-entropy, which keeps the logits as they are; tiled: DeepSpeed's loss of a part of the tokens at a time, "
        "which keeps no logits; liger: Liger's fused kernel, likewise",
        fields=("loss",),
        names=LOSSES,
        default="model",
        changes=("activations", "peak", "time"),
        note="tiled and liger keep the gradients of the output layer and of its input instead; at long sequences "
        "nothing else saves as much. liger needs a GPU and the package liger_kernel",
        source="runtime/chunked_cross_entropy.py; runtime/sequence_parallel/ulysses_sp.py, TiledFusedLogitsLoss",
    ),
    Axis(
        name="tiled_mlp",
        group="Computation",
        label="tiled MLP",
        meaning="computes the MLP of each layer for a part of the tokens at a time, and again in the backward pass",
        fields=("tiled_mlp",),
        switch=True,
        default="false",
        changes=("activations", "peak", "time"),
        note="keeps the input of each MLP alone; for sequences that are long beside the hidden size",
        source="runtime/sequence_parallel/ulysses_sp.py, TiledMLP",
    ),
    Axis(
        name="compile",
        group="Computation",
        meaning="compiles the model: torch.compile, or DeepCompile, which also schedules ZeRO's communication",
        keys=("compile.deepcompile",),
        fields=("compile",),
        names=("none", "torch", "deepcompile"),
        settings={
            "none": Setting(config={"compile": {"deepcompile": False}}, workload={"compile": "none"}),
            "torch": Setting(config={"compile": {"deepcompile": False}}, workload={"compile": "torch"}),
            "deepcompile": Setting(config={"compile": {"deepcompile": True}}, workload={"compile": "torch"}),
        },
        default="none",
        changes=("activations", "time"),
        requires={
            "deepcompile": Requirements(accelerator="cuda", reason="DeepCompile runs on CUDA alone (compile/util.py)")
        },
        note="warm-up steps are added until a step compiles nothing, for DeepCompile eight in all at least; "
        "activations are not predicted",
        source="runtime/engine.py, compile; compile/init_z3.py, WARMUP",
    ),
    Axis(
        name="data_workers",
        group="Data",
        label="data workers",
        meaning="worker processes of torch's DataLoader; 0: the rank itself; off: the data lie on the device before",
        fields=("data_workers",),
        numbers=Numbers(least=0, most=MAX_DATA_WORKERS),
        names=("off",),
        settings={"off": Setting(workload={"data_workers": None})},
        default="off",
        engines=ENGINES,
        changes=("time",),
        note="random tokens or those of a file, the same in every row; the record holds the time that a step waits for "
        "them",
        source="torch/utils/data/dataloader.py",
    ),
    Axis(
        name="data_pin_memory",
        group="Data",
        label="pinned data",
        meaning="copies each micro-batch to page-locked memory first, from which it is copied asynchronously",
        fields=("data_pin_memory",),
        switch=True,
        default="false",
        engines=ENGINES,
        changes=("time",),
        cuda_only="the CPU accelerator pins no memory",
        note="only with data_workers",
        source="torch/utils/data/dataloader.py",
    ),
    Axis(
        name="data_prefetch",
        group="Data",
        label="prefetched",
        meaning="micro-batches that each worker process loads ahead",
        fields=("data_prefetch",),
        numbers=Numbers(least=1, most=MAX_PREFETCH),
        default="2",
        engines=ENGINES,
        changes=("time",),
        note="only with data_workers of 1 or more",
        source="torch/utils/data/dataloader.py, prefetch_factor",
    ),
    Axis(
        name="cpu_binding",
        group="Host",
        label="bound to",
        meaning="processors of a rank: cores gives each rank of a node a part of its own, numa those of a NUMA node",
        fields=("cpu_binding",),
        names=CPU_BINDINGS,
        default="none",
        engines=ENGINES,
        changes=("time",),
        note="what the launcher's --bind_cores_to_rank does, without numactl; the record holds the processors. numa "
        "needs a machine of several NUMA nodes",
        source="utils/numa.py; DeepSpeed reports 2887 to 2497 ms a step for ZeRO-Offload",
    ),
    Axis(
        name="zero_init",
        group="Host",
        label="zero.Init",
        meaning="splits the model among the ranks while it is built; false: every rank builds it whole in host memory "
        "and moves it whole to its GPU, and deepspeed.initialize splits it then",
        fields=("zero_init",),
        switch=True,
        default="true",
        stages=(3,),
        changes=("build",),
        note="false is what happens to a model that was made before the configuration, or with zero3_init_flag: false "
        "of Accelerate. A factory's model is always built whole in host memory, and is split there tensor by tensor "
        "with true. On the CPU accelerator, where the parts and the buffers of gathering lie in host memory too, two "
        "ranks take less without zero.Init",
        source="runtime/engine.py, _configure_distributed_model; runtime/zero/parameter_offload.py; #1814, #3606",
    ),
    Axis(
        name="allocator",
        group="Host",
        meaning="how torch's allocator reserves GPU memory: expandable_segments grows what it has, so that less is "
        "lost between tensors",
        variables=("PYTORCH_CUDA_ALLOC_CONF",),
        names=("default", "expandable_segments"),
        settings={
            "default": Setting(variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}),
            "expandable_segments": Setting(variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        },
        default="default",
        engines=ENGINES,
        changes=("peak", "time"),
        cuda_only="the allocator is CUDA's",
        source="torch/cuda/memory.py, PYTORCH_CUDA_ALLOC_CONF",
    ),
    Axis(
        name="autotp",
        group="Parallel ranks",
        meaning="ranks among which every layer is split (tensor parallelism)",
        keys=("tensor_parallel.autotp_size",),
        numbers=Numbers(least=1, most=1024),
        default="1",
        stages=(0, 1, 2),
        changes=("parameters", "gradients", "optimizer_states", "activations", "time", "batch"),
        note="a divisor of ranks and heads; the ranks of a group get the same data, whose tokens count once. Not for "
        "GPT-2. Memory is not predicted",
        source="runtime/engine.py, _apply_autotp_partitioning; module_inject/auto_tp.py; since 0.16.4",
    ),
    Axis(
        name="sequence_parallel",
        group="Parallel ranks",
        meaning="ranks among which every sequence is split (Ulysses)",
        keys=("sequence_parallel_size",),
        numbers=Numbers(least=1, most=1024),
        default="1",
        changes=("activations", "time", "batch"),
        note="a divisor of ranks, heads and sequence length; not with eager attention. Activations are not predicted",
        source="runtime/sequence_parallel/ulysses_sp.py, since 0.17.0",
    ),
)

AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (*_WORKLOAD, *_COMPUTATION, *_PRECISION, *_COMMUNICATION, *_STAGE_3, *_OFFLOAD, *_OPTIMIZERS)
}
"""Every axis by name, in the order in which they are listed and applied."""


def other_arithmetic(axis_values: Mapping[str, str]) -> dict[str, str]:
    """Returns those of a row's values (``Configuration.axis_values``) that change what is computed, not only how.

    Precision is not among them, since it is a field of the workload.
    """
    return {
        name: value
        for name, value in axis_values.items()
        if name in AXES and AXES[name].same_losses and value not in AXES[name].same_losses
    }


def workload_fields(axis_values: Mapping[str, str]) -> set[str]:
    """Returns the fields of the workload that a row's values set on purpose."""
    return {field for name in axis_values if name in AXES for field in AXES[name].fields}
