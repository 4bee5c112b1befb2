"""Changes laid over a DeepSpeed configuration: those of ``--ds-config`` and ``--set``."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from .deepspeed_config import Config


def overlay(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Config:
    """``changes`` laid over ``config``, block by block; a value of None removes the key, at any depth."""
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


def parse_set(text: str) -> Config:
    """``a.b=value`` to ``{"a": {"b": value}}``; the value is JSON, or text where it is not.

    Raises UsageError where there is no ``=`` or an empty name.
    """
    path, separator, raw = text.partition("=")
    names = path.split(".")
    if not separator or not all(names):
        raise UsageError(
            f"--set {text!r} is not key.path=value", remedy="e.g. --set zero_optimization.overlap_comm=false"
        )
    try:
        value: Any = json.loads(raw)
    except json.JSONDecodeError:
        value = raw
    for name in reversed(names):
        value = {name: value}
    return dict(value)
