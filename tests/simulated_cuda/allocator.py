"""A model of PyTorch's CUDA caching allocator: one device, one stream, no CUDA graphs.

Source: c10/core/AllocatorConfig.h (torch 2.13) for the sizes, and ``malloc``, ``get_free_block``, ``should_split``,
``alloc_block``, ``release_blocks``, ``map_block`` and ``unmap_block`` in c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import torch

MIB = 2**20
MIN_BLOCK_SIZE = 512  # kMinBlockSize
SMALL_SIZE = MIB  # kSmallSize: the largest request of the small pool
SMALL_BUFFER = 2 * MIB  # kSmallBuffer
LARGE_BUFFER = 20 * MIB  # large_segment_size
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc
ROUND_LARGE = 2 * MIB  # kRoundLarge
_SHIFT = 48  # a key is size * 2**48 + address, so that keys sort by size and then by address


class Block:
    """A range of one segment: allocated, free, or (expandable segments only) not mapped."""

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "previous", "requested", "size")

    def __init__(self, address: int, size: int, pool: Pool, previous: Block | None, following: Block | None) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.previous, self.next = previous, following
        self.allocated, self.mapped, self.requested = False, True, 0
        if previous is not None:
            previous.next = self
        if following is not None:
            following.previous = self


class Pool:
    """Free blocks sorted by size and address. With expandable segments also one segment without end."""

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.small = small
        self.page = SMALL_BUFFER if small else LARGE_BUFFER
        self.min_remainder = MIN_BLOCK_SIZE if small or expandable else SMALL_SIZE + 1  # should_split
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []  # sorted by address
        if expandable:
            tail = Block((1 << 46) // LARGE_BUFFER * LARGE_BUFFER if small else 0, 1 << 45, self, None, None)
            tail.mapped = False
            self.unmapped.append(tail)

    def add(self, block: Block) -> None:
        if block.mapped:
            key = (block.size << _SHIFT) + block.address
            insort(self.keys, key)
            self.blocks[key] = block
        else:
            insort(self.unmapped, block, key=lambda each: each.address)

    def remove(self, block: Block) -> None:
        if block.mapped:
            key = (block.size << _SHIFT) + block.address
            del self.keys[bisect_left(self.keys, key)]
            del self.blocks[key]
        else:
            self.unmapped.remove(block)


class CachingAllocator:
    """The allocator of one process.

    Args:
        capacity_bytes: what the driver can give to this process.
        limit_bytes: the per-process memory fraction, in bytes; may be changed at any time.
        expandable: whether ``expandable_segments:True`` is set.
    """

    def __init__(self, capacity_bytes: int, *, limit_bytes: int | None = None, expandable: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.limit_bytes = capacity_bytes if limit_bytes is None else limit_bytes
        self.expandable = expandable
        self.small = Pool(small=True, expandable=expandable)
        self.large = Pool(small=False, expandable=expandable)
        self.allocated = self.reserved = self.requested = 0
        self.num_alloc_retries = self.num_ooms = self.num_device_alloc = self.num_device_free = 0
        self._next_address = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        self.allocated_peak, self.reserved_peak, self.requested_peak = self.allocated, self.reserved, self.requested

    def malloc(self, requested: int) -> Block:
        """Allocate ``requested`` > 0 bytes; raise ``torch.OutOfMemoryError`` as torch does."""
        size = (requested + MIN_BLOCK_SIZE - 1) & -MIN_BLOCK_SIZE
        pool = self.small if size <= SMALL_SIZE else self.large
        keys = pool.keys
        index = bisect_left(keys, size << _SHIFT)
        if index < len(keys):
            if self.expandable:
                index = self._best_fit(pool, index)
            block = pool.blocks.pop(keys.pop(index))
        else:
            block = self._grow(pool, size)
        remainder = block.size - size
        if remainder >= pool.min_remainder:
            block.size = size
            rest = Block(block.address + size, remainder, pool, block, block.next)
            key = (remainder << _SHIFT) + rest.address
            insort(keys, key)
            pool.blocks[key] = rest
        block.allocated = True
        block.requested = requested
        self.allocated += block.size
        self.requested += requested
        if self.allocated > self.allocated_peak:
            self.allocated_peak = self.allocated
        if self.requested > self.requested_peak:
            self.requested_peak = self.requested
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        self.requested -= block.requested
        block.allocated = False
        block = _merged(block)
        key = (block.size << _SHIFT) + block.address
        insort(block.pool.keys, key)
        block.pool.blocks[key] = block

    def empty_cache(self) -> None:
        """Return free segments, or free pages of expandable segments, to the driver."""
        for pool in (self.large, self.small):
            for block in list(pool.blocks.values()):
                if self.expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size
                    self.num_device_free += 1

    def _grow(self, pool: Pool, size: int) -> Block:
        segment = size if size >= MIN_LARGE_ALLOC else pool.page
        segment = -(-segment // ROUND_LARGE) * ROUND_LARGE
        for retry in (False, True):
            if retry:
                self.empty_cache()
                self.num_alloc_retries += 1
            # Before it is known how many pages of an expandable segment are missing.
            if self.reserved + segment > self.limit_bytes:
                continue
            if self.expandable:
                block = self._map_range(pool, size)
                if block is not None:
                    return block
            elif self._reserve(segment):
                self._next_address += segment
                return Block(self._next_address - segment, segment, pool, None, None)
        self.num_ooms += 1
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB: {self.allocated / MIB:.2f} MiB allocated, "
            f"{self.reserved / MIB:.2f} MiB reserved, limit {self.limit_bytes / MIB:.2f} MiB (simulated)."
        )

    def _reserve(self, size: int) -> bool:
        if self.reserved + size > self.capacity_bytes:
            return False
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        self.num_device_alloc += 1
        return True

    @staticmethod
    def _best_fit(pool: Pool, index: int) -> int:
        """Compare free blocks by the size that they can grow to."""

        def room(position: int) -> int:
            block = pool.blocks[pool.keys[position]]
            return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)

        while index + 1 < len(pool.keys) and room(index + 1) < room(index):
            index += 1
        return index

    def _map_range(self, pool: Pool, size: int) -> Block | None:
        for block in pool.unmapped:  # the lowest address with enough free or unmapped space behind it
            start = block.previous if block.previous is not None and not block.previous.allocated else block
            space, cursor = 0, start
            while cursor is not None and not cursor.allocated and space < size:
                space, cursor = space + cursor.size, cursor.next
            if space >= size:
                break
        block = start
        if not block.mapped and (block := self._map(block, size)) is None:
            return None
        while block.size < size:
            assert block.next is not None
            if (block := self._map(block.next, size - block.size)) is None:
                return None
        pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Map the first ``size`` bytes of an unmapped block, in whole pages."""
        pool = block.pool
        size = -(-min(size, block.size) // pool.page) * pool.page
        if not self._reserve(size):
            return None
        pool.remove(block)
        if size < block.size:
            rest = Block(block.address + size, block.size - size, pool, block, block.next)
            rest.mapped = False
            pool.add(rest)
            block.size = size
        block.mapped = True
        block = _merged(block)
        pool.add(block)
        return block

    def _unmap(self, block: Block) -> None:
        pool, page, end = block.pool, block.pool.page, block.address + block.size
        first, last = -(-block.address // page) * page, end // page * page
        if first >= last:
            return
        pool.remove(block)
        if first > block.address:
            pool.add(Block(block.address, first - block.address, pool, block.previous, block))
        if end > last:
            pool.add(Block(last, end - last, pool, block, block.next))
        block.address, block.size, block.mapped = first, last - first, False
        pool.add(_merged(block))
        self.reserved -= last - first
        self.num_device_free += 1


def _merged(block: Block) -> Block:
    """Merge ``block``, in no list, with free neighbours of its kind; return the block to insert."""
    before, after = block.previous, block.next
    if before is not None and not before.allocated and before.mapped == block.mapped:
        block.pool.remove(before)
        before.size += block.size
        before.next = after
        if after is not None:
            after.previous = before
        block = before
    if after is not None and not after.allocated and after.mapped == block.mapped:
        block.pool.remove(after)
        block.size += after.size
        block.next = after.next
        if after.next is not None:
            after.next.previous = block
    return block
