"""Facts that DeepSpeed's keys and types do not show: which settings are rejected, ineffective, slow or wrong.

``lint`` reports every rule with a level. A rule with ``row`` also decides about a row of a comparison
(``validation``): a refusal makes it Unsupported, a caveat is printed with it, and an ignored setting is left out of
the copy of a file that a row trains with (:func:`without_ignored`). If a row's flags request such a setting,
the row is refused.

Unless it names ``versions``, a rule comes from reading the code of DeepSpeed 0.19.8, at ``source`` below its package,
or from running it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any, Literal

from ..units import format_series
from . import deepspeed_keys
from .axes import AXES, OPTIMIZER, PARAM, ZERO, Axis
from .caveat_texts import Caveat, CaveatKind
from .deepspeed_config import AUTO, nested, overlay
from .spec import Accelerator, Placement, Precision, Workload, gpu_precisions

Level = Literal["error", "warning", "hint"]
RowUse = Literal["refusal", "caveat", "ignored"]

TRAINING_STARTS = "training starts"
_CPU_OPTIMIZERS = ("adamw", "adam", "adagrad", "lion")
"""Optimizers with a CPU version in DeepSpeed."""
_TRUE = (True, 1, "1", "true", "t", "yes", "y", "on")
"""Values that pydantic reads as true."""
_WHOLE_MODEL = 10**9
"""DeepSpeed's default for ``sub_group_size`` and similar keys, in parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What rules about buffers need to know about a model."""

    name: str
    parameters: int
    largest_parameter: int
    """Elements of the largest tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration, and what is known about where it is used."""

    config: Mapping[str, Any]
    """A key with the value "auto", which another program fills in, counts as absent."""
    placement: Placement | None = None
    """None for ``check``, which is given only a file."""
    workload: Workload | None = None
    num_gpus: int | None = None
    model: ModelSize | None = None
    compute_capability: tuple[int, int] | None = None
    """Compute capability of this machine's oldest GPU, for ``check``; None without a GPU."""
    deepspeed_version: str = field(default_factory=deepspeed_keys.version)

    def value(self, path: str, default: Any = None) -> Any:
        """Return the value of a key; ``default`` if it is absent, null or "auto"."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None or value == AUTO else value

    def number(self, path: str, default: float) -> float:
        value = self.value(path, default)
        return value if isinstance(value, (int, float)) else default

    def is_on(self, path: str, default: bool = False) -> bool:
        """Return whether a switch is on, as pydantic reads it."""
        value = self.value(path, default)
        return (value.lower() if isinstance(value, str) else value) in _TRUE

    def has_block(self, path: str) -> bool:
        return isinstance(self.value(path), Mapping)

    def block(self, path: str) -> Mapping[str, Any]:
        value = self.value(path)
        return value if isinstance(value, Mapping) else {}

    @property
    def is_row(self) -> bool:
        """Whether it is a row of a comparison, completed and with a placement."""
        return self.placement is not None

    @property
    def accelerator(self) -> Accelerator | None:
        return None if self.placement is None else self.placement.accelerator

    @property
    def stage(self) -> int | None:
        """ZeRO stage; None if the file says something other than 0 to 3."""
        stage = self.value(f"{ZERO}stage", 0)
        return stage if type(stage) is int and 0 <= stage <= 3 else None

    @property
    def optimizer(self) -> str:
        """Name of the optimizer in lower case; empty if the training script gives one."""
        return str(self.value("optimizer.type", "")).lower()

    @property
    def has_cpu_optimizer(self) -> bool:
        """Whether DeepSpeed replaces an offloaded optimizer with its CPU version.

        Also true if the training script makes the optimizer, since Trainer and Accelerate then pass DeepSpeed's CPU
        optimizer.
        """
        return self.optimizer in ("", *_CPU_OPTIMIZERS) and not self.is_on("optimizer.params.torch_adam")

    def offload(self, kind: Literal["optimizer", "param"]) -> str | None:
        """Return ``cpu`` or ``nvme``; None without offload."""
        device = self.value(f"{ZERO}offload_{kind}.device", "none")
        return None if device == "none" else str(device)

    @property
    def precision(self) -> str:
        """Number format that DeepSpeed converts the model to; fp32 if it does not convert it."""
        return next((name for name in ("fp16", "bf16") if self.is_on(f"{name}.enabled")), "fp32")

    @property
    def ranks(self) -> int | None:
        return self.placement.num_gpus if self.placement else self.num_gpus


When = Callable[[Case], bool]


@cache
def _contains(versions: str, version: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(versions).contains(version, prereleases=True)


@dataclass(frozen=True, slots=True)
class Rule:
    """One fact about configurations: when it applies, why it matters, and what to do."""

    name: str
    """Stable, as in the output of ``check``: ``nvme-below-stage-3``."""
    level: Level | None
    """None if only a row can tell, because its machine or this program decides."""
    path: str
    """Key that a finding points to."""
    _: KW_ONLY
    when: When
    reason: str
    """Names in braces stand for values of the case (:meth:`reason_for`)."""
    remedy: str = ""
    """What to change in the file."""
    source: str = ""
    """File of DeepSpeed, below its package, or an issue or pull request."""
    stops_when: str = ""
    """When DeepSpeed raises its error; empty: when it reads the configuration, or never."""
    row: RowUse | None = None
    row_remedy: str = ""
    """What to do about a row; empty: ``remedy``, or for a caveat the source."""
    read_as: object = None
    """What DeepSpeed reads in place of an ignored value; None: the key has no effect."""
    versions: str = ""
    """The DeepSpeed versions in which it holds, such as ``>=0.17.6,<0.18.3``; empty: all."""

    def applies(self, case: Case) -> bool:
        unread = self.path in deepspeed_keys.keys_added_later()
        return not unread and self.holds_in(case.deepspeed_version) and self.when(case)

    def holds_in(self, version: str) -> bool:
        return not self.versions or _contains(self.versions, version)

    def reason_for(self, case: Case) -> str:
        values = {name: getattr(case, name) for name in ("stage", "optimizer", "precision", "accelerator", "ranks")}
        return self.reason.format(**values)

    def row_text(self, case: Case) -> str:
        """Return the text that a row shows, in one line."""
        reason = self.reason_for(case)
        if self.row_remedy or self.row != "caveat":
            return f"{reason}; {self.row_remedy or self.remedy}"
        return f"{reason} ({self.source})" if self.source else reason


# Conditions that several rules share, or that do not fit a line.


def _lacks_nvme_folder(case: Case) -> bool:
    # A row swaps to a private folder below --nvme-path, whatever its configuration names (with_swap_folder).
    if case.placement is not None:
        return "nvme" in (case.offload("optimizer"), case.offload("param")) and case.placement.nvme_path is None
    on_nvme = [case.block(block) for block in _OFFLOADS if case.value(f"{block}.device") == "nvme"]
    # Below stage 3 nothing is swapped, which other rules report.
    return case.stage == 3 and any(block.get("nvme_path") is None for block in on_nvme)


_OFFLOADS = (OPTIMIZER.rstrip("."), PARAM.rstrip("."))


def _one_sub_group(case: Case) -> bool:
    if case.stage != 3 or case.number(f"{OPTIMIZER}ratio", 1.0) >= 1.0:
        return False
    # For an unknown model a sub-group of DeepSpeed's default size counts as all of a rank's parameters.
    part = case.model.parameters / case.num_gpus if case.model and case.num_gpus else _WHOLE_MODEL
    return case.number(f"{ZERO}sub_group_size", _WHOLE_MODEL) >= part


def _offloads_at_stage_0(case: Case) -> bool:
    return case.stage == 0 and case.offload("optimizer") is not None


def _deepcompiles(case: Case) -> bool:
    return case.is_on("compile.deepcompile")


def _lacks_precision(precision: Precision) -> When:
    return lambda case: (
        case.placement is not None
        and case.is_on(f"{precision}.enabled")
        and precision not in case.placement.supported_precisions
    )


def _is_for_gpus(axis: Axis) -> When:
    """True on the CPU accelerator at the axis's stages. A row that sets the axis itself is refused before this."""
    return lambda case: case.accelerator == "cpu" and case.is_on(axis.keys[0]) and case.stage in axis.stages


def _is_enabled(path: str, *stages: int) -> When:
    """At these stages; at every stage if none are given."""
    return lambda case: case.is_on(path) and (not stages or case.stage in stages)


def _accumulates_in_another_format(case: Case) -> bool:
    accumulated = case.value("data_types.grad_accum_dtype")
    names = {"fp16": ("fp16", "float16", "half"), "bf16": ("bf16", "bfloat16"), "fp32": ("fp32", "float32", "float")}
    return case.stage == 0 and isinstance(accumulated, str) and accumulated not in names[case.precision]


def _skips_gradient_norm(case: Case) -> bool:
    return not case.is_on(f"{ZERO}compute_grad_norm", default=True)


def _uses_zenflow(case: Case) -> bool:
    return case.has_block(f"{ZERO}zenflow")


def _has_wrong_intervals(case: Case) -> bool:
    """Return whether ``configure_zenflow`` raises an exception."""
    if not _uses_zenflow(case):
        return False
    select, update = (case.value(f"{ZERO}zenflow.{name}_interval") for name in ("select", "update"))
    if case.value(f"{ZERO}zenflow.select_strategy") is None:
        return isinstance(select, int)
    return select is None or (isinstance(select, int) and isinstance(update, int) and select < update)


def _not_in(path: str, *allowed: str) -> When:
    known = [name.lower() for name in allowed]
    return lambda case: isinstance(value := case.value(path), str) and value.lower() not in known


def _not_a_count(path: str, minimum: float) -> When:
    return lambda case: isinstance(case.value(path), str) or case.number(path, minimum) < minimum


def _wrong_in_dynamic_scaling(path: str) -> When:
    return lambda case: (
        isinstance(case.value(path), bool)
        or (case.is_on("fp16.enabled") and case.number("fp16.loss_scale", 0) == 0 and case.number(path, 1) <= 0)
    )


def _leaves_pin_memory_unset(kind: Literal["optimizer", "param"], *stages: int) -> When:
    return lambda case: (
        case.stage in stages
        and case.offload(kind) is not None
        and "pin_memory" not in case.block(f"{ZERO}offload_{kind}")
    )


def _parameters_on_nvme(case: Case) -> bool:
    return case.stage == 3 and case.offload("param") == "nvme"


_CONFIG, _ENGINE, _STAGE_3 = "runtime/config.py", "runtime/engine.py", "runtime/zero/stage3.py"
_ZENFLOW, _ZENFLOW_CONFIG = "runtime/zenflow/engine.py", "runtime/zenflow/zenflow_config.py"
_WRITER, _PRECISION = "runtime/model_checkpointing/config.py", "runtime/precision_config.py"
_HALF_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16")
_COMMS_LOGGER = "the mere presence of comms_logger makes every collective synchronous"
_AUTOCAST_FORMATS = (
    *(prefix + name for name in ("float16", "float32", "bfloat16", "int8") for prefix in ("", "torch.")),
    *("fp16", "half", "fp32", "float", "bf16"),
)

# fmt: off
_REFUSED_IN_ROWS = (
    Rule("stage-0-offload", "warning", "zero_optimization.offload_optimizer", row="refusal",
         when=lambda case: _offloads_at_stage_0(case) and case.has_cpu_optimizer and case.accelerator != "cpu",
         reason="stage 0 keeps parameters on the GPU, and DeepSpeed's CPU optimizer fails in its first step there",
         remedy="use zero_optimization.stage 1, 2 or 3, or remove the block", source="ops/adam/cpu_adam.py"),
    Rule("stage-0-offload-of-another-optimizer", "warning", "zero_optimization.offload_optimizer", row="ignored",
         when=lambda case: _offloads_at_stage_0(case) and not case.has_cpu_optimizer,
         reason="stage 0 offloads only optimizers that have a CPU version in DeepSpeed, not {optimizer}",
         remedy="use zero_optimization.stage 1, 2 or 3, or remove the block", source=_ENGINE),
    Rule("offload-param-below-stage-3", "warning", "zero_optimization.offload_param", row="ignored",
         when=lambda case: case.stage in (0, 1, 2) and case.offload("param") is not None,
         reason="parameters are offloaded at stage 3 only; at stage {stage} DeepSpeed ignores the setting",
         remedy="use zero_optimization.stage 3, or remove the block", row_remedy="use stage 3",
         source="runtime/zero/config.py"),
    Rule("nvme-below-stage-3", "warning", "zero_optimization.offload_optimizer.device", row="ignored", read_as="cpu",
         when=lambda case: case.stage in (0, 1, 2) and case.offload("optimizer") == "nvme",
         reason="stage {stage} with NVMe runs as CPU offload in DeepSpeed",
         remedy="use zero_optimization.stage 3, or the device cpu", row_remedy="use stage 3",
         source="runtime/zero/stage_1_and_2.py"),
    Rule("nvme-without-folder", "warning", "zero_optimization", row="refusal", when=_lacks_nvme_folder,
         reason="offload to NVMe needs a folder on the disk",
         remedy="add nvme_path next to the device", row_remedy="add --nvme-path DIR", source=_STAGE_3),
    Rule("no-cpu-optimizer", "warning", "optimizer.type", row="refusal",
         when=lambda case: case.optimizer == "lamb" and case.stage != 0 and case.offload("optimizer") is not None,
         reason="DeepSpeed has no CPU version of Lamb and fails in the first step",
         remedy="use another optimizer, or do not offload it", source=_ENGINE),
    Rule("lion-on-cpu", None, "optimizer.type", row="refusal",
         when=lambda c: c.accelerator == "cpu" and c.optimizer == "lion" and c.offload("optimizer") is None,
         reason="FusedLion does not exist for the CPU accelerator", remedy="use AdamW, or offload the optimizer"),
    Rule("two-precisions", "error", "fp16.enabled", row="refusal",
         when=lambda case: case.is_on("bf16.enabled") and case.is_on("fp16.enabled"),
         reason="bf16 and fp16 are both enabled", remedy="keep one", source=_CONFIG),
    Rule("zenflow-trains-other-weights", None, "zero_optimization.zenflow", row="refusal",
         when=lambda case: case.is_row and _uses_zenflow(case) and (case.stage == 3 or case.accelerator == "cpu"),
         reason="in DeepSpeed 0.19.8, ZenFlow trains weights different from the model's at stage 3, where it "
                "transposes every matrix, and on CPU ranks, where the loss starts at a different value and hardly "
                "falls",
         remedy="leave it out, or use stage 1 or 2 on GPUs", source="runtime/zenflow/engine_stage3.py"),
    *(Rule(f"{precision}-unsupported", None, f"{precision}.enabled", row="refusal", when=_lacks_precision(precision),
           reason=f"{precision} is not supported here (accelerator: {{accelerator}})",
           remedy=f"use --precision {'bf16 or ' if precision == 'fp16' else ''}fp32 (for a row of --configs: --axis "
                  f"precision=fp32, or change the file's {precision} block)")
      for precision in _HALF_PRECISIONS),
    Rule("bf16-on-an-older-gpu", "warning", "bf16.enabled",
         when=lambda case: case.is_on("bf16.enabled") and "bf16" not in gpu_precisions(case.compute_capability),
         reason="this machine's GPUs are older than Ampere (A100, RTX 30) and have no bf16 units",
         remedy="train in fp16 here, with an fp16 block instead, or use a newer GPU",
         source="accelerator/cuda_accelerator.py, is_bf16_supported"),
    Rule("deepcompile", "hint", "compile.deepcompile", when=lambda case: _deepcompiles(case) and not case.is_row,
         reason="compile.deepcompile acts only through engine.compile()",
         remedy="call engine.compile() in the training script; without it the model runs uncompiled", source=_ENGINE),
    Rule("deepcompile-without-cuda", None, "compile.deepcompile", row="refusal",
         when=lambda case: case.is_row and case.accelerator != "cuda" and _deepcompiles(case),
         reason="DeepCompile runs on CUDA only", remedy="remove the block, or compile with torch.compile",
         source="compile/util.py, is_deepcompile_supported"),
    Rule("deepcompile-at-stage-0", "warning", "compile.deepcompile", row="caveat",
         when=lambda case: (_deepcompiles(case) and case.stage == 0 and not any(
             name in str(case.value("compile.passes")) for name in ("autosp", "autotp"))),
         reason="at stage 0 DeepSpeed compiles with torch.compile instead of DeepCompile",
         remedy="use stage 1, 2 or 3", source="runtime/engine.py, get_deepcompile_backend"),
    Rule("autotp", "hint", "tensor_parallel.autotp_size",
         when=lambda case: case.number("tensor_parallel.autotp_size", 0) > 1 and not case.is_row,
         reason="tensor_parallel.autotp_size needs the same data on every rank of a group",
         remedy="give every rank of a group the same batch, and count the tokens of a group once",
         source="runtime/tensor_parallel/config.py"),
    Rule("ulysses", "hint", "sequence_parallel_size",
         when=lambda case: case.number("sequence_parallel_size", 0) > 1 and not case.is_row,
         reason="sequence_parallel_size needs a model prepared for Ulysses",
         remedy="register the model with UlyssesSPAttentionHF, or let Trainer or Accelerate do it",
         source="runtime/sequence_parallel/ulysses_sp.py"),
    *(Rule(f"{name}-without-cuda", None, AXES[name].keys[0], row="refusal", when=_is_for_gpus(AXES[name]),
           reason=AXES[name].cuda_only, remedy="leave it out, or use GPUs")
      for name in ("qwz", "qgz", "superoffload")),
    Rule("expert-parallel-in-a-row", None, "expert_parallel", row="refusal",
         when=_is_enabled("expert_parallel.enabled"), remedy="remove the block",
         reason="this comparison does not exercise expert_parallel"),
    *(Rule(f"{block.replace('_', '-')}-in-a-row", None, block, row="ignored", when=_is_enabled(f"{block}.enabled"),
           reason=reason, remedy="remove the block", source=source)
      for block, reason, source in (
          ("hybrid_engine", "it is for generating text, not for training steps", "runtime/hybrid_engine.py"),
          ("autotuning", "it ends training after a few steps, for the Autotuner", _ENGINE),
          ("data_efficiency", "it acts only on DeepSpeed's data loader and on layers that the training script converts",
           "runtime/data_pipeline/data_routing/helper.py"))),
    Rule("pipeline", "hint", "pipeline", row="ignored", when=lambda case: "pipeline" in case.config,
         reason="DeepSpeed reads it for a PipelineModule only",
         remedy="build the model as one, or remove the block",
         source="runtime/pipe/engine.py"),
    Rule("hpz-partition-size", "error", "zero_optimization.zero_hpz_partition_size", row="refusal",
         when=lambda case: (case.stage == 3 and type(size := case.value(f"{ZERO}zero_hpz_partition_size", 1)) is int
                            and case.ranks is not None and size > 1 and case.ranks % min(size, case.ranks) != 0),
         stops_when=TRAINING_STARTS, reason="zero_hpz_partition_size does not divide the number of ranks, {ranks}",
         remedy="give a divisor of the number of ranks, such as the number of GPUs of one node",
         source="utils/groups.py"),
)

_CAVEATS_OF_ROWS = (
    Rule("ratio-with-one-sub-group", "warning", f"{OPTIMIZER}ratio", row="caveat", when=_one_sub_group,
         reason="offload_optimizer.ratio below 1 has no effect with sub_group_size at or above a rank's parameters: "
                "the split is by sub-group",
         remedy="set sub_group_size to an eighth of a rank's parameters or less", source=_STAGE_3),
    Rule("super-offload-below-stage-3", "warning", f"{OPTIMIZER}super_offload", row="caveat",
         when=lambda case: case.is_on(f"{OPTIMIZER}super_offload") and case.stage != 3,
         reason="super_offload is ignored outside stage 3",
         remedy="set zero_optimization.stage to 3, or remove it", source=_ENGINE),
    Rule("quantized-gradients-on-one-node", "hint", f"{ZERO}zero_quantized_gradients", row="caveat",
         when=lambda case: (case.is_on(f"{ZERO}zero_quantized_gradients")
                            and (case.placement is None or case.placement.num_nodes == 1)),
         reason="zero_quantized_gradients has no effect on one node",
         remedy="leave it out unless the job has several nodes", source=_STAGE_3),
    Rule("activation-checkpointing-block", "hint", "activation_checkpointing", row="caveat",
         when=lambda case: ("activation_checkpointing" in case.config
                            and (case.workload is None or case.workload.model_source != "factory")),
         reason="the activation_checkpointing block has no effect on Transformers models",
         remedy="call the model's gradient_checkpointing_enable(); "
                "only deepspeed.checkpointing.checkpoint() reads the block",
         row_remedy="use --activation-checkpointing", source="runtime/activation_checkpointing/checkpointing.py"),
    Rule("comms-logger-switched-off", "warning", "comms_logger.enabled", row="caveat",
         when=lambda case: case.has_block("comms_logger") and not case.is_on("comms_logger.enabled"),
         reason=_COMMS_LOGGER, remedy="remove the block; enabled: false does not turn it off", source="comm/config.py"),
    Rule("comms-logger", "hint", "comms_logger", row="caveat",
         when=lambda case: "comms_logger" in case.config and case.is_on("comms_logger.enabled"),
         reason=_COMMS_LOGGER, remedy="remove the block where speed matters", source="comm/config.py"),
    Rule("wall-clock-breakdown", "hint", "wall_clock_breakdown", row="caveat", when=_is_enabled("wall_clock_breakdown"),
         reason="wall_clock_breakdown synchronizes the device in every micro-step, which slows training",
         remedy="set it to false where speed matters", source=_ENGINE),
    Rule("flops-profiler", "hint", "flops_profiler.enabled", row="caveat", when=_is_enabled("flops_profiler.enabled"),
         reason="flops_profiler instruments a step and turns wall_clock_breakdown on",
         remedy="set it to false where speed matters", source=_CONFIG),
    # DeepSpeed's default is on. Rows that do not set it have it off (complete_config); for a file that does not set
    # it, a hint would say nothing about the file.
    Rule("throughput-timer", "hint", "timers.throughput.enabled", row="caveat",
         when=lambda case: case.is_on("timers.throughput.enabled", default=case.is_row),
         reason="the throughput timer synchronizes the device around every step",
         remedy="set it to false where speed matters", source="utils/timer.py"),
    Rule("renamed-thread-count", "warning", "aio.thread_count", row="caveat",
         when=lambda case: "thread_count" in case.block("aio"),
         reason="DeepSpeed has not read aio.thread_count since 0.16.4", remedy="the key is intra_op_parallelism",
         row_remedy="the key is intra_op_parallelism", source="runtime/swap_tensor/constants.py"),
    Rule("limit-without-page-locked-memory", None, "", row="caveat",
         when=lambda case: (case.placement is not None and case.accelerator == "cuda"
                            and case.placement.cpu_memory_limit_bytes is not None),
         reason="--cpu-memory-limit does not count page-locked memory, which offloading uses on GPUs"),
)

_OF_FILES = (
    # Settings for which DeepSpeedConfig raises an exception, besides unknown keys and wrong types.
    *(Rule(f"{name.replace('_', '-')}-at-stage-0", "error", f"{name[:4]}.{name}",
           versions=">=0.17", when=_is_enabled(f"{name[:4]}.{name}", 0), reason="DeepSpeed rejects it at stage 0",
           remedy="set zero_optimization.stage to 1, 2 or 3", source=_CONFIG)
      for name in ("fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states")),
    Rule("bf16-states-without-master-weights", "error", "bf16.bf16_optimizer_states",
         when=lambda case: (case.is_on("bf16.bf16_optimizer_states")
                            and not case.is_on("bf16.bf16_master_weights_and_grads")),
         reason="DeepSpeed rejects it without bf16_master_weights_and_grads", remedy="set both", source=_CONFIG),
    Rule("summed-gradients", "error", "gradient_allreduce_op",
         when=lambda case: (str(case.value("gradient_allreduce_op")).lower() == "sum"
                            and (case.stage == 3 or _uses_zenflow(case) or _deepcompiles(case))),
         reason="DeepSpeed rejects sum at stage 3, with ZenFlow and with DeepCompile",
         remedy="use mean, or stage 2 or below without them", source=_CONFIG),
    Rule("unknown-allreduce-op", "error", "gradient_allreduce_op", when=_not_in("gradient_allreduce_op", "mean", "sum"),
         reason="DeepSpeed accepts only mean and sum", remedy="use mean, its default", source=_CONFIG),
    *(Rule(f"unknown-{name}", "error", path, when=_not_in(path, *known),
           reason=f"DeepSpeed accepts only {format_series(known, 'and')}", remedy="use one of them", source=source)
      for name, path, known, source in (
          ("communication-data-type", "communication_data_type", ("fp16", "bf16", "fp32"), _CONFIG),
          ("seq-parallel-communication-data-type", "seq_parallel_communication_data_type", ("fp16", "bf16", "fp32"),
           _CONFIG),
          ("tag-validation", "checkpoint.tag_validation", ("Warn", "Ignore", "Fail"), _CONFIG),
          ("checkpoint-writer", "checkpoint.writer.type", ("mock", "python", "fast"), _WRITER),
          ("writer-parallelism", "checkpoint.writer.data_parallel", ("replica", "socket", "machine"), _WRITER))),
    Rule("unknown-autocast-dtype", "error", "torch_autocast.dtype",
         when=_not_in("torch_autocast.dtype", *_AUTOCAST_FORMATS),
         reason="DeepSpeed does not know this number format", remedy="use bfloat16 or float16", source=_CONFIG),
    Rule("no-sequence-parallel-ranks", "error", "sequence_parallel_size",
         versions=">=0.17", when=lambda case: case.number("sequence_parallel_size", 1) < 1,
         reason="DeepSpeed divides the number of ranks by it", remedy="give 1 or more",
         source=_CONFIG),
    Rule("patterns-not-text", "error", "data_types.keep_in_fp32_modules",
         when=lambda case: ((value := case.block("data_types").get("keep_in_fp32_modules", AUTO)) != AUTO and not (
             isinstance(value, list) and all(isinstance(each, str) for each in value))),
         reason='DeepSpeed accepts only "auto" or a list of name patterns', remedy="give a list of strings",
         source=_CONFIG),
    Rule("ratio-below-stage-3", "error", f"{OPTIMIZER}ratio",
         when=lambda case: case.stage in (0, 1, 2) and case.number(f"{OPTIMIZER}ratio", 1.0) < 1.0,
         reason="DeepSpeed accepts a ratio below 1 at stage 3 only",
         remedy="set zero_optimization.stage to 3, or remove it", source="runtime/zero/config.py"),
    Rule("no-gradient-norm-at-this-stage", "error", f"{ZERO}compute_grad_norm",
         when=lambda case: case.stage in (0, 3) and _skips_gradient_norm(case),
         reason="DeepSpeed rejects false at stage {stage}", remedy="use stage 1 or 2, or remove it",
         source="runtime/zero/config.py"),
    Rule("no-gradient-norm-to-clip", "error", f"{ZERO}compute_grad_norm", stops_when=TRAINING_STARTS,
         when=lambda case: (case.stage in (1, 2) and _skips_gradient_norm(case) and (_uses_zenflow(case) or (
             case.number("gradient_clipping", 1.0) > 0 or case.offload("optimizer") is not None))),
         reason="false needs gradient_clipping 0, no optimizer offload and no ZenFlow",
         remedy="set gradient_clipping to 0 and leave the others out, or remove compute_grad_norm",
         source="runtime/zero/stage_1_and_2.py"),
    Rule("unknown-select-strategy", "error", f"{ZERO}zenflow.select_strategy",
         when=lambda case: case.value(f"{ZERO}zenflow.select_strategy", "step") not in ("step", "epoch"),
         reason="DeepSpeed accepts only auto, step and epoch", remedy="use one of them", source=_ZENFLOW_CONFIG),
    Rule("zenflow-select-interval", "error", f"{ZERO}zenflow.select_interval",
         when=_not_a_count(f"{ZERO}zenflow.select_interval", float("-inf")),
         reason='DeepSpeed accepts only "auto" or a whole number', remedy="give one of them", source=_ZENFLOW_CONFIG),
    *(Rule("zenflow-update-interval", "error", f"{ZERO}zenflow.update_interval", versions=versions,
           when=_not_a_count(f"{ZERO}zenflow.update_interval", minimum),
           reason='DeepSpeed accepts only "auto" or a whole number of 1 or more', remedy="give one of them",
           source=_ZENFLOW_CONFIG)
      for versions, minimum in (("<0.19", float("-inf")), (">=0.19", 1))),
    Rule("zenflow-intervals", "error", f"{ZERO}zenflow", when=_has_wrong_intervals, stops_when=TRAINING_STARTS,
         reason="select_strategy and select_interval need each other, and select_interval must not be below "
                "update_interval",
         remedy="give select_strategy and select_interval together, or neither", source=_ZENFLOW),
    Rule("zenflow-replaces-accumulation", "warning", "gradient_accumulation_steps",
         when=lambda case: (_uses_zenflow(case) and None not in (
             interval := case.value(f"{ZERO}zenflow.update_interval"),
             accumulation := case.value("gradient_accumulation_steps")) and accumulation != interval),
         reason="ZenFlow replaces gradient_accumulation_steps with its update_interval",
         remedy="give both the same value", source=_ZENFLOW),
    Rule("zenflow-without-interval", "warning", f"{ZERO}zenflow",
         when=lambda case: _uses_zenflow(case) and case.value(f"{ZERO}zenflow.update_interval") is None,
         reason="without an update_interval ZenFlow sets gradient_accumulation_steps to 0; the loss became NaN "
                "on two CPU ranks",
         remedy="give update_interval, with select_strategy and select_interval", source=_ZENFLOW),
    *(Rule(f"fp16-{name.replace('_', '-')}", "error", f"fp16.{name}", when=_wrong_in_dynamic_scaling(f"fp16.{name}"),
           reason="must be a whole number above 0 if the loss scale is dynamic", remedy="give one, or remove it",
           source=_PRECISION, versions=">=0.19")
      for name in ("loss_scale_window", "min_loss_scale")),
    Rule("fp16-loss-scale", "error", "fp16.loss_scale", versions=">=0.18",
         when=lambda case: isinstance(case.value("fp16.loss_scale"), bool) or case.number("fp16.loss_scale", 0) < 0,
         reason="must be 0 or more", remedy="use 0 for dynamic loss scaling", source=_PRECISION),
    # Settings for which deepspeed.initialize raises an exception.
    Rule("scaling-before-reduce-scatter", "error", f"{ZERO}reduce_scatter",
         when=lambda case: (case.stage in (2, 3) and case.is_on(f"{ZERO}reduce_scatter", default=True) and (
             case.is_on("prescale_gradients") or case.number("gradient_predivide_factor", 1.0) != 1.0)),
         reason="reduce_scatter at stage {stage} forbids prescale_gradients and gradient_predivide_factor",
         remedy="remove them, or set reduce_scatter to false", source=_STAGE_3, stops_when=TRAINING_STARTS),
    Rule("accumulation-format-at-stage-0", "error", "data_types.grad_accum_dtype", when=_accumulates_in_another_format,
         reason="stage 0 accumulates gradients in the model's format ({precision}) only",
         remedy="set zero_optimization.stage to 1 or more, or remove it", source=_ENGINE, stops_when=TRAINING_STARTS),
    Rule("master-weights-without-offload", "error", f"{ZERO}offload_optimizer", row="refusal",
         when=lambda case: (case.stage in (1, 2, 3) and case.offload("optimizer") is None and (
             case.is_on("fp16.fp16_master_weights_and_grads") or (case.is_on("bf16.bf16_master_weights_and_grads")
                                                                  and not case.is_on("bf16.bf16_optimizer_states")))),
         stops_when=TRAINING_STARTS,
         reason="16-bit master weights with 32-bit optimizer states need the optimizer offloaded to DeepSpeedCPUAdam",
         remedy="offload the optimizer to cpu, or with bf16 set bf16_optimizer_states too",
         source="runtime/base_optimizer.py"),
    Rule("legacy-stage-1", "error", f"{ZERO}legacy_stage1", when=_is_enabled(f"{ZERO}legacy_stage1", 1, 2, 3),
         reason="the old form of stage 1 was removed in DeepSpeed 0.5.9", remedy="remove it", source=_ENGINE,
         stops_when=TRAINING_STARTS),
    Rule("unmanaged-accumulation", "error", "managed_gradient_accumulation", stops_when=TRAINING_STARTS,
         when=lambda case: (not case.is_on("managed_gradient_accumulation", default=True) and (_deepcompiles(case) or (
             case.stage in (0, 1) and case.is_on(f"{ZERO}overlap_comm")))),
         reason="with false, overlap_comm works only at stages 2 and 3, and DeepCompile does not work",
         remedy="set overlap_comm to false and leave DeepCompile out", source=_ENGINE),
    Rule("lamb-with-static-loss-scale", "error", "fp16.loss_scale", stops_when=TRAINING_STARTS,
         when=lambda case: case.optimizer == "lamb" and case.number("fp16.loss_scale", 0) != 0,
         reason="Lamb needs dynamic loss scaling", remedy="set loss_scale to 0", source=_ENGINE),
    Rule("muon-with-reduce-scatter", "error", f"{ZERO}reduce_scatter", stops_when=TRAINING_STARTS,
         when=lambda case: (case.optimizer == "muon" and case.stage == 3
                            and case.is_on(f"{ZERO}reduce_scatter", default=True)),
         reason="DeepSpeed rejects Muon with reduce_scatter at stage 3", remedy="set reduce_scatter to false",
         source=_STAGE_3),
    Rule("max-grad-norm", "error", "optimizer.params.max_grad_norm", stops_when=TRAINING_STARTS,
         when=lambda case: "max_grad_norm" in case.block("optimizer.params"),
         reason="DeepSpeed rejects it among the optimizer's parameters",
         remedy="use the top-level key gradient_clipping", source=_ENGINE),
    Rule("aio-text", "error", "aio", stops_when="it swaps to NVMe",
         when=lambda case: any(isinstance(case.value(f"aio.{key}"), str) for key in deepspeed_keys.keys_of("aio")),
         reason="a value in aio is text, as ds_nvme_tune prints it",
         remedy="write numbers, true and false without quotes", source="runtime/swap_tensor/aio_config.py"),
    # Settings that do not do what they appear to do.
    Rule("old-form-of-zero", "warning", "zero_optimization",
         when=lambda case: isinstance(case.value("zero_optimization"), bool),
         reason="true and false are the old form, for stages 1 and 0", remedy='write {"stage": 1}',
         source="runtime/zero/config.py"),
    Rule("old-name-of-bf16", "warning", "bfloat16", when=lambda case: "bfloat16" in case.config,
         reason="an old name, read only if there is no bf16 block; other programs do not know it",
         remedy="rename it to bf16", source=_PRECISION),
    Rule("elastic-checkpoint-at-stage-3", "warning", f"{ZERO}elastic_checkpoint",
         when=_is_enabled(f"{ZERO}elastic_checkpoint", 3), reason="stage 3 no longer supports elastic_checkpoint",
         remedy="remove it, and use universal checkpoints (checkpoint.load_universal)",
         source="runtime/zero/config.py"),
    Rule("parameters-kept-in-memory", "hint", f"{PARAM}max_in_cpu",
         when=lambda case: _parameters_on_nvme(case) and case.value(f"{PARAM}max_in_cpu") is None,
         reason="unset: the first 1e9 parameters stay in host memory and never reach the NVMe disk",
         remedy="set max_in_cpu to 0 to keep every parameter on the disk", source="runtime/zero/offload_config.py"),
    Rule("prefetch-from-nvme", "warning", f"{ZERO}stage3_prefetch_bucket_size",
         when=lambda case: _parameters_on_nvme(case) and case.value(f"{ZERO}stage3_prefetch_bucket_size") != 0,
         reason="not 0 with parameters on NVMe: if a model uses a parameter twice in quick succession, DeepSpeed "
                "prefetches it twice and stops with 'already assigned swap buffer id'",
         remedy="set it to 0, which turns prefetching off, or try it with the model",
         source="runtime/zero/partitioned_param_coordinator.py"),
    # Defaults that changed: the same file is a different experiment with a different version.
    Rule("unset-gradient-clipping", "hint", "gradient_clipping",
         when=lambda case: "gradient_clipping" not in case.config,
         reason="not set: DeepSpeed clips at 1.0 since 0.19.3; earlier versions do not clip",
         remedy="set it explicitly", source="runtime/constants.py"),
    *(Rule(f"unset-pin-memory-of-{kind}", "hint", f"{ZERO}offload_{kind}.pin_memory", when=when,
           reason="not set: true since DeepSpeed 0.19.5, false in earlier versions", remedy="set it explicitly",
           source="runtime/zero/offload_config.py")
      for kind, when in (("optimizer", _leaves_pin_memory_unset("optimizer", 1, 2, 3)),
                         ("param", _leaves_pin_memory_unset("param", 3)))),
    Rule("unset-overflow-check", "hint", "bf16.check_grad_overflow",
         when=lambda case: (case.stage in (1, 2) and case.is_on("bf16.enabled")
                            and "check_grad_overflow" not in case.block("bf16")),
         reason="not set: since DeepSpeed 0.19.3 a step with infinite gradients is skipped; earlier versions apply it",
         remedy="set it explicitly", source=_PRECISION),
)
# fmt: on

# fmt: off
WRONG_TRAINING = (
    Rule("zero2-accumulation-7718", "error", "gradient_accumulation_steps", versions=">=0.17.6,<0.18.3", row="caveat",
         when=lambda case: case.stage == 2 and case.number("gradient_accumulation_steps", 1) > 1,
         reason="DeepSpeed 0.17.6 to 0.18.2 computes wrong gradients at stage 2 with accumulation (issue 7718)",
         remedy="use DeepSpeed 0.18.3 or later, stage 1, or no accumulation", source="DeepSpeed#7718"),
    Rule("stage-0-in-bf16-7837", "error", "bf16.enabled", versions=">=0.17.6,<0.18.6", row="caveat",
         when=lambda case: case.stage == 0 and case.is_on("bf16.enabled"),
         reason="at stage 0 in bf16 DeepSpeed 0.17.6 to 0.18.5 adds the gradients of earlier steps to each step's, "
                "unless the model is a PipelineModule (issue 7837)",
         remedy="use DeepSpeed 0.18.6 or later, or stage 1", source="DeepSpeed#7837"),
    Rule("bf16-stage-1-in-fp32-7985", "error", "data_types.grad_accum_dtype", versions=">=0.18.3,<0.19", row="caveat",
         when=lambda case: (case.stage == 1 and case.is_on("bf16.enabled") and case.offload("optimizer") is None
                            and case.value("data_types.grad_accum_dtype") in ("fp32", "float32", "float")
                            and not case.is_on("bf16.immediate_grad_update") and case.ranks != 1),
         reason="DeepSpeed 0.18.3 to 0.18.9 averages all micro-batches but the last over the ranks at stage 1 in bf16 "
                "with gradients accumulated in fp32 (pull request 7985)",
         remedy="use DeepSpeed 0.19 or later, or stage 2", source="DeepSpeed#7985"),
    Rule("zero2-shared-module-8224", "warning", f"{ZERO}stage", versions=">=0.18.3,<0.19.4", row="caveat",
         when=lambda case: case.stage == 2 and case.precision == "bf16",
         reason="DeepSpeed 0.18.3 to 0.19.3 trains incorrectly at stage 2 in bf16 if the model uses a submodule twice "
                "in a forward pass (issue 8224)",
         remedy="use DeepSpeed 0.19.4 or later, or stage 1, for such a model", source="DeepSpeed#8224"),
    Rule("gradients-divided-twice", "warning", "gradient_accumulation_steps", versions=">=0.18.3,<0.19.6", row="caveat",
         when=lambda case: case.stage in (0, 1, 2) and case.number("gradient_accumulation_steps", 1) > 1,
         reason="DeepSpeed 0.18.3 to 0.19.5 divides gradients by the accumulation twice below stage 3 if the model "
                "returns logits along with its loss: their norm, and clipping by it, differ from stage 3's",
         remedy="use DeepSpeed 0.19.6 or later, or no accumulation",
         source="runtime/engine.py, _backward_prologue_per_tensor"),
    Rule("muon-updates-8463", "error", "optimizer.type", versions="<0.19.8", row="caveat",
         when=lambda case: case.optimizer == "muon" and (case.offload("optimizer") is not None or (
             case.stage == 3 and case.number("gradient_accumulation_steps", 1) > 1)),
         reason="before DeepSpeed 0.19.8 Muon computes wrong updates with an offloaded optimizer (issue 8463) and at "
                "stage 3 with accumulation (issue 8443)",
         remedy="use DeepSpeed 0.19.8 or later", source="DeepSpeed#8463"),
    Rule("stage-0-is-partitioned", "hint", f"{ZERO}stage", versions="<0.17.6", row="caveat",
         when=lambda case: case.stage == 0 and case.is_on("bf16.enabled"),
         reason="before DeepSpeed 0.17.6 stage 0 in bf16 partitions the optimizer states as stage 1 does",
         remedy="read its memory as stage 1's", source="runtime/bf16_optimizer.py"),
)
# fmt: on
"""Settings for which some DeepSpeed versions silently do something other than what the configuration says."""

RULES: tuple[Rule, ...] = (*_REFUSED_IN_ROWS, *_CAVEATS_OF_ROWS, *_OF_FILES, *WRONG_TRAINING)
"""Every rule. A row is refused by the first that applies."""


def keys_read_later(config: Mapping[str, Any]) -> dict[str, str]:
    """Return path → version that added it, for keys of a configuration that this DeepSpeed does not read yet.

    For a block that it does not read, the keys inside are left out.
    """
    case, later = Case(config=config), deepspeed_keys.keys_added_later()
    outermost = (path for path in later if path.rpartition(".")[0] not in later)
    return {path: later[path] for path in outermost if case.value(path) is not None}


def without_later_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration without the keys that this DeepSpeed does not read yet."""
    kept = dict(config)
    for path in keys_read_later(config):
        kept = overlay(kept, nested(path, None))
    return kept


def refusals(case: Case) -> Iterator[str]:
    """Yield why a row is refused. Ignored settings count too, although they are only left out of a file's copy."""
    return (rule.row_text(case) for rule in RULES if rule.row in ("refusal", "ignored") and rule.applies(case))


def row_caveats(case: Case, rules: Sequence[Rule] = RULES) -> Iterator[str | Caveat]:
    """Yield what these rules say about a row that runs."""
    kinds = {"error": CaveatKind.TRAINED_WRONGLY, "warning": CaveatKind.MAY_TRAIN_WRONGLY}
    for rule in rules:
        if rule.row == "caveat" and rule.applies(case):
            if rule in WRONG_TRAINING and rule.level in kinds:
                yield Caveat(kinds[rule.level], {"text": f"{rule.reason_for(case)}; {rule.remedy}"})
            else:
                yield rule.row_text(case)


def without_ignored(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of a configuration without ignored settings, and the settings left out, with the reasons."""
    kept, left_out = dict(config), []
    for rule in RULES:
        case = Case(config=kept)
        if rule.row == "ignored" and rule.applies(case):
            kept = overlay(kept, nested(rule.path, rule.read_as))
            left_out.append(f"{rule.path} ({rule.reason_for(case)})")
    return kept, left_out
