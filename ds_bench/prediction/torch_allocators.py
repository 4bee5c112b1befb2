"""torch's allocators: the caching allocator for CUDA, simulated; how pinned host memory is rounded; and their options.

The simulation finds the segments that a sequence of allocations takes. Its rules come from torch 2.13,
``c10/cuda/CUDACachingAllocator.cpp`` with its defaults: round_size, get_allocation_size, get_free_block (best fit),
should_split, free_block (merges with free neighbors), and release_cached_blocks, which gives whole free segments back
when memory runs out. A block belongs to one stream.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left, insort
from collections.abc import Mapping

_MIB = 2**20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = _MIB
"""Blocks up to this size come from segments of ``SMALL_SEGMENT_BYTES``."""
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * _MIB, 20 * _MIB
"""Segments for small blocks, and for others below ``OWN_SEGMENT_BYTES``."""
OWN_SEGMENT_BYTES, SEGMENT_UNIT_BYTES = 10 * _MIB, 2 * _MIB
"""From this size on, a block that finds no room gets a segment of its own, a multiple of the unit."""

_Pool = list[tuple[int, int, int, "Block"]]
"""Free blocks of one stream and kind, by size, then segment and offset."""


class OutOfMemoryError(Exception):
    """The capacity is too small for an allocation, even without any cached segment."""


class Block:
    """A piece of a segment, linked to its neighbors there."""

    __slots__ = ("after", "before", "is_free", "offset", "pool", "segment", "size")

    def __init__(self, segment: int, offset: int, size: int, pool: tuple[int, bool]) -> None:
        self.segment, self.offset, self.size, self.pool = segment, offset, size, pool
        self.is_free = True
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def key(self) -> tuple[int, int, int, Block]:
        return self.size, self.segment, self.offset, self

    def split(self, size: int) -> Block:
        """Cut the block to ``size`` and return the rest, which is free."""
        rest = Block(self.segment, self.offset + size, self.size - size, self.pool)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest


class CachingAllocator:
    """The allocator of one process on one GPU. All figures are in bytes."""

    def __init__(self, capacity_bytes: int | None = None, *, expandable_segments: bool = False) -> None:
        """``capacity_bytes``: total size that segments may have; None for no limit. ``expandable_segments``: as in
        PYTORCH_CUDA_ALLOC_CONF."""
        self.capacity_bytes, self.expandable_segments = capacity_bytes, expandable_segments
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        """How often cached segments were given back because memory had run out (``num_alloc_retries``)."""
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._last: dict[tuple[int, bool], Block] = {}
        """With expandable segments, the last block of each pool's address range."""
        self.pending: list[Block] = []
        """Freed blocks that another stream still uses, oldest first."""
        self._segments = 0

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """Allocate a block. Raise OutOfMemoryError if it does not fit even without cached segments."""
        size = max(MIN_BLOCK_BYTES, -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)
        is_small = size <= SMALL_BYTES
        kind = stream, is_small
        pool = self._pools.get(kind)
        if pool is None:
            pool = self._pools[kind] = []
        index = bisect_left(pool, (size,))
        block = pool.pop(index)[3] if index < len(pool) else self._extend(size, kind)
        # A large block is split only if the rest would not be a small one; in an expandable segment, always.
        if (
            block.size - size >= MIN_BLOCK_BYTES
            if is_small or self.expandable_segments
            else (block.size - size > SMALL_BYTES)
        ):
            rest = block.split(size)
            if self._last.get(kind) is block:
                self._last[kind] = rest
            insort(pool, rest.key)
        block.is_free = False
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block, *, is_pending: bool = False) -> None:
        """Free a block. ``is_pending``: another stream still uses it (``record_stream``), so that it cannot be
        reused before ``finish_pending``, although it no longer counts as allocated."""
        self.allocated_bytes -= block.size
        if is_pending:
            self.pending.append(block)
        else:
            self._add_free(block)

    def finish_pending(self, count: int | None = None) -> None:
        """Let the oldest ``count`` blocks that wait for another stream be reused; None for all."""
        done = self.pending[:count]
        del self.pending[:count]
        for block in done:
            self._add_free(block)

    def empty_cache(self) -> None:
        """Give back every segment without a block in use; in expandable segments, every such page (``empty_cache``)."""
        self.finish_pending()
        for kind, pool in self._pools.items():
            kept: _Pool = []
            for entry in pool:
                block = entry[3]
                if self.expandable_segments:
                    kept += self._unmap(block, kind)
                elif block.before is None and block.after is None:
                    self.reserved_bytes -= block.size
                else:
                    kept.append(entry)
            pool[:] = sorted(kept, key=lambda entry: entry[:3])

    def _add_free(self, block: Block) -> None:
        block.is_free = True
        pool = self._pools[block.pool]
        for neighbor in (block.before, block.after):
            if neighbor is None or not neighbor.is_free:
                continue
            del pool[bisect_left(pool, (neighbor.size, neighbor.segment, neighbor.offset))]
            first, second = (neighbor, block) if neighbor is block.before else (block, neighbor)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            if self._last.get(block.pool) is second:
                self._last[block.pool] = first
            block = first
        insort(pool, block.key)

    def _extend(self, size: int, kind: tuple[int, bool]) -> Block:
        """Return a free block of at least ``size`` in new memory; it is in no pool yet."""
        if self.expandable_segments:
            return self._map(size, kind)
        segment = SMALL_SEGMENT_BYTES if kind[1] else LARGE_SEGMENT_BYTES
        if size >= OWN_SEGMENT_BYTES:
            segment = -(-size // SEGMENT_UNIT_BYTES) * SEGMENT_UNIT_BYTES
        self._reserve(segment)
        self._segments += 1
        return Block(self._segments, 0, segment, kind)

    def _reserve(self, size: int) -> None:
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            self.retries += 1
            self.empty_cache()
            if self.reserved_bytes + size > self.capacity_bytes:
                raise OutOfMemoryError(
                    f"{size} bytes more than the {self.reserved_bytes} reserved ({self.allocated_bytes} allocated)"
                )
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    # Expandable segments: a pool's address range grows at its end, by pages. Pages that were given back leave a gap,
    # which is never mapped again, as addresses cost nothing.

    def _map(self, size: int, kind: tuple[int, bool]) -> Block:
        page = SMALL_SEGMENT_BYTES if kind[1] else LARGE_SEGMENT_BYTES
        last = self._last.get(kind)
        there = last.size if last is not None and last.is_free else 0
        grown = -(-(size - there) // page) * page
        self._reserve(grown)
        last = self._last.get(kind)  # giving pages back may have cut it
        if last is not None and last.is_free and last.size == there:
            pool = self._pools[kind]
            del pool[bisect_left(pool, (last.size, last.segment, last.offset))]
            last.size += grown
            return last
        if there:  # its pages are gone
            self._reserve(-(-size // page) * page - grown)
        offset = 0 if last is None else last.offset + last.size
        block = Block(0, offset, max(grown, -(-size // page) * page), kind)
        if last is not None and not last.is_free:
            last.after, block.before = block, last
        self._last[kind] = block
        return block

    def _unmap(self, block: Block, kind: tuple[int, bool]) -> _Pool:
        """Give back the whole pages of a free block; return what is left of it, as entries of its pool."""
        page = SMALL_SEGMENT_BYTES if kind[1] else LARGE_SEGMENT_BYTES
        start, end = -(-block.offset // page) * page, (block.offset + block.size) // page * page
        if end <= start:
            return [block.key]
        self.reserved_bytes -= end - start
        left: _Pool = []
        head, tail = start - block.offset, block.offset + block.size - end
        after, before = block.after, block.before
        for size, offset in ((head, block.offset), (tail, end)):
            if size:
                piece = Block(block.segment, offset, size, kind)
                if offset == end:
                    piece.after = after
                else:
                    piece.before = before
                left.append(piece.key)
        if before is not None:
            before.after = left[0][3] if head else None
        if after is not None:
            after.before = left[-1][3] if tail else None
        if self._last.get(kind) is block:
            # A range without a last block begins again after the gap.
            end_block = Block(block.segment, block.offset + block.size, 0, kind)
            end_block.is_free = False
            self._last[kind] = left[-1][3] if tail else end_block
        return left


def allocator_options(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the options of torch's allocators in the environment (c10/core/AllocatorConfig.h).

    ``variables``: those of a row, which its ranks set on top of the environment (``worker/measure.py``).
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    text = (variables or {}).get(names[1]) or next(filter(None, map(os.environ.get, names)), "")
    return dict(each.partition(":")[::2] for each in text.replace(" ", "").split(","))


def largest_rounded_bytes() -> float:
    """Return the largest size of a pinned buffer that is still rounded up; infinite unless a variable limits it."""
    limit = allocator_options().get("pinned_max_round_threshold_mb", "")
    return int(limit) * 2**20 if limit.isdecimal() else math.inf
