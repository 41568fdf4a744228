"""The largest size at which training survives every time, found with few trainings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

AGREEING = 5
"""Trainings, each in a fresh process, that must all survive."""

RESOLUTION = 0.02
"""Share of the size at which bisection stops."""

GROWTH = 1.5
"""Factor between sizes until one survives and one does not."""

FIRST_SIZE = 32


def largest_surviving(
    outcomes: Callable[[int, int], list[bool]], *, known: Mapping[int, list[bool]], largest: int
) -> int | None:
    """Bracket, bisect with single trainings, then require five of five and step down where one fails.

    One failure is enough to go below a size; one survival is not enough to stay.

    Args:
        outcomes: (size, count) -> whether training survived in each of at least ``count`` fresh processes.
        known: size -> outcomes that are known already.
        largest: the largest size to try, in samples.

    Returns:
        The size in samples; ``None`` if none survives five of five.
    """
    seen = dict(known)

    def survives(size: int, count: int = 1) -> bool:
        for number in range(1, count + 1):
            seen[size] = outcomes(size, number)
            if not all(seen[size]):
                return False
        return True

    below, above = 0, min([size for size, each in seen.items() if not all(each)] + [largest + 1])
    size = max([size for size in seen if size < above], default=max(1, min(FIRST_SIZE, round(above / GROWTH))))
    while below < size < above:
        if survives(size):
            below = size
            size = min(largest, max(size + 1, round(size * GROWTH))) if above > largest else below
        else:
            above = size
            size = max(1, round(size / GROWTH)) if below == 0 and size > 1 else below
    while above - below > max(1, int(RESOLUTION * below)):
        middle = (below + above) // 2
        below, above = (middle, above) if survives(middle) else (below, middle)
    while below > 0 and not survives(below, AGREEING):
        below -= max(1, int(RESOLUTION * below))
    return below or None
