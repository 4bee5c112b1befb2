"""Telling thousands of trials apart by what they hold, when most of what they hold is shared.

``Trial.key`` hashes everything each time; here an object that many trials share is looked at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

_dumps = json.JSONEncoder(sort_keys=True, default=str).encode


class Numbering:
    """The same number for equal values: JSON values, or dataclasses of them."""

    def __init__(self) -> None:
        self._by_text: dict[str, int] = {}
        self._by_identity: dict[int, tuple[Any, int]] = {}

    def __call__(self, value: Any) -> int:
        entry = self._by_identity.get(id(value))
        if entry is None:
            plain = value if value is None or isinstance(value, Mapping | list | str | int | float) else asdict(value)
            number = self._by_text.setdefault(_dumps(plain), len(self._by_text))
            entry = self._by_identity[id(value)] = value, number  # holding it keeps its id its own
        return entry[1]
