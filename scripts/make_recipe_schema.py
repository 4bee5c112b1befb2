#!/usr/bin/env python3
"""Writes docs/recipe.schema.json, for editors that complete and check recipes, from the models of config/recipe.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ds_bench.config.recipe import recipe_schema  # noqa: E402


def schema_text() -> str:
    """The whole file as text."""
    return json.dumps(recipe_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "recipe.schema.json").write_text(schema_text(), encoding="utf-8")
