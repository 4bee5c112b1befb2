"""The cells of a flat row: each of its column's type, and the one that joins all caveats taken apart again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..records.shapes import LARGEST
from .flat_rows import COLUMNS

_TEXTS = frozenset((
    "strategy", "model", "status", "error", "error_details", "caveats", "trial_id", "accelerator", "device",
    "precision", "batch_policy", "optimizer", "launch", "flops_convention", "started_at", "run_id", "config_hash",
    "gpu_name", "cpu_model", "torch_version", "deepspeed_version", "transformers_version", "cuda_version",
    "gpu_driver_version",
))  # fmt: skip
_FLAGS = frozenset(("success", "activation_checkpointing"))
_COUNTS = frozenset((
    "stage", "batch_size", "seq_length", "grad_accum", "num_steps", "warmup_steps", "repeat", "num_gpus",
    "data_parallel_size", "parameter_count", "model_flops_per_token", "causal_flops_per_token",
    "hardware_flops_per_token", "gpu_alloc_retries", "skipped_steps", "method_version", "num_nodes", "gpu_count",
    "cpu_threads", "cpu_logical_cores", "cpu_physical_cores",
    "round_position",
))  # fmt: skip
_NEEDED = (
    "stage", "strategy", "model", "batch_size", "seq_length", "grad_accum", "num_steps", "warmup_steps", "success",
    "status", "repeat", "num_gpus", "accelerator", "precision", "activation_checkpointing", "method_version",
)  # fmt: skip
_KNOWN = frozenset(name for name, _ in COLUMNS)
_SIGNED = frozenset(("first_loss", "final_loss", "repeated_loss", "weight_change_cosine"))


def check(row: Any) -> dict[str, Any]:
    """The known columns of a row. Raises ValueError naming the column that is missing or of a wrong type."""
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, not an object")
    for name in _NEEDED:
        if row.get(name) is None:
            raise ValueError(f"has no {name}")
    return {name: _checked(name, value) for name, value in row.items() if name in _KNOWN}


def unknown_columns(row: Mapping[str, Any]) -> list[str]:
    """Names that no column of ours has."""
    return [name for name in row if name not in _KNOWN]


def _checked(name: str, value: Any) -> Any:
    """A value of its column's type; JSON's true is no number."""
    if value is None:
        return None
    kinds, wanted = _kind_of(name)
    if type(value) not in kinds:
        raise ValueError(f"has a {name} that is not {wanted}")
    if type(value) in (int, float) and not -LARGEST <= value <= LARGEST:
        raise ValueError(f"has a {name} beyond all measure")
    if type(value) in (int, float) and value < 0 and name not in _SIGNED:
        raise ValueError(f"has a negative {name}")
    return value


def _kind_of(name: str) -> tuple[tuple[type, ...], str]:
    if name in _TEXTS:
        return (str,), "text"
    if name in _FLAGS:
        return (bool,), "true or false"
    return ((int,), "a whole number") if name in _COUNTS else ((int, float), "a number")
