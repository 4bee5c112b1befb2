"""Makes the rows of a user's script: the user's own DeepSpeed configuration with only the requested changes.

Nothing is filled in, and ``"auto"`` stays: that is the work of the script's libraries (Trainer, Accelerate, TRL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UsageError
from .axes import AXES
from .configuration_files import ConfigurationFile
from .deepspeed_config import apply_changes, json_values
from .spec import OFFLOAD_BLOCKS, Configuration, Strategy

_FIELDS_IN_FILE = {"batch_size", "grad_accum", "precision"}
"""Workload fields that a DeepSpeed configuration also sets."""


def make_script_row(
    origin: Strategy | ConfigurationFile, base: ConfigurationFile | None, changes: Sequence[Mapping[str, Any]]
) -> Configuration:
    """Make the configuration of a row. ``base``: the file that strategies edit. ``changes``: from ``--set``.

    Raises UsageError if the file's ``zero_optimization`` is not a block, or if ``--set`` contradicts the row's stage.
    """
    file = origin if isinstance(origin, ConfigurationFile) else base
    assert file is not None, "Options refuse strategies without a file"
    config = apply_changes(file.config, *changes)
    if not isinstance(zero := config.get("zero_optimization", {}), dict):
        problem = f"zero_optimization of {file.path} is {zero!r}, not a block"
        raise UsageError(problem, remedy='write {"stage": N}')
    if isinstance(origin, Strategy):
        # The stage and offload devices of the strategy; what else the file sets in the block stays.
        zero = {**zero, "stage": origin.stage}
        for name, device in zip(OFFLOAD_BLOCKS, (origin.offload_optimizer, origin.offload_param), strict=True):
            own = zero.pop(name, None)
            if device != "none":
                zero[name] = {**(own if isinstance(own, dict) else {}), "device": device}
        config["zero_optimization"] = zero
        config = apply_changes(config, *changes)
        if (stage := config["zero_optimization"]["stage"]) != origin.stage:
            problem = f"--set gives zero_optimization.stage {stage!r} to the row {origin.label}"
            raise UsageError(problem, remedy="choose stages with --stages")
    return Configuration(
        name=origin.name,
        label=origin.name if isinstance(origin, ConfigurationFile) else origin.label,
        deepspeed_config=json_values(config),
        source="file",
        file_text=file.text,
    )


def require_config_axes(names: Sequence[str]) -> None:
    """Raise UsageError for an axis that changes the built-in training loop, which a script does not use."""
    for name in names:
        if not set(AXES[name].fields) <= _FIELDS_IN_FILE:
            problem = f"--axis {name} changes the built-in training, not a DeepSpeed configuration"
            raise UsageError(problem, remedy="leave it out, or compare the script's own arguments in two runs")
