"""Applies the changes of ``--ds-config`` and ``--set`` to a DeepSpeed configuration."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..system import files
from .automatic_values import paths_of_auto
from .deepspeed_config import Config
from .spec import BATCH_KEYS

_LARGEST_FILE_BYTES = 2**22


def overlay(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Config:
    """Returns a copy of ``config`` with ``changes`` merged in, block by block; a value of None removes its key."""
    merged: Config = copy.deepcopy(dict(config))
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = overlay(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> Config:
    """Joins two sets of changes block by block, the second over the first; unlike in :func:`overlay` None is kept."""
    merged: Config = dict(first)
    for key, value in second.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


_MOST_LEVELS = 20
"""Blocks within blocks of a change; DeepSpeed reads five."""


def nested(path: str, value: Any) -> Config:
    """``a.b`` and a value as ``{"a": {"b": value}}``. Raises UsageError for more levels than a configuration has."""
    if path.count(".") >= _MOST_LEVELS:
        raise UsageError(f"{path[:60]}… has more than {_MOST_LEVELS} levels", remedy="give a key of DeepSpeed")
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def parse_set(text: str) -> Config:
    """Parses ``a.b=value`` to ``{"a": {"b": value}}``; a value that is not JSON is text.

    Raises UsageError without ``=`` and for an empty name.
    """
    path, separator, raw = text.partition("=")
    if not separator or not all(path.split(".")):
        raise UsageError(
            f"--set {text!r} is not key.path=value", remedy="e.g. --set zero_optimization.overlap_comm=false"
        )
    try:
        value: Any = json.loads(raw)
    except json.JSONDecodeError:
        value = raw
    except (RecursionError, ValueError):  # Python reads no integer of more than 4,300 digits
        problem = f"--set {path[:60]} has a number of too many digits, or too many levels"
        raise UsageError(problem, remedy="give a value of DeepSpeed") from None
    return nested(path, value)


def apply_changes(config: Mapping[str, Any], *layers: Mapping[str, Any]) -> Config:
    """Returns ``config`` with changes, one layer after the other.

    If they change the batch and not its total, the total is dropped, and ``complete_config`` computes it anew.
    """
    total, *parts = BATCH_KEYS
    changed = {key for layer in layers for key in layer}
    result = dict(config)
    if changed.intersection(parts) and total not in changed:
        result.pop(total, None)
    for layer in layers:
        result = overlay(result, layer)
    return result


def json_values(config: Mapping[str, Any]) -> Config:
    """Converts a configuration to JSON's types. Raises UsageError for any other value (NaN, a torch.dtype)."""
    try:
        return dict(json.loads(json.dumps(config, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the DeepSpeed config cannot be written as JSON: {error}",
            remedy="keep to text, finite numbers, true, false, lists and objects",
        ) from None


def read_file(path: Path | None) -> Config:
    """Reads the changes of ``--ds-config``; empty without the flag. Raises UsageError."""
    if path is None:
        return {}
    try:
        data = json.loads(files.read_text(path, _LARGEST_FILE_BYTES))
    except OSError as error:
        raise UsageError(f"--ds-config {path}: {error.strerror}", remedy="give a readable JSON file") from None
    except ValueError as error:
        raise UsageError(
            f"--ds-config {path} is not JSON: {error}", remedy="remove comments and trailing commas"
        ) from None
    except RecursionError:
        raise UsageError(f"--ds-config {path} is nested too deeply", remedy="give a DeepSpeed configuration") from None
    if not isinstance(data, dict):
        raise UsageError(f"--ds-config {path} is not a JSON object", remedy="write {…}")
    place = next(paths_of_auto(data), None)
    if place is not None:
        raise UsageError(
            f'--ds-config {path}: {place} is "auto"', remedy="only the Trainer fills that in; give a value"
        )
    return data
