"""The keys of a DeepSpeed configuration: others at the top level it ignores without a word, below it refuses some.

Source: DeepSpeed 0.19.8, ``runtime/config.py``, ``runtime/constants.py``; for nested keys its pydantic models
(``deepspeed_keys.json``).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UsageError

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
"""Keys of ours and of DeepSpeed's whose value is an object."""


@cache
def _nested_keys() -> dict[str, frozenset[str]]:
    """Path of a block → its keys, of the blocks in which DeepSpeed refuses others (its pydantic models)."""
    text = Path(__file__).with_name("deepspeed_keys.json").read_text(encoding="utf-8")
    return {path: frozenset(keys) for path, keys in json.loads(text).items()}


def check_keys(config: Mapping[str, Any]) -> None:
    """Refuses top-level keys that DeepSpeed would accept and ignore, nested ones that it would refuse, and blocks that
    are none. Raises UsageError.
    """
    for key in config:
        if key not in KNOWN_TOP_LEVEL_KEYS:
            near = difflib.get_close_matches(key, KNOWN_TOP_LEVEL_KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "DeepSpeed would ignore it silently; remove it"
            raise UsageError(f"unknown top-level key {key!r} in the DeepSpeed config", remedy=hint)
    for path, known in _nested_keys().items():
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
