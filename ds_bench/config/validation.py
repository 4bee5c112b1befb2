"""What a user may put into a DeepSpeed configuration and would not get: refused, or said beside the row.

DeepSpeed takes each of these without a word. Sources are files of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .spec import Placement, Workload

Config = Mapping[str, Any]


def refusal(config: Config) -> str | None:
    """Why the harness of this program would not do what a block asks for; None where it would."""
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


def inactive(config: Config, workload: Workload, placement: Placement) -> list[str]:
    """Caveats for what is asked for and changes nothing, or slows what is measured."""
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
    found = [text for text, applies in checks.items() if applies]
    if placement.accelerator == "cuda" and placement.cpu_memory_limit_bytes is not None:
        found.append("--cpu-memory-limit does not count page-locked memory, which offloading uses on GPUs")
    return found


def _block(config: Config, name: str) -> Config:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
