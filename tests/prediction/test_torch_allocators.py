"""The simulated caching allocator, by sequences worked by hand from torch's rules; sizes in MiB."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.prediction.torch_allocators import Block, CachingAllocator, OutOfMemoryError

MIB = 2**20


def allocate(allocator: CachingAllocator, mib: float, stream: int = 0) -> Block:
    return allocator.allocate(int(mib * MIB), stream)


def test_segments_have_the_sizes_of_torch() -> None:
    """2 MiB for blocks up to 1 MiB, 20 MiB below 10 MiB, else multiples of 2 MiB; blocks are multiples of 512 bytes."""
    reserved = {}
    for mib in (1 / MIB, 1, 1.0001, 9.9, 10, 10.1):
        allocator = CachingAllocator()
        allocate(allocator, mib)
        reserved[mib] = allocator.reserved_bytes / MIB
    assert reserved == {1 / MIB: 2, 1: 2, 1.0001: 20, 9.9: 20, 10: 10, 10.1: 12}
    allocator = CachingAllocator()
    for size, allocated in ((1, 512), (512, 1024), (513, 2048)):
        allocator.allocate(size)
        assert allocator.allocated_bytes == allocated


def test_the_best_fitting_free_block_is_split_and_merged_again() -> None:
    allocator = CachingAllocator()
    first, second, _wall = allocate(allocator, 30), allocate(allocator, 14), allocate(allocator, 10)
    allocator.free(first)
    allocator.free(second)
    fitting = allocate(allocator, 12)  # of 14, not of 30: 2 are left
    assert (fitting.segment, allocator.reserved_bytes / MIB) == (second.segment, 54)
    left = allocate(allocator, 2)
    assert left.segment == second.segment
    allocator.free(left)
    allocator.free(fitting)
    assert allocate(allocator, 14).segment == second.segment
    assert allocator.reserved_bytes / MIB == 54


def test_a_large_block_is_not_split_for_a_rest_of_one_mib() -> None:
    allocator = CachingAllocator()
    for mib, allocated in ((11, 12), (10.9, 10.9)):  # 1 and 1.1 MiB of the segment are left
        block = allocate(allocator, mib)
        assert allocator.allocated_bytes / MIB == pytest.approx(allocated, abs=0.001)
        allocator.free(block)


def test_streams_and_small_blocks_do_not_share_free_memory() -> None:
    allocator = CachingAllocator()
    allocator.free(allocate(allocator, 40))
    allocate(allocator, 0.5)
    assert allocator.reserved_bytes / MIB == 42
    allocate(allocator, 40, stream=1)
    assert allocator.reserved_bytes / MIB == 82


def test_whole_free_segments_are_given_back_before_memory_runs_out() -> None:
    allocator = CachingAllocator(100 * MIB)
    shared = [allocate(allocator, 5), allocate(allocator, 5)]
    allocator.free(shared[0])  # half of a segment of 20 that is in use
    allocator.free(allocate(allocator, 70))
    allocate(allocator, 80)
    assert (allocator.retries, allocator.reserved_bytes / MIB) == (1, 100)
    with pytest.raises(OutOfMemoryError):
        allocate(allocator, 16)
    assert allocator.peak_reserved_bytes == 100 * MIB


def test_a_block_that_another_stream_uses_cannot_be_taken_again_until_that_is_done() -> None:
    allocator = CachingAllocator(70 * MIB)
    allocator.free(allocate(allocator, 30), is_pending=True)
    assert allocator.allocated_bytes == 0
    allocate(allocator, 30)
    assert allocator.reserved_bytes / MIB == 60
    allocator.finish_pending()
    allocate(allocator, 30)
    assert (allocator.reserved_bytes / MIB, allocator.retries) == (60, 0)
    allocator = CachingAllocator(50 * MIB)
    allocator.free(allocate(allocator, 30), is_pending=True)
    allocate(allocator, 40)  # memory pressure waits for it
    assert allocator.retries == 1


def test_expandable_segments_grow_by_pages_and_use_what_is_free_at_their_end() -> None:
    allocator = CachingAllocator(200 * MIB, expandable_segments=True)
    first, second = allocate(allocator, 30), allocate(allocator, 30)
    assert allocator.reserved_bytes / MIB == 60  # pages of 20
    allocator.free(first)
    allocate(allocator, 10)  # in the first 30
    allocate(allocator, 25)  # 20 are left there: two pages at the end
    assert allocator.reserved_bytes / MIB == 100
    allocator.free(second)
    allocator.empty_cache()  # of what is free from 10 to 60 two pages, and none of 85 to 100
    assert allocator.reserved_bytes / MIB == 60
    allocate(allocator, 35)  # 15 are left at the end: one page
    assert allocator.reserved_bytes / MIB == 80


@given(st.lists(st.tuples(st.integers(1, 60 * MIB), st.integers(0, 2), st.booleans()), max_size=60), st.booleans())
def test_what_is_allocated_is_reserved_and_goes_back_in_the_end(
    requests: list[tuple[int, int, bool]], expandable: bool
) -> None:
    allocator, live = CachingAllocator(expandable_segments=expandable), list[Block]()
    for size, stream, is_freed in requests:
        live.append(allocator.allocate(size, stream))
        assert live[-1].size >= size
        assert allocator.allocated_bytes == sum(block.size for block in live) <= allocator.reserved_bytes
        if is_freed:
            allocator.free(live.pop(len(live) // 2))
        if size % 7 == 0:
            allocator.empty_cache()
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@pytest.mark.gpu
def test_the_rules_are_those_of_the_installed_torch() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.cuda.empty_cache()
    allocator, start = CachingAllocator(), torch.cuda.memory_reserved()
    live: list[tuple[Block, object]] = []
    for mib in (0.3, 5, 3, 12, 9.9, 10.1, 30, 2, 1.5, 11, 25):
        live.append((allocate(allocator, mib), torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda")))
        if len(live) > 4:
            block, _ = live.pop(1)
            allocator.free(block)
        assert torch.cuda.memory_reserved() - start == allocator.reserved_bytes
