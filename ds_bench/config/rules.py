"""The rules about DeepSpeed configurations that its keys and types do not tell: refused, ineffective, slow or wrong.

Each fact stands here once. The command ``check`` reports every rule with a level; a rule with ``row`` also decides
about a row of a comparison (``validation``): a refusal makes it Unsupported, a caveat is printed beside it. What
DeepSpeed ignores is left out of the copy of a file that a row trains (:func:`without_ignored`); only a row whose flags
ask for it is refused.

Every rule was read in the code of DeepSpeed 0.19.8, at the place of ``source`` below its package, or run with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from . import deepspeed_keys
from .axes import AXES
from .deepspeed_config import AUTO, nested, overlay
from .spec import Accelerator, Placement, Workload, gpu_precisions

Level = Literal["error", "warning", "hint"]
RowUse = Literal["refusal", "caveat", "ignored"]

_CPU_OPTIMIZERS = ("adamw", "adam", "adagrad", "lion")
"""Optimizers that DeepSpeed has a CPU version of."""
_TRUE = (True, 1, "1", "true", "t", "yes", "y", "on")
"""What pydantic takes for true."""
_WHOLE_MODEL = 10**9
"""DeepSpeed's default of ``sub_group_size`` and others: parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a rule about buffers needs to know of a model."""

    name: str
    parameters: int
    largest_parameter: int
    """Elements of the largest tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration, and what is known of where it is used."""

    config: Mapping[str, Any]
    """Where "auto" stands for a value that somebody else fills in, it counts as left out."""
    placement: Placement | None = None
    """None: not known, as ``check`` is given a file alone."""
    workload: Workload | None = None
    num_gpus: int | None = None
    model: ModelSize | None = None
    compute_capability: tuple[int, int] | None = None
    """Of this machine's oldest GPU, for ``check``; None where there is none."""

    def value(self, path: str, default: Any = None) -> Any:
        """The value of a key; ``default`` where it is absent, null or "auto"."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None or value == AUTO else value

    def number(self, path: str, default: float) -> float:
        """The number of a key; ``default`` where there is none."""
        value = self.value(path, default)
        return value if isinstance(value, (int, float)) else default

    def is_on(self, path: str, default: bool = False) -> bool:
        """Whether a switch is on, read as pydantic reads it."""
        value = self.value(path, default)
        return (value.lower() if isinstance(value, str) else value) in _TRUE

    def has_block(self, path: str) -> bool:
        return isinstance(self.value(path), Mapping)

    def block(self, path: str) -> Mapping[str, Any]:
        """The block at a path; empty where there is none."""
        value = self.value(path)
        return value if isinstance(value, Mapping) else {}

    @property
    def is_row(self) -> bool:
        """Whether it is a row of a comparison, completed and with a placement."""
        return self.placement is not None

    @property
    def accelerator(self) -> Accelerator | None:
        """Of the row's placement; None where there is no row."""
        return None if self.placement is None else self.placement.accelerator

    @property
    def stage(self) -> int | None:
        """ZeRO stage; None where the file says something else than 0 to 3."""
        stage = self.value("zero_optimization.stage", 0)
        return stage if type(stage) is int and 0 <= stage <= 3 else None

    @property
    def optimizer(self) -> str:
        """Name of the optimizer in lower case; empty where the training script gives one."""
        return str(self.value("optimizer.type", "")).lower()

    @property
    def has_cpu_optimizer(self) -> bool:
        """Whether DeepSpeed replaces the optimizer by its CPU version where it is offloaded, at any stage.

        Also where the training script gives one, since Trainer and Accelerate then give DeepSpeed's.
        """
        return self.optimizer in ("", *_CPU_OPTIMIZERS) and not self.is_on("optimizer.params.torch_adam")

    def offload(self, kind: Literal["optimizer", "param"]) -> str | None:
        """``cpu`` or ``nvme``; None without offload."""
        device = self.value(f"zero_optimization.offload_{kind}.device", "none")
        return None if device == "none" else str(device)

    @property
    def precision(self) -> str:
        """Number format of the model that DeepSpeed converts it to; fp32 where it does not."""
        return next((name for name in ("fp16", "bf16") if self.is_on(f"{name}.enabled")), "fp32")

    @property
    def ranks(self) -> int | None:
        """Ranks of the job; None where they are not known."""
        return self.placement.num_gpus if self.placement else self.num_gpus

    @property
    def rank_parameters(self) -> float | None:
        """Parameters of one rank's partition; None where model or number of GPUs are not known."""
        return self.model.parameters / self.num_gpus if self.model and self.num_gpus else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One fact about configurations: when it applies, why it matters, and what to do."""

    name: str
    """Stable, as in the output of ``check``: ``nvme-below-stage-3``."""
    level: Level | None
    """None: only a row can tell, because its machine or this program decides."""
    path: str
    """Key that a finding points to."""
    applies: Callable[[Case], bool]
    reason: str
    """Names in braces stand for values of the configuration (:meth:`Rule.reason_for`)."""
    remedy: str = ""
    """What to change in the file."""
    source: str = ""
    """File of DeepSpeed, below its package."""
    row: RowUse | None = None
    read_as: object = None
    """What DeepSpeed takes in place of an ignored value; None: the key does nothing."""
    row_text: str | None = None
    """What a row says; ``{reason}``, ``{remedy}`` and ``{source}`` stand for those above. None: the reason, in a
    caveat with the source, else with the remedy."""

    def reason_for(self, case: Case) -> str:
        """The reason with the configuration's own values."""
        return self.reason.format(
            stage=case.stage,
            optimizer=case.optimizer,
            precision=case.precision,
            accelerator=case.accelerator,
            ranks=case.ranks,
        )

    def row_text_for(self, case: Case) -> str:
        """What a row says, in one line."""
        usual = "{reason} ({source})" if self.row == "caveat" else "{reason}; {remedy}"
        return (self.row_text or usual).format(reason=self.reason_for(case), remedy=self.remedy, source=self.source)


def _lacks_nvme_folder(case: Case) -> bool:
    # A row swaps to a private folder below --nvme-path, whatever its configuration names (with_swap_folder).
    if case.placement is not None:
        return "nvme" in (case.offload("optimizer"), case.offload("param")) and case.placement.nvme_path is None
    blocks = [f"zero_optimization.offload_{kind}" for kind in ("optimizer", "param")]
    # Below stage 3 nothing is swapped, which other rules tell.
    on_nvme = [case.block(block) for block in blocks if case.value(f"{block}.device") == "nvme"]
    return case.stage == 3 and any(block.get("nvme_path") is None for block in on_nvme)


def _unsupported(precision: str) -> Callable[[Case], bool]:
    def applies(case: Case) -> bool:
        here = case.placement
        return here is not None and case.is_on(f"{precision}.enabled") and precision not in here.supported_precisions

    return applies


def _one_sub_group(case: Case) -> bool:
    if case.stage != 3 or case.number("zero_optimization.offload_optimizer.ratio", 1.0) >= 1.0:
        return False
    # Of an unknown model a sub-group of DeepSpeed's default size counts as all of a rank's part.
    return case.number("zero_optimization.sub_group_size", _WHOLE_MODEL) >= (case.rank_parameters or _WHOLE_MODEL)


def _offloads_at_stage_0(case: Case) -> bool:
    return case.stage == 0 and case.offload("optimizer") is not None


def _splits_ranks_unevenly(case: Case) -> bool:
    size, ranks = case.value("zero_optimization.zero_hpz_partition_size", 1), case.ranks
    return case.stage == 3 and type(size) is int and ranks is not None and size > 1 and ranks % min(size, ranks) != 0


_REFUSED_IN_ROWS = (
    Rule(
        name="stage-0-offload",
        level="warning",
        path="zero_optimization.offload_optimizer",
        applies=lambda case: _offloads_at_stage_0(case) and case.has_cpu_optimizer and case.accelerator != "cpu",
        reason="stage 0 keeps parameters on the GPU, and DeepSpeed's CPU optimizer stops in its first step there",
        remedy="use zero_optimization.stage 1, 2 or 3, or remove the block",
        source="ops/adam/cpu_adam.py",
        row="refusal",
    ),
    Rule(
        name="stage-0-offload-of-another-optimizer",
        level="warning",
        path="zero_optimization.offload_optimizer",
        applies=lambda case: _offloads_at_stage_0(case) and not case.has_cpu_optimizer,
        reason="stage 0 does not offload {optimizer}",
        remedy="use zero_optimization.stage 1, 2 or 3, or remove the block",
        source="runtime/engine.py",
        row="ignored",
    ),
    Rule(
        name="offload-param-below-stage-3",
        level="warning",
        path="zero_optimization.offload_param",
        applies=lambda case: case.stage in (0, 1, 2) and case.offload("param") is not None,
        reason="parameters are offloaded at stage 3 only; at stage {stage} DeepSpeed ignores it",
        remedy="use zero_optimization.stage 3, or remove the block",
        source="runtime/zero/config.py",
        row="ignored",
        row_text="{reason}; use stage 3",
    ),
    Rule(
        name="nvme-below-stage-3",
        level="warning",
        path="zero_optimization.offload_optimizer.device",
        applies=lambda case: case.stage in (0, 1, 2) and case.offload("optimizer") == "nvme",
        reason="stage {stage} with NVMe runs as CPU offload in DeepSpeed",
        remedy="use zero_optimization.stage 3, or the device cpu",
        source="runtime/zero/stage_1_and_2.py",
        row="ignored",
        row_text="{reason}; use stage 3",
        read_as="cpu",
    ),
    Rule(
        name="nvme-without-folder",
        level="warning",
        path="zero_optimization",
        applies=_lacks_nvme_folder,
        reason="offload to NVMe needs a folder on the disk",
        remedy="add nvme_path beside the device",
        source="runtime/zero/stage3.py",
        row="refusal",
        row_text="{reason}; add --nvme-path DIR",
    ),
    Rule(
        name="no-cpu-optimizer",
        level="warning",
        path="optimizer.type",
        applies=lambda case: case.optimizer == "lamb" and case.stage != 0 and case.offload("optimizer") is not None,
        reason="Lamb has no CPU version in DeepSpeed, which stops in the first step",
        remedy="use another optimizer, or do not offload it",
        source="runtime/engine.py",
        row="refusal",
    ),
    Rule(
        name="lion-on-cpu",
        level=None,
        path="optimizer.type",
        applies=lambda case: (
            case.accelerator == "cpu" and case.optimizer == "lion" and case.offload("optimizer") is None
        ),
        reason="FusedLion does not exist for the CPU accelerator",
        remedy="use AdamW, or offload the optimizer",
        row="refusal",
    ),
    Rule(
        name="two-precisions",
        level="error",
        path="fp16.enabled",
        applies=lambda case: case.is_on("bf16.enabled") and case.is_on("fp16.enabled"),
        reason="bf16 and fp16 are both enabled",
        remedy="keep one",
        source="runtime/config.py",
        row="refusal",
    ),
    Rule(
        name="zenflow-trains-other-weights",
        level=None,
        path="zero_optimization.zenflow",
        applies=lambda case: (
            case.is_row
            and case.has_block("zero_optimization.zenflow")
            and (case.stage == 3 or case.accelerator == "cpu")
        ),
        reason="ZenFlow of DeepSpeed 0.19.8 trains other weights than the model's at stage 3, where it transposes "
        "every matrix, and on CPU ranks, where the first loss differs and hardly falls",
        remedy="leave it out, or use stage 1 or 2 on GPUs",
        source="runtime/zenflow/engine_stage3.py",
        row="refusal",
    ),
    *(
        Rule(
            name=f"{precision}-unsupported",
            level=None,
            path=f"{precision}.enabled",
            applies=_unsupported(precision),
            reason=f"{precision} is not supported on this {{accelerator}} device",
            remedy=f"use --precision fp32; for a file, --axis precision=fp32 or change its {precision} block",
            row="refusal",
        )
        for precision in ("bf16", "fp16")
    ),
    Rule(
        name="bf16-on-an-older-gpu",
        level="warning",
        path="bf16.enabled",
        applies=lambda case: case.is_on("bf16.enabled") and "bf16" not in gpu_precisions(case.compute_capability),
        reason="the GPUs of this machine are older than Ampere (A100, RTX 30) and have no bf16 units",
        remedy="train in fp16 here, with an fp16 block in its place, or on a newer GPU",
        source="accelerator/cuda_accelerator.py, is_bf16_supported",
    ),
    Rule(
        name="deepcompile",
        level="hint",
        path="compile.deepcompile",
        applies=lambda case: case.is_on("compile.deepcompile") and not case.is_row,
        reason="compile.deepcompile works through engine.compile()",
        remedy="call engine.compile() in the training script; without it the model runs uncompiled",
        source="runtime/engine.py",
    ),
    Rule(
        name="deepcompile-without-cuda",
        level=None,
        path="compile.deepcompile",
        applies=lambda case: case.is_row and case.accelerator != "cuda" and case.is_on("compile.deepcompile"),
        reason="DeepCompile runs on CUDA alone",
        remedy="remove the block, or compile with torch.compile",
        source="compile/util.py, is_deepcompile_supported",
        row="refusal",
    ),
    Rule(
        name="deepcompile-at-stage-0",
        level="warning",
        path="compile.deepcompile",
        applies=lambda case: (
            case.is_on("compile.deepcompile")
            and case.stage == 0
            and not any(name in str(case.value("compile.passes")) for name in ("autosp", "autotp"))
        ),
        reason="at stage 0 DeepSpeed compiles with torch.compile instead of DeepCompile",
        remedy="use stage 1, 2 or 3",
        source="runtime/engine.py, get_deepcompile_backend",
        row="caveat",
        row_text="{reason}",
    ),
    Rule(
        name="autotp",
        level="hint",
        path="tensor_parallel.autotp_size",
        applies=lambda case: case.number("tensor_parallel.autotp_size", 0) > 1 and not case.is_row,
        reason="tensor_parallel.autotp_size needs the same data on a group's ranks",
        remedy="give every rank of a group the same batch, and count the tokens of a group once",
        source="runtime/tensor_parallel/config.py",
    ),
    Rule(
        name="ulysses",
        level="hint",
        path="sequence_parallel_size",
        applies=lambda case: case.number("sequence_parallel_size", 0) > 1 and not case.is_row,
        reason="sequence_parallel_size needs a model prepared for Ulysses",
        remedy="register the model with UlyssesSPAttentionHF, or let Trainer or Accelerate do it",
        source="runtime/sequence_parallel/ulysses_sp.py",
    ),
    *(
        Rule(
            name=f"{axis.name}-without-cuda",
            level=None,
            path=axis.keys[0],
            # A row of the axis itself is refused for its value, before this.
            applies=lambda case, axis=axis: (  # type: ignore[misc]
                case.accelerator == "cpu" and case.is_on(axis.keys[0]) and case.stage in axis.stages
            ),
            reason=axis.cuda_only,
            remedy="leave it out, or use GPUs",
            row="refusal",
        )
        for axis in (AXES["qwz"], AXES["qgz"], AXES["superoffload"])
    ),
    Rule(
        name="expert-parallel-in-a-row",
        level=None,
        path="expert_parallel",
        applies=lambda case: case.is_on("expert_parallel.enabled"),
        reason="expert_parallel is not exercised by this comparison",
        remedy="remove the block",
        row="refusal",
    ),
    *(
        Rule(
            name=f"{block.replace('_', '-')}-in-a-row",
            level=None,
            path=block,
            # The default argument keeps the block of each pass: all lambdas would else see the last one.
            applies=lambda case, block=block: case.is_on(f"{block}.enabled"),  # type: ignore[misc]
            reason=reason,
            remedy="remove the block",
            source=source,
            row="ignored",
        )
        for block, reason, source in (
            ("hybrid_engine", "it is for generating text, not for training steps", "runtime/hybrid_engine.py"),
            ("autotuning", "it ends the training after a few steps, for the Autotuner to read", "runtime/engine.py"),
            (
                "data_efficiency",
                "it acts only on DeepSpeed's data loader and on layers that the training script converts",
                "runtime/data_pipeline/data_routing/helper.py",
            ),
        )
    ),
    Rule(
        name="pipeline",
        level="hint",
        path="pipeline",
        applies=lambda case: "pipeline" in case.config,
        reason="DeepSpeed reads it for a PipelineModule only",
        remedy="build the model as one, or remove the block, which DeepSpeed then does not read",
        source="runtime/pipe/engine.py",
        row="ignored",
    ),
    Rule(
        name="hpz-partition-size",
        level="error",
        path="zero_optimization.zero_hpz_partition_size",
        applies=_splits_ranks_unevenly,
        reason="zero_hpz_partition_size does not divide the {ranks} ranks: DeepSpeed stops when training starts",
        remedy="give a divisor of the number of ranks, such as the GPUs of one node",
        source="utils/groups.py",
        row="refusal",
    ),
)

_COMMS_LOGGER = "comms_logger: its presence alone makes every collective synchronous"

_CAVEATS_OF_ROWS = (
    Rule(
        name="ratio-with-one-sub-group",
        level="warning",
        path="zero_optimization.offload_optimizer.ratio",
        applies=_one_sub_group,
        reason="offload_optimizer.ratio below 1 has no effect with sub_group_size at or above a rank's parameters: "
        "the split is by sub-group",
        remedy="set sub_group_size to an eighth of a rank's parameters or less",
        source="runtime/zero/stage3.py",
        row="caveat",
    ),
    Rule(
        name="super-offload-below-stage-3",
        level="warning",
        path="zero_optimization.offload_optimizer.super_offload",
        applies=lambda case: case.is_on("zero_optimization.offload_optimizer.super_offload") and case.stage != 3,
        reason="super_offload is ignored outside stage 3",
        remedy="set zero_optimization.stage to 3, or remove it",
        source="runtime/engine.py",
        row="caveat",
    ),
    Rule(
        name="quantized-gradients-on-one-node",
        level="hint",
        path="zero_optimization.zero_quantized_gradients",
        applies=lambda case: (
            case.is_on("zero_optimization.zero_quantized_gradients")
            and (case.placement is None or case.placement.num_nodes == 1)
        ),
        reason="zero_quantized_gradients has no effect on one node",
        remedy="leave it out unless the job has several nodes",
        source="runtime/zero/stage3.py",
        row="caveat",
    ),
    Rule(
        name="activation-checkpointing-block",
        level="hint",
        path="activation_checkpointing",
        applies=lambda case: (
            "activation_checkpointing" in case.config
            and (case.workload is None or case.workload.model_source != "factory")
        ),
        reason="the activation_checkpointing block has no effect on Transformers models",
        remedy="call gradient_checkpointing_enable() of the model; "
        "only deepspeed.checkpointing.checkpoint() reads the block",
        source="runtime/activation_checkpointing/checkpointing.py",
        row="caveat",
        row_text="{reason}; use --activation-checkpointing",
    ),
    Rule(
        name="comms-logger-switched-off",
        level="warning",
        path="comms_logger.enabled",
        applies=lambda case: case.has_block("comms_logger") and not case.is_on("comms_logger.enabled"),
        reason=_COMMS_LOGGER,
        remedy="remove the block; enabled: false does not turn it off",
        source="comm/config.py",
        row="caveat",
    ),
    Rule(
        name="comms-logger",
        level="hint",
        path="comms_logger",
        applies=lambda case: "comms_logger" in case.config and case.is_on("comms_logger.enabled"),
        reason=_COMMS_LOGGER,
        remedy="remove the block where speed matters",
        source="comm/config.py",
        row="caveat",
    ),
    Rule(
        name="wall-clock-breakdown",
        level="hint",
        path="wall_clock_breakdown",
        applies=lambda case: case.is_on("wall_clock_breakdown"),
        reason="wall_clock_breakdown synchronises the device in every micro-step: slower than training",
        remedy="set it to false where speed matters",
        source="runtime/engine.py",
        row="caveat",
        row_text="{reason}",
    ),
    Rule(
        name="flops-profiler",
        level="hint",
        path="flops_profiler.enabled",
        applies=lambda case: case.is_on("flops_profiler.enabled"),
        reason="flops_profiler instruments a step and turns wall_clock_breakdown on",
        remedy="set it to false where speed matters",
        source="runtime/config.py",
        row="caveat",
    ),
    Rule(
        name="throughput-timer",
        level="hint",
        path="timers.throughput.enabled",
        # On in DeepSpeed by default. Rows that do not say otherwise have it off (complete_config); for a file that
        # leaves it open a hint would say nothing about the file.
        applies=lambda case: case.is_on("timers.throughput.enabled", default=case.is_row),
        reason="the throughput timer synchronises the device around every step",
        remedy="set it to false where speed matters",
        source="utils/timer.py",
        row="caveat",
    ),
    Rule(
        name="renamed-thread-count",
        level="warning",
        path="aio.thread_count",
        applies=lambda case: "thread_count" in case.block("aio"),
        reason="aio.thread_count is not read since DeepSpeed 0.16.4",
        remedy="the key is intra_op_parallelism",
        source="runtime/swap_tensor/constants.py",
        row="caveat",
        row_text="{reason}; {remedy}",
    ),
    Rule(
        name="limit-without-page-locked-memory",
        level=None,
        path="",
        applies=lambda case: (
            case.placement is not None
            and case.placement.accelerator == "cuda"
            and case.placement.cpu_memory_limit_bytes is not None
        ),
        reason="--cpu-memory-limit does not count page-locked memory, which offloading uses on GPUs",
        row="caveat",
        row_text="{reason}",
    ),
)

_ZERO = "zero_optimization"
_ENABLED_STAGES = (1, 2, 3)


def _scales_before_reducing(case: Case) -> bool:
    zero = case.stage in (2, 3) and case.is_on(f"{_ZERO}.reduce_scatter", default=True)
    return zero and (case.is_on("prescale_gradients") or case.number("gradient_predivide_factor", 1.0) != 1.0)


def _accumulates_in_another_format(case: Case) -> bool:
    accumulated = case.value("data_types.grad_accum_dtype")
    names = {"fp16": ("fp16", "float16", "half"), "bf16": ("bf16", "bfloat16"), "fp32": ("fp32", "float32", "float")}
    return case.stage == 0 and isinstance(accumulated, str) and accumulated not in names[case.precision]


def _has_master_weights_on_device(case: Case) -> bool:
    in_16_bit = case.is_on("bf16.bf16_master_weights_and_grads") and not case.is_on("bf16.bf16_optimizer_states")
    in_16_bit = in_16_bit or case.is_on("fp16.fp16_master_weights_and_grads")
    return in_16_bit and case.stage in _ENABLED_STAGES and case.offload("optimizer") is None


def _replaces_accumulation(case: Case) -> bool:
    interval = case.value(f"{_ZERO}.zenflow.update_interval")
    accumulation = case.value("gradient_accumulation_steps", interval)
    return case.has_block(f"{_ZERO}.zenflow") and interval is not None and accumulation != interval


def _lists_other_intervals(case: Case) -> bool:
    """What ``configure_zenflow`` raises an exception for."""
    if not case.has_block(f"{_ZERO}.zenflow"):
        return False
    select, update = (case.value(f"{_ZERO}.zenflow.{name}_interval") for name in ("select", "update"))
    if case.value(f"{_ZERO}.zenflow.select_strategy") is None:
        return isinstance(select, int)
    return select is None or (isinstance(select, int) and isinstance(update, int) and select < update)


def _not_in(path: str, *allowed: str) -> Callable[[Case], bool]:
    def applies(case: Case) -> bool:
        value = case.value(path)
        return isinstance(value, str) and value.lower() not in map(str.lower, allowed)

    return applies


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_WRITER = "runtime/model_checkpointing/config.py"

_OF_FILES = (
    # What DeepSpeedConfig raises an exception for, beside keys and types.
    *(
        Rule(
            name=f"{name.replace('_', '-')}-at-stage-0",
            level="error",
            path=f"{block}.{name}",
            applies=lambda case, path=f"{block}.{name}": case.is_on(path) and case.stage == 0,  # type: ignore[misc]
            reason="refused at stage 0",
            remedy="set zero_optimization.stage to 1, 2 or 3",
            source="runtime/config.py",
        )
        for block, name in (
            ("fp16", "fp16_master_weights_and_grads"),
            ("bf16", "bf16_master_weights_and_grads"),
            ("bf16", "bf16_optimizer_states"),
        )
    ),
    Rule(
        name="bf16-states-without-master-weights",
        level="error",
        path="bf16.bf16_optimizer_states",
        applies=lambda case: (
            case.is_on("bf16.bf16_optimizer_states") and not case.is_on("bf16.bf16_master_weights_and_grads")
        ),
        reason="refused without bf16_master_weights_and_grads",
        remedy="set both",
        source="runtime/config.py",
    ),
    Rule(
        name="summed-gradients",
        level="error",
        path="gradient_allreduce_op",
        applies=lambda case: (
            str(case.value("gradient_allreduce_op")).lower() == "sum"
            and (case.stage == 3 or case.has_block(f"{_ZERO}.zenflow") or case.is_on("compile.deepcompile"))
        ),
        reason="sum is refused at stage 3, with ZenFlow and with DeepCompile",
        remedy="use mean, or stage 2 or below without them",
        source="runtime/config.py",
    ),
    Rule(
        name="unknown-allreduce-op",
        level="error",
        path="gradient_allreduce_op",
        applies=_not_in("gradient_allreduce_op", "mean", "sum"),
        reason="DeepSpeed knows mean and sum",
        remedy="use mean, its default",
        source="runtime/config.py",
    ),
    *(
        Rule(
            name=f"unknown-{name}",
            level="error",
            path=path,
            applies=_not_in(path, *known),
            reason=f"DeepSpeed knows {', '.join(known[:-1])} and {known[-1]}",
            remedy="use one of them",
            source=source,
        )
        for name, path, known, source in (
            *(
                (key.replace("_", "-"), key, ("fp16", "bf16", "fp32"), "runtime/config.py")
                for key in ("communication_data_type", "seq_parallel_communication_data_type")
            ),
            ("tag-validation", "checkpoint.tag_validation", ("Warn", "Ignore", "Fail"), "runtime/config.py"),
            ("checkpoint-writer", "checkpoint.writer.type", ("mock", "python", "fast"), _WRITER),
            ("writer-parallelism", "checkpoint.writer.data_parallel", ("replica", "socket", "machine"), _WRITER),
        )
    ),
    Rule(
        name="unknown-autocast-dtype",
        level="error",
        path="torch_autocast.dtype",
        applies=_not_in(
            "torch_autocast.dtype",
            *(prefix + name for name in ("float16", "float32", "bfloat16", "int8") for prefix in ("", "torch.")),
            *("fp16", "half", "fp32", "float", "bf16"),
        ),
        reason="DeepSpeed knows no such number format",
        remedy="use bfloat16 or float16",
        source="runtime/config.py",
    ),
    Rule(
        name="no-sequence-parallel-ranks",
        level="error",
        path="sequence_parallel_size",
        applies=lambda case: case.number("sequence_parallel_size", 1) < 1,
        reason="DeepSpeed divides the number of ranks by sequence_parallel_size",
        remedy="give 1 or more",
        source="runtime/config.py",
    ),
    Rule(
        name="patterns-not-text",
        level="error",
        path="data_types.keep_in_fp32_modules",
        applies=lambda case: (
            "keep_in_fp32_modules" in case.block("data_types")
            and case.block("data_types")["keep_in_fp32_modules"] != AUTO
            and not _is_list_of_text(case.value("data_types.keep_in_fp32_modules"))
        ),
        reason='DeepSpeed takes "auto" or a list of name patterns',
        remedy="give a list of text",
        source="runtime/config.py",
    ),
    Rule(
        name="ratio-below-stage-3",
        level="error",
        path=f"{_ZERO}.offload_optimizer.ratio",
        applies=lambda case: case.stage in (0, 1, 2) and case.number(f"{_ZERO}.offload_optimizer.ratio", 1.0) < 1.0,
        reason="a ratio below 1 is refused below stage 3",
        remedy="set zero_optimization.stage to 3, or remove it",
        source="runtime/zero/config.py",
    ),
    Rule(
        name="no-gradient-norm-at-this-stage",
        level="error",
        path=f"{_ZERO}.compute_grad_norm",
        applies=lambda case: case.stage in (0, 3) and not case.is_on(f"{_ZERO}.compute_grad_norm", default=True),
        reason="false is refused at stage {stage}",
        remedy="use stage 1 or 2, or remove it",
        source="runtime/zero/config.py",
    ),
    Rule(
        name="no-gradient-norm-to-clip",
        level="error",
        path=f"{_ZERO}.compute_grad_norm",
        applies=lambda case: (
            case.stage in (1, 2)
            and not case.is_on(f"{_ZERO}.compute_grad_norm", default=True)
            and (
                case.number("gradient_clipping", 1.0) > 0
                or case.offload("optimizer") is not None
                or case.has_block(f"{_ZERO}.zenflow")
            )
        ),
        reason="false needs gradient_clipping 0, no optimizer offload and no ZenFlow: "
        "DeepSpeed stops when training starts",
        remedy="set gradient_clipping to 0 and leave the others out, or remove compute_grad_norm",
        source="runtime/zero/stage_1_and_2.py",
    ),
    Rule(
        name="unknown-select-strategy",
        level="error",
        path=f"{_ZERO}.zenflow.select_strategy",
        applies=lambda case: case.value(f"{_ZERO}.zenflow.select_strategy", "step") not in ("step", "epoch"),
        reason="DeepSpeed knows auto, step and epoch",
        remedy="use one of them",
        source="runtime/zenflow/zenflow_config.py",
    ),
    *(
        Rule(
            name=f"zenflow-{name.replace('_', '-')}",
            level="error",
            path=f"{_ZERO}.zenflow.{name}",
            applies=lambda case, path=f"{_ZERO}.zenflow.{name}", least=least: (  # type: ignore[misc]
                isinstance(case.value(path), str) or case.number(path, least) < least
            ),
            reason='DeepSpeed takes "auto" or a whole number' + (" of 1 or more" if least == 1 else ""),
            remedy="give one of them",
            source="runtime/zenflow/zenflow_config.py",
        )
        for name, least in (("select_interval", float("-inf")), ("update_interval", 1))
    ),
    Rule(
        name="zenflow-intervals",
        level="error",
        path=f"{_ZERO}.zenflow",
        applies=_lists_other_intervals,
        reason="ZenFlow takes a select_interval only with a select_strategy, and then one that is not below "
        "update_interval: DeepSpeed stops when training starts",
        remedy="give select_strategy and select_interval together, or neither",
        source="runtime/zenflow/engine.py",
    ),
    Rule(
        name="zenflow-replaces-accumulation",
        level="warning",
        path="gradient_accumulation_steps",
        applies=_replaces_accumulation,
        reason="ZenFlow replaces gradient_accumulation_steps by its update_interval",
        remedy="give both the same value",
        source="runtime/zenflow/engine.py",
    ),
    Rule(
        name="zenflow-without-interval",
        level="warning",
        path=f"{_ZERO}.zenflow",
        applies=lambda case: (
            case.has_block(f"{_ZERO}.zenflow") and case.value(f"{_ZERO}.zenflow.update_interval") is None
        ),
        reason="without an update_interval ZenFlow sets gradient_accumulation_steps to 0; the loss became NaN "
        "in two CPU ranks",
        remedy="give update_interval, with select_strategy and select_interval",
        source="runtime/zenflow/engine.py",
    ),
    *(
        Rule(
            name=f"fp16-{name.replace('_', '-')}",
            level="error",
            path=f"fp16.{name}",
            applies=lambda case, name=name: (  # type: ignore[misc]
                isinstance(case.value(f"fp16.{name}"), bool)
                or (
                    case.is_on("fp16.enabled")
                    and case.number("fp16.loss_scale", 0) == 0
                    and case.number(f"fp16.{name}", 1) <= 0
                )
            ),
            reason="must be a whole number above 0 where the loss scale is dynamic",
            remedy="give one, or remove it",
            source="runtime/precision_config.py",
        )
        for name in ("loss_scale_window", "min_loss_scale")
    ),
    Rule(
        name="fp16-loss-scale",
        level="error",
        path="fp16.loss_scale",
        applies=lambda case: isinstance(case.value("fp16.loss_scale"), bool) or case.number("fp16.loss_scale", 0) < 0,
        reason="must be a number of 0 or more",
        remedy="use 0 for dynamic loss scaling",
        source="runtime/precision_config.py",
    ),
    # What deepspeed.initialize raises an exception for.
    Rule(
        name="scaling-before-reduce-scatter",
        level="error",
        path=f"{_ZERO}.reduce_scatter",
        applies=_scales_before_reducing,
        reason="reduce_scatter at stage {stage} forbids prescale_gradients and gradient_predivide_factor: "
        "DeepSpeed stops when training starts",
        remedy="remove them, or set reduce_scatter to false",
        source="runtime/zero/stage3.py",
    ),
    Rule(
        name="accumulation-format-at-stage-0",
        level="error",
        path="data_types.grad_accum_dtype",
        applies=_accumulates_in_another_format,
        reason="stage 0 accumulates gradients in the model's format ({precision}) only: "
        "DeepSpeed stops when training starts",
        remedy="set zero_optimization.stage to 1 or more, or remove it",
        source="runtime/engine.py",
    ),
    Rule(
        name="master-weights-without-offload",
        level="error",
        path=f"{_ZERO}.offload_optimizer",
        applies=_has_master_weights_on_device,
        reason="16-bit master weights with 32-bit optimizer states need the optimizer offloaded to DeepSpeedCPUAdam: "
        "DeepSpeed stops when training starts",
        remedy="offload the optimizer to cpu, or with bf16 set bf16_optimizer_states too",
        source="runtime/base_optimizer.py",
        row="refusal",
        row_text="16-bit master weights with 32-bit optimizer states need the optimizer offloaded to the CPU; {remedy}",
    ),
    Rule(
        name="legacy-stage-1",
        level="error",
        path=f"{_ZERO}.legacy_stage1",
        applies=lambda case: case.is_on(f"{_ZERO}.legacy_stage1") and case.stage in _ENABLED_STAGES,
        reason="the old form of stage 1 was removed in DeepSpeed 0.5.9: DeepSpeed stops when training starts",
        remedy="remove it",
        source="runtime/engine.py",
    ),
    Rule(
        name="unmanaged-accumulation",
        level="error",
        path="managed_gradient_accumulation",
        applies=lambda case: (
            not case.is_on("managed_gradient_accumulation", default=True)
            and ((case.stage in (0, 1) and case.is_on(f"{_ZERO}.overlap_comm")) or case.is_on("compile.deepcompile"))
        ),
        reason="false allows overlap_comm at stages 2 and 3 only, and no DeepCompile: "
        "DeepSpeed stops when training starts",
        remedy="set overlap_comm to false and leave DeepCompile out",
        source="runtime/engine.py",
    ),
    Rule(
        name="lamb-with-static-loss-scale",
        level="error",
        path="fp16.loss_scale",
        applies=lambda case: case.optimizer == "lamb" and case.number("fp16.loss_scale", 0) != 0,
        reason="Lamb needs dynamic loss scaling: DeepSpeed stops when training starts",
        remedy="set loss_scale to 0",
        source="runtime/engine.py",
    ),
    Rule(
        name="muon-with-reduce-scatter",
        level="error",
        path=f"{_ZERO}.reduce_scatter",
        applies=lambda case: (
            case.optimizer == "muon" and case.stage == 3 and case.is_on(f"{_ZERO}.reduce_scatter", default=True)
        ),
        reason="Muon and reduce_scatter are refused together at stage 3: DeepSpeed stops when training starts",
        remedy="set reduce_scatter to false",
        source="runtime/zero/stage3.py",
    ),
    Rule(
        name="max-grad-norm",
        level="error",
        path="optimizer.params.max_grad_norm",
        applies=lambda case: "max_grad_norm" in case.block("optimizer.params"),
        reason="refused as a parameter of the optimizer: DeepSpeed stops when training starts",
        remedy="use the top-level key gradient_clipping",
        source="runtime/engine.py",
    ),
    Rule(
        name="aio-text",
        level="error",
        path="aio",
        applies=lambda case: any(isinstance(case.value(f"aio.{key}"), str) for key in deepspeed_keys.keys_of("aio")),
        reason="a value of aio is text (ds_nvme_tune prints it so): DeepSpeed stops when it swaps to NVMe",
        remedy="write numbers, true and false without quotes",
        source="runtime/swap_tensor/aio_config.py",
    ),
    # What works otherwise than it seems.
    Rule(
        name="old-form-of-zero",
        level="warning",
        path=_ZERO,
        applies=lambda case: isinstance(case.value(_ZERO), bool),
        reason="a switch is the old form: true is stage 1, false is stage 0",
        remedy='write {{"stage": 1}}',
        source="runtime/zero/config.py",
    ),
    Rule(
        name="old-name-of-bf16",
        level="warning",
        path="bfloat16",
        applies=lambda case: "bfloat16" in case.config,
        reason="an old name, read only where there is no bf16 block; other programs do not know it",
        remedy="rename it to bf16",
        source="runtime/precision_config.py",
    ),
    Rule(
        name="elastic-checkpoint-at-stage-3",
        level="warning",
        path=f"{_ZERO}.elastic_checkpoint",
        applies=lambda case: case.stage == 3 and case.is_on(f"{_ZERO}.elastic_checkpoint"),
        reason="stage 3 does not support elastic_checkpoint any more",
        remedy="remove it, and use universal checkpoints (checkpoint.load_universal)",
        source="runtime/zero/config.py",
    ),
    Rule(
        name="parameters-kept-in-memory",
        level="hint",
        path=f"{_ZERO}.offload_param.max_in_cpu",
        applies=lambda case: (
            case.stage == 3
            and case.offload("param") == "nvme"
            and case.value(f"{_ZERO}.offload_param.max_in_cpu") is None
        ),
        reason="left open: the first 1e9 parameters stay in host memory and never reach the NVMe disk",
        remedy="set max_in_cpu to 0 to keep every parameter on the disk",
        source="runtime/zero/offload_config.py",
    ),
    Rule(
        name="prefetch-from-nvme",
        level="warning",
        path=f"{_ZERO}.stage3_prefetch_bucket_size",
        applies=lambda case: (
            case.stage == 3
            and case.offload("param") == "nvme"
            and case.value(f"{_ZERO}.stage3_prefetch_bucket_size") != 0
        ),
        reason="not 0, and parameters lie on NVMe: where two uses of a parameter are near to each other, DeepSpeed "
        "reads it ahead twice and stops with 'already assigned swap buffer id'; whether it does depends on the model",
        remedy="set it to 0, at the price that nothing is read ahead, or try it with the model",
        source="runtime/zero/partitioned_param_coordinator.py",
    ),
    Rule(
        name="muon-before-0.19.8",
        level="hint",
        path="optimizer.type",
        applies=lambda case: (
            case.optimizer == "muon"
            and (
                case.offload("optimizer") is not None
                or (case.stage == 3 and case.value("gradient_accumulation_steps") != 1)
            )
        ),
        reason="before DeepSpeed 0.19.8 Muon computed other updates with an offloaded optimizer (issue 8463) and at "
        "stage 3 with accumulation (issue 8443), and the loss differed",
        remedy="train with 0.19.8 or later",
        source="runtime/zero/stage3.py",
    ),
    # Defaults that changed: the same file is another experiment with another version.
    Rule(
        name="open-gradient-clipping",
        level="hint",
        path="gradient_clipping",
        applies=lambda case: "gradient_clipping" not in case.config,
        reason="left open: 1.0 since DeepSpeed 0.19.3, and no clipping before",
        remedy="write it down",
        source="runtime/constants.py",
    ),
    *(
        Rule(
            name=f"open-pin-memory-of-{kind}",
            level="hint",
            path=f"{_ZERO}.offload_{kind}.pin_memory",
            applies=lambda case, kind=kind, stages=stages: (  # type: ignore[misc]
                case.stage in stages
                and case.offload(kind) is not None
                and "pin_memory" not in case.block(f"{_ZERO}.offload_{kind}")
            ),
            reason="left open: true since DeepSpeed 0.19.5, and false before",
            remedy="write it down",
            source="runtime/zero/offload_config.py",
        )
        for kind, stages in (("optimizer", _ENABLED_STAGES), ("param", (3,)))
    ),
    Rule(
        name="open-overflow-check",
        level="hint",
        path="bf16.check_grad_overflow",
        applies=lambda case: (
            case.stage in (1, 2) and case.is_on("bf16.enabled") and "check_grad_overflow" not in case.block("bf16")
        ),
        reason="left open: since DeepSpeed 0.19.3 a step with infinite gradients is skipped, and was applied before",
        remedy="write it down",
        source="runtime/precision_config.py",
    ),
)

RULES: tuple[Rule, ...] = (*_REFUSED_IN_ROWS, *_CAVEATS_OF_ROWS, *_OF_FILES)
"""In the order in which a row asks them."""


def without_ignored(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns a copy of a configuration with only what DeepSpeed acts on, and what was left out, with the reasons."""
    kept, left_out = dict(config), []
    for rule in RULES:
        case = Case(config=kept)
        if rule.row == "ignored" and rule.applies(case):
            kept = overlay(kept, nested(rule.path, rule.read_as))
            left_out.append(f"{rule.path} ({rule.reason_for(case)})")
    return kept, left_out
