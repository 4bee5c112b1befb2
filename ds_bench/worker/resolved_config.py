"""The configuration that really ran: as the engine resolved it, defaults included."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from typing import Any

from ..system.redaction import redacted_config
from .reference_engines import ReferenceEngine

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def resolved_config(engine: Any) -> dict[str, Any]:
    """Every public value of DeepSpeed's ``engine._config`` (runtime/config.py), or of a reference engine's settings.

    Plain JSON values, credentials redacted.
    """
    settings = engine.settings if isinstance(engine, ReferenceEngine) else vars(engine._config)
    values = {name: value for name, value in settings.items() if not name.startswith("_")}
    return redacted_config({name: to_json_value(value) for name, value in sorted(values.items())})


def to_json_value(value: Any, depth: int = 8) -> Any:
    """A value for a JSON file: models, mappings and objects by field, anything else without a JSON form as its text.

    Addresses in memory, which differ from run to run, are left out. ``depth``: limit for objects within objects.
    """
    if value is None or isinstance(value, (bool, int, str)):
        # Members of an enum may be texts or whole numbers as well.
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "model_dump"):
        return to_json_value(value.model_dump(), depth)
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [to_json_value(item, depth) for item in value]
    text = str(value)
    if _ADDRESS.search(text) is None:
        return text
    fields = {str(key): item for key, item in getattr(value, "__dict__", {}).items()} if depth else {}
    return {key: to_json_value(item, depth - 1) for key, item in fields.items()} or _ADDRESS.sub("", text)
