"""Allowed batch sizes, and the micro batches of an optimizer step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from lightning_batchmem.plan.limits import SearchLimits


def micro_batch(
    target_batch_size: int, *, largest: int, ranks: int = 1, multiple_of: int | None = None
) -> tuple[int, int]:
    """Divide ``target_batch_size`` into micro batches of at most ``largest`` samples per rank.

    Up to twice as many micro batches as needed are accepted where they make exactly the target.
    Otherwise: as few as possible, of the size nearest to the target.
    """
    unit = multiple_of or 1
    fewest = math.ceil(target_batch_size / (ranks * (largest // unit * unit)))
    accumulate = fewest
    if target_batch_size % (ranks * unit) == 0:
        exact = _divisors(target_batch_size // (ranks * unit))
        smallest_exact = exact[bisect_left(exact, fewest)]
        if smallest_exact <= 2 * fewest:
            accumulate = smallest_exact
    # The size is rounded to the nearest unit, and half a unit up. It is never above `largest`,
    # because the share at `fewest` micro batches is at most the largest multiple.
    step_unit = accumulate * ranks * unit
    batch_size = unit * ((2 * target_batch_size + step_unit) // (2 * step_unit))
    return batch_size, accumulate


@cache
def _divisors(number: int) -> list[int]:
    """All divisors, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


@cache
def micro_batches(target_batch_size: int, ranks: int, multiple_of: int | None) -> dict[int, int]:
    """Every size that divides the target exactly or nearly so, largest first, and its batches."""
    found: dict[int, int] = {}
    largest = target_batch_size // ranks
    while largest >= (multiple_of or 1):
        size, found[size] = micro_batch(
            target_batch_size, largest=largest, ranks=ranks, multiple_of=multiple_of
        )
        largest = size - 1
    return found


def accumulated_batches(batch_size: int, limits: SearchLimits) -> int:
    """Batches to an optimizer step in a training at ``batch_size`` samples."""
    target = limits.step.kept_samples
    if target is None:
        return limits.step.accumulate_grad_batches
    micro = micro_batches(target, limits.step.ranks, limits.options.multiple_of)
    return micro[batch_size]


def size_range(limits: SearchLimits) -> tuple[int, int]:
    """Smallest and largest size that the rounding allows.

    The range is empty (first > second) if no size is allowed.
    """
    lowest = _nearest(max(1, limits.min_batch_size), limits, up=True)
    highest = rounded(limits.max_batch_size, limits)
    # The default rounding does not apply to the maximum: a cap of 100 is allowed as it is.
    options = limits.options
    if options.multiple_of is None and limits.step.kept_samples is None:
        highest = limits.max_batch_size
        while highest in limits.avoided_sizes and highest > lowest:
            highest -= 1
    return lowest, max(0, highest)


def is_allowed(size: int, limits: SearchLimits) -> bool:
    """Whether a training may have this size; the default rounding forbids none."""
    most = min(size, limits.max_batch_size)
    return size == size_range(replace(limits, max_batch_size=most))[1]


def rounded(size: int, limits: SearchLimits, up: bool = False) -> int:
    """Round down (or up) to an allowed size.

    :class:`.BatchFinder` explains ``multiple_of`` and ``target_batch_size``, and
    :class:`.SearchLimits` the ``avoided_sizes``.
    """
    nearest = _nearest(size, limits, up)
    other = nearest
    while other in limits.avoided_sizes:
        other = _nearest(other + 1 if up else other - 1, limits, up)
    return nearest if other < limits.min_batch_size else other


def _nearest(size: int, limits: SearchLimits, up: bool) -> int:
    """The same if no size is avoided."""
    options = limits.options
    if limits.step.kept_samples is not None:
        allowed = micro_batches(limits.step.kept_samples, limits.step.ranks, options.multiple_of)
        if up:
            return next(
                (micro for micro in reversed(allowed) if micro >= size), max([size, *allowed]) + 1
            )
        return next((micro for micro in allowed if micro <= size), 0)
    step = options.multiple_of or 2 ** max(0, (size // 64).bit_length() - 1)
    return -(-size // step) * step if up else size // step * step


def largest_where(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest size from ``low`` to ``high`` that fits, or ``low``, by bisection."""
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda size: not fits(size))
