"""The keys that DeepSpeed reads, with types and defaults: ``deepspeed_keys.json``.

``scripts/make_deepspeed_keys.py`` writes that file from the installed DeepSpeed. DeepSpeed refuses any other key in a
block that goes to a pydantic model, and ignores it elsewhere.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def tables() -> Mapping[str, Any]:
    """Return the whole file. Do not modify it."""
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    contents: dict[str, Any] = json.loads(text)
    return contents


def blocks() -> Mapping[str, Mapping[str, Any]]:
    """Return path of a block (empty: the top level) → ``unknown`` (ignored or refused), ``keys``, ``source``."""
    known: Mapping[str, Mapping[str, Any]] = tables()["blocks"]
    return known


def keys_of(block_path: str) -> Mapping[str, Mapping[str, Any]]:
    """Return key → its ``default``, and if known ``schema`` (of pydantic-core), ``accepts`` (JSON types),
    ``same_as`` (the field it is an alias of), ``deprecated``.
    """
    keys: Mapping[str, Mapping[str, Any]] = blocks()[block_path]["keys"]
    return keys


@cache
def top_level_keys() -> frozenset[str]:
    """Return the top-level keys that DeepSpeed reads; it ignores others."""
    return frozenset(keys_of(""))


def refuses_unknown(block_path: str) -> bool:
    """Return whether DeepSpeed refuses other keys in a block, as its pydantic models do."""
    return block_path in blocks() and blocks()[block_path]["unknown"] == "refused"


def removed_keys() -> frozenset[str]:
    """Return the paths that DeepSpeed refuses because their feature was removed."""
    return frozenset(tables()["removed"])


def nearest_key(key: str, known: Collection[str], least_similarity: float = 0.6) -> str | None:
    """Return the key that ``key`` probably misspells; None if nothing is close. Similarity goes from 0 to 1."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=least_similarity)
    return near[0] if near else None


_STAGE_3_KEYS = {
    *("sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights"),
    *("zero_quantized_gradients", "leaf_module", "memory_efficient_linear", "override_module_apply", "offload_param"),
    *("pipeline_loading_checkpoint", "log_trace_cache_warnings", "enable_sanity_checks"),
    *("save_muon_momentum_buffer_in_memory", "stage3_gather_fp16_weights_on_model_save"),
}
"""Keys that DeepSpeed passes only to stage 3, besides those with stage3 in their name (``runtime/engine.py``)."""
_STAGE_1_AND_2_KEYS = {
    *("allgather_bucket_size", "round_robin_gradients", "use_multi_rank_bucket_allreduce"),
    *("ignore_unused_parameters", "parameter_alignment"),
}
"""Keys that DeepSpeed passes only to stages 1 and 2."""


@cache
def is_read_at_stage(key: str, stage: int) -> bool:
    """Return whether DeepSpeed acts on a key of ``zero_optimization`` at a ZeRO stage."""
    known = keys_of("zero_optimization")
    # Fields that have an alias: the alias begins with stage3.
    named_after_stage_3 = "same_as" in known.get(key, {}) or key in {each.get("same_as") for each in known.values()}
    if key in _STAGE_3_KEYS or named_after_stage_3:
        return stage == 3
    return stage in (1, 2) if key in _STAGE_1_AND_2_KEYS else stage > 0
