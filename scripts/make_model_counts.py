#!/usr/bin/env python3
"""Writes ds_bench/models/preset_counts.json: the counts of the built-in models, as Transformers builds them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ds_bench.models.presets import preset_entries  # noqa: E402
from ds_bench.worker.lookup_model import build_without_memory, count_model  # noqa: E402


def counts_text() -> str:
    """The whole file as text."""
    from transformers import AutoConfig

    counts = {
        name: count_model(build_without_memory(AutoConfig.for_model(entry["model_type"], **entry["config"])))
        for name, entry in preset_entries().items()
    }
    return json.dumps(counts, indent=1) + "\n"


if __name__ == "__main__":
    (ROOT / "ds_bench" / "models" / "preset_counts.json").write_text(counts_text(), encoding="utf-8")
