"""Decides whether a trial fits a GPU, by the least memory that it runs in and the memory that it would reserve.

A GPU runs out of *reserved* memory: allocated memory plus freed memory that the caching allocator keeps. Under pressure
the allocator releases its cache, so a trial runs in less memory than it reserves on a GPU with room to spare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..units import from_gb

DecidingPhase = Literal["initialize", "forward", "backward", "step"]
FITS, TIGHT, DOES_NOT_FIT, UNKNOWN = "fits", "tight", "does not fit", "not known"

_ALLOCATED_SHARE, _CACHE_BYTES = 1.05, from_gb(6.5)
"""The rule's estimate of reserved memory: 5 % and 6.5 GB above allocated memory. With it, no published configuration
that ran out of memory is predicted to fit (``bench/published_memory.py``)."""
VARYING_PERCENT = 100
"""The rule's upper bound on what varying lengths add: replays of six strategies of Llama-2-7B with 512, 4,096 and
16,384 tokens, with and without checkpointing, reserve up to 91 % more if the length grows in steps of one eighth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeed:
    """The memory that a trial needs on one GPU. Both figures include memory outside torch's allocator."""

    least_bytes: int
    """Memory of the smallest GPU that runs it, releasing its cache and retrying allocations if needed."""
    reserved_bytes: int
    """Memory taken on a GPU with room to spare, as nvidia-smi shows it."""
    phase: DecidingPhase
    """The part of training that needs the most; ``initialize`` includes building the model."""
    method: Literal["rule", "replay"] = "rule"
    """``rule``: allocated memory plus an estimate of the cache. ``replay``: every allocation was replayed."""
    unknowns: tuple[str, ...] = ()
    """Parts of the configuration that the formulas do not cover; such a trial is not replayed."""
    is_lower_bound: bool = False
    """Whether an unknown part takes memory that neither figure includes."""
    not_replayed: str | None = None
    """Why a row that the rule left open was not replayed; None if it was replayed or needed no replay."""

    @classmethod
    def by_rule(
        cls,
        allocated_bytes: int,
        outside_bytes: int,
        phase: DecidingPhase,
        *,
        kept_bytes: int = 0,
    ) -> GpuNeed:
        """Estimate the need from the peak of allocated memory.

        ``outside_bytes``: memory outside the allocator. ``kept_bytes``: further memory that a training loop may hold.
        """
        reserved = round(_ALLOCATED_SHARE * (allocated_bytes + kept_bytes)) + _CACHE_BYTES
        return cls(
            least_bytes=allocated_bytes + outside_bytes,
            reserved_bytes=reserved + outside_bytes,
            phase=phase,
        )

    @property
    def known_reserved_bytes(self) -> int | None:
        """``reserved_bytes``; None if a part is not counted."""
        return None if self.is_lower_bound else self.reserved_bytes

    def verdict(self, capacity_bytes: int) -> str:
        """Return ``fits``, ``tight`` (allocations may be retried, which is slower, or fail) or ``does not fit``."""
        if self.least_bytes > capacity_bytes:
            return DOES_NOT_FIT
        return TIGHT if self.reserved_bytes > capacity_bytes else FITS
