"""Resolves ``"auto"`` in a DeepSpeed configuration as the Transformers Trainer does.

DeepSpeed does not know ``"auto"``: the Trainer first replaces it with values from its TrainingArguments and the model.
Micro-batch, accumulation and precision come from the workload, the other arguments from the user's file or, failing
that, from TrainingArguments' defaults.

Sources: Transformers 5.23, ``integrations/deepspeed.py`` (``HfTrainerDeepSpeedConfig``) and ``training_args.py``;
Accelerate 1.15, ``utils/dataclasses.py`` (``DeepSpeedPlugin.set_mixed_precision``); DeepSpeed 0.19.8,
``runtime/config_utils.py``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from ..errors import UsageError
from .deepspeed_config import AUTO, Config, paths_of_auto, sizes_for
from .deepspeed_keys import refuses_unknown
from .spec import Precision, block_of

TRAINING_DEFAULTS: Mapping[str, float] = {
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
}
"""Defaults of TrainingArguments that replace "auto"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """The values that "auto" is resolved from."""

    batch_size: int = 1
    """Micro-batch: sequences per GPU in one forward pass."""
    grad_accum: int = 1
    num_gpus: int
    precision: Precision
    hidden_size: int | None
    """``hidden_size`` of the model's config; None if it has none."""
    training_steps: int = 1
    """Optimizer steps of the whole training run, which the scheduler spans."""
    arguments: Mapping[str, float] = field(default_factory=dict)
    """TrainingArguments in the user's file, which override :data:`TRAINING_DEFAULTS`."""


def resolve(config: Mapping[str, Any], facts: TrainingFacts) -> tuple[Config, dict[str, Any]]:
    """Replace every "auto" in a configuration. Raises UsageError for one that nothing replaces.

    Return the configuration, and path → value of each replaced key; the value is None where
    DeepSpeed uses its default.
    """
    resolved, values = fill_in(config, facts)
    for path in list(paths_of_auto(resolved)):
        parent, _, key = path.rpartition(".")
        # In blocks that it checks with pydantic, DeepSpeed drops "auto" and uses its default
        # (runtime/config_utils.py); elsewhere it would use the string itself.
        if not refuses_unknown(parent):
            problem = f'{path} is "auto", which neither the Trainer nor DeepSpeed fills in'
            raise UsageError(problem, remedy="give a value")
        reduce(block_of, parent.split("."), resolved).pop(key, None)
        values[path] = None
    # Like Accelerate, enable the precision if only the block of the other 16-bit format has "auto":
    # {"fp16": {"enabled": "auto"}} alone would train in fp32 if bf16 is requested.
    automatic = any(block_of(config, name).get("enabled") == AUTO for name in ("bf16", "fp16"))
    if automatic and facts.precision != "fp32":
        resolved.setdefault(facts.precision, {"enabled": True})
    return resolved, values


def fill_in(config: Mapping[str, Any], facts: TrainingFacts) -> tuple[Config, dict[str, Any]]:
    """Replace each "auto" that the Trainer replaces, and leave the others unchanged.

    Return the configuration, and path → value of each replaced key, in the order of the Trainer's code. Raises
    UsageError if the Trainer needs the hidden size of a model that has none.
    """
    zero, sizes = block_of(config, "zero_optimization"), trainer_sizes(facts.hidden_size or 0)
    found = [key for key in sizes if zero.get(key) == AUTO]
    if found and facts.hidden_size is None:
        problem = f'zero_optimization.{found[0]} is "auto", which the Trainer computes from the model\'s hidden_size'
        remedy = f'give whole numbers instead of "auto" for {", ".join(found)}'
        raise UsageError(f"{problem}, and this model has none", remedy=remedy)
    arguments = {**TRAINING_DEFAULTS, **facts.arguments}
    rate, warmup = arguments["learning_rate"], arguments["warmup_steps"]
    steps = int(arguments.get("max_steps", 0)) or facts.training_steps
    trainer = {
        "train_micro_batch_size_per_gpu": facts.batch_size,
        "gradient_accumulation_steps": facts.grad_accum,
        "train_batch_size": facts.num_gpus * facts.batch_size * facts.grad_accum,
        "gradient_clipping": arguments["max_grad_norm"],
        "optimizer.params.lr": rate,
        "optimizer.params.betas": [arguments["adam_beta1"], arguments["adam_beta2"]],
        "optimizer.params.eps": arguments["adam_epsilon"],
        "optimizer.params.weight_decay": arguments["weight_decay"],
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": rate,
        "fp16.enabled": facts.precision == "fp16",
        "bf16.enabled": facts.precision == "bf16",
        # The Trainer fills in the stage 3 sizes only at stage 3, whether or not the parameters are offloaded.
        **{f"zero_optimization.{key}": size for key, size in sizes_for(sizes, zero.get("stage", 0), None).items()},
        "scheduler.params.total_num_steps": steps,
        # At least 1, as DeepSpeed's warm-up schedulers reject 0 (runtime/lr_schedules.py).
        # A value below 1 is a fraction of the steps (TrainingArguments.get_warmup_steps).
        "scheduler.params.warmup_num_steps": max(1, int(warmup) if warmup >= 1 else math.ceil(steps * warmup)),
    }
    filled, values = copy.deepcopy(dict(config)), {}
    for path, value in trainer.items():
        *parents, key = path.split(".")
        block = reduce(block_of, parents, filled)
        if block.get(key) == AUTO:
            block[key] = values[path] = value
    return filled, values


def trainer_sizes(hidden_size: int) -> dict[str, int]:
    """Return the sizes that the Trainer substitutes for ``"auto"``, by key of ``zero_optimization``.

    Source: ``transformers/integrations/deepspeed.py``, trainer_config_finalize.
    """
    return {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
