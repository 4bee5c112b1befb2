"""The configuration as DeepSpeed resolved it: what really ran, defaults included."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any


def resolved_config(engine: Any) -> dict[str, Any]:
    """Every public value of ``engine._config`` (runtime/config.py) as plain JSON values."""
    values = {name: value for name, value in vars(engine._config).items() if not name.startswith("_")}
    return {name: plain(value) for name, value in sorted(values.items())}


def plain(value: Any) -> Any:
    """JSON values as they are, pydantic models and mappings by field, anything else as its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "model_dump"):
        return plain(value.model_dump())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    return str(value)
