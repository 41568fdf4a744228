"""Batch sizes that the limits of a search allow."""

from __future__ import annotations

from collections.abc import Callable

from lightning_batchmem.plan.records import SearchLimits
from lightning_batchmem.plan.scaling import micro_batches


def size_range(limits: SearchLimits) -> tuple[int, int]:
    """Smallest and largest size that the rounding allows; the first is the larger one when there is none."""
    lowest = rounded(max(1, limits.min_batch_size), limits, up=True)
    highest = rounded(limits.max_batch_size, limits)
    if limits.multiple_of is None and limits.target_batch_size is None:  # a cap of 100 is allowed as it is
        highest = limits.max_batch_size
    return lowest, max(0, highest)


def rounded(size: int, limits: SearchLimits, up: bool = False) -> int:
    """Round down (or up) to an allowed size; :class:`.SearchLimits` explains ``multiple_of`` and the target."""
    if limits.target_batch_size is not None:
        allowed = micro_batches(limits.target_batch_size, limits.ranks, limits.multiple_of)
        if up:
            return next((micro for micro in reversed(allowed) if micro >= size), max([size, *allowed]) + 1)
        return next((micro for micro in allowed if micro <= size), 0)
    step = limits.multiple_of or 2 ** max(0, (size // 64).bit_length() - 1)
    return -(-size // step) * step if up else size // step * step


def largest_where(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest size from ``low`` to ``high`` that fits, by bisection; ``low`` where none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
