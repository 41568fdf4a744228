"""The largest size at which training survives every time, found with few trainings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

AGREEING = 5
"""Trainings, each in a fresh process, that must all survive."""

RESOLUTION = 0.02
"""Share of the size at which bisection stops."""

FIRST_SIZE = 32


def largest_surviving(outcomes: Callable[[int, int], list[bool]], *, known: Mapping[int, list[bool]]) -> int | None:
    """Bracket, bisect with single trainings, then require five of five and step down where one fails.

    One failure is enough to go below a size; one survival is not enough to stay.

    Args:
        outcomes: (size, count) -> whether training survived in each of at least ``count`` fresh processes.
        known: size -> outcomes that are known already.

    Returns:
        The size in samples; ``None`` if none survives five of five.
    """

    def survives(size: int, count: int = 1) -> bool:
        return all(all(outcomes(size, number)) for number in range(1, count + 1))

    above = min((size for size, each in known.items() if not all(each)), default=math.inf)
    start = max((size for size in known if size < above), default=max(1, min(FIRST_SIZE, round(min(above, 64) / 1.5))))
    size = largest_that(survives, start, above=above)
    while size > 0 and not survives(size, AGREEING):
        size -= max(1, int(RESOLUTION * size))
    return size or None


def largest_that(passes: Callable[[int], bool], start: int, *, above: float = math.inf, growth: float = 1.5) -> int:
    """The largest size that passes, bracketed from ``start`` and bisected; 0 if none does.

    Args:
        passes: whether a size passes.
        start: the first size.
        above: a size that is known to fail.
        growth: factor between sizes until one passes and one does not.
    """
    below, size = 0, start
    while above - below > max(1, int(RESOLUTION * below)):
        if passes(size):
            below = size
        else:
            above = size
        if above == math.inf:
            size = max(size + 1, round(size * growth))
        else:
            size = (below + int(above)) // 2 if below else max(1, int(size / growth))
    return below
