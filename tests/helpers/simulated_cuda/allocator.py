"""A model of PyTorch's CUDA caching allocator: one device, one stream, no CUDA graphs.

Source: c10/core/AllocatorConfig.h (torch 2.13) for the sizes; c10/cuda/CUDACachingAllocator.cpp:
``malloc``, ``get_free_block``, ``should_split``, ``alloc_block``, ``release_blocks``, ``map_block``
and ``unmap_block``.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from itertools import pairwise
from typing import NamedTuple

import torch

MIB = 2**20
# In torch these constants are kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc
# and kRoundLarge.
BLOCK = 512
SMALL = MIB
SMALL_PAGE = 2 * MIB
LARGE_PAGE = 20 * MIB
MIN_LARGE = 10 * MIB
ROUND_LARGE = 2 * MIB


class Block(NamedTuple):
    address: int
    size: int
    requested: int
    pool: Pool


class Pool:
    """Free ranges; neighbours are merged."""

    def __init__(self, page: int, min_remainder: int) -> None:
        self.page = page
        self.min_remainder = min_remainder
        # The size of each segment by its address. Expandable segments are not in it.
        self.segments: dict[int, int] = {}
        # The end of each block by its address.
        self.used: dict[int, int] = {}
        # The size of each free range by its address.
        self.sizes: dict[int, int] = {}
        # The address of each free range by its end.
        self.ends: dict[int, int] = {}
        # The size and the address of each free range, smallest size first.
        self.sorted: list[tuple[int, int]] = []

    def add(self, address: int, size: int) -> None:
        if address in self.ends:
            address = self.ends[address]
            size += self.remove(address)
        if address + size in self.sizes:
            size += self.remove(address + size)
        self.sizes[address] = size
        self.ends[address + size] = address
        insort(self.sorted, (size, address))

    def remove(self, address: int) -> int:
        size = self.sizes.pop(address)
        del self.ends[address + size]
        del self.sorted[bisect_left(self.sorted, (size, address))]
        return size

    def take(self, address: int, needed: int) -> int:
        """Use a free range, or the first ``needed`` bytes of it; returns the size of the block."""
        size = self.remove(address)
        remainder = size - needed
        if remainder >= self.min_remainder:
            # Both neighbours of the remainder are used, so that nothing is merged.
            self.sizes[address + needed] = remainder
            self.ends[address + size] = address + needed
            insort(self.sorted, (remainder, address + needed))
            size = needed
        self.used[address] = address + size
        return size

    def room(self, address: int) -> float:
        """Size that a free range can grow to."""
        starts = (start for start in (*self.used, *self.sizes) if start > address)
        return min(starts, default=math.inf) - address


class CachingAllocator:
    """The allocator of one process.

    ``limit_bytes`` is the memory fraction in bytes, and may be changed at any time.
    """

    def __init__(
        self, capacity_bytes: int, *, limit_bytes: int | None = None, expandable: bool = False
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable = expandable
        self.limit_bytes = capacity_bytes if limit_bytes is None else limit_bytes
        self.small = Pool(SMALL_PAGE, BLOCK)
        self.large = Pool(LARGE_PAGE, BLOCK if expandable else SMALL + 1)
        self.allocated = self.reserved = self.requested = self.next_address = 0
        self.num_alloc_retries = self.num_ooms = self.num_device_free = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        self.allocated_peak = self.allocated
        self.reserved_peak = self.reserved
        self.requested_peak = self.requested

    def malloc(self, requested: int) -> Block:
        """Allocate ``requested`` > 0 bytes; raise ``torch.OutOfMemoryError`` as torch does."""
        needed = -(-requested // BLOCK) * BLOCK
        pool = self.small if needed <= SMALL else self.large
        index = bisect_left(pool.sorted, (needed, 0))
        if index < len(pool.sorted):
            address = pool.sorted[index][1]
            if self.expandable:
                # Expandable ranges are compared by the size that they can grow to.
                for _, other in pool.sorted[index + 1 :]:
                    if pool.room(other) >= pool.room(address):
                        break
                    address = other
        else:
            address = self._grow(pool, needed)
        size = pool.take(address, needed)
        self.allocated += size
        self.requested += requested
        if self.allocated > self.allocated_peak:
            self.allocated_peak = self.allocated
        if self.requested > self.requested_peak:
            self.requested_peak = self.requested
        return Block(address, size, requested, pool)

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        self.requested -= block.requested
        del block.pool.used[block.address]
        block.pool.add(block.address, block.size)

    def release_cached(self) -> None:
        """Return free segments, or free pages of expandable segments, to the driver."""
        for pool in (self.large, self.small):
            for address, size in list(pool.sizes.items()):
                end = address + size
                if self.expandable:
                    first = math.ceil(address / pool.page) * pool.page
                    last = end // pool.page * pool.page
                else:
                    is_segment = pool.segments.get(address) == size
                    first = address if is_segment else end
                    last = end
                if first < last:
                    pool.remove(address)
                    pool.segments.pop(address, None)
                    for start, stop in ((address, first), (last, end)):
                        if start < stop:
                            pool.add(start, stop - start)
                    self.reserved -= last - first
                    self.num_device_free += 1

    def _grow(self, pool: Pool, needed: int) -> int:
        unrounded = needed if needed >= MIN_LARGE else pool.page
        segment = math.ceil(unrounded / ROUND_LARGE) * ROUND_LARGE
        for retry in (False, True):
            if retry:
                self.release_cached()
                self.num_alloc_retries += 1
            # The limit counts the whole segment, even where some of its pages are mapped.
            if self.reserved + segment > self.limit_bytes:
                continue
            if self.expandable:
                address, added = _missing_pages(pool, needed)
            else:
                address = self.next_address
                added = {address: segment}
            if self.reserved + sum(added.values()) > self.capacity_bytes:
                continue
            if not self.expandable:
                pool.segments[address] = segment
                # The gap keeps free ranges of two segments from merging.
                self.next_address += segment + BLOCK
            for start, size in added.items():
                pool.add(start, size)
                self.reserved += size
            self.reserved_peak = max(self.reserved_peak, self.reserved)
            return address
        self.num_ooms += 1
        sizes = (needed, self.allocated, self.reserved, self.limit_bytes)
        texts = (f"{size / MIB:.2f} MiB" for size in sizes)
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried {}: {} allocated, {} reserved, limit {}".format(*texts)
        )


def _missing_pages(pool: Pool, needed: int) -> tuple[int, dict[int, int]]:
    """The lowest gap between blocks that is large enough, and its pages that are not mapped."""
    edges = [(0, 0), *sorted(pool.used.items()), (math.inf, math.inf)]
    gap = next(int(end) for (_, end), (start, _) in pairwise(edges) if start - end >= needed)
    cursor = gap
    missing = {}
    while cursor < gap + needed:
        if cursor not in pool.sizes:
            missing[cursor] = pool.page
        cursor += pool.sizes.get(cursor, pool.page)
    return gap, missing
