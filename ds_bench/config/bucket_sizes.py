"""Sizes of DeepSpeed's buffers that follow from the hidden size of a model."""

from __future__ import annotations

from collections.abc import Mapping

_FIXED_ON_NVME = ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance")
"""0 where parameters lie on NVMe: with any other value DeepSpeed stops there (``deepspeed_config.zero_block``)."""

DEFAULT_SIZES = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""DeepSpeed's own, by key of ``zero_optimization``."""


def sizes_for(sizes: Mapping[str, int], stage: int, offload_param: str | None) -> dict[str, int]:
    """Returns the sizes that act at a stage, without those that must stay 0 where parameters lie on NVMe."""
    fixed = _FIXED_ON_NVME if offload_param == "nvme" else ()
    return {
        key: size for key, size in sizes.items() if (stage == 3 or not key.startswith("stage3_")) and key not in fixed
    }


def trainer_sizes(hidden_size: int) -> dict[str, int]:
    """Returns the sizes that the Transformers Trainer puts in place of ``"auto"``, by key of ``zero_optimization``.

    Source: ``transformers/integrations/deepspeed.py``, trainer_config_finalize. The second and third act at stage 3
    alone.
    """
    return {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }


def small_sizes(hidden_size: int) -> dict[str, int]:
    """Returns sizes of about one to two layers of a decoder, by key of ``zero_optimization``.

    A layer has about 12 h² parameters. Buckets are as large as one matrix (h²); at stage 3 at most two layers are
    gathered, and none is kept for a use further away than that.
    """
    matrix = hidden_size * hidden_size
    return {
        "reduce_bucket_size": matrix,
        "allgather_bucket_size": matrix,
        "stage3_prefetch_bucket_size": int(0.9 * matrix),
        "stage3_max_live_parameters": 24 * matrix,
        "stage3_max_reuse_distance": 24 * matrix,
    }
