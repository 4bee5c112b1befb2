"""Finds, before anything runs, what DeepSpeed or this program refuses or ignores in a configuration.

DeepSpeed accepts most of these silently. An unknown key is a mistake of the user (:func:`check_keys`), a configuration
that cannot run here makes a row Unsupported (:func:`unsupported_reason`), and a setting without effect becomes a caveat
(:func:`ineffective_settings`).

Sources: DeepSpeed 0.19.8, ``runtime/config.py``, ``runtime/constants.py``; for nested keys its pydantic models
(``deepspeed_keys.json``); other files where a text names them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .spec import Configuration, Placement, Workload, offload_device

Config = Mapping[str, Any]

_CPU_OPTIMIZERS = ("adamw", "adam", "adagrad", "lion")
"""Optimizers that DeepSpeed has a CPU version of."""

KNOWN_TOP_LEVEL_KEYS = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "autotuning",
        "bf16",
        "check_overflow",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "data_types",
        "dataloader_drop_last",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)
"""Top-level keys that DeepSpeed 0.19.8 reads; others it accepts and ignores."""


_BLOCKS = ("aio", "bf16", "fp16", "optimizer", "timers", "zero_optimization")
"""Keys whose value must be an object, as this program reads inside it."""


@cache
def nested_keys() -> dict[str, frozenset[str]]:
    """Path of a block → its keys, for the blocks in which DeepSpeed refuses other keys (its pydantic models)."""
    text = Path(__file__).with_name("deepspeed_keys.json").read_text(encoding="utf-8")
    return {path: frozenset(keys) for path, keys in json.loads(text).items()}


def check_keys(config: Mapping[str, Any]) -> None:
    """Raises UsageError for a top-level key that DeepSpeed would ignore, a nested key that it would refuse, and a block
    that is not an object.
    """
    for key in config:
        if key not in KNOWN_TOP_LEVEL_KEYS:
            near = difflib.get_close_matches(key, KNOWN_TOP_LEVEL_KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "DeepSpeed would ignore it silently; remove it"
            raise UsageError(f"unknown top-level key {key!r} in the DeepSpeed config", remedy=hint)
    for path, known in nested_keys().items():
        block: Any = config
        for name in path.split("."):
            block = block.get(name) if isinstance(block, Mapping) else None
        for key in block if isinstance(block, Mapping) else ():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(sorted(known))}"
                raise UsageError(f"DeepSpeed refuses {path}.{key}, which it does not know", remedy=hint)
    for key in _BLOCKS:
        if not isinstance(config.get(key, {}), Mapping):
            problem = f"{key!r} in the DeepSpeed config is {config[key]!r}, not an object"
            raise UsageError(problem, remedy=f"set a key inside it, like {key}.KEY=VALUE")


def unsupported_reason(configuration: Configuration, placement: Placement) -> str | None:
    """Returns why DeepSpeed or this program would not run a configuration as it says; None if it would.

    Each case was read in the code of DeepSpeed's pinned version, or run with it: without the refusal the row would
    show a number for something that did not happen. A precision of the workload is refused only once the DeepSpeed
    configuration is completed.
    """
    config, stage = configuration.deepspeed_config, configuration.stage
    optimizer, params = offload_device(config, "offload_optimizer"), offload_device(config, "offload_param")
    name = str(config.get("optimizer", {}).get("type", "")).lower()
    return (
        _missing_requirement(configuration, placement)
        or _refused_offload(stage, optimizer, params, placement)
        or _refused_optimizer(name, optimizer, placement)
        or _refused_precision(config, placement)
        or _refused_block(config)
    )


def _missing_requirement(configuration: Configuration, placement: Placement) -> str | None:
    needs, name = configuration.requires, configuration.label
    if needs.accelerator not in (None, placement.accelerator):
        return f"{name} needs the accelerator {needs.accelerator}; add --accelerator {needs.accelerator}"
    if needs.min_ranks > placement.num_gpus:
        return f"{name} needs {needs.min_ranks} ranks or more; use --num-gpus {needs.min_ranks}"
    if needs.min_nodes > 1 and placement.hostfile is None:
        return f"{name} needs {needs.min_nodes} nodes or more; give them with --hostfile"
    return None


def _refused_offload(stage: int, optimizer: str | None, params: str | None, placement: Placement) -> str | None:
    if stage == 0 and (optimizer or params):
        return "ZeRO stage 0 does not offload (DeepSpeed ignores or rejects it); use stage 1, 2 or 3"
    if params and stage != 3:
        return f"parameters are offloaded at stage 3 only; at stage {stage} DeepSpeed ignores it; use --stage 3"
    if optimizer == "nvme" and stage != 3:
        return f"stage {stage} with NVMe runs as CPU offload in DeepSpeed (stage_1_and_2.py); use --stage 3"
    if "nvme" in (optimizer, params) and placement.nvme_path is None:
        return "offload to NVMe needs a folder on the disk; add --nvme-path DIR"
    return None


def _refused_optimizer(name: str, offload: str | None, placement: Placement) -> str | None:
    if offload and name not in _CPU_OPTIMIZERS:
        return f"optimizer {name!r} has no CPU version in DeepSpeed; use AdamW, Adam, Adagrad or Lion to offload it"
    if name == "lion" and not offload and placement.accelerator == "cpu":
        return "FusedLion does not exist for the CPU accelerator; use AdamW, or offload the optimizer"
    return None


def _refused_precision(config: Config, placement: Placement) -> str | None:
    enabled = [block for block in ("bf16", "fp16") if config.get(block, {}).get("enabled")]
    if len(enabled) == 2:
        return "bf16 and fp16 are both enabled; keep one"
    for precision in ("bf16", "fp16"):
        if precision in enabled and precision not in placement.supported_precisions:
            return f"{precision} is not supported on this {placement.accelerator} device; use --precision fp32"
    return None


def _refused_block(config: Config) -> str | None:
    """Why a block is refused that this program does not make use of; None if there is none."""
    compile_block = _block(config, "compile")
    if compile_block.get("deepcompile"):
        return "compile.deepcompile works through engine.compile(), which is not called here; remove the block"
    if _number(_block(config, "tensor_parallel").get("autotp_size")) > 1:
        return "tensor_parallel.autotp_size needs the same data on a group's ranks, which is not given here; remove it"
    if _number(config.get("sequence_parallel_size")) > 1:
        return "sequence_parallel_size needs a model prepared for Ulysses, which is not done here; remove it"
    for name in ("expert_parallel", "hybrid_engine", "autotuning", "data_efficiency"):
        if _block(config, name).get("enabled"):
            return f"{name} is not exercised by this comparison; remove the block"
    if "pipeline" in config:
        return "pipeline needs a PipelineModule, which is not built here; remove the block"
    return None


def ineffective_settings(config: Config, workload: Workload, placement: Placement) -> list[str]:
    """Returns caveats for settings that have no effect, or that slow down what is measured."""
    zero = _block(config, "zero_optimization")
    stage, optimizer = zero.get("stage", 0), _block(zero, "offload_optimizer")
    checks = {
        "offload_optimizer.ratio below 1 has no effect with sub_group_size at or above a rank's parameters: "
        "the split is by sub-group (runtime/zero/stage3.py)": optimizer.get("ratio", 1.0) < 1.0
        and zero.get("sub_group_size", 10**9) >= 10**9,
        "super_offload is ignored outside stage 3 (runtime/engine.py)": bool(optimizer.get("super_offload"))
        and stage != 3,
        "zero_quantized_gradients has no effect on one node (runtime/zero/stage3.py)": bool(
            zero.get("zero_quantized_gradients")
        )
        and placement.hostfile is None,
        "the activation_checkpointing block has no effect on Transformers models; use --activation-checkpointing": (
            "activation_checkpointing" in config and workload.model_source != "factory"
        ),
        "comms_logger: its presence alone makes every collective synchronous (comm/config.py)": "comms_logger"
        in config,
        "wall_clock_breakdown synchronises the device in every micro-step: slower than training": bool(
            config.get("wall_clock_breakdown")
        ),
        "flops_profiler instruments a step and turns wall_clock_breakdown on (runtime/config.py)": bool(
            _block(config, "flops_profiler").get("enabled")
        ),
        "the throughput timer synchronises the device around every step (utils/timer.py)": bool(
            _block(_block(config, "timers"), "throughput").get("enabled", True)
        ),
        "aio.thread_count is not read since DeepSpeed 0.16.4; the key is intra_op_parallelism": "thread_count"
        in _block(config, "aio"),
    }
    caveats = [text for text, applies in checks.items() if applies]
    if placement.accelerator == "cuda" and placement.cpu_memory_limit_bytes is not None:
        caveats.append("--cpu-memory-limit does not count page-locked memory, which offloading uses on GPUs")
    return caveats


def _block(config: Config, name: str) -> Config:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
