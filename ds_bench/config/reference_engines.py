"""torch's own engines as rows beside DeepSpeed's: which strategies they are, and which settings they do not have.

A reference row has a DeepSpeed configuration too, of the ZeRO stage that splits alike. The engine reads batch,
optimizer, clipping and number format of it, so that these are given and compared as for every row.
"""

from __future__ import annotations

from .spec import Configuration, Strategy, block_of, offload_device

REFERENCES: dict[str, Strategy] = {
    "ddp": Strategy(name="ddp", label="DDP (torch)", stage=0, engine="ddp"),
    "fsdp2": Strategy(name="fsdp2", label="FSDP2 (torch)", stage=3, engine="fsdp2"),
}
"""The strategies that are trained by torch's DistributedDataParallel and ``fully_shard``, by name."""

_READ = frozenset(
    {
        "bf16",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
    }
)
"""Keys that mean the same to a reference engine."""
_ABOUT_DEEPSPEED = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "checkpoint",
        "dump_state",
        "log_level",
        "memory_breakdown",
        "steps_per_print",
        "timers",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    }
)
"""Keys that say nothing about what is trained: a reference engine may leave them out."""
_OPTIMIZERS = ("adam", "adamw", "sgd")
"""Optimizers that torch and DeepSpeed both have."""
_BF16_KEYS = frozenset({"enabled", "check_grad_overflow", "immediate_grad_update"})


def refused_setting(configuration: Configuration) -> str | None:
    """Returns why a reference engine would not train as the configuration says; None if it would."""
    config, label = configuration.deepspeed_config, configuration.label
    optimizer = str(block_of(config, "optimizer").get("type", ""))
    without = f"remove it, or leave --strategies {configuration.name} out"
    if offload_device(config, "offload_optimizer") or offload_device(config, "offload_param"):
        return f"{label} does not offload here; {without}"
    if block_of(config, "fp16").get("enabled"):
        return f"{label} in fp16 would need a loss scaler other than DeepSpeed's; use --precision bf16 or fp32"
    if optimizer.lower() not in _OPTIMIZERS:
        return f"{label} has no {optimizer or 'optimizer'} that is DeepSpeed's too; use AdamW, Adam or SGD"
    # Only known keys pass: a setting of a later DeepSpeed may change what is trained.
    others = sorted(config.keys() - _READ - _ABOUT_DEEPSPEED)
    others += [f"bf16.{key}" for key in sorted(block_of(config, "bf16").keys() - _BF16_KEYS)]
    if others:
        return f"{label} does not have {', '.join(others)} of the DeepSpeed config; {without}"
    return None


def ignored_settings(configuration: Configuration) -> list[str]:
    """Returns a caveat that names ZeRO's settings, which a reference engine does not have; empty if there are none."""
    keys = sorted(block_of(configuration.deepspeed_config, "zero_optimization").keys() - {"stage"})
    if not keys:
        return []
    names = ", ".join(f"zero_optimization.{key}" for key in keys)
    return [f"{configuration.label} does not read {names}: torch has no such setting"]
