"""The keys that DeepSpeed reads, with types and defaults, for each minor version that this package supports.

``scripts/make_deepspeed_keys.py`` writes the tables from installed DeepSpeed versions. DeepSpeed rejects any other key
in a block that it passes to a pydantic model, and ignores it elsewhere. All functions describe :func:`version`: the
installed DeepSpeed, or the one set by :func:`use_version`.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).with_name("deepspeed_keys_by_version")
MINOR_VERSIONS = ("0.16", "0.17", "0.18", "0.19")
"""Oldest first."""
_FIRST_VERSIONS = {
    "torch_autocast": "0.17.2",
    "zero_optimization.zenflow": "0.17.5",
    "bf16.bf16_master_weights_and_grads": "0.18.3",
    "bf16.bf16_optimizer_states": "0.18.3",
    "zero_optimization.stage3_allgather_sequential": "0.18.5",
}
"""Keys that our rows set and that a later release of a minor version added (seen in the code of each release)."""
REMOVED_IN = "0.19.7"
"""The release that removed features, among them MiCS and the 1-bit optimizers (seen in the code of each release)."""
_chosen: ContextVar[str | None] = ContextVar("deepspeed_version", default=None)


@contextlib.contextmanager
def use_version(version: str | None) -> Iterator[None]:
    """Make this module and the rules describe a version; None for the installed one.

    One of :data:`MINOR_VERSIONS` means the release that its table was made from.
    """
    token = _chosen.set(_table(version)["version"] if version in MINOR_VERSIONS else version)
    try:
        yield
    finally:
        _chosen.reset(token)


def version() -> str:
    """Return the DeepSpeed version that is described, such as ``0.18.9``; the newest if none is installed."""
    return _chosen.get() or _installed() or str(_table(MINOR_VERSIONS[-1])["version"])


def is_before(other: str) -> bool:
    """Return whether :func:`version` is older than ``other``, such as ``0.19`` or ``0.19.3``."""
    return _numbers(version()) < _numbers(other)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


@cache
def _installed() -> str | None:
    from ..system.environment import installed_version

    return installed_version("deepspeed")


@cache
def _table(minor_version: str) -> Mapping[str, Any]:
    contents: dict[str, Any] = json.loads((_FOLDER / f"{minor_version}.json").read_text(encoding="utf-8"))
    return contents


def tables() -> Mapping[str, Any]:
    """Return the whole table of :func:`version`, or of the nearest version that has one. Do not modify it."""
    return _table(_minor_version_for(version()))


@cache
def _minor_version_for(version: str) -> str:
    """The newest of MINOR_VERSIONS that is not newer than ``version``; the oldest if all are newer."""
    known = [each for each in MINOR_VERSIONS if _numbers(each) <= _numbers(version)]
    return known[-1] if known else MINOR_VERSIONS[0]


def keys_added_later() -> Mapping[str, str]:
    """Return path → the version that added it, for keys that a newer version reads and :func:`version` does not."""
    return _keys_added_after(version())


@cache
def _keys_added_after(version: str) -> Mapping[str, str]:
    def paths(minor_version: str) -> set[str]:
        blocks = _table(minor_version)["blocks"].items()
        return {f"{block}.{key}".lstrip(".") for block, each in blocks for key in each["keys"]}

    minor_version = _minor_version_for(version)
    later = MINOR_VERSIONS[MINOR_VERSIONS.index(minor_version) + 1 :]
    known = paths(minor_version)
    added = {path: minor for minor in reversed(later) for path in paths(minor) - known}
    return added | {path: first for path, first in _FIRST_VERSIONS.items() if _numbers(version) < _numbers(first)}


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


def top_level_keys() -> frozenset[str]:
    """Return the top-level keys that DeepSpeed reads; it ignores others."""
    return frozenset(keys_of("")) - keys_added_later().keys()


def refuses_unknown(block_path: str) -> bool:
    """Return whether DeepSpeed rejects unknown keys in a block, as its pydantic models do."""
    return block_path in blocks() and blocks()[block_path]["unknown"] == "refused"


def removed_keys() -> frozenset[str]:
    """Return the paths whose feature was removed in DeepSpeed :data:`REMOVED_IN`, which rejects them."""
    return frozenset(tables()["removed"])


def nearest_key(key: str, known: Collection[str], min_similarity: float = 0.6) -> str | None:
    """Return the key that ``key`` probably misspells; None if nothing is close. Similarity ranges from 0 to 1."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=min_similarity)
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


def is_read_at_stage(key: str, stage: int) -> bool:
    """Return whether DeepSpeed acts on a key of ``zero_optimization`` at a ZeRO stage."""
    known = keys_of("zero_optimization")
    # Fields that have an alias: the alias begins with stage3.
    named_after_stage_3 = "same_as" in known.get(key, {}) or key in {each.get("same_as") for each in known.values()}
    if key in _STAGE_3_KEYS or named_after_stage_3:
        return stage == 3
    return stage in (1, 2) if key in _STAGE_1_AND_2_KEYS else stage > 0
