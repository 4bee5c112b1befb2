"""The command ``model-size``: times the passes of models of five sizes.

It is a recipe like any other, made of its flags: every size and pass type is a point of a sweep, with one trial.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

SIZES = ("small", "medium", "large", "xl", "2.7B")
"""Names of the sizes; the presets are ``size-small`` to ``size-2.7b``."""
_KEYS = {
    "context_length": "training.seq_len",
    "batch_size": "training.local_batch_size",
    "measure_steps": "training.steps",
    "warmup_steps": "training.warmup_steps",
    "precision": "training.precision",
    "device": "launch.accelerator",
    "timeout": "launch.timeout",
    "output_dir": "output.dir",
    "output": "output.csv",
}
"""Flag → key of the recipe."""


def time_sizes(
    *, model_size: Sequence[str] | None, model_sizes: Sequence[str] | None, pass_type: Sequence[str], dry_run: bool,
    **flags: Any,
) -> int:  # fmt: skip
    """Runs the recipe that the flags stand for and returns the exit code."""
    names = [f"size-{size.lower()}" for size in dict.fromkeys(model_size or model_sizes or SIZES[:1])]
    passes = list(dict.fromkeys(pass_type))
    values: dict[str, Any] = {
        "model.name": names if len(names) > 1 else names[0],
        "training.pass_type": passes if len(passes) > 1 else passes[0],
        # One row on one rank at stage 0, where nothing is partitioned or sent.
        "configurations.stages": [0],
        "launch.num_gpus": 1,
        **({"training.synchronized": False} if flags["no_sync"] else {}),
        **({"launch.force": True} if flags["force"] else {}),
        **{key: flags[flag] for flag, key in _KEYS.items() if flags[flag] is not None},
    }
    settings = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]
    typed = [word for setting in settings for word in ("--set", setting)]
    from .run import run_command

    run_flags: dict[str, Any] = {"dry_run": True} if dry_run else {}
    return run_command(settings=settings, typed=typed, yes=True, **run_flags)
