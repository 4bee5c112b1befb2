"""The axes: named dimensions along which rows differ, as a table.

Each axis states its values, what each value sets, where it applies, what it is expected to change, and its source.
``axis_rows`` reads values from text and makes rows of them. ``scripts/make_axes_page.py`` writes ``docs/axes.md``.

Sources are DeepSpeed 0.19.8 (paths below ``deepspeed/``) unless another project is named; ``#1234`` is a pull request
or issue of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from .automatic_values import trainer_sizes
from .deepspeed_config import ADAMW_PARAMETERS, DEFAULT_SIZES, nested, sizes_for
from .spec import ATTENTIONS, CPU_BINDINGS, ENGINES, LOSSES, MAX_DATA_WORKERS, MAX_PREFETCH, Requirements

Value = bool | int | float | str
"""A value of an axis: a boolean, a number or a name."""
CHANGES = {
    "parameters": "memory: parameters",
    "gradients": "memory: gradients",
    "optimizer_states": "memory: optimizer states",
    "deepspeed_buffers": "memory: DeepSpeed's buffers",
    "activations": "memory: activations",
    "nvme": "swapping",
    "peak": "peak memory within a step",
    "time": "step time",
    "optimizer": "optimizer class",
    "losses": "losses",
    "batch": "tokens per step",
    "build": "memory while the model is built and initialized",
    "nothing": "nothing in DeepSpeed 0.19.8",
}
"""Effect of an axis → its description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """Facts of a row: the first four decide whether an axis applies, and all of them decide what a value sets."""

    stage: int
    offload_optimizer: str | None = None
    """``cpu``, ``nvme`` or None."""
    offload_param: str | None = None
    engine: str = "deepspeed"
    grad_accum: int = 1
    ranks: int = 1
    hidden_size: int | None = None
    """None if the model has none or it is unknown."""
    parameters: int | None = None
    """Elements of the whole model; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of one value of an axis in a row."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the DeepSpeed configuration, block by block; None removes a key."""
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Workload with their values."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the row's ranks."""
    requires: Requirements = field(default_factory=Requirements)


class NotForThisRowError(ValueError):
    """A value that cannot be set in this row; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The numbers that an axis accepts."""

    least: float
    most: float
    whole: bool = True
    """Only whole numbers, which may be written as ``5e8``."""


Compute = Callable[[Value, RowFacts], Setting]
"""(value, row) → what it sets there. Raises NotForThisRowError."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A named dimension along which rows differ."""

    name: str
    """As in ``--axis NAME=VALUE``."""
    group: str
    """Heading in the list of axes."""
    _: KW_ONLY
    meaning: str
    """Its meaning, as a sentence without the final period."""
    label: str = ""
    """Short text for tables, before the value; empty: the name."""
    keys: tuple[str, ...] = ()
    """Paths of the DeepSpeed keys that it sets; a key inside an offload block only in rows that have the block."""
    fields: tuple[str, ...] = ()
    """Fields of the Workload that it sets."""
    variables: tuple[str, ...] = ()
    """Environment variables that it sets."""
    switch: bool = False
    """Accepts ``true`` and ``false``."""
    numbers: Numbers | None = None
    names: tuple[str, ...] = ()
    """Named values, besides the keys of ``settings``."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Named value → what it sets. Any other value is written unchanged to all keys, fields and variables."""
    compute: Compute | None = None
    """Returns the settings of a value, if they depend on the row."""
    default: str = ""
    """The value in rows that do not set the axis."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages at which it applies."""
    offload: Literal["optimizer", "optimizer or parameters", "nvme"] | None = None
    """Offloads that a row must have for the axis to apply; None: any row."""
    engines: tuple[str, ...] = ("deepspeed",)
    changes: tuple[str, ...]
    """Expected effects, besides the configuration: keys of :data:`CHANGES`. With ``losses``, the axis changes the
    arithmetic, and a row is compared only with rows that have the same value."""
    same_losses: tuple[str, ...] = ()
    """With ``losses``: the values that leave the arithmetic unchanged."""
    note: str = ""
    """Anything else that a user must know."""
    cuda_only: str = ""
    """Why values other than the default are Unsupported on the CPU accelerator; empty if they run there."""
    requires: Mapping[str, Requirements] = field(default_factory=dict)
    """Value → its additional requirements."""
    source: str

    @property
    def title(self) -> str:
        return self.label or self.name

    @property
    def values(self) -> tuple[str, ...]:
        """Values that have a name, including ``true`` and ``false``."""
        return (*(("true", "false") if self.switch else ()), *self.names, *self.settings)


ZERO = "zero_optimization."
OPTIMIZER = ZERO + "offload_optimizer."
PARAM = ZERO + "offload_param."
_SIZES = Numbers(least=1, most=1e13)
_SIZES_OR_0 = Numbers(least=0, most=1e13)


def _known(size: int | None, what: str) -> int:
    if size is None:
        raise NotForThisRowError(f"needs the model's {what}, which is unknown")
    return size


def small_sizes(hidden_size: int) -> dict[str, int]:
    """Return small sizes for a model of this hidden size, by key of ``zero_optimization``.

    A layer has about 12 h² parameters. Buckets hold one matrix (h²); stage 3 gathers at most two layers, and keeps no
    parameter whose next use is further away than that.
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
    sizes = {"default": lambda _: DEFAULT_SIZES, "small_buffers": small_sizes, "trainer_auto": trainer_sizes}[
        str(value)
    ]
    hidden_size = 0 if value == "default" else _known(row.hidden_size, "hidden size")
    return Setting(config={"zero_optimization": sizes_for(sizes(hidden_size), row.stage, row.offload_param)})


def _size_or_auto(key: str) -> Compute:
    """Return a function that sets ``key`` to a size; ``auto`` is the Trainer's size."""

    def compute(value: Value, row: RowFacts) -> Setting:
        size = trainer_sizes(_known(row.hidden_size, "hidden size"))[key] if value == "auto" else value
        return Setting(config={"zero_optimization": {key: size}})

    return compute


_SUB_GROUPS_PER_RANK = 8
"""Minimum number of sub-groups per rank, so that a ratio moves about that fraction of them."""


def _offload_ratio(value: Value, row: RowFacts) -> Setting:
    # DeepSpeed moves whole sub-groups to the host (runtime/zero/stage3.py): with only one, a ratio has no effect.
    part = _known(row.parameters, "number of parameters") // row.ranks
    sub_group_size = max(1, part // _SUB_GROUPS_PER_RANK)
    block = {"offload_optimizer": {"ratio": value}, "sub_group_size": sub_group_size}
    return Setting(config={"zero_optimization": block})


def _zenflow(value: Value, row: RowFacts) -> Setting:
    if value == "off":
        return Setting(config={"zero_optimization": {"zenflow": None}})
    # DeepSpeed uses update_interval as the accumulation, and reads its "auto" as 0 (runtime/zenflow/engine.py).
    intervals = {"select_interval": row.grad_accum, "update_interval": row.grad_accum, "full_warm_up_rounds": 0}
    block = {"topk_ratio": 0.1, "select_strategy": "step", **intervals, "overlap_step": value == "overlap"}
    return Setting(config={"zero_optimization": {"zenflow": block}})


def _hpz(value: Value, row: RowFacts) -> Setting:
    ranks = int(value)
    if row.ranks % max(ranks, 1):
        raise NotForThisRowError(f"must divide the {row.ranks} ranks")
    return Setting(config={"zero_optimization": {"zero_hpz_partition_size": ranks}})


def _optimizer_block(kind: str, **params: Any) -> dict[str, Any]:
    """The block of an optimizer, with other optimizers' parameters removed."""
    # None removes the value in the row: DeepSpeed fails on an argument that the new class does not accept.
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
        raise NotForThisRowError("cannot run on the host; optimizer=adamw uses DeepSpeed's own AdamW there")
    # DeepSpeed rejects Muon with reduce_scatter at stage 3 (runtime/zero/stage3.py).
    if value == "muon" and row.stage == 3:
        config = config | {"zero_optimization": {"reduce_scatter": False}}
    return Setting(config=config)


_PRECISIONS = {
    "bf16": Setting(config={"fp16": None, "bf16": {"enabled": True}}, workload={"precision": "bf16"}),
    "fp16": Setting(config={"bf16": None, "fp16": {"enabled": True}}, workload={"precision": "fp16"}),
    "fp32": Setting(config={"bf16": None, "fp16": None}, workload={"precision": "fp32"}),
}
_AUTOCAST = {"off": Setting(config={"torch_autocast": None})} | {
    name: Setting(
        config={"bf16": None, "fp16": None, "torch_autocast": {"enabled": True, "dtype": dtype}},
        workload={"precision": name},
    )
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16"))
}
_BF16_STATES = {
    name: Setting(
        # "enabled" too: a block without it would train in fp32.
        config={"bf16": {"enabled": True, "bf16_master_weights_and_grads": master, "bf16_optimizer_states": states}},
        workload={"precision": "bf16"},
    )
    for name, master, states in (("off", False, False), ("master", True, False), ("all", True, True))
}
_PIPELINES = {
    name: Setting(
        config=nested(
            "zero_optimization.offload_optimizer",
            {"pipeline_read": name in ("read", "both"), "pipeline_write": name in ("write", "both")},
        )
    )
    for name in ("off", "read", "write", "both")
}
_LEAF_MODULES = {
    name: Setting(config=nested("zero_optimization.leaf_module", value))
    for name, value in (("default", None), ("off", {"classes": []}))
}
_COMPILES = {
    name: Setting(
        config={"compile": {"deepcompile": name == "deepcompile"}},
        workload={"compile": "none" if name == "none" else "torch"},
    )
    for name in ("none", "torch", "deepcompile")
}
_ALLOCATORS = {
    name: Setting(variables={"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{name != 'default'}"})
    for name in ("default", "expandable_segments")
}
_NEEDS_CUDA = Requirements(accelerator="cuda", reason="DeepCompile runs on CUDA only (compile/util.py)")

# fmt: off
_TABLE = (
    Axis("activation_checkpointing", "Workload", label="checkpointing", fields=("activation_checkpointing",),
         switch=True, default="false", engines=ENGINES, changes=("activations", "time"),
         meaning="recomputes the activations of each layer in the backward pass instead of keeping them",
         note="uses Transformers' gradient_checkpointing_enable; DeepSpeed's activation_checkpointing block has no "
              "effect on Transformers models",
         source="runtime/activation_checkpointing/checkpointing.py; transformers/modeling_utils.py"),
    Axis("micro_batch", "Workload", label="micro-batch", keys=("train_micro_batch_size_per_gpu",),
         fields=("batch_size",), numbers=Numbers(least=1, most=4096), default="--batch-size", engines=ENGINES,
         changes=("activations", "time", "batch"), meaning="sequences per GPU in one forward pass",
         note="rows are compared by tokens per second", source="runtime/config.py"),
    Axis("grad_accum", "Workload", label="accumulation", keys=("gradient_accumulation_steps",), fields=("grad_accum",),
         numbers=Numbers(least=1, most=4096), default="--grad-accum", engines=ENGINES,
         changes=("peak", "time", "batch"), meaning="micro-batches per optimizer step",
         note="rows are compared by tokens per second", source="runtime/config.py"),
    Axis("attention", "Computation", fields=("attention",), names=ATTENTIONS, default="sdpa, if the model has it",
         engines=ENGINES, changes=("activations", "time"),
         meaning="attention implementation of Transformers; eager keeps the scores of every head",
         note="flash attention needs a GPU, bf16 or fp16, and its package (flash_attn or flash_attn_interface); "
              "flex_attention needs a GPU", source="transformers/modeling_utils.py, attn_implementation"),
    Axis("loss", "Computation", fields=("loss",), names=LOSSES, default="model",
         changes=("activations", "peak", "time"),
         meaning="how logits and loss are computed; model: by the model, with fp32 logits; chunked: DeepSpeed's "
                 "cross-entropy, which keeps logits in the training format; tiled: DeepSpeed's loss, computed for a "
                 "few tokens at a time, which keeps no logits; liger: Liger's fused kernel, which keeps none either",
         note="tiled and liger keep the gradients of the output layer and of its input instead; with long sequences "
              "and checkpointed activations, nothing else saves as much memory. liger needs a "
              "GPU and the package liger_kernel",
         source="runtime/chunked_cross_entropy.py; runtime/sequence_parallel/ulysses_sp.py, TiledFusedLogitsLoss"),
    Axis("tiled_mlp", "Computation", label="tiled MLP", fields=("tiled_mlp",), switch=True, default="false",
         changes=("activations", "peak", "time"),
         meaning="computes the MLP of each layer for a few tokens at a time, and recomputes it in the backward pass",
         note="keeps only the input of each MLP; for sequences that are long compared with the hidden size",
         source="runtime/sequence_parallel/ulysses_sp.py, TiledMLP"),
    Axis("compile", "Computation", keys=("compile.deepcompile",), fields=("compile",), settings=_COMPILES,
         default="none", changes=("activations", "time"), requires={"deepcompile": _NEEDS_CUDA},
         meaning="compiles the model: torch.compile, or DeepCompile, which also schedules ZeRO's communication",
         note="adds warm-up steps until a step compiles nothing (at least eight in all for DeepCompile); activations "
              "are not predicted", source="runtime/engine.py, compile; compile/init_z3.py, WARMUP"),
    Axis("data_workers", "Data", label="data workers", fields=("data_workers",),
         numbers=Numbers(least=0, most=MAX_DATA_WORKERS), settings={"off": Setting(workload={"data_workers": None})},
         default="off", engines=ENGINES, changes=("time",),
         meaning="worker processes of torch's DataLoader; 0: the rank itself; off: the data is already on the device",
         note="random tokens or a file's, the same in every row; data_wait_ms is the time that a step waits for them",
         source="torch/utils/data/dataloader.py"),
    Axis("data_pin_memory", "Data", label="pinned data", fields=("data_pin_memory",), switch=True, default="false",
         engines=ENGINES, changes=("time",),
         meaning="copies each micro-batch to page-locked memory first, so that the copy to the GPU is asynchronous",
         note="only with data_workers", cuda_only="the CPU accelerator pins no memory",
         source="torch/utils/data/dataloader.py"),
    Axis("data_prefetch", "Data", label="prefetched", fields=("data_prefetch",),
         numbers=Numbers(least=1, most=MAX_PREFETCH), default="2", engines=ENGINES, changes=("time",),
         meaning="micro-batches that each worker process loads ahead", note="only with data_workers of 1 or more",
         source="torch/utils/data/dataloader.py, prefetch_factor"),
    Axis("cpu_binding", "Host", label="bound to", fields=("cpu_binding",), names=CPU_BINDINGS, default="none",
         engines=ENGINES, changes=("time",),
         meaning="processors that a rank may use; cores: an equal share of the node's; numa: all of one NUMA node",
         note="like the launcher's --bind_cores_to_rank, without numactl; the record lists the processors. numa needs "
              "a machine with several NUMA nodes",
         source="utils/numa.py; DeepSpeed reports 2,497 instead of 2,887 ms per step for ZeRO-Offload"),
    Axis("zero_init", "Host", label="zero.Init", fields=("zero_init",), switch=True, default="true", stages=(3,),
         changes=("build",),
         meaning="splits the model among the ranks while it is built; false: every rank builds it whole in host memory "
                 "and moves it whole to its GPU, and deepspeed.initialize then splits it",
         note="false is how a model is built if it is created before the configuration, or with Accelerate's "
              "zero3_init_flag: false. A factory's model is always built whole in host memory; true splits it there "
              "tensor by tensor. On the CPU accelerator, where the parts and the gathering buffers are in host memory "
              "too, two ranks use less memory without zero.Init",
         source="runtime/engine.py, _configure_distributed_model; runtime/zero/parameter_offload.py; #1814, #3606"),
    Axis("allocator", "Host", variables=("PYTORCH_CUDA_ALLOC_CONF",), settings=_ALLOCATORS, default="default",
         engines=ENGINES, changes=("peak", "time"),
         meaning="how torch's allocator reserves GPU memory; expandable_segments lets its segments grow, which "
                 "wastes less memory between tensors", cuda_only="the allocator is CUDA's",
         source="torch/cuda/memory.py, PYTORCH_CUDA_ALLOC_CONF"),
    Axis("autotp", "Parallel ranks", keys=("tensor_parallel.autotp_size",), numbers=Numbers(least=1, most=1024),
         default="1", stages=(0, 1, 2),
         changes=("parameters", "gradients", "optimizer_states", "activations", "time", "batch"),
         meaning="ranks that share every layer (tensor parallelism)",
         note="must divide the number of ranks and the number of attention heads; the ranks of a group get the same "
              "data, which counts once. Not for GPT-2. Memory is not predicted",
         source="runtime/engine.py, _apply_autotp_partitioning; module_inject/auto_tp.py; since 0.16.4"),
    Axis("sequence_parallel", "Parallel ranks", keys=("sequence_parallel_size",), numbers=Numbers(least=1, most=1024),
         default="1", changes=("activations", "time", "batch"), meaning="ranks that share every sequence (Ulysses)",
         note="must divide ranks, attention heads and sequence length; not with eager attention. Activations are not "
              "predicted",
         source="runtime/sequence_parallel/ulysses_sp.py, since 0.17.0"),
    Axis("precision", "Precision", keys=("bf16", "fp16"), fields=("precision",), settings=_PRECISIONS,
         default="--precision", engines=ENGINES, changes=("parameters", "gradients", "activations", "time", "losses"),
         meaning="number format of parameters and activations", source="runtime/precision_config.py"),
    Axis("torch_autocast", "Precision", label="autocast", keys=("torch_autocast", "bf16", "fp16"),
         fields=("precision",), settings=_AUTOCAST, default="off", same_losses=("off",),
         changes=("parameters", "gradients", "optimizer_states", "activations", "time", "losses"),
         meaning="keeps parameters in fp32 and lets torch choose the format of each operation",
         source="runtime/torch_autocast.py, since 0.17.2"),
    Axis("bf16_states", "Precision", label="bf16 states",
         keys=("bf16.enabled", "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
         fields=("precision",), settings=_BF16_STATES, default="off", same_losses=("off",), stages=(1, 2, 3),
         changes=("optimizer_states", "gradients", "time", "losses"),
         meaning="keeps master weights and gradients (master), or these and the optimizer's moments (all), in bf16",
         note="master needs an optimizer offloaded to the CPU. DeepSpeed's example keeps 16.2 instead of 25.7 "
              "GiB resident for 6.9 billion parameters on four GPUs. Small updates are lost in bf16: check the losses",
         source="runtime/base_optimizer.py, _configure_master_weights; since 0.18.3, with offload #8010"),
    Axis("overlap_comm", "Communication and buckets", keys=(ZERO + "overlap_comm",), switch=True,
         default="true at stage 3, else false", stages=(1, 2, 3), changes=("deepspeed_buffers", "time"),
         meaning="overlaps reducing the gradients with the backward pass; stages 1 and 2 use a second bucket for it",
         source="runtime/zero/stage_1_and_2.py, setup_buckets; runtime/zero/stage3.py, __init__"),
    Axis("buffers", "Communication and buckets", keys=tuple(ZERO + key for key in DEFAULT_SIZES),
         names=("small_buffers", "trainer_auto", "default"), compute=_buffers, default="default", stages=(1, 2, 3),
         changes=("deepspeed_buffers", "peak", "time"),
         meaning="all buffer sizes together: small ones (derived from the model's hidden size), the Trainer's auto "
                 "values, or the defaults",
         note="with h the hidden size: small_buffers has buckets of h², prefetch 0.9 h², live parameters and reuse "
              "distance 24 h²; trainer_auto has a reduce bucket of h², prefetch 0.9 h² and persistence 10 h; with "
              "parameters on NVMe, prefetch and reuse distance stay 0",
         source="transformers/integrations/deepspeed.py, trainer_config_finalize; #4093, #5305"),
    Axis("reduce_bucket_size", "Communication and buckets", label="reduce bucket", keys=(ZERO + "reduce_bucket_size",),
         numbers=_SIZES, names=("auto",), compute=_size_or_auto("reduce_bucket_size"), default="5e8", stages=(1, 2, 3),
         changes=("deepspeed_buffers", "time"),
         meaning="elements of the buffer in which gradients are reduced; auto: h², where h is the hidden size",
         source="runtime/zero/stage_1_and_2.py, setup_buckets; #6351"),
    Axis("allgather_bucket_size", "Communication and buckets", label="allgather bucket",
         keys=(ZERO + "allgather_bucket_size",), numbers=_SIZES, default="5e8", stages=(1, 2), changes=("nothing",),
         meaning="elements of updated parameters gathered together after the step",
         note="DeepSpeed gathers everything together with torch's all_gather_into_tensor, regardless of this size",
         source="runtime/utils.py, all_gather_dp_groups"),
    Axis("reduce_scatter", "Communication and buckets", keys=(ZERO + "reduce_scatter",), switch=True, default="true",
         stages=(2, 3), changes=("peak", "time"),
         meaning="sends each rank only its part of the gradients, instead of reducing all of them on every rank",
         note="at stage 2 only if use_multi_rank_bucket_allreduce is off; that setting is on by default",
         source="runtime/zero/stage_1_and_2.py, average_tensor; runtime/zero/stage3.py, __avg_scatter_grads"),
    Axis("contiguous_gradients", "Communication and buckets", keys=(ZERO + "contiguous_gradients",), switch=True,
         default="true", stages=(1, 2, 3), changes=("deepspeed_buffers", "time"),
         meaning="copies gradients into one buffer as they are computed, which avoids fragmentation",
         note="always on in rows that offload the optimizer at stages 1 and 2",
         source="runtime/zero/stage_1_and_2.py, setup_buckets"),
    Axis("round_robin_gradients", "Communication and buckets", label="round robin",
         keys=(ZERO + "round_robin_gradients",), switch=True, default="false", stages=(1, 2),
         changes=("gradients", "time"), meaning="orders parameters so that all ranks copy gradients at the same time",
         source="runtime/zero/stage_1_and_2.py, _round_robin_reorder"),
    Axis("communication_data_type", "Communication and buckets", label="communication",
         keys=("communication_data_type",), names=("fp32", "bf16", "fp16"), default="the parameters' format",
         changes=("deepspeed_buffers", "peak", "time"), meaning="number format of gradients while they are sent",
         note="at stage 3 the bucket has this format too",
         source="runtime/engine.py, communication_data_type; runtime/zero/stage3.py, _setup_for_real_optimizer"),
    Axis("prefetch", "Stage 3", keys=(ZERO + "stage3_prefetch_bucket_size",), numbers=_SIZES_OR_0, names=("auto",),
         compute=_size_or_auto("stage3_prefetch_bucket_size"), default="5e7", stages=(3,), changes=("peak", "time"),
         meaning="elements of parameters gathered ahead of their use; auto: 0.9 h², where h is the hidden size",
         source="runtime/zero/partitioned_param_coordinator.py, fetch_sub_module"),
    Axis("persistence", "Stage 3", keys=(ZERO + "stage3_param_persistence_threshold",), numbers=_SIZES_OR_0,
         names=("auto",), compute=_size_or_auto("stage3_param_persistence_threshold"), default="1e5", stages=(3,),
         changes=("parameters", "time"),
         meaning="tensors of up to this many elements stay gathered; auto: 10 h, where h is the hidden size",
         source="runtime/zero/parameter_offload.py, mark_persistent_parameters"),
    Axis("live_parameters", "Stage 3", label="live parameters", keys=(ZERO + "stage3_max_live_parameters",),
         numbers=_SIZES_OR_0, default="1e9", stages=(3,), changes=("peak", "time"),
         meaning="stops prefetching while this many elements of parameters are gathered",
         source="runtime/zero/partitioned_param_coordinator.py, fetch_sub_module; #4093, #4305"),
    Axis("reuse_distance", "Stage 3", label="reuse distance", keys=(ZERO + "stage3_max_reuse_distance",),
         numbers=_SIZES_OR_0, default="1e9", stages=(3,), changes=("peak", "time"),
         meaning="a gathered parameter is kept if its next use is within this many elements",
         source="runtime/zero/partitioned_param_coordinator.py, __params_to_release; #5305"),
    Axis("allgather_sequential", "Stage 3", keys=(ZERO + "stage3_allgather_sequential",), switch=True, default="false",
         stages=(3,), changes=("peak", "time"),
         meaning="gathers parameters one by one, without a common buffer; sets the prefetch bucket to 1",
         source="runtime/engine.py, _configure_zero_optimizer; #7661, since 0.18.5"),
    Axis("sub_group_size", "Stage 3", keys=(ZERO + "sub_group_size",), numbers=_SIZES, default="1e9", stages=(3,),
         changes=("peak", "time"), meaning="elements of the rank's part that the optimizer updates at a time",
         source="runtime/zero/stage3.py, _create_fp16_sub_groups"),
    Axis("leaf_modules", "Stage 3", label="leaf modules", keys=(ZERO + "leaf_module",), settings=_LEAF_MODULES,
         default="the blocks of Mixtral, Qwen2-MoE and Qwen3-MoE", stages=(3,), changes=("peak", "time"),
         meaning="gathers a mixture-of-experts block whole, whichever experts a rank uses",
         note="changes only models with experts; without it, ranks that use different experts may deadlock (#4808)",
         source="runtime/zero/leaf_module_config.py, since 0.18.0"),
    Axis("hpz", "ZeRO++", keys=(ZERO + "zero_hpz_partition_size",), numbers=Numbers(least=1, most=4096), compute=_hpz,
         default="1", stages=(3,), changes=("parameters", "time"),
         meaning="ranks that share a second copy of the parameters, so that the backward pass gathers within a node",
         note="must divide the number of ranks; usually the GPUs of one node",
         source="arXiv 2306.10209; runtime/zero/partition_parameters.py, _partition_param_sec"),
    Axis("qwz", "ZeRO++", keys=(ZERO + "zero_quantized_weights",), switch=True, default="false", stages=(3,),
         changes=("peak", "time", "losses"), same_losses=("false",),
         requires={"true": Requirements(ops=("QuantizerBuilder",))}, meaning="sends parameters quantized to 8 bits",
         cuda_only="the quantization op exists for CUDA only",
         source="arXiv 2306.10209; runtime/zero/partition_parameters.py, CUDAQuantizer"),
    Axis("qgz", "ZeRO++", keys=(ZERO + "zero_quantized_gradients",), switch=True, default="false", stages=(3,),
         changes=("peak", "time", "losses"), same_losses=("false",),
         requires={"true": Requirements(ops=("QuantizerBuilder",), min_nodes=2)},
         meaning="quantizes gradients that are sent between nodes to 4 bits", note="DeepSpeed ignores it on one node",
         cuda_only="the quantization op exists for CUDA only",
         source="arXiv 2306.10209; runtime/zero/stage3.py, __avg_scatter_grads"),
    Axis("offload_ratio", "Offload", label="ratio", keys=(OPTIMIZER + "ratio", ZERO + "sub_group_size"),
         numbers=Numbers(least=0, most=1, whole=False), compute=_offload_ratio, default="1.0", stages=(3,),
         offload="optimizer", changes=("optimizer_states", "gradients", "time"),
         meaning="fraction of the optimizer that is offloaded (Twin-Flow); the accelerator updates the rest",
         note="DeepSpeed splits by sub-group, so this also sets sub_group_size to an eighth of a rank's part; torch's "
              "AdamW updates the part on the accelerator",
         source="runtime/zero/stage3.py, _create_fp32_partitions; since 0.12.3"),
    Axis("pin_memory", "Offload", keys=(OPTIMIZER + "pin_memory", PARAM + "pin_memory"), switch=True, default="true",
         stages=(1, 2, 3), offload="optimizer or parameters", changes=("peak", "time"),
         meaning="page-locks host memory, so that copies are faster and overlap with computation",
         cuda_only="pinned memory is for copies to a device, and the CPU accelerator makes no such copies",
         source="runtime/zero/offload_config.py; default true since 0.19.5, #8207"),
    Axis("pin_memory_backend", "Offload", label="pinned by", variables=("DS_PIN_MEMORY_BACKEND",),
         names=("torch", "native"), default="torch", stages=(1, 2, 3), offload="optimizer or parameters",
         changes=("peak", "time"), requires={"native": Requirements(ops=("PinMemoryBuilder",))},
         meaning="what page-locks host memory: torch's allocator, which rounds up to powers of two, or DeepSpeed's op",
         cuda_only="pinned memory is for copies to a device, and the CPU accelerator makes no such copies",
         source="utils/pin_memory.py, #8211"),
    Axis("zenflow", "Offload", keys=(ZERO + "zenflow",), names=("off", "on", "overlap"), compute=_zenflow,
         default="off", same_losses=("off",), stages=(1, 2), offload="optimizer",
         changes=("deepspeed_buffers", "optimizer", "time", "losses"),
         meaning="applies the most important tenth of the gradients on the accelerator and the rest on the host; "
                 "overlap: both at the same time",
         note="DeepSpeed takes gradient_accumulation_steps from update_interval (0 if that is auto), so "
              "update_interval and select_interval are both set to the row's accumulation. Not supported at stage 3, "
              "where DeepSpeed 0.19.8 transposes every matrix of the model, including embeddings, and trains "
              "incorrectly or fails",
         cuda_only="on the CPU accelerator its loss starts at a different value and hardly falls",
         source="runtime/zenflow/engine.py, configure_zenflow; #7759, since 0.17.5"),
    Axis("superoffload", "Offload", keys=(OPTIMIZER + "super_offload",), switch=True, default="false", stages=(3,),
         offload="optimizer", changes=("time",),
         meaning="updates weights on the host during the backward pass; made for superchips (GH200)",
         note="updates overlap with the backward pass only without clipping (--set gradient_clipping=0); little gain "
              "if the GPU is connected by PCIe (#7966)",
         cuda_only="its optimizer does not support the CPU accelerator",
         source="runtime/superoffload/superoffload_stage3.py, since 0.18.0"),
    Axis("nvme_pipeline", "NVMe", label="NVMe pipeline",
         keys=(OPTIMIZER + "pipeline_read", OPTIMIZER + "pipeline_write"), settings=_PIPELINES, default="off",
         stages=(3,), offload="nvme", changes=("nvme", "time"),
         meaning="reads the next part of the optimizer, or writes the previous one, while the current part is updated",
         source="runtime/swap_tensor/pipelined_optimizer_swapper.py"),
    Axis("aio_block_size", "NVMe", label="aio block", keys=("aio.block_size",), numbers=Numbers(least=4096, most=2**30),
         default="1048576", stages=(3,), offload="nvme", changes=("nvme", "time"),
         meaning="bytes of one read or write; tensors smaller than this or than 1 MiB stay in memory",
         source="runtime/swap_tensor/aio_config.py; optimizer_utils.py, MIN_AIO_BYTES"),
    Axis("aio_queue_depth", "NVMe", label="aio depth", keys=("aio.queue_depth",), numbers=Numbers(least=1, most=1024),
         default="8", stages=(3,), offload="nvme", changes=("nvme", "time"),
         meaning="reads and writes in the disk's queue at the same time", source="runtime/swap_tensor/aio_config.py"),
    Axis("optimizer", "Optimizer", keys=("optimizer", ZERO + "reduce_scatter"), names=tuple(_OPTIMIZER_CONFIGS),
         compute=_optimizer, default="adamw (--optimizer)", same_losses=("adamw", "torch_adamw", "torch_fused_adamw"),
         changes=("optimizer", "optimizer_states", "time", "losses"),
         meaning="optimizer class; adamw is DeepSpeed's FusedAdam on a GPU and DeepSpeedCPUAdam if offloaded",
         note="muon trains matrices other than embeddings, and Adam the rest; at stage 3 it sets reduce_scatter to "
              "false. It has no CPU version in DeepSpeed. Before 0.19.8 it trained incorrectly with offload (#8463) "
              "and at stage 3 with accumulation (#8443)",
         source="runtime/engine.py, _configure_basic_optimizer; runtime/zero/muon/"),
)
# fmt: on

AXES = {axis.name: axis for axis in _TABLE}
"""All axes by name. They are listed and applied in this order."""
PARALLEL_AXES = ("autotp", "sequence_parallel")
"""Axes that make ranks share data, so that fewer ranks see distinct data; rows are compared by tokens per second."""


def changed_arithmetic(axis_values: Mapping[str, str]) -> dict[str, str]:
    """Return a row's values (``Configuration.axis_values``) that change what is computed, not only how.

    Precision is not among them, since it is a field of the workload.
    """
    return {
        name: value
        for name, value in axis_values.items()
        if name in AXES and AXES[name].same_losses and value not in AXES[name].same_losses
    }


def workload_fields(axis_values: Mapping[str, str]) -> set[str]:
    """Return the fields of the workload that a row's values set on purpose."""
    return {field for name in axis_values if name in AXES for field in AXES[name].fields}
