"""The rules of c10/cuda/CUDACachingAllocator.cpp, one by one and in random sequences."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.simulated_cuda.allocator import MIB, CachingAllocator


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        # 1 MiB is not split from a block of the large pool.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_sizes_of_one_allocation(requested, allocated, reserved):
    allocator = CachingAllocator(100 * MIB)
    allocator.malloc(requested)
    assert allocator.requested == requested
    assert allocator.allocated == allocated
    assert allocator.reserved == reserved


def test_smallest_sufficient_free_block_of_the_pool_is_used_and_split():
    allocator = CachingAllocator(100 * MIB)
    for block in [allocator.malloc(size * MIB) for size in (30, 12, 16)]:
        allocator.free(block)
    assert allocator.malloc(11 * MIB).size == 12 * MIB
    assert allocator.malloc(13 * MIB).size == 13 * MIB
    assert sorted(allocator.large.sizes.values()) == [3 * MIB, 30 * MIB]
    # A small request never uses the large pool.
    allocator.malloc(MIB)
    assert allocator.reserved == 60 * MIB


def test_free_neighbours_merge_and_only_whole_segments_are_released():
    allocator = CachingAllocator(100 * MIB)
    first, second, third = (allocator.malloc(4 * MIB) for _ in range(3))
    for block in (first, third):
        allocator.free(block)
    allocator.release_cached()
    assert sorted(allocator.large.sizes.values()) == [4 * MIB, 12 * MIB]
    allocator.free(second)
    assert list(allocator.large.sizes.values()) == [20 * MIB]
    allocator.release_cached()
    assert (allocator.reserved, allocator.num_device_free) == (0, 1)


@pytest.mark.parametrize(("capacity", "limit"), [(40 * MIB, None), (100 * MIB, 40 * MIB)])
def test_cached_segments_are_released_before_an_allocation_fails(capacity, limit):
    allocator = CachingAllocator(capacity, limit_bytes=limit)
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(30 * MIB)
    assert (allocator.reserved, allocator.num_alloc_retries, allocator.num_ooms) == (30 * MIB, 1, 0)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        allocator.malloc(11 * MIB)
    assert (allocator.reserved, allocator.num_alloc_retries, allocator.num_ooms) == (30 * MIB, 2, 1)


def test_expandable_segments_grow_by_pages():
    allocator = CachingAllocator(200 * MIB, expandable=True)
    first, second, third = (allocator.malloc(size * MIB) for size in (25, 10, 10))
    # Three pages of 20 MiB hold 45 MiB.
    assert (allocator.reserved, third.address) == (60 * MIB, 35 * MIB)
    allocator.free(first)
    allocator.free(third)
    # Each free range, 0 to 25 MiB and 35 to 60 MiB, has one whole page.
    allocator.release_cached()
    assert (allocator.reserved, second.address) == (20 * MIB, 25 * MIB)
    # The lowest gap is used: its page from 0 to 20 MiB is mapped again.
    assert allocator.malloc(15 * MIB).address == 0
    # 35 to 40 MiB were mapped, and the other 25 MiB take two pages.
    assert allocator.malloc(30 * MIB).address == 35 * MIB
    assert allocator.reserved == 80 * MIB


def test_expandable_segments_check_the_limit_against_the_whole_request():
    allocator = CachingAllocator(100 * MIB, limit_bytes=60 * MIB, expandable=True)
    allocator.malloc(25 * MIB)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        # One page of 20 MiB is missing, but 40 + 22 MiB exceed the limit.
        allocator.malloc(22 * MIB)
    allocator.malloc(20 * MIB)
    assert allocator.reserved == 60 * MIB


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30 * MIB), st.integers(0, 3)), min_size=1, max_size=60),
    st.booleans(),
)
def test_bytes_are_conserved(requests, expandable):
    allocator = CachingAllocator(120 * MIB, limit_bytes=100 * MIB, expandable=expandable)
    live = []
    for size, num_freed in requests:
        try:
            live.append(allocator.malloc(size))
        except torch.cuda.OutOfMemoryError:
            assert allocator.reserved + size > 60 * MIB
        for _ in range(min(num_freed, len(live))):
            allocator.free(live.pop(size % len(live)))
        pools = (allocator.small, allocator.large)
        free_bytes = sum(size for pool in pools for size in pool.sizes.values())
        live_bytes = sum(block.size for block in live)
        assert allocator.requested == sum(block.requested for block in live) <= allocator.allocated
        assert allocator.allocated == live_bytes == allocator.reserved - free_bytes
        # The limit of expandable segments counts requests, and pages may exceed it.
        assert allocator.reserved <= (120 if expandable else 100) * MIB
        large = [block for block in live if block.pool is allocator.large]
        spans = sorted((block.address, block.size) for block in large)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
    for block in live:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (0, 0, 0)
