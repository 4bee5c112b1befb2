"""The command ``model-size``: times the passes of models of five sizes.

It is a recipe like any other, made of its flags: every size and pass type is a point of a sweep, with one trial.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
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


def time_sizes(values: argparse.Namespace) -> int:
    """Runs the recipe that the flags stand for and returns the exit code."""
    settings = [f"{path}={json.dumps(value)}" for path, value in _settings(values)]
    typed = [word for setting in settings for word in ("--set", setting)]
    # Only if it is typed, since run_command asks whether the attribute exists.
    recipe_flags = {"dry_run": True} if values.dry_run else {}
    from .run import run_command

    # What run_command reads of every command line; flags of run that are absent here count as not typed.
    return run_command(
        argparse.Namespace(recipe=None, set=settings, budget=None, yes=True, typed=typed, **recipe_flags)
    )


def _settings(values: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Key paths of the recipe with their values."""
    sizes = values.model_size or values.model_sizes or SIZES[:1]
    names = [f"size-{size.lower()}" for size in dict.fromkeys(sizes)]
    passes = list(dict.fromkeys(values.pass_type))
    yield "model.name", names if len(names) > 1 else names[0]
    yield "training.pass_type", passes if len(passes) > 1 else passes[0]
    # One row on one rank at stage 0, where nothing is partitioned or sent.
    yield "configurations.stages", [0]
    yield "launch.num_gpus", 1
    if values.no_sync:
        yield "training.synchronized", False
    if values.force:
        yield "launch.force", True
    for flag, path in _KEYS.items():
        value = getattr(values, flag)
        if value is not None:
            yield path, str(value) if flag in ("output", "output_dir") else value
