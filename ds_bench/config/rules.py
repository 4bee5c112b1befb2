"""The rules about DeepSpeed configurations that its keys and types do not tell: refused, ineffective, slow or wrong.

Each fact stands here once. The command ``check`` reports every rule with a level; a rule with ``row`` also decides
about a row of a comparison (``validation``): a refusal makes it Unsupported, a caveat is printed beside it.

Every rule was read in the code of DeepSpeed 0.19.8, at the place of ``source`` below its package, or run with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .spec import Placement, Workload

Level = Literal["error", "warning", "hint"]
RowUse = Literal["refusal", "caveat"]

AUTO = "auto"
CPU_OPTIMIZERS = ("adamw", "adam", "adagrad", "lion")
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

    def value(self, path: str, default: Any = None) -> Any:
        """The value of a key; ``default`` where it is absent, null or "auto"."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None or value == AUTO else value

    def number(self, path: str, default: float) -> float:
        """The number of a key; ``default`` where there is none."""
        value = self.value(path, default)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def is_on(self, path: str, default: bool = False) -> bool:
        """Whether a switch is on, read as pydantic reads it."""
        value = self.value(path, default)
        return (value.lower() if isinstance(value, str) else value) in _TRUE if not isinstance(value, list) else False

    def has_block(self, path: str) -> bool:
        return isinstance(self.value(path), Mapping)

    @property
    def is_row(self) -> bool:
        """Whether it is a row of a comparison, completed and with a placement."""
        return self.placement is not None

    @property
    def stage(self) -> int | None:
        """ZeRO stage; None where the file says something else than 0 to 3."""
        stage = self.value("zero_optimization.stage", 0)
        return stage if type(stage) is int and 0 <= stage <= 3 else None

    @property
    def optimizer(self) -> str:
        """Name of the optimizer in lower case; empty where the training script gives one."""
        return str(self.value("optimizer.type", "")).lower()

    def offload(self, kind: Literal["optimizer", "param"]) -> str | None:
        """``cpu`` or ``nvme``; None without offload."""
        device = self.value(f"zero_optimization.offload_{kind}.device", "none")
        return None if device == "none" else str(device)

    @property
    def precision(self) -> str:
        """Number format of the model that DeepSpeed converts it to; fp32 where it does not."""
        return next((name for name in ("fp16", "bf16") if self.is_on(f"{name}.enabled")), "fp32")

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
    row_text: str = "{reason}"
    """What a row says; ``{reason}``, ``{remedy}`` and ``{source}`` stand for those above."""

    def reason_for(self, case: Case) -> str:
        """The reason with the configuration's own values."""
        accelerator = case.placement.accelerator if case.placement else None
        return self.reason.format(
            stage=case.stage, optimizer=case.optimizer, precision=case.precision, accelerator=accelerator
        )

    def row_text_for(self, case: Case) -> str:
        """What a row says, in one line."""
        return self.row_text.format(reason=self.reason_for(case), remedy=self.remedy, source=self.source)


def _on_nvme(case: Case) -> bool:
    return "nvme" in (case.offload("optimizer"), case.offload("param"))


def _lacks_nvme_folder(case: Case) -> bool:
    if case.placement is not None:
        return _on_nvme(case) and case.placement.nvme_path is None
    blocks = [f"zero_optimization.offload_{kind}" for kind in ("optimizer", "param")]
    on_nvme = [case.value(block) for block in blocks if case.value(f"{block}.device") == "nvme"]
    return case.stage == 3 and any(block.get("nvme_path") is None for block in on_nvme)


def _unsupported(precision: str) -> Callable[[Case], bool]:
    def applies(case: Case) -> bool:
        here = case.placement
        return here is not None and case.is_on(f"{precision}.enabled") and precision not in here.supported_precisions

    return applies


def _one_sub_group(case: Case) -> bool:
    if case.stage != 3 or case.number("zero_optimization.offload_optimizer.ratio", 1.0) >= 1.0:
        return False
    return case.number("zero_optimization.sub_group_size", _WHOLE_MODEL) >= (case.rank_parameters or _WHOLE_MODEL)


_REFUSED_IN_ROWS = (
    Rule(
        name="stage-0-offload",
        level="warning",
        path="zero_optimization.stage",
        applies=lambda case: case.stage == 0 and bool(case.offload("optimizer") or case.offload("param")),
        reason="ZeRO stage 0 does not offload (DeepSpeed ignores or rejects it)",
        remedy="use stage 1, 2 or 3",
        source="runtime/engine.py",
        row="refusal",
        row_text="{reason}; {remedy}",
    ),
    Rule(
        name="offload-param-below-stage-3",
        level="warning",
        path="zero_optimization.offload_param",
        applies=lambda case: case.stage in (1, 2) and case.offload("param") is not None,
        reason="parameters are offloaded at stage 3 only; at stage {stage} DeepSpeed ignores it",
        remedy="set zero_optimization.stage to 3, or remove the block",
        source="runtime/zero/config.py",
        row="refusal",
        row_text="{reason}; use --stage 3",
    ),
    Rule(
        name="nvme-below-stage-3",
        level="warning",
        path="zero_optimization.offload_optimizer.device",
        applies=lambda case: case.stage in (1, 2) and case.offload("optimizer") == "nvme",
        reason="stage {stage} with NVMe runs as CPU offload in DeepSpeed (stage_1_and_2.py)",
        remedy="set zero_optimization.stage to 3, or the device to cpu",
        source="runtime/zero/stage_1_and_2.py",
        row="refusal",
        row_text="{reason}; use --stage 3",
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
        applies=lambda case: (
            case.offload("optimizer") is not None
            and case.optimizer not in CPU_OPTIMIZERS
            and (case.is_row or case.optimizer not in ("", "muon"))
        ),
        reason="optimizer {optimizer!r} has no CPU version in DeepSpeed",
        remedy="use AdamW, Adam, Adagrad or Lion to offload it",
        source="runtime/engine.py",
        row="refusal",
        row_text="{reason}; {remedy}",
    ),
    Rule(
        name="lion-on-cpu",
        level=None,
        path="optimizer.type",
        applies=lambda case: (
            case.placement is not None
            and case.placement.accelerator == "cpu"
            and case.optimizer == "lion"
            and case.offload("optimizer") is None
        ),
        reason="FusedLion does not exist for the CPU accelerator",
        remedy="use AdamW, or offload the optimizer",
        row="refusal",
        row_text="{reason}; {remedy}",
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
        row_text="{reason}; {remedy}",
    ),
    *(
        Rule(
            name=f"{precision}-unsupported",
            level=None,
            path=f"{precision}.enabled",
            applies=_unsupported(precision),
            reason=f"{precision} is not supported on this {{accelerator}} device",
            remedy="use --precision fp32",
            row="refusal",
            row_text="{reason}; {remedy}",
        )
        for precision in ("bf16", "fp16")
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
        applies=lambda case: (
            case.placement is not None and case.placement.accelerator != "cuda" and case.is_on("compile.deepcompile")
        ),
        reason="DeepCompile runs on CUDA alone",
        remedy="remove the block, or compile with torch.compile",
        source="compile/util.py, is_deepcompile_supported",
        row="refusal",
        row_text="{reason}; {remedy}",
    ),
    Rule(
        name="deepcompile-at-stage-0",
        level="warning",
        path="compile.deepcompile",
        applies=lambda case: case.is_on("compile.deepcompile") and case.stage == 0,
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
            name=f"{block}-in-a-row",
            level=None,
            path=block,
            applies=lambda case, block=block: case.has_block(block) and bool(case.value(f"{block}.enabled")),  # type: ignore[misc]
            reason=f"{block} is not exercised by this comparison",
            remedy="remove the block",
            row="refusal",
            row_text="{reason}; {remedy}",
        )
        for block in ("expert_parallel", "hybrid_engine", "autotuning", "data_efficiency")
    ),
    Rule(
        name="pipeline",
        level="hint",
        path="pipeline",
        applies=lambda case: "pipeline" in case.config,
        reason="pipeline needs a PipelineModule",
        remedy="build the model as one; for any other model DeepSpeed does not read the block",
        source="runtime/pipe/engine.py",
        row="refusal",
        row_text="{reason}, which is not built here; remove the block",
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
        row_text="{reason} ({source})",
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
        row_text="{reason} ({source})",
    ),
    Rule(
        name="quantized-gradients-on-one-node",
        level="hint",
        path="zero_optimization.zero_quantized_gradients",
        applies=lambda case: (
            case.is_on("zero_optimization.zero_quantized_gradients")
            and (case.placement is None or case.placement.hostfile is None)
        ),
        reason="zero_quantized_gradients has no effect on one node",
        remedy="leave it out unless the job has several nodes",
        source="runtime/zero/stage3.py",
        row="caveat",
        row_text="{reason} ({source})",
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
        row_text="{reason} ({source})",
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
        row_text="{reason} ({source})",
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
        row_text="{reason} ({source})",
    ),
    Rule(
        name="throughput-timer",
        level="hint",
        path="timers.throughput.enabled",
        applies=lambda case: case.is_on("timers.throughput.enabled", default=case.is_row),
        reason="the throughput timer synchronises the device around every step",
        remedy="set it to false where speed matters",
        source="utils/timer.py",
        row="caveat",
        row_text="{reason} ({source})",
    ),
    Rule(
        name="renamed-thread-count",
        level="warning",
        path="aio.thread_count",
        applies=lambda case: case.has_block("aio") and "thread_count" in case.value("aio"),
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
    ),
)

RULES: tuple[Rule, ...] = (*_REFUSED_IN_ROWS, *_CAVEATS_OF_ROWS)
"""In the order in which a row asks them."""
