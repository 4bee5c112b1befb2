"""The configuration as DeepSpeed resolved it: what really ran, defaults included."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from typing import Any

from ..system.redaction import redacted_config

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def resolved_config(engine: Any) -> dict[str, Any]:
    """Every public value of ``engine._config`` (runtime/config.py) as plain JSON values, credentials redacted."""
    values = {name: value for name, value in vars(engine._config).items() if not name.startswith("_")}
    return redacted_config({name: plain(value) for name, value in sorted(values.items())})


def plain(value: Any, depth: int = 8) -> Any:
    """JSON values as they are; pydantic models, mappings and plain objects by field; anything else as its text.

    Addresses in memory are left out: they are no facts of the run. ``depth``: of objects within objects.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(), depth)
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item, depth) for item in value]
    text = str(value)
    if _ADDRESS.search(text) is None:
        return text
    fields = {str(key): item for key, item in getattr(value, "__dict__", {}).items()} if depth else {}
    return {key: plain(item, depth - 1) for key, item in fields.items()} or _ADDRESS.sub("", text)
